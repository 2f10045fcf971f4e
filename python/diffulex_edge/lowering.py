# SPDX-License-Identifier: Apache-2.0
"""From a module to the bytes of a program: export, lowering, finalisation."""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex.quiet import quiet
from diffulex_edge.errors import EdgeError, require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import nn

    from diffulex_edge.backends import EdgeBackend

__all__ = ["Lowered", "ProgramShape", "capture", "example_inputs", "lower"]

METHOD = "forward"
_OPERATOR = re.compile(r"\b(?:aten|torchao|quantized_decomposed|built-in function)[. ](\w+)")
# No two sizes of the examples are equal, so that the export does not take them for one.
_EXAMPLE_ROWS, _EXAMPLE_LOGITS = 24, 12


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """Bounds of a program's inputs."""

    max_rows: int
    max_logits: int
    #: Rows of the cache.
    cache_rows: int
    is_static: bool = False

    @property
    def example(self) -> tuple[int, int]:
        """Rows and logits rows to export with."""
        if self.is_static:
            return self.max_rows, self.max_logits
        rows = min(self.max_rows, _EXAMPLE_ROWS)
        return rows, min(self.max_logits, _EXAMPLE_LOGITS, rows - 1)


@dataclass(frozen=True, slots=True)
class Lowered:
    """A finished program that is not written yet."""

    manager: Any
    #: Parts that the backend took.
    num_delegates: int
    #: Operators that stay with the runtime, by name.
    undelegated: Mapping[str, int]
    #: The exported graph as a module, for backends whose programs do not run where they are made.
    graph: Any = None

    def census(self) -> dict[str, Any]:
        """What the backend took and what it left, as it stands in edge.json."""
        return {"num_delegates": self.num_delegates, "undelegated_ops": dict(self.undelegated)}

    def write(self, path: Path) -> None:
        """Writes the program without holding a second copy of it."""
        with path.open("wb") as file:
            self.manager.write_to_file(file)


def example_inputs(shape: ProgramShape) -> tuple[Any, ...]:
    """Inputs of `EdgeProgram.forward` to export with."""
    import torch  # noqa: PLC0415

    rows, logits = shape.example
    first = min(8, shape.cache_rows - rows)
    return (
        torch.ones(1, rows, dtype=torch.int64),
        torch.arange(first, first + rows),
        torch.arange(first, first + rows) + 1,
        torch.arange(logits),
    )


def capture(program: nn.Module, inputs: tuple[Any, ...], shape: ProgramShape) -> Any:
    """The exported graph of a module, with the bounds of a shape.

    Raises:
        EdgeError: the export took a size that varies for a fixed one.
    """
    with quiet():
        torch = require("torch")
        with torch.no_grad():
            exported = torch.export.export(
                program, inputs, dynamic_shapes=_dynamic_shapes(torch, shape), strict=False
            )
    _check_ranges(exported, shape)
    return exported


def lower(
    program: nn.Module,
    inputs: tuple[Any, ...],
    shape: ProgramShape,
    backend: EdgeBackend,
    constants: Mapping[str, Any],
    *,
    has_quantised_embedding: bool,
    stage: Callable[[str], None],
) -> Lowered:
    """Exports a module and lowers it for a backend.

    Args:
        program: its forward takes `inputs`.
        constants: constant methods of the file.
        has_quantised_embedding: its operators are to be fused.
        stage: called with the name of each stage as it begins.

    Raises:
        EdgeError: the tools refuse the program.
        ConfigError: a package is missing.
    """
    stage("export")
    with quiet():
        exir = require("executorch.exir")
        passes = require("executorch.exir.passes")
        if has_quantised_embedding:
            require("executorch.kernels.quantized")
    exported = capture(program, inputs, shape)
    graph = None if backend.is_host else exported.module()
    stage("lower")
    with quiet():
        try:
            edge = exir.to_edge_transform_and_lower(
                {METHOD: exported},
                partitioner={METHOD: backend.partitioners()},
                constant_methods=dict(constants),
                compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
            )
        except (RuntimeError, AssertionError, ValueError, TypeError, IndexError) as error:
            raise _refused(backend, error) from error
    num_delegates, undelegated = _census(edge.exported_program(METHOD))
    stage("finalise")
    with quiet():
        try:
            manager = edge.to_executorch(
                exir.ExecutorchBackendConfig(
                    # A second method would otherwise have another cache, in memory that is reused.
                    memory_planning_pass=passes.MemoryPlanningPass(share_mutable_buffers=True),
                    run_reinplace_pass=True,
                    do_quant_fusion_and_const_prop=has_quantised_embedding,
                )
            )
        except (RuntimeError, AssertionError, ValueError) as error:
            raise _refused(backend, error) from error
    return Lowered(manager, num_delegates, undelegated, graph)


def _refused(backend: EdgeBackend, error: BaseException) -> EdgeError:
    lines = str(error).strip().splitlines()
    reason = " ".join(lines[-1].split()) if lines else type(error).__name__
    return EdgeError(f"lowering: expected {backend.name} to take the program, got {reason}")


def _dynamic_shapes(torch: Any, shape: ProgramShape) -> Any:
    if shape.is_static:
        return None
    # A named dimension fails: reshapes of the attention need guards that its solver cannot prove.
    rows = torch.export.Dim.AUTO(min=1, max=shape.max_rows)
    logits = torch.export.Dim.AUTO(min=1, max=shape.max_logits)
    return ({1: rows}, {0: rows}, {0: rows}, {0: logits})


def _check_ranges(exported: Any, shape: ProgramShape) -> None:
    """AUTO may decide for one size without a word: both bounds must be in the program."""
    if shape.is_static:
        return
    upper = sorted({int(item.upper) for item in exported.range_constraints.values()})
    expected = sorted({shape.max_rows, shape.max_logits})
    if not set(expected) <= set(upper):
        raise EdgeError(f"export: expected sizes up to {expected}, got ranges up to {upper}")


def _census(exported: Any) -> tuple[int, dict[str, int]]:
    """Delegates, and what is left beside them."""
    names: collections.Counter[str] = collections.Counter()
    num_delegates = 0
    for node in exported.graph_module.graph.nodes:
        if node.op != "call_function" or "getitem" in str(node.target):
            continue
        if "executorch_call_delegate" in str(node.target):
            num_delegates += 1
        else:
            # Some of these objects print their whole schema.
            found = _OPERATOR.search(str(node.target))
            names[found[1] if found else str(node.target)] += 1
    return num_delegates, dict(names)
