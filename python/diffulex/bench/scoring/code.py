# SPDX-License-Identifier: Apache-2.0
"""Whether the program of an answer passes the tests of its item."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from diffulex.bench.scoring.code_worker import CodeJob, Verdict, run_job
from diffulex.bench.scoring.extract import program_in

__all__ = ["DEFAULT_TIME_SCALE", "code_job", "score_code", "score_code_definitions"]

#: An item's seconds are multiplied by this: a loaded machine is slower than the authors'.
DEFAULT_TIME_SCALE = 3.0


def _tests(doc: Mapping[str, Any]) -> tuple[Any, ...]:
    """Statements, or pairs of input and output, of any of the item formats; none if they do not match."""
    if doc.get("test_method") == "stdio":
        given, printed = doc.get("test_input") or [], doc.get("test_output") or []
        return tuple(zip(given, printed, strict=True)) if len(given) == len(printed) else ()
    if doc.get("test_list"):
        imports = "\n".join(doc.get("test_imports") or [])
        return tuple(f"{imports}\n{test}" for test in doc["test_list"])
    if doc.get("test") and doc.get("entry_point"):
        return (f"{doc['test']}\ncheck({doc['entry_point']})",)
    return ()


def _with_imports(imports: Sequence[str], code: str) -> str:
    """A program with lines before it, but after what it imports from ``__future__``."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        body = []
    ends = [
        node.end_lineno or 0
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    place, lines = max(ends, default=0), code.split("\n")
    first = sorted(imports, key=lambda line: not line.startswith("from __future__"))
    return "\n".join([*lines[:place], *first, *lines[place:]])


def code_job(
    doc: Mapping[str, Any],
    text: str,
    *,
    definitions_only: bool = False,
    time_scale: float = DEFAULT_TIME_SCALE,
) -> CodeJob:
    """The program in an answer with the tests of its item."""
    prefix = str(doc.get("prefix") or "")
    method = "stdio" if doc.get("test_method") == "stdio" else "function"
    code = program_in(text, prefix, definitions_only=definitions_only)
    if method == "function" and not code.startswith(prefix):
        # What the prompt had imported, the answer need not import again.
        imports = [line for line in prefix.splitlines() if line.startswith(("import ", "from "))]
        code = _with_imports(imports, code)
    seconds = float(doc.get("test_time_limit") or 1) * time_scale
    return CodeJob(code, _tests(doc), method, seconds)


def scored(verdict: Verdict) -> dict[str, float]:
    """``exact_match`` of one verdict."""
    return {"exact_match": float(verdict.is_passed)}


def score_code(doc: Mapping[str, Any], text: str) -> dict[str, float]:
    """``exact_match`` of one answer; runs it."""
    return scored(run_job(code_job(doc, text)))


def score_code_definitions(doc: Mapping[str, Any], text: str) -> dict[str, float]:
    """As `score_code`, of the definitions of the program alone."""
    return scored(run_job(code_job(doc, text, definitions_only=True)))
