# SPDX-License-Identifier: Apache-2.0
"""What a decoding strategy is: one record, in one file per strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diffulex.strategies.traits import StrategyTraits

if TYPE_CHECKING:
    from diffulex.config.types import ConfigTree, PartialConfig

__all__ = ["Strategy"]


def _resolve_nothing(partial: PartialConfig) -> None:
    """A strategy without demands."""


def _no_fields(config: ConfigTree) -> Mapping[str, Any]:
    return {}


def _same_shapes(config: ConfigTree) -> bool:
    return False


def _settings_text(config: ConfigTree) -> str:
    decoding, sampler = config.decoding, config.sampler
    return (
        f"mode {decoding.sampling_mode}, rule {sampler.acceptance_rule}, temperature"
        f" {sampler.temperature}"
    )


@dataclass(frozen=True, slots=True)
class Strategy:
    """One decoding strategy. Its state machine is the core's of the same name.

    Attributes:
        name: value of the `decoding_strategy` option.
        aliases: further values of it, of older configuration files.
        traits: what other packages ask about it.
        sampling_modes: values of `sampling_mode` it has; the first is taken when none is given.
        keys: configuration keys, or beginnings of them, that this strategy alone reads.
        unread_params: fields of `SamplingParams` it has no use for, beside those that only a
            sampling mode that rewrites tokens reads.
        unread_keys: configuration keys that `resolve` sets itself, whatever the caller wants.
        resolve: forces and checks keys.
        core_fields: fields of the core's options beyond the common ones.
        has_other_host_shapes: whether the host runs decode steps of other shapes than a device that
            runs ahead, because it leaves out rows that decide nothing.
        settings_text: its settings, for the log.
    """

    name: str
    aliases: tuple[str, ...] = ()
    traits: StrategyTraits = field(default_factory=StrategyTraits)
    sampling_modes: tuple[str, ...] = ("naive",)
    keys: tuple[str, ...] = ()
    unread_params: tuple[str, ...] = ()
    unread_keys: tuple[str, ...] = ()
    resolve: Callable[[PartialConfig], None] = _resolve_nothing
    core_fields: Callable[[ConfigTree], Mapping[str, Any]] = _no_fields
    has_other_host_shapes: Callable[[ConfigTree], bool] = _same_shapes
    settings_text: Callable[[ConfigTree], str] = _settings_text
