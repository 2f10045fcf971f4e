# SPDX-License-Identifier: Apache-2.0
"""What a verification found: one line a rule."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Finding", "Report", "RuleError"]


class RuleError(Exception):
    """A rule does not hold; the text says what was expected and what came."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one rule."""

    rule: str
    is_ok: bool
    detail: str

    def to_text(self) -> str:
        """One line."""
        return f"{'pass' if self.is_ok else 'FAIL'}  {self.rule}: {self.detail}"


@dataclass(slots=True)
class Report:
    """The outcomes so far.

    Attributes:
        model: as it was given.
        show: receives the line of each finding at once.
    """

    model: str
    show: Callable[[str], None] | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_passed(self) -> bool:
        """Whether every rule holds."""
        return all(finding.is_ok for finding in self.findings)

    def failed(self) -> list[str]:
        """Names of the rules that do not hold."""
        return [finding.rule for finding in self.findings if not finding.is_ok]

    def check(self, rule: str, test: Callable[[], str]) -> bool:
        """Runs a test, which returns what it saw, and notes its outcome; any error is a failure."""
        try:
            finding = Finding(rule, True, test())
        except RuleError as broken:
            finding = Finding(rule, False, str(broken))
        except Exception as error:  # whatever breaks, the other rules still say something
            text = " ".join(str(error).split())
            finding = Finding(rule, False, f"{type(error).__name__}: {text}")
        self.findings.append(finding)
        if self.show is not None:
            self.show(finding.to_text())
        return finding.is_ok

    def to_json(self) -> str:
        """One object."""
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        content = {"model": self.model, "is_passed": self.is_passed, "findings": findings}
        return json.dumps(content, indent=2)
