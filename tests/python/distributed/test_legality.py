# SPDX-License-Identifier: Apache-2.0
"""For which numbers of ranks a model can be cut, and the errors for the others."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from diffulex.config.config import Config
from diffulex.config.types import ModelFacts
from diffulex.distributed.layout import Sizes
from diffulex.distributed.legality import (
    check_groups,
    check_model,
    check_model_class,
    expert_mode,
    legal_heads,
    shard_of,
)
from diffulex.distributed.shard import ExpertShard, Shard, shard_range
from diffulex.errors import ConfigError
from diffulex.families.spec import ModelSpec
from diffulex.families.spec.diffusion_gemma import GEMMA_NAMES, DiffusionGemmaSpec, GemmaLayer
from diffulex.families.spec.moe import MoeSpec
from diffulex.quantization.scheme import QuantizationPlan


def spec(num_q_heads: int, num_kv_heads: int, **fields: Any) -> ModelSpec:
    shapes: dict[str, Any] = {
        "family": "sdar", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_layers": 2, "head_dim": 128, "max_positions": 512, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "rotary_dim": 128,
    }  # fmt: skip
    return ModelSpec(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, **(shapes | fields))


def moe(num_experts: int, width: int, **fields: Any) -> MoeSpec:
    return MoeSpec(num_experts, 2, width, frozenset((0, 1)), **fields)


def gemma() -> DiffusionGemmaSpec:
    base = spec(16, 8, family="diffusion_gemma")
    values = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    layers = tuple(
        GemmaLayer(is_sliding=is_sliding, num_kv_heads=heads, head_dim=head_dim)
        for is_sliding, heads, head_dim in ((True, 8, 256), (False, 2, 512))
    )
    return DiffusionGemmaSpec(**values, layers=layers)


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [
        ((28, 4), [1, 2, 4]),  # Dream, DiffuCoder, Fast-dLLM v2 7B
        ((12, 2), [1, 2, 4, 6]),  # Fast-dLLM v2 1.5B
        ((32, 8), [1, 2, 4, 8]),  # SDAR, dream_reasoner, Stable-DiffCoder
        ((32, 32), [1, 2, 4, 8]),  # LLaDA
        ((32, 4), [1, 2, 4, 8]),  # SDAR-30B-A3B, LLaDA2-flash
        ((16, 4), [1, 2, 4, 8]),  # LLaDA2-mini
        ((4, 2), [1, 2, 4]),  # the bundled model
        ((3, 1), [1, 3]),  # the zoo
    ],
)
def test_sizes_of_published_shapes(heads: tuple[int, int], sizes: list[int]) -> None:
    assert legal_heads(spec(*heads)) == sizes
    for count in sizes:
        check_model(spec(*heads), Sizes(count))
    assert legal_heads(gemma()) == [1, 2, 4, 8]


# (model, sizes, mode of the experts, error)
ILLEGAL = [
    (
        spec(28, 4, family="dream"), (8,), "auto",
        "tensor_parallel_size: expected one of 1, 2, 4 for dream (28 query heads, 4 KV heads), got 8",
    ),
    (
        gemma(), (3,), "auto",
        "tensor_parallel_size: expected one of 1, 2, 4, 8 for diffusion_gemma"
        " (16 query heads, 8 and 2 KV heads), got 3",
    ),
    (
        spec(8, 8, intermediate_size=112), (8,), "auto",
        "tensor_parallel_size: expected at most 7 shards of intermediate_size 112, got 8",
    ),
    (
        spec(8, 8, moe=moe(8, 64, shared_size=48)), (4,), "auto",
        "tensor_parallel_size: expected at most 3 shards of the shared expert's width 48, got 4",
    ),
    (
        spec(8, 8, vocab_size=20), (4,), "auto",
        "tensor_parallel_size: expected at most 2 shards of vocab_size 20, got 4",
    ),
    (  # the last of four ranks would have padding alone
        spec(8, 8, vocab_size=100, embedding_size=160), (4,), "auto",
        "tensor_parallel_size: expected at most 2 shards of vocab_size 100, got 4",
    ),
    (
        spec(3, 1, moe=moe(8, 32)), (3,), "width",
        "moe_parallel_mode: expected expert for an expert width of 32 on 3 ranks, got width",
    ),
    (
        spec(8, 8, moe=moe(2, 32)), (4,), "auto",
        "tensor_parallel_size: expected at most 2 ranks for 2 routed experts, got 4",
    ),
    (
        spec(8, 8, moe=moe(2, 512)), (1, 1, 4), "auto",
        "expert_parallel_size: expected at most 2 ranks for 2 routed experts, got 4",
    ),
    (
        spec(8, 8), (1, 1, 2), "auto",
        "expert_parallel_size: expected 1 for a model without routed experts, got 2",
    ),
    (
        spec(8, 8), (2, 2, 3), "auto",
        "expert_parallel_size: expected 1, tensor_parallel_size (2) or tensor_parallel_size *"
        " data_parallel_size (4), got 3",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "sizes", "mode", "text"), ILLEGAL)
def test_illegal_sizes(model: ModelSpec, sizes: tuple[int, ...], mode: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_model(model, Sizes(*sizes), mode)
    assert str(caught.value) == text


def test_how_experts_are_spread() -> None:
    def mode(width: int, sizes: Sizes) -> str:
        return expert_mode(spec(16, 4, moe=moe(64, width)), sizes)

    assert mode(512, Sizes(8)) == "width"
    assert mode(768, Sizes(4)) == "width"
    assert mode(768, Sizes(8)) == "expert"
    assert mode(704, Sizes(2)) == "expert"
    assert mode(512, Sizes(2, 1, 2)) == "expert"
    assert expert_mode(spec(16, 4, moe=moe(64, 96)), Sizes(2), "width") == "width"


@pytest.mark.parametrize(
    ("model", "num_ranks", "plan", "mode", "text"),
    [
        (
            spec(4, 2, head_dim=64), 4, ("fp8",), "auto",
            "tensor_parallel_size: expected 1, 2 for groups of 128 of attention outputs (K 256), got 4",
        ),
        (
            spec(32, 8, intermediate_size=384), 8, ("int8",), "auto",
            "tensor_parallel_size: expected 1, 2 for groups of 128 of intermediate_size (K 384), got 8",
        ),
        (
            spec(32, 8, intermediate_size=336), 2, ("int4", 32), "auto",
            "tensor_parallel_size: expected 1 for groups of 336 of intermediate_size (K 336), got 2",
        ),
        (
            spec(32, 8, moe=moe(8, 192)), 2, ("fp8_block",), "width",
            "",
        ),
        (
            spec(32, 8, moe=moe(8, 192)), 4, ("fp8_block",), "width",
            "moe_parallel_mode: expected expert for groups of 128 of an expert width of 192 on 4 ranks,"
            " got width",
        ),
        (spec(3, 1, head_dim=64, intermediate_size=320), 3, ("int4",), "auto", ""),
        (spec(32, 32, intermediate_size=12288), 8, ("fp8",), "auto", ""),
        (spec(4, 2, head_dim=64, intermediate_size=640), 2, ("int8",), "auto", ""),
    ],
)  # fmt: skip
def test_groups_of_low_precision(
    model: ModelSpec, num_ranks: int, plan: tuple[Any, ...], mode: str, text: str
) -> None:
    if not text:
        check_groups(model, Sizes(num_ranks), mode, QuantizationPlan(*plan))
        return
    with pytest.raises(ConfigError) as caught:
        check_groups(model, Sizes(num_ranks), mode, QuantizationPlan(*plan))
    assert str(caught.value) == text


def test_groups_of_experts_alone() -> None:
    """Attention in its dtype may be cut anywhere; experts in parts may not."""
    model = spec(4, 2, head_dim=16, rotary_dim=16, moe=moe(8, 192))
    plan = QuantizationPlan("fp8_block")
    with pytest.raises(ConfigError, match=r"for groups of 128 of attention outputs \(K "):
        check_groups(model, Sizes(2), "expert", plan)
    check_groups(model, Sizes(2), "expert", plan, of_experts_alone=True)
    with pytest.raises(ConfigError, match=r"^moe_parallel_mode: expected expert"):
        check_groups(model, Sizes(4), "width", plan, of_experts_alone=True)


def test_groups_of_what_keeps_its_dtype() -> None:
    """Attention outputs are looked at layer by layer, under their names in the checkpoint."""
    model = spec(4, 2, head_dim=64)
    check_groups(model, Sizes(4), "auto", QuantizationPlan("int4", ignore=("*.self_attn.*",)))
    for ignored in ("*.mlp.*", "model.layers.0.*", "*.q_proj"):
        with pytest.raises(ConfigError, match=r"for groups of 128 of attention outputs \(K 256\)"):
            check_groups(model, Sizes(4), "auto", QuantizationPlan("int4", ignore=(ignored,)))


def test_experts_that_keep_their_dtype_are_cut_as_without_low_precision() -> None:
    model = spec(32, 8, moe=moe(8, 192))
    whole, kept = QuantizationPlan("int4"), QuantizationPlan("int4", ignore=("*.experts.*",))
    with pytest.raises(ConfigError, match=r"^moe_parallel_mode: expected expert for groups of 64"):
        check_groups(model, Sizes(4), "width", whole)
    check_groups(model, Sizes(4), "width", kept)
    assert [expert_mode(model, Sizes(3), "auto", plan) for plan in (None, kept)] == ["width"] * 2
    assert expert_mode(model, Sizes(3), "auto", whole) == "expert"
    shards = [shard_of(model, Sizes(4), "width", 1, plan).experts for plan in (None, kept)]
    assert shards == [ExpertShard(1, 4, "width")] * 2
    one_layer = QuantizationPlan("int4", ignore=("model.layers.0.mlp.experts.*",))
    other = QuantizationPlan("int4", ignore=("*.mlp.*",))
    gemma = dataclasses.replace(model, names=GEMMA_NAMES)
    for case, plan in ((model, one_layer), (gemma, other)):
        with pytest.raises(
            ConfigError, match=r"^moe_parallel_mode: expected expert for groups of 64"
        ):
            check_groups(case, Sizes(4), "width", plan)
    check_groups(gemma, Sizes(4), "width", kept)


def test_ranks_may_cut_groups_of_what_a_family_keeps() -> None:
    """By the default of `quantization_ignore`, which is resolved before."""
    sizes = {"head_dim": 64, "rotary_dim": 64, "intermediate_size": 512, "names": GEMMA_NAMES}
    model = spec(4, 2, family="diffusion_gemma", **sizes)
    given = ModelFacts("diffusion_gemma", Path("/models/x"), model, {}, 260)
    keys = {"device": "cpu", "quantization": "int4", "tensor_parallel_size": 4}
    assert Config.resolve("", given, keys).parallel.tensor_parallel_size == 4
    text = r"expected 1, 2 for groups of 128 of attention outputs \(K 256\), got 4"
    with pytest.raises(ConfigError, match=text):
        Config.resolve("", given, {**keys, "quantization_ignore": ()})


def test_parts_in_low_precision_are_whole_groups() -> None:
    for scheme, cuts in (("fp8", [0, 256, 640]), ("int4", [0, 256, 640]), (None, [0, 320, 640])):
        plan = None if scheme is None else QuantizationPlan(scheme)
        shards = [shard_of(spec(4, 2), Sizes(2), "auto", rank, plan) for rank in range(2)]
        parts = [shard_range(640, shard) for shard in shards]
        assert [parts[0].start, *(part.stop for part in parts)] == cuts
    routing = spec(4, 2, moe=moe(8, 384))
    modes = [
        shard_of(routing, Sizes(2), "auto", 1, plan).experts
        for plan in (None, QuantizationPlan("fp8"))
    ]
    assert modes == [ExpertShard(1, 2, "width"), ExpertShard(1, 2, "expert", 128)]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_experts_of_4_bits_are_cut_where_tiles_are(group: int) -> None:
    plan = QuantizationPlan("int4", group)
    for width, mode in ((384, "expert"), (512, "width")):
        model = spec(4, 2, moe=moe(8, width))
        found = shard_of(model, Sizes(2), "auto", 1, plan).experts
        assert found == ExpertShard(1, 2, mode, 128)


def test_a_class_without_a_shard() -> None:
    class Whole:
        def __init__(self, spec: object, dtype: object, device: object) -> None:
            pass

    class Cut:
        def __init__(
            self, spec: object, dtype: object, device: object, shard: object = None
        ) -> None:
            pass

    check_model_class("my_model", Whole, Sizes(1))
    check_model_class("my_model", Cut, Sizes(2))
    with pytest.raises(ConfigError) as caught:
        check_model_class("my_model", Whole, Sizes(2))
    assert str(caught.value) == (
        "tensor_parallel_size: expected 1 for model 'my_model', whose class takes no shard"
        " (docs/extending.md), got 2"
    )


def test_shards_of_random_sizes() -> None:
    """Disjoint, covering, in order, in units of 16, of 64 where that is nearly even."""
    drawn = random.Random(0)
    for _ in range(10_000):
        size, count = (
            drawn.randint(1, 200_000 if drawn.random() < 0.5 else 400),
            drawn.randint(1, 16),
        )
        if count > -(-size // 16):
            with pytest.raises(ValueError, match=rf"shards of {size}, got {count}"):
                shard_range(size, Shard(0, count))
            continue
        parts = [shard_range(size, Shard(rank, count)) for rank in range(count)]
        assert (parts[0].start, parts[-1].stop) == (0, size)
        assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
        assert all(part.start < part.stop for part in parts)
        assert all(part.start % 16 == 0 for part in parts)
        if any(part.start % 64 for part in parts):
            units = -(-size // 64)
            ends = [min(size, 64 * (units * rank // count)) for rank in range(count + 1)]
            most = max(b - a for a, b in itertools.pairwise(ends))
            assert units < count or most * count > 1.25 * size
