# SPDX-License-Identifier: Apache-2.0
"""The page's modules one by one, in a browser that gets their files and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.ui_page import open_modules

_MASK = 99


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    with open_modules(browser) as opened:
        yield opened


def read_stream(page: Any, chunks: list[bytes]) -> dict[str, Any]:
    """Objects that `readEvents` yields for a body that arrives in these chunks, and its error."""
    return page.evaluate(
        """async (chunks) => {
          const { readEvents } = await import("/ui/sse.js");
          const body = new ReadableStream({
            start(controller) {
              for (const chunk of chunks) controller.enqueue(new Uint8Array(chunk));
              controller.close();
            },
          });
          const events = [];
          try {
            for await (const event of readEvents(body)) events.push(event);
          } catch (error) {
            return { events, error: error.message };
          }
          return { events, error: null };
        }""",
        [list(chunk) for chunk in chunks],
    )


_STREAM = (
    ': ping\n\ndata: {"a": "\u00e4"}\n\ndata:{"b":\ndata: 2}\n\ndata: [DONE]\n\ndata: {"c": 3}\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_stream_is_read_however_it_is_cut(page: Any, size: int, newline: str) -> None:
    """Comments are skipped, several data lines make one object, nothing follows the terminator."""
    data = _STREAM.replace("\n", newline).encode()
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    assert read_stream(page, chunks) == {"events": [{"a": "\u00e4"}, {"b": 2}], "error": None}


def test_stream_that_breaks_off_is_an_error(page: Any) -> None:
    result = read_stream(page, [b'data: {"a": 1}\n\ndata: {"b'])
    assert result["events"] == [{"a": 1}]
    assert "connection was lost" in result["error"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"error": {"message": "m", "code": "queue_full"}}, ["m", "queue_full"]),
        ({"event": "error", "message": "m", "code": "engine_dead"}, ["m", "engine_dead"]),
        ({"detail": "m"}, ["m", None]),
        (None, ["the server answered 502", None]),
    ],
)
def test_every_form_of_error_is_understood(page: Any, body: Any, expected: list[Any]) -> None:
    found = page.evaluate(
        """async (body) => {
          const { errorOf } = await import("/ui/api.js");
          const error = errorOf(body, 502);
          return [error.message, error.code ?? null];
        }""",
        body,
    )
    assert found == expected


def test_texts_are_fetched_once_and_again_after_a_failure(page: Any) -> None:
    result = page.evaluate(
        """async () => {
          const { TokenTexts } = await import("/ui/api.js");
          const asked = [];
          let isBroken = false;
          const texts = new TokenTexts({
            post: async (_, { tokens }) => {
              asked.push(tokens);
              await new Promise((resolve) => setTimeout(resolve, 5));
              if (isBroken) throw new Error("broken");
              return { token_strs: tokens.map((id) => `t${id}`) };
            },
          });
          const both = await Promise.all([texts.load([1, 2]), texts.load([2, 3])]);
          const again = await texts.load([1, 2, 3]);
          isBroken = true;
          const failure = await texts.load([4]).catch((error) => error.message);
          isBroken = false;
          await texts.load([4]);
          return { asked, both, again, failure, known: [1, 2, 3, 4].map((id) => texts.get(id)) };
        }"""
    )
    assert result == {
        "asked": [[1, 2], [3], [4], [4]], "both": [True, True], "again": False,
        "failure": "broken", "known": ["t1", "t2", "t3", "t4"],
    }  # fmt: skip


def snapshot(offset: int, ids: list[int], nfe: int, **fields: Any) -> dict[str, Any]:
    return {
        "token_offset": offset, "absolute_start": 10 + offset,
        "absolute_end": 10 + offset + len(ids), "token_ids": ids, "nfe": nfe,
        "committed": offset, "mask_token_id": _MASK, **fields,
    }  # fmt: skip


def record(
    page: Any,
    snapshots: list[dict[str, Any]],
    finish: dict[str, Any] | None = None,
    frames: list[int] | None = None,
) -> Any:
    """A recording after a round trip through JSON, with the states of its (or these) frames."""
    return page.evaluate(
        """async ([snapshots, finish, frames]) => {
          const { Recording } = await import("/ui/recording.js");
          const recording = new Recording({ blockSize: 4 });
          recording.begin(4);
          snapshots.forEach((item, index) => recording.push(item, 10 * (index + 1)));
          if (finish) recording.finish(finish, 1000);
          const copy = Recording.fromJSON(JSON.parse(JSON.stringify(recording)));
          return {
            states: (frames ?? [...copy.frames.keys()]).map((index) => {
              const state = copy.stateAt(index);
              return {
                ids: state.cells.map((cell) => cell.id),
                states: state.cells.map((cell) => cell.state),
                changes: state.cells.map((cell) => cell.change),
                confidences: state.cells.map((cell) => cell.confidence),
                blocks: state.blocks.map((block) => [block.start, block.end, block.state]),
                step: copy.stepNumber(index),
              };
            }),
            decidedAt: copy.draft.slice(0, 8).map((_, i) => copy.decidedAt(i, copy.length - 1)),
            edits: copy.edits, dropped: copy.dropped, draft: copy.draft, length: copy.length,
          };
        }""",
        [snapshots, finish, frames],
    )


def test_recording_replays_every_state(page: Any) -> None:
    """Masks, decisions, an overwritten token, commits, and the end that cuts the rest off."""
    result = record(
        page,
        [
            snapshot(0, [5, _MASK], 1, confidences=[0.9, 0.0]),
            snapshot(0, [6, 7, _MASK, 8, _MASK, _MASK], 2, confidences=[0.8, 0.7, 0, 0.6, 0, 0]),
            snapshot(2, [1, 8, 2, 3], 3, committed=6, confidences=[0.5, 0.6, 0.4, 0.3]),
        ],
        {"text": "t", "usage": {"nfe": 4}, "finishReason": "stop", "numTokens": 5},
    )
    start, first, second, third, end = result["states"]
    assert start["states"] == ["masked"] * 2
    assert first["states"] == ["filled", "masked"]
    assert first["changes"] == ["new", ""]
    assert first["confidences"] == [0.9, None]
    assert second["ids"] == [6, 7, _MASK, 8, _MASK, _MASK]
    assert second["changes"] == ["edit", "new", "", "new", "", ""]
    assert third["ids"] == [6, 7, 1, 8, 2, 3]
    assert third["states"] == ["committed"] * 6
    assert third["changes"] == ["", "", "new", "", "new", "new"]
    assert end["states"] == ["committed"] * 5 + ["cut"]
    assert result["edits"] == 1
    assert result["decidedAt"] == [2, 2, 3, 2, 3, 3]
    assert [state["step"] for state in result["states"]] == [0, 1, 2, 3, 4]


def test_block_boundaries_follow_the_prompt(page: Any) -> None:
    """Ten prompt tokens in blocks of four leave two positions of the first block."""
    result = record(page, [snapshot(0, [_MASK] * 8, 1)])
    assert [block[:2] for block in result["states"][1]["blocks"]] == [[0, 2], [2, 6], [6, 8]]


def test_given_blocks_name_their_states(page: Any) -> None:
    blocks = [
        {"id": 2, "start": 8, "end": 12, "state": "to_cache", "masked": 0},
        {"id": 3, "start": 12, "end": 16, "state": "active", "masked": 4},
    ]
    ids = [1, 2, _MASK, _MASK, _MASK, _MASK]
    result = record(page, [snapshot(0, ids, 1, blocks=blocks, committed=2)])
    assert result["states"][1]["blocks"] == [[0, 2, "to_cache"], [2, 6, "active"]]


def test_block_keeps_its_start_when_its_head_is_committed(page: Any) -> None:
    """Later snapshots name only what is left of a block; it stays one block."""

    def blocks(start: int) -> list[dict[str, Any]]:
        return [{"id": 2, "start": start, "end": 14, "state": "active", "masked": 1}]

    result = record(
        page,
        [
            snapshot(0, [1, _MASK, _MASK, _MASK], 1, blocks=blocks(10), committed=1),
            snapshot(1, [2, _MASK, 3], 2, blocks=blocks(11), committed=2),
        ],
    )
    assert [state["blocks"] for state in result["states"][1:]] == [[[0, 4, "active"]]] * 2


def test_canvas_without_masks_starts_with_its_first_snapshot(page: Any) -> None:
    result = record(
        page,
        [
            snapshot(0, [1, 2], 1, mask_token_id=None),
            snapshot(0, [1, 3], 2, mask_token_id=None),
        ],
    )
    assert [state["changes"] for state in result["states"]] == [["new", "new"], ["", "edit"]]
    assert result["states"][0]["step"] == 1


def test_long_recording_keeps_the_last_frames(page: Any) -> None:
    """2,000 frames are kept; the committed text of older ones stays in each state."""
    snapshots = [
        snapshot(max(0, n - 1), [n - 1, n] if n else [0], n + 1, committed=n + 1)
        for n in range(2100)
    ]
    result = record(page, snapshots, frames=[0, 1999])
    assert (result["length"], result["dropped"]) == (2000, 101)
    assert result["states"][0]["ids"] == list(range(101))
    assert result["states"][-1]["ids"] == list(range(2100))
    assert result["states"][-1]["step"] == 2100


def test_foreign_file_is_refused(page: Any) -> None:
    message = page.evaluate(
        """async () => {
          const { Recording } = await import("/ui/recording.js");
          try { Recording.fromJSON({ format: "other" }); } catch (error) { return error.message; }
        }"""
    )
    assert "expected diffulex-recording" in message


def test_picture_stays_within_a_second_of_the_stream(page: Any) -> None:
    """Drawn at 60 Hz, a burst of any size is shown within a second; few frames, each for 80 ms."""
    runs = page.evaluate(
        """async () => {
          const { followSteps } = await import("/ui/player.js");
          return [1, 5, 40, 400, 1900].map((burst) => {
            let behind = burst, elapsed = 0, now = 0, drawn = 0;
            while (behind > 0 && now < 10000) {
              now += 1000 / 60;
              elapsed += 1000 / 60;
              const steps = followSteps(behind, elapsed, now, true);
              if (steps > 0) { behind -= steps; elapsed = 0; drawn += 1; }
            }
            return [now, drawn];
          });
        }"""
    )
    assert runs[0] == [pytest.approx(83, abs=10), 1]
    assert runs[1] == [pytest.approx(417, abs=60), 5]
    assert all(milliseconds < 1020 for milliseconds, _ in runs), runs
    assert runs[4][1] > 30  # a burst is spread, not skipped


def test_without_smoothing_the_newest_frame_is_drawn(page: Any) -> None:
    steps = page.evaluate(
        """async () => (await import("/ui/player.js")).followSteps(17, 0, 0, false)"""
    )
    assert steps == 17


def test_threshold_slider_maps_to_the_request(page: Any) -> None:
    """Untouched it sends nothing; moved, both thresholds of an editing strategy move."""
    result = page.evaluate(
        """async () => {
          document.body.innerHTML = '<input id="threshold" type="range" min="0" max="100">'
            + '<output id="threshold-value"></output><button id="threshold-reset"></button>';
          const { ThresholdKnob } = await import("/ui/settings.js");
          const knob = new ThresholdKnob();
          const seen = [];
          const move = (value) => {
            knob.slider.value = value;
            knob.slider.dispatchEvent(new Event("input"));
            seen.push(knob.decoding() ?? null);
          };
          knob.setDefaults({ accept_threshold: 0.9 });
          seen.push(knob.decoding() ?? null, Number(knob.slider.value));
          move(50);
          knob.reset.click();
          seen.push(knob.decoding() ?? null);
          knob.setDefaults({ accept_threshold: 0.8, edit_threshold: 0.4 });
          move(60);
          knob.setDefaults({});
          seen.push(knob.slider.disabled);
          return seen;
        }"""
    )
    assert result == [
        None, 10, {"accept_threshold": 0.5}, None,
        {"accept_threshold": 0.4, "edit_threshold": 0.2}, True,
    ]  # fmt: skip
