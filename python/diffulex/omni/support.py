# SPDX-License-Identifier: Apache-2.0
"""Which pipelines can be shared in which way, before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.omni.attention.selector import (
    DEFAULT_ATTENTION,
    AutoAttentionBackend,
    usable_kernel,
)
from diffulex.omni.cache.selector import NO_CACHE
from diffulex.omni.cache.tea_settings import tea_settings
from diffulex.omni.errors import UnsupportedFeatureError
from diffulex.omni.loader import cache_settings, component_dtype, find_model, resolve_device

if TYPE_CHECKING:
    from diffulex.omni.config import OmniDiffusionConfig
    from diffulex.omni.config_table import (
        DiffusionCacheConfig,
        DiffusionParallelConfig,
        OmniModelConfig,
    )
    from diffulex.omni.loader import FoundModel

__all__ = [
    "check_cache",
    "check_chosen_cache",
    "check_engine",
    "check_kernels",
    "check_parallel",
    "check_schedule",
]


def check_engine(config: OmniDiffusionConfig) -> FoundModel:
    """Compares all settings with the model and this host, before anything is loaded; the model.

    Raises:
        UnsupportedFeatureError: they do not fit.
        ConfigError, ModelLoadError, UnsupportedModelError: as `find_model`.
    """
    found = find_model(config)
    check_schedule(config.model, found)
    _check_dtypes(config.model, found)
    if config.memory.image_encoder_cpu_offload and not found.spec.image_encoders:
        raise UnsupportedFeatureError(
            f"image_encoder_cpu_offload: expected a pipeline with such an encoder, got {found.name}"
        )
    if config.engine.output_type == "latent" and not found.spec.has_latents:
        raise UnsupportedFeatureError(f"output_type: expected pictures of {found.name}, got latent")
    check_cache(config.cache, found)
    check_kernels(config, found)
    if not config.parallel.is_inproc:
        check_parallel(config.parallel, found)
    resolve_device(config.model.device, config.parallel.world_size)
    return found


def check_schedule(config: OmniModelConfig, found: FoundModel) -> None:
    """Compares what changes the schedule with the model's pipeline.

    Raises:
        UnsupportedFeatureError: it has no such thing.
    """
    for name in ("flow_shift", "boundary_ratio"):
        value = getattr(config, name)
        if value is None:
            continue
        if name not in found.spec.schedule_keys:
            raise UnsupportedFeatureError(f"{name}: expected none for {found.name}, got {value:g}")
        names = found.transformers
        if name == "boundary_ratio" and len(names) < 2:
            raise UnsupportedFeatureError(
                f"{name}: expected a model with two transformers, got {' and '.join(names)}"
            )


def _check_dtypes(config: OmniModelConfig, found: FoundModel) -> None:
    known = [
        name for name in found.components if (found.directory / name / "config.json").is_file()
    ]
    for name in config.dtype if isinstance(config.dtype, Mapping) else ():
        if name not in ("default", *known):
            raise ConfigError(f"dtype: expected default or one of {', '.join(known)}, got {name!r}")


def check_parallel(parallel: DiffusionParallelConfig, found: FoundModel) -> None:
    """Compares the sizes with what the model's pipeline can do.

    Raises:
        UnsupportedFeatureError: it cannot do one of them.
    """
    spec = found.spec
    for name, can_do in (
        ("cfg_parallel_size", spec.has_latents and spec.cfg is not None),
        ("ulysses_degree", spec.has_latents and spec.has_sequence_plan),
        ("ring_degree", spec.has_latents and spec.has_sequence_plan),
        ("tensor_parallel_size", spec.has_latents and spec.tensor_plan is not None),
        ("pipeline_parallel_size", spec.has_latents and bool(spec.block_lists)),
    ):
        size = getattr(parallel, name)
        if size > 1 and not can_do:
            raise UnsupportedFeatureError(f"{name}: expected 1 for {found.name}, got {size}")
    if parallel.tensor_parallel_size > 1:
        _check_heads(parallel.tensor_parallel_size, found)


def check_cache(config: DiffusionCacheConfig, found: FoundModel) -> None:
    """Compares the cache with what is known of the model.

    Raises:
        UnsupportedFeatureError: TeaCache needs to know more.
    """
    if config.cache_backend != "tea_cache":
        return
    settings, is_alone = cache_settings(config, found), len(found.transformers) == 1
    for transformer in found.transformers.values():
        tea_settings(settings, found.spec, transformer, is_alone=is_alone)


def check_chosen_cache(
    config: OmniDiffusionConfig, cache: DiffusionCacheConfig, found: FoundModel
) -> None:
    """Compares the cache that a request chooses with an engine and its model.

    Raises:
        UnsupportedFeatureError: it cannot be put on the blocks.
    """
    name = cache.cache_backend
    if name == NO_CACHE:
        return
    if not found.spec.block_lists:
        raise UnsupportedFeatureError(f"cache_backend: expected none for {found.name}, got {name}")
    if config.parallel.pipeline_parallel_size > 1:
        raise UnsupportedFeatureError(
            f"cache_backend: expected none with pipeline_parallel_size above 1, got {name}"
        )
    memory = config.memory
    is_streamed = memory.dit_cpu_offload and memory.pin_cpu_memory
    is_on_cuda = resolve_device(config.model.device, config.parallel.world_size) != "cpu"
    if is_streamed and is_on_cuda and config.cache.cache_backend == NO_CACHE:
        raise UnsupportedFeatureError(
            "cache_backend: expected none with dit_cpu_offload, unless the engine starts with a cache,"
            f" got {name}"
        )
    check_cache(cache, found)


def check_kernels(config: OmniDiffusionConfig, found: FoundModel) -> None:
    """Compares kernel and compilation with the model, its device and what is installed.

    Raises:
        UnsupportedFeatureError: one of them does not fit.
    """
    spec, kernels = found.spec, config.kernels
    if kernels.enable_torch_compile and not spec.block_lists:
        raise UnsupportedFeatureError(
            f"enable_torch_compile: expected a pipeline whose blocks are known, got {spec.name}"
        )
    name = kernels.attention_backend
    if name == DEFAULT_ATTENTION:
        return
    if spec.has_own_attention:
        raise UnsupportedFeatureError(
            f"attention_backend: expected {DEFAULT_ATTENTION} for {spec.name}, got {name}"
        )
    cls = AutoAttentionBackend.get(usable_kernel(kernels).attention_backend)
    if spec.media not in cls.media:
        kinds = " or ".join(cls.media)
        raise UnsupportedFeatureError(
            f"attention_backend: expected a pipeline for {kinds} with {name}, got {spec.name}"
        )
    if cls.is_for_tokens and config.parallel.grid.size("sp") > 1:
        raise UnsupportedFeatureError(
            f"attention_backend: expected ulysses_degree 1 with {name}, got more"
        )
    device = resolve_device(config.model.device, config.parallel.world_size)
    for part, transformer in found.transformers.items():
        dtype = component_dtype(config.model.dtype, device, spec, part)
        cls.check(name, device, str(dtype).removeprefix("torch."), _head_size(transformer))


def _head_size(config: Mapping[str, Any]) -> int | None:
    """Width of a head of a transformer, as far as its configuration says it."""
    if "attention_head_dim" in config:
        return int(config["attention_head_dim"])
    width, heads = config.get("dim"), config.get("n_heads")
    return int(width) // int(heads) if width and heads else None


def _check_heads(size: int, found: FoundModel) -> None:
    for transformer in found.transformers.values():
        heads = transformer.get("num_attention_heads")
        if not isinstance(heads, int) or heads % size:
            raise UnsupportedFeatureError(
                f"tensor_parallel_size: expected a divisor of {heads} heads, got {size}"
            )
