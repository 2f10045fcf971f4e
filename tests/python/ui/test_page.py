# SPDX-License-Identifier: Apache-2.0
"""A person at the page: a real Chromium against the real server with the bundled model.

DIFFULEX_UPDATE_SCREENSHOT=1 writes the pictures in docs/images anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from fixtures.browser import PageWatch
from fixtures.live_server import LiveServer, running_server
from fixtures.ui_page import (
    LONG_QUESTION,
    QUESTION,
    ask,
    ask_until_edits,
    metric,
    open_page,
    set_settings,
    wait_for_end,
)

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "docs" / "images"
ZOO = ROOT / "examples" / "zoo"
EDITED_QUESTION = (
    "Max owns 110 eggs. He wins 90 eggs in a game. Max gives 93 eggs to Sara and 25 to Sam. "
    "How many eggs does Max have now?"
)


def take_picture(page: Any, name: str, directory: Path) -> None:
    """A picture of the page, for the documents if they are to be updated."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)  # the highlight has faded
    if os.environ.get("DIFFULEX_UPDATE_SCREENSHOT") == "1":
        directory = IMAGES
    assert len(page.screenshot(path=directory / name)) > 10_000


def test_masks_turn_into_the_answer(page: Any) -> None:
    set_settings(page, formats=False)
    page.locator("#question").focus()
    page.keyboard.type(LONG_QUESTION)
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
    page.locator(".timeline").get_by_role("button", name="Play").click()
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
    num_aborted = wait_for_aborted(server)
    set_settings(page, ignore_eos=True, max_tokens="440")
    slider = page.get_by_role("slider", name="Speed against quality")
    slider.focus()
    page.keyboard.press("Home")
    assert page.locator("#threshold-value").inner_text() == (
        "Keeps a token when 100 % sure: more passes, fewer slips"
    )

    for _ in range(10):
        with page.expect_request("**/v1/chat/completions") as sent:
            page.locator("#question").fill(QUESTION)
            page.keyboard.press("Enter")
        body = sent.value.post_data_json
        assert body["decoding"] == {"accept_threshold": 1}
        assert (body["ignore_eos"], body["max_tokens"]) == (True, 440)
        page.locator('#buffer .cell[data-state="committed"]').first.wait_for()
        # On a busy host an answer may be whole before its picture is, and stopping it does not count.
        if stop_answer(page, way) and wait_for_aborted(server) > num_aborted:
            break
    assert page.get_by_role("button", name="Send").is_visible()
    assert wait_for_aborted(server) == num_aborted + 1


def wait_for_aborted(server: LiveServer) -> float:
    """How many requests were aborted, once the server works on none."""
    deadline = time.monotonic() + 60
    while read_metric(server, "diffulex_requests_inflight_http") != 0:
        assert time.monotonic() < deadline, "the server still works on a request that was stopped"
        time.sleep(0.02)
    return read_metric(server, "diffulex_request_aborted_total", reason="disconnect")


def stop_answer(page: Any, way: str) -> bool:
    """Whether there was something to stop."""
    from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

    if way == "button":
        with contextlib.suppress(PlaywrightTimeoutError):
            page.get_by_role("button", name="Stop").click(timeout=5000)
    else:
        page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    foot = page.locator(".message.assistant .foot", has_text=re.compile("stopped|tokens in")).last
    foot.wait_for()
    return "stopped" in foot.inner_text()


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
    set_settings(page, stream_mode=mode)
    assert ask(page, QUESTION).splitlines()[-1] == "7"
    if mode == "denoise":
        wait_for_end(page)
    has_cells = page.locator("#buffer .cell").count() > 0
    assert has_cells == (mode == "denoise")
    assert float(metric(page, "nfe")) >= 1


def test_recording_as_json(page: Any, tmp_path: Path) -> None:
    set_settings(page, formats=False)
    answer = ask(page, LONG_QUESTION)
    with page.expect_download() as download:
        page.get_by_role("button", name="Data (JSON)").click()
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
    set_settings(page, formats=False)
    answer = ask(page, LONG_QUESTION)
    with page.expect_download() as download:
        page.get_by_role("button", name="Replay (HTML)").click()
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
                "#model", "#state", "#threshold-value", ".knob label", ".block-label", ".legend li",
                "#memory-note", ".exports span", ".meanings summary"];
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
        assert ask(page, QUESTION).splitlines()[-1] == "7"
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"
        assert "sesame" in page.evaluate("JSON.stringify(sessionStorage)")
        assert watch.foreign == []
        context.close()


def test_page_follows_a_server_that_gets_ready(server: LiveServer, browser: Any) -> None:
    """While it loads the page says so; one that was away may have other facts."""
    with urllib.request.urlopen(f"{server.url}/server_info") as answer:
        facts = json.load(answer)
    shown: dict[str, Any] = {"status": 503, "info": {}}

    def answer_with(status: int, info: dict[str, Any]) -> None:
        shown.update(status=status, info=info)
        with page.expect_response("**/health"):
            page.clock.fast_forward(10_000)

    context = browser.new_context()
    page = context.new_page()
    page.clock.install()
    page.route(
        "**/health",
        lambda route: route.fulfill(status=shown["status"], json={"status": "starting"}),
    )
    page.route("**/server_info", lambda route: route.fulfill(json=shown["info"]))
    with page.expect_response("**/health"):
        page.goto(f"{server.url}/ui")
    page.locator("#away", has_text="The server is loading the model.").wait_for()
    title = page.locator("#model")
    assert title.inner_text() == ""
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


def test_edits_are_visible(browser: Any, tmp_path: Path) -> None:
    """A model that overwrites tokens: which, in which step, and what was there before."""
    with (
        running_server("--model", str(ZOO / "edit_llada2")) as server,
        open_page(server, browser) as page,
    ):
        ask_until_edits(page, EDITED_QUESTION)
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
        assert ask_until_edits(page, QUESTION).splitlines()[-1] == "7"
        assert page.evaluate("window.seen.masked") == 0


@pytest.mark.slow
def test_committed_pictures() -> None:
    for name in ("serving_ui.png", "serving_edits.png"):
        assert 10_000 < (IMAGES / name).stat().st_size < 200_000
