# SPDX-License-Identifier: Apache-2.0
"""`tests/house/measure.py`: the tree keeps its limits, and the figures mean what they say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "house" / "measure.py"
_SPEC = importlib.util.spec_from_file_location("measure", SCRIPT)
assert _SPEC is not None
assert _SPEC.loader is not None
measure = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = measure  # dataclasses look their module up
_SPEC.loader.exec_module(measure)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with one op, one long function, and an arrow from `env` up to `engine`."""
    sources = {
        "csrc/a.cpp": "// act_and_mul\nvoid f() {\n" + "  ++x;\n" * 59 + "}\n",
        "csrc/b.cpp": "int g(int a = {}) { return act_and_mul(a); }\n",
        "python/diffulex/env.py": '"""act_and_mul."""\nimport diffulex.engine.engine  # act_and_mul\n',
        "python/diffulex/engine/__init__.py": "",
        "python/diffulex/engine/engine.py": "def f() -> None:\n    from diffulex import env\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    return tmp_path


@pytest.mark.slow
def test_tree_keeps_its_limits() -> None:
    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert [line for line in measure.LIMITS if line not in result.stdout] == []


def test_document_has_the_goals_and_keeps_the_limits() -> None:
    text = (Path(__file__).parents[3] / "docs/architecture.md").read_text(encoding="utf-8")
    _, table = text.split("| To add or to read |")
    rows = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()[2:]]
    assert [row[-1].replace(",", "") for row in rows] == [x.goal for x in measure.LIMITS.values()]
    for (name, limit), row in zip(measure.LIMITS.items(), rows, strict=True):
        assert int(row[-2].replace(",", "")) <= limit.today, name


def test_counts_code_and_not_comments(tree: Path) -> None:
    rows = measure.measure(tree)
    assert rows["files of an op"] == (1, ["csrc/b.cpp"])
    assert rows["long functions"] == (1, ["csrc/a.cpp:2 (61 lines)"])
    assert rows["rooms in circles"] == (2, ["engine", "env"])
    assert rows["upward arrows"] == (1, ["env -> engine (python/diffulex/env.py:2)"])
    assert rows["product files"] == (5, [])


def test_fails_above_a_limit_and_names_the_places(tree: Path) -> None:
    for i in range(20):
        (tree / f"csrc/op_{i}.h").write_text("Status act_and_mul();\n")
    result = run("--root", str(tree))
    limit = measure.LIMITS["files of an op"].today
    assert result.returncode == 1
    assert f"files of an op: expected at most {limit}, got 21" in result.stderr
    assert "csrc/op_19.h" in result.stderr


def test_a_room_needs_a_place_in_the_order(tree: Path) -> None:
    (tree / "python/diffulex/attic.py").write_text("import diffulex.env\n")
    with pytest.raises(ValueError, match=r"expected rooms of the order.*attic"):
        measure.measure(tree)


def test_finds_the_bodies_of_cpp_functions() -> None:
    text = """\
namespace a {
constexpr int kTable[] = {1, 2};
struct S {
  S() : x_{1}, y_(2) {
  }
  int get() const { return x_; }  // }
  int x_{0};
};
template <typename T>
auto f(T t) -> int {
  auto g = [&] {
    return '{';
  };
  #define BRACE {
  return g(R"({)", "\\"{");
}
}  // namespace a
"""
    assert list(measure.cpp_functions(text)) == [(4, 5), (6, 6), (10, 16)]


def test_finds_the_bodies_of_python_functions() -> None:
    text = 'def f(\n    a: int,\n) -> int:\n    """Doc."""\n    return a\n'
    assert list(measure.python_functions(text)) == [(5, 5)]
