// SPDX-License-Identifier: Apache-2.0
// Recordings as files: JSON, and one HTML file that plays without a server.

/** In the order in which they may be put into one script. */
const REPLAY_SOURCES = ["recording.js", "view.js", "player.js", "panel.js", "replay.js"];
const REPLAY_STYLES = ["theme.css", "buffer.css"];
/** The file may run what is written in it, and load nothing at all. */
const REPLAY_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'";

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

async function readAll(names) {
  const answers = await Promise.all(names.map((name) => fetch(`ui/${name}`)));
  for (const answer of answers) {
    if (!answer.ok) throw new Error(`${answer.url}: expected a file, got ${answer.status}`);
  }
  return (await Promise.all(answers.map((answer) => answer.text()))).join("\n");
}

/** One HTML file with the recording, the panel and its styles. */
export async function replayHtml(recording) {
  const [source, style] = await Promise.all([readAll(REPLAY_SOURCES), readAll(REPLAY_STYLES)]);
  const title = escapeHtml(recording.meta.question ?? "Recording");
  return `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="${REPLAY_POLICY}">
<title>${title} · Diffulex replay</title>
<style>
${style}
</style>
</head>
<body class="replay">
<main id="replay"></main>
<script type="application/json" id="recording">${scriptSafeJson(recording)}</script>
<script type="module">
${withoutImports(source)}
</script>
</body>
</html>
`;
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
