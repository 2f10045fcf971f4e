# SPDX-License-Identifier: Apache-2.0
"""Every code block of README.md and of the guides is one: commands parse, Python compiles, names exist.

This also holds for what no test can run, because it downloads, needs a GPU or stays. Most blocks are run
as well, by the test of their page.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diffulex.bench.arg_parser import benchmark_config
from diffulex.bench.model_args import decode_model_arg_value
from diffulex.config.table import CONFIG_TABLE
from diffulex.omni.cli import build_parser as omni_parser
from diffulex.server.args import parse_args
from diffulex.tools.cli import asks_for_tasks, build_parser
from diffulex_edge.cli import build_parser as edge_parser
from fixtures.shell_blocks import code_blocks, shell_commands

ROOT = Path(__file__).resolve().parents[3]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
COMMANDS = [(name, words) for name, text in PAGES.items() for words in shell_commands(text)]
#: Programs of others, and what an earlier command of the page has built.
OTHERS = {
    "apt-get", "docker", "echo", "printf", "ray", "serve", "sleep", "sudo", "unzip", "$RUN",
    "./build/my_program", "build/examples/edge_runner/diffulex-edge-run",
}  # fmt: skip
#: Packages that blocks import and that need not be installed here.
OPTIONAL = {"diffusers", "executorch", "langchain_openai", "lm_eval", "openai", "PIL", "ray"}


def check_diffulex(words: list[str]) -> None:
    """The arguments of `diffulex` are accepted by its own parsers."""
    if words[0] == "serve":
        parse_args(words[1:])
    elif words[0] in ("omni", "edge"):
        parser = {"omni": omni_parser, "edge": edge_parser}[words[0]]()
        assert callable(parser.parse_with_file(words[1:]).command)
    elif words[:2] == ["bench", "lm-eval"]:
        arguments = dict(zip(words[2::2], words[3::2], strict=False))
        assert arguments["--model"] == "diffulex"
        keys = dict(pair.split("=") for pair in arguments["--model_args"].split(","))
        assert decode_model_arg_value(keys.pop("pretrained"))
        assert set(keys) <= set(CONFIG_TABLE)
    else:
        if asks_for_tasks(words):
            words = ["bench", *words]
        options = build_parser(words[0]).parse_with_file(words)
        assert callable(options.command)
        if words[:2] == ["bench", "eval"]:
            benchmark_config(options)


def check_python(words: list[str]) -> None:
    """A module or a script of this repository with the flags that it has."""
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
    elif words[0] == "-m" and words[1] == "diffulex.bench":
        check_diffulex(["bench", *words[2:]])
    elif words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert spec is not None
        main = importlib.util.find_spec(f"{words[1]}.__main__") if spec.parent == words[1] else spec
        assert main is not None
        assert main.origin is not None
        check_script([main.origin, *words[2:]])
    else:
        check_script(words)


def check_script(words: list[str]) -> None:
    path = ROOT / words[0]
    text = path.read_text(encoding="utf-8")
    for word in words[1:]:
        flag = word.partition("=")[0]
        if re.match(r"--?\w", flag):
            assert f'"{flag}"' in text or f" {flag} " in text, f"{words[0]}: no {flag}"


def check_pip(words: list[str]) -> None:
    """Extras are those of this package."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    for word in words[1:]:
        for names in re.findall(r"^(?:\.|diffulex)\[(.*)\]$", word):
            for name in names.split(","):
                assert f"\n{name} = [" in "\n" + extras, word


def check_cmake(words: list[str]) -> None:
    presets = json.loads((ROOT / "CMakePresets.json").read_text(encoding="utf-8"))
    lists = [
        ROOT / "CMakeLists.txt",
        *ROOT.glob("cmake/*.cmake"),
        *ROOT.glob("examples/*/CMakeLists.txt"),
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in lists)
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word == "--preset":
            assert value in [preset["name"] for preset in presets["configurePresets"]]
        if word == "--target":
            assert value in text
        if word.startswith(("-DDIFFULEX_", "-DEXECUTORCH_")):
            assert word[2:].partition("=")[0] in text


def check_curl(words: list[str]) -> None:
    """The path is a route of a server, and a body JSON."""
    (url,) = (word for word in words if re.match(r"(http://127.0.0.1|localhost):8000", word))
    path = "/" + url.replace("http://", "").partition("/")[2].partition("?")[0]
    assert any(re.fullmatch(route, path) for route in ROUTES), path
    if "-d" in words:
        assert isinstance(json.loads(words[words.index("-d") + 1]), dict)


def _routes() -> Iterator[str]:
    """Paths in the sources of the servers, as patterns."""
    folders = ("diffulex/server", "diffulex/omni", "diffulex/serving")
    for folder in folders:
        for path in (ROOT / "python" / folder).rglob("*.py"):
            for text in re.findall(r'"(/[\w/{}:]*)"', path.read_text(encoding="utf-8")):
                yield re.sub(r"\{+\w+(:\w+)?\}+", "[^/]+", text)


ROUTES = set(_routes())
CHECKS: dict[str, Callable[[list[str]], None]] = {
    "diffulex": check_diffulex,
    "python": check_python,
    "pip": check_pip,
    "cmake": check_cmake,
    "curl": check_curl,
    "bash": check_script,
    "sh": check_script,
}


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page}-{' '.join(words)[:40]}" for page, words in COMMANDS]
)
def test_commands_are_accepted(
    page: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    monkeypatch.delenv("DIFFULEX_API_KEY", raising=False)
    if "diffulex" in words[1:-1] and words[0] in ("nsys", "ncu"):
        words = words[words.index("diffulex") :]
    if words[0].startswith("scripts/"):
        words = ["bash", *words]
    if words[0] in OTHERS:
        return
    assert words[0] in CHECKS, f"{page}: a command that no test knows"
    CHECKS[words[0]](words[1:])


def test_there_are_commands() -> None:
    """What finds them finds all of them."""
    assert len(COMMANDS) > 120
    found = {page for page, _ in COMMANDS}
    fenced = {
        page for page, text in PAGES.items() if re.search(r"^```(sh|bash|shell)$", text, re.M)
    }
    assert fenced <= found
    assert {"docs/verify.md", "docs/zoo.md", "docs/rl.md"} <= found


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "```python\n" in text])
def test_python_compiles_and_its_names_exist(page: str) -> None:
    blocks = code_blocks(PAGES[page], "python")
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    codes = [compile(block, page, "exec", flags=flags) for block in blocks]
    loaded, stored = set[str](), {*dir(builtins), "__name__", "__file__", "__annotations__"}
    for code in codes:
        for name, is_stored in _global_names(code):
            (stored if is_stored else loaded).add(name)
    assert loaded <= stored, loaded - stored
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            _check_import(node)


def _global_names(code: types.CodeType) -> Iterator[tuple[str, bool]]:
    """Names that code and what it contains load from its module, or store there."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL", "STORE_NAME", "STORE_GLOBAL"):
            yield instruction.argval, instruction.opname.startswith("STORE")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _check_import(node: ast.AST) -> None:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        names = [node.module]
    for name in names:
        package = name.partition(".")[0]
        if package in OPTIONAL and importlib.util.find_spec(package) is None:
            continue
        module = importlib.import_module(name)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{name}.{alias.name}")


def test_every_page_has_a_test_that_runs_what_can_be_run() -> None:
    """A new guide comes with a test of its own: what is parsed here need not do what the text says."""
    tests = [path for path in (ROOT / "tests/python").rglob("*.py") if path != Path(__file__)]
    texts = [path.read_text(encoding="utf-8") for path in tests]
    fenced = {
        page for page, text in PAGES.items() if re.search(r"^```(python|sh|bash)$", text, re.M)
    }
    for page in fenced - {"docs/edge_embed.md"}:  # its programs are built by tests of CMake
        path = Path(page)
        names = (page, f'"{path.name}"', f'"{path.stem}"')
        assert any(name in text for text in texts for name in names), page


#: What the sample of docs/edge_embed.md stands in.
EMBEDDER = """
#include <memory>
#include <vector>
#include "diffulex/edge/session.h"
class MyModel final : public diffulex::EdgeModel {
 public:
  diffulex::EdgeLimits limits() const override { return {}; }
  diffulex::Result<const float*> run(const diffulex::EdgeCall&) override { return nullptr; }
};
void show(const std::vector<int32_t>&);
void sample(const std::vector<int32_t>& prompt_ids) {
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_cpp_of_the_guide_for_embedders_compiles(tmp_path: Path) -> None:
    (code,) = code_blocks(PAGES["docs/edge_embed.md"], "cpp")
    (tmp_path / "sample.cpp").write_text(f"{EMBEDDER}{code}}}\n", encoding="utf-8")
    command = ["g++", "-std=c++17", "-fsyntax-only", "-I", str(ROOT / "include"), "sample.cpp"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_settings_in_files_are_ones(tmp_path: Path) -> None:
    """The YAML of docs/evaluation.md is a file for `bench eval`."""
    (content,) = code_blocks(PAGES["docs/evaluation.md"], "yaml")
    path = tmp_path / "run.yaml"
    path.write_text(content, encoding="utf-8")
    words = ["bench", "eval", "--config", str(path)]
    config = benchmark_config(build_parser("bench").parse_checked(words))
    assert (config.engine.model_name, config.eval.max_tokens) == ("sdar", 1024)
    assert config.engine.decoding_thresholds == {"accept_threshold": 0.95}
