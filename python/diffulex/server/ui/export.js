// SPDX-License-Identifier: Apache-2.0
// Recordings as files: JSON, and one HTML file that plays without a server.

/** The page of a replay. Marks in double braces name the files that are put there. */
const REPLAY_PAGE = "replay.html";

/** Source of a module without its imports: all of them end up in one script. */
export function withoutImports(source) {
  return source.replace(/^import [^;]*;\n/gm, "");
}

/** JSON that may stand inside a script element. */
export function scriptSafeJson(value) {
  return JSON.stringify(value).replace(/</g, "\\u003c");
}

function escapeHtml(text) {
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  return text.replace(/[&<>"]/g, (char) => entities[char]);
}

async function read(name) {
  const answer = await fetch(`ui/${name}`);
  if (!answer.ok) throw new Error(`${answer.url}: expected a file, got ${answer.status}`);
  return answer.text();
}

/** One HTML file with the recording, the panel and its styles. */
export async function replayHtml(recording) {
  const page = await read(REPLAY_PAGE);
  const names = [...page.matchAll(/\{\{([\w-]+\.(?:js|css))\}\}/g)].map((match) => match[1]);
  const parts = Object.fromEntries(
    await Promise.all(names.map(async (name) => [name, withoutImports(await read(name))])),
  );
  parts.title = escapeHtml(recording.meta.question ?? "Recording");
  parts.recording = scriptSafeJson(recording);
  return page.replace(/\{\{([\w.-]+)\}\}/g, (mark, name) => parts[name]);
}

/** Hands a text to the browser as a download. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  // The download reads the address after this returns.
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
