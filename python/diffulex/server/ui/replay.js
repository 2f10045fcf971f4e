// SPDX-License-Identifier: Apache-2.0
// The page of an exported replay: a recording from the document itself, and the panel.

import { Panel } from "./panel.js";
import { Recording } from "./recording.js";
import { element } from "./view.js";

const recording = Recording.fromJSON(JSON.parse(document.getElementById("recording").textContent));
const host = document.getElementById("replay");
host.append(element("h1", "", recording.meta.question ?? "Recording"));
const panel = new Panel(host, (id) => recording.texts[id]);
panel.view.specials = new Set(recording.meta.specials ?? []);
host.append(element("pre", "answer", recording.text));
const { model, created } = recording.meta;
host.append(element("p", "source", [model, created].filter(Boolean).join(" · ")));
if (recording.length) {
  panel.player.open(recording);
  panel.player.pauseAt(0);
}
