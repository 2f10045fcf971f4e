// SPDX-License-Identifier: Apache-2.0
// Conversations and their recordings, kept in this browser.

const NAME = "diffulex";
const VERSION = 1;
const CHATS = "chats";
const RECORDINGS = "recordings";
/** Older conversations are dropped. */
export const MAX_CHATS = 100;

/** The result of a request to the database. */
function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function openDatabase() {
  const request = indexedDB.open(NAME, VERSION);
  request.onupgradeneeded = () => {
    request.result.createObjectStore(CHATS, { keyPath: "id" });
    request.result.createObjectStore(RECORDINGS, { keyPath: ["chat", "exchange"] });
  };
  return settled(request);
}

/** Every recording of one conversation. */
function recordingsOf(chat) {
  return IDBKeyRange.bound([chat], [chat, []]);
}

/** A stored text; anything else, which this page did not store, is no text. */
const textOf = (value) => (typeof value === "string" ? value : "");

const listOf = (value) => (Array.isArray(value) ? value : []);

/** An exchange as it was stored, or as much of it as is what it should be. */
function checkedExchange({ id, question, answer, notes, hasRecording }) {
  return {
    id: textOf(id),
    question: textOf(question),
    answer: textOf(answer),
    notes: listOf(notes).map(textOf),
    hasRecording: hasRecording === true,
  };
}

function checkedChat({ id, title, updated, exchanges }) {
  return {
    id,
    title: textOf(title),
    updated: Number.isFinite(updated) ? updated : 0,
    exchanges: listOf(exchanges).filter((one) => one && typeof one === "object").map(checkedExchange),
  };
}

export class History {
  constructor(database) {
    this.database = database;
  }

  /** The history of this browser; rejects where the browser keeps none, as some do in private. */
  static async open() {
    return new History(await openDatabase());
  }

  store(name, mode) {
    return this.database.transaction(name, mode).objectStore(name);
  }

  /** All conversations, the newest first. */
  async list() {
    const chats = (await settled(this.store(CHATS, "readonly").getAll())).map(checkedChat);
    return chats.sort((one, other) => other.updated - one.updated);
  }

  /** One conversation, or undefined. */
  async load(id) {
    const chat = await settled(this.store(CHATS, "readonly").get(id));
    return chat && checkedChat(chat);
  }

  /** Keeps a conversation, and drops the oldest ones beyond the limit. */
  async save(chat) {
    await settled(this.store(CHATS, "readwrite").put(chat));
    const chats = await this.list();
    for (const old of chats.slice(MAX_CHATS)) await this.remove(old.id);
  }

  async saveRecording(chat, exchange, data) {
    await settled(this.store(RECORDINGS, "readwrite").put({ chat, exchange, data }));
  }

  /** What `saveRecording` was given, or undefined. */
  async loadRecording(chat, exchange) {
    return (await settled(this.store(RECORDINGS, "readonly").get([chat, exchange])))?.data;
  }

  async removeRecording(chat, exchange) {
    await settled(this.store(RECORDINGS, "readwrite").delete([chat, exchange]));
  }

  /** Forgets a conversation and its recordings. */
  async remove(id) {
    await settled(this.store(CHATS, "readwrite").delete(id));
    await settled(this.store(RECORDINGS, "readwrite").delete(recordingsOf(id)));
  }

  /** Forgets everything. */
  async clear() {
    await settled(this.store(CHATS, "readwrite").clear());
    await settled(this.store(RECORDINGS, "readwrite").clear());
  }
}
