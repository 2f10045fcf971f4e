# SPDX-License-Identifier: Apache-2.0
"""One product of 8 rows under every recipe of weights, as XNNPACK computes it on this processor.

    python benchmarks/python/bench_edge_products.py 256x640 --output FILE

Six products with weights of their own make a program; all programs are called in turns, and the smallest
times are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from executorch import exir
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.extension.pybindings import portable_lib
from torch import nn
from torchao.quantization import PerAxis, PerGroup, quant_api, quantize_

from diffulex.quiet import quiet

_ROWS, _PRODUCTS, _ROUNDS, _BURST = 8, 6, 40, 5


class Products(nn.Module):
    """Products of the same rows with several matrices."""

    def __init__(self, columns: int, outputs: int) -> None:
        super().__init__()
        linears = (nn.Linear(columns, outputs, bias=False) for _ in range(_PRODUCTS))
        self.linears = nn.ModuleList(linears)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(linear(x) for linear in self.linears)


def recipes() -> dict[str, Any]:
    """Configurations of torchao by name; None leaves float32."""

    def config(dtype: torch.dtype, shape: Any) -> Any:
        return quant_api.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=dtype, weight_granularity=shape
        )

    return {
        "float32": None,
        "8da8w": config(torch.int8, PerAxis(0)),
        "8da4w-g32": config(torch.int4, PerGroup(32)),
        "8da4w-g128": config(torch.int4, PerGroup(128)),
        "int4 per channel": config(torch.int4, PerAxis(0)),
    }


def lowered(columns: int, outputs: int, config: Any, path: Path) -> Any:
    """The loaded program of products under a configuration."""
    torch.manual_seed(0)
    module = Products(columns, outputs).eval()
    if config is not None:
        quantize_(module, config)
    exported = torch.export.export(module, (torch.zeros(_ROWS, columns),), strict=False)
    edge = exir.to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    path.write_bytes(edge.to_executorch().buffer)
    portable_lib._unsafe_reset_threadpool(1)
    return portable_lib._load_for_executorch(str(path))


def measure(columns: int, outputs: int) -> dict[str, float]:
    """Microseconds of one product by recipe."""
    x = torch.randn(_ROWS, columns, generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as directory:
        with quiet():
            programs = {
                name: lowered(columns, outputs, config, Path(directory) / f"{index}.pte")
                for index, (name, config) in enumerate(recipes().items())
            }
        best = dict.fromkeys(programs, float("inf"))
        for _ in range(_ROUNDS):
            for name, program in programs.items():
                for _ in range(_BURST):
                    start = time.perf_counter()
                    program.forward((x,))
                    best[name] = min(best[name], time.perf_counter() - start)
    return {name: round(1e6 * seconds / _PRODUCTS, 1) for name, seconds in best.items()}


def main() -> int:
    """Prints the rows, and writes them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="+", help="COLUMNSxOUTPUTS of a matrix")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for shape in options.shapes:
        columns, outputs = map(int, shape.split("x"))
        load = os.getloadavg()[0]
        rows.append(
            {
                "columns": columns,
                "outputs": outputs,
                "rows": _ROWS,
                "microseconds": measure(columns, outputs),
                "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
            }
        )
    text = json.dumps(rows, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
