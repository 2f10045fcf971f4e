# SPDX-License-Identifier: Apache-2.0
"""Folders that a setting names by a path or a hub id."""

from __future__ import annotations

import re
from pathlib import Path

from diffulex.errors import ConfigError

__all__ = ["local_folder"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def local_folder(key: str, name: str) -> Path:
    """The folder, read from the hub once where `name` is an id of it.

    Raises:
        ConfigError: there is no such folder, or the hub does not give it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"{key}: expected a directory or a hub id, got {name!r}")
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow to import)

    try:
        return Path(snapshot_download(name))
    except Exception as error:  # of many kinds: no network, no such repository, no rights
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{key}: cannot read {name} from the hub: {reason}") from error
