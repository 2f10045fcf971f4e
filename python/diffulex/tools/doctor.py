# SPDX-License-Identifier: Apache-2.0
"""What is installed and whether it works: build, devices, a self-test on each device."""

from __future__ import annotations

import functools
import json
import platform
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one self-test."""

    device: str
    name: str
    is_ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Facts about the installation and the outcome of every self-test."""

    facts: Mapping[str, Any]
    checks: tuple[Check, ...]

    @property
    def is_healthy(self) -> bool:
        return all(check.is_ok for check in self.checks)

    def to_json(self) -> str:
        checks = [asdict(check) for check in self.checks]
        content = {"facts": dict(self.facts), "checks": checks, "is_healthy": self.is_healthy}
        return json.dumps(content, indent=2, default=str)

    def to_text(self) -> str:
        lines = []
        for key, value in self.facts.items():
            if isinstance(value, dict):
                lines += [f"{key}:", *(f"  {name}: {item}" for name, item in value.items())]
            else:
                lines.append(f"{key}: {value}")
        for check in self.checks:
            outcome = "ok" if check.is_ok else "FAILED"
            detail = f" ({check.detail})" if check.detail else ""
            lines.append(f"self-test {check.device} {check.name}: {outcome}{detail}")
        lines.append("healthy" if self.is_healthy else "broken: see the failed self-tests")
        return "\n".join(lines)


def examine() -> DoctorReport:
    """Collects the facts and runs every self-test; failures become checks, not exceptions."""
    facts: dict[str, Any] = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
    }
    checks: list[Check] = []
    build = _attempt(checks, "-", "import diffulex_ext", _build_facts)
    devices = _attempt(checks, "-", "import torch", _device_facts)
    facts.update({"build": build or {}}, **(devices or {}))
    if build is not None and devices is not None:
        tests = _attempt(checks, "-", "load the ops", _self_tests) or {}
        for device in ("cpu", *devices["cuda devices"]):
            for name, test in tests.items():
                _attempt(checks, device, name, functools.partial(test, device))
    return DoctorReport(facts, tuple(checks))


def _self_tests() -> Mapping[str, Callable[[str], str]]:
    from diffulex.tools.self_test import SELF_TESTS  # noqa: PLC0415 (failing to import it is a finding)

    return SELF_TESTS


def _attempt(checks: list[Check], device: str, name: str, action: Callable[[], Any]) -> Any | None:
    """Runs `action`, records the outcome, returns its result or None."""
    try:
        result = action()
    except Exception as error:  # whatever fails, the remaining tests still say something
        lines = str(error).strip().splitlines() or [type(error).__name__]
        checks.append(Check(device, name, is_ok=False, detail=lines[0]))
        return None
    detail = result if isinstance(result, str) else ""
    checks.append(Check(device, name, is_ok=True, detail=detail))
    return result


def _build_facts() -> dict[str, Any]:
    import diffulex_ext  # noqa: PLC0415 (failing to import it is a finding)

    return dict(diffulex_ext.build_info())


def _device_facts() -> dict[str, Any]:
    import torch  # noqa: PLC0415 (failing to import it is a finding)

    names = {
        f"cuda:{index}": torch.cuda.get_device_name(index)
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    }
    return {
        "torch": torch.__version__,
        "torch cuda": torch.version.cuda or "none",
        "cpu threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cuda devices": names,
    }
