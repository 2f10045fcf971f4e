// SPDX-License-Identifier: Apache-2.0
// The page: wires conversation, panel, settings and server together.

import { Api, TokenTexts } from "./api.js";
import { Answer, Message } from "./chat.js";
import { download, replayHtml } from "./export.js";
import { Panel } from "./panel.js";
import {
  ThresholdKnob, bindApiKey, messagesFor, readApiKey, samplingFields,
} from "./settings.js";
import { element } from "./view.js";

const HEALTH_MS = 10_000;
/** Starts from random tokens instead of masks, and its blocks at the end of the prompt. */
const CANVAS_STRATEGY = "diffusion_gemma";
const THEMES = ["system", "light", "dark"];
const THEME_NAME = "diffulex-theme";
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
const panel = new Panel(byId("panel"), (id) => texts.get(id));
const knob = new ThresholdKnob();
const server = { model: null, info: {}, specials: [] };
const turns = [];
let current = null;
let selected = null;

function announce(text) {
  byId("announcer").textContent = text;
}

function showNotice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

function fail(error) {
  if (error.status === 401) {
    showNotice("This server asks for an API key: enter it under Settings.");
    byId("settings").showModal();
    byId("api-key").focus();
    return;
  }
  showNotice(error.message);
}

// --- server ------------------------------------------------------------------------------------------

async function connect() {
  try {
    const models = await api.get("v1/models");
    server.model = models.data[0].id;
    byId("model").textContent = server.model;
    const [info, tokenizer] = await Promise.all([api.get("server_info"), api.get("tokenizer_info")]);
    server.info = info;
    server.specials = specialIds(tokenizer, info);
    panel.view.specials = new Set(server.specials);
    const strategy = info.sampling_mode === "edit" ? "edit" : info.decoding_strategy;
    byId("model").textContent = [server.model, strategy, info.device].filter(Boolean).join(" · ");
    const thresholds = thresholdsOf(info);
    // What a person chose outlives a restart that changes nothing.
    const isNew = JSON.stringify(thresholds) !== JSON.stringify(knob.defaults);
    if (isNew || !knob.isTouched) knob.setDefaults(thresholds);
    showNotice("");
  } catch (error) {
    fail(error);
  }
  showSamples();
}

/** The server's thresholds that its strategy uses: a canvas is accepted by entropy, for example. */
function thresholdsOf({ decoding = {}, decoding_strategy: strategy, sampling_mode: mode }) {
  if (strategy === CANVAS_STRATEGY) return {};
  const { accept_threshold: accept, edit_threshold: edit } = decoding;
  return { accept_threshold: accept ?? undefined, edit_threshold: mode === "edit" ? edit : undefined };
}

/** Ids that stand for no text: those the tokenizer names, and those that end an answer. */
function specialIds(tokenizer, info) {
  const named = Object.entries(tokenizer)
    .filter(([name]) => name.endsWith("_token_id") || name === "all_special_ids")
    .flatMap(([, value]) => value);
  const ids = [...named, ...(info.eos_token_ids ?? [])];
  return [...new Set(ids.filter((id) => Number.isInteger(id)))];
}

async function showHealth() {
  let state = "down";
  try {
    state = (await fetch("health", { cache: "no-store" })).ok ? "ready" : "down";
  } catch {
    // No connection: down.
  }
  const dot = byId("health");
  const wasDown = dot.dataset.state === "down";
  dot.dataset.state = state;
  dot.title = state === "ready" ? "ready" : "not ready";
  // A server that was loading has facts now, and one that was away may have others.
  if (state === "ready" && (wasDown || server.info.state === "starting")) await connect();
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

// --- one answer --------------------------------------------------------------------------------------

function requestBody(question) {
  return {
    model: server.model ?? undefined,
    messages: messagesFor(question, turns),
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

async function ask(question) {
  if (current || !question.trim()) return;
  showNotice("");
  byId("welcome").hidden = true;
  const list = byId("messages");
  new Message(list, "user", question);
  const message = new Message(list, "assistant");
  const body = requestBody(question);
  const answer = new Answer(api, body, recordingMeta(question, body));
  current = answer;
  byId("question").value = "";
  setBusy(true);
  select(message, answer.recording);
  panel.player.start(answer.recording, () => answer.elapsed);
  announce("The answer is being written.");
  message.isBusy = true;
  message.node.scrollIntoView({ block: "nearest" });
  try {
    await answer.run({
      onText: (text) => showText(message, text),
      onSnapshot: () => takeSnapshot(answer.recording),
    });
    if (answer.isStopped) message.note("stopped");
    else turns.push({ role: "user", content: question }, { role: "assistant", content: answer.text });
    announce(answer.isStopped ? "Stopped." : `The answer is complete: ${answer.text}`);
  } catch (error) {
    message.note(error.message, "error");
    fail(error);
    announce("The answer ended with an error.");
  } finally {
    message.isBusy = false;
    current = null;
    setBusy(false);
    await complete(message, answer);
  }
}

function showText(message, text) {
  const list = byId("messages");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  message.setText(text);
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

function takeSnapshot(recording) {
  if (selected === recording) panel.player.notify();
  loadTexts(recording);
}

/** Fetches the texts of the tokens a recording shows last, and draws them. */
async function loadTexts(recording) {
  const ids = recording.frames.at(-1)?.ids ?? [];
  try {
    if (await texts.load(ids.filter((id) => !recording.isMask(id)))) panel.view.redraw();
  } catch (error) {
    fail(error);
  }
}

async function complete(message, answer) {
  const { recording, usage } = answer;
  const seconds = (recording.meta.endTime / 1000).toFixed(2);
  if (usage) {
    const tokens = usage.completion_tokens;
    message.note(`${tokens} tokens in ${usage.nfe ?? "?"} forwards, ${seconds} s`);
  }
  if (answer.finishReason === "length") message.note("cut at a limit");
  await loadTexts(recording);
  for (const frame of recording.frames) {
    for (const id of frame.ids) if (id !== null) recording.texts[id] ??= texts.get(id);
  }
  if (recording.length) {
    const inspect = element("button", "quiet", "Inspect");
    inspect.type = "button";
    inspect.addEventListener("click", () => {
      select(message, recording);
      panel.player.open(recording);
    });
    message.foot.append(inspect);
  }
  if (selected === recording) {
    setExports(recording.length > 0);
    if (!recording.length) panel.showMetrics(recording, -1);
  }
}

/** Makes a recording the one that the panel shows and the buttons save. */
function select(message, recording) {
  document.querySelector(".message.selected")?.classList.remove("selected");
  message.node.classList.add("selected");
  selected = recording;
  byId("inspector").classList.add("has-recording");
  byId("inspected").textContent = recording.meta.question;
  setExports(recording.length > 0 && !recording.meta.isGrowing);
  panel.showMetrics(null, -1);
}

function setExports(isEnabled) {
  byId("export-json").disabled = !isEnabled;
  byId("export-html").disabled = !isEnabled;
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  if (!isBusy) byId("question").focus({ preventScroll: true });
}

function fileName(recording, ending) {
  return `diffulex-${recording.meta.created.replace(/[:.]/g, "-")}.${ending}`;
}

async function saveReplay() {
  const recording = selected;
  try {
    download(fileName(recording, "html"), "text/html", await replayHtml(recording));
  } catch (error) {
    fail(error);
  }
}

// --- controls ----------------------------------------------------------------------------------------

function setTheme(theme) {
  const button = byId("theme");
  const root = document.documentElement;
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme;
  button.textContent = { system: "◐", light: "☼", dark: "☾" }[theme];
  const name = theme === "system" ? "as the system" : theme;
  button.setAttribute("aria-label", `Colours: ${name}`);
  button.title = `Colours: ${name}`;
  button.dataset.theme = theme;
}

function bindTheme() {
  setTheme(localStorage.getItem(THEME_NAME) ?? "system");
  byId("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(byId("theme").dataset.theme) + 1) % THEMES.length];
    localStorage.setItem(THEME_NAME, next);
    setTheme(next);
  });
}

function bindDisplay() {
  byId("mask-glyph").addEventListener("input", (event) => {
    panel.view.maskGlyph = event.target.value || "▨";
    panel.view.redraw();
  });
  byId("show-specials").addEventListener("change", (event) => {
    panel.view.showsSpecials = event.target.checked;
    panel.view.redraw();
  });
  byId("denoise-detail").addEventListener("change", (event) => {
    panel.view.showsConfidence = event.target.checked;
    panel.view.redraw();
  });
  byId("smooth").addEventListener("change", (event) => {
    panel.player.isSmooth = event.target.checked;
  });
}

function bindComposer() {
  const question = byId("question");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(question.value);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask(question.value);
  });
  byId("stop").addEventListener("click", () => current?.stop());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("settings").open) current?.stop();
  });
}

function newChat() {
  current?.stop();
  turns.length = 0;
  selected = null;
  for (const node of document.querySelectorAll(".message")) node.remove();
  byId("welcome").hidden = false;
  byId("inspector").classList.remove("has-recording");
  byId("inspected").textContent = "Nothing recorded yet.";
  setExports(false);
  panel.reset();
  byId("question").focus();
}

bindTheme();
bindDisplay();
bindComposer();
bindApiKey(connect);
byId("new-chat").addEventListener("click", newChat);
byId("open-settings").addEventListener("click", () => byId("settings").showModal());
byId("export-html").addEventListener("click", saveReplay);
byId("export-json").addEventListener("click", () => {
  download(fileName(selected, "json"), "application/json", JSON.stringify(selected));
});
setInterval(showHealth, HEALTH_MS);
connect().then(showHealth);
byId("question").focus({ preventScroll: true });
