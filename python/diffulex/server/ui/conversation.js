// SPDX-License-Identifier: Apache-2.0
// A conversation: exchanges of a question and its answer, asked, repeated, changed and kept.

import { Answer, Message } from "./chat.js";
import { Recording } from "./recording.js";
import { EndKeeper } from "./scroll.js";

const TITLE_CHARS = 80;

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;

/** One question and its answer, on the page and as they are stored. */
class Exchange {
  constructor({ id = newId(), question, answer = "", notes = [], hasRecording = false }, list, formats) {
    this.id = id;
    this.question = question;
    this.notes = notes;
    this.hasRecording = hasRecording;
    this.recording = null;
    this.asked = new Message(list, "user", question);
    this.answered = new Message(list, "assistant", answer, formats);
    this.regenerate = null;
  }

  get answer() {
    return this.answered.text;
  }

  note(text) {
    this.notes.push(text);
    this.answered.note(text);
  }

  set isHidden(value) {
    this.asked.node.hidden = value;
    this.answered.node.hidden = value;
  }

  remove() {
    this.asked.node.remove();
    this.answered.node.remove();
  }

  toJSON() {
    const { id, question, answer, notes, hasRecording } = this;
    return { id, question, answer, notes, hasRecording };
  }
}

/** The messages that a model gets of earlier exchanges; those without an answer tell it nothing. */
function turnsOf(exchanges) {
  return exchanges.filter(({ answer }) => answer).flatMap(({ question, answer }) => [
    { role: "user", content: question }, { role: "assistant", content: answer },
  ]);
}

export class Conversation {
  /**
   * `list` takes the messages. `page` is what they are part of: `api`, `inspector`, `texts`,
   * `request(question, turns)`, `meta(question, body)`, `formats()`, `pace()`, `announce(text)`,
   * `fail(error)`, `onShow()` when another conversation is shown, `onBusy(isBusy)`,
   * `onRefused(question, at)`, `onEdit(index)`, `keep(chat, exchange)`.
   */
  constructor(list, page) {
    this.list = list;
    this.page = page;
    this.ends = new EndKeeper(list);
    this.chat = { id: newId(), exchanges: [] };
    this.answer = null;
  }

  get isBusy() {
    return this.answer !== null;
  }

  get exchanges() {
    return this.chat.exchanges;
  }

  /** Turns before exchange `at`. */
  turns(at = this.exchanges.length) {
    return turnsOf(this.exchanges.slice(0, at));
  }

  stop() {
    this.answer?.stop();
  }

  /** Begins an empty conversation. */
  clear() {
    this.show({ id: newId(), exchanges: [] });
  }

  /** Shows a stored conversation, or an empty one. */
  show({ id, exchanges }) {
    this.stop();
    for (const exchange of this.exchanges) exchange.remove();
    for (const node of this.list.querySelectorAll(".message")) node.remove();
    this.chat = { id, exchanges: [] };
    this.page.inspector.reset();
    for (const stored of exchanges) {
      const exchange = new Exchange(stored, this.list, this.page.formats);
      for (const text of exchange.notes) exchange.answered.note(text);
      this.exchanges.push(exchange);
      this.addActions(exchange);
    }
    this.markLast();
    this.page.onShow();
    if (exchanges.length) this.ends.toEnd();
    else this.ends.toStart();
  }

  /** Draws every answer anew, after formatting was switched. */
  redraw() {
    for (const { answered } of this.exchanges) answered.render();
  }

  /** Asks; what comes from exchange `at` on is replaced once the answer begins. */
  async ask(question, at = this.exchanges.length) {
    if (this.isBusy || !question.trim()) return;
    const { chat, page } = this;
    const replaced = chat.exchanges.slice(at);
    const shownBefore = page.inspector.state;
    const body = page.request(question, this.turns(at));
    for (const exchange of replaced) exchange.isHidden = true;
    const exchange = new Exchange({ question }, this.list, page.formats);
    const answer = new Answer(page.api, body, page.meta(question, body));
    exchange.recording = answer.recording;
    this.begin(answer, exchange);
    const error = await this.run(answer, exchange);
    this.answer = null;
    exchange.answered.isBusy = false;
    page.onBusy(false);
    if (chat !== this.chat) return;
    if (!answer.text && (error || answer.isStopped)) {
      this.withdraw(exchange, replaced, shownBefore);
      // A question that is asked once more stands in the conversation again.
      if (question !== replaced[0]?.question) page.onRefused(question, at);
    } else {
      for (const old of replaced) old.remove();
      chat.exchanges.splice(at, Infinity, exchange);
      await this.complete(answer, exchange, { error, before: replaced[0] });
    }
    if (error) page.fail(error);
    this.ends.toEnd();
  }

  begin(answer, exchange) {
    const { page } = this;
    this.answer = answer;
    page.onBusy(true);
    page.inspector.follow(
      answer.recording, exchange.answered.node, () => answer.elapsed, page.pace(),
    );
    page.announce("The answer is being written.");
    exchange.answered.isBusy = true;
    this.ends.toEnd();
  }

  /** The error that ended the answer, or null. */
  async run(answer, exchange) {
    const { page } = this;
    try {
      await answer.run({
        onText: (text) => exchange.answered.setText(text),
        onSnapshot: () => page.onSnapshot(answer.recording),
      });
      return null;
    } catch (error) {
      return error;
    } finally {
      exchange.answered.render();
    }
  }

  /** As if it had not been asked. */
  withdraw(exchange, replaced, shownBefore) {
    exchange.remove();
    for (const old of replaced) old.isHidden = false;
    this.page.inspector.restore(shownBefore);
    this.page.announce("The question was not answered.");
  }

  async complete(answer, exchange, { error, before }) {
    const { page, chat } = this;
    const { recording } = answer;
    this.noteEnd(answer, exchange, error, before);
    page.announce(error || answer.isStopped ? "The answer was broken off."
      : `The answer is complete: ${answer.text}`);
    await page.loadTexts(recording);
    recording.keepTexts(page.texts);
    exchange.hasRecording = recording.length > 0;
    if (chat !== this.chat) return;
    this.addActions(exchange);
    this.markLast();
    page.inspector.update();
    await page.keep(chat, exchange);
  }

  noteEnd(answer, exchange, error, before) {
    const { usage, recording, body } = answer;
    const seconds = (recording.meta.endTime / 1000).toFixed(2);
    if (answer.isStopped) exchange.note("stopped");
    if (error) exchange.note("broke off");
    if (usage) {
      const { completion_tokens: tokens, nfe } = usage;
      const each = nfe ? `, ${(tokens / nfe).toFixed(1)} at a time` : "";
      const passes = `${nfe ?? "?"} forward ${nfe === 1 ? "pass" : "passes"}`;
      exchange.note(`${tokens} tokens in ${passes}${each}, ${seconds} s`);
    }
    if (answer.finishReason === "length") exchange.note("cut at a limit");
    if (!answer.text && usage) exchange.note("empty: the model ended its answer at once");
    if (before && before.question === exchange.question && before.answer === answer.text && answer.text) {
      exchange.note(`the same as before${body.temperature === 0 ? ": temperature 0 leaves no choice" : ""}`);
    }
  }

  addActions(exchange) {
    const { asked, answered } = exchange;
    const index = () => this.exchanges.indexOf(exchange);
    asked.addCopy();
    asked.addAction("Edit", () => !this.isBusy && this.page.onEdit(index()));
    if (answered.text) answered.addCopy();
    exchange.regenerate = answered.addAction("Regenerate", () => this.ask(exchange.question, index()));
    if (!exchange.hasRecording) return;
    answered.addAction("Replay", () => this.inspect(exchange, true));
    answered.addAction("Inspect", () => this.inspect(exchange, false));
  }

  /** Only the last answer can be made anew without taking others along. */
  markLast() {
    const last = this.exchanges.at(-1);
    for (const exchange of this.exchanges) {
      if (exchange.regenerate) exchange.regenerate.hidden = exchange !== last;
    }
  }

  async inspect(exchange, isReplay) {
    if (this.isBusy) return;
    try {
      exchange.recording ??= Recording.fromJSON(await this.page.loadRecording(this.chat.id, exchange.id));
    } catch (error) {
      this.page.fail(error);
      return;
    }
    this.page.inspector.open(exchange.recording, exchange.answered.node, isReplay);
  }

  /** What is stored of a conversation. */
  static stored({ id, exchanges }) {
    return {
      id,
      title: (exchanges[0]?.question ?? "").slice(0, TITLE_CHARS),
      updated: Date.now(),
      exchanges: exchanges.map((exchange) => exchange.toJSON()),
    };
  }
}
