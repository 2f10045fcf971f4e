# SPDX-License-Identifier: Apache-2.0
"""The program in an answer."""

from __future__ import annotations

import ast
import re

__all__ = ["has_mask_leak", "program_in"]

#: A block with its end, or one at the end of the text that at least names its language.
_FENCE = re.compile(
    r"```[ \t]*[\w+-]*[ \t]*\n(.*?)\n?[ \t]*```|```[ \t]*[\w+-]+[ \t]*\n(.*)\Z", re.DOTALL
)
#: The end of a block that the prompt began.
_END = re.compile(r"[ \t]*```[ \t]*(?:\n|\Z)")
_MASK = re.compile(r"<\|?mask\|?>|\[MASK\]", re.IGNORECASE)
_TOP_LEVEL = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def has_mask_leak(text: str) -> bool:
    """Whether the name of a mask token stands in a finished answer."""
    return _MASK.search(text) is not None


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _defines(code: str) -> bool:
    """Whether a text is a program with a function or a class."""
    if not _parses(code):
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) for node in ast.parse(code).body)


def _continued(text: str, prefix: str) -> str | None:
    """The program before the first fence, if that closes the block that the prompt began."""
    start = text.find("```")
    line = text.rfind("\n", 0, start) + 1
    if start <= 0 or not _END.match(text, line):
        return None
    head = text[:line]
    return next((code for code in (head, prefix + head) if _defines(code)), None)


def _definitions(code: str) -> str:
    """Imports, functions and classes of a program; the whole text if it has none."""
    try:
        kept = [node for node in ast.parse(code).body if isinstance(node, _TOP_LEVEL)]
        return "\n\n".join(ast.unparse(node) for node in kept) if kept else code
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code


def program_in(text: str, prefix: str = "", *, definitions_only: bool = False) -> str:
    """The last fenced block that is Python, else the last fenced block, else `prefix` and the text
    up to a closing fence. An answer that goes on with a block of the prompt begins with its program.

    Args:
        text: the answer.
        prefix: what the prompt had begun, for answers that go on with it.
        definitions_only: keep imports, functions and classes, and no other statement.
    """
    text = text.replace("\\_", "_")
    fences: list[str] = [whole or cut for whole, cut in _FENCE.findall(text)]
    programs = [code for code in fences if _parses(code)]
    if (continued := _continued(text, prefix)) is not None:
        code = continued
    elif programs:
        code = programs[-1]
    elif fences:
        code = fences[-1]
    else:
        code = prefix + text.partition("```")[0]
    return _definitions(code) if definitions_only else code
