# SPDX-License-Identifier: Apache-2.0
"""Pages of the site that are no files of docs/: the README, other READMEs, the API reference.

Links are written for the source tree; here they lead to pages, and to nothing where the site has no page.
"""

from __future__ import annotations

import ast
import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
#: Page -> file of the tree.
PAGES = {"index.md": ROOT / "README.md", "benchmarks.md": ROOT / "benchmarks/results/README.md"}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages."""
    for uri, path in PAGES.items():
        files.append(File.generated(config, uri, content=path.read_text(encoding="utf-8")))
    files.append(File.generated(config, "api.md", content=_api()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links within the tree into links within the site."""
    source = PAGES.get(page.file.src_uri, DOCS / page.file.src_uri)
    known = {path.resolve(): uri for uri, path in PAGES.items()}
    known |= {(DOCS / file.src_uri).resolve(): file.src_uri for file in files}

    def linked(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        name, _, heading = target.partition("#")
        if "://" in target or not name:
            return match[0]
        uri = known.get((source.parent / name).resolve())
        if uri is None:
            if not (source.parent / name).exists():
                return match[0]  # which is then reported
            return text
        place = os.path.relpath(uri, os.path.dirname(page.file.src_uri) or ".")
        return f"{mark}[{text}]({place}{'#' if heading else ''}{heading})"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(linked, part) for part in parts)


def _api() -> str:
    """One heading per public name of the package, where it is defined."""
    tree = ast.parse((ROOT / "python/diffulex/__init__.py").read_text(encoding="utf-8"))
    modules = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diffulex")
        for alias in node.names
    }
    entries = "\n".join(f"::: {modules[name]}.{name}\n" for name in sorted(modules))
    return f"# API\n\nEvery name of the package `diffulex`.\n\n{entries}"
