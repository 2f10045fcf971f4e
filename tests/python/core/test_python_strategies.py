# SPDX-License-Identifier: Apache-2.0
"""Strategies written in Python: all seven hooks, and single hooks of a built-in one."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import pytest

from diffulex_ext import _core

MASK = 0
COMMITTABLE = 1


def make_options(**fields: object) -> _core.EngineOptions:
    values: dict[str, object] = {
        "block_size": 4,
        "buffer_size": 1,
        "page_size": 4,
        "num_pages": 32,
        "max_num_reqs": 3,
        "max_num_batched_tokens": 64,
        "max_model_len": 40,
        "mask_token_id": MASK,
        "vocab_size": 50,
        "stop_token_ids": [49],
    }
    return _core.EngineOptions(**{**values, **fields})


class OneBlock(_core.Strategy):
    """Single-block decoding, hook by hook."""

    def __init__(self, options: _core.EngineOptions) -> None:
        super().__init__()
        self.options = options

    def init_request(self, request: _core.Request) -> None:
        params = request.sampling_params
        limit = min(request.prompt_len + params.max_tokens, self.options.max_model_len)
        request.open(limit, [] if params.ignore_eos else self.options.stop_token_ids)
        request.prefix_limit = request.buffer.start

    def pages_needed(self, request: _core.Request, query: _core.StepQuery) -> _core.StepNeed:
        buffer = request.buffer
        begin, end = query.context_len, request.resume_until
        if request.needs_prompt_prefill:
            # The first block runs in the forward of the prompt, unless nothing of that is left.
            end = buffer.valid_end + (self.options.block_size if buffer.can_activate() else 0)
            if buffer.num_valid == 0 and begin >= buffer.start:
                end = begin
        if end > begin:
            num_rows = end - begin if end - begin <= query.row_budget else 0
            page_len = buffer.start if request.needs_prompt_prefill else end
            return _core.StepNeed(is_prefill=True, num_rows=num_rows, page_len=page_len)
        return _core.StepNeed(num_rows=self.options.decode_rows, page_len=buffer.frozen_end)

    def begin_step(self, request: _core.Request, need: _core.StepNeed) -> None:
        status = _core.RequestStatus
        request.status = status.PREFILLING if need.is_prefill else status.DECODING
        if not need.is_prefill:
            request.needs_prompt_prefill = False
            request.resume_until = 0
        runs_buffer = not need.is_prefill or request.needs_prompt_prefill
        buffer, step = request.buffer, request.step
        step.is_in_flight = True
        step.is_prefill = need.is_prefill
        step.has_activated = runs_buffer and buffer.begin_step()
        step.first_pos = request.context_len
        step.num_rows = need.num_rows
        if runs_buffer:
            step.num_valid_rows = buffer.valid_end - step.first_pos
            step.store_end = buffer.frozen_end
        else:
            step.num_valid_rows = need.num_rows
            step.store_end = step.first_pos + need.num_rows
        step.has_sampling = runs_buffer and step.store_end < buffer.valid_end
        buffer.mark_stored(step.first_pos, step.store_end)

    def write_rows(
        self,
        request: _core.Request,
        kv_cache: _core.KVCacheManager,
        plan: _core.StepPlan,
        req_idx: int,
    ) -> None:
        step = request.step
        row0 = int(plan.cu_seqlens_q[req_idx])
        valid = slice(row0, row0 + step.num_valid_rows)
        rows = slice(row0, row0 + step.num_rows)
        plan.input_ids[rows] = MASK
        plan.positions[rows] = 0
        plan.slot_mapping[rows] = -1
        end = step.first_pos + step.num_valid_rows
        plan.input_ids[valid] = request.tokens[step.first_pos : end]
        plan.positions[valid] = range(step.first_pos, end)
        slots = kv_cache.slots(request, step.first_pos, step.store_end)
        if slots:
            plan.slot_mapping[row0 : row0 + len(slots)] = slots
            plan.note_kv_store()
        plan.context_lens[req_idx] = request.context_len
        plan.valid_slices[req_idx] = valid.stop
        plan.row_mode[req_idx] = int(not step.is_prefill)
        plan.mask_kinds[req_idx] = 1
        plan.prefix_lens[req_idx] = plan.padded_prefix_lens[req_idx] = 0

    def write_sampler_inputs(
        self, request: _core.Request, plan: _core.StepPlan, req_idx: int
    ) -> None:
        step, buffer = request.step, request.buffer
        if not step.has_sampling:
            return
        block = buffer[0]
        row0 = int(plan.cu_seqlens_q[req_idx]) + buffer.start - step.first_pos
        blk = plan.append_block(req_idx, block.block_id, buffer.start, row0)
        tokens = buffer.block_tokens(0)
        editable = range(block.editable_start, len(tokens))
        is_open = [rel for rel in editable if tokens[rel] == MASK]
        first = plan.append_logits_rows([row0 + rel for rel in is_open])
        plan.blk_tokens[blk] = tokens
        plan.blk_row_index[blk] = -1
        plan.blk_row_index[blk, is_open] = range(first, first + len(is_open))
        plan.blk_editable_start[blk] = block.editable_start
        plan.blk_force_top1[blk] = buffer.force_top1(0)
        plan.blk_accept_threshold[blk] = self.options.thresholds.accept
        plan.blk_total_steps[blk] = block.total_steps
        plan.blk_step[blk] = block.total_steps - 1
        plan.blk_open_steps[blk] = block.open_steps
        plan.blk_post_edit_steps[blk] = block.post_edit_steps

    def finish_step(
        self,
        request: _core.Request,
        plan: _core.StepPlan,
        req_idx: int,
        output: _core.SamplerOutput,
        writes: list[_core.BlockWrite],
    ) -> _core.StepOutcome:
        step, buffer = request.step, request.buffer
        num_filled = 0
        if step.has_sampling:
            buffer.count_sampler_steps()
            num_filled = sum(buffer.write(0, write.rel, write.token) for write in writes)
            flags = int(output.flags[plan.first_block(req_idx)])
            buffer.set_verdict(0, bool(flags & COMMITTABLE))
        if step.is_prefill:
            buffer.mark_cached(min(step.store_end, buffer.start))
            request.resume_until = 0
            request.needs_prompt_prefill = False
        buffer.finish_step(not step.is_prefill)
        request.record_forward(step.is_prefill, num_filled)
        reason = buffer.check_stop(request.sampling_params.max_tokens, request.nfe)
        return _core.StepOutcome(new_tokens=num_filled, finish_reason=reason)

    def on_preempt(self, request: _core.Request) -> None:
        if request.step.is_in_flight and request.step.has_sampling:
            request.buffer.undo_step(request.step.has_activated)
        request.step.is_in_flight = False
        request.resume_until = request.prefix_limit = request.buffer.drop_cached()
        request.needs_prompt_prefill = False


@dataclasses.dataclass
class Run:
    outputs: list[list[int]]
    reasons: list[str]
    nfe: list[int]
    plans: list[tuple[object, ...]]


def accept_two(plan: _core.StepPlan, output: _core.SamplerOutput) -> None:
    """Fills the first two open positions of every block, with ids that follow the position."""
    output.clear(plan.num_blocks)
    for blk in range(plan.num_blocks):
        is_open = [rel for rel in range(plan.block_size) if plan.blk_row_index[blk, rel] >= 0]
        for rel in is_open[:2]:
            output.write_ids[blk, rel] = 2 + (int(plan.blk_start[blk]) + rel) % 40
        output.flags[blk] = COMMITTABLE if len(is_open) <= 2 else 0


def serve(options: _core.EngineOptions, strategy: _core.AnyStrategy | None) -> Run:
    """Three requests; every fifth step is cancelled, every seventh preempts the oldest."""
    manager = _core.KVCacheManager(options)
    scheduler = _core.Scheduler(options, manager, strategy)
    plan, output = _core.StepPlan(options), _core.SamplerOutput(options)
    ids = []
    for prompt, max_tokens in (([1, 2, 3, 4, 5], 9), ([6, 7, 8, 9], 60), ([3], 4)):
        params = _core.SamplingParams(max_tokens=max_tokens)
        ids.append(scheduler.add_request(_core.Request(prompt, params, options)))
    plans: list[tuple[object, ...]] = []
    step = 0
    while scheduler.has_unfinished():
        step += 1
        assert step < 200
        kind = scheduler.schedule(plan)
        plans.append(
            (
                str(kind),
                plan.input_ids.tolist(),
                plan.slot_mapping.tolist(),
                plan.context_lens.tolist(),
                plan.valid_slices.tolist(),
                plan.blk_tokens.tolist(),
                plan.blk_row_index.tolist(),
                plan.logits_rows.tolist(),
                plan.blk_open_steps.tolist(),
            )
        )
        accept_two(plan, output)
        if step % 5 == 0:
            scheduler.cancel_step(plan)
        else:
            scheduler.complete_step(plan, output)
        scheduler.check_integrity()
        if step % 7 == 0:
            running = [i for i in ids if (r := scheduler.find_request(i)) and r.request_slot >= 0]
            if running:
                scheduler.preempt(running[0])
    assert manager.num_free_pages == manager.num_pages
    results = [scheduler.take_result(i) for i in ids]
    return Run(
        [r.output_ids for r in results],
        [str(r.finish_reason) for r in results],
        [r.nfe for r in results],
        plans,
    )


def test_seven_hooks_in_python_equal_the_built_in_strategy() -> None:
    options = make_options()
    expected = serve(options, None)
    assert serve(options, OneBlock(options)) == expected
    assert expected.reasons == [
        "max_new_tokens_reached",
        "max_model_len_reached",
        "max_new_tokens_reached",
    ]
    assert [len(ids) for ids in expected.outputs] == [9, 36, 4]


@pytest.mark.parametrize("strategy", ["multi_bd", "d2f"])
def test_a_built_in_strategy_may_be_passed_as_an_object(strategy: str) -> None:
    options = make_options(strategy=strategy, buffer_size=2, page_size=8)
    assert serve(options, _core.BuiltinStrategy(options)) == serve(options, None)


def test_single_hooks_may_be_replaced() -> None:
    class EndsEarly(_core.BuiltinStrategy):
        """Ends a request once four tokens are decided, whatever the sampler says."""

        num_steps = 0

        def finish_step(
            self,
            request: _core.Request,
            plan: _core.StepPlan,
            req_idx: int,
            output: _core.SamplerOutput,
            writes: list[_core.BlockWrite],
        ) -> _core.StepOutcome:
            type(self).num_steps += 1
            outcome = super().finish_step(request, plan, req_idx, output, writes)
            if len(request.output) >= 4:
                outcome.finish_reason = _core.FinishReason.MAX_NFE_REACHED
            return outcome

    options = make_options(buffer_size=2)
    run = serve(options, EndsEarly(options))
    assert run.reasons == ["max_nfe_reached"] * 3
    assert all(4 <= len(ids) < 9 for ids in run.outputs)
    assert EndsEarly.num_steps == sum(run.nfe)


def missing(name: str) -> Callable[[_core.EngineOptions], _core.Strategy]:
    return type("Lacks", (OneBlock,), {name: getattr(_core.Strategy, name)})


@pytest.mark.parametrize(
    "name",
    [
        "init_request",
        "pages_needed",
        "begin_step",
        "write_rows",
        "write_sampler_inputs",
        "finish_step",
    ],
)
def test_a_missing_hook_is_named(name: str) -> None:
    options = make_options()
    with pytest.raises(NotImplementedError, match=rf"Strategy\.{name}: expected a definition"):
        serve(options, missing(name)(options))


def test_errors_of_hooks_reach_the_caller() -> None:
    class Fails(_core.BuiltinStrategy):
        def begin_step(self, request: _core.Request, need: _core.StepNeed) -> None:
            raise LookupError("no such block")

    options = make_options()
    with pytest.raises(LookupError, match="no such block"):
        serve(options, Fails(options))


def test_what_is_no_strategy_is_refused() -> None:
    options = make_options()
    manager = _core.KVCacheManager(options)
    with pytest.raises((TypeError, RuntimeError)):
        _core.Scheduler(options, manager, object())  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="strategy: expected one of"):
        _core.BuiltinStrategy(make_options(strategy="nope"))


def test_the_scheduler_keeps_its_strategy_alive() -> None:
    options = make_options()
    manager = _core.KVCacheManager(options)
    scheduler = _core.Scheduler(options, manager, OneBlock(options))
    gc.collect()
    request = _core.Request([1, 2], _core.SamplingParams(max_tokens=3), options)
    scheduler.add_request(request)
    plan = _core.StepPlan(options)
    assert scheduler.schedule(plan) == _core.PlanKind.PREFILL
    scheduler.release_all()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda r: r.open(2, []), "past the prompt"),
        (lambda r: r.open(20, [3] * 33), "at most 32 stop ids"),
    ],
)
def test_requests_refuse_bad_limits(act: Callable[[_core.Request], None], message: str) -> None:
    request = _core.Request([1, 2], _core.SamplingParams(), make_options())
    with pytest.raises(ValueError, match=message):
        act(request)
