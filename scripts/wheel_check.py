# SPDX-License-Identifier: Apache-2.0
"""Checks an installed wheel: its name, its metadata, and its core without torch.

    python scripts/wheel_check.py FILE.whl

Run by scripts/wheel.sh in an environment that has the wheel and nothing else.
"""

from __future__ import annotations

import email
import os
import sys
import zipfile
from pathlib import Path

_FIELDS = (
    "Summary",
    "License-Expression",
    "Requires-Python",
    "Keywords",
    "Description-Content-Type",
)


def check_metadata(wheel: Path) -> None:
    """The file has a platform that an index takes, and every field that a reader looks for."""
    if "manylinux" not in wheel.name:
        raise SystemExit(f"wheel: expected a manylinux tag, got {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (name,) = [item for item in names if item.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    missing = [field for field in _FIELDS if not metadata[field]]
    if missing:
        raise SystemExit(f"wheel: expected {', '.join(missing)} in METADATA, got none")
    for needed in ("diffulex/assets/demo/model.safetensors", "diffulex_ext/_core"):
        if not any(item.startswith(needed) for item in names):
            raise SystemExit(f"wheel: expected {needed} in it, got none")


def check_core() -> None:
    """The state machines answer a request without torch."""
    os.environ["DIFFULEX_NO_TORCH"] = "1"
    import diffulex_ext  # noqa: PLC0415 (the variable is read when it is imported)
    from diffulex_ext import _core  # noqa: PLC0415

    options = _core.EngineOptions(
        block_size=8, page_size=8, num_pages=64, max_model_len=128, mask_token_id=99
    )
    options.validate()
    if not hasattr(_core, "Scheduler") or diffulex_ext.has_ops:
        raise SystemExit("wheel: expected the core alone, got something else")
    print(f"core of {diffulex_ext.__version__} on Python {sys.version.split()[0]}: ok")


if __name__ == "__main__":
    check_metadata(Path(sys.argv[1]))
    check_core()
