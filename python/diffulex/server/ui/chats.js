// SPDX-License-Identifier: Apache-2.0
// The list of stored conversations, and the one that this tab has open.

import { Conversation } from "./conversation.js";
import { History } from "./history.js";
import { element } from "./view.js";

const OPEN_NAME = "diffulex-chat";

const byId = (id) => document.getElementById(id);

export class Chats {
  /** `conversation` shows them; `onFail(error)` is told what went wrong. */
  constructor(conversation, onFail) {
    this.conversation = conversation;
    this.onFail = onFail;
    this.history = null;
    this.isSure = false;
    byId("open-chats").addEventListener("click", () => this.open());
    byId("delete-chats").addEventListener("click", () => this.removeAll());
  }

  /** Opens the store, and in it the conversation that this tab showed before a reload. */
  async start() {
    try {
      this.history = await History.open();
      const id = sessionStorage.getItem(OPEN_NAME);
      const chat = id && (await this.history.load(id));
      if (chat) this.show(chat);
    } catch {
      this.history = null;
      byId("chats-note").textContent = "This browser keeps no chats: they end with this page.";
    }
  }

  show(chat) {
    sessionStorage.setItem(OPEN_NAME, chat.id);
    this.conversation.show(chat);
    byId("welcome").hidden = chat.exchanges.length > 0;
  }

  /** A new conversation, which is stored with its first answer. */
  begin() {
    sessionStorage.removeItem(OPEN_NAME);
    this.conversation.clear();
    byId("welcome").hidden = false;
  }

  /** Stores an exchange that ended, with its recording. */
  async keep(chat, exchange) {
    if (!this.history) return;
    try {
      const { exchanges } = (await this.history.load(chat.id)) ?? { exchanges: [] };
      const kept = new Set(chat.exchanges.map(({ id }) => id));
      for (const { id } of exchanges) if (!kept.has(id)) await this.history.removeRecording(chat.id, id);
      // A recording first: what the conversation names is there.
      await this.history.saveRecording(chat.id, exchange.id, exchange.recording.toJSON());
      await this.history.save(Conversation.stored(chat));
      if (chat === this.conversation.chat) sessionStorage.setItem(OPEN_NAME, chat.id);
    } catch (error) {
      this.onFail(new Error(`This chat could not be stored: ${error.message}`));
    }
  }

  async loadRecording(chat, exchange) {
    return this.history?.loadRecording(chat, exchange);
  }

  async open() {
    await this.list();
    byId("chats").showModal();
  }

  async list() {
    const chats = this.history ? await this.history.list() : [];
    this.isSure = false;
    byId("delete-chats").textContent = "Delete all";
    byId("delete-chats").hidden = chats.length === 0;
    const rows = chats.map((chat) => this.row(chat));
    byId("chat-list").replaceChildren(...(rows.length ? rows : [element("li", "hint", "No chats yet.")]));
  }

  row(chat) {
    const row = element("li");
    const open = element("button", "chat-title", chat.title || "Untitled");
    const remove = element("button", "small", "Delete");
    const date = element("span", "hint", new Date(chat.updated).toLocaleString());
    open.type = "button";
    remove.type = "button";
    remove.setAttribute("aria-label", `Delete “${chat.title}”`);
    if (chat.id === this.conversation.chat.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => {
      byId("chats").close();
      this.show(chat);
    });
    remove.addEventListener("click", () => this.remove(chat.id));
    row.append(open, date, remove);
    return row;
  }

  async remove(id) {
    await this.history.remove(id);
    if (id === this.conversation.chat.id) this.begin();
    await this.list();
  }

  /** Asks once more before everything is gone. */
  async removeAll() {
    if (!this.isSure) {
      this.isSure = true;
      byId("delete-chats").textContent = "Really delete all chats?";
      return;
    }
    await this.history.clear();
    this.begin();
    await this.list();
  }
}
