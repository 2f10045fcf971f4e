# SPDX-License-Identifier: Apache-2.0
"""Log set-up, environment variables, lazy import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diffulex import log as dlog
from diffulex.errors import ConfigError


def test_module_loggers_have_no_handlers() -> None:
    logger = dlog.get_logger("diffulex.engine.some")
    assert logger.handlers == []
    assert logger.propagate


def test_text_format_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.txt"
    dlog.configure("debug", file=str(path), json=False, color="always")
    dlog.get_logger("diffulex.engine.x").warning("value %d of [0, 1]", 3)
    text = capsys.readouterr().err
    assert "\x1b[33m" in text
    assert text.rstrip().endswith("value 3 of [0, 1]")
    written = path.read_text()
    assert "\x1b" not in written
    assert " WARNING engine.x value 3 of [0, 1]" in written


def test_json_format(capsys: pytest.CaptureFixture[str]) -> None:
    dlog.configure("info", json=True)
    dlog.success(dlog.get_logger("diffulex.bench"), "done %s", "well")
    record = json.loads(capsys.readouterr().err)
    assert record["msg"] == "done well"
    assert record["event"] == "success"
    assert record["level"] == "info"
    assert record["logger"] == "diffulex.bench"


def test_configure_replaces_its_handlers(capsys: pytest.CaptureFixture[str]) -> None:
    dlog.configure("info")
    dlog.configure("info")
    dlog.get_logger("diffulex.a").info("once")
    assert capsys.readouterr().err.count("once") == 1


def test_bad_level_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"log level: expected one of debug"):
        dlog.configure("loud")
    monkeypatch.setenv("DIFFULEX_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match=r"DIFFULEX_LOG_LEVEL: expected one of .*got 'loud'"):
        dlog.configure()


def test_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = dlog.get_logger("diffulex.once")
    for _ in range(3):
        dlog.warn_once(logger, "key", "said %s", "once")
    assert caplog.text.count("said once") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3723, "1h02m03s"), (123, "2m03s"), (3.2, "3s"), (None, "?"), (float("nan"), "?")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert dlog.format_duration(seconds) == text


def test_import_is_lazy_and_changes_nothing() -> None:
    code = (
        "import logging, signal, sys\n"
        "before = (sys.excepthook, signal.getsignal(signal.SIGINT), logging.root.handlers[:])\n"
        "import diffulex\n"
        "assert not {'torch', 'transformers', 'diffulex_ext', 'numpy'} & set(sys.modules)\n"
        "assert before == (sys.excepthook, signal.getsignal(signal.SIGINT), logging.root.handlers)\n"
        "from diffulex import SamplingParams, ConfigError\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'Diffulex', 'SamplingParams', '__version__'} <= set(dir(diffulex))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attribute() -> None:
    import diffulex
    import diffulex.errors

    for module in (diffulex, diffulex.errors):
        with pytest.raises(AttributeError, match=r"no attribute 'nothing'"):
            _ = module.nothing
