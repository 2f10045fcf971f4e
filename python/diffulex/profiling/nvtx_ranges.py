# SPDX-License-Identifier: Apache-2.0
"""Stages of a step as NVTX ranges, for Nsight Systems and Nsight Compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from diffulex.profiling.scopes import Instrument, Stage

__all__ = ["NvtxRanges", "nvtx_package"]

_DOMAIN = "diffulex"


def nvtx_package() -> ModuleType | None:
    """The package nvtx; None where it is not installed."""
    try:
        import nvtx  # noqa: PLC0415 (of the extra `profile`)
    except ImportError:
        return None
    return nvtx  # type: ignore[no-any-return]


class NvtxRanges:
    """Opens a range for each stage, named after it, in the domain `diffulex`.

    The payload of `step` is its number, of `prepare_reqs_for_execution` the number of requests, of
    `model_runner_run` the number of query rows.

    Args:
        instrument: which calls this.

    Raises:
        ConfigError: the package nvtx is not installed.
    """

    def __init__(self, instrument: Instrument) -> None:
        self._instrument = instrument
        package = nvtx_package()
        if package is None:
            raise ConfigError(
                "DIFFULEX_NVTX: expected the package nvtx (pip install '.[profile]' in the source"
                " directory), got none"
            )
        self._domain = package.get_domain(_DOMAIN)
        self._attributes: dict[str, Any] = {}
        self._num_steps = 0

    def __call__(self, stage: Stage) -> AbstractContextManager[object]:
        payload = self._payload(stage, self._instrument.arguments)
        if payload is not None:
            # Its own each time: the domain reads it when the range begins.
            attributes = self._domain.get_event_attributes(message=stage.name, payload=payload)
        else:
            attributes = self._attributes.get(stage.name)
            if attributes is None:
                attributes = self._domain.get_event_attributes(message=stage.name)
                self._attributes[stage.name] = attributes
        return self._range(attributes)

    def _payload(self, stage: Stage, arguments: tuple[Any, ...]) -> int | None:
        if stage.area != "engine":
            return None
        if stage.name == "step":
            self._num_steps += 1
            return self._num_steps - 1
        if stage.name == "prepare_reqs_for_execution":
            return len(arguments[0])
        return int(arguments[0].num_rows) if stage.name == "model_runner_run" else None

    @contextlib.contextmanager
    def _range(self, attributes: Any) -> Iterator[None]:
        self._domain.push_range(attributes)
        try:
            yield
        finally:
            self._domain.pop_range()
