// SPDX-License-Identifier: Apache-2.0
// A picture while it is drawn: its previews, the view that shows one of them, and a file of all.

import { scriptSafeJson } from "./export.js";

/** Pictures up to this width are shown with large pixels. */
const SMALL_PX = 256;

/** Bytes of a base64 text. */
function bytesOf(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

/** The pictures of one request, in order; what `Player` plays. */
export class PictureRecording {
  constructor(prompt, numSteps) {
    this.prompt = prompt;
    this.numSteps = numSteps;
    this.frames = [];
    this.facts = {};
    this.meta = { isGrowing: true };
    this.start = performance.now();
  }

  get length() {
    return this.frames.length;
  }

  /** Milliseconds since the request. */
  get clock() {
    return performance.now() - this.start;
  }

  /** Adds the picture after `step` steps. */
  add(step, base64) {
    const blob = new Blob([bytesOf(base64)], { type: "image/png" });
    this.frames.push({ step, base64, blob, url: URL.createObjectURL(blob), t: this.clock });
  }

  stepNumber(index) {
    return this.frames[index]?.step ?? this.numSteps;
  }

  /** Whether the last picture is the result. */
  get isDone() {
    return "seed" in this.facts;
  }
}

/** Shows one picture of a recording. */
export class PictureView {
  constructor(picture, empty, caption) {
    this.picture = picture;
    this.empty = empty;
    this.caption = caption;
    picture.addEventListener("load", () => this.setSize(picture.naturalWidth));
  }

  setSize(width) {
    this.picture.dataset.size = width > SMALL_PX ? "large" : "small";
  }

  draw(recording, index) {
    const { picture } = this;
    const step = recording.stepNumber(index);
    picture.src = recording.frames[index].url;
    picture.alt = `${recording.prompt}, step ${step} of ${recording.numSteps}`;
    picture.dataset.step = String(step);
    picture.hidden = false;
    this.empty.hidden = true;
    this.describe(recording);
  }

  /** The line under the picture. */
  describe(recording) {
    const { seed, seconds, size } = recording.facts;
    const facts = recording.isDone ? [`seed ${seed}`, size, `drawn in ${seconds.toFixed(1)} s`] : ["drawing…"];
    this.caption.textContent = [recording.prompt, ...facts].join(" · ");
  }

  clear() {
    this.picture.hidden = true;
    this.empty.hidden = false;
    this.caption.textContent = "";
  }
}

const REPLAY_STYLE =
  "body{font:16px sans-serif;margin:2rem;text-align:center}" +
  "img{width:min(100%,32rem);image-rendering:pixelated}input{width:min(100%,32rem)}";
const REPLAY_SCRIPT = `
const frames = JSON.parse(document.getElementById("frames").textContent);
const slider = document.querySelector("input");
const show = () => {
  const frame = frames[slider.value];
  document.querySelector("img").src = "data:image/png;base64," + frame.base64;
  document.querySelector("output").textContent = "step " + frame.step;
};
slider.max = frames.length - 1;
slider.value = 0;
slider.addEventListener("input", show);
show();
`;

/** Text as it may stand in an element or in an attribute. */
function escaped(text) {
  const names = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  return String(text).replace(/[&<>"]/g, (char) => names[char]);
}

/** One HTML file that shows every step, without a server. */
export function replayPage(recording) {
  const policy = "default-src 'none'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'";
  const prompt = escaped(recording.prompt);
  const { seed, size } = recording.facts;
  const frames = recording.frames.map(({ step, base64 }) => ({ step, base64 }));
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="${policy}">
<title>${prompt} · Diffulex replay</title>
<style>${REPLAY_STYLE}</style>
</head>
<body>
<h1>${prompt}</h1>
<p><img alt="${prompt}"></p>
<p><input type="range" min="0" aria-label="Step"> <output></output></p>
<p>seed ${escaped(seed)} · ${escaped(size)}</p>
<script type="application/json" id="frames">${scriptSafeJson(frames)}</script>
<script>${REPLAY_SCRIPT}</script>
</body>
</html>
`;
}
