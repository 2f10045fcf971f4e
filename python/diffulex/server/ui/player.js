// SPDX-License-Identifier: Apache-2.0
// Shows a recording: follows it while it grows, and goes through it afterwards.

/** While following, a step stays this long if the stream allows it. */
const CALM_MS = 80;
/** Slowly: a step stays this long, and a long answer is over in about this time. */
const SLOW_MS = 500;
const SLOW_TOTAL_MS = 7000;
/** Drawings cannot follow each other faster on most screens. */
const DRAW_MS = 1000 / 60;
/** How far the picture may lag the stream: the pace grows with the backlog. */
export const MAX_LAG_MS = 1000;

/**
 * Frames to go on by, `elapsed` ms after the last drawing. The newest frame came `age` ms ago, and
 * the `behind` frames up to it share the time until it has to be shown.
 */
export function followSteps(behind, elapsed, age, isSmooth) {
  const left = MAX_LAG_MS - age;
  if (!isSmooth || left <= 0) return behind;
  const delay = Math.min(CALM_MS, left / behind);
  // A late drawing is no reason to skip a step while there is time to show each.
  if (delay >= DRAW_MS) return elapsed >= delay ? 1 : 0;
  return Math.min(behind, Math.floor(elapsed / delay));
}

/** Frames to go on by when an answer of `length` frames, as far as known, is shown slowly. */
export function slowSteps(behind, elapsed, length) {
  const delay = Math.min(SLOW_MS, SLOW_TOTAL_MS / length);
  return Math.min(behind, Math.floor(elapsed / delay));
}

export class Player {
  /** `controls`: slider, play, first, last, live, speed, label. `onFrame`: after each drawing. */
  constructor(view, controls, onFrame = () => {}) {
    this.view = view;
    this.controls = controls;
    this.onFrame = onFrame;
    this.recording = null;
    this.index = -1;
    this.mode = "idle";
    this.pace = "smooth";
    this.lastDraw = 0;
    this.request = null;
    controls.slider.addEventListener("input", () => this.pauseAt(Number(controls.slider.value)));
    controls.play.addEventListener("click", () => this.togglePlay());
    controls.first.addEventListener("click", () => this.pauseAt(0));
    controls.last.addEventListener("click", () => this.pauseAt(Infinity));
    controls.live.addEventListener("click", () => this.follow());
    this.showControls();
  }

  /** Shows a recording from its last frame. */
  open(recording) {
    this.recording = recording;
    this.mode = "paused";
    this.index = -1;
    this.seek(recording.length - 1, false);
  }

  /**
   * Follows a recording that grows from now on; `clock()` is the time its frames are stamped with.
   * `pace`: `slow` shows every step for a while, `smooth` is at most a second behind, `newest`
   * draws the newest frame only.
   */
  start(recording, clock, pace = "smooth") {
    this.recording = recording;
    this.clock = clock;
    this.pace = pace;
    this.index = -1;
    this.mode = "live";
    this.lastDraw = 0;
    this.view.clear();
    this.showControls();
  }

  /** Forgets the recording. */
  close() {
    this.recording = null;
    this.mode = "idle";
    this.index = -1;
    this.view.clear();
    this.showControls();
  }

  /** The recording grew. */
  notify() {
    if (this.mode === "live") this.schedule();
    else this.showControls();
  }

  /** To the newest frame, and on with it while the recording grows. */
  follow() {
    if (!this.recording) return;
    if (!this.recording.meta.isGrowing) {
      this.pauseAt(Infinity);
      return;
    }
    if (this.pace === "slow") this.pace = "smooth";
    this.mode = "live";
    this.schedule();
    this.showControls();
  }

  /** Plays from the first frame on. */
  replay() {
    if (!this.recording?.length) return;
    this.seek(0, true);
    this.play();
  }

  pauseAt(index) {
    if (!this.recording?.length) return;
    this.mode = "paused";
    this.seek(Math.min(index, this.recording.length - 1), false);
  }

  togglePlay() {
    if (!this.recording?.length) return;
    if (this.mode === "playing") {
      this.mode = "paused";
    } else {
      if (this.isAtEnd) this.seek(0, true);
      this.play();
    }
    this.showControls();
  }

  play() {
    this.mode = "playing";
    this.lastDraw = performance.now();
    this.schedule();
    this.showControls();
  }

  get isAtEnd() {
    return this.index >= (this.recording?.length ?? 0) - 1;
  }

  schedule() {
    this.request ??= requestAnimationFrame((now) => {
      this.request = null;
      this.tick(now);
    });
  }

  tick(now) {
    if (!this.recording) return;
    const last = this.recording.length - 1;
    if (this.mode === "live") this.tickLive(now, last);
    if (this.mode === "playing") this.tickPlaying(now, last);
  }

  tickLive(now, last) {
    // Frames dropped from the front of a long recording move those that follow.
    this.index = Math.min(this.index, last);
    const behind = last - this.index;
    if (behind === 0) return;
    const steps = this.index < 0 ? 1 : this.stepsLive(behind, now - this.lastDraw, last);
    if (steps > 0) {
      this.lastDraw = now;
      this.seek(this.index + steps, true);
    }
    if (this.index < last) this.schedule();
  }

  stepsLive(behind, elapsed, last) {
    if (this.pace === "slow") return slowSteps(behind, elapsed, last + 1);
    const age = this.clock() - this.recording.frames[last].t;
    return followSteps(behind, elapsed, age, this.pace === "smooth");
  }

  tickPlaying(now, last) {
    if (now - this.lastDraw >= this.playDelay()) {
      this.lastDraw = now;
      this.seek(Math.min(this.index + 1, last), true);
    }
    if (this.index < last) this.schedule();
    else this.mode = "paused";
    this.showControls();
  }

  /** Milliseconds a frame stays: by the chosen speed, or as long as it took when recorded. */
  playDelay() {
    const speed = this.controls.speed.value;
    if (speed !== "recorded") return 1000 / Number(speed);
    const { frames } = this.recording;
    return (frames[this.index + 1]?.t ?? 0) - (frames[this.index]?.t ?? 0);
  }

  seek(index, animates) {
    this.index = index;
    if (this.recording && index >= 0) {
      this.view.draw(this.recording, index, animates);
      this.onFrame(this.recording, index);
    }
    this.showControls();
  }

  stepName(length) {
    const number = this.recording.stepNumber(Math.max(0, this.index));
    return `step ${number} of ${this.recording.stepNumber(length - 1)}`;
  }

  showControls() {
    const { slider, play, first, last, live, label } = this.controls;
    const length = this.recording?.length ?? 0;
    const name = length ? this.stepName(length) : "no steps yet";
    for (const control of [slider, play, first, last]) control.disabled = length === 0;
    slider.max = String(Math.max(0, length - 1));
    slider.value = String(Math.max(0, this.index));
    slider.setAttribute("aria-valuetext", name);
    label.textContent = name;
    let action = this.isAtEnd ? "▶ Replay" : "▶ Play";
    if (this.mode === "playing") action = "❚❚ Pause";
    if (play.textContent !== action) play.textContent = action;
    const isGrowing = this.recording?.meta.isGrowing === true;
    const isSlow = this.mode === "live" && this.pace === "slow" && !this.isAtEnd;
    live.hidden = !isSlow && (this.mode === "live" || !isGrowing);
    const target = isSlow && !isGrowing ? "Skip to the end" : "Follow live";
    if (live.textContent !== target) live.textContent = target;
  }
}
