# SPDX-License-Identifier: Apache-2.0
"""Relative links of the documents lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)


def relative_links(text: str) -> list[str]:
    """Targets of inline links outside code blocks, without those of the web."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose)
    return [target for target in targets if "://" not in target]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path: Path) -> None:
    for link in relative_links(path.read_text(encoding="utf-8")):
        target, _, heading = link.partition("#")
        file = (path.parent / target) if target else path
        assert file.exists(), f"{path.relative_to(ROOT)}: {link}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{path.relative_to(ROOT)}: {link}"


def test_every_document_is_linked() -> None:
    """A newcomer who follows links from README.md reaches each document."""
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        if path in reached or not path.is_file():
            continue
        reached.add(path)
        if path.suffix == ".md":
            links = relative_links(path.read_text(encoding="utf-8"))
            waiting += [(path.parent / link.partition("#")[0]).resolve() for link in links]
    missing = {path for path in ROOT.glob("docs/*.md") if path not in reached}
    assert missing == set()


def test_pictures_are_light() -> None:
    """Docs are downloaded with the sources; scripts/screenshots.py refuses heavier ones."""
    text = (ROOT / "docs/pictures.md").read_text(encoding="utf-8")
    names = re.findall(r"\((images/[^)]+)\)", text)
    assert len(names) == 8
    assert all(0 < (ROOT / "docs" / name).stat().st_size <= 150 * 1024 for name in names)
