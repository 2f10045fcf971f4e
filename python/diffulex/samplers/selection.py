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
from diffulex.strategies.rules import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from diffulex.config.types import ConfigTree
    from diffulex.samplers.base import Sampler

__all__ = ["LLADA2_NAMES", "make_sampler", "modes_of", "select_sampler", "strategies_of"]

#: Names of one architecture; they differ in how their checkpoints are decoded.
LLADA2_NAMES = ("llada2", "llada2_moe", "llada2_mini", "llada2dot1_mini", "llada2_mini_dmax")


class _Row(NamedTuple):
    """One row of the table; `model_names` None stands for every name that has no row."""

    strategy: str
    sampling_mode: str
    model_names: tuple[str, ...] | None
    #: "module:attribute"; None: the entry of `AutoSampler`.
    sampler: str | None


_TABLE = (
    _Row("multi_bd", "edit", LLADA2_NAMES, "diffulex.samplers.llada2_edit:Llada2EditSampler"),
    _Row("dmax", "edit", LLADA2_NAMES, "diffulex.samplers.llada2_dmax:Llada2DmaxSampler"),
    _Row(
        "multi_bd",
        "naive",
        tuple(name for name in LLADA2_NAMES if name != "llada2dot1_mini"),
        "diffulex.samplers.llada2:Llada2Sampler",
    ),
    _Row(
        "multi_bd",
        "naive",
        ("fast_dllm_v2",),
        "diffulex.samplers.fast_dllm_v2:FastDllmV2MultiBdSampler",
    ),
    _Row("fast_dllm_v2", "naive", ("fast_dllm_v2",), None),
    _Row("diffusion_gemma", "naive", ("diffusion_gemma",), None),
    _Row("multi_bd", "naive", None, None),
    _Row(
        "d2f",
        "naive",
        tuple(name for name in LLADA2_NAMES if name != "llada2dot1_mini"),
        "diffulex.samplers.llada2:Llada2Sampler",
    ),
    _Row("d2f", "naive", None, None),
)
# Families whose only rows are those that name them.
_OWN_ROWS_ONLY = (*LLADA2_NAMES, "diffusion_gemma", "fast_dllm_v2")


def select_sampler(model_name: str, strategy: str, sampling_mode: str) -> Callable[..., Any]:
    """The sampler class of a combination.

    Raises:
        ConfigError: there is none.
    """
    for row in _rows_of(model_name):
        if (row.strategy, row.sampling_mode) != (_known(strategy), sampling_mode):
            continue
        if row.sampler is None or _is_replaced(model_name, row):
            return AutoSampler.get(model_name)
        module, _, attribute = row.sampler.partition(":")
        sampler: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return sampler
    modes = modes_of(model_name, strategy)
    if not modes:
        raise ConfigError(
            f"decoding_strategy: expected {' or '.join(strategies_of(model_name))} for the model"
            f" {model_name}, got {strategy!r}"
        )
    raise ConfigError(
        f"sampling_mode: expected {' or '.join(modes)} for the model {model_name} under"
        f" decoding_strategy {strategy}, got {sampling_mode!r}"
    )


def strategies_of(model_name: str) -> tuple[str, ...]:
    """Built-in strategies that decode a model, its own among them."""
    found = {row.strategy for row in _rows_of(model_name)}
    return tuple(name for name in STRATEGIES if name in found)


def modes_of(model_name: str, strategy: str) -> tuple[str, ...]:
    """Sampling modes of a model under a strategy; empty when the strategy does not decode it."""
    modes = (row.sampling_mode for row in _rows_of(model_name) if row.strategy == _known(strategy))
    return tuple(dict.fromkeys(modes))


def make_sampler(config: ConfigTree) -> Sampler:
    """The sampler of a resolved configuration."""
    decoding = config.decoding
    select = select_sampler(
        config.model.model_name, decoding.decoding_strategy, decoding.sampling_mode
    )
    sampler: Sampler = select(config)
    return sampler


def _known(strategy: str) -> str:
    """A strategy registered from outside decodes with the samplers of multi_bd."""
    return strategy if strategy in STRATEGIES else "multi_bd"


def _rows_of(model_name: str) -> list[_Row]:
    def is_for(row: _Row) -> bool:
        if row.model_names is None:
            return model_name not in _OWN_ROWS_ONLY
        return model_name in row.model_names

    return [row for row in _TABLE if is_for(row)]


def _is_replaced(model_name: str, row: _Row) -> bool:
    """Whether a program registered its own sampler for a name whose built-in is of another row."""
    return row.sampling_mode == "naive" and not AutoSampler.is_built_in(model_name)
