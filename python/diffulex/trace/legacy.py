# SPDX-License-Identifier: Apache-2.0
"""Trajectories in the JSON of older programs: a list of requests, each with whole steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.trace.trajectory import TraceBlock, Trajectory, replayed
from diffulex.wire.finish_reasons import openai_finish_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["legacy_record"]

_FLAGS = (
    "max_new_tokens_reached",
    "max_model_len_reached",
    "max_nfe_reached",
    "max_repetition_run_reached",
    "eos_token_generated",
)


def legacy_record(record: Mapping[str, Any], trajectory: Trajectory) -> dict[str, Any]:
    """One request; `running_token_ids` of a step are those of its open blocks after it, masks included,
    without the prompt, and empty in a prefill.

    Raises:
        ConfigError: the trajectory has no tokens.
    """
    if trajectory.level != "full":
        raise ConfigError(
            f"trace: expected a trajectory of level full for the older form, got {trajectory.level}"
        )
    reason = record["completion_reason"]
    return {
        "req_id": record["req_id"],
        "token_ids": list(trajectory.token_ids),
        "trajectory": [
            {
                "step_id": step.step - 1,
                "step_time": step.seconds,
                "is_prefill": step.is_prefill,
                "num_generated_tokens": step.new_tokens,
                "running_token_ids": []
                if step.is_prefill
                else _running(trajectory, step.blocks, tokens),
                "block_size": trajectory.block_size,
                "buffer_bids": [block.block_id for block in step.blocks],
                "block_trace": [_block(block) for block in step.blocks],
            }
            for step, tokens in replayed(trajectory)
        ],
        "is_truncated": openai_finish_reason(reason) == "length",
        **{flag: reason == flag for flag in _FLAGS},
        "completion_reason": reason,
        "text": record["text"],
    }


def _running(
    trajectory: Trajectory, blocks: Sequence[TraceBlock], tokens: Sequence[int]
) -> list[int]:
    if not blocks:
        return []
    first = max(0, blocks[0].start - trajectory.prompt_len)
    return list(tokens[first : blocks[-1].end - trajectory.prompt_len])


def _block(block: TraceBlock) -> dict[str, Any]:
    ratio = block.num_masks / (block.end - block.start)
    return {
        "block_id": block.block_id,
        "is_active": block.status == "ACTIVE",
        "is_dummy": block.status == "DUMMY",
        "num_mask_tokens": block.num_masks,
        "mask_ratio": ratio,
        "progress": 1 - ratio,
        "block_status": block.status,
    }
