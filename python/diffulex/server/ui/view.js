// SPDX-License-Identifier: Apache-2.0
// The block buffer on the page: one cell per token, a rule at every block boundary.

import { COMMITTED, CUT, FILLED, MASKED } from "./recording.js";

const FADE_MS = 400;
export const MASK_GLYPH = "▨";
export const SPECIAL_GLYPH = "◇";
const STATE_NAMES = {
  [MASKED]: "masked",
  [FILLED]: "decided, may still change",
  [COMMITTED]: "committed",
  [CUT]: "after the end of the answer",
};
const BLOCK_NAMES = {
  active: "being denoised",
  to_cache: "done, waits for the cache",
  in_cache: "in the cache",
  dummy: "not opened yet",
  [COMMITTED]: "committed",
  [CUT]: "after the end",
};

const clampCells = (count) => Math.min(8, Math.max(1, count));

export function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** Sets an attribute only when it differs: most cells do not change from step to step. */
function setData(node, key, value) {
  if (node.dataset[key] !== value) node.dataset[key] = value;
}

/** A token's text with its blanks made visible. */
export function visibleText(text) {
  if (text === "") return "∅";
  return text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍");
}

export class BufferView {
  /**
   * `canvas` takes the cells, `summary` one sentence per step, `detail` the token under the cursor,
   * `note` what needs an explanation.
   * `texts(id)` gives a token's text; `specials` holds the ids that stand for no text.
   */
  constructor({ canvas, summary, detail, note, texts }) {
    this.canvas = canvas;
    this.summary = summary;
    this.detail = detail;
    this.note = note;
    this.texts = texts;
    this.specials = new Set();
    this.maskGlyph = MASK_GLYPH;
    this.showsSpecials = false;
    this.showsConfidence = true;
    this.groups = [];
    this.cells = [];
    this.state = null;
    this.recording = null;
    this.cursor = null;
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    // Not pointerover: that also tells of cells that appear under a pointer at rest, or after a tap.
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse") this.onPoint(event);
    });
    canvas.addEventListener("click", (event) => this.onPoint(event));
    canvas.addEventListener("focus", () => this.moveTo(this.cursor ?? 0));
    canvas.addEventListener("blur", () => this.moveTo(null));
  }

  clear() {
    this.canvas.replaceChildren();
    this.groups = [];
    this.cells = [];
    this.state = null;
    this.recording = null;
    this.cursor = null;
    this.summary.textContent = "";
    this.detail.textContent = "";
    this.note.textContent = "";
  }

  /** Draws frame `index` of a recording; `animates`: what changed lights up and fades. */
  draw(recording, index, animates = true) {
    if (recording !== this.recording) this.clear();
    this.recording = recording;
    const state = recording.stateAt(index);
    this.state = state;
    this.fitGroups(state.blocks);
    for (const block of state.blocks) this.drawBlock(block, state, animates);
    this.summary.textContent = this.describe(state);
    const note = this.explainFill(state);
    if (this.note.textContent !== note) this.note.textContent = note;
    if (this.cursor !== null) this.moveTo(Math.min(this.cursor, state.cells.length - 1));
  }

  /** Draws the same frame again, after texts came in or a display option changed. */
  redraw() {
    if (this.recording) this.draw(this.recording, this.state.index, false);
  }

  fitGroups(blocks) {
    while (this.groups.length > blocks.length) this.groups.pop().node.remove();
    while (this.groups.length < blocks.length) {
      const node = element("div", "block");
      const label = element("p", "block-label");
      const row = element("div", "block-cells");
      node.append(label, row);
      this.canvas.append(node);
      this.groups.push({ node, label, row, cells: [] });
    }
  }

  drawBlock(block, state, animates) {
    const group = this.groups[block.index];
    const count = block.end - block.start;
    setData(group.node, "state", block.state);
    const masked = block.masked ? ` · ${block.masked} masked` : "";
    const label = `block ${block.index + 1} · ${BLOCK_NAMES[block.state] ?? block.state}${masked}`;
    if (group.label.textContent !== label) group.label.textContent = label;
    // Later blocks are as wide as the whole one; the first may be short, where the prompt ends.
    const widest = this.recording.meta.blockSize ?? count;
    const columns = clampCells(Math.max(count, widest));
    group.row.style.setProperty("--columns", String(columns));
    // The prompt fills the start of the first block: its cells stand where they are in the block.
    const isPartial = block.index === 0 && this.recording.promptLen % widest > 0;
    const shift = isPartial ? Math.max(0, widest - count) % columns : 0;
    group.row.style.setProperty("--shift", String(1 + shift));
    while (group.cells.length > count) group.cells.pop().remove();
    while (group.cells.length < count) {
      const node = element("span", "cell");
      group.row.append(node);
      group.cells.push(node);
    }
    for (let i = 0; i < count; i += 1) {
      const position = block.start + i;
      this.cells[position] = group.cells[i];
      this.drawCell(group.cells[i], state.cells[position], position, animates);
    }
    this.cells.length = state.cells.length;
  }

  drawCell(node, cell, position, animates) {
    const { text, isSpecial } = this.cellText(cell);
    if (node.textContent !== text) node.textContent = text;
    setData(node, "position", String(position));
    setData(node, "state", cell.state);
    setData(node, "change", cell.change);
    setData(node, "special", isSpecial ? "yes" : "");
    setData(node, "size", text.length > 9 ? "long" : text.length > 6 ? "medium" : "");
    const shown = this.showsConfidence && cell.confidence !== null ? cell.confidence : 1;
    // Never invisible: the least confident cell keeps a fifth of its colour.
    node.style.setProperty("--confidence", (0.2 + 0.8 * shown).toFixed(3));
    if (animates && cell.change && !prefersCalm()) {
      node.animate([{ "--flash": 1 }, { "--flash": 0 }], { duration: FADE_MS, easing: "ease-out" });
    }
  }

  cellText(cell) {
    if (cell.state === MASKED) return { text: this.maskGlyph, isSpecial: false };
    const text = this.texts(cell.id);
    if (text === undefined) return { text: "…", isSpecial: false };
    const isSpecial = this.specials.has(cell.id);
    if (isSpecial && !this.showsSpecials) return { text: SPECIAL_GLYPH, isSpecial };
    return { text: visibleText(text), isSpecial };
  }

  describe({ index, frame, counts }) {
    const parts = [`${counts.masked} masked`, `${counts.filled} decided`];
    parts.push(`${counts.committed} committed`);
    if (counts.changed) parts.push(`${counts.changed} new`);
    if (counts.edited) parts.push(`${counts.edited} edited`);
    if (counts.cut) parts.push(`${counts.cut} cut off`);
    let name = `Step ${this.recording.stepNumber(index)}, forward ${frame.nfe}`;
    if (frame.nfe === 0) name = "Before the first forward";
    if (frame.end !== undefined) name = "End";
    return `${name}: ${parts.join(", ")}.`;
  }

  /** Why an answer that goes on after its end is rows of tokens without text. */
  explainFill({ cells }) {
    if (!this.recording.meta.request?.ignore_eos) return "";
    let count = 0;
    while (count < cells.length && this.specials.has(cells.at(-1 - count).id)) count += 1;
    if (count < 2) return "";
    return `The last ${count} tokens stand for no text (${SPECIAL_GLYPH}): the answer was complete, but `
      + "“Ignore end of sequence” made the model go on to the length limit.";
  }

  onPoint(event) {
    const node = event.target.closest?.(".cell");
    if (node) this.moveTo(Number(node.dataset.position));
  }

  onKey(event) {
    const columns = clampCells(this.recording?.meta.blockSize ?? 8);
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
    const last = this.cells.length - 1;
    let next = null;
    if (event.key in moves) next = (this.cursor ?? 0) + moves[event.key];
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = last;
    if (next === null || last < 0) return;
    event.preventDefault();
    this.moveTo(Math.min(last, Math.max(0, next)));
  }

  /** Puts the cursor on a token and says everything known of it. */
  moveTo(position) {
    this.canvas.querySelector(".cell.cursor")?.classList.remove("cursor");
    this.cursor = position;
    if (position === null || !this.state || !this.cells[position]) {
      this.detail.textContent = "";
      return;
    }
    this.cells[position].classList.add("cursor");
    this.detail.textContent = this.explain(position);
  }

  explain(position) {
    const cell = this.state.cells[position];
    const quote = (id) => JSON.stringify(this.texts(id) ?? `id ${id}`);
    if (cell.state === MASKED) return `Token ${position + 1}: masked.`;
    const parts = [`Token ${position + 1}: ${quote(cell.id)} (id ${cell.id})`];
    parts.push(STATE_NAMES[cell.state]);
    const at = this.recording.decidedAt(position, this.state.index);
    if (at !== null) parts.push(`decided in step ${this.recording.stepNumber(at)}`);
    if (cell.confidence !== null) parts.push(`confidence ${cell.confidence.toFixed(3)}`);
    if (cell.was !== null) parts.push(`was ${quote(cell.was)}`);
    return `${parts.join(", ")}.`;
  }
}

export function prefersCalm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
