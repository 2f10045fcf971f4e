# SPDX-License-Identifier: Apache-2.0
"""The one table of settings: sections, keys, defaults, legal ranges, help.

A row is what `diffulex.config.key` says. Defaults live here and nowhere else; what a model family or a
checkpoint changes is applied in `diffulex.config.resolve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diffulex.config.key import ANY as _ANY
from diffulex.config.key import IDS as _IDS
from diffulex.config.key import UNIT as _UNIT
from diffulex.config.key import ConfigKey, Support, build_table, check_key
from diffulex.config.key import Range as _Range
from diffulex.config.key import above as _above
from diffulex.config.key import at_least as _at_least
from diffulex.config.key import between as _between
from diffulex.config.key import inert as _inert
from diffulex.config.key import key as _key
from diffulex.config.key import later as _later
from diffulex.config.key import one_of as _one_of
from diffulex.config.key import switch as _switch
from diffulex.config.parallel import ParallelConfig
from diffulex.families.spec.model_spec import MAX_CANVAS
from diffulex.quantization.scheme import GROUP_SIZES, SCHEMES
from diffulex.strategies.traits import StrategyTraits

if TYPE_CHECKING:
    from pathlib import Path

    from diffulex.families.spec import ModelSpec
    from diffulex_edge.bundle import Bundle

__all__ = [
    "CONFIG_TABLE",
    "SECTIONS",
    "THRESHOLD_KEYS",
    "CacheConfig",
    "ConfigKey",
    "DecodingConfig",
    "IgnoredConfig",
    "KernelConfig",
    "ModelConfig",
    "ParallelConfig",
    "SamplerConfig",
    "SchedulerConfig",
    "Support",
    "check_value",
]


BLOCK_SIZES = (4, 8, 16, 32)
PAGE_SIZES = (4, 8, 16, 32)
#: Page sizes of diffusion_gemma alone.
CANVAS_PAGE_SIZES = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, where they run, which ids are special."""

    model: str = _key("str", "demo", _ANY, "`demo`, a local directory or a hub id.")
    revision: str = _key(
        "str?", None, _ANY, "Branch, tag or commit of a hub id; unset: its main branch."
    )
    model_name: str = _key(
        "str?", None, _ANY, "Registered family; unset: found from the checkpoint's architecture."
    )
    dtype: str = _key(
        "str",
        "auto",
        _one_of("auto", "float32", "bfloat16", "float16"),
        "Compute dtype; `auto`: float32 on CPU, the checkpoint's dtype on CUDA.",
    )
    device: str = _key(
        "str",
        "auto",
        _Range(
            "auto, cpu, cuda, cuda:N",
            lambda v: v in ("auto", "cpu", "cuda") or (v.startswith("cuda:") and v[5:].isdecimal()),
        ),
        "Where the model runs; `auto`: CUDA if there is a device, else CPU.",
    )
    mask_token_id: int = _key(
        "int?", None, _at_least(0), "Mask id; unset: from the checkpoint's files."
    )
    eos: tuple[int, ...] = _key(
        "ids?",
        None,
        _Range("-1, an id or a list of ids", lambda v: all(i >= -1 for i in v)),
        "Stop ids beside those of the checkpoint; unset or -1: the checkpoint's and tokenizer's.",
    )
    tokenizer_vocab_size: int = _key(
        "int?", None, _at_least(1), "Ids at or past it are never sampled; unset: max id + 1."
    )
    load_format: str = _key(
        "str",
        "auto",
        _one_of("auto", "dummy", "pte"),
        "`dummy`: random weights in the checkpoint's shape, for measurements; reads no weights. `pte`:"
        " the program of `diffulex edge export`, chosen by `auto` where there is one and no weights.",
    )
    use_lora: bool = _switch(False, "Load a LoRA adapter.")
    lora_path: str = _key("str", "", _ANY, "Directory of the LoRA adapter.")
    pre_merge_lora: bool = _switch(False, "Merge the adapter into the weights.")
    quantization: str = _key(
        "str",
        "auto",
        _one_of("auto", "none", *SCHEMES),
        "Weights in low precision, made while they are loaded; `auto`: as the checkpoint has them.",
    )
    quantization_group_size: int = _key(
        "int", 128, _one_of(*GROUP_SIZES), "Columns of a weight that share a scale of `int4`."
    )
    quantization_ignore: tuple[str, ...] = _key(
        "strs",
        (),
        _ANY,
        "Patterns of module names in the checkpoint that keep the compute dtype; unset: what the family"
        " keeps, which a list, even an empty one, replaces.",
    )
    quantize_head: bool = _switch(False, "Quantise an output head that is not the embedding.")
    # Results of the resolution, not keys.
    model_dir: Path = field(default=None, metadata={})  # type: ignore[assignment]
    spec: ModelSpec = field(default=None, metadata={})  # type: ignore[assignment]
    #: The exported program that is run in place of a model; None: the weights.
    program: Bundle | None = field(default=None, metadata={})


@dataclass(frozen=True, slots=True)
class DecodingConfig:
    """Strategy, block shape, thresholds."""

    decoding_strategy: str = _key(
        "str", "multi_bd", _ANY, "Registered strategy (`block_diffusion` is an alias)."
    )
    sampling_mode: str = _key(
        "str", "naive", _one_of("naive", "edit"), "`edit` may rewrite tokens of open blocks."
    )
    block_size: int = _key(
        "int",
        32,
        _Range("one of 4, 8, 16, 32; a canvas has 1 to 1024", lambda v: 1 <= v <= MAX_CANVAS),
        "Tokens per block (B); fast_dllm_v2: of a sub-block; diffusion_gemma: the canvas, forced.",
    )
    buffer_size: int = _key(
        "int",
        4,
        _between(1, 32),
        "Blocks in flight per request (N); fast_dllm_v2: sub-blocks, at least 2.",
    )
    multi_block_prefix_full: bool = _switch(False, "Bidirectional prompt; forced by the strategy.")
    allow_mask_in_prompt: bool = _switch(
        False, "Token ids of a prompt from the first mask on are the template of the answer."
    )
    add_block_threshold: float = _key(
        "float", 0.1, _UNIT, "Progress of the last block that opens the next one."
    )
    semi_complete_threshold: float = _key(
        "float", 0.9, _UNIT, "Progress of the predecessor that grants a forced acceptance."
    )
    accept_threshold: float = _key(
        "float", 0.9, _UNIT, "Confidence above which a masked position is accepted."
    )
    edit_threshold: float = _key(
        "float", 0.0, _UNIT, "Edit sampler: confidence above which a token is overwritten."
    )
    token_stability_threshold: float = _key(
        "float", 0.0, _UNIT, "Least same-token ratio of the last block to open the next one."
    )
    max_post_edit_steps: int = _key(
        "int",
        16,
        _between(0, 2**31 - 1),
        "Edit sampler: steps after a block is filled.",
    )
    penalty_lambda: float = _key(
        "float", 0.0, _at_least(0), "Edit sampler: taken from the logit of the token before."
    )
    token_merge_mode: str = _key(
        "str", "dmax_topk", _one_of("dmax_topk", "iter_smooth_topk"), "Merge rule."
    )
    token_merge_top_k: int = _key("int", 1, _between(1, 8), "Merged candidates.")
    token_merge_renormalize: bool = _switch(True, "Keep the norm of a merged embedding.")
    token_merge_weight: float = _key(
        "float", 1.0, _at_least(0), "Weight of iter_smooth_topk; 0 turns merging off."
    )
    dmax_sampler_fast_path: bool = _switch(False, "Exact confidence only at masks.")
    dmax_force_prefill_active: bool = _later(
        "bool", False, _one_of(True, False), "Debugging aid of older engines."
    )
    dmax_store_soft_embeddings: bool = _switch(
        False, "Cache merged embeddings instead of tokens; turns prefix caching off."
    )
    d2f_block_grid: bool = _switch(
        False,
        "Blocks start at multiples of block_size and rerun the end of the prompt, instead of starting"
        " where the prompt ends, as published.",
    )
    fdv2_use_block_cache: bool = _switch(True, "Refine sub-blocks over cached rows.")
    fdv2_exact_graph_buckets: bool = _switch(
        True, "A CUDA graph for every number of requests, so that none is padded."
    )
    diffusion_gemma_max_denoising_steps: int = _key(
        "int", 48, _at_least(1), "Most steps of a canvas."
    )
    diffusion_gemma_stability_threshold: int = _key(
        "int", 1, _at_least(0), "k needs k + 1 equal argmax canvases in a row."
    )
    diffusion_gemma_t_min: float = _key(
        "float", 0.4, _at_least(0), "Temperature approached at the last step."
    )
    diffusion_gemma_t_max: float = _key(
        "float", 0.8, _above(0), "Temperature of the first step, above t_min."
    )
    diffusion_gemma_confidence_threshold: float = _key(
        "float", 0.005, _above(0), "Mean entropy below which a canvas is done."
    )
    diffusion_gemma_entropy_bound: float = _key(
        "float", 0.1, _above(0), "Entropy a step may accept, nats."
    )
    # A result of the resolution, not a key.
    traits: StrategyTraits = field(default_factory=StrategyTraits, metadata={})


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets of the scheduler."""

    max_num_batched_tokens: int = _key(
        "int",
        4096,
        _at_least(1),
        "Rows of one forward; at least one whole prompt plus a block unless prefill is chunked.",
    )
    max_num_reqs: int = _key("int", 128, _at_least(1), "Running requests, requests per batch.")
    max_model_len: int = _key(
        "int", 2048, _at_least(2), "Prompt plus generated tokens; at most the model's positions."
    )
    auto_max_nfe: bool = _switch(False, "Cap forwards from early throughput.")
    auto_max_nfe_warmup_steps: int = _key("int", 8, _above(0), "Forwards before the cap is set.")
    auto_max_nfe_tpf_floor: float = _key("float", 1.0, _above(0), "Least throughput assumed.")
    enable_chunked_prefill: bool = _switch(False, "Split long prompts.")
    decode_headroom: bool = _switch(True, "Keep pages free for running requests at admission.")
    max_consecutive_prefill_batches: int = _key(
        "int", 0, _at_least(0), "Force a decode batch after so many prefills; 0: never."
    )
    mixed_step_rows: int = _key(
        "int",
        0,
        _at_least(0),
        "Rows of a step up to which prompts, or chunks of them, run beside decoding requests; 0:"
        " prompts run in steps of their own.",
    )
    skip_warmup: bool = _switch(False, "No warm-up forward (CUDA: needs explicit num_pages).")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Paged KV cache."""

    gpu_memory_utilization: float = _key(
        "float", 0.9, _Range("(0, 1]", lambda v: 0 < v <= 1), "Share of device memory to use."
    )
    num_pages: int = _key(
        "int", -1, _Range("-1 or >= 1", lambda v: v == -1 or v >= 1), "Pages; -1: from memory."
    )
    page_size: int = _key(
        "int",
        32,
        _Range(
            "one of 4, 8, 16, 32; diffusion_gemma also 64, 128, 256",
            lambda v: v in (*PAGE_SIZES, *CANVAS_PAGE_SIZES),
        ),
        "Tokens per KV page.",
    )
    enable_prefix_caching: bool = _switch(True, "Share pages of equal prefixes.")
    kv_cache_layout: str = _key(
        "str", "unified", _one_of("unified", "distinct"), "Memory layout of K and V."
    )
    k_cache_hdim_split_factor_x: int = _key(
        "int", 8, _at_least(1), "Layout `distinct`: divides the head size."
    )
    kv_cache_dtype: str = _key(
        "str",
        "auto",
        _one_of("auto", "fp8_e4m3"),
        "What cached keys and values are held as; `auto`: the compute dtype; `fp8_e4m3`: codes with a"
        " scale per token and head, in layout `unified`.",
    )
    cpu_kv_cache_bytes: int = _key(
        "int", 1 << 30, _at_least(1), "Byte budget of the KV cache on CPU when num_pages is -1."
    )


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Choice of kernels and graphs."""

    enforce_eager: bool = _switch(False, "No CUDA graphs.")
    enable_full_static_runner: bool = _switch(True, "CUDA graphs for decode steps.")
    run_ahead: str = _key(
        "str",
        "auto",
        _one_of("auto", "on", "off"),
        "Decode steps that the device plans itself, without waiting for the host. auto: on CUDA, where"
        " it can change no token and costs no time; on: wherever a strategy allows it; see"
        ' docs/a_step.md, "Running ahead".',
    )
    batch_invariant: bool = _switch(
        False,
        "The tokens and logits of a request are the same bits whichever requests share its steps: no"
        " product, division or tile depends on the batch. Slower. On the CPU, and with bfloat16 or"
        " float16 on compute capability 9.0; without prefix caching, chunked prefill and an adapter that"
        " is not merged, and with pages for max_num_reqs requests of max_model_len.",
    )
    check_run_ahead: bool = _switch(
        False, "Compares every plan the device makes with the scheduler's; slow, for tests."
    )
    attn_impl: str = _key(
        "str",
        "auto",
        _one_of("auto", "cuda", "cpu", "triton_grouped", "triton"),
        "Attention kernels; the triton names of older files mean `auto`.",
    )
    moe_gemm_impl: str = _later(
        "str", "auto", _one_of("auto", "cuda", "cpu", "naive"), "Expert GEMM."
    )
    deepep_mode: str = _later(
        "str", "auto", _one_of("normal", "low_latency", "auto"), "Expert dispatch."
    )
    deepep_num_max_dispatch_tokens_per_rank: int = _later("int", 256, _above(0), "Dispatch.")
    profiler_config: Mapping[str, Any] | None = _key(
        "mapping?",
        None,
        _ANY,
        "Recordings of steps by torch's profiler (`Diffulex.start_profile`): profiler,"
        " torch_profiler_dir, record_shapes, profile_memory, with_stack, with_modules, use_cuda,"
        " delay_iterations, max_iterations, run_id; see docs/profiling.md.",
    )
    require_fast_paths: bool = _switch(
        False,
        "An engine in which an op or a decode step would take a slower path than the device has"
        " refuses to start, and a later decode step that no graph fits fails.",
    )
    step_records: int = _key(
        "int",
        65536,
        _at_least(0),
        "Steps whose records are kept (`Diffulex.step_stats`), at 88 bytes each; 0: none.",
    )


@dataclass(frozen=True, slots=True)
class SamplerConfig:
    """Row statistics and acceptance rule."""

    temperature: float | None = _key(
        "float?",
        None,
        _at_least(0),
        "Temperature of requests that give none; unset: that of the family.",
    )
    top_p: float | None = _key(
        "float?", None, _at_least(0), "Nucleus of requests that give none; >= 1: off."
    )
    top_k: int | None = _key(
        "int?", None, _ANY, "Candidates of requests that give none; <= 0: off."
    )
    min_p: float | None = _key(
        "float?", None, _UNIT, "Least share of the best probability, where a request gives none."
    )
    generation_config: str = _key(
        "str",
        "engine",
        _one_of("engine", "checkpoint"),
        "Where requests that give none take temperature, top_k, top_p and min_p from: the keys above"
        " (`engine`), or, for those that are unset, `generation_config.json` (`checkpoint`).",
    )
    seed: int = _key(
        "int",
        0,
        _between(0, 2**64 - 1),
        "Seed of requests that give none: this one at temperature 0, else derived from it.",
    )
    mask_suppression: str = _key(
        "str",
        "exclude",
        _one_of("exclude", "renormalize"),
        "Ids never chosen (mask, suppressed, padding): whether they stay in the normaliser.",
    )
    greedy_tie_break: str = _later(
        "str", "lowest", _one_of("lowest", "highest"), "Id chosen among equal logits."
    )
    acceptance_rule: str = _key(
        "str?",
        None,
        _one_of(
            "threshold",
            "threshold_non_strict",
            "static",
            "dynamic",
            "sequential",
            "factor",
            "entropy_bound",
            "leftmost_prefix",
            "hierarchy",
        ),
        "Which open positions a step accepts; unset: the family's rule.",
    )
    denoising_steps: int | None = _key(
        "int?", None, _at_least(1), "Steps per block of the static rules; unset: block_size."
    )
    force_accept_last_step: bool = _switch(False, "The last scheduled step accepts every position.")
    confidence_type: str = _key(
        "str",
        "max_prob",
        _one_of("max_prob", "default", "margin_confidence", "neg_entropy"),
        "What ranks positions; thresholds always compare the probability.",
    )
    confidence_space: str = _key(
        "str?",
        None,
        _one_of("processed", "tempered", "raw"),
        "Distribution of the confidence; unset: the family's.",
    )
    factor: float = _key("float", 1.0, _above(0), "Parameter of the factor rule.")
    entropy_bound: float = _key("float", 0.1, _at_least(0), "Bound of the entropy rule, nats.")
    low_threshold: float = _key(
        "float", 0.4, _UNIT, "Hierarchy rule: confidence for the best position of a run of masks."
    )
    forced_gate: str = _key(
        "str",
        "prev_semi_complete",
        _one_of("prev_semi_complete", "always"),
        "When a position may be accepted below the threshold.",
    )
    suppress_token_ids: tuple[int, ...] = _key("ids", (), _IDS, "Ids never chosen, at most 7.")
    demote_token_ids: tuple[int, ...] = _key(
        "ids", (), _IDS, "Ids without confidence: only the forced acceptance takes them."
    )
    filters_at_zero_temperature: bool = _later(
        "bool", False, _one_of(True, False), "Greedy requests have no filters."
    )


@dataclass(frozen=True, slots=True)
class IgnoredConfig:
    """Keys of other engines' files: accepted, checked, and without effect."""

    remask_threshold: float = _inert("float", 0.4, _UNIT, "Read by no sampler.", is_decoding=True)
    enable_vectorized_sampler: bool = _inert(
        "bool", False, _one_of(True, False), "The sampler is always batched.", is_decoding=True
    )
    enable_vectorized_sampler_compile: bool = _inert(
        "bool", False, _one_of(True, False), "The sampler is always batched.", is_decoding=True
    )
    shm_name: str = _inert("str", "diffulex_shm", _ANY, "No shared segment is used.")
    enable_prefill_cudagraph: bool = _inert(
        "bool", False, _one_of(True, False), "Prefill is eager."
    )
    prefill_cudagraph_max_len: int = _inert("int", 0, _at_least(0), "Prefill is eager.")
    enable_torch_compile: bool = _inert("bool", True, _one_of(True, False), "Not used.")
    enable_cudagraph_torch_compile: bool = _inert("bool", False, _one_of(True, False), "Not used.")
    torch_compile_mode: str = _inert("str", "reduce-overhead", _ANY, "Not used.")
    enable_vllm_layers: bool = _inert("bool", True, _one_of(True, False), "Not used.")


SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "decoding": DecodingConfig,
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "parallel": ParallelConfig,
    "kernel": KernelConfig,
    "sampler": SamplerConfig,
    "ignored": IgnoredConfig,
}

#: Keys of the `decoding_thresholds` mapping.
THRESHOLD_KEYS = (
    "add_block_threshold",
    "semi_complete_threshold",
    "accept_threshold",
    "edit_threshold",
    "remask_threshold",
    "token_stability_threshold",
)


CONFIG_TABLE: dict[str, ConfigKey] = build_table(SECTIONS)


def check_value(name: str, value: Any) -> Any:
    """The value in its canonical type, or ConfigError with the name, range and value."""
    return check_key(CONFIG_TABLE[name], value)
