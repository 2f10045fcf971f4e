# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments of the image engine become one immutable, checked object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffulex
from diffulex.config.key import ConfigKey, check_key, unknown_key
from diffulex.config.parse import dtype_name
from diffulex.env import get_text
from diffulex.errors import ConfigError
from diffulex.omni.attention.selector import DEFAULT_ATTENTION, attention_name
from diffulex.omni.cache.selector import NO_CACHE, cache_name
from diffulex.omni.config_table import (
    OMNI_CONFIG_TABLE,
    OMNI_SECTIONS,
    DiffusionCacheConfig,
    DiffusionParallelConfig,
    KernelConfig,
    MemoryConfig,
    OmniEngineConfig,
    OmniModelConfig,
)

__all__ = ["OmniDiffusionConfig", "default_model_dir"]

#: Keywords that hold a whole section, as a mapping or as its class.
_SECTION_KEYWORDS = {
    "parallel_config": DiffusionParallelConfig,
    "cache_config": DiffusionCacheConfig,
}
_ZOO_MODEL = "examples/zoo/shapes_qwen_image"


@dataclass(frozen=True, slots=True)
class OmniDiffusionConfig:
    """All settings of an image engine; `from_kwargs` makes one."""

    model: OmniModelConfig
    parallel: DiffusionParallelConfig
    cache: DiffusionCacheConfig
    kernels: KernelConfig
    memory: MemoryConfig
    engine: OmniEngineConfig

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> OmniDiffusionConfig:
        """Checks names, types and ranges; None means the default.

        Raises:
            ConfigError: unknown key, illegal or unsupported value.
        """
        flat: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name in _SECTION_KEYWORDS:
                flat.update(_section_items(name, value))
            else:
                flat[name] = value
        if flat.get("cache_backend") is None:
            # The second is what it was called before.
            named = get_text("DIFFUSION_CACHE_BACKEND") or get_text("DIFFUSION_CACHE_ADAPTER")
            flat["cache_backend"] = named or None
        flat["cache_backend"] = cache_name(flat["cache_backend"])
        if flat.get("attention_backend") is None:
            flat["attention_backend"] = get_text("DIFFUSION_ATTENTION_BACKEND") or None
        flat["attention_backend"] = attention_name(flat["attention_backend"])
        for name, value in flat.items():
            if name not in OMNI_CONFIG_TABLE:
                known = (*OMNI_CONFIG_TABLE, *_SECTION_KEYWORDS)
                raise ConfigError(unknown_key(name, name, known))
            if value is None:
                continue
            row = OMNI_CONFIG_TABLE[name]
            flat[name] = check_key(row, _named_dtypes(row, value) if name == "dtype" else value)
        sections = {
            section: section_class(
                **{
                    key.name: flat[key.name]
                    for key in OMNI_CONFIG_TABLE.values()
                    if key.section == section and flat.get(key.name) is not None
                }
            )
            for section, section_class in OMNI_SECTIONS.items()
        }
        config = cls(**sections)
        config._check_processes()
        return config

    def _check_processes(self) -> None:
        parallel, world = self.parallel, self.parallel.world_size
        if parallel.distributed_executor_backend == "inproc" and world > 1:
            raise ConfigError(
                f"distributed_executor_backend: expected mp for {world} processes, got 'inproc'"
            )
        if world > 1 and self.model.device.startswith("cuda:"):
            raise ConfigError(
                f"device: expected cuda or cpu for {world} processes, got {self.model.device!r}"
            )
        self._check_blocks()
        if parallel.is_inproc and self.engine.request_timeout_s is not None:
            raise ConfigError(
                "request_timeout_s: expected distributed_executor_backend mp with it, got a model in"
                " the caller's process"
            )

    def _check_blocks(self) -> None:
        """What cannot be done to the same blocks."""
        parallel, kernels = self.parallel, self.kernels
        if self.memory.dit_cpu_offload:
            for name in ("tensor_parallel_size", "pipeline_parallel_size"):
                if getattr(parallel, name) > 1:
                    raise ConfigError(f"dit_cpu_offload: expected {name} 1 with it, got more")
            if kernels.enable_torch_compile:
                raise ConfigError(
                    "enable_torch_compile: expected dit_cpu_offload false with it, got true"
                )
        if parallel.pipeline_parallel_size > 1 and self.cache.cache_backend != NO_CACHE:
            raise ConfigError(
                "pipeline_parallel_size: expected cache_backend none with it, got"
                f" {self.cache.cache_backend}"
            )
        if kernels.torch_compile_kwargs and not kernels.enable_torch_compile:
            raise ConfigError(
                "torch_compile_kwargs: expected enable_torch_compile with it, got none"
            )
        if kernels.attention_backend != DEFAULT_ATTENTION and parallel.ring_degree > 1:
            raise ConfigError(
                f"ring_degree: expected 1 with {kernels.attention_backend}, got"
                f" {parallel.ring_degree}: a ring merges what {DEFAULT_ATTENTION} gives"
            )

    def to_dict(self) -> dict[str, Any]:
        """The flat keywords that give this configuration again."""
        flat: dict[str, Any] = {}
        for section in OMNI_SECTIONS:
            flat.update(dataclasses.asdict(getattr(self, section)))
        return flat


def _named_dtypes(row: ConfigKey, value: object) -> str | dict[str, str]:
    if not isinstance(value, Mapping):
        return dtype_name(value)
    return {
        part: check_key(row._replace(name=f"dtype.{part}"), dtype_name(item))
        for part, item in value.items()
    }


def _section_items(name: str, value: object) -> dict[str, Any]:
    section = _SECTION_KEYWORDS[name]
    if isinstance(value, section):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(section)}
    if not isinstance(value, Mapping):
        kind = f"a mapping or a {section.__name__}"
        raise ConfigError(f"{name}: expected {kind}, got {value!r}")
    known = [field.name for field in dataclasses.fields(section)]
    for item in value:
        if item not in known:
            raise ConfigError(unknown_key(f"{name}.{item}", str(item), known))
    return dict(value)


def default_model_dir() -> Path:
    """The bundled image model: of the source tree the package runs from, else of the one it runs in.

    Raises:
        ConfigError: neither has it.
    """
    source_tree = Path(diffulex.__file__).resolve().parents[2]
    for path in (source_tree / _ZOO_MODEL, Path(_ZOO_MODEL)):
        if (path / "model_index.json").is_file():
            return path
    raise ConfigError(
        "model: expected a directory or a hub id (--model), got none, and neither the package's"
        f" source tree nor the working directory has {_ZOO_MODEL}"
    )
