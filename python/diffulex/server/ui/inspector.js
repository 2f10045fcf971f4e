// SPDX-License-Identifier: Apache-2.0
// The half of the page with the panel: which recording it shows, and the buttons that save it.

import { download, replayHtml } from "./export.js";
import { Panel } from "./panel.js";

const byId = (id) => document.getElementById(id);

/** Too low for conversation and panel at the same time. */
const LOW_SCREEN = "(max-width: 56rem) and (max-height: 40rem)";

function fileName(recording, ending) {
  return `diffulex-${recording.meta.created.replace(/[:.]/g, "-")}.${ending}`;
}

export class Inspector {
  /** `texts(id)` gives a token's text; `onFail(error)` is told what went wrong. */
  constructor(texts, onFail) {
    this.shown = null;
    this.isHandled = false;
    this.section = byId("inspector");
    const known = (id) => texts(id) ?? this.shown?.recording.texts[id];
    this.panel = new Panel(byId("panel"), known, () => this.keepInView());
    this.onFail = onFail;
    byId("fold").addEventListener("click", () => this.fold(!this.section.classList.contains("folded")));
    for (const kind of ["wheel", "touchmove"]) {
      this.section.addEventListener(kind, () => { this.isHandled = true; }, { passive: true });
    }
    byId("export-html").addEventListener("click", () => this.saveReplay());
    byId("export-json").addEventListener("click", () => {
      const { recording } = this.shown;
      download(fileName(recording, "json"), "application/json", JSON.stringify(recording));
    });
    this.fold(matchMedia(LOW_SCREEN).matches);
  }

  get player() {
    return this.panel.player;
  }

  /** On a small screen the panel can make room for the conversation. */
  fold(isFolded) {
    this.section.classList.toggle("folded", isFolded);
    byId("fold").textContent = isFolded ? "Show" : "Hide";
    byId("fold").setAttribute("aria-expanded", String(!isFolded));
  }

  /** Follows an answer that begins now. */
  follow(recording, node, clock, pace) {
    this.select({ recording, node });
    this.player.start(recording, clock, pace);
  }

  /** Opens a whole recording at the step that shows most, or plays it from the start. */
  open(recording, node, isReplay) {
    this.select({ recording, node });
    this.fold(false);
    this.player.open(recording);
    if (isReplay) this.player.replay();
    else this.player.pauseAt(recording.tellingFrame());
  }

  /** What is shown now, for `restore`. */
  get state() {
    return this.shown;
  }

  /** Shows what was shown before. */
  restore(state) {
    if (!state?.recording.length) {
      this.reset();
      return;
    }
    this.select(state);
    this.player.open(state.recording);
  }

  reset() {
    this.select(null);
    this.panel.reset();
  }

  select(shown) {
    this.shown?.node.classList.remove("selected");
    shown?.node.classList.add("selected");
    this.shown = shown;
    this.isHandled = false;
    document.querySelector("main").classList.toggle("has-recording", shown !== null);
    byId("inspected").textContent = shown?.recording.meta.question ?? "";
    if (shown) this.panel.view.specials = new Set(shown.recording.meta.specials ?? []);
    this.panel.showMetrics(null, -1);
    this.update();
  }

  /** The recording grew or ended. */
  update() {
    const { recording } = this.shown ?? {};
    const canSave = recording !== undefined && recording.length > 0 && !recording.meta.isGrowing;
    byId("export-json").disabled = !canSave;
    byId("export-html").disabled = !canSave;
    if (recording && !recording.length) this.panel.showMetrics(recording, -1);
  }

  async saveReplay() {
    const { recording } = this.shown;
    try {
      download(fileName(recording, "html"), "text/html", await replayHtml(recording));
    } catch (error) {
      this.onFail(error);
    }
  }

  /** While steps go by, the block that is worked on stays in view, unless a person scrolls. */
  keepInView() {
    if (this.isHandled || !["live", "playing"].includes(this.player.mode)) return;
    const blocks = this.panel.view.canvas.querySelectorAll('.block[data-state="active"]');
    const block = blocks[blocks.length - 1];
    if (!block) return;
    const box = block.getBoundingClientRect();
    const frame = this.section.getBoundingClientRect();
    if (box.bottom > frame.bottom) this.section.scrollTop += box.bottom - frame.bottom;
  }
}
