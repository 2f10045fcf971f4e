# SPDX-License-Identifier: Apache-2.0
"""A trajectory as the recording that the player of the page shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.trace.trajectory import Trajectory, replayed
from diffulex.wire.finish_reasons import openai_finish_reason

if TYPE_CHECKING:
    from diffulex.trace.trajectory import TraceStep

__all__ = ["recording_of"]


def recording_of(record: Mapping[str, Any], trajectory: Trajectory) -> dict[str, Any]:
    """The recording of one request, in the form that ``recording.js`` reads.

    Raises:
        ConfigError: the trajectory has no tokens.
    """
    if trajectory.level != "full":
        raise ConfigError(
            f"trace: expected a trajectory of level full to play, got {trajectory.level}"
        )
    frames, starts, edits = _frames(trajectory)
    metrics, texts = record["metrics"], record["texts"]
    first_s = metrics.get("ttft_s")
    meta = {
        "question": record.get("question") or f"Request {record['req_id']}",
        "model": record.get("model") or "",
        "isGrowing": False,
        "isCanvas": trajectory.mask_token_id < 0,
        "blockSize": trajectory.block_size,
        "specials": record["specials"],
        "endTime": frames[-1]["t"] if frames else 0,
        **({} if first_s is None else {"ttft": first_s * 1000}),
    }
    draft = frames[-1]["ids"] if frames else []
    return {
        "format": "diffulex-recording",
        "version": 1,
        "meta": meta,
        "text": record["text"],
        "usage": {key: metrics.get(key) for key in ("nfe", "completion_tokens", "decode_tps")},
        "finish_reason": openai_finish_reason(record["completion_reason"]),
        "prompt_len": trajectory.prompt_len,
        "mask_token_id": trajectory.mask_token_id if trajectory.mask_token_id >= 0 else None,
        "dropped": 0,
        "edits": edits,
        "block_starts": sorted(starts.items()),
        "texts": texts,
        "draft": draft,
        "frames": frames,
    }


def _frames(trajectory: Trajectory) -> tuple[list[dict[str, Any]], dict[int, int], int]:
    """The frames, where blocks start, and how often a decided token was replaced."""
    frames: list[dict[str, Any]] = []
    starts: dict[int, int] = {}
    confidences: dict[int, float] = {}
    undecided = (-1, trajectory.mask_token_id)
    edits, elapsed, before = 0, 0.0, 0
    tokens: list[int] = []
    for step, tokens in replayed(trajectory):
        elapsed += step.seconds * 1000
        for change in step.changes:
            confidences[change.position - trajectory.prompt_len] = change.confidence or 0.0
            edits += change.old not in undecided and change.new != trajectory.mask_token_id
        for block in step.blocks:
            starts.setdefault(block.block_id, max(0, block.start - trajectory.prompt_len))
        if not tokens:
            continue
        if not frames and trajectory.mask_token_id >= 0:
            frames.append(_frame(0, 0, 0, [None] * len(tokens)))
        frames.append(
            {
                **_frame(elapsed, step.step, min(before, len(tokens)), tokens[before:]),
                "committed": step.settled,
                "conf": [confidences.get(at, 0.0) for at in range(before, len(tokens))],
                "blocks": _blocks(step, trajectory.prompt_len),
                "edits": edits,
            }
        )
        before = min(step.settled, len(tokens))
    if frames:
        count = len(trajectory.token_ids)
        last = frames[-1]["nfe"]
        whole = [*trajectory.token_ids, *tokens[count:]]
        end = {"committed": count, "edits": edits, "end": count}
        frames.append({**_frame(elapsed, last, 0, whole), **end})
    return frames, starts, edits


def _frame(elapsed: float, nfe: int, offset: int, ids: list[Any]) -> dict[str, Any]:
    return {
        "t": elapsed,
        "nfe": nfe,
        "offset": offset,
        "ids": list(ids),
        "committed": 0,
        "conf": None,
        "blocks": None,
        "edits": 0,
        "tps": None,
    }


def _blocks(step: TraceStep, prompt_len: int) -> list[dict[str, Any]]:
    return [
        {
            "id": block.block_id,
            "start": max(0, block.start - prompt_len),
            "end": block.end - prompt_len,
            "state": block.status.lower(),
        }
        for block in step.blocks
    ]
