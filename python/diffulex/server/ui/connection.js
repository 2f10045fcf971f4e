// SPDX-License-Identifier: Apache-2.0
// What the page knows of its server: the model, the facts, and whether it is there.

import { ApiError } from "./api.js";
import { stateWords } from "./errors.js";

const HEALTH_MS = 10_000;
/** A server that is away is looked for more often. */
const AWAY_MS = 3_000;
/** Starts from random tokens instead of masks, and its blocks at the end of the prompt. */
export const CANVAS_STRATEGY = "diffusion_gemma";

/** The server's thresholds that its strategy uses: a canvas is accepted by entropy, for example. */
export function thresholdsOf({ decoding = {}, decoding_strategy: strategy, sampling_mode: mode }) {
  if (strategy === CANVAS_STRATEGY) return {};
  const { accept_threshold: accept, edit_threshold: edit } = decoding;
  return { accept_threshold: accept ?? undefined, edit_threshold: mode === "edit" ? edit : undefined };
}

/** Ids that stand for no text: those the tokenizer names, and those that end an answer. */
export function specialIds(tokenizer, info) {
  const named = Object.entries(tokenizer)
    .filter(([name]) => name.endsWith("_token_id") || name === "all_special_ids")
    .flatMap(([, value]) => value);
  const ids = [...named, ...(info.eos_token_ids ?? [])];
  return [...new Set(ids.filter((id) => Number.isInteger(id)))];
}

/**
 * Whether the chat template renders earlier turns: asks for the tokens of a question alone and of the
 * same question after an exchange. A template that drops or refuses the exchange renders one turn.
 */
export async function rendersEarlierTurns(api) {
  const count = async (messages) => (await api.post("tokenize", { messages })).count;
  const question = { role: "user", content: "2" };
  const earlier = [{ role: "user", content: "1" }, { role: "assistant", content: "1" }];
  const alone = await count([question]);
  try {
    return (await count([...earlier, question])) > alone;
  } catch (error) {
    if (error instanceof ApiError && error.status === 400) return false;
    throw error;
  }
}

export class Connection {
  /** `onFacts()` after the facts came in, `onState(isReady, words)` on every look, `onFail(error)`. */
  constructor(api, { onFacts, onState, onFail }) {
    this.api = api;
    this.onFacts = onFacts;
    this.onState = onState;
    this.onFail = onFail;
    this.model = null;
    this.info = {};
    this.specials = [];
    this.keepsTurns = true;
    this.needsKey = false;
    this.isAway = false;
    this.timer = null;
  }

  /** Model, strategy and device in one line. */
  get title() {
    const { info } = this;
    const strategy = info.sampling_mode === "edit" ? "edit" : info.decoding_strategy;
    return [this.model, strategy, info.device].filter(Boolean).join(" · ");
  }

  /** Most tokens of a prompt; undefined while the server loads. */
  get promptLimit() {
    return this.info.max_model_len ? this.info.max_model_len - 1 : undefined;
  }

  /** Asks for everything anew. */
  async connect() {
    const { api } = this;
    try {
      this.model = (await api.get("v1/models")).data[0].id;
      const [info, tokenizer] = await Promise.all([
        api.get("server_info"), api.get("tokenizer_info"),
      ]);
      this.info = info;
      this.specials = specialIds(tokenizer, info);
      this.keepsTurns = await rendersEarlierTurns(api);
      this.onFacts();
    } catch (error) {
      if (error.status === 401) this.needsKey = true;
      this.onFail(error);
    }
  }

  /** Looks after the server now, and again in a while. */
  async look() {
    clearTimeout(this.timer);
    const words = await this.away();
    const wasAway = this.isAway;
    this.isAway = words !== null;
    this.onState(!this.isAway, words ?? "ready");
    this.timer = setTimeout(() => this.look(), this.isAway ? AWAY_MS : HEALTH_MS);
    // A server that was loading has facts now, and one that was away may have others.
    const isNew = wasAway || (!this.model && !this.needsKey);
    if (!this.isAway && isNew) await this.connect();
  }

  /** Why the server takes no requests, as the end of a sentence; null if it takes them. */
  async away() {
    let response;
    try {
      response = await fetch("health", { cache: "no-store" });
    } catch {
      return "does not answer";
    }
    if (response.ok) return null;
    const body = await response.json().catch(() => ({}));
    return stateWords(body.status) ?? "takes no requests";
  }
}
