# SPDX-License-Identifier: Apache-2.0
"""The page in the hand of a person: pace, programs, settings, phones, fingers, screen readers."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from fixtures.live_server import LiveServer
from fixtures.ui_page import (
    LONG_QUESTION,
    PHONE,
    QUESTION,
    ask,
    close_settings,
    open_page,
    open_unwatched,
    set_settings,
    wait_for_end,
)

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")


# Pace.


def test_first_answer_goes_by_slowly_enough_to_see(server: LiveServer, browser: Any) -> None:
    """The answer is there at once; its steps follow for seconds, and can be skipped."""
    with open_page(server, browser, reduced_motion="no-preference") as page:
        page.evaluate(
            """() => {
              window.steps = [];
              new MutationObserver(() => {
                const text = document.querySelector(".step-label").textContent;
                if (text !== window.steps.at(-1)?.[0]) window.steps.push([text, performance.now()]);
              }).observe(document.querySelector(".step-label"), { childList: true, subtree: true });
            }"""
        )
        ask(page, LONG_QUESTION)
        page.get_by_role("button", name="Skip to the end").wait_for()
        wait_for_end(page)
        # Steps are shown one by one, each for half a second if there are few of them.
        times = {text.split(" of ")[0]: time for text, time in page.evaluate("window.steps")}
        numbers = [int(text.removeprefix("step ")) for text in times if text.startswith("step ")]
        assert numbers == list(range(len(numbers)))
        assert max(times.values()) - times["step 0"] > 400 * (len(numbers) - 1)
        assert page.get_by_role("button", name="Skip to the end").is_hidden()
        # The second one is live again.
        ask(page, QUESTION)
        assert page.evaluate("document.querySelector('#pace').value") == "first"
        page.locator(".summary", has_text="End:").wait_for(timeout=5000)


def test_calm_people_see_no_slow_answer(page: Any) -> None:
    """`page` prefers reduced motion: nothing plays by itself, Replay is there."""
    ask(page, QUESTION)
    assert page.get_by_role("button", name="Skip to the end").is_hidden()
    wait_for_end(page)
    page.locator(".message").get_by_role("button", name="Replay").click()
    page.locator(".timeline").get_by_role("button", name="Pause").wait_for()
    wait_for_end(page)
    page.locator(".timeline").get_by_role("button", name="Replay").wait_for()


@pytest.mark.parametrize("is_phone", [False, True])
def test_inspect_opens_where_there_is_something_to_see(
    server: LiveServer, browser: Any, is_phone: bool
) -> None:
    with open_page(server, browser, **(PHONE if is_phone else {})) as page:
        ask(page, LONG_QUESTION)
        wait_for_end(page)
        if is_phone:
            page.get_by_role("button", name="Hide").tap()
            assert not page.locator("#buffer").is_visible()
        page.get_by_role("button", name="Inspect").click()
        states = page.locator("#buffer .cell").evaluate_all(
            "cells => cells.map((cell) => `${cell.dataset.state}${cell.dataset.change}`)"
        )
        assert len(set(states)) >= 2, states
        assert any(state.endswith("new") for state in states)
        assert page.locator("#buffer").is_visible()


# Programs.


def test_programs_of_the_page_run(page: Any, server: LiveServer) -> None:
    """curl and Python with the settings of the page give the answer of the page."""
    set_settings(page, max_tokens="30", min_p="0.1", seed="3", stop_strings='it\'s\n"so"')
    page.get_by_role("slider", name="Speed against quality").press("ArrowRight")
    ask(page, QUESTION)
    page.get_by_role("button", name="Code").click()
    curl, python = page.locator("#snippets pre").all_inner_texts()
    page.locator("#routes", has_text="POST /v1/chat/completions").wait_for()

    result = subprocess.run(["bash", "-c", curl], capture_output=True, check=True, timeout=240)
    assert json.loads(result.stdout)["choices"][0]["message"]["content"] == "3+4=7\n#### 7"
    body = json.loads(curl[curl.index("-d '") + 4 : -1].replace("'\\''", "'"))
    assert body["stop"] == ["it's", '"so"']
    assert body["decoding"] == {"accept_threshold": 0.94}
    assert (body["seed"], body["min_p"], body["max_tokens"]) == (3, 0.1, 30)
    assert "stream" not in body

    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", python]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=240, env=environment
    )
    assert done.stdout == "3+4=7\n#### 7\n"
    assert "extra_body" in python


def test_programs_hold_no_key(page: Any) -> None:
    page.evaluate("sessionStorage.setItem('diffulex-api-key', 'sesame')")
    page.get_by_role("button", name="Code").click()
    text = page.locator("#snippets").inner_text()
    assert "sesame" not in text
    assert text.count("DIFFULEX_API_KEY") == 2


# Settings.


def test_cancel_and_escape_take_settings_back(page: Any) -> None:
    for leave in ("Cancel", "Escape"):
        page.locator("#open-settings").click()
        page.locator("#max-tokens").fill("7")
        page.locator("#mask-glyph").fill("?")
        page.locator("#top-k").fill("5")
        with close_settings(page):
            if leave == "Cancel":
                page.get_by_role("button", name="Cancel").click()
            else:
                page.keyboard.press("Escape")
        assert page.locator("#settings").is_hidden()
        assert page.locator("#max-tokens").input_value() == ""
        assert page.locator(".legend .cell").first.text_content() == "▨"
    set_settings(page, max_tokens="9", top_p="0.5", top_k="5", min_p="0.1", mask_glyph="?")
    assert page.locator(".legend .cell").first.text_content() == "?"
    page.reload()
    page.locator("#model", has_text=" · ").wait_for()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, QUESTION)
    body = sent.value.post_data_json
    assert [body[name] for name in ("max_tokens", "top_p", "top_k", "min_p")] == [9, 0.5, 5, 0.1]
    page.locator("#open-settings").click()
    page.get_by_role("button", name="Defaults").click()
    with close_settings(page):
        page.get_by_role("button", name="Done").click()
    assert page.evaluate("localStorage.getItem('diffulex-settings')") is None


def test_numbers_are_checked_before_they_are_sent(page: Any) -> None:
    page.locator("#open-settings").click()
    page.locator("#max-tokens").fill("0")
    page.get_by_role("button", name="Done").click()
    assert page.locator("#settings").is_visible()
    assert page.locator("#max-tokens").evaluate("node => !node.validity.valid")


def test_rows_after_the_end_are_explained(page: Any) -> None:
    set_settings(page, ignore_eos=True, max_tokens="60")
    ask(page, QUESTION)
    wait_for_end(page)
    note = page.locator(".fill-note")
    note.get_by_text("stand for no text").wait_for()
    assert "Ignore end of sequence" in note.inner_text()


# Phones, fingers, and screen readers.


def in_view(page: Any, selector: str) -> bool:
    """Whether the last such node is what one sees at its place, at its lower edge too."""
    return bool(
        page.locator(selector).last.evaluate(
            """(node) => {
              const box = node.getBoundingClientRect();
              const sees = (y) => {
                const hit = document.elementFromPoint(box.left + box.width / 2, y);
                return hit !== null && node.contains(hit);
              };
              return sees(box.top + 3) && sees(box.bottom - 3);
            }"""
        )
    )


def wait_until_in_view(page: Any, selector: str) -> None:
    """The page goes there once an answer is stored."""
    deadline = time.monotonic() + 60
    while not in_view(page, selector):
        assert time.monotonic() < deadline, selector
        page.wait_for_timeout(20)


@pytest.mark.parametrize("size", [(390, 844), (320, 640), (844, 390)])
def test_newest_answer_is_in_view_on_a_phone(
    server: LiveServer, browser: Any, size: tuple[int, int]
) -> None:
    width, height = size
    viewport = {"viewport": {"width": width, "height": height}}
    with open_page(server, browser, **{**PHONE, **viewport}) as page:
        for question in (QUESTION, QUESTION, LONG_QUESTION):
            ask(page, question)
            # Folded on a low screen.
            page.locator(".summary", has_text="End:").wait_for(state="attached")
            wait_until_in_view(page, ".message.assistant .foot")
            wait_until_in_view(page, ".message.assistant .text h4")
        assert page.locator("#send").is_visible()
        assert page.evaluate("document.scrollingElement.scrollHeight") <= height
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width


def test_dialogs_fit_the_narrowest_screen(server: LiveServer, browser: Any) -> None:
    narrow = {"viewport": {"width": 320, "height": 640}}
    with open_page(server, browser, **{**PHONE, **narrow}) as page:
        ask(page, LONG_QUESTION)
        for name in ("chats", "code", "settings"):
            page.locator(f"#open-{name}").click()
            dialog = page.locator(f"#{name}")
            dialog.wait_for()
            assert dialog.evaluate("node => node.scrollWidth <= node.clientWidth"), name
            page.keyboard.press("Escape")
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 320


def test_error_is_in_view_on_a_phone(server: LiveServer, browser: Any) -> None:
    page = open_unwatched(server, browser, **PHONE)
    ask(page, QUESTION)
    set_settings(page, max_tokens="5000")
    page.locator("#question").fill(LONG_QUESTION)
    page.keyboard.press("Enter")
    page.locator("#notice", has_text="5000").wait_for()
    assert in_view(page, "#notice")
    assert in_view(page, "#question")
    page.context.close()


def test_tap_on_a_sample_leaves_no_token_framed(server: LiveServer, browser: Any) -> None:
    with open_page(server, browser, **PHONE) as page:
        page.locator("#samples button").nth(2).tap()
        page.get_by_role("button", name="Regenerate").wait_for()
        wait_for_end(page)
        page.wait_for_timeout(100)
        assert page.locator(".cell.cursor").count() == 0
        page.locator("#buffer .cell").first.tap()
        assert page.locator(".cell.cursor").count() == 1


@pytest.mark.parametrize("is_phone", [False, True])
def test_targets_are_large_enough_for_a_finger(
    server: LiveServer, browser: Any, is_phone: bool
) -> None:
    with open_page(server, browser, **(PHONE if is_phone else {})) as page:
        ask(page, QUESTION)
        wait_for_end(page)
        small: list[str] = []
        for dialog in (None, "chats", "code", "settings"):
            if dialog:
                page.locator(f"#open-{dialog}").click()
                page.locator(f"#{dialog}").wait_for()
            small += page.evaluate(
                """() => [...document.querySelectorAll("button, input, select, textarea, summary")]
                  .map((node) => [node, (node.closest("label") ?? node).getBoundingClientRect()])
                  .filter(([, box]) => box.width > 0 && Math.min(box.width, box.height) < 24)
                  .map(([node, box]) => `${node.outerHTML} ${box.width}x${box.height}`)"""
            )
            if dialog:
                page.keyboard.press("Escape")
        assert small == []


def test_headings_skip_no_level(page: Any) -> None:
    ask(page, QUESTION)
    levels = page.evaluate(
        """() => [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")]
          .filter((node) => node.checkVisibility())
          .map((node) => Number(node.localName[1]))"""
    )
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels


def test_numbers_have_words(page: Any) -> None:
    """Beside the abbreviations, and in sentences that need no pointer."""
    titles = page.locator(".metric dt").all_text_contents()
    assert titles[0] == "First text after TTFT"
    assert titles[1] == "Forward passes NFE"
    assert titles[3] == "Tokens per pass TPF"
    ask(page, QUESTION)
    page.get_by_text("What the numbers mean").click()
    assert page.get_by_text("How often the model was run").is_visible()


def test_everything_is_reached_by_keyboard(page: Any) -> None:
    """Ask, replay, edit, delete: without a pointer."""
    page.locator("#question").focus()
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    page.get_by_role("button", name="Edit").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "question"
    page.get_by_role("button", name="Chats").focus()
    page.keyboard.press("Enter")
    page.locator("#chats").wait_for()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-chats"
    order = []
    page.locator(".skip").focus()
    for _ in range(40):
        page.keyboard.press("Tab")
        order.append(
            page.evaluate("document.activeElement.id || document.activeElement.textContent")
        )
    for name in ("open-chats", "messages", "Copy", "question", "send", "threshold", "buffer"):
        assert name in order, order
