// SPDX-License-Identifier: Apache-2.0
// What the page sends beside the question: sampling controls and the speed/quality slider.

const KEY_NAME = "diffulex-api-key";
const SETTINGS_NAME = "diffulex-settings";
/** The key lives as long as the tab, and is never stored with the rest. */
const UNSTORED = ["api-key"];

const byId = (id) => document.getElementById(id);

/** A field's number, or undefined when it is empty. */
function numberOf(id) {
  const text = byId(id).value.trim();
  return text === "" ? undefined : Number(text);
}

/** What only a page that draws the blocks asks for, and where it is set. */
export const DRAWING_FIELDS = {
  stream_mode: () => byId("stream-mode").value,
  denoise_detail: () => byId("denoise-detail").checked,
};

const stateOf = (field) => (field.type === "checkbox" ? field.checked : field.value);

/**
 * The dialog: Done keeps what was entered, Cancel and Escape take it back. What differs from the
 * defaults outlives a reload; the key outlives it in this tab only.
 */
export class SettingsDialog {
  /** `onDone(isNewKey)` is called when settings were kept. */
  constructor(onDone) {
    this.dialog = byId("settings");
    this.fields = [...this.dialog.querySelectorAll("input, select, textarea")];
    this.onDone = onDone;
    this.defaults = this.read();
    this.apply({ ...this.stored(), "api-key": readApiKey() });
    this.before = this.read();
    byId("cancel-settings").addEventListener("click", () => this.dialog.close("cancel"));
    byId("reset-settings").addEventListener("click", () => {
      this.apply({ ...this.defaults, "api-key": byId("api-key").value });
    });
    this.dialog.addEventListener("close", () => this.onClose());
  }

  open() {
    this.before = this.read();
    // Escape leaves the value as it is, and it must not be the one of an earlier Done.
    this.dialog.returnValue = "cancel";
    this.dialog.showModal();
  }

  read() {
    return Object.fromEntries(this.fields.map((field) => [field.id, stateOf(field)]));
  }

  /** Sets fields, and tells those who follow them; unknown names and values of other kinds are left. */
  apply(values) {
    for (const field of this.fields) {
      const value = values[field.id];
      if (typeof value !== typeof stateOf(field) || value === stateOf(field)) continue;
      if (field.options && ![...field.options].some((option) => option.value === value)) continue;
      if (field.type === "checkbox") field.checked = value;
      else field.value = value;
      field.dispatchEvent(new Event("input"));
    }
  }

  stored() {
    try {
      return JSON.parse(localStorage.getItem(SETTINGS_NAME)) ?? {};
    } catch {
      return {}; // written by something else
    }
  }

  onClose() {
    if (this.dialog.returnValue !== "done") {
      this.apply(this.before);
      return;
    }
    const values = Object.entries(this.read()).filter(([id, value]) => {
      return !UNSTORED.includes(id) && value !== this.defaults[id];
    });
    if (values.length) localStorage.setItem(SETTINGS_NAME, JSON.stringify(Object.fromEntries(values)));
    else localStorage.removeItem(SETTINGS_NAME);
    this.onDone(this.keepKey());
  }

  /** Whether the key is another one than before. */
  keepKey() {
    const key = byId("api-key").value.trim();
    const isNew = key !== readApiKey();
    if (key) sessionStorage.setItem(KEY_NAME, key);
    else sessionStorage.removeItem(KEY_NAME);
    return isNew;
  }
}

export function readApiKey() {
  return sessionStorage.getItem(KEY_NAME) ?? "";
}

/** Sampling fields of a request; what is left empty takes the server's default. */
export function samplingFields() {
  const stop = byId("stop-strings").value.split("\n").filter((line) => line !== "");
  const fields = {
    max_tokens: numberOf("max-tokens"),
    temperature: numberOf("temperature"),
    top_p: numberOf("top-p"),
    top_k: numberOf("top-k"),
    min_p: numberOf("min-p"),
    max_nfe: numberOf("max-nfe"),
    max_repetition_run: numberOf("max-repetition-run"),
    seed: numberOf("seed"),
    ignore_eos: byId("ignore-eos").checked || undefined,
    stop: stop.length ? stop : undefined,
    ...Object.fromEntries(Object.entries(DRAWING_FIELDS).map(([name, read]) => [name, read()])),
  };
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));
}

/** Messages of the next request: system message, earlier turns, question. */
export function messagesFor(question, turns) {
  const system = byId("system").value.trim();
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...turns,
    { role: "user", content: question },
  ];
}

/**
 * The slider between quality and speed: how sure the model must be of a token to keep it.
 * Left is sure (threshold 1, slow), right is bold (threshold 0, fast). Untouched, nothing is sent
 * and the server's own thresholds hold.
 */
export class ThresholdKnob {
  constructor() {
    this.slider = byId("threshold");
    this.output = byId("threshold-value");
    this.reset = byId("threshold-reset");
    this.defaults = {};
    this.isTouched = false;
    this.slider.addEventListener("input", () => {
      this.isTouched = true;
      this.show();
    });
    this.reset.addEventListener("click", () => this.setDefaults(this.defaults));
    this.setDefaults({});
    this.output.textContent = ""; // nothing is known of the model yet
  }

  /** The server's thresholds; a strategy without an acceptance threshold has nothing to set. */
  setDefaults(defaults) {
    this.defaults = defaults;
    this.isTouched = false;
    this.slider.disabled = defaults.accept_threshold === undefined;
    if (!this.slider.disabled) {
      this.slider.value = String(Math.round(100 * (1 - defaults.accept_threshold)));
    }
    this.show();
  }

  get accept() {
    return (100 - Number(this.slider.value)) / 100;
  }

  /** `decoding` of a request, or undefined for the server's own. */
  decoding() {
    if (!this.isTouched || this.slider.disabled) return undefined;
    const decoding = { accept_threshold: this.accept };
    const { accept_threshold: accept, edit_threshold: edit } = this.defaults;
    // Where tokens can be overwritten, both thresholds move by the same share.
    if (edit !== undefined && accept > 0) {
      decoding.edit_threshold = Math.min(1, Number(((edit * this.accept) / accept).toFixed(3)));
    }
    return decoding;
  }

  show() {
    this.reset.hidden = !this.isTouched;
    const edit = this.decoding()?.edit_threshold;
    const parts = [`Keeps a token when ${Math.round(this.accept * 100)} % sure`];
    if (edit !== undefined) parts.push(`overwrites it when ${Math.round(edit * 100)} % sure of another`);
    const text = `${parts.join(", ")}: ${this.effect()}`;
    this.output.textContent = this.slider.disabled ? "This model has no such threshold" : text;
    this.slider.setAttribute("aria-valuetext", this.output.textContent);
  }

  /** What the slider does to the next answer, against the server's own threshold. */
  effect() {
    const { accept_threshold: own } = this.defaults;
    if (!this.isTouched || this.accept === own) return "server's setting";
    return this.accept > own ? "more passes, fewer slips" : "fewer passes, more slips";
  }
}
