// SPDX-License-Identifier: Apache-2.0
// What the page sends beside the question: sampling controls and the speed/quality slider.

const KEY_NAME = "diffulex-api-key";

const byId = (id) => document.getElementById(id);

/** A field's number, or undefined when it is empty. */
function numberOf(id) {
  const text = byId(id).value.trim();
  return text === "" ? undefined : Number(text);
}

/** The key field; the key outlives a reload of the tab, and nothing else. */
export function bindApiKey(onChange) {
  const field = byId("api-key");
  field.value = sessionStorage.getItem(KEY_NAME) ?? "";
  field.addEventListener("change", () => {
    const key = field.value.trim();
    if (key) sessionStorage.setItem(KEY_NAME, key);
    else sessionStorage.removeItem(KEY_NAME);
    onChange();
  });
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
    max_nfe: numberOf("max-nfe"),
    max_repetition_run: numberOf("max-repetition-run"),
    seed: numberOf("seed"),
    ignore_eos: byId("ignore-eos").checked || undefined,
    stop: stop.length ? stop : undefined,
    stream_mode: byId("stream-mode").value,
    denoise_detail: byId("denoise-detail").checked,
  };
  return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));
}

/** Messages of the next request; earlier turns only if asked for. */
export function messagesFor(question, turns) {
  const system = byId("system").value.trim();
  const history = byId("send-history").checked ? turns : [];
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...history,
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
    this.show();
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
    const parts = [`accepts at ${Math.round(this.accept * 100)} %`];
    if (edit !== undefined) parts.push(`edits at ${Math.round(edit * 100)} %`);
    if (!this.isTouched) parts.push("default");
    const text = this.slider.disabled ? "no threshold to set" : parts.join(" · ");
    this.output.textContent = text;
    this.slider.setAttribute("aria-valuetext", text);
  }
}
