# SPDX-License-Identifier: Apache-2.0
"""Which numbers of ranks a model can be cut for, found before any process starts."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from diffulex.distributed.layout import Layout, Sizes, layout_of
from diffulex.distributed.shard import (
    ALL_EXPERTS,
    FAST_UNIT,
    ExpertShard,
    Shard,
    shard_range,
)
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffulex.families.spec import ModelSpec
    from diffulex.quantization.scheme import QuantizationPlan

__all__ = [
    "MAX_RANKS",
    "check_groups",
    "check_model",
    "check_model_class",
    "expert_mode",
    "expert_shard",
    "legal_heads",
    "shard_of",
]

#: Most ranks that share weights.
MAX_RANKS = 8


def check_groups(
    spec: ModelSpec,
    sizes: Sizes,
    moe_parallel_mode: str,
    plan: QuantizationPlan,
    *,
    of_experts_alone: bool = False,
) -> None:
    """Asks whether each rank can have whole groups of the columns that share a scale in low precision.

    `of_experts_alone`: nothing else than routed experts is in low precision.

    Raises:
        ConfigError: it cannot, of a model that `check_model` accepts.
    """
    num_ranks, moe = max(sizes.tensor, sizes.expert), spec.moe
    if moe is not None and expert_mode(spec, sizes, moe_parallel_mode, plan) == "width":
        width = moe.intermediate_size
        if _expert_plan(spec, plan) is not None and _splits(
            width, num_ranks, plan, plan.expert_unit
        ):
            raise ConfigError(
                f"moe_parallel_mode: expected expert for groups of {plan.shared_columns(width)} of an"
                f" expert width of {width} on {num_ranks} ranks, got width"
            )
    found = None if of_experts_alone else _split_group(spec, sizes.tensor, plan)
    if found is not None:
        name, depth = found
        legal = [n for n in legal_heads(spec) if _split_group(spec, n, plan) is None]
        raise ConfigError(
            f"tensor_parallel_size: expected {', '.join(map(str, legal))} for groups of"
            f" {plan.shared_columns(depth)} of {name} (K {depth}), got {sizes.tensor}"
        )


def _split_group(spec: ModelSpec, num_ranks: int, plan: QuantizationPlan) -> tuple[str, int] | None:
    """The first input of products, and its size, of which ranks would have parts of groups."""
    for index, (_, head_dim) in enumerate(spec.kv_layers):
        depth = spec.num_q_heads * head_dim
        is_split = num_ranks > 1 and depth // num_ranks % plan.shared_columns(depth)
        if is_split and not plan.names(spec.names.layer.format(index) + spec.names.o):
            return "attention outputs", depth
    *widths, _ = _widths(spec)
    for name, size, _ in widths:
        if _splits(size, num_ranks, plan, plan.unit):
            return name, size
    return None


def _splits(size: int, num_ranks: int, plan: QuantizationPlan, unit: int) -> bool:
    """Whether a width, cut at multiples of `unit`, is too small for ranks, or they would have parts of its
    groups."""
    try:
        cuts = [shard_range(size, Shard(r, num_ranks, unit=unit)) for r in range(num_ranks)]
    except ValueError:
        return True
    return any(cut.start % plan.shared_columns(size) for cut in cuts)


def check_model(spec: ModelSpec, sizes: Sizes, moe_parallel_mode: str = "auto") -> None:
    """Compares a model with the ranks that are to share it.

    Raises:
        ConfigError: it cannot be cut so.
    """
    layout = layout_of(sizes)
    if layout is not Layout.BASE and spec.moe is None:
        raise ConfigError(
            f"expert_parallel_size: expected 1 for a model without routed experts, got {sizes.expert}"
        )
    if moe_parallel_mode != "auto" and spec.moe is None:
        raise ConfigError(
            "moe_parallel_mode: expected auto for a model without routed experts, got"
            f" {moe_parallel_mode}"
        )
    _check_heads(spec, sizes.tensor)
    for name, size, used in _widths(spec):
        _check_width(name, size, used, sizes.tensor)
    if spec.moe is not None and max(sizes.tensor, sizes.expert) > 1:
        expert_mode(spec, sizes, moe_parallel_mode)


def legal_heads(spec: ModelSpec) -> list[int]:
    """Numbers of ranks up to `MAX_RANKS` over which whole heads can be spread."""
    return [
        count
        for count in range(1, MAX_RANKS + 1)
        if all(
            num_q % count == 0 and (num_kv % count == 0 or count % num_kv == 0)
            for num_q, num_kv, _ in spec.attention_shapes
        )
    ]


def _check_heads(spec: ModelSpec, num_ranks: int) -> None:
    legal = legal_heads(spec)
    if num_ranks in legal:
        return
    heads = " and ".join(dict.fromkeys(str(num_kv) for _, num_kv, _ in spec.attention_shapes))
    raise ConfigError(
        f"tensor_parallel_size: expected one of {', '.join(map(str, legal))} for {spec.family}"
        f" ({spec.num_q_heads} query heads, {heads} KV heads), got {num_ranks}"
    )


def _widths(spec: ModelSpec) -> Iterator[tuple[str, int, int]]:
    """(name, size, how much of it from its beginning must be on several ranks) of what is cut."""
    moe = spec.moe
    if spec.has_dense_blocks:
        yield "intermediate_size", spec.intermediate_size, spec.intermediate_size
    if moe is not None and moe.shared_size:
        yield "the shared expert's width", moe.shared_size, moe.shared_size
    yield "vocab_size", spec.embedding_rows, spec.vocab_size


def _check_width(name: str, size: int, used: int, num_ranks: int) -> None:
    most = 1
    for count in range(2, MAX_RANKS + 1):
        try:
            last = shard_range(size, Shard(count - 1, count))
        except ValueError:
            break
        most = count if last.start < used else most
    if num_ranks > most:
        raise ConfigError(
            f"tensor_parallel_size: expected at most {most} shards of {name} {used}, got {num_ranks}"
        )


def expert_mode(
    spec: ModelSpec, sizes: Sizes, mode: str = "auto", plan: QuantizationPlan | None = None
) -> str:
    """How the routed experts of a model are spread: `width`, a part of each; `expert`, whole ones.

    Args:
        spec: of a model that has some.
        sizes: more than one rank.
        mode: `auto`: the width, where every part of it suits the fast products.
        plan: of weights in low precision; None: they have the dtype of the model.

    Raises:
        ConfigError: the model has too few experts, or experts too narrow, for `mode`.
    """
    assert spec.moe is not None
    num_ranks, width = max(sizes.tensor, sizes.expert), spec.moe.intermediate_size
    if mode == "auto":
        unit = _expert_unit(spec, plan)
        is_width = sizes.expert == 1 and width % (unit * num_ranks) == 0
        mode = "width" if is_width else "expert"
    elif mode == "width" and sizes.expert > 1:
        raise ConfigError(
            "moe_parallel_mode: expected auto or expert with expert_parallel_size"
            f" {sizes.expert}, got width"
        )
    if mode == "width":
        try:
            shard_range(width, Shard(0, num_ranks))
        except ValueError:
            raise ConfigError(
                f"moe_parallel_mode: expected expert for an expert width of {width} on {num_ranks}"
                " ranks, got width"
            ) from None
    elif spec.moe.num_experts < num_ranks:
        key = "expert_parallel_size" if sizes.expert > 1 else "tensor_parallel_size"
        raise ConfigError(
            f"{key}: expected at most {spec.moe.num_experts} ranks for {spec.moe.num_experts} routed"
            f" experts, got {num_ranks}"
        )
    return mode


def _expert_plan(spec: ModelSpec, plan: QuantizationPlan | None) -> QuantizationPlan | None:
    """That of the routed experts; None: they have the dtype of the model, under whatever names a
    checkpoint has them."""
    assert spec.moe is not None
    if plan is None:
        return None
    parts = ("gate_proj", "up_proj", "down_proj")
    names = ("gate_up_proj", *parts, *(f"0.{part}" for part in parts))
    are_kept = all(
        plan.names(f"{spec.names.layer.format(layer)}{spec.names.experts}.{name}")
        for layer in spec.moe.layers
        for name in names
    )
    return None if are_kept else plan


def _unit(plan: QuantizationPlan | None) -> int:
    return FAST_UNIT if plan is None else plan.unit


def _expert_unit(spec: ModelSpec, plan: QuantizationPlan | None) -> int:
    own = _expert_plan(spec, plan)
    return FAST_UNIT if own is None else own.expert_unit


def shard_of(
    spec: ModelSpec,
    sizes: Sizes,
    moe_parallel_mode: str,
    rank: int,
    plan: QuantizationPlan | None = None,
) -> Shard:
    """What a rank of an engine has of a model that `check_model` accepts, and with a `plan` of weights in
    low precision `check_groups`."""
    shard, num_ranks = sizes.shard(rank), max(sizes.tensor, sizes.expert)
    if num_ranks == 1:
        return shard
    shard = shard._replace(unit=_unit(plan))
    if spec.moe is None:
        return shard
    mode = expert_mode(spec, sizes, moe_parallel_mode, plan)
    unit = _expert_unit(spec, plan)
    return shard._replace(experts=ExpertShard(rank % num_ranks, num_ranks, mode, unit))


def expert_shard(spec: ModelSpec, shard: Shard) -> ExpertShard:
    """What a rank has of the routed experts of a model that has some."""
    if shard.experts is not None:
        return shard.experts
    if shard.size == 1:
        return ALL_EXPERTS
    mode = expert_mode(spec, Sizes(shard.size))
    return ExpertShard(shard.rank, shard.size, mode, shard.unit)


def check_model_class(name: str, model_class: Any, sizes: Sizes) -> None:
    """ConfigError for a model class of which no rank can have a part."""
    if sizes.world > 1 and "shard" not in inspect.signature(model_class).parameters:
        raise ConfigError(
            f"{sizes.limiting_key}: expected 1 for model {name!r}, whose class takes no shard"
            f" (docs/extending.md), got {sizes.world}"
        )
