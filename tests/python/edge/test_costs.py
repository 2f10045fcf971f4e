# SPDX-License-Identifier: Apache-2.0
"""What programs cost, counted: calls and rows of an answer, what a backend leaves, bytes.

Times beside each other stand in test_latency.py; those in milliseconds are for `diffulex edge bench` and
benchmarks/python.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from diffulex.checkpoint.auto_model import detect
from diffulex_edge.bundle import read_bundle
from diffulex_edge.measure import estimate
from diffulex_edge.program import PteProgram
from diffulex_edge.recipes import parse_recipe
from fixtures.edge import DEMO, eager_engine, questions
from fixtures.extras import need_extra

need_extra("edge", "executorch", "torchao")

BLOCK = 8


class Counted:
    """Rows of the calls that an answer took, and the tokens of prompt and answer."""

    def __init__(self, max_rows: int = 256, buffer_size: int = 1, max_tokens: int = 48) -> None:
        self.calls: list[tuple[list[int], int]] = []

        def record(tokens, positions, ends, rows):
            del tokens, ends
            self.calls.append((positions.tolist(), rows.numel()))

        settings = {"max_rows": max_rows, "buffer_size": buffer_size}
        with eager_engine(DEMO, on_call=record, **settings) as engine:
            chat = [{"role": "user", "content": questions(DEMO, 1)[0]}]
            self.prompt = engine.tokenizer.apply_chat_template(chat)
            (answer,) = engine.generate(
                [self.prompt], max_tokens=max_tokens, ignore_eos=True, summary=False
            )
        self.nfe, self.tokens = answer.metrics.nfe, len(answer.token_ids)

    @property
    def settled(self) -> int:
        """Positions of the prompt's whole blocks."""
        return len(self.prompt) // BLOCK * BLOCK


@pytest.mark.parametrize("max_rows", [16, 256])
def test_every_block_of_a_prompt_is_computed_once(max_rows):
    found = Counted(max_rows, max_tokens=4)
    seen = Counter(place for places, _ in found.calls for place in places)
    assert found.settled > 16
    assert {seen[place] for place in range(found.settled)} == {1}
    assert max(len(places) for places, _ in found.calls) <= max_rows


@pytest.mark.parametrize("buffer_size", [1, 4])
def test_a_step_computes_its_blocks_and_nothing_before_them(buffer_size):
    found = Counted(buffer_size=buffer_size)
    steps = [places for places, _ in found.calls if places[0] >= found.settled]
    assert len(steps) >= found.tokens // (buffer_size * BLOCK)
    # The block before them is stored in the same call.
    assert max(map(len, steps)) <= (buffer_size + 1) * BLOCK
    assert len(found.calls) == found.nfe
    assert found.nfe < found.tokens


def test_the_head_computes_the_rows_that_are_asked_for():
    found = Counted()
    assert all(asked <= len(places) for places, asked in found.calls)
    assert max(asked for _, asked in found.calls) <= 2 * BLOCK


@pytest.mark.parametrize("name", ["demo", "llada", "fast_dllm_v2", "dream"])
def test_nothing_that_copies_a_cache_is_left_to_the_runtime(bundle, name):
    facts = read_bundle(bundle(name)).facts
    left = facts["undelegated_ops"]
    slow = ("mean", "repeat", "expand_copy", "index_select", "softmax", "mm")
    assert not [op for op in left if any(word in op for word in slow)]
    assert left.get("select_copy", 0) <= 1  # of the ids, from [1, S]
    layers = detect(bundle(name))[1].num_layers
    assert 1 <= facts["num_delegates"] <= 8 * layers + 4


@pytest.mark.parametrize("name", ["demo", "shallow-fp16"])
def test_the_cache_has_the_estimated_bytes(bundle, name):
    path = bundle(name)
    found = read_bundle(path)
    expected = estimate(detect(path)[1], parse_recipe(found.quant), found.max_model_len)
    assert PteProgram(found.program_path).cache_bytes == expected.cache


_GENERATE = """
import sys
from diffulex import Diffulex, SamplingParams
from diffulex_edge.measure import _resident_mb

with Diffulex(sys.argv[1]) as engine:
    params, after = SamplingParams(max_tokens=24, ignore_eos=True), []
    for count in (5, 20):
        for _ in range(count):
            engine.generate([[7] * 40], params, summary=False)
        after.append(_resident_mb())
print(after[1] - after[0], engine.config.scheduler.max_model_len)
"""


def test_memory_does_not_grow_by_answers(bundle):
    """Twenty lost caches would be sixty megabytes and more."""
    path = bundle("demo")
    cache_mb = PteProgram(path / "model.pte").cache_bytes / 1e6
    command = [sys.executable, "-c", _GENERATE, str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    growth, _ = map(float, result.stdout.split())
    assert growth < 5 * cache_mb
