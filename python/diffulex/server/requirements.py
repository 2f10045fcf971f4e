# SPDX-License-Identifier: Apache-2.0
"""Whether the packages of the extra `serve` are installed."""

from __future__ import annotations

from importlib.util import find_spec

from diffulex.errors import ConfigError

__all__ = ["SERVE_MODULES", "check_packages"]

#: Modules of the extra `serve` of pyproject.toml.
SERVE_MODULES = (
    "fastapi",
    "uvicorn",
    "pydantic",
    "zmq",
    "msgpack",
    "msgspec",
    "prometheus_client",
    "yaml",
)


def check_packages() -> None:
    """Raises ConfigError, in one line, when a package that serving needs is missing."""
    missing = [name for name in SERVE_MODULES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "serve: expected the packages of the extra `serve` (pip install 'diffulex[serve]'),"
            f" got none of {', '.join(missing)}"
        )
