// SPDX-License-Identifier: Apache-2.0
// The conversation: messages on the page, and one streamed answer at a time.

import { Recording } from "./recording.js";
import { element } from "./view.js";

export class Message {
  constructor(list, role, text = "") {
    this.node = element("article", `message ${role}`);
    this.body = element("div", "text", text);
    this.foot = element("div", "foot");
    const name = role === "user" ? "You" : "Answer";
    this.node.append(element("h3", "", name), this.body, this.foot);
    list.append(this.node);
  }

  set isBusy(value) {
    this.node.setAttribute("aria-busy", String(value));
  }

  get text() {
    return this.body.textContent;
  }

  setText(text) {
    this.body.textContent = text;
  }

  note(text, className = "") {
    this.foot.append(element("span", className, text));
  }
}

/** One answer: sends the request, follows the stream, and keeps its recording. */
export class Answer {
  constructor(api, body, meta) {
    this.api = api;
    this.body = body;
    this.recording = new Recording({ ...meta, isGrowing: true });
    this.abort = new AbortController();
    this.text = "";
    this.usage = null;
    this.finishReason = null;
    this.tokenIds = null;
    this.isStopped = false;
  }

  stop() {
    this.isStopped = true;
    this.abort.abort();
  }

  get wantsSnapshots() {
    return this.body.stream_mode !== "block_append";
  }

  get elapsed() {
    return performance.now() - this.started;
  }

  /** Runs to the end; `onText` and `onSnapshot` are told what came in. Throws on errors. */
  async run({ onText, onSnapshot }) {
    const { recording, recording: { meta } } = this;
    this.started = performance.now();
    if (meta.blockSize && !meta.isCanvas && this.wantsSnapshots) {
      recording.begin(meta.blockSize);
      onSnapshot();
    }
    try {
      for await (const frame of this.api.chat(this.body, this.abort.signal)) {
        this.take(frame, { onText, onSnapshot });
      }
      this.close();
    } catch (error) {
      if (!this.isStopped) throw error;
    } finally {
      recording.text = this.text;
      meta.endTime ??= this.elapsed;
      meta.isGrowing = false;
      onSnapshot();
    }
  }

  take(frame, { onText, onSnapshot }) {
    if (frame.event === "buffer_snapshot") {
      this.recording.push(frame, this.elapsed);
      onSnapshot();
    }
    const choice = frame.choices?.[0];
    const content = choice?.delta?.content;
    if (content) {
      this.recording.meta.ttft ??= this.elapsed;
      this.text += content;
      onText(this.text);
    }
    if (choice?.finish_reason) this.finishReason = choice.finish_reason;
    if (frame.event === "final") this.tokenIds = frame.token_ids;
    if (frame.usage) this.usage = frame.usage;
  }

  close() {
    this.recording.meta.endTime = this.elapsed;
    const { text, usage, finishReason, tokenIds } = this;
    const numTokens = usage?.completion_tokens;
    this.recording.finish({ text, usage, finishReason, tokenIds, numTokens }, this.elapsed);
  }
}
