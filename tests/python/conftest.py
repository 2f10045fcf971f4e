# SPDX-License-Identifier: Apache-2.0
"""Devices and markers shared by all Python tests.

Tests marked `cuda` and `multi_gpu` are collected everywhere and skip, with the reason, where the
devices are missing.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.processor_time import pytest_runtest_call  # noqa: F401 (a hook)
from fixtures.stage_table import pytest_terminal_summary  # noqa: F401 (a hook)

#: Tests that measure time or wait for what a busy host is slow to do: marked `alone`, they run one after
#: the other, before the rest is spread over processes.
_ALONE = (
    "cli/test_pty.py",
    "packaging/test_import.py",
    "server/test_large_bodies.py",
    "server/test_replica_soak.py",
    "server/test_replicas.py",
    "server_clients/test_curl.py",
    "server_clients/test_hostile_clients.py",
    "server_clients/test_serving_overhead.py",
    "server_clients/test_soak.py",
    "ui/test_modules.py",
)
#: Tests that start programs, ranks, servers or pages, most for a second or more: marked `slow` together.
_SLOW = (
    "cli/test_cli.py",
    "cli/test_interruption.py",
    "cli/test_pty.py",
    "distributed/test_coupled.py",
    "docs/test_metrics.py",
    "docs/test_readme.py",
    "docs/test_serving.py",
    "engine/test_ranks.py",
    "engine/test_ranks_zoo.py",
    "server/test_backend_process.py",
    "server/test_large_bodies.py",
    "server/test_launch.py",
    "server/test_replica_soak.py",
    "server/test_replicas.py",
    "server_clients",
    "ui/test_conversation.py",
    "ui/test_page.py",
    "ui/test_use.py",
)


def pytest_sessionstart() -> None:
    """The compiled package is what the tests are about: without it there is nothing to skip to."""
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _draw_the_same_examples()
    # A fifth of the time in which tests are collected went into looking for garbage among them.
    gc.disable()
    try:
        import diffulex_ext
    except ImportError as error:
        raise pytest.UsageError(f"diffulex_ext: expected a built package, got {error}") from error
    if not diffulex_ext.has_ops:
        raise pytest.UsageError("diffulex_ext: expected the op library, got none (torch missing?)")


def _draw_the_same_examples() -> None:
    """Hypothesis tries the same in every run, however long a busy host takes for each."""
    try:
        from hypothesis import HealthCheck, settings
    except ImportError:
        return  # of the extra `test`
    slow = [HealthCheck.too_slow]
    name = "diffulex"
    settings.register_profile(
        name, derandomize=True, database=None, deadline=None, suppress_health_check=slow
    )
    settings.load_profile(name)


@functools.cache
def _missing_cuda() -> str | None:
    """Why tests cannot use CUDA in this process; None if they can."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("diffulex::rms_norm", "CUDA"):
        return "the op library was built without CUDA"
    return None


@functools.cache
def _num_cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


@functools.cache
def _marks_of(path: Path) -> list[str]:
    """Marks of all tests of the file at `path`: there are thousands of tests and few files."""
    here = Path(__file__).parent
    above = {path, *path.parents}
    marks = {"alone": _ALONE, "slow": _SLOW}
    return [mark for mark, names in marks.items() if any(here / name in above for name in names)]


@functools.cache
def _may_be_alone(path: Path) -> bool:
    """Whether a file says that tests of it are marked `alone`."""
    return "alone" in _marks_of(path) or "mark.alone" in path.read_text(encoding="utf-8")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m alone` reads the few files that have such tests: all of them take ten seconds."""
    is_file = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr != "alone" or not is_file or _may_be_alone(collection_path):
        return None
    return True


def pytest_collection_finish() -> None:
    """Later collections of garbage leave out thousands of tests and the modules, which stay."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)
    _let_records_propagate()


#: Loggers of the process when `_let_records_propagate` last saw them.
_num_loggers = 0


def _let_records_propagate() -> None:
    """Loggers below torch's hand their records to it, instead of writing them as it does.

    pytest adds a handler to every logger that keeps its records to itself, and removes it, three times
    for every test: torch has forty of them, and that took a millisecond of each test. The modules of
    torch that some tests import make more.
    """
    global _num_loggers  # noqa: PLW0603
    loggers = logging.root.manager.loggerDict
    if len(loggers) == _num_loggers:
        return
    _num_loggers = len(loggers)
    for name, logger in loggers.items():
        if isinstance(logger, logging.Logger) and name.startswith("torch."):
            logger.propagate = True
            for handler in list(logger.handlers):
                if type(handler) is logging.StreamHandler:  # not one of pytest's
                    logger.removeHandler(handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    numbers: Counter[str] = Counter()
    for item in items:
        for mark in _marks_of(item.path):
            item.add_marker(mark)
        if item.get_closest_marker("alone") is not None and not _may_be_alone(item.path):
            raise pytest.UsageError(
                f"{item.nodeid}: expected `mark.alone` in its file, got it elsewhere"
            )
        if (every := item.get_closest_marker("every")) is not None:
            test = item.nodeid.partition("[")[0]
            if numbers[test] % every.args[0]:
                item.add_marker("slow")
            numbers[test] += 1
        wants_several = item.get_closest_marker("multi_gpu") is not None
        if not wants_several and item.get_closest_marker("cuda") is None:
            continue
        reason = _missing_cuda()
        if reason is None and wants_several and _num_cuda_devices() < 2:
            reason = f"needs two CUDA devices, torch sees {_num_cuda_devices()}"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    if "PYTEST_XDIST_WORKER" in os.environ:
        _put_slow_files_first(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test or its fixtures draw from torch's own generator does not depend on the tests before."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)


def _put_slow_files_first(items: list[pytest.Item]) -> None:
    """Workers that take file after file end at about the same time: what they take last is short.

    Those that start programs and servers come before all others; tests of many parameters do not count.
    Needs `--no-loadscope-reorder`: pytest-xdist would put files of many tests first, quick ones mostly.
    """
    slow = Counter(
        item.path
        for item in items
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("every") is None
    )
    items.sort(key=lambda item: ("slow" not in _marks_of(item.path), -slow[item.path]))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """Every device the ops run on."""
    return request.param


@pytest.fixture(autouse=True)
def _unchanged_log() -> Iterator[None]:
    """Commands run inside the test process set up its log and name it: later tests must not see that."""
    from diffulex.log import _OwnedHandler, name_process

    _let_records_propagate()
    logger = logging.getLogger("diffulex")
    before = list(logger.handlers), logger.level, _OwnedHandler.handlers
    yield
    name_process("")
    logger.handlers[:], level, _OwnedHandler.handlers = before
    if logger.level != level:  # every change of a level empties the caches of all loggers
        logger.setLevel(level)
