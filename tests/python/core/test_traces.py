# SPDX-License-Identifier: Apache-2.0
"""Replays the golden traces of tests/data/traces through the bindings.

The sampler's decisions go in, every other column must come out; tests/data/traces/README.md says
what each field means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diffulex_ext import _core

TRACES = Path(__file__).parents[2] / "data" / "traces"
NAMES = sorted(path.stem for path in TRACES.glob("*.json"))
COMMITTABLE = 1
CONVERGED = 128
#: Kernel mask kind by row mode.
MASK_KINDS = [1, 1, 4, 3, 0, 2]
LETTERS = {
    _core.BlockStatus.DUMMY: "D",
    _core.BlockStatus.ACTIVE: "A",
    _core.BlockStatus.TO_CACHE: "T",
    _core.BlockStatus.IN_CACHE: "I",
}


def describe_buffer(request: _core.Request) -> str:
    buffer = request.buffer
    blocks = [buffer[i] for i in range(len(buffer))]
    return " ".join(f"B{block.block_id}:{LETTERS[block.status]}" for block in blocks)


def read_options(fields: dict[str, Any]) -> _core.EngineOptions:
    fields = dict(fields)
    thresholds = _core.Thresholds(
        add_block=fields.pop("add_block_threshold"),
        semi_complete=fields.pop("semi_complete_threshold"),
        token_stability=fields.pop("token_stability_threshold", 0.0),
    )
    return _core.EngineOptions(thresholds=thresholds, **fields)


class TraceReplay:
    def __init__(self, name: str) -> None:
        self.trace = json.loads((TRACES / f"{name}.json").read_text())
        self.options = read_options(self.trace["options"])
        self.core = _core.EngineCore(self.options)
        self.plans = [_core.StepPlan(self.options), _core.StepPlan(self.options)]
        self.output = _core.SamplerOutput(self.options)
        self.ids: dict[str, int] = {}
        self.settled: dict[str, list[int]] = {}

    def run(self) -> None:
        assert self.trace["steps"]
        for number, step in enumerate(self.trace["steps"]):
            self.add_requests(step)
            self.preempt_requests(step)
            self.replay_step(self.plans[number % 2], step)
            self.core.check_integrity()
        for name, expected in self.trace["results"].items():
            result = self.core.take_result(self.ids[name])
            assert result.output_ids == expected["output"]
            assert str(result.finish_reason) == expected["finish"]
            assert result.nfe == expected["nfe"]
            assert result.prompt_len == len(self.trace["requests"][name]["prompt"])
            assert result.decided_tokens == sum(result.new_tokens_per_step)
            assert len(result.prefill_per_step) == result.nfe
            assert self.core.find_request(self.ids[name]) is None

    def request(self, name: str) -> _core.Request:
        found = self.core.find_request(self.ids[name])
        assert found is not None, name
        return found

    def add_requests(self, step: dict[str, Any]) -> None:
        if "add" not in step:
            return
        for name in step["add"]:
            spec = self.trace["requests"][name]
            params = _core.SamplingParams(max_tokens=spec["max_tokens"], seed=spec.get("seed"))
            self.ids[name] = self.core.add_request(spec["prompt"], params)
            self.settled[name] = []
        for name in step["add"]:
            expected = self.trace["initial"].get(name)
            if expected is not None:
                initial = self.initial_request(self.trace["requests"][name])
                assert initial.limit_end == expected["limit_end"]
                assert describe_buffer(initial) == expected["buffer"]

    def initial_request(self, spec: dict[str, Any]) -> _core.Request:
        """The state right after the addition, from a core of its own.

        A request shows from the next boundary on; release_all is one that runs no forward.
        """
        core = _core.EngineCore(self.options)
        params = _core.SamplingParams(max_tokens=spec["max_tokens"])
        req_id = core.add_request(spec["prompt"], params)
        core.release_all()
        request = core.find_request(req_id)
        assert request is not None
        assert request.nfe == 0
        return request

    def preempt_requests(self, step: dict[str, Any]) -> None:
        for name in step.get("preempt", []):
            self.core.preempt(self.ids[name])
        for name, expected in step.get("preempted", {}).items():
            found = self.request(name)
            assert str(found.status) == expected["status"]
            assert found.context_len == expected["context_len"]
            assert found.resume_until == expected["resume_until"]
            assert found.page_table == expected["pages"]
            assert describe_buffer(found) == expected["buffer"]
            assert found.buffer.block_status(0) == _core.BlockStatus.TO_CACHE

    def replay_step(self, plan: _core.StepPlan, step: dict[str, Any]) -> None:
        assert str(self.core.schedule(plan)) == step["kind"]
        assert str(plan.kind) == step["kind"]
        assert plan.num_reqs == len(step["requests"])
        self.output.clear(plan.num_blocks)
        for r, row in enumerate(step["requests"]):
            self.check_plan(plan, r, row)
            self.fill_output(plan, r, row)
        for page, count in step.get("ref_counts", []):
            assert self.core.kv_cache_manager.ref_count(page) == count
        self.check_events(step, self.core.complete_step(plan, self.output))

    def check_plan(self, plan: _core.StepPlan, r: int, row: dict[str, Any]) -> None:
        found = self.request(row["request"])
        begin, end = plan.cu_seqlens_q[r : r + 2].tolist()
        assert plan.cu_seqlens_k[r : r + 2].tolist() == [begin, end]
        assert plan.req_ids[r] == found.req_id
        assert plan.request_slots[r] == found.request_slot
        assert str(found.status) == row["status"]
        assert plan.context_lens[r] == row["context_len"]
        assert plan.row_mode[r] == row["row_mode"]
        assert describe_buffer(found) == row["buffer_in"]
        assert plan.positions[begin:end].tolist() == row["positions"]
        assert plan.valid_slices[r] - begin == row["num_valid_rows"]
        assert plan.input_ids[begin:end].tolist() == row["input_ids"]
        assert plan.slot_mapping[begin:end].tolist() == row["slots"]
        pages = row["pages"]
        assert found.page_table == pages
        padding = [-1] * (plan.max_pages_per_req - len(pages))
        assert plan.page_tables[r].tolist() == pages + padding
        assert self.visible_ends(plan, r) == row["visible_end"]
        if plan.num_reqs == 1:
            assert _core.visible_ends(plan).tolist() == row["visible_end"]
        if "num_cached_tokens" in row:
            assert found.num_cached_tokens == row["num_cached_tokens"]
        for block_id, gate in row.get("force_top1", []):
            assert bool(plan.blk_force_top1[self.find_block(plan, r, block_id)]) == gate
        for block_id, count in row.get("open_steps", []):
            assert plan.blk_open_steps[self.find_block(plan, r, block_id)] == count
        for block_id, count in row.get("post_edit_steps", []):
            assert plan.blk_post_edit_steps[self.find_block(plan, r, block_id)] == count
        self.check_fixed_fields(plan, r)
        self.check_prefix(plan, r, len(found.prompt))
        self.check_shift(plan, r, row)
        if self.options.strategy == "fast_dllm_v2":
            self.check_seed_row(plan, r, row)
        if self.options.strategy == "diffusion_gemma":
            self.check_canvas(plan, r, row)
        if "merge_rows" in row:
            self.check_merge_rows(plan, r, row["merge_rows"])

    def check_prefix(self, plan: _core.StepPlan, r: int, prompt_len: int) -> None:
        is_prefix = plan.row_mode[r] == 3
        size = self.options.block_size
        padded = -(-prompt_len // size) * size if is_prefix else 0
        if self.starts_at_prompt():
            padded = prompt_len
        assert plan.mask_kinds[r] == MASK_KINDS[plan.row_mode[r]]
        assert plan.prefix_lens[r] == (prompt_len if is_prefix else 0)
        assert plan.padded_prefix_lens[r] == padded

    def starts_at_prompt(self) -> bool:
        return self.options.strategy == "d2f" and not self.options.d2f_block_grid

    def check_shift(self, plan: _core.StepPlan, r: int, row: dict[str, Any]) -> None:
        """The saved row, and which row predicts which position."""
        last_row = plan.last_row_index[r]
        if row.get("saved_row") is None:
            assert last_row == -1
        else:
            assert plan.positions[plan.logits_rows[last_row]] == row["saved_row"]
        if "predicted_by" not in row:
            return
        found: list[list[Any]] = []
        for blk in self.blocks_of(plan, r):
            for rel, index in enumerate(plan.blk_row_index[blk].tolist()):
                if index < 0:
                    continue
                position = int(plan.blk_start[blk]) + rel
                if index == plan.saved_row(int(plan.request_slots[r])):
                    found.append([position, "saved"])
                else:
                    found.append([position, int(plan.positions[plan.logits_rows[index]])])
        assert found == row["predicted_by"]

    def check_merge_rows(self, plan: _core.StepPlan, r: int, expected: list[list[Any]]) -> None:
        found = []
        for i in range(*plan.cu_seqlens_q[r : r + 2].tolist()):
            entry = (
                int(plan.merge_topk_ids[i, 0]),
                float(plan.merge_topk_probs[i, 0]),
                float(plan.merge_residual[i]),
            )
            if plan.merge_mask[i]:
                found.append([int(plan.positions[i]), entry[0], *map(pytest.approx, entry[1:])])
            else:
                assert entry == (self.options.mask_token_id, 0.0, 0.0)
        assert found == expected

    def check_seed_row(self, plan: _core.StepPlan, r: int, row: dict[str, Any]) -> None:
        """`seed`: the position whose row predicts the token, and the token."""
        assert (plan.seed_row[r] >= 0) == ("seed" in row)
        if "seed" in row:
            position, token = row["seed"]
            assert plan.positions[plan.logits_rows[plan.seed_row[r]]] == position
            self.output.pending_next_token[r] = token

    def check_canvas(self, plan: _core.StepPlan, r: int, row: dict[str, Any]) -> None:
        """`canvas`: what the plan tells the sampler, and what the sampler answers."""
        rows = slice(*plan.cu_seqlens_q[r : r + 2].tolist())
        canvas = row.get("canvas")
        assert (plan.row_pass_kind[rows] == (0 if canvas is None else 1)).all()
        assert len(self.blocks_of(plan, r)) == (0 if canvas is None else 1)
        if canvas is None:
            assert (plan.row_self_cond[rows] == -1).all()
            return
        (blk,) = self.blocks_of(plan, r)
        assert plan.row_self_cond[rows].tolist() == canvas["self_cond"]
        assert plan.blk_steps_left[blk] == canvas["steps_left"]
        assert plan.blk_stable_run[blk] == canvas["stable_run"]
        assert plan.blk_renoise[blk].tolist() == canvas["renoise"]
        if "prev_argmax" in canvas:
            assert plan.blk_prev_argmax[blk].tolist() == canvas["prev_argmax"]
        self.output.write_ids[blk] = canvas["next"]
        self.output.canvas_argmax[blk] = canvas["argmax"]
        self.output.flags[blk] = CONVERGED if canvas["converged"] else 0

    def check_fixed_fields(self, plan: _core.StepPlan, r: int) -> None:
        """What holds of every forward of a block buffer."""
        begin, end = plan.cu_seqlens_q[r : r + 2].tolist()
        is_dual = self.options.strategy == "fast_dllm_v2"
        is_canvas = self.options.strategy == "diffusion_gemma"
        size = self.options.block_size
        assert plan.block_size == size
        assert plan.att_block_size == size * (self.options.buffer_size if is_dual else 1)
        assert plan.buffer_size == self.options.buffer_size
        assert plan.max_seqlen_k == plan.max_seqlen_q >= end - begin
        assert plan.need_kv_cache_store == bool((plan.slot_mapping >= 0).any())
        positions = plan.positions[begin : plan.valid_slices[r]].tolist()
        for blk in self.blocks_of(plan, r):
            is_behind = is_canvas or self.starts_at_prompt()
            origin = len(self.request_of(plan, r).prompt) if is_behind else 0
            start = origin + plan.blk_id[blk] * plan.block_size
            assert plan.blk_start[blk] == start
            assert plan.blk_row0[blk] == begin + positions.index(start)
            if start - 1 in positions:
                previous = begin + positions.index(start - 1)
            else:
                previous = -2 if start == 0 or is_dual or is_canvas else -1
            assert plan.blk_prev_row[blk] == previous
            assert plan.blk_valid_len[blk] == plan.block_size

    def visible_ends(self, plan: _core.StepPlan, r: int) -> list[int]:
        """Keys each real row sees: those cached, and fresh ones of blocks up to its own.

        Under mode 3 prompt rows see the prompt, the rest of its last block the padded prompt. Blocks
        are counted from the end of the padded prompt. Mode 2 has no fresh keys, mode 4 is causal,
        mode 5 sees every fresh key.
        """
        size = plan.att_block_size
        mode = plan.row_mode[r]
        prefix, padded = int(plan.prefix_lens[r]), int(plan.padded_prefix_lens[r])
        positions = plan.positions[plan.cu_seqlens_q[r] : plan.valid_slices[r]].tolist()
        ends = []
        for position in positions:
            end = int(plan.context_lens[r])
            fresh_end = padded + ((position - padded) // size + 1) * size
            if mode == 3 and position < padded:
                fresh_end = prefix if position < prefix else padded
            if mode in (2, 4, 5):
                fresh_end = {2: 0, 4: position + 1, 5: max(positions) + 1}[int(mode)]
            for key in positions:
                if key < fresh_end:
                    assert key == end
                    end = key + 1
            ends.append(end)
        return ends

    def request_of(self, plan: _core.StepPlan, r: int) -> _core.Request:
        found = self.core.find_request(int(plan.req_ids[r]))
        assert found is not None
        return found

    def blocks_of(self, plan: _core.StepPlan, r: int) -> list[int]:
        return [blk for blk in range(plan.num_blocks) if plan.blk_req[blk] == r]

    def find_block(self, plan: _core.StepPlan, r: int, block_id: int) -> int:
        (found,) = [blk for blk in self.blocks_of(plan, r) if plan.blk_id[blk] == block_id]
        return found

    def fill_output(self, plan: _core.StepPlan, r: int, row: dict[str, Any]) -> None:
        if self.options.strategy == "diffusion_gemma":
            return  # see check_canvas
        for block_id, rel, token in row["writes"]:
            blk = self.find_block(plan, r, block_id)
            assert plan.blk_row_index[blk, rel] >= 0
            self.output.write_ids[blk, rel] = token
        for blk in self.blocks_of(plan, r):
            editable = slice(plan.blk_editable_start[blk], None)
            is_open = plan.blk_tokens[blk, editable] == self.options.mask_token_id
            is_unwritten = self.output.write_ids[blk, editable] < 0
            num_left = int((is_open & is_unwritten).sum())
            self.output.masks_left[blk] = num_left
            self.output.flags[blk] = COMMITTABLE if num_left == 0 else 0
        if "verdicts" in row:
            assert len(row["verdicts"]) == len(self.blocks_of(plan, r))
        for block_id, ratio, is_committable in row.get("verdicts", []):
            blk = self.find_block(plan, r, block_id)
            self.output.same_token_ratio[blk] = ratio
            self.output.flags[blk] = COMMITTABLE if is_committable else 0
        for block_id, rel, token, prob, residual in row.get("descriptors", []):
            blk = self.find_block(plan, r, block_id)
            self.output.merge_valid[blk, rel] = 1
            self.output.merge_topk_ids[blk, rel] = token
            self.output.merge_topk_probs[blk, rel] = prob
            self.output.merge_residual[blk, rel] = residual

    def check_events(self, step: dict[str, Any], events: _core.StepEvents) -> None:
        assert str(events.kind) == step["kind"]
        assert len(events.requests) == len(step["requests"])
        for event, row in zip(events.requests, step["requests"], strict=True):
            name = row["request"]
            found = self.request(name)
            assert event.req_id == self.ids[name]
            assert event.is_prefill == (step["kind"] == "prefill")
            assert event.nfe == row["nfe"]
            assert event.new_tokens == row["new_tokens"]
            assert event.is_finished == (row["finish"] is not None)
            assert str(event.finish_reason) == (row["finish"] or "none")
            self.settled[name] += event.appended
            assert self.settled[name] == row["settled"]
            assert found.output == row["settled"]
            if not event.is_finished:
                assert describe_buffer(found) == row["buffer_out"]
                assert found.context_len == row["context_len_after"]
        committed = [(block.req_id, block.block_id) for block in events.committed]
        assert committed == [(self.ids[name], i) for name, i in step.get("committed", [])]
        finished = [(item.req_id, str(item.finish_reason)) for item in events.finished]
        assert finished == [
            (self.ids[row["request"]], row["finish"]) for row in step["requests"] if row["finish"]
        ]


@pytest.mark.parametrize("name", NAMES)
def test_replays_field_by_field(name: str) -> None:
    TraceReplay(name).run()
