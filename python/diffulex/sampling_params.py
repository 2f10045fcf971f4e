# SPDX-License-Identifier: Apache-2.0
"""Parameters of one request."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffulex_ext import _core

__all__ = ["SamplingParams"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded and when it ends.

    Attributes:
        temperature: 0 is greedy; None takes the engine's default, which is the model family's.
        max_tokens: generated tokens, at least 1.
        max_nfe: cap on the forwards the request takes part in.
        max_repetition_run: equal tokens at the end of the answer that end the request.
        ignore_eos: stop ids do not end the request.
        stop_token_ids: stop ids in addition to those of the model.
        seed: key of the random draws; None derives it from the engine seed and the request id.
        accept_threshold: confidence that accepts a position, for this request only.
        top_p, top_k, min_p: filters; not supported yet, only None is accepted.
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
        for name in ("temperature", "accept_threshold"):
            self._check_number(name)
        if self.accept_threshold is not None and self.accept_threshold > 1:
            raise _illegal("accept_threshold", "a number in [0, 1]", self.accept_threshold)
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**64):
            raise _illegal("seed", "an integer in [0, 2**64)", self.seed)
        for token in self.stop_token_ids:
            if not _is_int(token) or not 0 <= token < 2**31:
                raise _illegal("stop_token_ids", "token ids >= 0", token)
        for name, legal in (("top_p", "(0, 1]"), ("top_k", ">= 1"), ("min_p", "[0, 1]")):
            value = getattr(self, name)
            if value is not None:
                raise ValueError(
                    f"SamplingParams.{name}: only None is supported so far (documented range:"
                    f" {legal}), got {value!r}"
                )

    def _check_number(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise _illegal(name, "a finite number >= 0", value)

    def to_core(self, default_temperature: float) -> _core.SamplingParams:
        """Parameters of the C++ core."""
        from diffulex_ext import _core  # noqa: PLC0415

        temperature = default_temperature if self.temperature is None else self.temperature
        return _core.SamplingParams(
            temperature=float(temperature),
            max_tokens=self.max_tokens,
            max_nfe=self.max_nfe or 0,
            max_repetition_run=self.max_repetition_run or 0,
            ignore_eos=self.ignore_eos,
            stop_token_ids=list(self.stop_token_ids),
            seed=self.seed,
            accept_threshold=self.accept_threshold,
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _illegal(name: str, expected: str, value: object) -> ValueError:
    return ValueError(f"SamplingParams.{name}: expected {expected}, got {value!r}")
