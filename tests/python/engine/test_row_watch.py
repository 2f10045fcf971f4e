# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities at commit time and stop ids that come too early.

The oracle reads the logits off the model as it computes them and finds the row of a position by the
position of the row, not by the arrays the sampler uses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from diffulex import SamplingParams
from diffulex.engine.engine import Diffulex
from fixtures.checkpoints import EOS_ID, MASK_ID, TURN_END_ID
from fixtures.moe_families import moe_builder
from tiny_engine import TinyModel
from tiny_gemma import TinyGemma

PROMPTS = [list(range(5, 22)), list(range(40, 45)), [7] * 8]
STOP_IDS = {EOS_ID, TURN_END_ID}


class Oracle:
    """Watches an engine's steps from outside."""

    def __init__(self, engine: Diffulex, softcap: float = 0.0) -> None:
        self.softcap = softcap
        self.rows: dict[tuple[int, int], torch.Tensor] = {}  # (req_id, position) -> latest row
        self.final: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        self.is_canvas = engine.config.decoding.decoding_strategy == "diffusion_gemma"
        runner: Any = engine._executor.runner
        self._logits: torch.Tensor | None = None
        compute, execute = runner.model.compute_logits, runner.execute
        runner.model.compute_logits = self._computing(compute)
        runner.execute = self._executing(execute)
        self._restore = lambda: setattr(runner.model, "compute_logits", compute)

    def close(self) -> None:
        self._restore()

    def _computing(self, compute):
        def wrapped(rows):
            logits = compute(rows)
            self._logits = logits.float().clone()
            return logits

        return wrapped

    def _executing(self, execute):
        def wrapped(plan):
            self._logits = None
            output = execute(plan)
            self._look(plan, output)
            return output

        return wrapped

    def _look(self, plan, output) -> None:
        shift = 1 if plan.logits_source.size or plan.seed_row.size else 0
        if self._logits is not None:
            for index, row in enumerate(plan.logits_rows.tolist()):
                if plan.logits_source.size and plan.logits_source[index] >= 0:
                    continue  # stands in for a row of an earlier step
                req = int(np.searchsorted(plan.cu_seqlens_q, row, side="right")) - 1
                if req < plan.num_reqs:
                    position = int(plan.positions[row]) + shift
                    self.rows[int(plan.req_ids[req]), position] = self._logits[index]
        written = output.canvas_argmax if self.is_canvas else output.write_ids
        for blk in range(plan.num_blocks):
            req_id = int(plan.req_ids[plan.blk_req[blk]])
            for rel in range(plan.block_size):
                token, old = int(written[blk, rel]), int(plan.blk_tokens[blk, rel])
                if token >= 0 and (self.is_canvas or token != old):
                    self._decide(req_id, int(plan.blk_start[blk]) + rel, token)
        for index in range(min(plan.num_reqs, plan.seed_row.size)):
            if plan.seed_row[index] >= 0 and output.pending_next_token[index] >= 0:
                position = int(plan.positions[plan.logits_rows[plan.seed_row[index]]]) + 1
                token = int(output.pending_next_token[index])
                self._decide(int(plan.req_ids[index]), position, token)

    def _decide(self, req_id: int, position: int, token: int) -> None:
        row = self.rows[req_id, position].double()
        if self.softcap:
            row = self.softcap * torch.tanh(row / self.softcap)
        self.final[req_id, position] = (token, torch.log_softmax(row, -1))


def check(engine: Diffulex, params: SamplingParams, softcap: float = 0.0) -> None:
    oracle = Oracle(engine, softcap)
    try:
        outputs = engine.generate(PROMPTS, params, summary=False)
    finally:
        oracle.close()
    for output in outputs:
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids) > 0
        start = len(output.prompt_token_ids)
        for index, (token, item) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            decided, logprobs = oracle.final[output.req_id, start + index]
            assert item.token_id == token == decided
            assert item.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
            assert len(item.top) == params.logprobs
            best = torch.topk(logprobs, params.logprobs or 1).values.tolist()
            assert [value for _, value in item.top] == pytest.approx(
                best[: params.logprobs], abs=1e-4
            )
            for token_id, value in item.top:
                assert value == pytest.approx(float(logprobs[token_id]), abs=1e-4)
            assert 1 <= item.step <= output.metrics.nfe
    assert engine.num_watched_requests == 0


VARIANTS = [
    {"decoding_strategy": "multi_bd", "block_size": 4, "buffer_size": 3},
    {"decoding_strategy": "multi_bd", "block_size": 8, "buffer_size": 1},
    {"decoding_strategy": "d2f", "block_size": 4, "buffer_size": 2},
]


@pytest.mark.every(5)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("is_shifted", [False, True])
@pytest.mark.parametrize(
    "settings", VARIANTS, ids=lambda v: f"{v['decoding_strategy']}{v['block_size']}"
)
def test_logprobs_of_mask_filling(tiny: TinyModel, settings, is_shifted, temperature) -> None:
    model = tiny.under("dream", shift=True) if is_shifted else tiny
    with model.engine(**settings) as engine:
        check(engine, SamplingParams(max_tokens=19, logprobs=3, temperature=temperature, seed=4))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_of_dual_caches(tiny: TinyModel, temperature: float) -> None:
    settings = {"decoding_strategy": "fast_dllm_v2", "block_size": 4, "buffer_size": 2}
    with tiny.under("fast_dllm_v2", shift=True).engine(**settings) as engine:
        check(engine, SamplingParams(max_tokens=19, logprobs=2, temperature=temperature, seed=4))


@pytest.mark.parametrize("model_name", ["llada2dot1_mini", "llada2_mini_dmax"])
def test_logprobs_of_rewriting(tmp_path, model_name: str) -> None:
    moe_builder("llada2").write(tmp_path)
    limits = {"device": "cpu", "max_model_len": 128, "num_pages": 64, "max_num_reqs": 4}
    with Diffulex(str(tmp_path), model_name=model_name, **limits) as engine:
        check(engine, SamplingParams(max_tokens=19, logprobs=0, ignore_eos=True))


@pytest.mark.slow
def test_logprobs_of_canvases(tmp_path) -> None:
    model = TinyGemma(tmp_path, "cpu")
    softcap = float(getattr(model.facts.spec, "final_logit_softcap", None) or 0.0)
    with model.engine() as engine:
        check(engine, SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True, seed=3), softcap)


def test_others_are_not_slowed(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        ids = [engine.add_request(PROMPTS[0], SamplingParams(max_tokens=4)) for _ in range(2)]
        assert engine.num_watched_requests == 0
        watched = engine.add_request(PROMPTS[1], SamplingParams(max_tokens=4, logprobs=1))
        assert engine.num_watched_requests == 1
        done = {}
        while engine.has_unfinished():
            done.update({o.req_id: o.output for o in engine.step() if o.output is not None})
        assert [done[i].logprobs for i in ids] == [None, None]
        assert len(done[watched].logprobs) == 4


def test_abort_forgets(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        req_id = engine.add_request(PROMPTS[0], SamplingParams(max_tokens=99, logprobs=1))
        engine.step()
        engine.abort(req_id)
        while engine.has_unfinished():
            engine.step()
        assert engine.num_watched_requests == 0


def test_streams_carry_them(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        events = list(engine.stream(PROMPTS[0], SamplingParams(max_tokens=12, logprobs=1)))
        streamed = [item for event in events for item in event.logprobs]
        assert tuple(streamed) == events[-1].output.logprobs
        assert [item.token_id for item in streamed] == [
            token for event in events for token in event.token_ids
        ]


class TestMinTokens:
    def engine(self, tiny: TinyModel, is_shifted: bool, **settings: Any) -> Diffulex:
        model = tiny.under("dream", shift=True) if is_shifted else tiny
        return model.engine(block_size=4, buffer_size=2, **settings)

    @pytest.mark.parametrize("temperature", [0.0, 1.5])
    @pytest.mark.parametrize("is_shifted", [False, True])
    def test_no_answer_is_shorter(self, tiny, is_shifted, temperature) -> None:
        """Every id that a plain run decodes is made a stop id, so that a plain run ends at once."""
        with self.engine(tiny, is_shifted) as engine:
            plain = engine.generate(
                PROMPTS,
                SamplingParams(max_tokens=16, temperature=temperature, seed=3, ignore_eos=True),
                summary=False,
            )
            for prompt, output in zip(PROMPTS, plain, strict=True):
                stops = tuple(set(output.token_ids))
                base = {"max_tokens": 16, "temperature": temperature, "seed": 3}
                short = SamplingParams(stop_token_ids=stops, **base)
                assert len(engine.generate([prompt], short, summary=False)[0].token_ids) < 16
                for least in (1, 5, 16):
                    params = SamplingParams(stop_token_ids=stops, min_tokens=least, **base)
                    (longer,) = engine.generate([prompt], params, summary=False)
                    assert len(longer.token_ids) >= least
                    assert not set(longer.token_ids[:least]) & (set(stops) | STOP_IDS)
                    assert MASK_ID not in longer.token_ids
            assert engine.num_watched_requests == 0

    def test_end_tokens_of_the_model(self, tiny, monkeypatch) -> None:
        """A model whose end token wins everywhere."""
        compute = tiny.model.compute_logits

        def ending(rows):
            logits = compute(rows)
            logits[:, EOS_ID] = 1000.0
            return logits

        monkeypatch.setattr(tiny.model, "compute_logits", ending)
        with tiny.engine(block_size=4) as engine:
            for least in (0, 3):
                params = SamplingParams(max_tokens=8, min_tokens=least)
                for output in engine.generate(PROMPTS, params, summary=False):
                    assert len(output.token_ids) == least
                    assert output.completion_reason == "eos_token_generated"

    def test_logprobs_are_those_of_the_model(self, tiny) -> None:
        with self.engine(tiny, True) as engine:
            stops = tuple(range(100, 130))
            params = SamplingParams(max_tokens=12, min_tokens=12, stop_token_ids=stops, logprobs=2)
            check(engine, params)
