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


@pytest.fixture
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of an earlier test may not be collected yet."""
    monkeypatch.setattr(dlog._Process, "num_groups", 0)


@pytest.mark.usefixtures("_no_ranks")
def test_lines_name_their_process(capsys: pytest.CaptureFixture[str]) -> None:
    logger = dlog.get_logger("diffulex.engine")
    dlog.configure("info", json=False)
    logger.info("alone")
    dlog.name_process("router")
    logger.info("one of several")
    with dlog.part_named("replica 1"):
        logger.info("for another")
    logger.info("back")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("INFO ")[1].strip() for line in lines] == [
        "engine alone", "engine[router] one of several", "engine[replica 1] for another",
        "engine[router] back",
    ]  # fmt: skip
    dlog.configure("info", json=True)
    logger.info("as an object")
    line = capsys.readouterr().err.strip()
    assert dlog.is_json_line(line)
    assert not dlog.is_json_line(lines[0])
    assert (json.loads(line)["process"], json.loads(line)["rank"]) == ("router", 0)
    assert dlog.log_settings() == ("info", True)


@pytest.mark.usefixtures("_no_ranks")
def test_the_first_of_several_ranks_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    logger = dlog.get_logger("diffulex.engine")
    dlog.configure("info", json=False)
    dlog.lead_ranks(1)
    dlog.lead_ranks(1)
    logger.info("two groups")
    dlog.lead_ranks(-1)
    dlog.name_process("backend")
    logger.info("one left")
    dlog.lead_ranks(-1)
    logger.info("none")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("INFO ")[1].strip() for line in lines] == [
        "engine[rank 0] two groups", "engine[backend, rank 0] one left", "engine[backend] none",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["one", "another"])
def test_names_end_with_their_test(name: str) -> None:
    """What runs in the test process names it as its own would be, and the next test must not see that."""
    assert dlog._Process.name == ""
    dlog.name_process(name, 1)


def test_further_ranks_are_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = dlog.get_logger("diffulex.engine")
    dlog.name_process("r1", 1)
    for value, expected in (("0", ["w"]), ("1", ["i", "w"])):
        monkeypatch.setenv("DIFFULEX_LOG_ALL_RANKS", value)
        dlog.configure("info")
        logger.info("i")
        logger.warning("w")
        assert [line[-1] for line in capsys.readouterr().err.splitlines()] == expected
    dlog.configure("error")
    logger.warning("w")
    assert capsys.readouterr().err == ""


def test_a_class_has_the_logger_of_its_module() -> None:
    class Own(dlog.LoggerMixin):
        pass

    assert Own().logger is dlog.get_logger(__name__)


def test_older_programs_may_turn_colour_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda stream: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for use_rich in (True, False):
        dlog.setup_logger("diffulex.bench", "info", use_rich=use_rich).warning("x")
        assert ("\x1b" in capsys.readouterr().err) is use_rich


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


def test_prompts_are_logged_only_where_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = []

    def prompt() -> str:
        made.append("x" * 250)
        return made[-1]

    logger = dlog.get_logger("diffulex.engine.prompts")
    for level, allowed in (("DEBUG", ""), ("DEBUG", "0"), ("INFO", "1")):
        caplog.set_level(level, logger="diffulex")
        monkeypatch.setenv("DIFFULEX_LOG_PROMPTS", allowed)
        dlog.log_prompt(logger, "request 3:", prompt)
        assert made == []
    caplog.set_level("DEBUG", logger="diffulex")
    dlog.log_prompt(logger, "request 3:", prompt)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("DEBUG", f"request 3: prompt='{'x' * 200}'")
    monkeypatch.setenv("DIFFULEX_LOG_PROMPTS", "yes")
    with pytest.raises(ConfigError, match="DIFFULEX_LOG_PROMPTS: expected one of 0, 1, got 'yes'"):
        dlog.log_prompt(logger, "request 3:", prompt)


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
