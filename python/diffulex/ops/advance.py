# SPDX-License-Identifier: Apache-2.0
"""The step between two decode steps: its fake kernel. The decode loop calls the op itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.ops.fakes import UINT8, FakeArguments, fake
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Sequence


@fake("advance_decode")
def _advance_decode(arguments: FakeArguments, layout: Sequence[int]) -> None:
    try:
        sizes = _core.arena_bytes(list(layout))
    except ValueError as error:
        raise RuntimeError(f"diffulex::advance_decode: {error}") from None
    for name, needed in zip(("plan", "output", "batch"), sizes, strict=True):
        arguments.check(name, UINT8, (None,))
        num_bytes = arguments[name].shape[0]
        arguments.require(name, num_bytes >= needed, f"at least {needed} bytes", num_bytes)
    arguments.at_least("num_reqs", 0)
