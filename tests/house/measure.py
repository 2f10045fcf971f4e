#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Measures how many places a change has to touch, and holds each figure at its limit.

`python tests/house/measure.py` prints a table and exits with 1 when a figure is above its limit. A
limit is the value at the time it was last lowered: lower it with the change that lowers the figure;
raising one needs a reason in the commit. The goals are those of docs/architecture.md.

Files are those under version control. Only code counts as a mention: comments and docstrings are
taken out first. Functions of Python are measured by `ast`. Those of C++ and CUDA are measured from
the first line of the declaration (a `template` line included) to the closing brace, found by matching
braces in text without comments, literals and preprocessor lines: sources follow clang-format and
have no unbalanced braces in macros, so that this agrees with a parser.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Folders of the product, and the endings of the files in them that are written by hand.
PRODUCT = ("cmake", "csrc", "include", "python")
CPP = (".cpp", ".cu", ".cuh", ".def", ".h", ".inc")
CODE = (*CPP, ".cmake", ".css", ".html", ".js", ".py", ".pyi")
#: Capabilities added after the first measurement, left out of the counts of lines and files.
CAPABILITIES = (
    "csrc/edge/",
    "include/diffulex/edge/",
    # Weights in low precision: their ops, formats and checkpoints.
    "csrc/ops/quant/",
    "include/diffulex/ops/quantize.h",
    "python/diffulex/ops/quantize.py",
    "python/diffulex/quantization/",
    "python/diffulex/checkpoint/join_matrices.py",
    "python/diffulex/checkpoint/low_precision.py",
    "python/diffulex/bench/",
    # Several devices: replicas and their router, ranks of one engine, what GPUs exchange.
    "csrc/ops/comm/",
    "include/diffulex/ops/comm.h",
    "python/diffulex/ops/comm.py",
    "python/diffulex/distributed/",
    "python/diffulex/engine/ranks/",
    "python/diffulex/engine/replicas/",
    "python/diffulex/server/replicas/",
    "python/diffulex/serving/replicas/",
    "python/diffulex/likelihood/",
    "python/diffulex/omni/",
    "python/diffulex/ray/",
    "python/diffulex/profiling/",
    "python/diffulex/trace/",
    "python/diffulex_bench/",
    "python/diffulex/update/",
    "python/diffulex/verify/",
    "python/diffulex_edge/",
    # The same and more in folders that are counted: codes in the cache and in routed experts, parts
    # of layers and checkpoints, asyncio, responses, files of requests, pages and uploads of images.
    "csrc/ops/attention/generic_codes_",
    "csrc/ops/kv/codes.cuh",
    "csrc/ops/kv/scaled_code.h",
    "csrc/ops/kv/store_codes.",
    "csrc/ops/moe/scaled_moe_cuda.cu",
    "csrc/ops/moe/sm90/scaled_",
    "python/diffulex/arrivals.py",
    "python/diffulex/checkpoint/random_weights.py",
    "python/diffulex/checkpoint/slices.py",
    "python/diffulex/engine/async_llm.py",
    "python/diffulex/engine/live.py",
    "python/diffulex/nn/coupled.py",
    "python/diffulex/nn/dispatch.py",
    "python/diffulex/nn/partition.py",
    "python/diffulex/server/http/multipart.py",
    "python/diffulex/server/openai/responses_",
    "python/diffulex/server/ui/images.",
    "python/diffulex/server/ui/video.js",
    "python/diffulex/tools/distributed_doctor.py",
    "python/diffulex/tools/run_batch.py",
)
MAX_FUNCTION_LINES = 60


#: The rooms of python/diffulex from bottom to top: packages, modules beside them, and modules that
#: stand lower or higher than their package. A room imports only rooms before it.
ORDER = (
    *("errors", "env", "log", "quiet", "registry", "standard_streams", "interruption", "profiling"),
    *("arrivals", "families"),
    *("distributed.shard", "distributed.layout", "distributed.router", "likelihood.rows"),
    "quantization.scheme",
    *("distributed.legality", "distributed.comm", "distributed.records", "quantization.stored"),
    *("config.key", "config.parallel", "strategies.traits", "config.table"),
    *("config.sampling_params", "config.types"),
    *("wire", "strategies", "checkpoint", "ops", "nn"),
    *("quantization", "samplers", "config", "distributed"),
    *(
        "trace",
        "update",
        "likelihood",
        "runner",
        "engine",
        "serving",
        "server",
        "bench",
        "verify",
        "omni",
        "trace.command",
    ),
    *("tools", "ray"),
    # Documented import paths that only pass on what is elsewhere; nothing else imports them.
    *("layers", "model", "sampler", "engine.model_runner"),
    *(f"server.{name}" for name in ("api_server", "backend_worker", "engine_loop", "frontend")),
    *("server.protocol", "server.zmq_queue"),
    "bench.__main__",
    *("diffulex", "__main__"),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One kind of change, measured by an example that is there: files whose code has the pattern."""

    what: str
    example: str
    pattern: str
    #: A larger one of the kind, by its pattern; printed with all files that name it, without a limit.
    larger: str
    #: Files that use the thing without being part of it, as a pattern of paths.
    users: str = "^$"


CHANGES = (
    Change(
        "an op",
        "act_and_mul",
        "act_and_mul|ActAndMul",
        "token_stats",
        users=r"^python/diffulex/((nn|layers|quantization|tools)/|ops/moe\.py|self_test\.py)",
    ),
    Change(
        "a strategy",
        "d2f",
        r"\bd2f\b|D2f|_d2f",
        "fast_dllm_v2",
        # Families, and files of benchmarks, that are decoded by it unless something else is said; the
        # verification, which decodes by it what it compares.
        users=r"^python/diffulex/(families/|bench/(config|zoo_schemes)\.py|verify/)",
    ),
    Change(
        "a model family",
        "stable_diffcoder",
        "stable_diffcoder|StableDiffcoder",
        "diffusion_gemma",
        # How transformers computes it: an oracle, like a fixture.
        users=r"^python/diffulex/verify/reference\.py",
    ),
    Change(
        "a configuration option",
        "decode_headroom",
        "decode_headroom",
        "token_merge_mode",
        # A session for one request sets options of the core.
        users=r"^csrc/edge/",
    ),
    Change(
        "an HTTP request field",
        "denoise_detail",
        "denoise_detail|denoiseDetail",
        "stop_token_ids",
    ),
)


@dataclass(frozen=True, slots=True)
class Limit:
    """What holds today, what the structure is meant to reach, and the step of both."""

    today: int
    goal: str
    #: The figure is rounded up to this, so that a small change needs no new limit.
    step: int = 1


# Written by programs and compared with what they write by tests/python/config/test_keywords.py and
# tests/python/packaging/test_types.py.
GENERATED = (
    "python/diffulex/config/keywords.py",
    "python/diffulex_ext/_arena_arrays.pyi",
    "python/diffulex_ext/_core.pyi",
    "python/diffulex_ext/_engine_options.pyi",
)
LIMITS = {
    "files of an op": Limit(7, "7"),
    "files of a strategy": Limit(3, "3 and the list"),
    "files of a model family": Limit(1, "1 and a fixture"),
    "files of a configuration option": Limit(3, "3"),
    "files of an HTTP request field": Limit(3, "3"),
    "product lines": Limit(92_000, "78000", step=1000),
    "product files": Limit(650, "517", step=10),
    "rooms in circles": Limit(0, "0"),
    "upward arrows": Limit(0, "0"),
    "long functions": Limit(12, "12"),
}


# Files and their code.


def product_files(root: Path) -> list[str]:
    """Product files under version control, or about to be, relative to `root`."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others"]
    listed = subprocess.run(
        [*command, "--exclude-standard", *PRODUCT], cwd=root, check=True, capture_output=True
    )
    names = set(listed.stdout.decode().split("\0"))
    return sorted(
        name
        for name in names
        if name.endswith(CODE)
        and "/vendor/" not in name
        and (root / name).is_file()
        # Nobody edits what is written by a program and compared with it by a test.
        and name not in GENERATED
    )


_CPP_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'""",
    re.DOTALL,
)


def _blank(text: str) -> str:
    """As many line ends as `text` has, and nothing else."""
    return "\n" * text.count("\n")


def without_comments(text: str) -> str:
    """C++, CUDA, JavaScript or CSS without comments; literals and line numbers stay."""
    return _CPP_TOKEN.sub(lambda m: _blank(m[0]) if m[0].startswith("/") else m[0], text)


def python_code(text: str) -> str:
    """Python without comments and docstrings."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(ast.Constant(str()), lineno=first, end_lineno=int(last)):
                lines[first - 1 : last] = ["\n"] * (last - first + 1)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    for token in tokens:
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1] != "\n":
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column] + "\n"
    return "".join(lines)


def code_of(name: str, text: str) -> str:
    """What a file says to its compiler."""
    if name.endswith((".py", ".pyi")):
        return python_code(text)
    if name.endswith((".cmake", "CMakeLists.txt")):
        return re.sub(r"#[^\n]*", "", text)
    return without_comments(text)


# Functions.

_NO_FUNCTION = re.compile(
    r"\b(class|struct|union|enum|namespace)\b[^()]*$|^\s*extern\b[^(]*$|=\s*$"
)
_INITIALISER_LIST = re.compile(r"\)\s*(noexcept\s*)?:(?!:)")


def cpp_functions(text: str) -> Iterator[tuple[int, int]]:
    """Lines of the braces of every function of C++ or CUDA; lambdas belong to the one around them."""
    text = _CPP_TOKEN.sub(lambda m: _blank(m[0]) if m[0][0] == "/" else '""' + _blank(m[0]), text)
    text = re.sub(
        r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: _blank(m[0]), text, flags=re.MULTILINE
    )
    head = at = 0
    while at < len(text):
        char = text[at]
        if char in ";}":
            head = at + 1
        elif char == "{":
            before = text[head:at].rstrip()
            if _INITIALISER_LIST.search(before) and re.search(r"[\w>]$", before):
                at = _closing(text, at)  # a member initialised with braces
            elif "(" in before and not _NO_FUNCTION.search(before):
                end = _closing(text, at)
                yield text.count("\n", 0, at) + 1, text.count("\n", 0, end) + 1
                head, at = end + 1, end
            elif before.endswith("=") or ("=" in before and re.search(r"[\w>\]]$", before)):
                at = _closing(text, at)  # a table
            else:
                head = at + 1
        elif char == ":" and re.search(r"\b(public|private|protected)\s*$", text[head:at]):
            head = at + 1
        at += 1


def _closing(text: str, opening: int) -> int:
    """Position of the brace that closes the one at `opening`."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"cpp_functions: expected a closing brace, got none after {opening}")


def python_functions(text: str) -> Iterator[tuple[int, int]]:
    """First and last line of the body of every function of Python."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            has_more = ast.get_docstring(node, clean=False) is not None and len(node.body) > 1
            assert node.end_lineno is not None
            yield node.body[1 if has_more else 0].lineno, node.end_lineno


def long_functions(sources: Mapping[str, str]) -> list[str]:
    """Functions whose body is too long, the longest first."""
    found = []
    for name, text in sources.items():
        if not name.endswith((".py", *CPP)):
            continue
        functions = python_functions if name.endswith(".py") else cpp_functions
        for first, last in functions(text):
            if last - first + 1 > MAX_FUNCTION_LINES:
                found.append((last - first + 1, f"{name}:{first}"))
    return [f"{place} ({lines} lines)" for lines, place in sorted(found, reverse=True)]


# Rooms and arrows.


def room_of(module: str, order: Sequence[str]) -> str:
    """The room of `diffulex.a.b`: the longest name of the order that `a.b` begins with."""
    inner = module.removeprefix("diffulex.")
    rooms = [room for room in order if inner == room or inner.startswith(f"{room}.")]
    return max(rooms, key=len) if rooms else inner.split(".")[0]


def arrows(sources: Mapping[str, str], order: Sequence[str]) -> dict[tuple[str, str], str]:
    """(importing room, imported room) -> one place. Imports in functions and for types count."""
    modules = {
        ".".join(Path(name.removeprefix("python/")).with_suffix("").parts).removesuffix(".__init__")
        for name in sources
    }
    found: dict[tuple[str, str], str] = {}
    for name, text in sources.items():
        path = Path(name.removeprefix("python/")).with_suffix("")
        if path.parts[0] != "diffulex":
            continue
        source = room_of(".".join(path.parts).removesuffix(".__init__"), order)
        for node in ast.walk(ast.parse(text)):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [module if module in modules else node.module for module in inner]
            for target in targets:
                if target.startswith("diffulex.") and room_of(target, order) != source:
                    place = f"{name}:{getattr(node, 'lineno', 0)}"
                    found.setdefault((source, room_of(target, order)), place)
    return found


def circles(ties: Iterable[tuple[str, str]]) -> list[str]:
    """Rooms that import themselves through others."""
    reach: dict[str, set[str]] = {}
    for source, target in ties:
        reach.setdefault(source, set()).add(target)
        reach.setdefault(target, set())
    for middle, beyond in reach.items():
        for targets in reach.values():
            targets.update(beyond if middle in targets else ())
    return sorted(room for room, targets in reach.items() if room in targets)


def upward(ties: dict[tuple[str, str], str], order: Sequence[str]) -> list[str]:
    """Arrows to a room that is not below; a room without a place in the order is an error."""
    rooms = {room for tie in ties for room in tie}
    if unknown := rooms - set(order):
        raise ValueError(f"measure.py: expected rooms of the order, got {sorted(unknown)}")
    return [
        f"{source} -> {target} ({place})"
        for (source, target), place in sorted(ties.items())
        if order.index(target) > order.index(source)
    ]


# The table.


def measure(root: Path, order: Sequence[str] = ORDER) -> dict[str, tuple[int, list[str]]]:
    """Row -> its value and the places behind it."""
    files = product_files(root)
    text = {name: (root / name).read_text(encoding="utf-8") for name in files}
    rows: dict[str, tuple[int, list[str]]] = {}

    def files_with(pattern: str, users: str = "^$") -> list[str]:
        return [
            name
            for name in files
            if re.search(pattern, text[name])
            and re.search(pattern, code_of(name, text[name]))
            and not re.search(users, name)
        ]

    for change in CHANGES:
        places = files_with(change.pattern, change.users)
        rows[f"files of {change.what}"] = len(places), places
        places = files_with(change.larger)
        rows[f"files that name {change.larger}"] = len(places), places
    counted = [name for name in files if not name.startswith(CAPABILITIES)]
    lines = sum(text[name].count("\n") for name in counted)
    ties = arrows({name: text[name] for name in files if name.endswith(".py")}, order)
    for row, places in {
        "rooms in circles": circles(ties),
        "upward arrows": upward(ties, order),
        "long functions": long_functions(text),
    }.items():
        rows[row] = len(places), places
    return rows | {"product lines": (lines, []), "product files": (len(counted), [])}


def rounded(row: str, value: int) -> int:
    """The value as it is compared with its limit."""
    step = LIMITS[row].step
    return -(-value // step) * step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--order", help="rooms of that checkout from bottom to top")
    parser.add_argument("--places", action="store_true", help="list what was counted")
    options = parser.parse_args()
    order = options.order.split() if options.order else ORDER
    failures = []
    print(f"{'':32} {'today':>7} {'limit':>7}  goal")
    rows = measure(options.root, order)
    for row, limit in LIMITS.items():
        value, places = rows[row]
        print(f"{row:32} {value:7} {limit.today:7}  {limit.goal}")
        if options.places and places:
            print(*(f"    {place}" for place in places), sep="\n")
        if rounded(row, value) > limit.today:
            failures.append(f"measure.py: {row}: expected at most {limit.today}, got {value}")
            failures += [f"    {place}" for place in places]
    for change in CHANGES:
        print(
            f"{f'files that name {change.larger}':32} {rows[f'files that name {change.larger}'][0]:7}"
        )
    print(*failures, sep="\n", end="", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
