// SPDX-License-Identifier: Apache-2.0
// Server-sent events over a POST: EventSource can only GET.

const TERMINATOR = "[DONE]";

/** Data of one frame: its `data:` lines joined; null for comments and frames without data. */
export function frameData(frame) {
  const lines = [];
  for (const line of frame.split("\n")) {
    if (line === "data" || line.startsWith("data:")) {
      lines.push(line.slice(5).replace(/^ /, ""));
    }
  }
  return lines.length ? lines.join("\n") : null;
}

/** Complete frames at the start of `buffer` (line ends already `\n`), and what is left over. */
export function splitFrames(buffer) {
  const frames = buffer.split("\n\n");
  return { frames: frames.slice(0, -1), rest: frames[frames.length - 1] };
}

/**
 * The JSON objects of a response body, in order, until the terminator.
 * Throws if the body ends before it: the connection broke, or the server died.
 */
export async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      // A carriage return at the end of a read may be half of a line end: it waits for the rest.
      buffer += decoder.decode(value, { stream: !done });
      const { frames, rest } = splitFrames(buffer.replace(/\r\n/g, "\n"));
      buffer = rest;
      for (const frame of frames) {
        const data = frameData(frame);
        if (data === TERMINATOR) return;
        if (data !== null) yield JSON.parse(data);
      }
      if (done) throw new Error("the stream ended before [DONE]: the connection was lost");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
