# SPDX-License-Identifier: Apache-2.0
"""Products of e4m3 codes by CUTLASS, with a scale for each block of W.

`benchmarks/cpp/cutlass_fp8_peer.cu` is compiled at first use, where the headers of the package
`nvidia-cutlass` and nvcc are, into the user's cache folder.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diffulex import ops
from kernel_bench.agreement import Agreement, Tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["block_product"]

SOURCE = Path(__file__).resolve().parents[2] / "cpp" / "cutlass_fp8_peer.cu"
#: Without NDEBUG the checks of the headers keep the compiler from overlapping products.
FLAGS = (
    "-gencode", "arch=compute_90a,code=sm_90a", "-std=c++17", "--expt-relaxed-constexpr", "-O3",
    "-DNDEBUG", "-shared", "-Xcompiler", "-fPIC",
)  # fmt: skip
COMPILE_SECONDS = 300
WORKSPACE_BYTES = 1 << 20
#: Both sides are sums that keep about 14 bits of 128 products, rounded to bfloat16.
TOLERANCE = Tolerance(2.0**-6, 0.02)


def block_product(
    tile_rows: int, x: torch.Tensor, plain: Sequence[torch.Tensor], out: torch.Tensor
) -> list[Callable[[], object]] | str:
    """out [T, N] = x W^T of codes of x and of each of the weights `plain`, or why there is none.

    Tiles of the result are `tile_rows` x 128, 64 or 128 rows. The first is compared with
    `ops.linear_scaled` of the same codes.
    """
    product = _product(out.device)
    if isinstance(product, str):
        return product
    rows = ops.quantize_rows(x, torch.float8_e4m3fn)
    weights = [ops.quantize_weight(weight, ops.WeightScheme.FP8_BLOCK) for weight in plain]
    space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=out.device)
    ours = ops.linear_scaled(rows, *weights[0], out=torch.empty_like(out))
    out.fill_(torch.nan)
    product(tile_rows, rows, *weights[0], out, space)
    agreement = Agreement(ours.numel(), TOLERANCE)
    agreement.add(out, ours)
    if not agreement.is_right:
        return f"not timed: its output differs from ours by {agreement.error:.1e}"
    return [functools.partial(product, tile_rows, rows, *weight, out, space) for weight in weights]


@functools.cache
def _product(device: torch.device) -> Callable[..., None] | str:
    """f(tile_rows, rows, codes, scale, out, workspace), or why it is not there."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "needs a GPU of compute capability 9.0"
    headers = _headers()
    if headers is None:
        return "no headers (pip install --no-deps nvidia-cutlass, or CUTLASS_PATH)"
    nvcc = _nvcc()
    if nvcc is None:
        return "no nvcc (CUDACXX, PATH or /usr/local/cuda/bin)"
    try:
        return _bound(ctypes.CDLL(str(_compiled(nvcc, headers))))
    except subprocess.CalledProcessError as error:
        lines = [line for line in str(error.stderr).splitlines() if "error" in line]
        return f"not compiled: {lines[0] if lines else error}"[:120]
    except (OSError, subprocess.SubprocessError) as error:
        return f"not compiled: {type(error).__name__}: {error}"[:120]


def _headers() -> Path | None:
    """The folder of cutlass/cutlass.h: in CUTLASS_PATH (the repository or its include), else the package's."""
    folders = []
    if path := os.environ.get("CUTLASS_PATH"):
        folders = [Path(path), Path(path, "include")]
    elif (spec := importlib.util.find_spec("cutlass_library")) is not None:
        # Not imported: it would want packages that its headers do not.
        folders = [
            Path(part, "source", "include") for part in spec.submodule_search_locations or ()
        ]
    return next((folder for folder in folders if (folder / "cutlass/cutlass.h").is_file()), None)


def _nvcc() -> str | None:
    return os.environ.get("CUDACXX") or shutil.which(
        "nvcc", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/cuda/bin"))
    )


def _compiled(nvcc: str, headers: Path) -> Path:
    """The library, compiled unless there is one of this source, these flags and this CUTLASS."""
    parts = (
        SOURCE.read_bytes(),
        " ".join(FLAGS).encode(),
        (headers / "cutlass/version.h").read_bytes(),
    )
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "diffulex")
    library = cache / f"cutlass_fp8_peer_{digest}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}.so")
        subprocess.run(
            [nvcc, *FLAGS, f"-I{headers}", str(SOURCE), "-o", str(unfinished)],
            check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS,
        )  # fmt: skip
        unfinished.replace(library)
    return library


def _bound(library: Any) -> Callable[..., None]:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.cutlass_fp8_product.argtypes = (
        number, pointer, pointer, number, pointer, pointer, pointer, number, number, number,
        pointer, ctypes.c_size_t, pointer,
    )  # fmt: skip
    library.cutlass_fp8_message.argtypes = (number,)
    library.cutlass_fp8_message.restype = ctypes.c_char_p

    def product(
        tile_rows: int,
        rows: ops.QuantizedRows,
        codes: torch.Tensor,
        scale: torch.Tensor,
        out: torch.Tensor,
        space: torch.Tensor,
    ) -> None:
        result = library.cutlass_fp8_product(
            tile_rows, rows.codes.data_ptr(), rows.scale.data_ptr(), rows.scale.size(1),
            codes.data_ptr(), scale.data_ptr(), out.data_ptr(), *out.shape, codes.size(1),
            space.data_ptr(), space.nbytes, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        if result:
            raise RuntimeError(library.cutlass_fp8_message(result).decode())

    return product
