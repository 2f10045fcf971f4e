# SPDX-License-Identifier: Apache-2.0
"""Trajectories of every strategy: what they record, and that recording changes nothing."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from diffulex import Diffulex, SamplingParams
from diffulex.errors import SamplingParamsError
from diffulex.trace.trajectory import Change, TokenTrace, TraceRecorder, replayed
from diffulex.wire.protocol import sampling_params_from_dict, sampling_params_to_dict
from traced_answers import Traced, every_strategy


@every_strategy
def test_a_trace_replays_to_the_final_tokens(traced: Traced) -> None:
    for output in traced.full:
        trajectory = output.trajectory
        assert trajectory is not None
        steps = list(replayed(trajectory))
        assert len(steps) == output.metrics.nfe
        _, tokens = steps[-1]
        assert tokens[: len(output.token_ids)] == list(output.token_ids)
        assert tokens[: len(output.generated_ids)] == list(output.generated_ids)
        assert [token.token for token in trajectory.tokens] == list(output.token_ids)
        assert trajectory.prompt_len == len(output.prompt_token_ids)
        assert trajectory.mask_token_id == traced.mask_id


@every_strategy
def test_recording_changes_no_token_and_asks_for_nothing_more(traced: Traced) -> None:
    for plain, blocks, full in zip(traced.plain, traced.blocks, traced.full, strict=True):
        assert plain.token_ids == blocks.token_ids == full.token_ids
        assert plain.metrics.nfe == blocks.metrics.nfe == full.metrics.nfe
        assert plain.trajectory is None


@every_strategy
def test_steps_agree_with_the_metrics(traced: Traced) -> None:
    for output in traced.full:
        metrics, steps = output.metrics, output.trajectory.steps
        assert [step.step for step in steps] == list(range(1, metrics.nfe + 1))
        assert tuple(step.new_tokens for step in steps) == metrics.new_tokens_per_step
        assert tuple(not step.is_prefill for step in steps) == metrics.is_decode_step
        assert sum(step.seconds for step in steps) == pytest.approx(metrics.total_s)
        settled = [step.settled for step in steps]
        assert settled == sorted(settled)
        assert settled[-1] >= metrics.completion_tokens


@every_strategy
def test_blocks_have_no_tokens_and_the_same_states(traced: Traced) -> None:
    for blocks, full in zip(traced.blocks, traced.full, strict=True):
        assert blocks.trajectory.level == "blocks"
        assert blocks.trajectory.tokens == ()
        assert all(step.changes == () for step in blocks.trajectory.steps)
        assert [step.blocks for step in blocks.trajectory.steps] == [
            step.blocks for step in full.trajectory.steps
        ]
        assert any(step.blocks for step in blocks.trajectory.steps)
        assert {b.end - b.start for step in blocks.trajectory.steps for b in step.blocks} == {
            blocks.trajectory.block_size
        }


@every_strategy
def test_changes_say_what_was_there_and_masks_are_counted(traced: Traced) -> None:
    for output in traced.full:
        trajectory = output.trajectory
        known: dict[int, int] = {}
        for step, tokens in replayed(trajectory):
            for change in step.changes:
                assert change.old != change.new
                assert change.old == known.get(change.position, traced.mask_id)
                known[change.position] = change.new
            for block in step.blocks:
                first = max(0, block.start - trajectory.prompt_len)
                part = tokens[first : block.end - trajectory.prompt_len]
                expected = part.count(traced.mask_id) if traced.mask_id >= 0 else 0
                assert block.num_masks == expected


@pytest.mark.parametrize("traced", ["multi_bd", "d2f", "fast_dllm_v2"], indirect=True)
def test_filled_tokens_are_written_once_with_a_confidence(traced: Traced) -> None:
    for output in traced.full:
        tokens = output.trajectory.tokens
        assert all(token.edits == 0 for token in tokens)
        assert all(1 <= token.step <= output.metrics.nfe for token in tokens)
        known = [token.confidence for token in tokens if token.confidence is not None]
        assert len(known) >= 0.7 * len(tokens)
        assert all(0 < value <= 1.001 for value in known)


@every_strategy
def test_trajectories_travel_between_processes(traced: Traced) -> None:
    for output in (*traced.blocks, *traced.full):
        assert pickle.loads(pickle.dumps(output)) == output


@pytest.mark.parametrize("traced", ["diffusion_gemma"], indirect=True)
def test_a_canvas_begins_with_nothing_and_is_rewritten(traced: Traced) -> None:
    for output in traced.full:
        steps = output.trajectory.steps
        first = next(step for step in steps if step.changes)
        assert {change.old for change in first.changes} == {-1}
        assert any(token.edits > 0 for token in output.trajectory.tokens)


def _state(*blocks: tuple[int, list[int], list[float]]) -> Any:
    return SimpleNamespace(
        blocks=[
            SimpleNamespace(
                block_id=i, start=start, status="ACTIVE", tokens=tokens, confidences=confidences
            )
            for i, (start, tokens, confidences) in enumerate(blocks)
        ]
    )


def test_edits_and_reopened_positions_by_hand() -> None:
    """Prompt of 2 tokens, blocks of 4, mask 9: a write, an edit, a reopened one, a settled one."""
    recorder = TraceRecorder("full", 2, 9)
    rest: dict[str, Any] = {"seconds": 0.5, "is_prefill": False, "new_tokens": 1}
    none = [0.0] * 4
    recorder.add_step(_state((0, [1, 2, 9, 9], none)), (), **rest)
    recorder.add_step(_state((0, [1, 2, 5, 6], [0, 0, 0.5, 0.25])), (), **rest)
    recorder.add_step(_state((0, [1, 2, 7, 9], [0, 0, 0.75, 0])), (), **rest)
    recorder.add_step(_state((0, [1, 2, 7, 8], [0, 0, 0.75, 1])), (), **rest)
    recorder.add_step(_state((4, [3, 9, 9, 9], [0.5, 0, 0, 0])), (7, 8), **rest)
    trajectory = recorder.finish((7, 8, 3, 9), (7, 8, 3))
    assert [step.changes for step in trajectory.steps] == [
        (),
        (Change(2, 9, 5, 0.5), Change(3, 9, 6, 0.25)),
        (Change(2, 5, 7, 0.75), Change(3, 6, 9, None)),
        (Change(3, 9, 8, 1),),
        (Change(4, 9, 3, 0.5),),
    ]
    assert trajectory.tokens == (
        TokenTrace(2, 3, 0.75, 7, 1),
        TokenTrace(3, 4, 1, 8, 1),
        TokenTrace(4, 5, 0.5, 3, 0),
    )
    assert [step.settled for step in trajectory.steps] == [0, 0, 0, 0, 2]
    assert [step.blocks[0].num_masks for step in trajectory.steps] == [2, 0, 1, 0, 3]


def test_tokens_that_leave_in_the_step_that_writes_them_are_recorded() -> None:
    recorder = TraceRecorder("full", 0, 9)
    rest: dict[str, Any] = {"seconds": 0.5, "is_prefill": True, "new_tokens": 2}
    recorder.add_step(_state(), (4, 5), **rest)
    trajectory = recorder.finish((4, 5, 6), (4, 5, 6))
    assert trajectory.steps[0].changes == (
        Change(0, 9, 4, None), Change(1, 9, 5, None), Change(2, 9, 6, None),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "level"), [(True, "full"), (False, "none"), ("blocks", "blocks")]
)
def test_levels(given: Any, level: str) -> None:
    assert SamplingParams(return_trajectory=given).return_trajectory == level


@pytest.mark.parametrize("bad", ["all", None, 2, ["full"]])
def test_other_levels_are_refused(bad: Any) -> None:
    with pytest.raises(SamplingParamsError, match="return_trajectory: expected none, blocks, full"):
        SamplingParams(return_trajectory=bad)


def test_messages_say_that_a_trajectory_is_wanted() -> None:
    assert "return_trajectory" not in sampling_params_to_dict(SamplingParams())
    asked = SamplingParams(return_trajectory="blocks")
    assert sampling_params_from_dict(sampling_params_to_dict(asked)) == asked


def test_requests_ask_one_by_one_and_ended_ones_have_what_there_is() -> None:
    with Diffulex("demo", device="cpu") as engine:
        prompt = engine.tokenizer.encode("Tom has 3 apples.")
        first = engine.add_request(
            prompt, SamplingParams(max_tokens=200, ignore_eos=True, return_trajectory="full")
        )
        second = engine.add_request(prompt, SamplingParams(max_tokens=16))
        outputs: dict[int, Any] = {}
        num_steps = 0
        while engine.has_unfinished():
            num_steps += 1
            if num_steps == 4:
                engine.abort(first)
            for step in engine.step():
                if step.output is not None:
                    outputs[step.req_id] = step.output
        assert outputs[second].trajectory is None
        aborted = outputs[first]
        assert aborted.completion_reason == "aborted"
        assert len(aborted.trajectory.steps) == aborted.metrics.nfe > 0
        assert [t.token for t in aborted.trajectory.tokens] == list(aborted.token_ids)
        stop = engine.generate(
            [prompt], max_tokens=64, stop=("\n",), return_trajectory=True, summary=False
        )[0]
        assert [t.token for t in stop.trajectory.tokens] == list(stop.token_ids)


def test_streams_end_with_a_trajectory() -> None:
    with Diffulex("demo", device="cpu") as engine:
        *_, last = engine.stream("Tom has 3 apples.", max_tokens=16, return_trajectory="full")
        assert [t.token for t in last.output.trajectory.tokens] == list(last.output.token_ids)
