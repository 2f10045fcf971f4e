# SPDX-License-Identifier: Apache-2.0
"""Which sampler decodes a model under a strategy and a sampling mode.

The registry `AutoSampler` has the sampler of each model name; the record of a family names the
strategies and modes that decode it and those that need another sampler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.families.base import MASK_FILLING
from diffulex.families.listing import family_named
from diffulex.registry import AutoSampler
from diffulex.strategies.listing import STRATEGIES, strategy_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from diffulex.config.types import ConfigTree
    from diffulex.distributed.records import SharedHead
    from diffulex.families.base import Decoding
    from diffulex.samplers.base import Sampler

__all__ = ["make_sampler", "modes_of", "select_sampler", "share_rows", "strategies_of"]


def select_sampler(model_name: str, strategy: str, sampling_mode: str) -> Callable[..., Any]:
    """The sampler class of a combination.

    Raises:
        ConfigError: there is none.
    """
    for row in _rows_of(model_name):
        if not _decodes(row, strategy) or row.sampling_mode != sampling_mode:
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
    rows = _rows_of(model_name)
    return tuple(name for name in STRATEGIES if any(_decodes(row, name) for row in rows))


def modes_of(model_name: str, strategy: str) -> tuple[str, ...]:
    """Sampling modes of a model under a strategy; empty when the strategy does not decode it."""
    modes = (row.sampling_mode for row in _rows_of(model_name) if _decodes(row, strategy))
    return tuple(dict.fromkeys(modes))


def make_sampler(config: ConfigTree) -> Sampler:
    """The sampler of a resolved configuration."""
    decoding = config.decoding
    select = select_sampler(
        config.model.model_name, decoding.decoding_strategy, decoding.sampling_mode
    )
    sampler: Sampler = select(config)
    return sampler


def share_rows(model: Any, sampler: Any) -> SharedHead | None:
    """Lets a sampler decide with the other ranks of a model; None where there are none.

    Raises:
        ConfigError: the sampler takes whole rows alone.
    """
    # Settings are checked with this module where torch is not installed.
    from diffulex.distributed.records import SharedHead  # noqa: PLC0415
    from diffulex.samplers.row_stage import RowStage  # noqa: PLC0415

    head = SharedHead.of(model)
    if head is not None:
        rows = getattr(sampler, "rows", None)
        if not isinstance(rows, RowStage):
            raise ConfigError(
                "tensor_parallel_size: expected 1 for a sampler without a RowStage as `rows`"
                f" ({type(sampler).__name__}), got {head.num_ranks} ranks"
            )
        rows.share(head)
    return head


def _decodes(row: Decoding, strategy: str) -> bool:
    record = strategy_named(strategy)
    return record.traits.fills_masks if row.strategy is None else row.strategy == record.name


def _rows_of(model_name: str) -> list[Decoding]:
    family = family_named(model_name)
    rows = MASK_FILLING if family is None else family.decodings
    return [row for row in rows if row.model_names is None or model_name in row.model_names]


def _is_replaced(model_name: str, row: Decoding) -> bool:
    """Whether a program registered its own sampler for a name whose built-in is of another row."""
    return row.sampling_mode == "naive" and not AutoSampler.is_built_in(model_name)
