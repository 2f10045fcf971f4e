# SPDX-License-Identifier: Apache-2.0
"""Whether ExecuTorch's runtime works here, by a small program of the package, for ``diffulex doctor``.

    python -m diffulex_edge.runtime_check FILE

writes that program anew; it computes ``2 x + 1`` of four numbers with portable operators.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from diffulex.quiet import quiet
from diffulex_edge.errors import ProgramError, native_reason, require

__all__ = ["CHECK_PROGRAM", "check_runtime", "write_check_program"]

CHECK_PROGRAM = Path(__file__).with_name("runtime_check.pte")
_RUNTIME = "executorch.extension.pybindings._C"
_INPUT, _EXPECTED = (0.0, 1.0, 2.0, 3.0), (1.0, 3.0, 5.0, 7.0)


class _Line(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0 + 1.0


def check_runtime(path: Path = CHECK_PROGRAM) -> str:
    """Loads and runs the program; the backends that the runtime has, as text.

    Raises:
        ConfigError: executorch is not installed.
        ProgramError: the program cannot be loaded or run, or gives other numbers.
    """
    with quiet():
        runtime = require(_RUNTIME)
        try:
            program = runtime._load_program(
                os.fspath(path), program_verification=runtime.Verification.InternalConsistency
            )
            (result,) = program.load_method("forward")([torch.tensor(_INPUT)])
        except RuntimeError as error:
            raise ProgramError(f"program: cannot run {path}: {native_reason(error)}") from error
        names = sorted(runtime._get_registered_backend_names())
    if result.tolist() != list(_EXPECTED):
        raise ProgramError(f"program: {path}: expected {list(_EXPECTED)}, got {result.tolist()}")
    return f"runtime backends {', '.join(names) or 'none'}"


def write_check_program(path: Path) -> None:
    """Exports the program.

    Raises:
        ConfigError: executorch is not installed.
    """
    with quiet(), torch.no_grad():
        exir = require("executorch.exir")
        exported = torch.export.export(_Line(), (torch.tensor(_INPUT),), strict=False)
        finished = exir.to_edge_transform_and_lower(exported).to_executorch()
    path.write_bytes(finished.buffer)


if __name__ == "__main__":
    write_check_program(Path(sys.argv[1]))
