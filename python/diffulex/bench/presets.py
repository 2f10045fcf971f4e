# SPDX-License-Identifier: Apache-2.0
"""The bundled settings, one file a published row."""

from __future__ import annotations

from pathlib import Path

from diffulex.errors import ConfigError

__all__ = ["preset_path", "presets"]

_DIRECTORY = Path(__file__).parent / "configs"


def presets() -> list[str]:
    """The names, sorted."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yml"))


def preset_path(name: str) -> Path:
    """The file of a preset; ConfigError for a name that is none."""
    if name not in presets():
        raise ConfigError(f"preset: expected one of {', '.join(presets())}, got {name!r}")
    return _DIRECTORY / f"{name}.yml"
