# SPDX-License-Identifier: Apache-2.0
"""The page of a server of videos in a real browser: progress, playing, the file, keyboard, stop, reload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")
pytest.importorskip("fastapi", reason="pip install '.[serve]'")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from fixtures.browser import find_chromium, open_browser  # noqa: E402
from fixtures.omni_page import (  # noqa: E402
    PHONE,
    Server,
    ask_for,
    opened,
    pixels_of,
    serving,
)
from fixtures.processes import until  # noqa: E402

# A server and a browser, and a host that has time for both.
pytestmark = [pytest.mark.slow, pytest.mark.alone]

MODEL = Path(__file__).resolve().parents[3] / "examples/zoo/motion_wan"
CAPTION = "a red circle moving right"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    find_chromium()
    with serving("--model", str(MODEL), "--api-key", "secret") as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as running:
        yield running


#: What a browser keeps of an earlier visit.
KEY = "sessionStorage.setItem('diffulex-api-key', 'secret')"


@pytest.fixture
def page(server: Server, browser: Any) -> Iterator[Any]:
    with opened(server, browser, script=KEY) as found:
        yield found


def draw(page: Any, **fields: str) -> None:
    ask_for(page, CAPTION, {"seed": "0", **fields})


def place_of_red(page: Any, time: float) -> float:
    """The mean column of what is red in the frame of a time; NaN where nothing is."""
    page.locator("#video").evaluate(
        """(node, time) => new Promise((resolve) => {
          node.pause();
          node.addEventListener("seeked", resolve, { once: true });
          node.currentTime = time;
        })""",
        time,
    )
    shown = np.array(pixels_of(page, "video")).reshape(32, 32, 4)
    columns = ((shown[..., 0] > 150) & (shown[..., 1] < 100)).nonzero()[1]
    return float(columns.mean()) if columns.size else float("nan")


def wait_for_result(page: Any, seed: str = "0") -> None:
    page.locator("#caption", has_text=f"seed {seed} · 32x32 · plays ").wait_for()


def video_of(page: Any) -> str:
    """The id that the address has."""
    found: str = page.url.partition("?video=")[2].partition("#")[0]
    return found


def listed(page: Any, method: str = "get", path: str = "") -> Any:
    call = getattr(page.request, method)
    url = page.url.rpartition("/")[0]
    return call(f"{url}/v1/videos{path}", headers={"Authorization": "Bearer secret"})


def test_a_video_is_asked_for_played_and_saved(page: Any, tmp_path: Path) -> None:
    """Progress is shown meanwhile; then it plays, and is the file of the API to the byte."""
    page.evaluate(
        """() => {
          window.shown = [];
          const progress = document.getElementById("progress");
          new MutationObserver(() => {
            if (!progress.hidden) window.shown.push(progress.value);
          }).observe(progress, { attributes: true });
        }"""
    )
    assert page.title() == "Diffulex videos"
    assert page.locator("h2").first.inner_text() == "Videos"
    assert not page.locator("#slider, #every, #save-replay, #files").evaluate_all(
        "nodes => nodes.some((node) => node.checkVisibility())"
    )
    # The page asks for progress a few times in a second.
    draw(page, steps="200")
    wait_for_result(page)
    shown = page.evaluate("window.shown")
    assert shown == sorted(shown)
    assert len(set(shown)) >= 2, shown
    assert page.locator("#progress").is_hidden()
    assert page.locator("#announcer").inner_text() == f"Drawn: {CAPTION}, seed 0."
    video = page.locator("#video")
    assert video.get_attribute("aria-label") == f"{CAPTION}, video"
    until(lambda: page.evaluate("document.getElementById('video').currentTime > 0"))
    size = "node => [node.videoWidth, node.videoHeight, node.duration]"
    assert video.evaluate(size) == [32, 32, 9 / 16]
    with page.expect_download() as download:
        page.get_by_role("button", name="Save MP4").click()
    assert download.value.suggested_filename == "video-0.mp4"
    download.value.save_as(tmp_path / "video.mp4")
    data = (tmp_path / "video.mp4").read_bytes()
    assert data == listed(page, path=f"/{video_of(page)}/content").body()
    # A red shape on white that moves to the right. A frame may come some time after it was sought.
    until(lambda: place_of_red(page, 0.5) > place_of_red(page, 0.01) + 3)


def test_fields_of_videos_and_earlier_ones(page: Any) -> None:
    draw(page, seconds="0.5", fps="8", steps="2")
    wait_for_result(page)
    # 4 frames after the first.
    assert "plays 0.625 s" in page.locator("#caption").inner_text()
    draw(page, seed="1", steps="2", seconds="", fps="")
    wait_for_result(page, "1")
    gallery = page.locator("#gallery button")
    assert gallery.count() == 2
    gallery.nth(1).click()
    wait_for_result(page)
    until(lambda: page.evaluate("document.getElementById('video').duration === 0.625"))
    page.locator("#seed").fill("")
    page.get_by_role("button", name="Use this seed").click()
    assert page.locator("#seed").input_value() == "0"


def test_stop_ends_the_job_and_the_next_one_is_drawn(page: Any) -> None:
    before = [job["id"] for job in listed(page).json()["data"]]
    draw(page, steps="200")
    page.locator("#caption", has_text=" %").wait_for()
    page.keyboard.press("Escape")
    page.locator("#caption", has_text="stopped").wait_for()
    page.locator("#draw").wait_for()
    assert page.locator("#save-picture").is_disabled()
    assert [job["id"] for job in listed(page).json()["data"]] == before
    draw(page, seed="3", steps="2")
    wait_for_result(page, "3")


def test_a_page_that_is_loaded_again_goes_on_with_its_video(page: Any) -> None:
    draw(page, seed="5", steps="200")
    page.locator("#caption", has_text=" %").wait_for()
    # Which changes the address.
    page.locator(".skip").press("Enter")
    assert page.url.endswith("#prompt")
    page.reload()
    # It may be done by now.
    wait_for_result(page, "5")
    # One that the server has forgotten is no reason for words.
    listed(page, "delete", f"/{video_of(page)}")


def test_a_video_is_shown_once_the_key_is_known(page: Any, browser: Any) -> None:
    draw(page, seed="6", steps="2")
    wait_for_result(page, "6")
    with closing(browser.new_page()) as other:
        other.goto(page.url)
        other.locator("#state", has_text="asks for an API key").wait_for()
        key = other.locator("#api-key")
        key.evaluate("node => { node.value = 'secret'; node.dispatchEvent(new Event('change')); }")
        wait_for_result(other, "6")


def test_what_is_wrong_is_said(server: Server, browser: Any) -> None:
    with opened(server, browser, is_watched=False, script=KEY) as page:
        draw(page, width="30")
        notice = page.locator("#notice")
        notice.wait_for()
        assert "width: expected a multiple of" in notice.inner_text()
        draw(page, width="", steps="200")
        page.locator("#caption", has_text=" %").wait_for()
        # Somebody else ends it.
        listed(page, "delete", f"/{video_of(page)}")
        page.locator("#notice", has_text="video: expected a known one").wait_for()
        page.reload()
        page.locator("#model", has_text=" · ").wait_for()
        assert page.locator("#notice").is_hidden()
        error = {"message": "out of order", "type": "server_error", "param": None, "code": None}
        page.route("**/v1/videos/video_*", lambda r: r.fulfill(status=500, json={"error": error}))
        page.reload()
        page.locator("#notice", has_text="out of order").wait_for()
        page.route("**/v1/videos", lambda r: r.fulfill(status=413, json={"error": error}))
        draw(page, steps="2")
        page.locator("#notice", has_text="smaller pictures. (out of order)").wait_for()


def test_a_narrow_screen_shows_all(server: Server, browser: Any) -> None:
    with opened(server, browser, script=KEY, **PHONE) as phone:
        draw(phone, steps="2")
        wait_for_result(phone)
        assert phone.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        box = phone.locator("#video").bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 390
        nameless = phone.evaluate(
            """() => [...document.querySelectorAll("button, input, select, textarea, progress, video")]
              .filter((node) => node.checkVisibility() && !node.ariaHidden && !node.labels?.length
                && !node.getAttribute("aria-label") && !node.textContent.trim()).map((node) => node.id)"""
        )
        assert nameless == []
