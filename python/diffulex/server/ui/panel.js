// SPDX-License-Identifier: Apache-2.0
// The denoising panel: metric strip, timeline, block buffer, legend. Page and replay share it.

import { Player } from "./player.js";
import { BufferView, element } from "./view.js";

const METRICS = [
  ["ttft", "TTFT", "Time to the first committed text, seen from here"],
  ["nfe", "NFE", "Forward evaluations of the model, prefill included"],
  ["tokens", "Tokens", "Tokens of the answer; while it is written, those decided so far"],
  ["tpf", "TPF", "Tokens per forward evaluation"],
  ["decode_tps", "Decode tok/s", "Tokens decided per second of decode steps, by the engine's clock"],
  ["e2e_tps", "End-to-end tok/s", "Tokens per second since the question was sent, seen from here"],
  ["blocks", "Active blocks", "Blocks being denoised at the same time"],
  ["edits", "Edits", "Decided tokens that were overwritten"],
];
const LEGEND = [
  ["masked", "", "masked"],
  ["filled", "", "decided, may change"],
  ["filled", "new", "new in this step"],
  ["filled", "edit", "edited"],
  ["committed", "", "committed"],
  ["cut", "", "cut off"],
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
  for (const [name, label, meaning] of METRICS) {
    const tile = element("div", "metric");
    tile.title = meaning;
    values[name] = element("dd", "", "–");
    values[name].dataset.metric = name;
    tile.append(element("dt", "", label), values[name]);
    list.append(tile);
  }
  host.append(list);
  return values;
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
  host.append(summary, canvas, detail);
  return { summary, canvas, detail };
}

function buildLegend(host) {
  const list = element("ul", "legend");
  for (const [state, change, name] of LEGEND) {
    const item = element("li");
    const cell = element("span", "cell", state === "masked" ? "▨" : "ab");
    cell.dataset.state = state;
    cell.dataset.change = change;
    cell.setAttribute("aria-hidden", "true");
    item.append(cell, name);
    list.append(item);
  }
  host.append(list);
}

function buildTimeline(host) {
  const bar = element("div", "timeline");
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", "Timeline");
  const first = button("⇤", "First step");
  const play = button("▶", "Play");
  const last = button("⇥", "Last step");
  const live = button("● live", "Follow the answer again");
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
  /** Builds itself into `host`; `texts(id)` gives a token's text. */
  constructor(host, texts) {
    this.values = buildMetrics(host);
    const controls = buildTimeline(host);
    const parts = buildCanvas(host);
    buildLegend(host);
    this.view = new BufferView({ ...parts, texts });
    this.player = new Player(this.view, controls, (recording, index) => {
      this.showMetrics(recording, index);
    });
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
