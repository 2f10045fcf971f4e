# SPDX-License-Identifier: Apache-2.0
"""One model on two GPUs: graphs, the loop of the device and the host's steps decode what one GPU does."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from diffulex import ConfigError, Diffulex, SamplingParams
from diffulex.errors import EngineDeadError

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]

SIZES: dict[str, Any] = {"max_model_len": 256, "num_pages": 128, "max_num_reqs": 4}
SHARED: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "tensor_parallel_size": 2,
    "check_ranks": True,
    **SIZES,
}
TEXTS = ["Tom has 3 apples and buys 4 more.", "What is 2 + 2?", "Anna had 9 coins.", "1 + 1 ="]
TEXTS += [f"{index} + {index * 3} =" for index in range(12)]
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, top_k=30, seed=5)


def step_forever(engine: Diffulex) -> None:
    while True:
        engine.step()


def answers(params: SamplingParams, engine: Diffulex) -> list[Any]:
    outputs = engine.generate(TEXTS, params, summary=False)
    return [(list(o.token_ids), o.completion_reason, o.metrics.nfe) for o in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"run_ahead": "off"},
        {"enforce_eager": True},
        {"enforce_eager": True, "run_ahead": "off"},
        {"custom_all_reduce": "off"},
        {"distributed_backend": "gloo"},
        {"buffer_size": 4},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "default",
)
def test_two_gpus_decode_what_one_does(settings: dict[str, Any]) -> None:
    """Exactly: no decision of these prompts hangs on the last bits of a sum in float32."""
    alone = {key: value for key, value in settings.items() if key in ("run_ahead", "buffer_size")}
    with Diffulex("demo", device="cuda", dtype="float32", **SIZES, **alone) as engine:
        expected = [answers(params, engine) for params in (GREEDY, DRAWN)]
    with Diffulex("demo", **SHARED, **settings) as engine:
        assert [answers(params, engine) for params in (GREEDY, DRAWN)] == expected
        counts, stats = engine._executor.counts, engine.stats()
        assert stats.num_free_pages == stats.num_pages
        has_graphs = not {"enforce_eager", "custom_all_reduce"} & settings.keys()
        assert (counts.graph > 0) == has_graphs
        assert (counts.ahead > 0) == (settings.get("run_ahead") != "off")


def test_a_killed_rank_ends_the_steps_of_the_others() -> None:
    with Diffulex("demo", **SHARED | {"check_ranks": False}) as engine:
        worker = engine._executor._followers._group._pipes.children[0].pid
        for text in TEXTS[:4]:
            engine.add_request(text, SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(5):
            engine.step()
        os.kill(worker, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"rank 1 \(pid \d+, cuda:1\)"):
            step_forever(engine)
        assert time.monotonic() - begin < 2.0


def test_a_stopped_rank_is_waited_for_as_long_as_asked() -> None:
    settings = SHARED | {"collective_timeout_seconds": 2, "check_ranks": False}
    with Diffulex("demo", **settings) as engine:
        worker = engine._executor._followers._group._pipes.children[0].pid
        engine.add_request(TEXTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(5):
            engine.step()
        os.kill(worker, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match="rank 0 waited 2 s for rank 1 in exchange"):
            step_forever(engine)
        assert 1.0 < time.monotonic() - begin < 10.0


def test_more_ranks_than_gpus_are_refused() -> None:
    import torch

    if torch.cuda.device_count() >= 4:
        pytest.skip("needs a host with fewer than four GPUs")
    with pytest.raises(ConfigError, match="device_ids: expected 4 devices for tensor_parallel"):
        Diffulex("demo", device="cuda", tensor_parallel_size=4)
