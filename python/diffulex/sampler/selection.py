# SPDX-License-Identifier: Apache-2.0
"""Which sampler decodes a model under a strategy and a sampling mode: one table.

The registry `AutoSampler` has each family's own sampler, which fills masks. The table here names
the samplers of the strategies and modes that need another one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.errors import ConfigError
from diffulex.registry import AutoSampler
from diffulex.strategy.rules import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from diffulex.config import Config
    from diffulex.sampler.base import Sampler

__all__ = ["LLADA2_NAMES", "make_sampler", "select_sampler"]

#: Names of one architecture; they differ in how their checkpoints are decoded.
LLADA2_NAMES = ("llada2", "llada2_moe", "llada2_mini", "llada2dot1_mini", "llada2_mini_dmax")


class _Row(NamedTuple):
    """One row of the table; `model_names` None stands for every name without a row of its own."""

    strategy: str
    sampling_mode: str
    model_names: tuple[str, ...] | None
    #: "module:attribute"; None: the entry of `AutoSampler`.
    sampler: str | None


_TABLE = (
    _Row("multi_bd", "edit", LLADA2_NAMES, "diffulex.sampler.llada2_edit:Llada2EditSampler"),
    _Row("dmax", "edit", LLADA2_NAMES, "diffulex.sampler.llada2_dmax:Llada2DmaxSampler"),
    _Row(
        "multi_bd",
        "naive",
        tuple(name for name in LLADA2_NAMES if name != "llada2dot1_mini"),
        "diffulex.sampler.llada2:Llada2Sampler",
    ),
    _Row(
        "multi_bd",
        "naive",
        ("fast_dllm_v2",),
        "diffulex.sampler.fast_dllm_v2:FastDllmV2MultiBdSampler",
    ),
    _Row("fast_dllm_v2", "naive", ("fast_dllm_v2",), None),
    _Row("diffusion_gemma", "naive", ("diffusion_gemma",), None),
    _Row("multi_bd", "naive", None, None),
    _Row(
        "d2f",
        "naive",
        tuple(name for name in LLADA2_NAMES if name != "llada2dot1_mini"),
        "diffulex.sampler.llada2:Llada2Sampler",
    ),
    _Row("d2f", "naive", None, None),
)
# Not masked families: their only rows are those that name them.
_OWN_STRATEGY_ONLY = ("diffusion_gemma",)


def select_sampler(model_name: str, strategy: str, sampling_mode: str) -> Callable[..., Any]:
    """The sampler class of a combination.

    A strategy registered from outside decodes with the samplers of multi_bd.

    Raises:
        ConfigError: there is none.
    """
    known = strategy if strategy in STRATEGIES else "multi_bd"
    for row in _TABLE:
        if (row.strategy, row.sampling_mode) != (known, sampling_mode):
            continue
        if row.model_names is None:
            if model_name in _OWN_STRATEGY_ONLY:
                continue
        elif model_name not in row.model_names:
            continue
        if row.sampler is None or _is_replaced(model_name, row):
            return AutoSampler.get(model_name)
        module, _, attribute = row.sampler.partition(":")
        sampler: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return sampler
    raise ConfigError(
        f"model_name: {_expected(known, sampling_mode)} for decoding_strategy {strategy} with"
        f" sampling_mode {sampling_mode}, got {model_name!r}"
    )


def make_sampler(config: Config) -> Sampler:
    """The sampler of a resolved configuration."""
    decoding = config.decoding
    select = select_sampler(
        config.model.model_name, decoding.decoding_strategy, decoding.sampling_mode
    )
    sampler: Sampler = select(config)
    return sampler


def _expected(strategy: str, sampling_mode: str) -> str:
    names = sorted(
        name
        for row in _TABLE
        if (row.strategy, row.sampling_mode) == (strategy, sampling_mode)
        for name in row.model_names or ("a model that fills masks",)
    )
    return f"expected {', '.join(names)}" if names else "there is no sampler"


def _is_replaced(model_name: str, row: _Row) -> bool:
    """Whether a program registered its own sampler for a name whose built-in is of another row."""
    return row.sampling_mode == "naive" and not AutoSampler.is_built_in(model_name)
