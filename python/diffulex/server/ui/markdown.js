// SPDX-License-Identifier: Apache-2.0
// Markdown of an answer as nodes. The parser only makes tokens: every text of the model becomes a text
// node, so nothing in it can become markup, and nothing is fetched on its behalf.

import { lexer } from "./vendor/marked.esm.js";
import { copyButton } from "./clipboard.js";
import { element } from "./view.js";

/** Longer texts stay plain: they are parsed anew with each piece that comes in. */
const MAX_CHARS = 100_000;
/** Deeper nesting than any text needs is shown plain. */
const MAX_DEPTH = 24;
const SCHEMES = ["http:", "https:", "mailto:"];
/** Messages have headings of level 3. */
const FIRST_LEVEL = 4;
const MARKS = { strong: "strong", em: "em", del: "del", blockquote: "blockquote" };

/** The address of a link if it leads to a page or a mailbox; null for scripts, files and the like. */
export function safeAddress(href) {
  try {
    const url = new URL(href);
    return SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** Puts the text, formatted, in place of what `host` holds. */
export function renderMarkdown(host, text) {
  const content = document.createDocumentFragment();
  try {
    if (text.length > MAX_CHARS) throw new RangeError("too long to format");
    const tokens = lexer(text, { gfm: true, breaks: true });
    new Renderer().addAll(content, tokens, 0);
    host.classList.add("formatted");
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    // Too long or too deep: the plain text loses nothing.
    host.classList.remove("formatted");
    content.replaceChildren(text);
  }
  host.replaceChildren(content);
}

class Renderer {
  constructor() {
    this.level = FIRST_LEVEL - 1;
  }

  addAll(parent, tokens, depth) {
    if (depth > MAX_DEPTH) throw new RangeError("too deep to format");
    for (const token of tokens) this.add(parent, token, depth + 1);
  }

  add(parent, token, depth) {
    const { type } = token;
    if (type in MARKS) this.addInto(parent, MARKS[type], token, depth);
    else if (type === "paragraph") this.addInto(parent, "p", token, depth);
    else if (type === "heading") this.addInto(parent, this.headingTag(token.depth), token, depth);
    else if (type === "code") parent.append(codeBlock(token.text, token.lang));
    else if (type === "codespan") parent.append(element("code", "", token.text));
    else if (type === "list") this.addList(parent, token, depth);
    else if (type === "table") this.addTable(parent, token, depth);
    else if (type === "link" || type === "image") this.addLink(parent, token, depth);
    else if (type === "br" || type === "hr") parent.append(element(type));
    else if (type === "checkbox") parent.append(checkbox(token.checked));
    else if (type !== "space") this.addText(parent, token, depth);
  }

  /** Text, escapes, and HTML, which is shown as it was written. */
  addText(parent, token, depth) {
    if (token.type === "text" && token.tokens) this.addAll(parent, token.tokens, depth);
    else if (token.type === "text" || token.type === "escape") parent.append(token.text);
    else parent.append(token.raw);
  }

  addInto(parent, tag, token, depth) {
    const node = element(tag);
    this.addAll(node, token.tokens, depth);
    parent.append(node);
  }

  /** No level is skipped on the way down, whatever the text does. */
  headingTag(depth) {
    this.level = Math.min(depth + FIRST_LEVEL - 1, this.level + 1, 6);
    return `h${this.level}`;
  }

  addList(parent, token, depth) {
    const list = element(token.ordered ? "ol" : "ul");
    if (token.ordered && token.start !== 1) list.start = Number(token.start);
    for (const item of token.items) this.addInto(list, "li", item, depth);
    parent.append(list);
  }

  addTable(parent, token, depth) {
    const table = element("table");
    const addRow = (section, tag, cells) => {
      const row = element("tr");
      for (const cell of cells) {
        const node = element(tag, cell.align ? `align-${cell.align}` : "");
        this.addAll(node, cell.tokens, depth);
        row.append(node);
      }
      section.append(row);
    };
    const head = element("thead");
    const body = element("tbody");
    addRow(head, "th", token.header);
    for (const row of token.rows) addRow(body, "td", row);
    table.append(head, body);
    const frame = scrollable("div", "table", "Table");
    frame.append(table);
    parent.append(frame);
  }

  /** A link, or the text alone where the address is none to follow; pictures become links, too. */
  addLink(parent, token, depth) {
    const address = safeAddress(token.href);
    const node = element(address ? "a" : "span");
    if (address) Object.assign(node, { href: address, target: "_blank", title: address });
    if (address) node.rel = "noopener noreferrer nofollow";
    if (token.type === "image") node.append(token.text || "picture");
    else this.addAll(node, token.tokens, depth);
    parent.append(node);
  }
}

function scrollable(tag, className, name) {
  const node = element(tag, className);
  node.tabIndex = 0;
  node.setAttribute("role", "region");
  node.setAttribute("aria-label", name);
  return node;
}

function checkbox(isChecked) {
  const node = element("input");
  Object.assign(node, { type: "checkbox", checked: isChecked, disabled: true });
  node.setAttribute("aria-label", isChecked ? "done" : "open");
  return node;
}

/** A block of code with its language and a button that copies it. */
export function codeBlock(text, language) {
  const node = element("div", "code-block");
  const head = element("div", "code-head");
  const name = (language ?? "").split(/\s/)[0] || "code";
  head.append(element("span", "", name), copyButton(() => text, `Copy the ${name}`));
  const body = scrollable("pre", "", `${name} block`);
  body.append(element("code", "", text));
  node.append(head, body);
  return node;
}
