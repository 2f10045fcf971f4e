# SPDX-License-Identifier: Apache-2.0
"""With `batch_invariant` a request is the same bits alone and among others: tokens and logits."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diffulex import ConfigError, Diffulex, SamplingParams
from diffulex.engine.output import RequestOutput
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.moe_families import moe_builder, moe_config
from fixtures.quick import quick
from tiny_engine import TinyModel
from tiny_gemma import TinyGemma

#: Sizes that the Hopper product takes.
_WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
_LIMITS = {"max_model_len": 128, "max_num_reqs": 8, "num_pages": 160, "page_size": 8}
#: Family -> writes a checkpoint of it.
_WRITERS: dict[str, Callable[[Path], object]] = {
    "sdar": lambda path: CheckpointBuilder(config=tiny_config(vocab_size=320, **_WIDE)).write(path),
    "llada2": lambda path: moe_builder(
        "llada2",
        config=moe_config(
            "llada2", vocab_size=320, moe_intermediate_size=64, rotary_dim=32, **_WIDE
        ),
    ).write(path),
}
_GEMMA = {**_WIDE, "moe_intermediate_size": 64, "global_head_dim": 64}
_SETTINGS: dict[str, dict[str, Any]] = {
    "sdar": {"block_size": 8, "buffer_size": 3},
    "llada2": {"block_size": 8, "buffer_size": 2},
    "diffusion_gemma": {"diffusion_gemma_max_denoising_steps": 4},
}
#: Tokens of the prompts that share a batch.
_LENGTHS = (3, 1, 17, 64, 9, 33, 50, 26)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


Make = Callable[..., Diffulex]


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Engines of a family on a device, in bfloat16."""
    written: dict[str, Path] = {}

    def make(family: str, device: str, **settings: Any) -> Diffulex:
        path = written.get(family) or tmp_path_factory.mktemp(family)
        every = {**_LIMITS, **_SETTINGS[family], "batch_invariant": True, **settings}
        if family == "diffusion_gemma":
            return TinyGemma(path, device, "bfloat16", **_GEMMA).engine(**every)
        if family not in written:
            _WRITERS[family](path)
            written[family] = path
        return Diffulex(str(path), device=device, dtype="bfloat16", **every)

    return make


def requests(temperature: float, **params: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(2)
    prompts = [[rng.randrange(6, 90) for _ in range(length)] for length in _LENGTHS]
    sampling = [
        SamplingParams(
            max_tokens=12 + 3 * index,
            ignore_eos=True,
            temperature=temperature,
            seed=rng.getrandbits(60),
            **params,
        )
        for index in range(len(prompts))
    ]
    return prompts, sampling


def bits(output: RequestOutput) -> tuple[Any, ...]:
    """All that the logits decide, exactly."""
    return output.token_ids, output.metrics.nfe, output.logprobs


def check(engine: Diffulex, prompts: list[list[int]], params: list[SamplingParams]) -> None:
    together = [bits(o) for o in engine.generate(prompts, params, summary=False)]
    for part in ([0], [3], [7, 2]):
        asked = [prompts[i] for i in part], [params[i] for i in part]
        fewer = engine.generate(*asked, summary=False)
        assert [bits(o) for o in fewer] == [together[i] for i in part], part


@DEVICES
@pytest.mark.parametrize("family", quick(_SETTINGS, ("sdar", "llada2")))
def test_a_request_alone_and_among_others(make_engine: Make, family: str, device: str) -> None:
    with make_engine(family, device) as engine:
        assert not engine.config.cache.enable_prefix_caching
        check(engine, *requests(0.0, logprobs=3))


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("sdar", "int8"), ("sdar", "fp8"), ("llada2", "fp8_block"), ("llada2", "int4")],
)
def test_low_precision_and_a_cache_of_codes(make_engine: Make, family: str, scheme: str) -> None:
    settings = {"quantization": scheme, "quantization_ignore": (), "kv_cache_dtype": "fp8_e4m3"}
    with make_engine(family, "cpu", **settings) as engine:
        check(engine, *requests(0.0, logprobs=3))


@DEVICES
@pytest.mark.parametrize("family", quick(_SETTINGS, ("sdar",)))
def test_draws_and_both_loops(make_engine: Make, family: str, device: str) -> None:
    """Without logprobs a device runs ahead; those of one request keep all of them at the host."""
    prompts, params = requests(0.7)
    mixed = [dataclasses.replace(p, logprobs=2) if i == 1 else p for i, p in enumerate(params)]
    with make_engine(family, device) as engine:
        check(engine, prompts, params)
        plain, watched = (
            [o.token_ids for o in engine.generate(prompts, p, summary=False)]
            for p in (params, mixed)
        )
    assert plain == watched


@DEVICES
def test_scores_do_not_depend_on_the_others(make_engine: Make, device: str) -> None:
    prompts, _ = requests(0.0)
    sequences = [p for p in prompts if len(p) > 8]
    ranges = [(len(p) // 2, len(p)) for p in sequences]
    with make_engine("sdar", device) as engine:
        together = engine.score(sequences, ranges, mc_num=4)
        alone = engine.score(sequences[:1], ranges[:1], mc_num=4)
    assert float(alone[0]) == float(together[0])


def test_engines_around_the_same_weights_differ(tiny: TinyModel) -> None:
    """The next engine has the products of its own settings again."""
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True)
    with tiny.engine() as engine:
        before = engine.generate([prompt], params, summary=False)[0].token_ids
    with tiny.engine(batch_invariant=True) as engine:
        assert engine.generate([prompt], params, summary=False)[0].token_ids == before
        names = {choice.op: choice.kernel for choice in engine._executor.runner.kernel_choices()}
        assert names["dense products"] == "linear_packed"
    with tiny.engine() as engine:
        assert engine.generate([prompt], params, summary=False)[0].token_ids == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_prefix_caching": True}, "enable_prefix_caching: expected False with"),
        ({"enable_chunked_prefill": True}, "enable_chunked_prefill: expected False with"),
        ({"num_pages": 20}, r"batch_invariant: expected num_pages >= \d+ \(max_num_reqs 8 of"),
        (
            {"run_ahead": "on"},
            "run_ahead: expected auto or off with batch_invariant under decoding_strategy",
        ),
    ],
)
def test_what_depends_on_others_is_refused(
    make_engine: Make, settings: dict[str, Any], message: str
) -> None:
    family = "diffusion_gemma" if "run_ahead" in settings else "sdar"
    with pytest.raises(ConfigError, match=message):
        make_engine(family, "cpu", **settings)


def test_an_adapter_that_is_not_merged_is_refused(tiny: TinyModel) -> None:
    with pytest.raises(ConfigError, match="pre_merge_lora: expected True with batch_invariant"):
        tiny.config(batch_invariant=True, use_lora=True, lora_path="x")


@pytest.mark.cuda
def test_products_that_depend_on_the_batch_are_refused(tiny_cuda: TinyModel) -> None:
    expected = r"batch_invariant: expected the CPU, or bfloat16 .* got float32 \d+ x \d+ on cuda"
    with pytest.raises(ConfigError, match=expected):
        tiny_cuda.engine(batch_invariant=True)
