// SPDX-License-Identifier: Apache-2.0
// A video while it is drawn, a job of the server, and the view that plays it.

import { ApiError } from "./api.js";
import { PictureRecording, PictureView } from "./picture.js";

/** Between two looks at a job. */
const POLL_MS = 300;
const JOBS = "v1/videos";

/** A recording of one frame: the file. */
export class VideoRecording extends PictureRecording {
  constructor(prompt) {
    super(prompt, 1);
  }

  /** The job is over; `blob` is its file. */
  finish(job, blob) {
    this.meta.isGrowing = false;
    this.frames.push({ step: 1, blob, url: URL.createObjectURL(blob), t: this.clock });
    const { seed, execute_s: seconds } = job.diffulex;
    this.facts = { seed, seconds, size: `${job.size} · plays ${Number(job.seconds)} s` };
  }
}

/** Plays a finished recording; tells how far another one is. */
export class VideoView extends PictureView {
  constructor(video, progress, empty, caption) {
    super(video, empty, caption);
    this.progress = progress;
    video.autoplay = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    video.addEventListener("loadedmetadata", () => this.setSize(video.videoWidth));
  }

  draw(recording) {
    const { picture } = this;
    picture.src = recording.frames[0].url;
    picture.setAttribute("aria-label", `${recording.prompt}, video`);
    picture.hidden = false;
    this.empty.hidden = true;
    this.describe(recording);
  }

  /** How far a job is; null: it is over. */
  report(recording, job) {
    this.progress.hidden = job === null;
    if (job === null) return;
    this.progress.value = job.progress;
    const state = job.status === "queued" ? "waits in line" : `${job.progress} %`;
    this.caption.textContent = `${recording.prompt} · ${state}`;
  }

  clear() {
    super.clear();
    this.picture.pause();
  }
}

/** Starts a job; its fields, among them files, go as a form. */
export async function startVideo(api, form) {
  return (await api.call(JOBS, { method: "POST", body: form })).json();
}

/** The job of an id, or null where the server has forgotten it. */
export async function findVideo(api, id) {
  try {
    return await api.get(`${JOBS}/${id}`);
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

/**
 * Waits for a job and fetches its file; a signal that is aborted ends the job.
 * `report(job)` is called whenever something is known.
 */
export async function receiveVideo(api, started, signal, report) {
  const path = `${JOBS}/${started.id}`;
  let job = started;
  try {
    while (job.status === "queued" || job.status === "in_progress") {
      report(job);
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      job = await (await api.call(path, { signal })).json();
    }
    if (job.status === "failed") throw new ApiError(job.error.message, 500, job.error.code);
    return { job, blob: await (await api.call(`${path}/content`, { signal })).blob() };
  } catch (error) {
    // One that is gone already need not be ended.
    if (signal.aborted) await api.call(path, { method: "DELETE" }).catch(() => {});
    throw error;
  }
}
