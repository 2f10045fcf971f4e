# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint to a checked bundle."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import diffulex
from diffulex.checkpoint.auto_model import detect
from diffulex.checkpoint.loader import check_headers, check_num_layers, load_weights
from diffulex.checkpoint.resolve import resolve_model
from diffulex.errors import ConfigError
from diffulex.families.spec.reader import read_json_object
from diffulex.log import get_logger
from diffulex_edge.backends import EdgeBackend, backend_of
from diffulex_edge.bundle import (
    EDGE_FILE,
    PROGRAM_FILE,
    check_target,
    copy_checkpoint_files,
    file_sha256,
    new_directory,
)
from diffulex_edge.errors import ProgramError
from diffulex_edge.families import check_family
from diffulex_edge.lowering import Lowered, ProgramShape, example_inputs, lower
from diffulex_edge.model import EdgeDecoder, EdgeProgram
from diffulex_edge.program import FORMAT, PteProgram
from diffulex_edge.progress import Stages
from diffulex_edge.pt2e import calibration_calls, quantised_program
from diffulex_edge.recipes import Recipe, check_calibration, parse_recipe
from diffulex_edge.self_check import (
    Agreement,
    check_agreement,
    check_tolerance,
    compare,
    eager_caller,
    make_trace,
    run_trace,
)
from diffulex_edge.session_conf import write_session_conf
from diffulex_edge.static_io import CallerCache, StaticProgram, static_inputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from diffulex.families.spec import ModelSpec
    from diffulex_edge.self_check import Caller

__all__ = ["ExportConfig", "ExportResult", "avoided_ids", "export_model", "load_decoder"]

logger = get_logger(__name__)

#: Positions after the longest request: its last block may be whole.
_SPARE_ROWS = 32
#: Packages whose versions a program carries, beside Diffulex itself.
_VERSIONED = ("torch", "executorch", "torchao")
#: What the fields of `ExportConfig` are in JSON.
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "dict[str, str]": (dict,),
    "None": (type(None),),
}


def _check_json(name: str, value: object, annotation: str) -> None:
    """Raises ConfigError unless a value of JSON is of the type of its field."""
    names = annotation.replace("Path", "str").split(" | ")
    # A bool is an int for isinstance.
    is_right = any(type(value) in _JSON_TYPES[item] for item in names)
    if is_right and isinstance(value, dict):
        is_right = all(isinstance(item, str) for item in value.values())
    if not is_right:
        raise ConfigError(f"{name}: expected {' or '.join(names)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """What to export, and how.

    Raises:
        ConfigError: unknown backend or recipe, or a size out of range.
    """

    model: str
    output: Path
    backend: str = "xnnpack"
    quant: str = "none"
    #: Tokens of prompt and answer; None: the model's positions, at most 2,048.
    max_model_len: int | None = None
    max_rows: int = 256
    max_logits: int = 64
    overwrite: bool = False
    #: Directory of an adapter to merge into the weights.
    lora: Path | None = None
    mask_token_id: int | None = None
    model_name: str | None = None
    #: Share of the largest logit that the program may differ by; None: by recipe.
    tolerance: float | None = None
    #: Problems that `static_int8` takes the scales of its activations from.
    calibration: Path | None = None
    #: Options of the backend: compute_unit, soc.
    backend_options: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        recipe = parse_recipe(self.quant)
        backend = backend_of(self.backend)
        backend.check_recipe(recipe)
        backend.check_options(self.backend_options)
        check_calibration(recipe, self.calibration)
        for name, low in (("max_rows", 8), ("max_logits", 2), ("max_model_len", 8)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name}: expected >= {low}, got {value}")
        check_tolerance(self.tolerance)

    def to_json(self) -> dict[str, Any]:
        """All fields in the types of JSON, for `from_json`."""
        found = dataclasses.asdict(self)
        return {name: str(v) if isinstance(v, Path) else v for name, v in found.items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ExportConfig:
        """The configuration of an object as `to_json` gives it; what is absent has its default.

        Raises:
            ConfigError: an unknown or missing key, or a value that the constructor refuses.
        """
        fields = {item.name: item for item in dataclasses.fields(cls)}
        unknown = sorted(content.keys() - fields.keys())
        missing = [name for name in ("model", "output") if name not in content]
        if unknown or missing:
            got = f"the unknown {unknown[0]}" if unknown else f"no {missing[0]}"
            raise ConfigError(f"export: expected the keys {', '.join(fields)}, got {got}")
        for name, value in content.items():
            _check_json(name, value, str(fields[name].type))
        values: dict[str, Any] = dict(content)
        for name in ("output", "lora", "calibration"):
            if values.get(name) is not None:
                values[name] = Path(values[name])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class ExportResult:
    """A bundle that was written and checked."""

    output_path: Path
    file_size_bytes: int
    compilation_time_sec: float
    backend: str
    quant: str
    num_delegates: int
    undelegated_ops: dict[str, int]
    #: Program against its own model; its graph where the program cannot run here.
    self_check: Agreement
    #: The same against the model before quantisation.
    agreement: Agreement
    #: Whether the program itself was run.
    device_verified: bool
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    peak_rss_mb: float = 0.0

    @property
    def file_size_mb(self) -> float:
        """Size of the program in 10^6 bytes."""
        return self.file_size_bytes / 1e6

    def to_json(self) -> dict[str, Any]:
        """All fields in the types of JSON."""
        return {
            **dataclasses.asdict(self),
            "output_path": str(self.output_path),
            "file_size_mb": self.file_size_mb,
        }

    def __str__(self) -> str:
        return (
            f"{self.output_path}: {self.file_size_mb:.2f} MB, {self.backend}, {self.quant},"
            f" best ids as unquantised {self.agreement.argmax:.1%}"
        )


def load_decoder(
    model_dir: Path,
    spec: ModelSpec,
    cache_rows: int,
    backend: EdgeBackend,
    lora: Path | None = None,
) -> EdgeDecoder:
    """The decoder of a checkpoint in float32, in the form of a backend.

    Raises:
        CheckpointError: the files do not fit the description.
    """
    check_family(spec)
    check_num_layers(spec, model_dir)
    with torch.device("meta"):
        check_headers(EdgeDecoder(spec, 1, backend.form), model_dir)
    decoder = EdgeDecoder(spec, cache_rows, backend.form)
    load_weights(decoder, model_dir, merge=_merge_plan(decoder, lora))
    return decoder.eval()


def avoided_ids(spec: ModelSpec) -> set[int]:
    """Ids that the calls of the self-check do without: the mask and what ends an answer."""
    return {i for i in (spec.mask_token_id, *spec.stop_token_ids) if i is not None}


def _merge_plan(decoder: EdgeDecoder, lora: Path | None) -> Any:
    if lora is None:
        return None
    from diffulex.checkpoint.lora import MergePlan, read_adapter  # noqa: PLC0415

    return MergePlan(read_adapter(lora), decoder.projections())


def export_model(config: ExportConfig, *, show_progress: bool = False) -> ExportResult:
    """Exports a checkpoint and leaves a bundle only if the program computes what the model does.

    Raises:
        ConfigError: the model, backend or recipe cannot be exported, or a package is missing.
        CheckpointError: the checkpoint cannot be read.
        ProgramError: the self-check found another result; nothing is left behind.
    """
    began = time.perf_counter()
    backend = backend_of(config.backend)
    backend.check_export()
    check_target(Path(config.output).expanduser().absolute(), overwrite=config.overwrite)
    model_dir = resolve_model(config.model)
    _, spec, info = detect(model_dir, config.model_name, mask_token_id=config.mask_token_id)
    check_family(spec)
    recipe = parse_recipe(config.quant)
    shape, length = _shape(config, spec, backend)
    with (
        Stages(is_shown=show_progress) as stage,
        new_directory(Path(config.output), overwrite=config.overwrite) as directory,
    ):
        stage("load")
        decoder = load_decoder(model_dir, spec, shape.cache_rows, backend, config.lora)
        calls = make_trace(
            shape, spec.block_size or _SPARE_ROWS, spec.vocab_size, avoided_ids(spec)
        )
        reference = run_trace(eager_caller(EdgeProgram(decoder)), calls)
        stage("quantise")
        seen = calls
        if config.calibration is not None:
            seen = calibration_calls(config.calibration, model_dir, spec, shape)
        program, notices = quantised_program(decoder, recipe, shape, seen)
        own = run_trace(eager_caller(program), calls) if recipe.is_quantised else reference
        copy_checkpoint_files(model_dir, directory)
        constants = _constants(
            config, spec, shape, recipe, length, file_sha256(directory / "config.json")
        )
        if backend.form.layout == "static_io":
            program = StaticProgram(decoder)
        lowered = _lower(config, program, spec, shape, backend, constants, recipe, stage)
        path = directory / PROGRAM_FILE
        lowered.write(path)
        del program, decoder
        stage("self-check")
        found = run_trace(_caller(lowered, path, backend, spec, shape), calls)
        checked, agreement = compare(found, own), compare(found, reference)
        check_agreement(checked, recipe, tolerance=config.tolerance)
        facts = _facts(constants, path, config, checked, agreement) | lowered.census()
        text = json.dumps(facts, indent=1, sort_keys=True)
        (directory / EDGE_FILE).write_text(text + "\n", encoding="utf-8")
        _check_detected(directory, spec, config, info.architecture)
        write_session_conf(directory, config.model_name, config.mask_token_id)
        size = path.stat().st_size
    return ExportResult(
        output_path=Path(config.output),
        file_size_bytes=size,
        compilation_time_sec=time.perf_counter() - began,
        backend=backend.name,
        quant=str(recipe),
        num_delegates=lowered.num_delegates,
        undelegated_ops=dict(lowered.undelegated),
        self_check=checked,
        agreement=agreement,
        device_verified=backend.is_host,
        warnings=tuple(notices),
        seconds=stage.seconds,
        peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    )


def _shape(config: ExportConfig, spec: ModelSpec, backend: EdgeBackend) -> tuple[ProgramShape, int]:
    """Bounds of the inputs, and the longest request."""
    length = min(spec.max_positions, 2048)
    if config.max_model_len is not None:
        if config.max_model_len > spec.max_positions:
            raise ConfigError(
                f"max_model_len: expected at most {spec.max_positions}, the positions of the model,"
                f" got {config.max_model_len}"
            )
        length = config.max_model_len
    rows = min(config.max_rows, length)
    if spec.block_size is not None and rows < spec.block_size:
        raise ConfigError(f"max_rows: expected a block of {spec.block_size} or more, got {rows}")
    spare = rows if backend.is_static else _SPARE_ROWS
    logits = rows if backend.is_static else min(config.max_logits, rows)
    return ProgramShape(rows, logits, length + spare, backend.is_static), length


def _lower(
    config: ExportConfig,
    program: nn.Module,
    spec: ModelSpec,
    shape: ProgramShape,
    backend: EdgeBackend,
    constants: dict[str, Any],
    recipe: Recipe,
    stage: Stages,
) -> Lowered:
    if config.backend_options:
        backend = dataclasses.replace(backend, options=dict(config.backend_options))
    is_static = backend.form.layout == "static_io"
    return lower(
        program,
        static_inputs(spec, shape) if is_static else example_inputs(shape),
        shape,
        backend,
        constants,
        has_quantised_embedding=recipe.embedding_bits != 32,
        stage=stage,
    )


def _caller(
    lowered: Lowered, path: Path, backend: EdgeBackend, spec: ModelSpec, shape: ProgramShape
) -> Caller:
    """Runs calls in the program, or in the exported graph where this machine cannot run it."""
    if backend.is_host:
        program = PteProgram(path)
        return lambda call: program(*call)
    if backend.form.layout == "static_io":
        return CallerCache(lowered.graph, spec, shape.cache_rows)
    return eager_caller(lowered.graph)


def _constants(
    config: ExportConfig,
    spec: ModelSpec,
    shape: ProgramShape,
    recipe: Recipe,
    length: int,
    config_sha256: str,
) -> dict[str, Any]:
    versions = {"diffulex": diffulex.__version__}
    versions |= {name: importlib.metadata.version(name) for name in _VERSIONED}
    return {
        "get_max_seq_len": length,
        "get_max_context_len": shape.cache_rows,
        "get_vocab_size": spec.vocab_size,
        "get_bos_id": -1,
        "get_eos_ids": list(spec.stop_token_ids) or [-1],
        "use_kv_cache": True,
        "enable_dynamic_shape": not shape.is_static,
        "use_sdpa_with_kv_cache": False,
        "dlx_format": FORMAT,
        "dlx_model_type": spec.family,
        "dlx_max_rows": shape.max_rows,
        "dlx_max_logits": shape.max_logits,
        "dlx_num_layers": spec.num_layers,
        "dlx_num_kv_heads": spec.num_kv_heads,
        "dlx_head_dim": spec.head_dim,
        "dlx_layout": backend_of(config.backend).form.layout,
        "dlx_kv_dtype": "float16" if recipe.is_half else "float32",
        "dlx_quant": str(recipe),
        "dlx_backend": backend_of(config.backend).name,
        "dlx_requires": "" if recipe.embedding_bits == 32 else "quantized_kernels",
        "dlx_config_sha256": config_sha256,
        "dlx_versions": ";".join(f"{name}={text}" for name, text in versions.items()),
        "dlx_mask_id": -1 if spec.mask_token_id is None else spec.mask_token_id,
        "dlx_block_size": spec.block_size or 0,
        "dlx_shift": spec.shift,
    }


def _facts(
    constants: dict[str, Any],
    path: Path,
    config: ExportConfig,
    checked: Agreement,
    agreement: Agreement,
) -> dict[str, Any]:
    """The content of edge.json."""
    return {
        "format": FORMAT,
        "model_type": constants["dlx_model_type"],
        "max_model_len": constants["get_max_seq_len"],
        "max_rows": constants["dlx_max_rows"],
        "max_logits": constants["dlx_max_logits"],
        "cache_rows": constants["get_max_context_len"],
        "backend": constants["dlx_backend"],
        "quant": constants["dlx_quant"],
        "dtype": "float32",
        "mask_token_id": constants["dlx_mask_id"],
        "block_size": constants["dlx_block_size"],
        "shift": constants["dlx_shift"],
        "eos_token_ids": constants["get_eos_ids"],
        "program": {
            "file": PROGRAM_FILE,
            "bytes": path.stat().st_size,
            "sha256": file_sha256(path),
        },
        "config_sha256": constants["dlx_config_sha256"],
        "versions": dict(item.split("=", 1) for item in constants["dlx_versions"].split(";")),
        "device_verified": backend_of(config.backend).is_host,
        "self_check": checked.to_json(),
        "agreement_with_unquantised": agreement.to_json(),
        "source": Path(config.model).name,
    }


def _check_detected(
    directory: Path, spec: ModelSpec, config: ExportConfig, architecture: str | None
) -> None:
    """The bundle has no weights: its files alone must say what the checkpoint was."""
    del architecture
    read_json_object(directory / EDGE_FILE)
    _, found, _ = detect(directory, config.model_name, mask_token_id=config.mask_token_id)
    if found != spec:
        raise ProgramError(
            f"self-check: expected the bundle to describe a model of the family {spec.family},"
            f" got {found.family} with other facts"
        )
