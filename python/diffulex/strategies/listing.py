# SPDX-License-Identifier: Apache-2.0
"""The built-in strategies and the tables of the registries, derived from their records.

A strategy registered from outside wraps a state machine of the core. It is configured as multi_bd is,
and decodes what multi_bd decodes.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import TYPE_CHECKING

from diffulex import strategies
from diffulex.strategies.base import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ALIASES", "STRATEGIES", "owner_of", "strategy_named"]

# Modules of the package that describe no strategy.
_OTHERS = ("base", "core_options", "factories", "listing", "traits")
#: The strategy that is taken when nothing else is said.
_DEFAULT = "multi_bd"


def _records() -> Iterator[Strategy]:
    for module in pkgutil.iter_modules(strategies.__path__):
        if module.name not in _OTHERS:
            where = f"{strategies.__name__}.{module.name}"
            record = getattr(importlib.import_module(where), "STRATEGY", None)
            if not isinstance(record, Strategy):
                raise TypeError(
                    f"{where}: expected a Strategy called STRATEGY, or its name in _OTHERS of"
                    f" {__name__}, got {record!r}"
                )
            yield record


def _place(record: Strategy) -> tuple[bool, bool, str]:
    """What messages list first; the core's list, strategies.def, has the same order."""
    return record.name != _DEFAULT, record.traits.has_canvas, record.name


#: The `STRATEGY` of each other module of the package by name, in the order of messages.
STRATEGIES = {record.name: record for record in sorted(_records(), key=_place)}
ALIASES = {alias: name for name, strategy in STRATEGIES.items() for alias in strategy.aliases}


def _rows(attribute: str) -> dict[str, str]:
    return dict.fromkeys(STRATEGIES, attribute)


#: Rows of the registries of strategies.
REQUESTS = _rows("diffulex.strategies.factories:make_request")
SCHEDULERS = _rows("diffulex.strategies.factories:make_scheduler")
KV_CACHE_MANAGERS = _rows("diffulex.strategies.factories:make_kv_cache_manager")
MODEL_RUNNERS = _rows("diffulex.runner.model_runner:ModelRunner")

# The device knows the rules of built-in strategies only.
_CUSTOM = dataclasses.replace(
    STRATEGIES[_DEFAULT],
    traits=dataclasses.replace(STRATEGIES[_DEFAULT].traits, can_run_ahead=False),
)


def strategy_named(name: str) -> Strategy:
    """The record of a strategy; for one registered from outside that of multi_bd, step by step."""
    return STRATEGIES.get(name, _CUSTOM)


def owner_of(key: str) -> str | None:
    """The one strategy that reads a configuration key; None: all do, or none."""
    return next((name for name, item in STRATEGIES.items() if key.startswith(item.keys)), None)
