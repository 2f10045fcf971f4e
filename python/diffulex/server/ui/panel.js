// SPDX-License-Identifier: Apache-2.0
// The denoising panel: metric strip, timeline, block buffer, legend. Page and replay share it.

import { Player } from "./player.js";
import { BufferView, MASK_GLYPH, SPECIAL_GLYPH, element } from "./view.js";

/** Name, words, what reports call it, and what it means. */
const METRICS = [
  ["ttft", "First text after", "TTFT", "Time to the first committed text, seen from here."],
  ["nfe", "Forward passes", "NFE",
    "How often the model was run for this answer, the pass over the prompt included."],
  ["tokens", "Tokens", "", "Pieces of text in the answer; while it is written, those decided so far."],
  ["tpf", "Tokens per pass", "TPF",
    "Tokens divided by forward passes: above 1, several tokens are decided at the same time."],
  ["decode_tps", "Tokens/s, engine", "", "Tokens decided per second of decoding, by the engine's clock."],
  ["e2e_tps", "Tokens/s, overall", "", "Tokens per second since the question was sent, seen from here."],
  ["blocks", "Open blocks", "", "Blocks being denoised at the same time."],
  ["edits", "Edits", "", "Decided tokens that were overwritten later."],
];
const LEGEND = [
  ["masked", "", "masked", MASK_GLYPH],
  ["filled", "", "decided, may change"],
  ["filled", "new", "new in this step"],
  ["filled", "edit", "edited"],
  ["committed", "", "committed"],
  ["cut", "", "cut off"],
  ["committed", "", "no text, such as the end of the answer", SPECIAL_GLYPH],
];
const SPEEDS = [
  ["2", "2 steps/s"],
  ["5", "5 steps/s"],
  ["15", "15 steps/s"],
  ["60", "60 steps/s"],
  ["recorded", "as recorded"],
];

function button(text, label) {
  const node = element("button", "quiet", text);
  node.type = "button";
  node.setAttribute("aria-label", label);
  node.title = label;
  return node;
}

function buildMetrics(host) {
  const values = {};
  const list = element("dl", "metrics");
  for (const [name, label, short, meaning] of METRICS) {
    const tile = element("div", "metric");
    tile.title = meaning;
    values[name] = element("dd", "", "–");
    values[name].dataset.metric = name;
    const title = element("dt", "", label);
    if (short) title.append(" ", element("span", "short", short));
    tile.append(title, values[name]);
    list.append(tile);
  }
  host.append(list);
  return values;
}

/** The same in whole sentences: a finger has no pointer to rest on a number. */
function buildMeanings(host) {
  const box = element("details", "meanings");
  const list = element("dl");
  for (const [, label, short, meaning] of METRICS) {
    list.append(element("dt", "", short ? `${label} (${short})` : label), element("dd", "", meaning));
  }
  box.append(element("summary", "", "What the numbers mean"), list);
  host.append(box);
}

function buildCanvas(host) {
  const summary = element("p", "summary");
  summary.id = "buffer-summary";
  const canvas = element("div", "buffer");
  canvas.id = "buffer";
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "group");
  canvas.setAttribute("aria-label", "Block buffer, one cell per token. Arrow keys inspect tokens.");
  canvas.setAttribute("aria-describedby", summary.id);
  const detail = element("p", "detail");
  detail.setAttribute("aria-live", "polite");
  const note = element("p", "fill-note");
  host.append(summary, canvas, detail, note);
  return { summary, canvas, detail, note };
}

function buildLegend(host) {
  const list = element("ul", "legend");
  const cells = LEGEND.map(([state, change, name, text]) => {
    const item = element("li");
    const cell = element("span", "cell", text ?? "ab");
    cell.dataset.state = state;
    cell.dataset.change = change;
    cell.setAttribute("aria-hidden", "true");
    item.append(cell, name);
    list.append(item);
    return cell;
  });
  host.append(list);
  return cells[0];
}

function buildTimeline(host) {
  const bar = element("div", "timeline");
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", "Timeline");
  const first = button("⇤", "First step");
  const play = element("button", "small", "▶ Replay");
  play.type = "button";
  const last = button("⇥", "Last step");
  const live = element("button", "small", "Follow live");
  live.type = "button";
  const slider = element("input");
  Object.assign(slider, { type: "range", min: "0", max: "0", step: "1", value: "0" });
  slider.setAttribute("aria-label", "Step");
  const label = element("span", "step-label");
  const speed = element("select");
  speed.setAttribute("aria-label", "Speed of playing");
  for (const [value, name] of SPEEDS) speed.append(new Option(name, value, value === "5", value === "5"));
  bar.append(first, play, last, slider, label, speed, live);
  host.append(bar);
  return { first, play, last, live, slider, label, speed };
}

const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`);
const rate = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(1));

/** The numbers of the strip for frame `index`; undefined where nothing is known. */
export function metricsAt(recording, index) {
  const frame = recording.frames[index];
  const { usage, meta } = recording;
  const isEnd = frame === undefined || frame.end !== undefined;
  const state = frame && recording.stateAt(index);
  const decided = state ? state.counts.filled + state.counts.committed : undefined;
  const tokens = isEnd ? (usage?.completion_tokens ?? decided) : decided;
  const elapsed = isEnd ? (meta.endTime ?? frame?.t) : frame.t;
  const active = (frame?.blocks ?? state?.blocks)?.filter((block) => block.state === "active");
  const nfe = isEnd ? (usage?.nfe ?? frame?.nfe) : frame.nfe;
  return {
    ttft: meta.ttft === undefined || elapsed < meta.ttft ? undefined : seconds(meta.ttft / 1000),
    nfe: nfe?.toString(),
    tokens: tokens?.toString(),
    tpf: tokens && nfe ? (tokens / nfe).toFixed(2) : undefined,
    decode_tps: (isEnd && usage?.decode_tps) || frame?.tps
      ? rate((isEnd && usage?.decode_tps) || frame.tps) : undefined,
    e2e_tps: tokens && elapsed ? rate((tokens * 1000) / elapsed) : undefined,
    blocks: isEnd ? "0" : active?.length.toString(),
    edits: frame?.edits.toString(),
  };
}

export class Panel {
  /** Builds itself into `host`; `texts(id)` gives a token's text; `onFrame()` follows each drawing. */
  constructor(host, texts, onFrame = () => {}) {
    this.values = buildMetrics(host);
    const controls = buildTimeline(host);
    const parts = buildCanvas(host);
    this.maskSample = buildLegend(host);
    buildMeanings(host);
    this.view = new BufferView({ ...parts, texts });
    this.player = new Player(this.view, controls, (recording, index) => {
      this.showMetrics(recording, index);
      onFrame();
    });
  }

  /** Draws masks, those of the legend too, with another character; empty takes the usual one. */
  setMaskGlyph(glyph) {
    this.view.maskGlyph = glyph || MASK_GLYPH;
    this.maskSample.textContent = this.view.maskGlyph;
    this.view.redraw();
  }

  /** Back to nothing recorded. */
  reset() {
    this.player.close();
    this.showMetrics(null, -1);
  }

  showMetrics(recording, index) {
    const metrics = recording ? metricsAt(recording, index) : {};
    for (const [name, node] of Object.entries(this.values)) {
      const text = metrics[name] ?? "–";
      if (node.textContent !== text) node.textContent = text;
    }
  }
}
