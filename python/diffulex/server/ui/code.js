// SPDX-License-Identifier: Apache-2.0
// The request of the page as a program would send it.

import { codeBlock } from "./markdown.js";
import { DRAWING_FIELDS } from "./settings.js";
import { element } from "./view.js";

/** Fields of the request that the OpenAI client takes by name; others go in its `extra_body`. */
const OPENAI_FIELDS = ["model", "messages", "max_tokens", "temperature", "top_p", "seed", "stop"];
/** What only a page that draws the blocks needs. */
const PAGE_FIELDS = ["stream", "stream_options", ...Object.keys(DRAWING_FIELDS)];

const KEY_VARIABLE = "DIFFULEX_API_KEY";

/** The request without what makes it a stream for this page. */
export function plainBody(body) {
  const entries = Object.entries(body).filter(([name, value]) => {
    return !PAGE_FIELDS.includes(name) && value !== undefined;
  });
  return Object.fromEntries(entries);
}

/** A text as one word of a POSIX shell. */
export function shellQuote(text) {
  return `'${text.replace(/'/g, "'\\''")}'`;
}

/** A value of JSON as Python writes it, lists and objects over several lines. */
export function pythonLiteral(value, indent = "") {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  if (Array.isArray(value)) {
    const items = value.map((item) => pythonLiteral(item, indent));
    return `[${items.join(", ")}]`;
  }
  const items = Object.entries(value).map(([name, item]) => {
    return `${inner}${JSON.stringify(name)}: ${pythonLiteral(item, inner)},\n`;
  });
  return items.length ? `{\n${items.join("")}${indent}}` : "{}";
}

/** The request for curl; `address` is the URL of `/v1`. */
export function curlExample(address, body, needsKey) {
  const lines = [`curl ${shellQuote(`${address}/chat/completions`)}`];
  lines.push("-H 'Content-Type: application/json'");
  if (needsKey) lines.push(`-H "Authorization: Bearer $${KEY_VARIABLE}"`);
  lines.push(`-d ${shellQuote(JSON.stringify(plainBody(body), null, 2))}`);
  return lines.join(" \\\n  ");
}

/** The request for the Python package `openai`. */
export function pythonExample(address, body, needsKey) {
  const fields = plainBody(body);
  const extra = Object.entries(fields).filter(([name]) => !OPENAI_FIELDS.includes(name));
  const given = OPENAI_FIELDS.filter((name) => name in fields).map((name) => [name, fields[name]]);
  if (extra.length) given.push(["extra_body", Object.fromEntries(extra)]);
  const inner = "    ";
  const lines = given.map(([name, value]) => `${inner}${name}=${pythonLiteral(value, inner)},`);
  const key = needsKey ? `os.environ["${KEY_VARIABLE}"]` : '"none"';
  return [
    ...(needsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(address)}, api_key=${key})`,
    "answer = client.chat.completions.create(",
    ...lines,
    ")",
    "print(answer.choices[0].message.content)",
    "",
  ].join("\n");
}

/** Writes both programs into `host`. */
export function showSnippets(host, body, needsKey) {
  const address = new URL("v1", location.href).href;
  host.replaceChildren(
    codeBlock(curlExample(address, body, needsKey), "curl"),
    codeBlock(pythonExample(address, body, needsKey), "python"),
  );
}

/** Lists the operations of an OpenAPI document in `host`. */
export function showRoutes(host, document) {
  const rows = Object.entries(document.paths).flatMap(([path, operations]) => {
    return Object.entries(operations).map(([method, { summary }]) => {
      const row = element("li");
      row.append(element("code", "", `${method.toUpperCase()} ${path}`), ` ${summary ?? ""}`);
      return row;
    });
  });
  host.replaceChildren(...rows);
}
