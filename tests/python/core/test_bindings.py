# SPDX-License-Identifier: Apache-2.0
"""Every class of the compiled core as Python sees it: constructors, views, records, lifetimes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import diffulex_ext
from diffulex_ext import _core

MASK = 99


def make_options(**fields: Any) -> _core.EngineOptions:
    defaults: dict[str, Any] = {
        "block_size": 4,
        "buffer_size": 2,
        "page_size": 4,
        "num_pages": 32,
        "max_num_reqs": 3,
        "max_model_len": 30,
        "max_num_batched_tokens": 40,
        "mask_token_id": MASK,
        "vocab_size": 100,
    }
    return _core.EngineOptions(**{**defaults, **fields})


class Steps:
    """An engine core with its plan and output; accepts `token` at the first open position."""

    def __init__(self, **fields: Any) -> None:
        self.options = make_options(**fields)
        self.core = _core.EngineCore(self.options)
        self.plan = _core.StepPlan(self.options)
        self.output = _core.SamplerOutput(self.options)

    def add(self, token_ids: list[int], **fields: Any) -> int:
        return self.core.add_request(token_ids, _core.SamplingParams(**fields))

    def fill(self, token: int = 7) -> None:
        self.output.clear(self.plan.num_blocks)
        for blk in range(self.plan.num_blocks):
            open_rel = np.flatnonzero(self.plan.blk_tokens[blk] == MASK)
            self.output.write_ids[blk, open_rel[0]] = token
            self.output.confidence[blk, open_rel[0]] = 0.75
            self.output.flags[blk] = 1 if len(open_rel) == 1 else 0

    def step(self, token: int = 7) -> _core.StepEvents:
        self.core.schedule(self.plan)
        self.fill(token)
        return self.core.complete_step(self.plan, self.output)


# --- options and parameters ---------------------------------------------------------------------


@pytest.mark.parametrize("record", [_core.Thresholds, _core.SamplingParams, _core.EngineOptions])
def test_constructors_name_unknown_keywords(record: Any) -> None:
    with pytest.raises(TypeError, match=f"{record.__name__}: expected a field name, got speed"):
        record(speed=3)
    with pytest.raises(TypeError):
        record(3)


@pytest.mark.parametrize(("top_k", "is_legal"), [(0, True), (16, True), (17, False), (64, False)])
def test_merged_candidates_are_no_more_than_the_kernels_take(top_k: int, is_legal: bool) -> None:
    options = make_options(strategy="dmax", token_merge_top_k=top_k)
    if is_legal:
        options.validate()
        return
    expected = r"token_merge_top_k: expected a value in \[0, 16\], the most that the kernels merge"
    with pytest.raises(ValueError, match=f"{expected}, got {top_k}"):
        options.validate()


def test_constructors_take_fields_and_refuse_methods() -> None:
    thresholds = _core.Thresholds(accept=0.5, add_block=0.25)
    assert (thresholds.accept, thresholds.add_block, thresholds.semi_complete) == (
        0.5,
        0.25,
        pytest.approx(0.9),
    )
    params = _core.SamplingParams(max_tokens=3, stop_token_ids=[4, 5], seed=2**63, max_nfe=6)
    assert (params.max_tokens, params.stop_token_ids, params.seed) == (3, [4, 5], 2**63)
    assert params.accept_threshold is None
    options = make_options(thresholds=thresholds)
    assert options.thresholds.accept == 0.5
    assert options.decode_rows == 8
    assert options.max_pages_per_req == 8
    assert options.num_pages_for(9) == 3
    with pytest.raises((TypeError, AttributeError)):
        _core.EngineOptions(decode_rows=4)
    with pytest.raises(TypeError):
        _core.EngineOptions(block_size="4")


def test_validation_errors_have_their_types() -> None:
    with pytest.raises(ValueError, match="block_size: expected"):
        make_options(block_size=5).validate()
    with pytest.raises(NotImplementedError, match="multi_bd"):
        make_options(strategy="other").validate()
    with pytest.raises(ValueError, match="max_tokens"):
        _core.SamplingParams(max_tokens=0).validate()
    make_options().validate()
    _core.SamplingParams().validate()


@pytest.mark.parametrize(
    "build",
    [
        _core.KVCacheManager,
        _core.EngineCore,
        _core.StepPlan,
        _core.SamplerOutput,
        lambda options: _core.Request([1], _core.SamplingParams(), options),
        lambda options: _core.Scheduler(options, _core.KVCacheManager(make_options())),
    ],
)
def test_classes_refuse_invalid_options(build: Any) -> None:
    with pytest.raises(ValueError, match="buffer_size"):
        build(make_options(buffer_size=1000))


def test_enumerations_print_their_documented_names() -> None:
    assert str(_core.FinishReason.EOS_TOKEN_GENERATED) == "eos_token_generated"
    assert str(_core.RequestStatus.PREFILLING) == "PREFILLING"
    assert str(_core.BlockStatus.TO_CACHE) == "TO_CACHE"
    assert str(_core.PlanKind.DECODE) == "decode"
    assert int(_core.RowMode.DECODE_BLOCK_CAUSAL) == 1
    assert _core.strategy_names() == [
        "d2f",
        "diffusion_gemma",
        "dmax",
        "fast_dllm_v2",
        "multi_bd",
    ]
    assert _core.__version__ == diffulex_ext.__version__


# --- requests -----------------------------------------------------------------------------------


def test_a_request_before_admission_is_readable() -> None:
    options = make_options()
    request = _core.Request([1, 2, 3], _core.SamplingParams(max_tokens=4), options)
    assert request.prompt == request.tokens == [1, 2, 3]
    assert request.output == request.page_table == []
    assert request.status == _core.RequestStatus.WAITING
    assert request.sampling_params.max_tokens == 4
    buffer = request.buffer
    assert len(buffer) == 2
    assert buffer.num_valid == buffer.start == buffer.context_len == 0
    assert [buffer.block_tokens(i) for i in range(2)] == [[], []]
    for index in (-1, 2):
        with pytest.raises(IndexError, match="BlockBuffer: expected an index below 2"):
            buffer.block_tokens(index)
        with pytest.raises(IndexError, match=f"got {index}"):
            buffer[index]
    with pytest.raises(RuntimeError, match="BlockBuffer: expected tokens"):
        buffer.check_integrity()


def test_blocks_of_an_admitted_request() -> None:
    steps = Steps()
    req_id = steps.add([1, 2])
    assert steps.core.find_request(req_id) is None  # in the mailbox until the next boundary
    assert steps.core.schedule(steps.plan) == _core.PlanKind.PREFILL
    request = steps.core.find_request(req_id)
    assert request is not None
    block = request.buffer[0]
    assert (block.block_id, block.status) == (0, _core.BlockStatus.ACTIVE)
    assert (block.editable_start, block.num_masks, block.total_steps) == (2, 2, 1)
    assert block.type == _core.BlockType.IN_CONTEXT
    assert block.open_steps == block.post_edit_steps == 0
    assert block.same_token_ratio == 1.0
    assert not block.commit_ready
    assert not block.stored_this_step
    assert request.buffer.block_tokens(0) == [1, 2, MASK, MASK]
    assert request.buffer.block_status(0) == _core.BlockStatus.ACTIVE
    request.buffer.check_integrity()
    assert request.request_slot == 0
    assert request.settled_end == request.prompt_len == 2
    assert request.limit_end == 30


def test_scheduler_keeps_a_copy_of_the_request_and_its_page_manager() -> None:
    options = make_options()
    kv_cache = _core.KVCacheManager(options)
    scheduler = _core.Scheduler(options, kv_cache)
    watch = weakref.ref(kv_cache)
    request = _core.Request([1, 2, 3, 4], _core.SamplingParams(max_tokens=4), options)
    req_id = scheduler.add_request(request)
    assert request.req_id == -1
    plan = _core.StepPlan(options)
    del kv_cache
    gc.collect()
    assert watch() is not None
    assert scheduler.schedule(plan) == _core.PlanKind.PREFILL
    scheduler.complete_step(plan, _core.SamplerOutput(options))
    found = scheduler.find_request(req_id)
    assert found is not None
    assert found.page_table == [0]
    assert scheduler.find_request(req_id + 1) is None
    scheduler.check_integrity()
    del scheduler
    gc.collect()
    assert watch() is None


# --- errors -------------------------------------------------------------------------------------


def test_errors_of_requests_have_their_types() -> None:
    steps = Steps(num_pages=4)
    with pytest.raises(ValueError, match="at least one prompt token"):
        steps.add([])
    with pytest.raises(ValueError, match="expected ids in"):
        steps.add([100])
    with pytest.raises(IndexError, match="max_model_len 30"):
        steps.add([1] * 30)
    with pytest.raises(_core.OutOfPagesError, match="got 5 pages"):
        steps.add([1] * 10, max_tokens=10)
    assert issubclass(_core.OutOfPagesError, RuntimeError)
    assert diffulex_ext.OutOfPagesError is _core.OutOfPagesError
    for call in (steps.core.snapshot, steps.core.take_result, steps.core.preempt):
        with pytest.raises(KeyError, match="expected a known request, got 7"):
            call(7)
    req_id = steps.add([1, 2], max_tokens=8)
    steps.core.schedule(steps.plan)
    with pytest.raises(ValueError, match="expected a finished request"):
        steps.core.take_result(req_id)
    with pytest.raises(ValueError, match="no plan in flight"):
        steps.core.preempt(req_id)
    with pytest.raises(RuntimeError, match="schedule: expected no plan in flight"):
        steps.core.schedule(steps.plan)
    steps.fill(token=MASK)
    with pytest.raises(ValueError, match="got the mask token"):
        steps.core.complete_step(steps.plan, steps.output)
    assert steps.core.stats().num_rejected == 4


def test_plans_and_outputs_of_other_options_are_refused() -> None:
    steps = Steps()
    steps.add([1, 2])
    for fields in ({"buffer_size": 1}, {"page_size": 8}, {"max_model_len": 34}):
        with pytest.raises(RuntimeError, match="schedule: expected a plan of block_size 4"):
            steps.core.schedule(_core.StepPlan(make_options(**fields)))
    steps.core.schedule(steps.plan)
    with pytest.raises(ValueError, match=r"an output of 6 blocks of 4 .* got 3 of 4"):
        steps.core.complete_step(steps.plan, _core.SamplerOutput(make_options(buffer_size=1)))
    with pytest.raises(ValueError, match="expected the plan in flight"):
        steps.core.cancel_step(_core.StepPlan(steps.options))
    steps.core.cancel_step(steps.plan)


def test_page_manager_reads_and_refuses() -> None:
    kv_cache = _core.KVCacheManager(make_options(page_size=8))
    assert (kv_cache.num_pages, kv_cache.num_free_pages, kv_cache.num_used_pages) == (32, 32, 0)
    assert (kv_cache.page_size, kv_cache.prefix_unit_len, kv_cache.num_cached_units) == (8, 8, 0)
    assert kv_cache.num_pages_for(9) == 2
    assert kv_cache.ref_count(31) == 0
    for page in (-1, 32):
        with pytest.raises(IndexError, match=f"expected a page below 32, got {page}"):
            kv_cache.ref_count(page)
    kv_cache.check_integrity()


# --- plans --------------------------------------------------------------------------------------


def test_the_plan_in_flight_outlives_its_last_reference() -> None:
    options = make_options()
    core = _core.EngineCore(options)
    output = _core.SamplerOutput(options)
    core.add_request([1, 2, 3, 4], _core.SamplingParams())
    plan = _core.StepPlan(options)
    address = plan.address
    watch = weakref.ref(plan)
    core.schedule(plan)
    del plan
    gc.collect()
    assert watch() is not None
    for _ in range(20):  # none may be taken for the plan in flight, whatever memory it got
        other = _core.StepPlan(options)
        assert other.address != address
        with pytest.raises(ValueError, match="expected the plan in flight"):
            core.complete_step(other, output)
        with pytest.raises(ValueError, match="expected the plan in flight"):
            core.cancel_step(other)
        del other
    core.check_integrity()
    core.release_all()
    assert watch() is None
    assert core.schedule(_core.StepPlan(options)) == _core.PlanKind.IDLE


@pytest.mark.parametrize("ending", ["complete", "cancel", "release"])
def test_the_plan_is_let_go_when_its_step_ends(ending: str) -> None:
    options = make_options()
    core = _core.EngineCore(options)
    core.add_request([1, 2, 3, 4], _core.SamplingParams())
    plan = _core.StepPlan(options)
    watch = weakref.ref(plan)
    core.schedule(plan)
    gc.collect()
    if ending == "complete":
        core.complete_step(plan, _core.SamplerOutput(options))
    elif ending == "cancel":
        core.cancel_step(plan)
    else:
        core.release_all()
    del plan
    gc.collect()
    assert watch() is None


def test_arrays_are_views_of_the_arena() -> None:
    steps = Steps()
    steps.add([1, 2])
    steps.core.schedule(steps.plan)
    plan = steps.plan
    by_name = {field.name: field for field in plan.fields()}
    for name, field in by_name.items():
        array = getattr(plan, name)
        assert array.dtype == np.dtype(field.dtype), name
        assert array.ndim == len(field.shape), name
        assert not array.flags.owndata, name
        assert array.__array_interface__["data"][0] == plan.address + field.offset, name
        assert array.shape[0] <= field.shape[0], name
    assert by_name["last_row_index"].shape == (3,)
    assert by_name["blk_prev_row"].shape == (6,)
    assert by_name["page_tables"].shape == (3, 8)
    assert plan.used_bytes() <= _core.StepPlan.arena_bytes(steps.options)
    plan.input_ids[0] = 55
    assert plan.input_ids[0] == 55
    view = steps.output.write_ids
    view[1, 2] = 8
    assert steps.output.write_ids[1, 2] == 8
    # Arrays of other strategies have no capacity.
    assert {field.name for field in steps.output.fields() if field.nbytes > 0} == {
        "write_ids",
        "confidence",
        "masks_left",
        "flags",
        "same_token_ratio",
    }
    absent = {field.name for field in plan.fields() if field.nbytes == 0}
    assert absent == {
        "logits_source",
        "blk_edit_threshold",
        "blk_max_post_edit_steps",
        "blk_penalty",
        "seed_row",
        "merge_mask",
        "merge_topk_ids",
        "merge_topk_probs",
        "merge_residual",
        "row_pass_kind",
        "row_self_cond",
        "blk_prev_argmax",
        "blk_stable_run",
        "blk_steps_left",
        "blk_renoise",
    }


def test_views_keep_their_plan_alive() -> None:
    steps = Steps()
    steps.add([1, 2])
    steps.core.schedule(steps.plan)
    ids = steps.plan.input_ids
    expected = ids.tolist()
    del steps
    gc.collect()
    _ = [_core.StepPlan(make_options()) for _ in range(4)]
    assert ids.tolist() == expected


def test_plans_borrow_memory() -> None:
    options = make_options()
    num_bytes = _core.StepPlan.arena_bytes(options)
    storage = np.zeros(num_bytes + 256, dtype=np.uint8)
    address = storage.ctypes.data + (-storage.ctypes.data) % 256
    plan = _core.StepPlan(options, address, num_bytes)
    assert plan.address == address
    with pytest.raises(RuntimeError, match="aligned to 256"):
        _core.StepPlan(options, address + 8, num_bytes)
    with pytest.raises(RuntimeError, match="bytes, got"):
        _core.StepPlan(options, address, num_bytes - 1)


def test_scalars_and_padding_of_a_decode_plan() -> None:
    steps = Steps()
    steps.add([1, 2, 3, 4])
    steps.step()
    assert steps.core.schedule(steps.plan) == _core.PlanKind.DECODE
    plan = steps.plan
    assert (plan.num_rows, plan.num_reqs, plan.num_blocks) == (8, 1, 2)
    assert (plan.max_seqlen_q, plan.max_seqlen_k, plan.uniform_q_len) == (8, 8, 8)
    assert (plan.block_size, plan.att_block_size, plan.buffer_size) == (4, 4, 2)
    assert (plan.page_size, plan.max_context_len, plan.max_num_rows) == (4, 4, 40)
    assert (plan.num_logits_rows, plan.num_sampled_rows, plan.any_sampled) == (7, 0, False)
    assert plan.blk_prev_row.tolist() == [-1, 3]
    plan.pad(3, 24)
    assert (plan.num_reqs, plan.num_padded_reqs, plan.num_rows) == (3, 2, 24)
    assert plan.last_row_index.tolist() == [-1, -1, -1]
    with pytest.raises(ValueError, match="expected a count in"):
        plan.pad(4, 24)
    steps.fill()
    steps.core.complete_step(plan, steps.output)
    assert steps.core.stats().num_rows == 8 + 8  # padding does not count


def test_visible_ends_are_those_of_the_only_request() -> None:
    steps = Steps()
    steps.add([1, 2, 3, 4, 5])
    steps.core.schedule(steps.plan)
    ends = _core.visible_ends(steps.plan)
    assert ends.dtype == np.int64
    assert ends.tolist() == [4] * 4 + [8] * 4 + [12] * 4  # a block does not see the next
    steps.fill()
    steps.core.complete_step(steps.plan, steps.output)
    steps.core.schedule(steps.plan)
    ends = _core.visible_ends(steps.plan)
    assert len(ends) == steps.plan.valid_slices[0] < 12
    steps.plan.pad(3, 36)  # dummies have no row that counts
    assert _core.visible_ends(steps.plan).tolist() == ends.tolist()


def test_visible_ends_refuse_what_one_array_cannot_say() -> None:
    steps = Steps()
    with pytest.raises(ValueError, match="expected a plan of 1 request, got 0"):
        _core.visible_ends(steps.plan)
    for _ in range(2):
        steps.add([1, 2, 3, 4, 5])
    steps.core.schedule(steps.plan)
    with pytest.raises(ValueError, match="visible_ends: expected a plan of 1 request, got 2"):
        _core.visible_ends(steps.plan)


def test_output_clears_to_nothing_changed() -> None:
    output = _core.SamplerOutput(make_options())
    assert (output.max_num_blocks, output.block_size) == (6, 4)
    output.write_ids[:] = 3
    output.flags[:] = 1
    output.same_token_ratio[:] = 0.5
    output.clear(2)
    assert output.write_ids[:2].tolist() == [[-1] * 4] * 2
    assert output.write_ids[2:].tolist() == [[3] * 4] * 4
    assert output.flags.tolist() == [0, 0, 1, 1, 1, 1]
    assert output.same_token_ratio.tolist() == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    with pytest.raises(RuntimeError, match="expected a count in"):
        output.clear(7)


# --- events, snapshots, results -----------------------------------------------------------------


def test_events_snapshot_and_result_of_a_request() -> None:
    steps = Steps(buffer_size=1)
    req_id = steps.add([1, 2, 3, 4, 5, 6], max_tokens=2)
    events = steps.step(token=7)
    assert (events.step_id, events.kind) == (0, _core.PlanKind.PREFILL)
    (event,) = events.requests
    assert (event.req_id, event.request_slot, event.nfe) == (req_id, 0, 1)
    assert (event.appended, event.new_tokens, event.num_preemptions) == ([7], 1, 0)
    assert event.is_prefill
    assert not event.is_finished
    assert event.finish_reason == _core.FinishReason.NONE
    assert [(item.req_id, item.block_id) for item in events.committed] == [(req_id, 0)]
    assert events.finished == events.preempted == []

    snapshot = steps.core.snapshot(req_id)
    assert (snapshot.req_id, snapshot.nfe, snapshot.context_len) == (req_id, 1, 4)
    assert snapshot.status == _core.RequestStatus.PREFILLING
    assert snapshot.finish_reason == _core.FinishReason.NONE
    assert snapshot.output_ids == [7]
    (block,) = snapshot.blocks
    assert (block.block_id, block.start) == (1, 4)
    assert block.status == _core.BlockStatus.ACTIVE
    assert block.tokens == [5, 6, 7, MASK]
    assert block.confidences == [0.0, 0.0, 0.75, 0.0]
    assert block.newly_written == [2]

    steps.core.preempt(req_id)
    events = steps.step(token=8)
    assert [(item.req_id, item.request_slot) for item in events.preempted] == [(req_id, 0)]
    while not events.finished:
        events = steps.step(token=8)
    (finished,) = events.finished
    assert (finished.req_id, finished.request_slot) == (req_id, 0)
    assert finished.finish_reason == _core.FinishReason.MAX_NEW_TOKENS_REACHED
    result = steps.core.take_result(req_id)
    assert (result.req_id, result.output_ids, result.prompt_len) == (req_id, [7, 8], 6)
    assert result.finish_reason == _core.FinishReason.MAX_NEW_TOKENS_REACHED
    assert not result.is_auto_nfe_cap
    assert result.num_preemptions == 1
    assert result.num_cached_tokens == 4
    assert result.decided_tokens == sum(result.new_tokens_per_step) == 2
    assert len(result.new_tokens_per_step) == len(result.prefill_per_step) == result.nfe
    assert result.prefill_per_step[0] is True
    with pytest.raises(KeyError):
        steps.core.take_result(req_id)
    # Records outlive the step and the engine they came from.
    del steps
    gc.collect()
    assert event.appended == [7]
    assert finished.req_id == req_id


def test_abort_and_stats() -> None:
    steps = Steps()
    first, second = steps.add([1, 2]), steps.add([3, 4])
    assert steps.core.has_unfinished()
    assert steps.core.abort(second)
    assert not steps.core.abort(77)
    events = steps.step()
    assert [(item.req_id, str(item.finish_reason)) for item in events.finished] == [
        (second, "aborted")
    ]
    stats = steps.core.stats()
    assert (stats.num_requests, stats.num_running, stats.num_waiting) == (2, 1, 0)
    assert (stats.num_finished, stats.num_aborted, stats.num_failed) == (1, 1, 0)
    assert (stats.num_prefill_steps, stats.num_decode_steps) == (1, 0)
    assert stats.num_pages == 32
    assert stats.num_free_pages <= 32
    assert (stats.num_preemptions, stats.num_cancelled_steps, stats.num_rejected) == (0, 0, 0)
    assert (stats.num_cached_units, stats.num_prefix_hit_tokens) == (0, 0)
    assert stats.num_prefix_query_tokens == 0
    assert stats.num_new_tokens >= 1
    assert steps.core.options.block_size == 4
    steps.core.release_all()
    assert steps.core.take_result(first).finish_reason == _core.FinishReason.ABORTED
    assert not steps.core.has_unfinished()
