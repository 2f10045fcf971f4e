# SPDX-License-Identifier: Apache-2.0
"""What an engine does first, says when it is ready, and refuses where only fast paths will do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import diffulex_ext
from diffulex.distributed.layout import Sizes
from diffulex.distributed.legality import shard_of
from diffulex.distributed.start import rank_starter
from diffulex.errors import ConfigError
from diffulex.log import get_logger
from diffulex.quantization.scheme import SCHEMES, QuantizationPlan
from diffulex.strategies.listing import strategy_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffulex.checkpoint.auto_model import Quantizer
    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.config import Config
    from diffulex.distributed.executor import Prepared
    from diffulex.profiling.memory import MemoryReport
    from diffulex.quantization.stored import StoredQuantization

__all__ = [
    "check_components",
    "check_fast_paths",
    "check_given_model",
    "import_workers",
    "load_weights",
    "log_startup",
    "startup_lines",
]

logger = get_logger(__name__)


def import_workers(names: Sequence[str]) -> None:
    """Imports what registers models, samplers or strategies (`worker_imports`).

    Raises:
        ConfigError: a module cannot be imported.
    """
    name = ""
    try:
        for name in names:
            importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"worker_imports: expected importable modules, got {name!r}: {error}"
        ) from error


def check_components(config: Config, model: Any, *, has_executor: bool) -> None:
    """Asks whether an engine can be made over a model that exists already.

    Raises:
        ConfigError: several processes load their models themselves; see also `check_given_model`.
    """
    parallel = config.parallel
    is_coupled = Sizes.of_weights(parallel).is_coupled and has_executor
    if parallel.data_parallel_size > 1 and not is_coupled:
        raise ConfigError(
            "from_components: expected data_parallel_size 1, got"
            f" {parallel.data_parallel_size}: replicas load the checkpoint themselves"
        )
    if parallel.is_of_cluster and not has_executor:
        raise ConfigError(
            "from_components: expected distributed_executor mp, got"
            f" {parallel.distributed_executor}: processes of a cluster load the checkpoint themselves"
        )
    sizes = Sizes.of_engine(parallel)
    if sizes.world > 1 and not has_executor:
        raise ConfigError(
            f"from_components: expected one rank, got {sizes.limiting_key} {sizes.world}: workers"
            " load the checkpoint themselves"
        )
    check_given_model(config, model)


def load_weights(
    config: Config,
    model_name: str,
    show_progress: bool,
    *,
    rank: int = 0,
    stored: StoredQuantization | None = None,
    on_piece: Callable[[], None] = lambda: None,
) -> Any:
    """The model of the checkpoint, or one of its shape; of several ranks, the part of one.

    Args:
        config: the resolved configuration.
        model_name: in the registry of models.
        show_progress: a bar on a terminal.
        rank: whose part, of all ranks that share weights.
        stored: what the checkpoint says of its weights in low precision.
        on_piece: called again and again meanwhile; ends it by what it raises.
    """
    from diffulex.checkpoint.auto_model import load_model, random_model  # noqa: PLC0415

    model, parallel = config.model, config.parallel
    dtype = getattr(torch, model.dtype)
    plan = QuantizationPlan.of(model)
    shard = shard_of(model.spec, Sizes.of_weights(parallel), parallel.moe_parallel_mode, rank, plan)
    quantizer, num_ranks = _quantizer(config, plan, stored), _ranks_to_come(config, rank)
    if model.load_format == "dummy":
        return random_model(
            model_name,
            model.spec,
            dtype,
            model.device,
            quantizer=quantizer,
            shard=shard,
            num_ranks=num_ranks,
            on_piece=on_piece,
        )
    if model.program is not None:
        from diffulex_edge.program import PteModel  # noqa: PLC0415 (exported programs only)

        return PteModel.load(model.spec, model.program)
    return load_model(
        model_name,
        model.spec,
        model.model_dir,
        dtype,
        model.device,
        progress=show_progress and sys.stderr.isatty(),
        lora_path=Path(model.lora_path).expanduser() if model.use_lora else None,
        merge_lora=model.pre_merge_lora,
        quantizer=quantizer,
        shard=shard,
        num_ranks=num_ranks,
        on_piece=on_piece,
    )


def _ranks_to_come(config: Config, rank: int) -> int:
    """Ranks of this host that take memory while or after `rank` does, itself included.

    The first one speaks for all, whose processes have only just begun; to the others the memory that it
    has taken by then is gone already. Those of a cluster may be on other hosts: each asks for itself.
    """
    if rank > 0 or not rank_starter().shares_memory:
        return 1
    return Sizes.of_weights(config.parallel).world


def _quantizer(
    config: Config, plan: QuantizationPlan | None, stored: StoredQuantization | None
) -> Quantizer | None:
    """What gives the layers weights in low precision; None: they have the dtype of the model."""
    model = config.model
    if plan is None:
        return None
    from diffulex.quantization.layers import (  # noqa: PLC0415 (few models need it)
        ModelQuantizer,
        StoredQuantizer,
    )

    if stored is not None and model.load_format != "dummy":
        if stored.activations != "dynamic" and model.quantization != "int4":
            text = 'quantization: scales of activations are found in every step, not "%s" as the checkpoint says'
            logger.info(text, stored.activations)
        return StoredQuantizer(stored, model.model_dir)
    return ModelQuantizer(plan)


def check_given_model(config: Config, model: Any) -> None:
    """Asks whether a model that is not loaded here has the weights that the configuration names.

    Raises:
        ConfigError: there is a scheme, and the model is in its dtype.
    """
    scheme = config.model.quantization
    if scheme not in SCHEMES:
        return
    from diffulex.quantization.layers import has_low_precision  # noqa: PLC0415 (few models need it)

    if not isinstance(model, torch.nn.Module) or not has_low_precision(model):
        raise ConfigError(
            f"from_components: expected a model with weights in {scheme} (quantization), got one"
            " without"
        )


def _weights_text(config: Config) -> str:
    scheme = config.model.quantization
    return f", weights {scheme}" if scheme in SCHEMES else ""


def _strategy_text(config: Config) -> str:
    name = config.decoding.decoding_strategy
    return f"{name}, {strategy_named(name).settings_text(config)}"


def _build_text() -> str:
    build = diffulex_ext.build_info()
    cuda = f"CUDA {build['cuda_version']} for {', '.join(build['cuda_archs'])}"
    commit = (build["git_commit"] or "unknown")[:12]
    return f"{build['version']} ({commit}, {cuda if build['cuda_version'] else 'no CUDA'})"


def _graph_text(prepared: Prepared) -> str:
    if prepared.no_graphs:
        return f"none: {prepared.no_graphs}"
    buckets = ", ".join(map(str, prepared.graph_buckets)) or "none yet"
    return f"requests {buckets}, captured in {prepared.capture_s:.1f} s"


def startup_lines(
    config: Config, prepared: Prepared, memory: MemoryReport, tokenizer: Tokenizer | None
) -> list[str]:
    """The block: build, device, model, strategy, limits, kernels, memory plan, graphs; 25 lines at most."""
    model, decoding, scheduler = config.model, config.decoding, config.scheduler
    cache, spec = config.cache, config.model.spec
    at_once = cache.num_pages // max(config.pages_per_request, 1)
    template = "none"
    if tokenizer is not None:
        template = "of the tokenizer" if tokenizer.has_chat_template else "none in the tokenizer"
    return [
        f"Diffulex {_build_text()}",
        f"  device       {model.device}, dtype {model.dtype}{_weights_text(config)}",
        *((f"  ranks        {prepared.ranks}",) if prepared.ranks else ()),
        f"  model        {model.model_name} from {model.model_dir}: {spec.num_layers} layers,"
        f" hidden {spec.hidden_size}, heads {spec.num_q_heads}/{spec.num_kv_heads} x"
        f" {spec.head_dim}, vocabulary {spec.vocab_size}",
        f"  strategy     {_strategy_text(config)}",
        f"  thresholds   add {decoding.add_block_threshold}, semi"
        f" {decoding.semi_complete_threshold}, accept {decoding.accept_threshold}",
        f"  shapes       block {decoding.block_size}, buffer {decoding.buffer_size}, page"
        f" {cache.page_size}",
        f"  limits       length {scheduler.max_model_len}, requests {scheduler.max_num_reqs},"
        f" rows {scheduler.max_num_batched_tokens}",
        *(f"  kernel       {choice}" for choice in prepared.kernels),
        f"  KV cache     {cache.num_pages} pages of {cache.page_size} tokens,"
        f" {prepared.kv_cache_bytes / 2**20:.1f} MiB, {cache.kv_cache_layout}, prefix caching"
        f" {cache.enable_prefix_caching}",
        f"  concurrency  {min(at_once, scheduler.max_num_reqs)} requests of"
        f" {scheduler.max_model_len} tokens at once",
        f"  memory MiB   {memory}",
        f"  graphs       {_graph_text(prepared)}",
        f"  special ids  mask {model.mask_token_id}, stop {list(model.eos)}",
        f"  template     {template}",
    ]


def log_startup(
    config: Config, prepared: Prepared, memory: MemoryReport, tokenizer: Tokenizer | None
) -> None:
    """Writes the block at INFO."""
    logger.info("%s", "\n".join(startup_lines(config, prepared, memory, tokenizer)))


def check_fast_paths(config: Config, prepared: Prepared) -> None:
    """Nothing unless `require_fast_paths` is set.

    Raises:
        ConfigError: an op, or the decode steps, would take a slower path than the device has.
    """
    if not config.kernel.require_fast_paths:
        return
    slow = [str(choice) for choice in prepared.kernels if not choice.is_fast]
    if prepared.no_graphs and config.model.device.startswith("cuda"):
        slow.append(f"decode steps: no graphs ({prepared.no_graphs})")
    if slow:
        raise ConfigError(f"require_fast_paths: expected no slower path, got {'; '.join(slow)}")
