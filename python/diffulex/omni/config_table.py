# SPDX-License-Identifier: Apache-2.0
"""The one table of settings of the image engine: sections, keys, defaults, legal ranges, help."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffulex.config.key import (
    ANY,
    ConfigKey,
    Range,
    above,
    at_least,
    between,
    build_table,
    check_key,
    inert,
    key,
    one_of,
)
from diffulex.errors import ConfigError
from diffulex.omni.attention.selector import DEFAULT_ATTENTION, AutoAttentionBackend
from diffulex.omni.cache.scm import SCM_POLICIES
from diffulex.omni.cache.selector import NO_CACHE, AutoCacheBackend
from diffulex.omni.grid import Grid

__all__ = [
    "OMNI_CONFIG_TABLE",
    "OMNI_SECTIONS",
    "OUTPUT_TYPES",
    "DiffusionCacheConfig",
    "DiffusionParallelConfig",
    "KernelConfig",
    "MemoryConfig",
    "OmniEngineConfig",
    "OmniModelConfig",
]

OUTPUT_TYPES = ("pil", "np", "pt", "latent")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_BOOL = one_of(True, False)
#: Of integers that a request may bring: worker processes get them in 64 bits.
_MOST = 2**31 - 1
#: Installed packages may add others.
_CACHES = Range(
    "one of none, tea_cache, cache_dit",
    lambda v: v == NO_CACHE or v in AutoCacheBackend.available(),
)
_ATTENTIONS = Range(
    "one of TORCH_SDPA, MATH, FLASH_ATTN, SAGE_ATTN, SLIDING_TILE_ATTN",
    lambda v: v in AutoAttentionBackend.available(),
)


@dataclass(frozen=True, slots=True)
class OmniModelConfig:
    """Which pipeline, and where it runs."""

    model: str | None = key(
        "str?",
        None,
        ANY,
        "A local directory with `model_index.json`, or a hub id; unset: the image model of the source"
        " tree.",
    )
    revision: str | None = key("str?", None, ANY, "Branch, tag or commit of a hub id.")
    model_class_name: str | None = key(
        "str?", None, ANY, "Registered pipeline; unset: the class of `model_index.json`."
    )
    dtype: str | Mapping[str, str] = key(
        "str or mapping",
        "auto",
        Range(f"one of {', '.join(_DTYPES)}", lambda v: isinstance(v, Mapping) or v in _DTYPES),
        "Compute dtype, or those of components by name and of the others as `default`; `auto`: bfloat16"
        " on CUDA, float32 on CPU. Wan's VAE stays in float32 unless it is named.",
    )
    device: str = key(
        "str",
        "auto",
        Range(
            "auto, cpu, cuda, cuda:N",
            lambda v: v in ("auto", "cpu", "cuda") or (v.startswith("cuda:") and v[5:].isdecimal()),
        ),
        "Where the model runs; `auto`: CUDA if there is a device, else CPU.",
    )
    load_format: str = key(
        "str",
        "auto",
        one_of("auto", "dummy"),
        "`dummy`: random weights of the configured shapes, for measurements; reads no weights.",
    )
    flow_shift: float | None = key(
        "float?",
        None,
        above(0),
        "Wan: stretches the schedule towards noise, more for more pixels; unset: the checkpoint's.",
    )
    boundary_ratio: float | None = key(
        "float?",
        None,
        between(0, 1),
        "Wan with two transformers: share of the noise from which on the first one draws; unset: the"
        " checkpoint's.",
    )


@dataclass(frozen=True, slots=True)
class DiffusionParallelConfig:
    """Processes that share the work, on one host."""

    pipeline_parallel_size: int = key("int", 1, at_least(1), "Ranks that share the blocks.")
    data_parallel_size: int = key("int", 1, at_least(1), "Replicas that share the images.")
    tensor_parallel_size: int = key("int", 1, at_least(1), "Ranks that share the heads.")
    ulysses_degree: int = key("int", 1, at_least(1), "Ranks that exchange heads for tokens.")
    ring_degree: int = key("int", 1, at_least(1), "Ranks that pass keys and values around.")
    sequence_parallel_size: int | None = key(
        "int?",
        None,
        at_least(1),
        "Ranks that share the tokens; unset: ulysses_degree times ring_degree, which it must equal.",
    )
    cfg_parallel_size: int = key("int", 1, one_of(1, 2), "Ranks that share the two branches.")
    num_gpus: int | None = key(
        "int?",
        None,
        at_least(1),
        "Worker processes, on CUDA one per device; unset: the product of the sizes, which it must"
        " equal.",
    )
    distributed_executor_backend: str = key(
        "str",
        "auto",
        one_of("auto", "inproc", "mp"),
        "`inproc`: the model runs in the caller's process; `mp`: in worker processes; `auto`: in"
        " workers if there are several.",
    )

    def __post_init__(self) -> None:
        """Checks the sizes, each and together.

        Raises:
            ConfigError: one is not legal, or not the product of others.
        """
        for item in dataclasses.fields(self):
            check_key(OMNI_CONFIG_TABLE[item.name], getattr(self, item.name))
        products = (
            ("sequence_parallel_size", "ulysses_degree and ring_degree", self.grid.size("sp")),
            ("num_gpus", "the parallel sizes", self.world_size),
        )
        for name, factors, product in products:
            if getattr(self, name) not in (None, product):
                raise ConfigError(
                    f"{name}: expected {product}, the product of {factors}, got"
                    f" {getattr(self, name)}"
                )

    @property
    def grid(self) -> Grid:
        """Places of the processes."""
        return Grid(
            {
                "tp": self.tensor_parallel_size,
                "ulysses": self.ulysses_degree,
                "ring": self.ring_degree,
                "pp": self.pipeline_parallel_size,
                "cfg": self.cfg_parallel_size,
                "dp": self.data_parallel_size,
            }
        )

    @property
    def world_size(self) -> int:
        """Processes of the engine."""
        return self.grid.size("world")

    @property
    def is_inproc(self) -> bool:
        """Whether the model runs in the caller's process."""
        backend = self.distributed_executor_backend
        return backend == "inproc" or (backend == "auto" and self.world_size == 1)


@dataclass(frozen=True, slots=True)
class DiffusionCacheConfig:
    """Caches over denoising steps: faster, and not the same pictures."""

    cache_backend: str = key(
        "str",
        NO_CACHE,
        _CACHES,
        "What skips blocks of a step; unset: `$DIFFUSION_CACHE_BACKEND`. See omni.md.",
    )
    rel_l1_thresh: float | None = key(
        "float?",
        None,
        above(0),
        "tea_cache: sum of estimated changes at which a step is computed; unset: the model's, or 0.2.",
    )
    coefficients: tuple[float, ...] | None = key(
        "floats?",
        None,
        Range("5 numbers", lambda v: len(v) == 5, {"minItems": 5, "maxItems": 5}),
        "tea_cache: polynomial of the change, highest power first; unset: the model's.",
    )
    Fn_compute_blocks: int = key(
        "int",
        1,
        between(1, _MOST),
        "cache_dit: first blocks, which always run and tell the change.",
    )
    Bn_compute_blocks: int = key(
        "int", 0, between(0, _MOST), "cache_dit: last blocks, which always run."
    )
    block_groups: str = key(
        "str",
        "joined",
        one_of("joined", "separate"),
        "cache_dit: whether the lists of blocks of one transformer decide together.",
    )
    max_warmup_steps: int = key(
        "int", 4, between(0, _MOST), "cache_dit: steps at the start that are computed."
    )
    warmup_interval: int = key(
        "int", 1, between(1, _MOST), "cache_dit: only every so many of them are."
    )
    max_cached_steps: int = key(
        "int", -1, between(-1, _MOST), "cache_dit: steps of a branch that may be skipped; -1: all."
    )
    max_continuous_cached_steps: int = key(
        "int", 3, between(-1, _MOST), "cache_dit: of these, in a row; -1: all."
    )
    residual_diff_threshold: float = key(
        "float", 0.24, at_least(0), "cache_dit: relative change from which on a step is computed."
    )
    max_accumulated_residual_diff_threshold: float | None = key(
        "float?", None, above(0), "cache_dit: sum of all changes from which on every step is."
    )
    enable_taylorseer: bool = key(
        "bool", False, _BOOL, "cache_dit: continue residuals by their differences."
    )
    taylorseer_order: int = key("int", 1, between(0, 4), "Differences; 0 repeats the residual.")
    scm_steps_mask_policy: str | None = key(
        "str?", None, one_of(*SCM_POLICIES), "cache_dit: which steps are computed by their place."
    )
    scm_steps_mask: tuple[int, ...] | None = key(
        "ids?",
        None,
        Range(
            "0 or 1 for each step",
            lambda v: set(v) <= {0, 1},
            {"items": {"type": "integer", "minimum": 0, "maximum": 1}},
        ),
        "cache_dit: the same, step by step; 1 computes.",
    )
    scm_steps_policy: str = key(
        "str",
        "dynamic",
        one_of("dynamic", "static"),
        "What the other steps do: `dynamic`: what their change says; `static`: skip.",
    )
    num_inference_steps: int | None = inert(
        "int?", None, at_least(1), "Taken for configurations of others; requests have their own."
    )


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """What computes attention and blocks."""

    attention_backend: str = key(
        "str",
        DEFAULT_ATTENTION,
        _ATTENTIONS,
        "What computes attention; unset: `$DIFFUSION_ATTENTION_BACKEND`. See omni.md.",
    )
    attention_fallback: bool = key(
        "bool", False, _BOOL, "Where its package is missing: warn, and compute with TORCH_SDPA."
    )
    sliding_tile_size: tuple[int, ...] = key(
        "ids",
        (6, 8, 8),
        Range("3 numbers >= 1", lambda v: len(v) == 3 and min(v) >= 1),
        "SLIDING_TILE_ATTN: frames, rows and columns of latent cells in a tile.",
    )
    sliding_tile_window: tuple[int, ...] = key(
        "ids",
        (3, 3, 3),
        Range("3 odd numbers", lambda v: len(v) == 3 and all(n % 2 == 1 for n in v)),
        "SLIDING_TILE_ATTN: tiles that a tile sees, in each direction.",
    )
    sliding_tile_full_steps: int = key(
        "int", 15, at_least(0), "SLIDING_TILE_ATTN: first steps, which see everything."
    )
    enable_torch_compile: bool = key(
        "bool",
        False,
        _BOOL,
        "Compile the blocks of the transformers; the first request waits for it.",
    )
    torch_compile_kwargs: Mapping[str, Any] | None = key(
        "mapping?", None, ANY, "Keyword arguments of `torch.compile`."
    )


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """What saves device memory."""

    vae_use_slicing: bool = key("bool", False, _BOOL, "Decode one image of a batch at a time.")
    vae_use_tiling: bool = key(
        "bool", False, _BOOL, "Decode large images in tiles; changes pixels near their borders."
    )
    text_encoder_cpu_offload: bool = key(
        "bool", False, _BOOL, "Keep the text encoders in host memory between uses."
    )
    text_encoder_int8: bool = key(
        "bool",
        False,
        _BOOL,
        "Hold the linear layers of the text encoders as 8-bit integers; changes pictures a little.",
    )
    image_encoder_cpu_offload: bool = key(
        "bool", False, _BOOL, "Keep the encoder of pictures in host memory between uses."
    )
    vae_cpu_offload: bool = key("bool", False, _BOOL, "Keep the VAE in host memory between uses.")
    dit_cpu_offload: bool = key(
        "bool", False, _BOOL, "Keep the transformer in host memory, one block on the device."
    )
    pin_cpu_memory: bool = key(
        "bool", True, _BOOL, "CUDA: offload through pinned memory and a stream of its own."
    )


@dataclass(frozen=True, slots=True)
class OmniEngineConfig:
    """Requests: batches, limits, defaults."""

    max_batch_size: int = key(
        "int", 1, at_least(1), "Images of one call; more are faster and change their last bits."
    )
    max_pixels: int = key("int", 1 << 24, at_least(1), "Most pixels of a request's frame.")
    output_type: str = key(
        "str", "pil", one_of(*OUTPUT_TYPES), "What requests get that ask for nothing else."
    )
    warmup: bool = key("bool", False, _BOOL, "Run two steps of the default size at start.")
    max_queue_size: int = key(
        "int", 64, at_least(1), "Requests of `AsyncOmniDiffusion` that may wait; more are refused."
    )
    max_video_bytes: int = key(
        "int",
        2 << 30,
        at_least(1),
        "Server of videos: bytes of the finished ones that are kept; the oldest make room.",
    )
    allow_request_cache: bool = key(
        "bool",
        True,
        _BOOL,
        "Whether requests may have a `cache_backend` and a `cache_config` of their own.",
    )
    worker_imports: str | None = key(
        "str?",
        None,
        ANY,
        "Modules that register pipelines, separated by commas; imported here and in every worker.",
    )
    init_timeout_s: float = key(
        "float", 600.0, above(0), "Worker processes: seconds until all have loaded the model."
    )
    dist_timeout_s: float = key(
        "float", 600.0, above(0), "Worker processes: seconds that a collective may wait for a rank."
    )
    request_timeout_s: float | None = key(
        "float?", None, above(0), "Worker processes: seconds until a request is stopped."
    )
    shutdown_timeout_s: float = key(
        "float", 10.0, above(0), "Worker processes: seconds to leave in before they are killed."
    )
    error_grace_s: float = key(
        "float",
        5.0,
        above(0),
        "Worker processes: seconds until all are ended, after an error of one rank or request_timeout_s;"
        " where a request is stopped otherwise, ten times its longest step more.",
    )
    shm_threshold_bytes: int = key(
        "int", 1 << 20, at_least(1), "Arrays of requests from which on shared memory carries them."
    )
    cpu_threads_per_worker: int | None = key(
        "int?", None, at_least(1), "Threads of a worker process; unset: the host's share."
    )


OMNI_SECTIONS: dict[str, type[Any]] = {
    "model": OmniModelConfig,
    "parallel": DiffusionParallelConfig,
    "cache": DiffusionCacheConfig,
    "kernels": KernelConfig,
    "memory": MemoryConfig,
    "engine": OmniEngineConfig,
}

OMNI_CONFIG_TABLE: dict[str, ConfigKey] = build_table(OMNI_SECTIONS)
