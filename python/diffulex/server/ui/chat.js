// SPDX-License-Identifier: Apache-2.0
// Messages on the page, and one streamed answer.

import { copyButton } from "./clipboard.js";
import { renderMarkdown } from "./markdown.js";
import { Recording } from "./recording.js";
import { element } from "./view.js";

export class Message {
  /** What a person wrote is shown as it is; an answer is formatted if `formats()` says so. */
  constructor(list, role, text = "", formats = () => false) {
    this.text = "";
    this.formats = formats;
    this.request = null;
    this.node = element("article", `message ${role}`);
    this.body = element("div", "text");
    this.notes = element("p", "notes");
    this.actions = element("div", "actions");
    this.foot = element("div", "foot");
    this.foot.append(this.notes, this.actions);
    const name = role === "user" ? "You" : "Answer";
    this.node.append(element("h3", "", name), this.body, this.foot);
    list.append(this.node);
    if (text) this.setText(text);
    this.render();
  }

  set isBusy(value) {
    this.node.setAttribute("aria-busy", String(value));
  }

  /** Takes the text, and draws it with the next picture: texts may come in faster. */
  setText(text) {
    this.text = text;
    this.request ??= requestAnimationFrame(() => this.render());
  }

  render() {
    if (this.request !== null) cancelAnimationFrame(this.request);
    this.request = null;
    if (this.formats()) {
      renderMarkdown(this.body, this.text);
    } else {
      this.body.classList.remove("formatted");
      this.body.textContent = this.text;
    }
  }

  note(text) {
    this.notes.append(element("span", "note", text));
  }

  addCopy() {
    this.actions.append(copyButton(() => this.text, "Copy the text"));
  }

  addAction(name, act) {
    const button = element("button", "small", name);
    button.type = "button";
    button.addEventListener("click", act);
    this.actions.append(button);
    return button;
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
