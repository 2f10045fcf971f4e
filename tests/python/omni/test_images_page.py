# SPDX-License-Identifier: Apache-2.0
"""The page of a server of images in a real browser: drawing, steps, files, keyboard, a narrow screen."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")
pytest.importorskip("fastapi", reason="pip install '.[serve]'")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from PIL import Image  # noqa: E402

from fixtures.browser import find_chromium, open_browser  # noqa: E402
from fixtures.omni_page import (  # noqa: E402
    PHONE,
    WAIT_MS,
    Server,
    ask_for,
    opened,
    pixels_of,
    serving,
)

# A server and a browser, and a host that has time for both.
pytestmark = [pytest.mark.slow, pytest.mark.alone]

CAPTION = "a red circle left of a blue square"
NUM_STEPS = 6


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    find_chromium()
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as running:
        yield running


@pytest.fixture
def page(server: Server, browser: Any) -> Iterator[Any]:
    with opened(server, browser) as found:
        yield found


def draw(page: Any, prompt: str = CAPTION, **fields: str) -> None:
    ask_for(page, prompt, {"steps": str(NUM_STEPS), "seed": "1", **fields})


def wait_for_result(page: Any, seed: str = "1") -> None:
    page.locator("#caption", has_text=f"seed {seed} · 64x64").wait_for()


def pixels(page: Any) -> list[int]:
    """Of the picture that is shown."""
    return pixels_of(page, "picture")


def values_of(answer: Any) -> list[int]:
    """RGBA of the picture in an answer of the API."""
    data = base64.b64decode(answer.json()["data"][0]["b64_json"])
    return list(Image.open(io.BytesIO(data)).convert("RGBA").tobytes())


def test_a_picture_is_drawn_step_by_step(page: Any, tmp_path: Path) -> None:
    """Every step is shown while it is drawn, and can be gone through afterwards."""
    page.evaluate(
        """() => {
          window.shown = [];
          new MutationObserver(() => {
            const { step } = document.getElementById("picture").dataset;
            if (window.shown.at(-1) !== step) window.shown.push(step);
          }).observe(document.getElementById("picture"), { attributes: true });
        }"""
    )
    draw(page)
    wait_for_result(page)
    shown = [int(step) for step in page.evaluate("window.shown")]
    assert shown[-1] == NUM_STEPS
    assert shown == sorted(shown)
    assert len(shown) >= 3, shown
    slider = page.locator("#slider")
    assert slider.get_attribute("max") == str(NUM_STEPS - 1)
    last = pixels(page)
    assert len(last) == 64 * 64 * 4
    slider.focus()
    page.keyboard.press("Home")
    assert page.locator("#label").inner_text() == f"step 1 of {NUM_STEPS}"
    first = pixels(page)
    mean = sum(abs(a - b) for a, b in zip(first, last)) / len(last)
    assert mean > 5, "the first step is noise"
    page.keyboard.press("End")
    assert pixels(page) == last
    with page.expect_download() as download:
        page.get_by_role("button", name="Save PNG").click()
    assert download.value.suggested_filename == "picture-1.png"
    download.value.save_as(tmp_path / "picture.png")
    image = Image.open(tmp_path / "picture.png").convert("RGBA")
    assert [value for cell in image.getdata() for value in cell] == last


def test_the_picture_is_that_of_the_api(page: Any) -> None:
    """Same seed, same picture: what the page draws is what a program gets."""
    draw(page, seed="7")
    wait_for_result(page, "7")
    answer = page.request.post(
        f"{page.url.rpartition('/')[0]}/v1/images/generations",
        data={"prompt": CAPTION, "seed": 7, "num_inference_steps": NUM_STEPS},
    )
    assert values_of(answer) == pixels(page)


def test_the_replay_plays_without_a_server(page: Any, browser: Any, tmp_path: Path) -> None:
    draw(page, prompt='a <b>pink</b> "circle"')
    wait_for_result(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save replay").click()
    path = tmp_path / "replay.html"
    download.value.save_as(path)
    context = browser.new_context(offline=True)
    replay = context.new_page()
    errors: list[str] = []
    replay.on("pageerror", lambda error: errors.append(str(error)))
    replay.goto(path.as_uri())
    assert replay.locator("h1").inner_text() == 'a <b>pink</b> "circle"'
    assert replay.locator("output").inner_text() == "step 1"
    before = replay.locator("img").get_attribute("src")
    replay.locator("input").focus()
    replay.keyboard.press("End")
    assert replay.locator("output").inner_text() == f"step {NUM_STEPS}"
    assert replay.locator("img").get_attribute("src") != before
    assert errors == []
    context.close()


def test_stop_ends_the_request(page: Any) -> None:
    page.evaluate(
        """() => {
          window.revoked = [];
          const revoke = URL.revokeObjectURL;
          URL.revokeObjectURL = (url) => { window.revoked.push(url); revoke.call(URL, url); };
        }"""
    )
    draw(page)
    wait_for_result(page)
    buttons = page.locator("#save-picture, #save-replay, #same-seed")
    states = "nodes => nodes.map((node) => node.disabled)"
    assert buttons.evaluate_all(states) == [False] * 3
    # So large that a busy browser does not show the last of its steps before the key is pressed.
    draw(page, steps="200", width="192", height="192")
    page.locator("#picture").wait_for()
    page.keyboard.press("Escape")
    page.locator("#caption", has_text="stopped").wait_for()
    page.locator("#draw").wait_for()
    # What was stopped has no result that could be kept.
    assert buttons.evaluate_all(states) == [True] * 3
    stopped = page.locator("#picture").get_attribute("src")
    # The next one is drawn at once.
    draw(page, seed="3", width="", height="")
    wait_for_result(page, "3")
    assert buttons.evaluate_all(states) == [False] * 3
    assert stopped in page.evaluate("window.revoked")


def test_what_is_wrong_is_said(server: Server, browser: Any) -> None:
    with opened(server, browser, is_watched=False) as page:
        draw(page, width="65")
        notice = page.locator("#notice")
        notice.wait_for()
        assert "width: expected a multiple of" in notice.inner_text()
        assert notice.get_attribute("role") == "alert"
        draw(page, width="", seed="2")
        wait_for_result(page, "2")
        assert notice.is_hidden()


def test_earlier_pictures_can_be_opened_again(page: Any) -> None:
    for seed in ("1", "2"):
        draw(page, seed=seed)
        wait_for_result(page, seed)
    gallery = page.locator("#gallery button")
    assert gallery.count() == 2
    gallery.nth(1).click()
    wait_for_result(page, "1")
    page.locator("#seed").fill("")
    page.get_by_role("button", name="Use this seed").click()
    assert page.locator("#seed").input_value() == "1"


def test_every_control_has_a_name_and_a_place_in_the_order(page: Any) -> None:
    draw(page)
    wait_for_result(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea")]
          .filter((node) => !node.labels?.length && !node.getAttribute("aria-label")
            && !node.textContent.trim()).map((node) => node.id)"""
    )
    assert nameless == []
    assert (
        page.locator("#picture").get_attribute("alt")
        == f"{CAPTION}, step {NUM_STEPS} of {NUM_STEPS}"
    )
    assert page.locator("#announcer").inner_text() == f"Drawn: {CAPTION}, seed 1."
    page.locator("#prompt").focus()
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert {"slider", "play", "save-picture", "save-replay"} <= set(reached)


def test_a_narrow_screen_shows_all(server: Server, browser: Any) -> None:
    with opened(server, browser, **PHONE) as phone:
        draw(phone)
        wait_for_result(phone)
        overflow = phone.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0
        box = phone.locator("#picture").bounding_box()
        assert box["width"] <= 390
        assert box["x"] >= 0


def test_a_key_can_be_entered(browser: Any) -> None:
    with serving("--api-key", "secret") as locked:
        context = browser.new_context()
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.goto(locked.url)
        page.locator("#state", has_text="asks for an API key").wait_for()
        page.locator("#more").evaluate("node => { node.open = true; }")
        page.locator("#api-key").fill("secret")
        page.locator("#api-key").press("Tab")
        page.locator("#model", has_text=" · ").wait_for()
        draw(page)
        wait_for_result(page)
        context.close()


def test_a_cache_is_chosen(page: Any) -> None:
    choice = page.get_by_label("Cache over steps")
    page.locator("#more").evaluate("node => { node.open = true; }")
    names = choice.locator("option").all_text_contents()
    assert names == ["as the server: none", "none", "cache_dit", "tea_cache"]
    choice.select_option("cache_dit")
    draw(page, steps="12")
    wait_for_result(page)
    fields = {"prompt": CAPTION, "seed": 1, "num_inference_steps": 12}
    url = f"{page.url.rpartition('/')[0]}/v1/images/generations"
    plain = page.request.post(url, data=fields)
    answer = page.request.post(url, data={**fields, "cache_backend": "cache_dit"})
    assert values_of(plain) != values_of(answer) == pixels(page)


def test_a_chosen_picture_is_changed(browser: Any) -> None:
    """By a pipeline of edits: with the strength that is asked for, step by step."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "blue").save(file, "PNG")
    with (
        serving("--model-class-name", "QwenImageImg2ImgPipeline") as editing,
        opened(editing, browser, is_watched=False) as page,
    ):
        draw(page)
        page.locator("#notice", has_text="pil_image: expected 1 pictures").wait_for()
        chosen = {"name": "blue.png", "mimeType": "image/png", "buffer": file.getvalue()}
        page.get_by_label("Pictures to start from").set_input_files(chosen)
        draw(page, strength="0.2")
        wait_for_result(page)
        assert page.locator("#notice").is_hidden()
        assert page.locator("#label").inner_text() == "step 2 of 2"
        fields = {"prompt": CAPTION, "seed": "1", "num_inference_steps": str(NUM_STEPS)}
        answer = page.request.post(
            f"{editing.url}/v1/images/edits",
            multipart={**fields, "strength": "0.2", "image": chosen},
        )
        assert values_of(answer) == pixels(page)


def test_what_the_page_asks_for(server: Server) -> None:
    import urllib.request

    with urllib.request.urlopen(f"{server.url}/server_info") as answer:
        info = json.load(answer)
    assert info["pipeline"] == "QwenImagePipeline"
    assert info["guidance"] == "true_cfg_scale"
    assert info["has_previews"]
    assert info["draws_shapes"]
    assert info["defaults"]["num_inference_steps"] == 20
