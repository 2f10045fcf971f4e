// SPDX-License-Identifier: Apache-2.0
// The routes of the server that the page uses.

import { readEvents } from "./sse.js";

/** An answer of the server that is an error. */
export class ApiError extends Error {
  constructor(message, status, code, param) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

/** What an error body or an error frame says. */
export function errorOf(body, status) {
  const error = body?.error;
  if (error && typeof error === "object") {
    return new ApiError(error.message ?? "unknown error", status, error.code, error.param);
  }
  const text = body?.message ?? body?.detail ?? `the server answered ${status}`;
  return new ApiError(String(text), status, body?.code);
}

/** Calls routes relative to the page, so that a path prefix of a proxy stays. */
export class Api {
  constructor(readKey) {
    this.readKey = readKey;
  }

  async call(path, options = {}) {
    const headers = {};
    const key = this.readKey();
    if (key) headers.Authorization = `Bearer ${key}`;
    // The browser names the boundary of a form.
    if (options.body && !(options.body instanceof FormData)) headers["Content-Type"] = "application/json";
    const response = await fetch(path, { ...options, headers, cache: "no-store" });
    if (response.ok) return response;
    let body = null;
    try {
      body = await response.json();
    } catch {
      // Not JSON: the status alone has to do.
    }
    throw errorOf(body, response.status);
  }

  async get(path) {
    return (await this.call(path)).json();
  }

  async post(path, body) {
    return (await this.call(path, { method: "POST", body: JSON.stringify(body) })).json();
  }

  /** Frames of a streamed chat completion; throws what an error frame says. */
  async *chat(body, signal) {
    const response = await this.call("v1/chat/completions", {
      method: "POST",
      body: JSON.stringify(body),
      signal,
    });
    for await (const frame of readEvents(response.body)) {
      if (frame.error || frame.event === "error") throw errorOf(frame, response.status);
      yield frame;
    }
  }
}

/** Text of single token ids, fetched once per id and many at a time. */
export class TokenTexts {
  constructor(api) {
    this.api = api;
    this.known = new Map();
    this.asked = new Set();
    this.wanted = new Set();
    this.pending = null;
  }

  get(id) {
    return this.known.get(id);
  }

  /** Fetches the texts of ids not asked for before; resolves to whether texts came in. */
  async load(ids) {
    for (const id of ids) {
      if (this.asked.has(id)) continue;
      this.asked.add(id);
      this.wanted.add(id);
    }
    let isNew = false;
    while (this.wanted.size > 0 || this.pending) {
      // One request at a time; what comes in meanwhile goes with the next.
      this.pending ??= this.fetchWanted();
      await this.pending;
      isNew = true;
    }
    return isNew;
  }

  async fetchWanted() {
    const tokens = [...this.wanted];
    this.wanted.clear();
    try {
      const answer = await this.api.post("detokenize", { tokens, return_token_strs: true });
      tokens.forEach((id, index) => this.known.set(id, answer.token_strs[index]));
    } catch (error) {
      for (const id of tokens) this.asked.delete(id);
      throw error;
    } finally {
      this.pending = null;
    }
  }
}
