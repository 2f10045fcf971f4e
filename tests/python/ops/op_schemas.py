# SPDX-License-Identifier: Apache-2.0
"""The schemas that csrc/ops/ops.def expands to; run as a program, records them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import torch

import diffulex_ext

#: The record, relative to the repository root.
RECORD = "tests/data/op_schemas.txt"


def names(root: Path) -> list[str]:
    """Every op in the order of the list."""
    rows = (root / "csrc/ops/ops.def").read_text("utf-8")
    return re.findall(r"^DIFFULEX_(?:CPU_|CUDA_|SM90_)?OP\((\w+),", rows, re.MULTILINE)


def text(root: Path) -> str:
    """All registered schemas in the order of the list, wrapped at the width of the sources."""
    assert diffulex_ext.has_ops
    schemas = [str(getattr(torch.ops.diffulex, name).default._schema) for name in names(root)]
    return "\n\n".join(_wrapped(schema) for schema in schemas) + "\n"


def _wrapped(schema: str) -> str:
    """Lines that break between arguments only."""
    inside = re.sub(r"(?<!,) ", "\0", schema)
    lines = textwrap.wrap(inside, 100, subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


if __name__ == "__main__":
    repository = Path(__file__).resolve().parents[3]
    (repository / RECORD).write_text(text(repository), encoding="utf-8")
