# SPDX-License-Identifier: Apache-2.0
"""Checks an installed wheel: its name, metadata, libraries and size, and its core without torch.

    python scripts/wheel_check.py FILE.whl VERSION

Run by scripts/wheel.sh in an environment that has the wheel and nothing else.
"""

from __future__ import annotations

import email
import os
import subprocess
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

#: What PyPI takes at most.
_MAX_BYTES = 100 * 2**20


def check_metadata(wheel: Path, version: str) -> None:
    """The file has a version, platform and size that an index takes, and every field that readers look for."""
    if not wheel.name.startswith(f"diffulex-{version}-"):
        raise SystemExit(f"wheel: expected version {version}, got {wheel.name}")
    if wheel.stat().st_size > _MAX_BYTES:
        raise SystemExit(f"wheel: expected at most {_MAX_BYTES} bytes, got {wheel.stat().st_size}")
    if "manylinux" not in wheel.name:
        raise SystemExit(f"wheel: expected a manylinux tag, got {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (name,) = [item for item in names if item.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    if metadata["Version"] != version:
        raise SystemExit(
            f"wheel: expected version {version} in METADATA, got {metadata['Version']}"
        )
    missing = [field for field in _FIELDS if not metadata[field]]
    if missing:
        raise SystemExit(f"wheel: expected {', '.join(missing)} in METADATA, got none")
    for needed in ("diffulex/assets/demo/model.safetensors", "diffulex_ext/_core"):
        if not any(item.startswith(needed) for item in names):
            raise SystemExit(f"wheel: expected {needed} in it, got none")
    copied = [item for item in names if item.startswith("diffulex.libs/")]
    if copied:
        raise SystemExit(f"wheel: expected no copies of libraries, got {', '.join(copied)}")


def check_libraries() -> None:
    """The plugins look for no library by a path of the build host."""
    import diffulex_ext  # noqa: PLC0415 (the variable of check_core is set)

    for path in Path(diffulex_ext.__file__).parent.glob("*.so"):
        dynamic = subprocess.run(
            ["readelf", "-d", str(path)], capture_output=True, text=True, check=True
        ).stdout
        if "RPATH" in dynamic or "RUNPATH" in dynamic:
            raise SystemExit(f"wheel: expected no run path in {path.name}, got one")


def check_core(version: str) -> None:
    """The state machines answer a request without torch; CUDA was built if the version says so."""
    import diffulex_ext  # noqa: PLC0415 (the variable is read when it is imported)
    from diffulex_ext import _core  # noqa: PLC0415

    options = _core.EngineOptions(
        block_size=8, page_size=8, num_pages=64, max_model_len=128, mask_token_id=99
    )
    options.validate()
    if not hasattr(_core, "Scheduler") or diffulex_ext.has_ops:
        raise SystemExit("wheel: expected the core alone, got something else")
    info = diffulex_ext.build_info()
    if bool(info["cuda_version"]) != ("+cu" in version):
        raise SystemExit(f"wheel: expected CUDA as in {version}, got {info['cuda_version']!r}")
    if info["cuda_version"]:
        print(f"CUDA {info['cuda_version']} for {info['cuda_archs']}, {info['cuda_profile']}")
    print(f"core of {diffulex_ext.__version__} on Python {sys.version.split()[0]}: ok")


if __name__ == "__main__":
    os.environ["DIFFULEX_NO_TORCH"] = "1"
    check_metadata(Path(sys.argv[1]), sys.argv[2])
    check_core(sys.argv[2])
    check_libraries()
