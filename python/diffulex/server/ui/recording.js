// SPDX-License-Identifier: Apache-2.0
// One answer as the sequence of block-buffer snapshots that led to it.

const FORMAT = "diffulex-recording";
const VERSION = 1;
/** Older snapshots are dropped; the committed text they held stays in the draft. */
export const MAX_FRAMES = 2000;

/** Of a longer recording only every n-th frame is looked at in search of a telling one. */
const MAX_LOOKED_AT = 200;

/** States of a cell. */
export const MASKED = "masked";
export const FILLED = "filled";
export const COMMITTED = "committed";
export const CUT = "cut";

export class Recording {
  constructor(meta = {}) {
    this.meta = meta;
    this.frames = [];
    this.draft = [];
    this.texts = {};
    this.text = "";
    this.usage = null;
    this.finishReason = null;
    this.promptLen = null;
    this.maskId = null;
    this.dropped = 0;
    this.edits = 0;
    this.starts = new Map();
  }

  get length() {
    return this.frames.length;
  }

  /** Adds the state before the first forward: `numMasks` masks, as far as known yet. */
  begin(numMasks) {
    this.add(this.opening(numMasks));
  }

  /** The buffer before the first forward. Its ids are null: no snapshot named the mask yet. */
  opening(numMasks) {
    return {
      t: 0, nfe: 0, offset: 0, ids: new Array(numMasks).fill(null), committed: 0,
      conf: null, blocks: null, edits: 0, tps: null,
    };
  }

  isMask(id) {
    return id === null || (this.maskId !== null && id === this.maskId);
  }

  /** The first snapshot tells how much was masked before it; a canvas never was. */
  settleOpening(snapshot) {
    const hasOpening = this.frames[0]?.nfe === 0;
    if (!hasOpening && this.length > 0) return;
    const numMasks = snapshot.token_offset + snapshot.token_ids.length;
    this.frames = this.maskId === null ? [] : [this.opening(numMasks)];
  }

  /** Adds a `buffer_snapshot`: it replaces the draft from its offset to the end. */
  push(snapshot, t) {
    const offset = snapshot.token_offset;
    const ids = snapshot.token_ids;
    if (this.promptLen === null) {
      this.maskId = snapshot.mask_token_id ?? null;
      this.settleOpening(snapshot);
    }
    this.promptLen ??= (snapshot.absolute_start ?? offset) - offset;
    let numEdits = 0;
    for (let i = 0; i < ids.length; i += 1) {
      const before = this.draft[offset + i];
      if (before !== undefined && before !== ids[i] && !this.isMask(before)) numEdits += 1;
    }
    this.edits += numEdits;
    this.draft = this.draft.slice(0, offset).concat(ids);
    this.noteBlocks(snapshot.blocks, this.draft.length);
    this.add({
      t,
      nfe: snapshot.nfe,
      offset,
      ids: Array.from(ids),
      committed: snapshot.committed ?? offset,
      conf: snapshot.confidences ?? null,
      blocks: snapshot.blocks?.map((block) => this.relative(block)) ?? null,
      edits: this.edits,
      tps: snapshot.engine_decode_tps ?? null,
    });
  }

  /** Adds the last frame: `numTokens` tokens are the answer, what follows them was cut off. */
  finish({ text, usage, finishReason, tokenIds, numTokens }, t) {
    this.text = text;
    this.usage = usage ?? null;
    this.finishReason = finishReason ?? null;
    if (tokenIds) this.draft = tokenIds.concat(this.draft.slice(tokenIds.length));
    const end = tokenIds?.length ?? Math.min(numTokens ?? this.draft.length, this.draft.length);
    const last = this.frames.at(-1);
    if (!last || this.promptLen === null) return;
    this.add({
      t,
      nfe: usage?.nfe ?? last.nfe,
      offset: 0,
      ids: Array.from(this.draft),
      committed: end,
      conf: null,
      blocks: null,
      edits: this.edits,
      tps: usage?.decode_tps ?? last.tps,
      end,
    });
  }

  add(frame) {
    this.frames.push(frame);
    if (this.frames.length > MAX_FRAMES) {
      this.frames.shift();
      this.dropped += 1;
    }
  }

  /** A block in coordinates of the answer; the prompt may reach into the first one. */
  relative({ id, start, end, state }) {
    return { id, start: Math.max(0, start - this.promptLen), end: end - this.promptLen, state };
  }

  /**
   * Remembers where blocks start: they leave the snapshots once they are committed, and a snapshot
   * names only the part of a block that its span covers.
   */
  noteBlocks(blocks, length) {
    if (blocks) {
      for (const { id, start } of blocks.map((block) => this.relative(block))) {
        this.starts.set(id, Math.min(start, this.starts.get(id) ?? start));
      }
      return;
    }
    const size = this.meta.blockSize;
    if (!size) return;
    const shift = this.meta.isCanvas ? 0 : this.promptLen % size;
    for (let start = -shift; start < length; start += size) {
      this.starts.set(Math.floor((start + this.promptLen) / size), Math.max(0, start));
    }
  }

  /** Draft after frame `index`; committed tokens before its span never change again. */
  draftAt(index) {
    const frame = this.frames[index];
    return this.draft.slice(0, frame.offset).concat(frame.ids);
  }

  /** What to draw for frame `index`: cells, grouped by blocks, and counts. */
  stateAt(index) {
    const frame = this.frames[index];
    const ids = this.draftAt(index);
    const before = index > 0 ? this.draftAt(index - 1) : [];
    // Before a canvas there was nothing; before the oldest kept frame there is nothing known.
    const isKnown = index > 0 || this.dropped === 0;
    const counts = { masked: 0, filled: 0, committed: 0, cut: 0, changed: 0, edited: 0 };
    const cells = ids.map((id, i) => {
      const state = this.cellState(id, i, frame);
      counts[state] += 1;
      const change = frame.end === undefined ? this.change(id, before[i], isKnown) : "";
      if (change === "new") counts.changed += 1;
      if (change === "edit") counts.edited += 1;
      const inSpan = i >= frame.offset && frame.conf !== null;
      const confidence = inSpan && state === FILLED ? frame.conf[i - frame.offset] : null;
      return { id, state, change, confidence, was: change === "edit" ? before[i] : null };
    });
    return { index, frame, cells, counts, blocks: this.blocksAt(frame, cells) };
  }

  cellState(id, i, frame) {
    if (frame.end !== undefined && i >= frame.end) return CUT;
    if (this.isMask(id)) return MASKED;
    return i < frame.committed ? COMMITTED : FILLED;
  }

  /** How a token came into this frame: decided (`new`), overwritten (`edit`), or not at all. */
  change(id, before, isKnown) {
    if (!isKnown || this.isMask(id) || id === before) return "";
    return before === undefined || this.isMask(before) ? "new" : "edit";
  }

  blocksAt(frame, cells) {
    const known = [...this.starts].filter(([, start]) => start < cells.length);
    known.sort(([, one], [, other]) => one - other);
    // What lies before the oldest known block belongs together, too.
    if (cells.length > 0 && (known[0]?.[1] ?? 1) > 0) known.unshift([null, 0]);
    return known.map(([id, start], index) => {
      const end = known[index + 1]?.[1] ?? cells.length;
      const masked = cells.slice(start, end).filter((cell) => cell.state === MASKED).length;
      const given = frame.blocks?.find((block) => block.id === id)?.state;
      let state = given ?? "active";
      if (end <= frame.committed) state = given === "to_cache" ? given : COMMITTED;
      if (frame.end !== undefined) state = start < frame.end ? COMMITTED : CUT;
      return { index, start, end, masked, state };
    });
  }

  /** Frame in which position `i` took the value it has in frame `index`; null if dropped since. */
  decidedAt(i, index) {
    const id = this.draftAt(index)[i];
    if (id === undefined || this.isMask(id)) return null;
    let at = index;
    while (at > 0 && this.draftAt(at - 1)[i] === id) at -= 1;
    return at > 0 || this.dropped === 0 ? at : null;
  }

  /**
   * Frame that shows most at once: of those that are no blank start and no finished end, the one with
   * the most kinds of cells, and of these the one in which most changed.
   */
  tellingFrame() {
    const stride = Math.max(1, Math.floor(this.length / MAX_LOOKED_AT));
    let best = { index: this.length - 1, score: -1 };
    for (let index = 0; index < this.length; index += stride) {
      const { cells, counts } = this.stateAt(index);
      const kinds = new Set(cells.map((cell) => `${cell.state} ${cell.change}`)).size;
      const isBetween = counts.masked < cells.length && counts.masked + counts.filled > 0;
      const changes = counts.changed + counts.edited;
      const score = (isBetween ? 1e6 : 0) + 1e4 * kinds + Math.min(changes, 9999);
      if (score > best.score) best = { index, score };
    }
    return best.index;
  }

  /** Number of the step that led to frame `index`: 0 is the state before the first one. */
  stepNumber(index) {
    return index + this.dropped + (this.frames[0]?.nfe === 0 || this.dropped > 0 ? 0 : 1);
  }

  /** Keeps the texts of all tokens it shows, so that it can be read without a tokenizer. */
  keepTexts(texts) {
    for (const frame of this.frames) {
      for (const id of frame.ids) if (id !== null) this.texts[id] ??= texts.get(id);
    }
  }

  toJSON() {
    const { meta, frames, draft, texts, text, usage, finishReason } = this;
    const { promptLen, maskId, dropped, edits } = this;
    return {
      format: FORMAT, version: VERSION, meta, text, usage, finish_reason: finishReason,
      prompt_len: promptLen, mask_token_id: maskId, dropped, edits,
      block_starts: [...this.starts], texts, draft, frames,
    };
  }

  static fromJSON(data) {
    if (data?.format !== FORMAT || data.version !== VERSION) {
      throw new Error(`recording: expected ${FORMAT} version ${VERSION}, got something else`);
    }
    const recording = new Recording(data.meta);
    Object.assign(recording, {
      frames: data.frames, draft: data.draft, texts: data.texts, text: data.text,
      usage: data.usage, finishReason: data.finish_reason, promptLen: data.prompt_len,
      maskId: data.mask_token_id, dropped: data.dropped, edits: data.edits,
      starts: new Map(data.block_starts),
    });
    return recording;
  }
}
