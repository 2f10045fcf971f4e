// SPDX-License-Identifier: Apache-2.0
// The page: wires conversation, panel, settings and server together.

import { Api, TokenTexts } from "./api.js";
import { Budget } from "./budget.js";
import { Chats } from "./chats.js";
import { showRoutes, showSnippets } from "./code.js";
import { CANVAS_STRATEGY, Connection, thresholdsOf } from "./connection.js";
import { Conversation } from "./conversation.js";
import { explainError } from "./errors.js";
import { Inspector } from "./inspector.js";
import {
  SettingsDialog, ThresholdKnob, messagesFor, readApiKey, samplingFields,
} from "./settings.js";
import { bindTheme } from "./theme.js";
import { element, prefersCalm } from "./view.js";

const DEMO_SAMPLES = [
  "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?",
  "Tom has 3 bags with 12 marbles each. He gives 5 marbles to Mia. How many marbles does Tom have now?",
  "Max has 29 stones. Max wins 13 stones in a game. 25 of the stones get lost. 440 more stones are shared equally by 5 children with Max. What is the number of stones now?",
];
const SAMPLES = [
  "Write a short poem about noise that turns into words.",
  "Explain in five sentences why the sky is blue.",
  "Write a Python function that tells whether a string is a palindrome.",
];

const byId = (id) => document.getElementById(id);

const api = new Api(readApiKey);
const texts = new TokenTexts(api);
const inspector = new Inspector((id) => texts.get(id), fail);
const knob = new ThresholdKnob();
const server = new Connection(api, { onFacts: showFacts, onState: showState, onFail: fail });
const conversation = new Conversation(byId("messages"), {
  api,
  inspector,
  texts,
  request: requestBody,
  meta: recordingMeta,
  formats: () => byId("formats").checked,
  pace: nextPace,
  announce,
  fail,
  onShow: leaveChange,
  onBusy: setBusy,
  onRefused: takeBack,
  onSnapshot: takeSnapshot,
  onEdit: edit,
  loadTexts,
  keep: (chat, exchange) => chats.keep(chat, exchange),
  loadRecording: (chat, exchange) => chats.loadRecording(chat, exchange),
});
const chats = new Chats(conversation, fail);
const budget = new Budget(api, byId("budget"), {
  messages: () => byId("question").value.trim() && messagesFor(byId("question").value, earlierTurns()),
  limit: () => server.promptLimit,
});
const settings = new SettingsDialog(onSettings);
/** Index of the exchange that the next question replaces; null if it is a new one. */
let editedAt = null;
let isFirstAnswer = true;
let wantsMemory = true;

function announce(text) {
  byId("announcer").textContent = text;
}

// --- errors and the state of the server --------------------------------------------------------------

function showNotice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

function fail(error) {
  showNotice(explainError(error));
  if (error instanceof TypeError) server.look();
  if (error.status === 401 && !byId("settings").open) {
    settings.open();
    byId("api-key").focus();
  }
}

function showState(isReady, words) {
  byId("health").dataset.state = isReady ? "ready" : "down";
  byId("state").textContent = isReady ? "ready" : "not ready";
  const text = `The server ${words}. Your chat is kept; this page keeps looking for the server.`;
  const away = byId("away");
  if (!isReady && away.textContent !== text) away.textContent = text;
  away.hidden = isReady;
}

function showFacts() {
  byId("model").textContent = server.title;
  const thresholds = thresholdsOf(server.info);
  // What a person chose outlives a restart that changes nothing.
  const isNew = JSON.stringify(thresholds) !== JSON.stringify(knob.defaults);
  if (isNew || !knob.isTouched) knob.setDefaults(thresholds);
  byId("memory").disabled = !server.keepsTurns;
  byId("memory").checked = server.keepsTurns && wantsMemory;
  byId("memory-note").textContent = server.keepsTurns ? ""
    : "Not here: this model takes one question at a time.";
  showNotice("");
  showSamples();
  budget.update();
}

function showSamples() {
  const samples = server.model?.includes("demo") ? DEMO_SAMPLES : SAMPLES;
  byId("samples").replaceChildren(...samples.map((text) => {
    const item = element("li");
    const choice = element("button", "", text);
    choice.type = "button";
    choice.addEventListener("click", () => ask(text));
    item.append(choice);
    return item;
  }));
}

// --- what is sent ------------------------------------------------------------------------------------

/** Turns that go with the next question: none if memory is off, or if the template drops them. */
function earlierTurns(turns = conversation.turns(editedAt ?? undefined)) {
  return byId("memory").checked ? turns : [];
}

function requestBody(question, turns) {
  return {
    model: server.model ?? undefined,
    messages: messagesFor(question, earlierTurns(turns)),
    stream: true,
    stream_options: { include_usage: true },
    decoding: knob.decoding(),
    ...samplingFields(),
  };
}

function recordingMeta(question, body) {
  const { block_size: blockSize, decoding_strategy: strategy } = server.info;
  return {
    model: server.model,
    question,
    created: new Date().toISOString(),
    blockSize,
    strategy,
    isCanvas: strategy === CANVAS_STRATEGY,
    request: body,
    specials: server.specials,
  };
}

/** The first answer goes by slowly enough to see how it comes about. */
function nextPace() {
  const chosen = byId("pace").value;
  if (chosen !== "first") return chosen;
  const isSlow = isFirstAnswer && !prefersCalm();
  isFirstAnswer = false;
  return isSlow ? "slow" : "smooth";
}

async function ask(question, at = undefined) {
  if (conversation.isBusy || !question.trim()) return;
  showNotice("");
  byId("welcome").hidden = true;
  byId("question").value = "";
  stopEditing();
  budget.update();
  await conversation.ask(question, at);
}

/** Refused, or stopped before its answer began: the question is back where it can be changed. */
function takeBack(question, at) {
  const box = byId("question");
  if (!box.value) box.value = question;
  if (at < conversation.exchanges.length) startEditing(at);
  byId("welcome").hidden = conversation.exchanges.length > 0;
  budget.update();
}

function edit(index) {
  byId("question").value = conversation.exchanges[index].question;
  startEditing(index);
  byId("question").focus();
  budget.update();
}

function startEditing(index) {
  editedAt = index;
  byId("editing").hidden = false;
}

function stopEditing() {
  editedAt = null;
  byId("editing").hidden = true;
}

/** Another conversation is shown: what was typed stays, as a new question. */
function leaveChange() {
  stopEditing();
  budget.update();
}

// --- one answer --------------------------------------------------------------------------------------

function takeSnapshot(recording) {
  if (inspector.state?.recording === recording) inspector.player.notify();
  loadTexts(recording);
}

/** Fetches the texts of the tokens a recording shows last, and draws them. */
async function loadTexts(recording) {
  const ids = recording.frames.at(-1)?.ids ?? [];
  try {
    const isNew = await texts.load(ids.filter((id) => !recording.isMask(id)));
    if (isNew) inspector.panel.view.redraw();
  } catch (error) {
    fail(error);
  }
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  if (!isBusy) byId("question").focus({ preventScroll: true });
}

// --- controls ----------------------------------------------------------------------------------------

function bindDisplay() {
  const { panel } = inspector;
  const bind = (id, show) => {
    byId(id).addEventListener("input", () => show(byId(id)));
    show(byId(id));
  };
  bind("mask-glyph", (field) => panel.setMaskGlyph(field.value));
  bind("show-specials", (field) => {
    panel.view.showsSpecials = field.checked;
    panel.view.redraw();
  });
  bind("denoise-detail", (field) => {
    panel.view.showsConfidence = field.checked;
    panel.view.redraw();
  });
  bind("formats", () => conversation.redraw());
}

function bindComposer() {
  const question = byId("question");
  const send = () => ask(question.value, editedAt ?? undefined);
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  question.addEventListener("input", () => budget.update());
  byId("memory").addEventListener("input", (event) => {
    wantsMemory = event.target.checked;
    budget.update();
  });
  byId("cancel-edit").addEventListener("click", () => {
    stopEditing();
    question.value = "";
    question.focus();
    budget.update();
  });
  byId("stop").addEventListener("click", () => conversation.stop());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) conversation.stop();
  });
}

function onSettings(isNewKey) {
  showNotice("");
  if (isNewKey) server.connect();
  budget.update();
}

function newChat() {
  chats.begin();
  showNotice("");
  byId("question").focus();
}

async function openCode() {
  const asked = byId("question").value.trim() || conversation.exchanges.at(-1)?.question;
  const body = requestBody(asked ?? DEMO_SAMPLES[0], []);
  showSnippets(byId("snippets"), body, readApiKey() !== "" || server.needsKey);
  byId("code").showModal();
  try {
    showRoutes(byId("routes"), await api.get("openapi.json"));
  } catch (error) {
    byId("routes").replaceChildren(element("li", "hint", explainError(error)));
  }
}

bindTheme(byId("theme"));
bindDisplay();
bindComposer();
byId("new-chat").addEventListener("click", newChat);
byId("open-code").addEventListener("click", openCode);
byId("open-settings").addEventListener("click", () => settings.open());
showSamples();
await chats.start();
await server.look();
byId("question").focus({ preventScroll: true });
