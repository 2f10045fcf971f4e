# SPDX-License-Identifier: Apache-2.0
"""Compiled parts of diffulex: the C++ core (`_core`) and the torch ops `torch.ops.diffulex`.

The core needs neither torch nor numpy. The op library is loaded here, and nowhere else, when it lies
beside this file and torch is importable; `has_ops` tells the result. `DIFFULEX_NO_TORCH=1` skips it.
With it come the fake kernels for tracing and meta tensors, which lie beside the wrappers in
`diffulex.ops`.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from diffulex_ext._core import *  # noqa: F403 (the package is the public face of _core)
from diffulex_ext._core import __version__ as __version__
from diffulex_ext._core import build_info as build_info

_PACKAGE_DIR = Path(__file__).parent

cmake_prefix_path: str = str(_PACKAGE_DIR)
"""Value for CMAKE_PREFIX_PATH with which `find_package(diffulex)` finds the C++ libraries."""


def _torch_is_wanted() -> bool:
    value = os.environ.get("DIFFULEX_NO_TORCH", "")
    if value not in ("", "0", "1"):
        raise ImportError(f"diffulex_ext: DIFFULEX_NO_TORCH: expected 0 or 1, got {value!r}")
    return value != "1" and importlib.util.find_spec("torch") is not None


def _load_ops() -> bool:
    """Loads the op library; False where there is nothing to load."""
    library = _PACKAGE_DIR / "libdiffulex_ops.so"
    if not library.is_file() or not _torch_is_wanted():
        return False
    # The library finds libtorch through the copy that importing torch has already loaded.
    import torch  # noqa: PLC0415 (must stay optional)

    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]  # torch leaves it so
    except OSError as error:
        raise ImportError(
            f"diffulex_ext: {library.name}: expected a torch >= 2.11 that can load it, "
            f"got torch {torch.__version__}: {error}"
        ) from error
    return True


has_ops: bool = _load_ops()
"""True when `torch.ops.diffulex` is available in this process."""

if has_ops:
    # Registers the fake kernels on import. It imports this package, which is complete by now. The
    # statement, unlike `import_module`, bears that another thread has begun with `diffulex.ops`.
    import diffulex.ops as _ops  # noqa: F401
