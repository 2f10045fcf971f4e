# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that run lm-eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.lm_eval_tasks import write_tasks


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return folder


@pytest.fixture
def without_the_tasks_of_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading its thousands of task files takes longer than everything else here."""
    from lm_eval.tasks import TaskManager

    real = TaskManager.__init__

    def short(self: Any, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **{**options, "include_defaults": False})

    monkeypatch.setattr(TaskManager, "__init__", short)
