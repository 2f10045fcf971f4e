// SPDX-License-Identifier: Apache-2.0
// The page of a server of images or videos: asks for a picture and shows it after every step, or for a
// video and plays it.

import { Api, errorOf } from "./api.js";
import { explainError, stateWords } from "./errors.js";
import { PictureRecording, PictureView, replayPage } from "./picture.js";
import { Player } from "./player.js";
import { readEvents } from "./sse.js";
import { bindTheme } from "./theme.js";
import { VideoRecording, VideoView, findVideo, receiveVideo, startVideo } from "./video.js";
import { element } from "./view.js";

const HEALTH_MS = 10_000;
const KEY_NAME = "diffulex-api-key";
/** Pictures that stay at hand; older ones are forgotten. */
const MAX_PICTURES = 24;
/** Frames per second unless a request says something else. */
const FPS = 16;
const SHAPE_SAMPLES = [
  "a red circle left of a blue square",
  "a small yellow cross above a large purple diamond on black",
  "a pink square below a green cross",
];

const byId = (id) => document.getElementById(id);
const readKey = () => byId("api-key").value.trim();

const api = new Api(readKey);
const controls = Object.fromEntries(
  ["slider", "play", "first", "last", "live", "speed", "label"].map((id) => [id, byId(id)]),
);
const player = new Player(
  new PictureView(byId("picture"), byId("empty"), byId("caption")), controls,
);
const recordings = [];

let info = null;
let running = null;
let hasResumed = false;

const explain = (error) => explainError(error, "This is too much for the server: send fewer or smaller pictures.");

function showNotice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = text === "";
}

function setBusy(isBusy) {
  byId("draw").hidden = isBusy;
  byId("stop").hidden = !isBusy;
}

// --- server ------------------------------------------------------------------------------------------

/** Fills in what the model does when nothing is said. */
async function loadFacts() {
  info = await api.get("server_info");
  const { defaults, guidance } = info;
  byId("model").textContent = ` · ${[info.model, info.device].join(" · ")}`;
  for (const [id, name] of [
    ["steps", "num_inference_steps"], ["width", "width"], ["height", "height"], ["guidance", guidance],
  ]) {
    byId(id).placeholder = String(defaults[name] ?? "");
  }
  for (const id of ["width", "height"]) byId(id).step = String(info.size_multiple);
  byId("every").disabled = !info.has_previews;
  byId("strength").placeholder = String(defaults.strength ?? "");
  byId("cache").replaceChildren(
    new Option(`as the server: ${info.cache_backend}`, ""),
    ...info.cache_backends.map((name) => new Option(name, name)),
  );
  showParts();
  const previews = info.has_previews || info.media === "video" ? "" : " This model has no previews.";
  byId("facts").textContent = `${info.pipeline}.${previews}`;
  byId("samples").replaceChildren(...(info.draws_shapes ? SHAPE_SAMPLES.map(sample) : []));
  resume();
}

/** Shows what belongs to what the server draws. */
function showParts() {
  const isVideo = info.media === "video";
  for (const node of document.querySelectorAll("[data-media]")) node.hidden = node.dataset.media !== info.media;
  for (const node of document.querySelectorAll("[data-edits]")) node.hidden = !info.edits;
  byId("strength").parentElement.hidden ||= !("strength" in info.defaults);
  if (!isVideo || player.view instanceof VideoView) return;
  document.title = "Diffulex videos";
  byId("composer-title").textContent = "Videos";
  byId("viewer-title").textContent = "Video";
  byId("empty").textContent = "The video appears here when it is drawn.";
  byId("save-picture").textContent = "Save MP4";
  byId("seconds").placeholder = String(info.defaults.num_frames / FPS);
  player.view = new VideoView(byId("video"), byId("progress"), byId("empty"), byId("caption"));
}

function sample(text) {
  const item = element("li");
  const button = element("button", "small", text);
  button.type = "button";
  button.addEventListener("click", () => {
    byId("prompt").value = text;
    draw();
  });
  item.append(button);
  return item;
}

async function look() {
  let words = null;
  try {
    const response = await fetch("health", { cache: "no-store" });
    const body = await response.json();
    if (!response.ok) words = stateWords(body.status) ?? "takes no requests";
    if (!info) await loadFacts();
  } catch (error) {
    words ??= error.status === 401 ? "asks for an API key (Settings)" : "does not answer";
  }
  byId("state").textContent = words ?? "ready";
  byId("health").dataset.state = words ? "down" : "ready";
  setTimeout(look, HEALTH_MS);
}

// --- drawing -----------------------------------------------------------------------------------------

const numberOf = (id) => (byId(id).value.trim() === "" ? undefined : Number(byId(id).value));

/** Fields of a request; those that are empty are left to the model. */
function requestFields(prompt) {
  const { defaults, guidance } = info;
  const width = numberOf("width");
  const height = numberOf("height");
  const hasSize = width !== undefined || height !== undefined;
  return {
    prompt,
    // Drawn here: a seed of the server may have more digits than a number of this page.
    seed: numberOf("seed") ?? Math.floor(Math.random() * 2 ** 32),
    num_inference_steps: numberOf("steps"),
    negative_prompt: byId("negative").value.trim() || undefined,
    size: hasSize ? `${width ?? defaults.width}x${height ?? defaults.height}` : undefined,
    [guidance]: numberOf("guidance"),
    cache_backend: byId("cache").value || undefined,
  };
}

/** The fields as a form, with the chosen files as `name`. */
function formOf(fields, name) {
  const form = new FormData();
  for (const [field, value] of Object.entries(fields)) {
    if (value !== undefined) form.append(field, String(value));
  }
  for (const file of byId("files").files) form.append(name, file);
  return form;
}

function askForPicture(fields) {
  const every = info.has_previews ? numberOf("every") ?? 1 : undefined;
  if (byId("files").files.length === 0) {
    const body = { ...fields, stream: true, diffulex: { preview_every: every } };
    return ["v1/images/generations", JSON.stringify(body)];
  }
  const more = { stream: true, strength: numberOf("strength"), "diffulex[preview_every]": every };
  return ["v1/images/edits", formOf({ ...fields, ...more }, "image")];
}

async function drawPicture(fields, signal) {
  const numSteps = fields.num_inference_steps ?? info.defaults.num_inference_steps;
  const recording = new PictureRecording(fields.prompt, numSteps);
  player.start(recording, () => recording.clock, "newest");
  try {
    const [path, body] = askForPicture(fields);
    const response = await api.call(path, { method: "POST", body, signal });
    for await (const event of readEvents(response.body)) {
      if (event.error) throw errorOf(event, response.status);
      const facts = event.diffulex;
      if (event.type.endsWith(".completed")) {
        recording.add(recording.numSteps, event.b64_json);
        recording.meta.isGrowing = false;
        recording.facts = { seed: fields.seed, seconds: facts.execute_s, size: event.size };
      } else {
        recording.numSteps = facts.num_steps;
        recording.add(facts.step, event.b64_json);
      }
      player.notify();
    }
  } finally {
    recording.meta.isGrowing = false;
    player.showControls();
  }
  return recording;
}

async function startDrawing(fields, signal) {
  const more = { seconds: numberOf("seconds"), fps: numberOf("fps") };
  const job = await startVideo(api, formOf({ ...fields, ...more }, "input_reference"));
  // A page that is loaded again goes on with it.
  history.replaceState(null, "", `?video=${job.id}`);
  return awaitVideo(job, signal);
}

async function awaitVideo(started, signal) {
  const recording = new VideoRecording(started.prompt);
  const { view } = player;
  player.start(recording, () => recording.clock, "newest");
  try {
    const found = await receiveVideo(api, started, signal, (job) => view.report(recording, job));
    recording.finish(found.job, found.blob);
  } finally {
    view.report(recording, null);
  }
  return recording;
}

/** Does what takes a while and can be stopped; `work(signal)` gives a finished recording. */
async function run(prompt, work) {
  showNotice("");
  setBusy(true);
  running = new AbortController();
  leaveStopped();
  setSavable(false);
  try {
    const recording = await work(running.signal);
    keep(recording);
    byId("announcer").textContent = `Drawn: ${prompt}, seed ${recording.facts.seed}.`;
  } catch (error) {
    const isStopped = error.name === "AbortError";
    if (!isStopped) showNotice(explain(error));
    byId("announcer").textContent = isStopped ? "Stopped." : "";
    byId("caption").textContent = isStopped ? `${prompt} · stopped` : "";
  } finally {
    running = null;
    setBusy(false);
  }
}

async function draw() {
  const prompt = byId("prompt").value.trim();
  if (prompt === "" || running || !info) return;
  const fields = requestFields(prompt);
  const work = info.media === "video" ? startDrawing : drawPicture;
  await run(prompt, (signal) => work(fields, signal));
}

/** Goes on with the video that the address names, if the server still has it. */
async function resume() {
  const id = new URLSearchParams(location.search).get("video");
  if (hasResumed || info.media !== "video" || !/^video_[0-9a-f]+$/.test(id)) return;
  hasResumed = true;
  try {
    const job = await findVideo(api, id);
    if (job && !running) await run(job.prompt, (signal) => awaitVideo(job, signal));
  } catch (error) {
    showNotice(explain(error));
  }
}

// --- pictures ----------------------------------------------------------------------------------------

/** Puts a finished picture into the gallery and opens it. */
function keep(recording) {
  recordings.unshift(recording);
  for (const old of recordings.splice(MAX_PICTURES)) forget(old);
  open(recording);
}

function forget(recording) {
  for (const frame of recording.frames) URL.revokeObjectURL(frame.url);
}

/** Forgets what the player shows if it is not in the gallery: its drawing was stopped or failed. */
function leaveStopped() {
  const { recording } = player;
  if (recording && !recordings.includes(recording)) forget(recording);
}

/** Buttons for what only a finished picture has. */
function setSavable(isSavable) {
  for (const id of ["save-picture", "save-replay", "same-seed"]) byId(id).disabled = !isSavable;
}

function open(recording) {
  leaveStopped();
  player.open(recording);
  player.view.describe(recording);
  setSavable(true);
  byId("gallery").replaceChildren(...recordings.map((item) => thumbnail(item, item === recording)));
}

function thumbnail(recording, isOpen) {
  const item = element("li");
  const button = element("button");
  button.type = "button";
  button.setAttribute("aria-pressed", String(isOpen));
  button.setAttribute("aria-label", `${recording.prompt}, seed ${recording.facts.seed}`);
  button.title = recording.prompt;
  const image = element(recording instanceof VideoRecording ? "video" : "img");
  image.src = recording.frames.at(-1).url;
  image.alt = "";
  image.ariaHidden = "true";
  button.append(image);
  button.addEventListener("click", () => {
    if (!running) open(recording);
  });
  item.append(button);
  return item;
}

function save(blob, name) {
  const link = element("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), HEALTH_MS);
}

function bind() {
  byId("api-key").value = sessionStorage.getItem(KEY_NAME) ?? "";
  byId("api-key").addEventListener("change", () => {
    sessionStorage.setItem(KEY_NAME, readKey());
    info = null;
    loadFacts().then(() => showNotice(""), (error) => showNotice(explain(error)));
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    draw();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    draw();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("save-picture").addEventListener("click", () => {
    const { recording } = player;
    const [kind, ending] = recording instanceof VideoRecording ? ["video", "mp4"] : ["picture", "png"];
    save(recording.frames.at(-1).blob, `${kind}-${recording.facts.seed}.${ending}`);
  });
  byId("save-replay").addEventListener("click", () => {
    const { recording } = player;
    save(new Blob([replayPage(recording)], { type: "text/html" }), `replay-${recording.facts.seed}.html`);
  });
  byId("same-seed").addEventListener("click", () => {
    byId("seed").value = String(player.recording.facts.seed);
    byId("more").open = true;
  });
}

bindTheme(byId("theme"));
bind();
await look();
byId("prompt").focus({ preventScroll: true });
