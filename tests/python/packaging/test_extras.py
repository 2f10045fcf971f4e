# SPDX-License-Identifier: Apache-2.0
"""What an extra installs is what the package imports."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

# Below Python 3.11 pytest itself needs the other.
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).parents[3]
# Distributions whose module has another name.
MODULES = {
    "math-verify": "math_verify",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
}
# How a line of the package imports something.
WAYS = re.compile(r"^\s*(?:import|from) |require\(")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture(scope="module")
def lines() -> str:
    """Those of the package that may import something."""
    packages = (ROOT / "python/diffulex", ROOT / "python/diffulex_edge")
    paths = (path for package in packages for path in package.rglob("*.py"))
    sources = (path.read_text().splitlines() for path in paths)
    return "\n".join(line for source in sources for line in source if re.search(WAYS, line))


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - {"test", "dev"}))
def test_an_extra_has_nothing_that_the_package_does_not_import(extra: str, lines: str) -> None:
    for requirement in EXTRAS[extra]:
        distribution = re.split(r"[\[<>=~! ]", requirement)[0].lower()
        module = re.escape(MODULES.get(distribution, distribution))
        pattern = rf"^\s*(?:import|from) {module}\b|_require\(\"[^\"]+\", \"{module}\"|\brequire\(\"{module}\b"
        assert re.search(pattern, lines, re.MULTILINE), f"{extra}: {distribution}"
