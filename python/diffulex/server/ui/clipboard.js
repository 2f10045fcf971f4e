// SPDX-License-Identifier: Apache-2.0
// Copying texts.

import { element } from "./view.js";

const SHOWN_MS = 1500;

/** Resolves to whether the text is in the clipboard now. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages of plain HTTP from another host have no clipboard; the old way works there.
    return copyFromField(text);
  }
}

function copyFromField(text) {
  const before = document.activeElement;
  const field = element("textarea", "visually-hidden");
  field.value = text;
  // A modal dialog makes everything outside it inert.
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const isDone = document.execCommand("copy");
  field.remove();
  before?.focus({ preventScroll: true });
  return isDone;
}

/** A button that copies what `read()` gives, and says that it did. */
export function copyButton(read, label) {
  const button = element("button", "small", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    button.textContent = (await copyText(read())) ? "Copied" : "Not allowed";
    setTimeout(() => {
      button.textContent = "Copy";
    }, SHOWN_MS);
  });
  return button;
}
