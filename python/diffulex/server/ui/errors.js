// SPDX-License-Identifier: Apache-2.0
// What went wrong, in words for a person at the page.

/** Settings by the field of the request that they become. */
const SETTING_NAMES = {
  max_tokens: "Max tokens",
  temperature: "Temperature",
  top_p: "Top-p",
  top_k: "Top-k",
  min_p: "Min-p",
  seed: "Seed",
  max_nfe: "Max forward passes (NFE)",
  max_repetition_run: "Max repetition run",
  stop: "Stop strings",
};
/** States of a server that takes no requests, by the name that /health gives. */
const STATE_WORDS = {
  starting: "is loading the model",
  draining: "is shutting down",
  stopping: "is shutting down",
  restarting: "is restarting its engine",
  unresponsive: "does not hear from its engine",
  stuck: "is stuck in a step",
  dead: "has lost its engine",
  engine_dead: "has lost its engine",
};
const TOO_LONG_FOR_CHAT = "This is too long for the model. Shorten the question, or start a new chat.";
const TOO_LONG = /max_model_len|maximum context length/;

/** What a server in this state does, as the end of a sentence; undefined for an unknown state. */
export function stateWords(state) {
  return STATE_WORDS[state];
}

/** One or two sentences about an error of a request; `tooLong` says what to do about one that is too long. */
export function explainError(error, tooLong = TOO_LONG_FOR_CHAT) {
  const { status, code, param, message } = error;
  if (error instanceof TypeError) return "The server cannot be reached.";
  if (status === 401) return "This server asks for an API key: enter it under Settings.";
  if (status === 429) return "The server is busy and its queue is full. Try again in a moment.";
  if (status === 503 && stateWords(code)) return `The server ${stateWords(code)}.`;
  if (param in SETTING_NAMES) return `Settings, ${SETTING_NAMES[param]}: ${detail(message, param)}`;
  if (status === 413 || TOO_LONG.test(message)) {
    return `${tooLong} (${message})`;
  }
  return message;
}

/** A message without the name of its field at the start. */
function detail(message, param) {
  return message.startsWith(`${param}: `) ? message.slice(param.length + 2) : message;
}
