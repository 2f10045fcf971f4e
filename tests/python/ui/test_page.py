# SPDX-License-Identifier: Apache-2.0
"""A person at the page: a real Chromium against the real server with the bundled model.

DIFFULEX_UPDATE_SCREENSHOT=1 writes the pictures in docs/images anew.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fixtures.browser import PageWatch, find_chromium, open_browser
from fixtures.live_server import LiveServer, running_server

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "docs" / "images"
ZOO = ROOT / "examples" / "zoo"
QUESTION = "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?"
EDITED_QUESTION = (
    "Max owns 110 eggs. He wins 90 eggs in a game. Max gives 93 eggs to Sara and 25 to Sam. "
    "How many eggs does Max have now?"
)
LONG_QUESTION = (
    "Max has 29 stones. Max wins 13 stones in a game. 25 of the stones get lost. 440 more stones "
    "are shared equally by 5 children with Max. What is the number of stones now?"
)
# Counts, on every change of the buffer, what a person could have seen.
WATCH_CELLS = """
  window.seen = { masked: 0, sent: 0, changed: 0, committed: 0, blocks: 0 };
  addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
    const count = (query) => document.querySelectorAll(`#buffer ${query}`).length;
    const { seen } = window;
    const masked = count('.cell[data-state="masked"]');
    seen.masked = Math.max(seen.masked, masked);
    // Before the first forward the page draws masks itself; later ones are in snapshots.
    const nfe = Number(document.querySelector('[data-metric="nfe"]')?.textContent);
    if (nfe >= 1) seen.sent = Math.max(seen.sent, masked);
    seen.changed = Math.max(seen.changed, count('.cell[data-change="new"]'));
    seen.committed = Math.max(seen.committed, count('.cell[data-state="committed"]'));
    seen.blocks = Math.max(seen.blocks, count(".block"));
  }).observe(document.documentElement, { subtree: true, childList: true, attributes: true }));
"""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    find_chromium()
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with running_server("--device", "cpu") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as running:
        yield running


@contextmanager
def open_page(server: LiveServer, browser: Any) -> Iterator[Any]:
    """A page on which nothing may go wrong until it is closed."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 800}, accept_downloads=True, color_scheme="light"
    )
    context.set_default_timeout(60_000)  # the host may be busy
    context.add_init_script(WATCH_CELLS)
    opened = context.new_page()
    watch = PageWatch(opened, server.url)
    opened.goto(f"{server.url}/")
    opened.locator("#model", has_text=" · ").wait_for()
    yield opened
    watch.check()
    context.close()


@pytest.fixture
def page(server: LiveServer, browser: Any) -> Iterator[Any]:
    with open_page(server, browser) as opened:
        yield opened


def take_picture(page: Any, name: str, directory: Path) -> None:
    """A picture of the page, for the documents if they are to be updated."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)  # the highlight has faded
    if os.environ.get("DIFFULEX_UPDATE_SCREENSHOT") == "1":
        directory = IMAGES
    assert len(page.screenshot(path=directory / name)) > 10_000


def ask(page: Any, question: str) -> str:
    """Types a question, waits for the end of the answer, and returns its text."""
    page.locator("#question").fill(question)
    page.keyboard.press("Enter")
    message = page.locator(".message.assistant").last
    message.locator(".foot", has_text="tokens in").wait_for()
    return str(message.locator(".text").inner_text())


def wait_for_end(page: Any) -> None:
    """Until the picture, which may be a second behind the text, shows the end."""
    page.locator(".summary", has_text="End:").wait_for()


def metric(page: Any, name: str) -> str:
    return str(page.locator(f'[data-metric="{name}"]').inner_text())


def test_masks_turn_into_the_answer(page: Any) -> None:
    page.keyboard.type(LONG_QUESTION)  # the question has the focus
    page.get_by_role("slider", name="Speed against quality").press("Home")  # many forwards
    page.locator("#question").press("Enter")
    answer = page.locator(".message.assistant .text")
    page.locator(".message.assistant .foot", has_text="tokens in").wait_for()
    wait_for_end(page)

    assert answer.inner_text().splitlines()[-1] == "#### 105"
    seen = page.evaluate("window.seen")
    assert seen["sent"] >= 8
    assert seen["changed"] > 0
    assert page.locator('#buffer .cell[data-state="masked"]').count() == 0
    shown = page.locator('#buffer .cell[data-state="committed"]').all_inner_texts()
    assert "".join(shown).replace("↵", "\n").replace("·", " ") == answer.inner_text()
    assert page.locator("#buffer .block").count() >= 2

    tokens, forwards = float(metric(page, "tokens")), float(metric(page, "nfe"))
    assert tokens == len(shown)
    assert float(metric(page, "tpf")) == pytest.approx(tokens / forwards, abs=0.01)
    assert metric(page, "ttft").endswith((" ms", " s"))
    assert float(metric(page, "e2e_tps")) > 0
    assert metric(page, "edits") == "0"
    assert page.locator("#announcer").inner_text().startswith("The answer is complete")


def test_timeline_goes_through_the_steps(page: Any, tmp_path: Path) -> None:
    """Also makes the picture of the documents, at a step with every kind of cell."""
    page.get_by_role("slider", name="Speed against quality").focus()
    page.keyboard.press("Home")  # one token a forward and block: many steps to look at
    ask(page, LONG_QUESTION)
    wait_for_end(page)
    page.get_by_role("button", name="First step").click()
    assert page.locator(".summary").inner_text().startswith("Before the first forward")
    assert page.locator('#buffer .cell:not([data-state="masked"])').count() == 0

    slider = page.get_by_role("slider", name="Step")
    slider.focus()
    best = (0, 0, "0")
    for _ in range(int(slider.get_attribute("max"))):
        page.keyboard.press("ArrowRight")
        states = page.locator("#buffer .cell").evaluate_all(
            "cells => cells.map((cell) => `${cell.dataset.state}${cell.dataset.change}`)"
        )
        best = max(best, (len(set(states)), states.count("masked"), slider.input_value()))
    assert page.locator(".summary").inner_text().startswith("End")

    assert best[1] > 0
    slider.fill(best[2])
    slider.blur()
    take_picture(page, "serving_ui.png", tmp_path)

    page.get_by_role("button", name="First step").click()
    page.get_by_role("combobox", name="Speed of playing").select_option("60")
    page.get_by_role("button", name="Play", exact=True).click()
    wait_for_end(page)


def test_token_under_the_cursor_is_explained(page: Any) -> None:
    """By keyboard: the buffer takes the focus, arrows move, and what is said is said aloud."""
    ask(page, QUESTION)
    wait_for_end(page)
    page.locator("#buffer").focus()
    page.keyboard.press("Home")
    detail = page.locator(".detail")
    assert detail.inner_text().startswith('Token 1: "3"')
    page.keyboard.press("ArrowRight")
    text = detail.inner_text()
    assert text.startswith('Token 2: "+"')
    assert "committed" in text
    assert "decided in step" in text
    assert detail.get_attribute("aria-live") == "polite"


@pytest.mark.parametrize("way", ["button", "key"])
def test_stop_ends_the_request_on_the_server(page: Any, server: LiveServer, way: str) -> None:
    num_aborted = read_metric(server, "diffulex_request_aborted_total", reason="disconnect")
    page.locator("#open-settings").click()
    page.get_by_label("Ignore end of sequence").check()
    page.get_by_label("Max tokens").fill("440")
    page.get_by_role("button", name="Done").click()
    slider = page.get_by_role("slider", name="Speed against quality")
    slider.focus()
    page.keyboard.press("Home")
    assert page.locator("#threshold-value").inner_text() == "accepts at 100 %"

    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator("#question").fill(QUESTION)
        page.keyboard.press("Enter")
    body = sent.value.post_data_json
    assert body["decoding"] == {"accept_threshold": 1}
    assert (body["ignore_eos"], body["max_tokens"]) == (True, 440)
    page.locator('#buffer .cell[data-state="committed"]').first.wait_for()
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    page.locator(".message.assistant .foot", has_text="stopped").wait_for()
    assert page.get_by_role("button", name="Send").is_visible()
    deadline = time.monotonic() + 1.0
    while read_metric(server, "diffulex_requests_inflight_http") != 0:
        assert time.monotonic() < deadline, "the server still works on a request that was stopped"
        time.sleep(0.02)
    aborted = read_metric(server, "diffulex_request_aborted_total", reason="disconnect")
    assert aborted == num_aborted + 1


def read_metric(server: LiveServer, name: str, **labels: str) -> float:
    """Sum of the samples of a metric whose labels include these."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        text = answer.read().decode()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if all(part in line for part in wanted)
    )


@pytest.mark.parametrize("mode", ["denoise", "block_append"])
def test_other_stream_modes(page: Any, mode: str) -> None:
    page.locator("#open-settings").click()
    page.get_by_label("Stream mode").select_option(mode)
    page.get_by_role("button", name="Done").click()
    assert ask(page, QUESTION).splitlines()[-1] == "#### 7"
    if mode == "denoise":
        wait_for_end(page)
    has_cells = page.locator("#buffer .cell").count() > 0
    assert has_cells == (mode == "denoise")
    assert float(metric(page, "nfe")) >= 1


def test_recording_as_json(page: Any, tmp_path: Path) -> None:
    answer = ask(page, LONG_QUESTION)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save JSON").click()
    download.value.save_as(tmp_path / "recording.json")
    data = json.loads((tmp_path / "recording.json").read_text(encoding="utf-8"))
    assert (data["format"], data["version"]) == ("diffulex-recording", 1)
    assert data["text"] == answer
    assert data["meta"]["question"] == LONG_QUESTION
    length = data["usage"]["completion_tokens"]
    assert "".join(data["texts"][str(token)] for token in data["draft"][:length]) == answer
    draft: list[int] = []
    for frame in data["frames"]:
        draft[frame["offset"] :] = frame["ids"]
    assert draft == data["draft"]


def test_recording_as_a_page_without_a_server(page: Any, browser: Any, tmp_path: Path) -> None:
    answer = ask(page, LONG_QUESTION)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save replay").click()
    file = tmp_path / "replay.html"
    download.value.save_as(file)
    context = browser.new_context(offline=True)
    replay = context.new_page()
    watch = PageWatch(replay, file.as_uri())
    replay.goto(file.as_uri())
    assert replay.locator(".answer").inner_text() == answer
    assert replay.locator('#buffer .cell:not([data-state="masked"])').count() == 0
    replay.get_by_role("button", name="Last step").click()
    assert replay.locator('#buffer .cell[data-state="masked"]').count() == 0
    watch.check()
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_fits_every_width_and_scheme(page: Any, width: int, scheme: str, tmp_path: Path) -> None:
    """Nothing is cut off sideways, and text stands out from what is behind it."""
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.set_viewport_size({"width": width, "height": 780})
    ask(page, QUESTION)
    wait_for_end(page)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    box = page.locator("#send").bounding_box()
    assert box["x"] + box["width"] <= width
    assert box["y"] + box["height"] <= 780
    assert min(contrasts(page).values()) >= 4.5, contrasts(page)


def contrasts(page: Any) -> dict[str, float]:
    """WCAG contrast of text against its background, for each kind of text on the page."""
    return dict(
        page.evaluate(
            """() => {
              const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
              const paint = (colours) => {
                canvas.clearRect(0, 0, 1, 1);
                for (const colour of colours) {
                  canvas.fillStyle = colour;
                  canvas.fillRect(0, 0, 1, 1);
                }
                return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
              };
              const light = (rgb) => {
                const [r, g, b] = rgb.map((value) => value / 255)
                  .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
              };
              const contrast = (node) => {
                const behind = [];
                for (let at = node; at; at = at.parentElement) {
                  behind.unshift(getComputedStyle(at).backgroundColor);
                }
                const under = light(paint(behind));
                const over = light(paint([...behind, getComputedStyle(node).color]));
                return (Math.max(under, over) + 0.05) / (Math.min(under, over) + 0.05);
              };
              const kinds = [".cell[data-state=committed]", ".legend .cell[data-state=filled]",
                ".legend .cell[data-change=edit]", ".summary", ".metric dt", ".message.user .text",
                ".message.assistant .text", ".message .foot", ".message .foot button", "#send",
                "#model", "#threshold-value", ".knob label", ".block-label", ".legend li"];
              return kinds.map((kind) => [kind, contrast(document.querySelector(kind))]);
            }"""
        )
    )


def test_every_control_has_a_name(page: Any) -> None:
    """For screen readers: buttons, fields and regions can be told apart."""
    page.locator("#open-settings").click()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, section, dialog")]
          .filter((node) => !(node.textContent.trim() && node.tagName === "BUTTON")
            && !node.ariaLabel && !node.getAttribute("aria-labelledby") && !node.labels?.length)
          .map((node) => node.outerHTML)"""
    )
    assert nameless == []
    page.keyboard.press("Escape")
    assert not page.locator("#settings").is_visible()


def test_key_is_asked_for_and_kept_for_the_tab(browser: Any) -> None:
    with running_server("--device", "cpu", "--api-key", "sesame") as server:
        context = browser.new_context()
        page = context.new_page()
        watch = PageWatch(page, server.url)
        page.goto(f"{server.url}/ui")
        page.locator("#notice", has_text="API key").wait_for()
        field = page.get_by_label("API key")
        assert field.evaluate("node => node === document.activeElement")
        field.fill("sesame")
        page.keyboard.press("Enter")
        page.locator("#model", has_text="demo ·").wait_for()
        assert not page.locator("#notice").is_visible()
        assert ask(page, QUESTION).splitlines()[-1] == "#### 7"
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"
        assert "sesame" in page.evaluate("JSON.stringify(sessionStorage)")
        assert watch.foreign == []
        context.close()


def test_page_follows_a_server_that_gets_ready(server: LiveServer, browser: Any) -> None:
    """One that still loads has a name and no facts; one that was away may have others."""
    with urllib.request.urlopen(f"{server.url}/server_info") as answer:
        facts = json.load(answer)
    loading = {key: facts[key] for key in ("served_model_name", "version", "server_args")}
    shown: dict[str, Any] = {}

    def answer_with(status: int, info: dict[str, Any]) -> None:
        shown.update(status=status, info=info)
        with page.expect_response("**/health"):
            page.clock.fast_forward(10_000)

    context = browser.new_context()
    page = context.new_page()
    page.clock.install()
    page.route("**/health", lambda route: route.fulfill(status=shown["status"]))
    page.route("**/server_info", lambda route: route.fulfill(json=shown["info"]))
    shown.update(status=503, info={**loading, "state": "starting"})
    with page.expect_response("**/health"):
        page.goto(f"{server.url}/ui")
    title = page.locator("#model")
    title.get_by_text("demo", exact=True).wait_for()
    slider = page.get_by_role("slider", name="Speed against quality")
    assert slider.is_disabled()

    answer_with(200, facts)
    title.get_by_text("demo · multi_bd · cpu").wait_for()
    assert slider.is_enabled()
    slider.press("Home")

    answer_with(503, facts)
    page.locator("#health[data-state=down]").wait_for()
    answer_with(200, {**facts, "device": "elsewhere"})
    title.get_by_text("demo · multi_bd · elsewhere").wait_for()
    assert slider.input_value() == "0"
    context.close()


def test_earlier_turns_are_sent_only_on_request(page: Any) -> None:
    first = ask(page, QUESTION)
    for is_wanted in (False, True):
        if is_wanted:
            page.locator("#open-settings").click()
            page.get_by_label("Send the earlier turns along").check()
            page.get_by_label("System message").fill("Be brief.")
            page.get_by_role("button", name="Done").click()
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, LONG_QUESTION)
        messages = sent.value.post_data_json["messages"]
        assert messages[-1] == {"role": "user", "content": LONG_QUESTION}
        if is_wanted:
            assert messages[0] == {"role": "system", "content": "Be brief."}
            assert messages[1:3] == [
                {"role": "user", "content": QUESTION}, {"role": "assistant", "content": first},
            ]  # fmt: skip
        else:
            assert len(messages) == 1


def test_refusal_is_shown_and_the_page_goes_on(server: LiveServer, browser: Any) -> None:
    """Without `open_page`: the browser itself reports an answer of 400 on its console."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{server.url}/ui")
    page.locator("#model", has_text=" · ").wait_for()
    page.locator("#open-settings").click()
    page.get_by_label("Max tokens").fill("5000")
    page.get_by_role("button", name="Done").click()
    page.locator("#question").fill(QUESTION)
    page.keyboard.press("Enter")
    page.locator("#notice", has_text="5000").wait_for()
    assert page.locator("#notice").get_attribute("role") == "alert"
    page.locator("#open-settings").click()
    page.get_by_label("Max tokens").fill("")
    page.get_by_role("button", name="Done").click()
    assert ask(page, QUESTION).splitlines()[-1] == "#### 7"
    assert not page.locator("#notice").is_visible()
    context.close()


def test_edits_are_visible(browser: Any, tmp_path: Path) -> None:
    """A model that overwrites tokens: which, in which step, and what was there before."""
    with (
        running_server("--model", str(ZOO / "edit_llada2")) as server,
        open_page(server, browser) as page,
    ):
        ask(page, EDITED_QUESTION)
        wait_for_end(page)
        assert int(metric(page, "edits")) > 0
        slider = page.get_by_role("slider", name="Step")
        counts = []
        for step in range(int(slider.get_attribute("max")) + 1):
            slider.fill(str(step))
            counts.append(page.locator('#buffer .cell[data-change="edit"]').count())
        assert sum(counts) == int(metric(page, "edits"))
        slider.fill(str(counts.index(max(counts))))
        page.locator('#buffer .cell[data-change="edit"]').first.hover()
        assert ", was " in page.locator(".detail").inner_text()
        take_picture(page, "serving_edits.png", tmp_path)


def test_canvas_has_no_masks(browser: Any) -> None:
    """DiffusionGemma starts from random tokens, and accepts by entropy: the slider rests."""
    with (
        running_server("--model", str(ZOO / "diffusion_gemma")) as server,
        open_page(server, browser) as page,
    ):
        slider = page.get_by_role("slider", name="Speed against quality")
        assert slider.is_disabled()
        # Three forwards are over in no time: on a busy host their drafts come as one, without edits.
        for _ in range(10):
            assert ask(page, QUESTION).splitlines()[-1] == "#### 7"
            wait_for_end(page)
            assert page.evaluate("window.seen.masked") == 0
            if metric(page, "edits") != "0":
                break
        assert int(metric(page, "edits")) > 0


def test_committed_pictures() -> None:
    for name in ("serving_ui.png", "serving_edits.png"):
        assert 10_000 < (IMAGES / name).stat().st_size < 200_000
