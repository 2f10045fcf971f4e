# SPDX-License-Identifier: Apache-2.0
"""mp4 files, opened by a program that knows nothing of how they were made: a browser."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffulex.omni.mp4 import write_mp4
from fixtures.browser import open_browser

#: Duration, size, and the pixels of the frame in the middle of each time, from a canvas. A busy host
#: hands a frame over after it says that it sought one; until then a canvas gets nothing, or the last.
#: What it dropped is sought again, at another time of the same frame.
PLAY = """async ({ data, count, fps }) => {
  const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
  const video = document.createElement("video");
  let shown = -1;
  const present = (now, { mediaTime }) => {
    shown = Math.round(mediaTime * fps);
    video.requestVideoFrameCallback(present);
  };
  video.requestVideoFrameCallback(present);
  const loaded = new Promise((resolve, reject) => {
    video.onloadeddata = resolve;
    video.onerror = () => reject(new Error(video.error.message));
  });
  video.src = URL.createObjectURL(new Blob([bytes], { type: "video/mp4" }));
  await loaded;
  const canvas = document.createElement("canvas");
  canvas.width = video.videoWidth;
  canvas.height = video.videoHeight;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const frames = [];
  for (let number = 0; number < count; ++number) {
    const until = performance.now() + 60000;
    for (let attempt = 0; shown !== number; ++attempt) {
      if (performance.now() > until) throw new Error(`frame ${shown} instead of ${number}`);
      video.currentTime = (number + (attempt % 2 ? 0.4 : 0.5)) / fps;
      const again = performance.now() + 2000;
      while (video.seeking || (shown !== number && performance.now() < again)) {
        if (performance.now() > until) throw new Error(`frame ${shown} instead of ${number}`);
        await new Promise((resolve) => setTimeout(resolve, 5));
      }
    }
    context.drawImage(video, 0, 0);
    frames.push([...context.getImageData(0, 0, canvas.width, canvas.height).data]);
  }
  return { duration: video.duration, width: canvas.width, height: canvas.height, frames };
}"""


@pytest.fixture(scope="module")
def page() -> Any:
    with open_browser() as browser:
        opened = browser.new_page()
        if not opened.evaluate(
            "document.createElement('video').canPlayType('video/mp4; codecs=\"avc1.42c028\"')"
        ):
            pytest.skip("this Chromium has no decoder of H.264")
        yield opened


def play(page: Any, path: Path, count: int, fps: float) -> tuple[Any, np.ndarray]:
    data = base64.b64encode(path.read_bytes()).decode()
    found = page.evaluate(PLAY, {"data": data, "count": count, "fps": fps})
    frames = np.array(found.pop("frames"), np.uint8)
    return found, frames.reshape(count, found["height"], found["width"], 4)[..., :3]


def moving(count: int, height: int, width: int) -> list[np.ndarray]:
    """A red square that moves over a ground that stays; even places, as colours have half the resolution."""
    frames = []
    for number in range(count):
        frame = np.full((height, width, 3), (240, 240, 235), np.uint8)
        frame[height // 2 :, :] = (20, 60, 200)
        frame[4:12, 2 * number : 2 * number + 8] = (220, 40, 40)
        frames.append(frame)
    return frames


@pytest.mark.slow  # starts a browser
@pytest.mark.parametrize(("height", "width", "fps"), [(32, 48, 8.0), (38, 70, 5.0)])
def test_a_browser_shows_every_frame(
    page: Any, tmp_path: Path, height: int, width: int, fps: float
) -> None:
    frames = moving(9, height, width)
    write_mp4(tmp_path / "video.mp4", frames, fps)
    facts, shown = play(page, tmp_path / "video.mp4", len(frames), fps)
    assert (facts["width"], facts["height"]) == (width, height)
    assert facts["duration"] == pytest.approx(len(frames) / fps, abs=1e-3)
    for number, (got, expected) in enumerate(zip(shown, frames)):
        # Rounding to 8 bits twice; where two colours meet, the browser smooths them.
        difference = np.abs(got.astype(int) - expected)
        assert np.median(difference) <= 2, number
        assert (difference.max(-1) > 8).mean() < 0.2, number


def test_blocks_that_stay_are_not_written_again(tmp_path: Path) -> None:
    still = [np.full((64, 64, 3), 90, np.uint8)] * 20
    write_mp4(tmp_path / "still.mp4", still, 10)
    write_mp4(tmp_path / "one.mp4", still[:1], 10)
    sizes = [(tmp_path / name).stat().st_size for name in ("one.mp4", "still.mp4")]
    assert sizes[1] - sizes[0] < 20 * 30
    generator = np.random.default_rng(0)
    noise = [generator.integers(0, 256, (64, 64, 3), np.uint8) for _ in range(3)]
    write_mp4(tmp_path / "noise.mp4", noise, 10)
    assert (tmp_path / "noise.mp4").stat().st_size == pytest.approx(3 * 64 * 64 * 1.5, rel=0.1)


def test_boxes_fill_the_file(tmp_path: Path) -> None:
    write_mp4(tmp_path / "video.mp4", moving(3, 16, 32), 4)
    data = (tmp_path / "video.mp4").read_bytes()
    kinds, place = [], 0
    while place < len(data):
        size, kind = struct.unpack_from(">I4s", data, place)
        kinds.append(kind.decode())
        place += size
    assert (kinds, place) == (["ftyp", "moov", "mdat"], len(data))


@pytest.mark.parametrize("shapes", [[], [(15, 16)], [(16, 16), (16, 32)]])
def test_frames_that_make_no_video(tmp_path: Path, shapes: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="expected one even height and width"):
        write_mp4(tmp_path / "video.mp4", [np.zeros((*shape, 3), np.uint8) for shape in shapes], 8)
    assert not (tmp_path / "video.mp4").exists()
