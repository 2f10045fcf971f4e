// SPDX-License-Identifier: Apache-2.0
// How much of the model's length the next question takes, before it is sent.

const PAUSE_MS = 400;
/** No token of a usual vocabulary stands for more text on average: longer texts are not even asked about. */
const MAX_CHARS_PER_TOKEN = 16;
const NEARLY = 0.8;

export class Budget {
  /** `output` shows it; `messages()` are those that would be sent; `limit()` is the most tokens. */
  constructor(api, output, { messages, limit }) {
    this.api = api;
    this.output = output;
    this.messages = messages;
    this.limit = limit;
    this.timer = null;
    this.turn = 0;
  }

  /** Something changed that the length depends on. */
  update() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.count(), PAUSE_MS);
  }

  async count() {
    const limit = this.limit();
    const turn = (this.turn += 1);
    const messages = this.messages();
    if (!limit || !messages) {
      this.show("", "");
      return;
    }
    const numChars = messages.reduce((sum, { content }) => sum + content.length, 0);
    if (numChars > limit * MAX_CHARS_PER_TOKEN) {
      this.show(`Too long: ${numChars} characters, and ${limit} tokens fit.`, "over");
      return;
    }
    try {
      const { count } = await this.api.post("tokenize", { messages });
      // A later question may have been asked about, and answered, before.
      if (turn === this.turn) this.showCount(count, limit);
    } catch {
      // Not known: the server says what is wrong when the question is sent.
      if (turn === this.turn) this.show("", "");
    }
  }

  showCount(count, limit) {
    if (count > limit) {
      const over = count - limit;
      this.show(`Too long by ${over} ${over === 1 ? "token" : "tokens"}: ${limit} fit.`, "over");
    } else {
      const isNear = count > NEARLY * limit;
      this.show(`${count} of ${limit} tokens${isNear ? ", little room for the answer" : ""}`,
        isNear ? "near" : "");
    }
  }

  show(text, level) {
    this.output.textContent = text;
    this.output.dataset.level = level;
  }
}
