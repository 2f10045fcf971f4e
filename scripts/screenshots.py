#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the pictures of docs/pictures.md: the site, the help and the notebook, as they are now.

    mkdocs build --site-dir build/site
    python scripts/screenshots.py [--site build/site] [--out docs/images]

Needs diffulex, playwright, nbconvert and ipykernel, and a Chromium on PATH. The notebook is executed.
"""

from __future__ import annotations

import argparse
import html
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "python" / "first_steps.ipynb"
#: What a picture may weigh, as docs are downloaded with the sources.
MAX_BYTES = 150 * 1024
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #1b1f27; }}
pre {{ margin: 16px; color: #d8dee9; font: 14px/1.35 "DejaVu Sans Mono", monospace; }}
</style><pre>$ {command}\n{output}</pre>"""


def terminal_page(folder: Path, *arguments: str) -> Path:
    """A command of diffulex and what it prints on 80 columns."""
    output = subprocess.run(
        [sys.executable, "-m", "diffulex", *arguments],
        env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    page = folder / "terminal.html"
    command = " ".join(("diffulex", *arguments))
    text = _TERMINAL.format(command=html.escape(command), output=html.escape(output))
    page.write_text(text, encoding="utf-8")
    return page


def notebook_page(folder: Path) -> Path:
    """The example notebook with what its cells showed."""
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--execute", "--output-dir"]
    subprocess.run([*command, str(folder), str(NOTEBOOK)], check=True)
    return folder / f"{NOTEBOOK.stem}.html"


def take(
    browser: Any,
    page: Path,
    target: Path,
    *,
    dark: bool = False,
    height: int = 760,
    full: bool = False,
) -> None:
    """A picture of a page, refused where it is too heavy."""
    opened = browser.new_page(
        viewport={"width": 1000, "height": height}, color_scheme="dark" if dark else "light"
    )
    opened.goto(page.resolve().as_uri())
    opened.wait_for_load_state("networkidle")
    opened.screenshot(path=target, full_page=full)
    opened.close()
    if target.stat().st_size > MAX_BYTES:
        raise SystemExit(
            f"{target}: expected at most {MAX_BYTES} bytes, got {target.stat().st_size}"
        )
    print(f"{target}: {target.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 (not needed for --help)

    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        raise SystemExit(f"screenshots: expected one of {', '.join(_BROWSERS)} on PATH, got none")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for picture, page, settings in (
            ("site.png", options.site / "choosing_a_strategy.html", {}),
            ("site_api.png", options.site / "api.html", {"dark": True}),
            ("help.png", terminal_page(folder, "--help"), {"full": True, "height": 100}),
            ("notebook.png", notebook_page(folder), {"height": 1100}),
        ):
            take(browser, page, options.out / picture, **settings)
        browser.close()


if __name__ == "__main__":
    main()
