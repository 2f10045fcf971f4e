# SPDX-License-Identifier: Apache-2.0
"""The configuration table as a whole: its document, and how often a value is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diffulex.config import parse
from diffulex.config.config import Config
from diffulex.config.docs import render_markdown
from diffulex.config.table import check_value


def test_documentation_is_current() -> None:
    path = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert path.read_text(encoding="utf-8") == render_markdown(), (
        "run: python -m diffulex.config.docs > docs/configuration.md"
    )


def test_an_option_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def check(name: str, value: Any) -> Any:
        checked.append(name)
        return check_value(name, value)

    monkeypatch.setattr(parse, "check_value", check)
    assert Config.from_kwargs("demo", device="cpu", max_num_reqs=3).scheduler.max_num_reqs == 3
    assert checked.count("max_num_reqs") == checked.count("device") == 1
