# SPDX-License-Identifier: Apache-2.0
"""Parameters of one request."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffulex.config import SamplerConfig
    from diffulex_ext import _core

__all__ = ["SamplingParams"]

_THRESHOLDS = (
    "accept_threshold",
    "edit_threshold",
    "add_block_threshold",
    "semi_complete_threshold",
    "token_stability_threshold",
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded and when it ends.

    A field that is None takes the engine's default, which is the checkpoint's or the family's.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: generated tokens, at least 1.
        max_nfe: cap on the forwards the request takes part in; None: no cap.
        max_repetition_run: equal tokens at the end of the answer that end the request.
        ignore_eos: stop ids do not end the request.
        stop_token_ids: stop ids in addition to those of the model.
        seed: key of the random draws; None derives it from the engine seed and the request id.
        top_p: nucleus of the draws; 1 or more is off, 0 keeps one candidate. Filters act on
            draws: greedy requests have none.
        top_k: candidates of the draws; 0 or less is off.
        min_p: least share of the best probability a candidate has; 0 is off.
        accept_threshold: confidence that accepts a position.
        edit_threshold: confidence that overwrites a token.
        add_block_threshold: progress of the last block that opens the next one.
        semi_complete_threshold: progress of the predecessor that grants a forced acceptance.
        token_stability_threshold: least same-token ratio of the last block to open the next one.
    """

    temperature: float | None = None
    max_tokens: int = 512
    max_nfe: int | None = None
    max_repetition_run: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    accept_threshold: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    edit_threshold: float | None = None
    add_block_threshold: float | None = None
    semi_complete_threshold: float | None = None
    token_stability_threshold: float | None = None

    def __post_init__(self) -> None:
        stops: object = self.stop_token_ids
        if isinstance(stops, (str, bytes)) or not isinstance(stops, Iterable):
            raise _illegal("stop_token_ids", "a list of token ids", stops)
        object.__setattr__(self, "stop_token_ids", tuple(stops))
        for name, low in (("max_tokens", 1), ("max_nfe", 1), ("max_repetition_run", 1)):
            value = getattr(self, name)
            if value is None and name != "max_tokens":
                continue
            if not _is_int(value) or not low <= value < 2**31:
                raise _illegal(name, f"an integer in [{low}, 2**31)", value)
        for name in ("temperature", "top_p"):
            self._check_number(name, math.inf)
        for name in ("min_p", *_THRESHOLDS):
            self._check_number(name, 1)
        if self.top_k is not None and not (_is_int(self.top_k) and -(2**31) <= self.top_k < 2**31):
            raise _illegal("top_k", "an integer in [-2**31, 2**31)", self.top_k)
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**64):
            raise _illegal("seed", "an integer in [0, 2**64)", self.seed)
        if not isinstance(self.ignore_eos, bool):
            raise _illegal("ignore_eos", "True or False", self.ignore_eos)
        for token in self.stop_token_ids:
            if not _is_int(token) or not 0 <= token < 2**31:
                raise _illegal("stop_token_ids", "token ids >= 0", token)

    def _check_number(self, name: str, high: float) -> None:
        value = getattr(self, name)
        if value is None:
            return
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 0 <= value <= high:
            legal = "a finite number >= 0" if math.isinf(high) else f"a number in [0, {high}]"
            raise _illegal(name, legal, value)

    def with_defaults(self, defaults: SamplerConfig) -> SamplingParams:
        """The same parameters with the engine's temperature and filters where none were given."""
        names = ("temperature", "top_p", "top_k", "min_p")
        missing = {n: getattr(defaults, n) for n in names if getattr(self, n) is None}
        return dataclasses.replace(self, **missing)

    def to_core(self, default_temperature: float = 0.0) -> _core.SamplingParams:
        """Parameters of the C++ core."""
        from diffulex_ext import _core  # noqa: PLC0415

        temperature = default_temperature if self.temperature is None else self.temperature
        return _core.SamplingParams(
            temperature=float(temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=self.top_k or 0,
            min_p=float(self.min_p or 0.0),
            max_tokens=self.max_tokens,
            max_nfe=self.max_nfe or 0,
            max_repetition_run=self.max_repetition_run or 0,
            ignore_eos=self.ignore_eos,
            stop_token_ids=list(self.stop_token_ids),
            seed=self.seed,
            **{name: getattr(self, name) for name in _THRESHOLDS},
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _illegal(name: str, expected: str, value: object) -> ValueError:
    return ValueError(f"SamplingParams.{name}: expected {expected}, got {value!r}")
