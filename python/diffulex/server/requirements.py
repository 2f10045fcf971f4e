# SPDX-License-Identifier: Apache-2.0
"""Whether the packages of the extra `serve` are installed."""

from __future__ import annotations

from importlib.util import find_spec

from diffulex.errors import ConfigError

__all__ = ["SERVE_MODULES", "check_packages"]

#: Modules of the extra `serve` of pyproject.toml, with the packages that bring them.
SERVE_MODULES = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "httptools": "httptools",
    "pydantic": "pydantic",
    "zmq": "pyzmq",
    "msgpack": "msgpack",
    "msgspec": "msgspec",
    "prometheus_client": "prometheus-client",
    "yaml": "pyyaml",
}


def check_packages() -> None:
    """Raises ConfigError, in one line, when a package that serving needs is missing."""
    missing = [name for name in SERVE_MODULES if find_spec(name) is None]
    if missing:
        # Not `pip install diffulex[serve]`: that asks an index for a package of this name.
        packages = " ".join(SERVE_MODULES[name] for name in missing)
        raise ConfigError(
            "serve: expected the packages of the extra `serve` (pip install '.[serve]' in the source"
            f" directory, or pip install {packages}), got none of {', '.join(missing)}"
        )
