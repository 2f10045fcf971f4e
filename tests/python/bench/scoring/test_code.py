# SPDX-License-Identifier: Apache-2.0
"""Programs that a model wrote, and what they cannot do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diffulex.bench.scoring import code_worker
from diffulex.bench.scoring.code import code_job, score_code, score_code_definitions
from diffulex.bench.scoring.code_worker import CodeJob, run_job, run_jobs
from diffulex.bench.scoring.confinement import sandbox
from diffulex.bench.scoring.extract import has_mask_leak, program_in
from diffulex.errors import ConfigError
from fixtures.quick import quick

RIGHT = "def f(x):\n    return x + 1\n"
TESTS = ("assert f(1) == 2", "assert f(2) == 3")

VERDICTS = {
    "right": (RIGHT, "pass"),
    "wrong": ("def f(x):\n    return x\n", "assertion"),
    "exit at import": ("import sys; sys.exit(0)\n" + RIGHT, "exit"),
    "hard exit at import": ("import os; os._exit(0)\n" + RIGHT, "exit"),
    "exit in a test": ("def f(x):\n    raise SystemExit\n", "exit"),
    "print at import": ('print("hello")\n' + RIGHT, "pass"),
    "infinite loop": ("while True: pass\n", "timeout"),
    "processes without end": ("import os\nwhile True:\n    os.fork()\n", "exception"),
    "2 GiB": ("x = bytearray(2 << 30)\n" + RIGHT, "memory"),
    "a large file": ("open('x', 'wb').write(b'0' * (32 << 20))\n" + RIGHT, "exception"),
    "syntax error": ("def f(:", "syntax"),
    "wrong name": ("def g(x):\n    return x + 1\n", "exception"),
    "forged verdict": (
        "import os\nprint('0' * 32 + ' pass')\nfor fd in range(20):\n    try:\n"
        "        os.write(fd, b'0' * 32 + b' pass\\n')\n    except OSError:\n        pass\nos._exit(0)\n",
        "exit",
    ),
    "killed by itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "exit"),
}


@pytest.mark.parametrize(
    "name", quick(VERDICTS, ("right", "exit in a test", "infinite loop", "forged verdict"))
)
def test_verdicts(name: str) -> None:
    code, reason = VERDICTS[name]
    assert run_job(CodeJob(code, TESTS, seconds=1.0)).reason == reason


@pytest.mark.slow
def test_the_limit_of_the_processor_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_worker, "_START_SECONDS", 60.0)  # the clock on the wall comes later
    loop = "while True: pass\n"
    assert run_job(CodeJob(loop, TESTS, seconds=0.5)).reason == "timeout"


def test_an_item_without_tests_is_invalid() -> None:
    assert run_job(CodeJob(RIGHT, ())).reason == "invalid_item"


def test_the_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = "import os\nnames = set(os.environ)\n"
    test = "assert 'HF_TOKEN' not in names and len(names) <= 6, names"
    verdict = run_job(CodeJob(code, (test,)))
    assert verdict.reason == "pass", verdict
    assert os.environ["HF_TOKEN"] == "secret"


def test_what_is_printed_is_kept_short() -> None:
    verdict = run_job(CodeJob("print('a' * 100_000)\n" + RIGHT, TESTS))
    assert verdict.reason == "pass"
    assert 0 < len(verdict.stdout) <= 8 << 10


def test_files_stay_in_a_directory_that_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "outside"
    tmp_path.chmod(0o777)
    code = f"open('inside', 'w').close()\ntry:\n    open({str(target)!r}, 'w').close()\nexcept OSError:\n    pass\n"
    assert run_job(CodeJob(code + RIGHT, TESTS)).reason == "pass"
    if sandbox() == "namespace":
        assert not target.exists()
    assert not Path("inside").exists()


def test_a_namespace_has_no_network() -> None:
    if sandbox() != "namespace":
        pytest.skip("no namespaces can be made on this machine")
    test = "import socket\nassert [name for _, name in socket.if_nameindex()] == ['lo']"
    assert run_job(CodeJob("", (test,))).reason == "pass"


def test_programs_over_standard_input() -> None:
    pairs = (("1\n", "2\n"), ("41\n", "42"))
    program = "print(int(input()) + 1)\n"
    assert run_job(CodeJob(program, pairs, "stdio")).reason == "pass"
    assert run_job(CodeJob(program + "raise SystemExit(0)", pairs, "stdio")).reason == "pass"
    assert run_job(CodeJob("print(input())", pairs, "stdio")).reason == "assertion"


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "import sys\nx = sys.stdin.buffer.read()\nsys.stdout.buffer.write(b'%d' % (int(x) + 1))",
        "x = open(0).read()\nprint(int(x) + 1)",
        "import os\nos.write(1, b'%d' % (int(os.read(0, 99)) + 1))",
        "import sys\ninput = sys.stdin.readline\nprint(int(input()) + 1, file=sys.__stdout__)",
        "import sys\nfor line in sys.stdin:\n    print(int(line) + 1)\nsys.stdout.close()",
        "import io, sys\nx = int(input())\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(x + 1)",
        "import subprocess\nprint(int(input()) + 1, flush=True)\nsubprocess.run(['true'], check=True)",
    ],
)
def test_programs_may_use_the_descriptors(program: str) -> None:
    pairs = (("1\n", "2\n"), ("41\n", "42"))
    assert run_job(CodeJob(program, pairs, "stdio")).reason == "pass"
    assert run_job(CodeJob(program, (("1\n", "3\n"),), "stdio")).reason == "assertion"


def test_reasons_of_programs_over_standard_input() -> None:
    pairs = (("1\n", "2\n"),)
    assert run_job(CodeJob("def f(:", pairs, "stdio")).reason == "syntax"
    assert run_job(CodeJob("x = '\0'", pairs, "stdio")).reason in ("syntax", "exception")
    assert run_job(CodeJob("input()\ninput()", pairs, "stdio")).reason == "exception"


def test_an_item_whose_inputs_lack_outputs_is_invalid() -> None:
    doc = {"test_method": "stdio", "test_input": ["1", "2"], "test_output": ["1"]}
    assert run_job(code_job(doc, "print(1)")).reason == "invalid_item"


def test_the_last_words_of_a_program_are_kept() -> None:
    assert run_job(CodeJob("print('hello')\n" + RIGHT, TESTS)).stdout == "hello\n"


@pytest.mark.slow
def test_many_at_a_time_keep_their_order() -> None:
    jobs = [CodeJob(f"x = {i}\n", (f"assert x % 2 == 0 and x == {i}",)) for i in range(5)]
    assert [verdict.reason for verdict in run_jobs(jobs)] == ["pass", "assertion"] * 2 + ["pass"]


def test_the_last_fence_that_is_python_is_the_program() -> None:
    text = (
        "First\n```python\nx = 1\n```\nthen\n```python\nx = 2\n```\nand\n```\nnot python (\n```\n"
    )
    assert program_in(text) == "x = 2"
    assert program_in("```text\nno (\n```") == "no ("
    assert program_in("    return a\n```\nmore", "def f(a):\n") == "def f(a):\n    return a\n"
    assert program_in("```python\nmy\\_name = 1\n```") == "my_name = 1"
    text = "```python\nimport os\nprint('x')\ndef f():\n    return 1\n```"
    assert program_in(text, definitions_only=True) == "import os\n\ndef f():\n    return 1"


USAGE = "```\n\nThis function works. Example:\n\n```python\nprint(f([1]))\n```\n"


def test_an_answer_may_go_on_with_the_fence_of_its_prompt() -> None:
    whole = "def f(x):\n    return x[0]\n"
    assert program_in(whole + USAGE) == whole
    assert program_in("    return x[0]\n" + USAGE, "def f(x):\n") == whole
    assert program_in(whole + "```\n\nExample:\n```\nf([1])\n```", "def f(x):\n") == whole
    doc = {"prefix": "def f(x):\n", "test_list": ["assert f([1]) == 1"]}
    assert score_code(doc, whole + USAGE) == {"exact_match": 1.0}
    # A word before a block is no program, and neither is a block with a language its end.
    assert program_in("Answer\n```\nx = 2\n```") == "x = 2"
    assert program_in("def f(x): is wrong\n```\nx = 2\n```") == "x = 2"
    assert program_in(whole + "```python\nx = 2\n```") == "x = 2"


def test_definitions_nested_too_deeply_stay_as_they_are() -> None:
    code = "x = 1\ndef f():\n    return " + " + ".join("1" * 900) + "\n"
    assert program_in(f"```python\n{code}```", definitions_only=True) == code.strip()


def test_names_of_masks_are_found() -> None:
    assert has_mask_leak("a <|mask|> b")
    assert not has_mask_leak("a mask")


@pytest.mark.parametrize(
    "doc",
    [
        {"test_list": ["assert add(1, 2) == 3"], "test_time_limit": 2, "prefix": ""},
        {"test": "def check(f):\n    assert f(1, 2) == 3\n", "entry_point": "add"},
        {"test_list": ["assert math.floor(add(1, 2)) == 3"], "test_imports": ["import math"]},
    ],
)
def test_item_formats(doc: dict[str, object]) -> None:
    right = "```python\ndef add(a, b):\n    return a + b\n```"
    assert score_code(doc, right) == {"exact_match": 1.0}
    assert score_code_definitions(doc, right + "\n") == {"exact_match": 1.0}
    assert score_code(doc, "```python\ndef add(a, b):\n    return 0\n```") == {"exact_match": 0.0}


def test_the_time_of_an_item_is_scaled() -> None:
    doc = {"test_list": ["pass"], "test_time_limit": 2}
    assert code_job(doc, "x", time_scale=5).seconds == 10


def test_imports_of_the_prompt_belong_to_the_program() -> None:
    doc = {
        "prefix": "from math import floor\n\ndef f(x):\n",
        "test_list": ["assert f(1.5) == 1"],
    }
    answer = "```python\ndef f(x):\n    return floor(x)\n```"
    assert score_code(doc, answer) == {"exact_match": 1.0}
    assert score_code_definitions(doc, answer) == {"exact_match": 1.0}


@pytest.mark.slow
def test_programs_have_no_future_features_of_their_own() -> None:
    # Evaluated as they are written, the annotations name what is not there.
    late = "def f(x: Missing) -> Missing:\n    return x + 1\n"
    assert run_job(CodeJob(late, TESTS)).reason == "exception"
    assert run_job(CodeJob("from __future__ import annotations\n" + late, TESTS)).reason == "pass"
    assert run_job(CodeJob(late, (("1", "2"),), "stdio")).reason == "exception"
    test = "def g(x: Missing): pass"
    assert run_job(CodeJob(RIGHT, (test,))).reason == "exception"


@pytest.mark.slow
@pytest.mark.parametrize("start", ["", '"""Adds."""\n', "# Adds.\n\n"])
@pytest.mark.parametrize("first", ["", "from __future__ import division\n"])
def test_imports_of_the_prompt_come_after_future_ones(start: str, first: str) -> None:
    doc = {
        "prefix": "from math import floor\n" + first + "def f(x):\n",
        "test_list": ["assert f(1.5) == 1"],
    }
    program = "from __future__ import annotations\n\ndef f(x: Missing):\n    return floor(x)\n"
    assert score_code(doc, f"```python\n{start}{program}```") == {"exact_match": 1.0}


def test_tests_may_import_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0 and sandbox() != "namespace":
        pytest.skip("without a namespace another user cannot reach the directory of this test")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed_here.py").write_text("two = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    test = "import installed_here\nassert f(1) == installed_here.two"
    assert [verdict.reason for verdict in run_jobs([CodeJob(RIGHT, (test,))])] == ["pass"]


def test_packages_that_tests_lack_are_an_error() -> None:
    with pytest.raises(ConfigError, match="expected the package no_such_package, which the tests"):
        run_jobs([CodeJob(RIGHT, ("import no_such_package.part",))])
    # A program's own imports are its own affair.
    assert run_jobs([CodeJob("import no_such_package", TESTS)])[0].reason == "exception"


def test_workers_do_not_share_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    busy: set[int] = set()

    def record(job: CodeJob, slot: int) -> code_worker.Verdict:
        assert slot not in busy
        busy.add(slot)
        seen.append(slot)
        busy.discard(slot)
        return code_worker.Verdict("pass")

    monkeypatch.setattr(code_worker, "run_job", record)
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    assert all(verdict.is_passed for verdict in run_jobs([CodeJob("", ("pass",))] * 50))
    assert set(seen) <= set(range(8))
