# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint directory to a loaded model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from diffulex.distributed.layout import Sizes
from diffulex.distributed.legality import check_model_class
from diffulex.distributed.shard import ONE_RANK, Shard
from diffulex.errors import CheckpointError, ConfigError
from diffulex.families import detection as families
from diffulex.families.listing import FAMILIES, family_named
from diffulex.families.spec.reader import read_json_object, read_optional_json
from diffulex.log import get_logger
from diffulex.quantization.stored import read_stored
from diffulex.registry import AutoModelForDiffusionLM

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    import torch
    from torch import nn

    from diffulex.checkpoint.loader import WeightSink
    from diffulex.checkpoint.projection import Projection
    from diffulex.families.spec import ModelSpec
    from diffulex.quantization.stored import StoredQuantization

logger = get_logger(__name__)

_BLOCK_SUFFIX = re.compile(r"-b(\d+)$")


class Quantizer(Protocol):
    """Gives the matrices of a model formats in low precision."""

    @property
    def scheme(self) -> str:
        """Its name in the configuration."""

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The model that `make` returns, its large matrices without memory."""

    def saved_bytes(
        self,
        model: nn.Module,
        table: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> int:
        """What it saves on a device of a model with this weight table."""

    def apply(
        self, model: nn.Module, table: Mapping[str, torch.Tensor], device: torch.device | str
    ) -> Mapping[str, WeightSink]:
        """Gives the matrices memory; returns what fills those in low precision."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What the directory says besides the shapes of the model."""

    model_dir: Path
    family: str
    architecture: str | None
    #: ``generation_config.json``'s ``diffulex`` object: engine options this checkpoint prefers.
    engine_defaults: Mapping[str, Any] = field(default_factory=dict)
    #: How its weights are in low precision; None: they are not.
    stored: StoredQuantization | None = None


def detect(
    model_dir: Path, model_name: str | None = None, *, mask_token_id: int | None = None
) -> tuple[str, ModelSpec, CheckpointInfo]:
    """Finds the registered model for a checkpoint and reads its description.

    Args:
        model_dir: directory with ``config.json``.
        model_name: family chosen by the user; rejected when the checkpoint contradicts it.
        mask_token_id: explicit mask id, which wins over every file.

    Returns:
        Name in the model registry, description, and further facts of the directory.

    Raises:
        CheckpointError: no such family, a family without support, or an unusable configuration.
        ConfigError: `model_name` is unknown or contradicts the checkpoint.
    """
    config_path = model_dir / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"checkpoint: {model_dir}: expected a config.json, got none")
    config = read_json_object(config_path)
    stored = read_stored(model_dir, config)
    name = _registered_name(config, model_dir, model_name)
    spec = spec_reader(name)(config, model_dir, mask_token_id=mask_token_id)
    _warn_about_block_suffix(model_dir, spec)
    info = CheckpointInfo(
        model_dir=model_dir,
        family=spec.family,
        architecture=families.first_architecture(config),
        engine_defaults=_engine_defaults(model_dir),
        stored=stored,
    )
    return name, spec, info


def spec_reader(name: str) -> Callable[..., ModelSpec]:
    """The reader of ``config.json`` of a registered model; imports no layers of a built-in one."""
    family = family_named(name)
    if family is not None and AutoModelForDiffusionLM.is_built_in(name):
        return family.read_spec
    model_class: Any = AutoModelForDiffusionLM.get(name)
    reader: Callable[..., ModelSpec] | None = getattr(model_class, "read_spec", None)
    if reader is None:
        raise ConfigError(
            f"model_name: expected a class with read_spec for {name!r}, got {model_class.__name__}"
        )
    return reader


def load_model(
    model_name: str,
    spec: ModelSpec,
    model_dir: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: bool = False,
    *,
    lora_path: Path | None = None,
    merge_lora: bool = False,
    quantizer: Quantizer | None = None,
    shard: Shard = ONE_RANK,
    num_ranks: int = 1,
    on_piece: Callable[[], None] = lambda: None,
) -> nn.Module:
    """Builds the registered model and fills it from the checkpoint; see `loader.load_weights`.

    Names, shapes and the memory at hand are checked before any memory is taken. `lora_path` is the
    directory of an adapter; with `merge_lora` its products become part of the weights, otherwise
    they are computed beside them. With a `quantizer` matrices are quantised as they are read, a
    merged adapter included. Of several ranks, `shard` says whose part is built and read, and
    `num_ranks` how many of them `memory.check_memory` asks memory for. `on_piece` is called as by
    `TensorReader`.

    Raises:
        CheckpointError: the files do not fit the description, or the model not the memory.
    """
    # Imported here because they import torch.
    from diffulex.checkpoint import lora  # noqa: PLC0415
    from diffulex.checkpoint.loader import (  # noqa: PLC0415
        check_headers,
        check_num_layers,
        load_weights,
        tied_weight_table,
    )
    from diffulex.checkpoint.memory import model_bytes, reporting_memory  # noqa: PLC0415

    model_class: Any = _class_of(model_name, shard)
    check_num_layers(spec, model_dir)
    adapter = None if lora_path is None else lora.read_adapter(lora_path)
    with reporting_memory(model_bytes(spec, dtype), device):
        on_meta = model_class(spec, dtype, "meta")
        check_headers(on_meta, model_dir)
        if adapter is not None:
            adapter.check(adaptable_projections(on_meta, model_name))
    model, sinks = _build(
        partial(model_class, spec, dtype),
        on_meta,
        dtype,
        device,
        quantizer,
        lambda model: tied_weight_table(model, model_dir),
        num_ranks,
    )
    merge = None
    if adapter is not None and merge_lora:
        merge = lora.MergePlan(adapter, adaptable_projections(model, model_name))
    load_weights(model, model_dir, progress=progress, merge=merge, sinks=sinks, on_piece=on_piece)
    if adapter is not None and not merge_lora:
        lora.attach(adapter, adaptable_projections(model, model_name))
    module: nn.Module = model.eval()
    return module


def random_model(
    model_name: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    quantizer: Quantizer | None = None,
    shard: Shard = ONE_RANK,
    num_ranks: int = 1,
    on_piece: Callable[[], None] = lambda: None,
) -> nn.Module:
    """The registered model, or the part of one that a rank has, with drawn weights.

    With a `quantizer` matrices are quantised as they are drawn; see `random_weights`. `num_ranks` and
    `on_piece` as for `load_model`.
    """
    from diffulex.checkpoint.loader import weight_table_of  # noqa: PLC0415 (imports torch)
    from diffulex.checkpoint.memory import model_bytes, reporting_memory  # noqa: PLC0415
    from diffulex.checkpoint.random_weights import draw_weights  # noqa: PLC0415

    def tied_table(model: Any) -> Mapping[str, torch.Tensor]:
        if spec.tie_word_embeddings:
            model.tie_embeddings()
        return weight_table_of(model, {})

    make = partial(_class_of(model_name, shard), spec, dtype)
    with reporting_memory(model_bytes(spec, dtype), device):
        on_meta = make("meta")
    model, sinks = _build(make, on_meta, dtype, device, quantizer, tied_table, num_ranks)
    draw_weights(model, seed, sinks=sinks, on_piece=on_piece)
    module: nn.Module = model.eval()
    return module


def _build(
    make: Callable[[torch.device | str], Any],
    on_meta: Any,
    dtype: torch.dtype,
    device: torch.device | str,
    quantizer: Quantizer | None,
    table_of: Callable[[Any], Mapping[str, torch.Tensor]],
    num_ranks: int,
) -> tuple[Any, Mapping[str, WeightSink] | None]:
    """A model without values, and what fills its matrices in low precision.

    Args:
        make: builds it on a device.
        on_meta: what it built on that one.
        table_of: its weight table, once the head is tied if it will be.
        num_ranks: as for `load_model`.

    Raises:
        CheckpointError: it does not fit the memory.
    """
    from diffulex.checkpoint import memory  # noqa: PLC0415

    scheme = "" if quantizer is None else quantizer.scheme
    table = table_of(on_meta)
    needed = memory.built_bytes(on_meta)
    if quantizer is not None:
        needed -= quantizer.saved_bytes(on_meta, table, dtype, device)
    with memory.reporting_memory(needed, device, scheme):
        memory.check_memory(needed, device, scheme, num_ranks)
        if quantizer is None:
            return make(device), None
        model = quantizer.build(lambda: make(device))
        return model, quantizer.apply(model, table_of(model), device)


def _class_of(model_name: str, shard: Shard) -> Callable[..., Any]:
    """What builds a model, or the part of it that a rank has."""
    model_class: Any = AutoModelForDiffusionLM.get(model_name)
    if shard == ONE_RANK:
        return cast("Callable[..., Any]", model_class)  # which may know of no shards
    experts = 1 if shard.experts is None else shard.experts.size
    check_model_class(model_name, model_class, Sizes(shard.size, 1, experts))
    return partial(model_class, shard=shard)


def adaptable_projections(model: nn.Module, model_name: str) -> Mapping[str, Projection]:
    """Module name -> projection that an adapter may change; CheckpointError where there are none."""
    projections: Any = getattr(model, "projections", None)
    if projections is None:
        raise CheckpointError(f"adapter: expected a family with adapters, got {model_name!r}")
    table: Mapping[str, Projection] = projections()
    return table


def _registered_name(config: Mapping[str, Any], model_dir: Path, model_name: str | None) -> str:
    """Registry entry to use; built-in families first, then names that others registered."""
    available = _supported()
    family = families.detect_family(config, lambda: _tensor_names(model_dir))
    if model_name is not None:
        return _checked_name(model_name, family, available)
    if family is not None:
        return family
    architecture = families.first_architecture(config)
    for candidate in (architecture, config.get("model_type")):
        if isinstance(candidate, str) and candidate in AutoModelForDiffusionLM.available():
            return AutoModelForDiffusionLM.canonical(candidate)
    nearest = families.nearest_family(config, lambda: _tensor_names(model_dir))
    hint = ""
    if nearest is not None:
        hint = (
            f"; its layout is nearest to {nearest}: pass model_name={nearest!r} "
            f"(--model-name {nearest}) to load it as such"
        )
    raise CheckpointError(
        f"checkpoint: {model_dir}: expected one of the supported architectures "
        f"({', '.join(available)}), got {architecture or config.get('model_type')!r}{hint}"
    )


def _supported() -> tuple[str, ...]:
    """Registered model names without their aliases."""
    registry = AutoModelForDiffusionLM
    return tuple(sorted({registry.canonical(name) for name in registry.available()}))


def check_model_name(model_name: str) -> None:
    """Raises ConfigError unless a model is registered, or built in, under this name."""
    available = _supported()
    name = AutoModelForDiffusionLM.canonical(model_name)
    if families.family_of_name(name) is None and name not in available:
        built_in = {name for item in FAMILIES for name in (item.name, *item.aliases)}
        names = sorted({*available, *built_in})
        raise ConfigError(f"model_name: expected one of {', '.join(names)}, got {name!r}")


def _checked_name(model_name: str, family: str | None, available: tuple[str, ...]) -> str:
    check_model_name(model_name)
    model_name = AutoModelForDiffusionLM.canonical(model_name)
    builtin = families.family_of_name(model_name)
    # A family registered from outside is trusted to know its own checkpoints, and an architecture
    # that no family claims may be loaded as whatever the user says.
    if builtin is not None and family is not None and not families.matches(model_name, family):
        raise ConfigError(
            f"model_name: expected the family of the checkpoint ({family}), got {model_name!r}"
        )
    return model_name if builtin is None or model_name in available else builtin


def _tensor_names(model_dir: Path) -> Collection[str]:
    """Names in the checkpoint, from the index alone where there is one; empty without weights."""
    from diffulex.checkpoint.tensor_files import stored_names  # noqa: PLC0415 (imports torch)

    return stored_names(model_dir)


def _engine_defaults(model_dir: Path) -> Mapping[str, Any]:
    defaults = read_optional_json(model_dir / "generation_config.json").get("diffulex")
    if defaults is None:
        return {}
    if not isinstance(defaults, dict):
        raise CheckpointError(
            f"generation_config.json: diffulex: expected an object, got {defaults!r}"
        )
    return defaults


def _warn_about_block_suffix(model_dir: Path, spec: ModelSpec) -> None:
    match = _BLOCK_SUFFIX.search(model_dir.name)
    if match and spec.block_size is not None and int(match[1]) != spec.block_size:
        logger.warning(
            "%s: the directory name suggests block size %s, the checkpoint says %d; "
            "pass block_size to choose",
            model_dir.name,
            match[1],
            spec.block_size,
        )
