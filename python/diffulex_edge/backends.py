# SPDX-License-Identifier: Apache-2.0
"""The backends: what each can do on this machine, how it wants a program, how it is lowered."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex_edge.errors import ProgramError, require
from diffulex_edge.model import EdgeForm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex_edge.exporter import ExportConfig, ExportResult
    from diffulex_edge.program import PteProgram
    from diffulex_edge.recipes import Recipe

__all__ = ["BACKENDS", "Availability", "BackendRegistry", "EdgeBackend", "backend_of"]

_SDK_VARIABLE = "QNN_SDK_ROOT"
_SDK_LIBRARY = Path("lib/x86_64-linux-clang/libQnnHtp.so")
#: What options may be whose values are known without the backend's own package.
_VALUES = {"compute_unit": ("all", "cpu_only", "cpu_and_gpu", "cpu_and_ne")}
#: Other accepted names.
_ALIASES = {"reference": "portable"}
#: Targets that ExecuTorch has elsewhere, and why not here.
_ABSENT = {
    "mps": "its Python package has no such backend; coreml runs on Apple's GPUs",
    "vulkan": "its Python package can write such programs and not run, so not check, them",
}


@dataclass(frozen=True, slots=True)
class Availability:
    """What a backend can do here, and why not more."""

    can_export: bool
    can_run: bool
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is of any use here."""
        return self.can_export or self.can_run

    def __str__(self) -> str:
        does = [text for can, text in ((self.can_export, "exports"), (self.can_run, "runs")) if can]
        return (" and ".join(does) or "not here") + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True)
class EdgeBackend:
    """One target of the export."""

    name: str
    target: str
    #: Layer and head recipes that it computes as meant.
    recipes: tuple[str, ...]
    form: EdgeForm = field(default_factory=EdgeForm)
    #: The numbers of rows and of logits rows are fixed when exporting.
    is_static: bool = False
    #: A program can be run where it was exported.
    is_host: bool = True
    #: Names of the options that it takes.
    option_names: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    def availability(self) -> Availability:
        """What it can do on this machine; imports nothing."""
        missing = [p for p in ("executorch", "torchao") if importlib.util.find_spec(p) is None]
        if missing:
            return Availability(
                False, False, f"needs {missing[0]} (pip install '.[edge]' in the source directory)"
            )
        return _AVAILABILITY.get(self.name, _everywhere)()

    def is_available(self) -> bool:
        """Whether it is of any use on this machine; `availability` says for what, and why not."""
        return self.availability().ok

    def get_metadata(self) -> dict[str, Any]:
        """What it is and what it can do here, in the types of JSON."""
        return {
            "name": self.name,
            "target": self.target,
            **asdict(self.availability()),
            "recipes": list(self.recipes),
            "layout": self.form.layout,
            "is_static": self.is_static,
            "options": list(self.option_names),
        }

    def export(self, config: ExportConfig) -> ExportResult:
        """Writes and checks a bundle for this backend, whatever `config` names; see `export_model`."""
        from diffulex_edge.exporter import export_model  # noqa: PLC0415 (stands on this module)

        return export_model(replace(config, backend=self.name))

    def load(self, path: Path | str, *, threads: int | None = None) -> PteProgram:
        """A program of this backend, ready to be called.

        Raises:
            ConfigError: programs of this backend do not run here, or a package is missing.
            ProgramError: it cannot be loaded, or is one of another backend.
        """
        from diffulex_edge.program import PteProgram  # noqa: PLC0415 (imports torch)

        state = self.availability()
        if not state.can_run:
            raise ConfigError(
                f"backend: expected one that runs here, got {self.name}: {state.reason}"
            )
        program = PteProgram(path, threads=threads)
        found = program.constants["dlx_backend"]
        if found != self.name:
            raise ProgramError(
                f"program: {path}: expected one of the backend {self.name}, got {found}"
            )
        return program

    def check_recipe(self, recipe: Recipe) -> None:
        """Raises ConfigError for a recipe that this backend would compute wrongly or not at all."""
        for kind in recipe.kinds:
            if kind not in self.recipes:
                raise ConfigError(
                    f"quant: expected one of {', '.join(self.recipes)} on the backend {self.name},"
                    f" got {kind}"
                )
        if recipe.embedding_bits != 32 and self.name not in ("xnnpack", "portable"):
            raise ConfigError(
                f"quant: expected a float embedding on the backend {self.name},"
                f" got emb={recipe.embedding_bits}"
            )

    def check_options(self, options: Mapping[str, str]) -> None:
        """Raises ConfigError for an option that this backend would not look at, or has no such value."""
        for name, value in options.items():
            if name not in self.option_names:
                takers = [item.name for item in BACKENDS.values() if name in item.option_names]
                expected = f"the backend {' or '.join(takers)}" if takers else "no such option"
                raise ConfigError(f"{name}: expected {expected}, got {self.name}")
            if value not in _VALUES.get(name, (value,)):
                raise ConfigError(
                    f"{name}: expected one of {', '.join(_VALUES[name])}, got {value!r}"
                )

    def check_export(self) -> None:
        """Raises ConfigError unless this machine can export for it."""
        state = self.availability()
        if not state.can_export:
            raise ConfigError(
                f"backend: expected one that exports here, got {self.name}: {state.reason}"
            )

    def partitioners(self) -> list[Any]:
        """Partitioners for the lowering; empty: portable operators only."""
        return _PARTITIONERS.get(self.name, list)(dict(self.options))


def _everywhere() -> Availability:
    return Availability(True, True)


def _coreml() -> Availability:
    if sys.platform == "darwin":
        return Availability(True, True)
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return Availability(False, False, "coremltools compiles on macOS and on Linux x86-64")
    if importlib.util.find_spec("coremltools") is None:
        return Availability(False, False, "needs coremltools (pip install coremltools)")
    return Availability(True, False, "runs on Apple devices only")


def _qnn() -> Availability:
    root = os.environ.get(_SDK_VARIABLE, "")
    if not root:
        return Availability(
            False, False, f"needs Qualcomm's SDK: set {_SDK_VARIABLE} to its directory"
        )
    if not (Path(root) / _SDK_LIBRARY).is_file():
        return Availability(False, False, f"{_SDK_VARIABLE}: expected {_SDK_LIBRARY} in {root}")
    return Availability(True, False, "runs on Snapdragon devices only")


def _xnnpack_partitioners(options: dict[str, str]) -> list[Any]:
    del options
    module = require("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    return [module.XnnpackPartitioner()]


def _coreml_partitioners(options: dict[str, str]) -> list[Any]:
    tools = require("coremltools")
    partition = require("executorch.backends.apple.coreml.partition")
    compiler = require("executorch.backends.apple.coreml.compiler")
    unit = options.get("compute_unit", "cpu_and_ne")
    specs = compiler.CoreMLBackend.generate_compile_specs(
        compute_unit=tools.ComputeUnit[unit.upper()],
        # The first release with state, which the cache is.
        minimum_deployment_target=tools.target.iOS18,
        compute_precision=tools.precision.FLOAT16,
    )
    return [partition.CoreMLPartitioner(compile_specs=specs, take_over_mutable_buffer=True)]


def _qnn_partitioners(options: dict[str, str]) -> list[Any]:
    # An empty value counts as set: without it the package would download the SDK.
    os.environ.setdefault(_SDK_VARIABLE, "")
    utils = require("executorch.backends.qualcomm.utils.utils")
    schema = require("executorch.backends.qualcomm.serialization.qc_schema")
    partition = require("executorch.backends.qualcomm.partition.qnn_partitioner")
    chip = options.get("soc", "SM8650").upper()
    chips = sorted(item.name for item in schema.QcomChipset)
    if chip not in chips:
        raise ConfigError(f"soc: expected one of {', '.join(chips)}, got {chip!r}")
    specs = utils.generate_qnn_executorch_compiler_spec(
        soc_model=getattr(schema.QcomChipset, chip),
        backend_options=utils.generate_htp_compiler_spec(use_fp16=True),
    )
    return [partition.QnnPartitioner(specs)]


_AVAILABILITY = {"coreml": _coreml, "qnn": _qnn}
_PARTITIONERS = {
    "xnnpack": _xnnpack_partitioners,
    "coreml": _coreml_partitioners,
    "qnn": _qnn_partitioners,
}

# Weight-only recipes are left out: XNNPACK takes them and computes garbage.
_XNNPACK_RECIPES = ("none", "fp16", "8da8w", "8da4w", "pt2e_dyn8", "static_int8")

BACKENDS: dict[str, EdgeBackend] = {
    item.name: item
    for item in (
        EdgeBackend("xnnpack", "CPU, x86-64 and Arm", _XNNPACK_RECIPES),
        EdgeBackend(
            "coreml",
            "Apple CPU, GPU and neural engine (iOS 18, macOS 15)",
            ("none", "8w", "4w"),
            # The linear mean crashes coremltools 9, index_copy_ fails in its conversion.
            EdgeForm(norm="mean", cache_write="scatter"),
            is_static=True,
            is_host=False,
            option_names=("compute_unit",),
        ),
        EdgeBackend(
            "qnn",
            "Snapdragon neural processors, experimental",
            ("none",),
            EdgeForm(norm="mean", layout="static_io"),
            is_static=True,
            is_host=False,
            option_names=("soc",),
        ),
        EdgeBackend("portable", "any CPU, slow", ("none",), EdgeForm(norm="mean")),
    )
}


class BackendRegistry:
    """Further backends beside the built-in ones."""

    @staticmethod
    def register(backend: EdgeBackend, *, replace: bool = False) -> None:
        """Adds a backend; ConfigError if the name is taken, unless `replace` is given."""
        name = backend.name.lower()
        if name in BACKENDS and not replace:
            raise ConfigError(f"backend: expected a new name, got {name!r}")
        BACKENDS[name] = backend

    @staticmethod
    def get(name: str) -> EdgeBackend:
        """A backend by its name; see `backend_of`."""
        return backend_of(name)

    @staticmethod
    def list_backends() -> list[str]:
        """Names in order."""
        return sorted(BACKENDS)


def backend_of(name: str) -> EdgeBackend:
    """The backend of this name.

    Raises:
        ConfigError: there is none.
    """
    name = _ALIASES.get(name.lower(), name.lower())
    backend = BACKENDS.get(name)
    if backend is None:
        if name in _ABSENT:
            raise ConfigError(
                f"backend: expected one of {', '.join(sorted(BACKENDS))}, got {name!r}:"
                f" {_ABSENT[name]}"
            )
        raise ConfigError(f"backend: expected one of {', '.join(sorted(BACKENDS))}, got {name!r}")
    return backend
