# SPDX-License-Identifier: Apache-2.0
"""A pipeline of unmodified diffusers classes from a directory or a hub id."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError

from diffulex.checkpoint.tensor_files import read_index
from diffulex.config.key import check_key
from diffulex.errors import CheckpointError, ConfigError
from diffulex.log import get_logger
from diffulex.omni._diffusers_compat import import_diffusers
from diffulex.omni.attention.selector import DEFAULT_ATTENTION, make_kernel
from diffulex.omni.cache.selector import NO_CACHE, get_cache_backend
from diffulex.omni.config import default_model_dir
from diffulex.omni.config_table import OMNI_CONFIG_TABLE
from diffulex.omni.errors import ModelLoadError, RequestError, UnsupportedFeatureError
from diffulex.omni.registry import find_pipeline
from diffulex.omni.request import make_request
from diffulex.omni.stage_loader import drop_foreign, load_stage

if TYPE_CHECKING:
    from diffulex.omni.attention.kernels import AttentionKernel
    from diffulex.omni.cache.base import CacheBackend
    from diffulex.omni.config import OmniDiffusionConfig
    from diffulex.omni.config_table import (
        DiffusionCacheConfig,
        KernelConfig,
        MemoryConfig,
        OmniModelConfig,
    )
    from diffulex.omni.registry import PipelineSpec
    from diffulex.omni.stage_loader import Stage

__all__ = [
    "FoundModel",
    "LoadedPipeline",
    "cache_settings",
    "component_dtype",
    "find_model",
    "load_pipeline",
    "resolve_device",
]

logger = get_logger(__name__)

_INDEX = "model_index.json"
#: What is known of the bundled model: among it, its coefficients of TeaCache.
_RECORD = "shapes.json"
_MAX_NAMES = 10
_DUMMY_SEED = 0


class FoundModel(NamedTuple):
    """A model before anything of it is loaded.

    Attributes:
        components: its `model_index.json`.
        transformers: configurations of those that there are, by name.
        tea_cache: settings of TeaCache in its own record.
    """

    directory: Path
    components: dict[str, Any]
    name: str
    spec: PipelineSpec
    transformers: dict[str, dict[str, Any]]
    tea_cache: dict[str, Any]


class LoadedPipeline(NamedTuple):
    """A pipeline on its device, and the request fields its checkpoint has defaults for.

    Attributes:
        cache: not enabled yet.
        attention: not attached yet; None: that of diffusers.
    """

    pipeline: Any
    spec: PipelineSpec
    defaults: dict[str, Any]
    device: str
    cache: CacheBackend | None = None
    attention: AttentionKernel | None = None


def find_model(config: OmniDiffusionConfig) -> FoundModel:
    """Looks up, or downloads, what the configuration names.

    Raises:
        ConfigError: a package is missing.
        ModelLoadError: there is no readable model.
        UnsupportedModelError: the pipeline class is not registered.
    """
    directory = _find_directory(config)
    index = _read_json(directory / _INDEX)
    name = config.model.model_class_name or index.get("_class_name")
    if not isinstance(name, str):
        raise ModelLoadError(f"{directory / _INDEX}: expected a class of diffusers, got {name!r}")
    spec = find_pipeline(name)
    _check_packages(spec, index)
    transformers = {
        part: _read_json(directory / part / "config.json")
        for part in spec.transformers
        if _is_there(index, part)  # some pipelines have one or two
    }
    return FoundModel(directory, index, name, spec, transformers, _read_tea_cache(directory))


def load_pipeline(
    config: OmniDiffusionConfig, stage: Stage | None = None, device: str | None = None
) -> LoadedPipeline:
    """Loads what the configuration names.

    Args:
        config: of the engine.
        stage: which blocks of the transformers this process keeps; None: all.
        device: of this process, where there are several; None: the one that is configured.

    Raises:
        ConfigError: a package is missing, or the pipeline cannot do what is configured.
        ModelLoadError: files are missing, incomplete or do not fit their classes.
        UnsupportedModelError: the pipeline class is not registered.
    """
    found = find_model(config)
    directory, index, name, spec = found[:4]
    defaults = _checkpoint_defaults(directory, spec)
    diffusers = import_diffusers()
    start = time.perf_counter()
    device = device or resolve_device(config.model.device)
    dtypes = partial(component_dtype, config.model.dtype, device, spec)
    stages = dict.fromkeys(spec.transformers, stage)
    modules = {
        component: _load_module(
            config, found, component, entry, dtypes(component), stages.get(component), device
        )
        for component, entry in index.items()
        if _is_module(entry)
    }
    if config.memory.text_encoder_int8:
        _round_text_encoders(modules, spec)
    # What a checkpoint says it lacks is not asked for again.
    absent = {
        part: None for part, entry in index.items() if isinstance(entry, list) and None in entry
    }
    try:
        pipeline = getattr(diffusers, name).from_pretrained(
            directory, **modules, **absent, dtype=dtypes("default"), local_files_only=True
        )
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ModelLoadError(f"{directory}: expected a complete {name}, got {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    _set_schedule(pipeline, config.model)
    cache = cache_settings(config.cache, found)
    is_cached = cache.cache_backend != NO_CACHE
    _place(pipeline, modules, spec, config.memory, device, is_cached=is_cached)
    _set_vae(pipeline, config.memory)
    if isinstance(config.model.dtype, Mapping):
        _convert_inputs(modules, spec)
    if config.kernels.enable_torch_compile:
        _compile(pipeline, spec, config.kernels)
    logger.info("loaded %s on %s in %.1f s", name, device, time.perf_counter() - start)
    backend = get_cache_backend(cache.cache_backend, cache)
    kernel = make_kernel(config.kernels)
    attention = None if config.kernels.attention_backend == DEFAULT_ATTENTION else kernel
    return LoadedPipeline(pipeline, spec, defaults, device, backend, attention)


def _check_packages(spec: PipelineSpec, index: dict[str, Any]) -> None:
    for component, package in spec.packages.items():
        if _is_there(index, component) and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{spec.name}: expected the package {package}, got none")


def cache_settings(config: DiffusionCacheConfig, found: FoundModel) -> DiffusionCacheConfig:
    """The settings with what the model's own record says of TeaCache."""
    fitted = found.tea_cache
    if config.cache_backend != "tea_cache" or config.coefficients or not fitted:
        return config
    threshold = config.rel_l1_thresh or fitted.get("rel_l1_thresh")
    return dataclasses.replace(config, coefficients=fitted["coefficients"], rel_l1_thresh=threshold)


def _read_tea_cache(directory: Path) -> dict[str, Any]:
    path = directory / _RECORD
    fitted = _read_json(path).get("tea_cache") if path.is_file() else None
    if fitted is None:
        return {}
    if not isinstance(fitted, dict) or not fitted.get("coefficients"):
        raise ModelLoadError(f"{path}: expected 5 coefficients in tea_cache, got {fitted!r:.100}")
    names = [name for name in ("coefficients", "rel_l1_thresh") if fitted.get(name) is not None]
    try:
        return {name: check_key(OMNI_CONFIG_TABLE[name], fitted[name]) for name in names}
    except ConfigError as error:
        raise ModelLoadError(f"{path}: tea_cache: {error}") from error


def _find_directory(config: OmniDiffusionConfig) -> Path:
    model = config.model.model
    if model is None:
        return default_model_dir()
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelLoadError(
            f"model: expected a directory with {_INDEX} or a hub id, got {model!r}"
        )
    diffusers = import_diffusers()
    try:
        found = diffusers.DiffusionPipeline.download(model, revision=config.model.revision)
    except Exception as error:
        causes: list[BaseException] = [error]
        while (inner := _cause_of(causes[-1])) is not None and inner not in causes:
            causes.append(inner)
        cause = causes[-1]
        text = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        raise ModelLoadError(
            f"model: expected a directory or a reachable hub id, got {model!r}: {text}"
        ) from error
    return Path(found)


def _cause_of(error: BaseException) -> BaseException | None:
    """What a traceback names in front of it."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ModelLoadError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"model: expected the file {path}, got none") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: expected readable JSON, got {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _checkpoint_defaults(directory: Path, spec: PipelineSpec) -> dict[str, Any]:
    """The `diffulex` object of generation_config.json: defaults of request fields."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    defaults = _read_json(path).get("diffulex", {})
    names = ", ".join(spec.defaults)
    if not isinstance(defaults, dict) or not set(defaults) <= set(spec.defaults):
        raise ModelLoadError(f"{path}: expected the keys {names} in diffulex, got {defaults!r}")
    try:
        make_request("-", defaults)
    except RequestError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    return defaults


def resolve_device(name: str, world_size: int = 1) -> str:
    """`cpu`, or `cuda` with a number where one is named; there is one device per process.

    Raises:
        UnsupportedFeatureError: this host has too few devices.
    """
    import torch  # noqa: PLC0415 (slow; nothing needs it before a model is loaded)

    has_cuda = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    if name.startswith("cuda"):
        number = int(name.partition(":")[2] or world_size - 1)
        count = torch.cuda.device_count() if has_cuda else 0
        if number >= count:
            raise UnsupportedFeatureError(
                f"device: expected one of {count} CUDA devices, got {_shown(name, world_size)}"
            )
    return name


def _shown(name: str, world_size: int) -> str:
    return name if world_size == 1 else f"{world_size} processes"


def _round_text_encoders(modules: dict[str, Any], spec: PipelineSpec) -> None:
    from diffulex.omni.int8_linear import hold_as_int8  # noqa: PLC0415 (it imports torch)

    for component in spec.text_encoders:
        if component in modules:
            hold_as_int8(modules[component])


def component_dtype(
    given: str | Mapping[str, str], device: str, spec: PipelineSpec, component: str
) -> Any:
    """The dtype of torch of a component, or of those that are not named: `default`."""
    import torch  # noqa: PLC0415

    names = {"default": given} if isinstance(given, str) else given
    usual = "float32" if component in spec.float32_components else names.get("default", "auto")
    name = names.get(component, usual)
    if name == "auto":
        name = "float32" if device == "cpu" else "bfloat16"
    return getattr(torch, name)


def _convert_inputs(modules: dict[str, Any], spec: PipelineSpec) -> None:
    """Networks get what others give in their own dtype: pipelines take one dtype for granted."""
    for name in {"vae", *spec.transformers} & {*modules}:
        module = modules[name]
        convert = partial(_as_dtype, module.dtype)
        # A VAE is not called itself.
        for part in module.children() if name == "vae" else (module,):
            part.register_forward_pre_hook(convert, with_kwargs=True)


def _as_dtype(
    dtype: Any, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Converts states, and not times."""

    def convert(value: Any) -> Any:
        is_float = hasattr(value, "is_floating_point") and value.is_floating_point()
        return value.to(dtype) if is_float else value

    states = ("hidden_states", "projections")
    named = {name: convert(v) if name.endswith(states) else v for name, v in kwargs.items()}
    return tuple(convert(value) for value in args[:1]) + args[1:], named


def _is_there(index: dict[str, Any], component: str) -> bool:
    entry = index.get(component)
    if not isinstance(entry, list | None):
        raise ModelLoadError(f"{_INDEX}: {component}: expected a list of two, got {entry!r:.100}")
    return bool(entry and None not in entry)


def _is_module(entry: object) -> bool:
    """Whether an entry of model_index.json is a network rather than a tokenizer or a scheduler."""
    if not isinstance(entry, list) or len(entry) != 2 or None in entry:
        return False
    import torch  # noqa: PLC0415

    cls = _class_of(entry)
    return isinstance(cls, type) and issubclass(cls, torch.nn.Module)


def _class_of(entry: list[str]) -> Any:
    library, name = entry
    if library not in ("diffusers", "transformers"):
        raise ModelLoadError(
            f"{_INDEX}: expected classes of diffusers or transformers, got {entry}"
        )
    try:
        return getattr(importlib.import_module(library), name)
    except (AttributeError, TypeError):
        raise ModelLoadError(f"{_INDEX}: expected a class of {library}, got {name!r}") from None


def _load_module(
    config: OmniDiffusionConfig,
    found: FoundModel,
    component: str,
    entry: list[str],
    dtype: Any,
    stage: Stage | None,
    device: str,
) -> Any:
    """One network with all tensors of its stage, in evaluation mode; of the host if it is read."""
    cls, library = _class_of(entry), entry[0]
    where, lists = found.directory / component, found.spec.block_lists
    if not (where / "config.json").is_file():
        raise ModelLoadError(f"model: expected the file {where / 'config.json'}, got none")
    is_dummy = config.model.load_format == "dummy"
    try:
        # The libraries take for granted what an index says.
        for index in () if is_dummy else sorted(where.glob("*.safetensors.index.json")):
            read_index(index)
        if is_dummy:
            # A device may have no room for all of what is cut or offloaded.
            is_part = stage is not None or _offloading(found.spec, config.memory).get(component)
            module = _dummy(cls, library, where, "cpu" if is_part else device).to(dtype)
            if stage is not None:
                drop_foreign(module, lists, stage)
        elif stage is not None:
            module, info = load_stage(cls, where, dtype, lists, stage)
            _check_complete(where, info)
        else:
            module, info = cls.from_pretrained(
                where, output_loading_info=True, use_safetensors=True, dtype=dtype
            )
            _check_complete(where, info)
    except CheckpointError as error:
        raise ModelLoadError(str(error)) from error
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(f"{where}: expected complete weights, got {error}") from error
    whole = stage is None
    if whole and any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise ModelLoadError(f"{where}: expected every tensor to have data, got a meta tensor")
    return module.eval().requires_grad_(False)


def _dummy(cls: Any, library: str, where: Path, device: str) -> Any:
    """Random weights, drawn by the device: a host takes a minute for some billions."""
    import torch  # noqa: PLC0415

    torch.manual_seed(_DUMMY_SEED)
    with torch.device(device):
        if library == "diffusers":
            return cls.from_config(cls.load_config(where))
        return cls(cls.config_class.from_pretrained(where))


def _check_complete(where: Path, info: dict[str, Any]) -> None:
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        names = sorted(str(name) for name in info.get(kind) or ())
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            shown = ", ".join(names[:_MAX_NAMES])
            raise ModelLoadError(
                f"{where}: expected complete weights, got {kind.replace('_', ' ')} {shown}{more}"
            )
    unexpected = sorted(info.get("unexpected_keys") or ())
    if unexpected:
        shown = ", ".join(unexpected[:_MAX_NAMES])
        logger.warning("%s: %d tensors have no place: %s", where, len(unexpected), shown)


def _place(
    pipeline: Any,
    modules: dict[str, Any],
    spec: PipelineSpec,
    memory: MemoryConfig,
    device: str,
    *,
    is_cached: bool,
) -> None:
    """Moves every component to the device, or attaches what moves its parts when they are used."""
    import torch  # noqa: PLC0415
    from diffusers.hooks.group_offloading import apply_group_offloading  # noqa: PLC0415

    kinds = _offloading(spec, memory)
    for name, module in modules.items():
        kind = kinds.get(name)
        if kind is None:
            # What another rank has stays without data.
            module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
            continue
        apply_group_offloading(
            module,
            onload_device=torch.device(device),
            offload_device=torch.device("cpu"),
            offload_type=kind,
            num_blocks_per_group=1 if kind == "block_level" else None,
            # A stream loads the block that follows, which a cache may skip.
            use_stream=device != "cpu"
            and memory.pin_cpu_memory
            and not (is_cached and name in spec.transformers),
        )


def _offloading(spec: PipelineSpec, memory: MemoryConfig) -> dict[str, str]:
    """How components that are kept in host memory come to the device: as blocks, or as single layers."""
    kinds = {
        "block_level": spec.transformers if memory.dit_cpu_offload else (),
        "leaf_level": (
            *(spec.text_encoders if memory.text_encoder_cpu_offload else ()),
            *(spec.image_encoders if memory.image_encoder_cpu_offload else ()),
            *(("vae",) if memory.vae_cpu_offload else ()),
        ),
    }
    return {name: kind for kind, names in kinds.items() for name in names}


def _compile(pipeline: Any, spec: PipelineSpec, kernels: KernelConfig) -> None:
    """Blocks of one class share what is compiled; what is around them is not worth the time."""
    for name in spec.transformers:
        transformer = getattr(pipeline, name, None)
        for list_name in spec.block_lists if transformer is not None else ():
            for block in getattr(transformer, list_name):
                block.compile(**(kernels.torch_compile_kwargs or {}))


def _set_schedule(pipeline: Any, model: OmniModelConfig) -> None:
    """Replaces the scheduler, whose configuration is frozen, by one with the shift."""
    if model.boundary_ratio is not None:
        pipeline.register_to_config(boundary_ratio=model.boundary_ratio)
    if model.flow_shift is None:
        return
    old = pipeline.scheduler
    # Schedulers of several steps shift by one name, and the simplest one by another.
    name = "flow_shift" if old.config.get("use_flow_sigmas") else "shift"
    if name not in old.config or old.config.get("use_dynamic_shifting"):
        kind = type(old).__name__
        raise ModelLoadError(f"flow_shift: expected a schedule with a fixed shift, got {kind}")
    pipeline.register_modules(
        scheduler=type(old).from_config(old.config, **{name: model.flow_shift})
    )


def _set_vae(pipeline: Any, memory: MemoryConfig) -> None:
    for is_wanted, method, key in (
        (memory.vae_use_slicing, "enable_slicing", "vae_use_slicing"),
        (memory.vae_use_tiling, "enable_tiling", "vae_use_tiling"),
    ):
        if not is_wanted:
            continue
        if not hasattr(pipeline.vae, method):
            name = type(pipeline.vae).__name__
            raise UnsupportedFeatureError(f"{key}: expected a VAE that can do it, got {name}")
        getattr(pipeline.vae, method)()
