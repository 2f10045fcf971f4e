# SPDX-License-Identifier: Apache-2.0
"""The block an engine logs when it is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.log import get_logger
from diffulex_ext import _core

if TYPE_CHECKING:
    from diffulex.config.config import Config
    from diffulex.runner.model_runner import ModelRunner

__all__ = ["log_startup"]

logger = get_logger(__name__)


def _strategy_text(config: Config) -> str:
    decoding, sampler = config.decoding, config.sampler
    if decoding.decoding_strategy == "diffusion_gemma":
        return (
            f"diffusion_gemma, at most {decoding.diffusion_gemma_max_denoising_steps} steps,"
            f" entropy bound {decoding.diffusion_gemma_entropy_bound}, temperature"
            f" {decoding.diffusion_gemma_t_max} to {decoding.diffusion_gemma_t_min}"
        )
    return (
        f"{decoding.decoding_strategy}, mode {decoding.sampling_mode}, rule"
        f" {sampler.acceptance_rule}, temperature {sampler.temperature}"
    )


def log_startup(config: Config, runner: ModelRunner) -> None:
    """Build, device, model, strategy, limits and memory, at INFO."""
    model, decoding, scheduler = config.model, config.decoding, config.scheduler
    cache, spec = config.cache, config.model.spec
    lines = [
        f"Diffulex {_core.__version__}",
        f"  device       {model.device}, dtype {model.dtype}",
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
        f"  KV cache     {cache.num_pages} pages, {runner.kv_cache.nbytes / 2**20:.1f} MiB,"
        f" {cache.kv_cache_layout}, prefix caching {cache.enable_prefix_caching}",
        f"  graphs       {runner.graph_buckets or 'none'}",
        f"  special ids  mask {model.mask_token_id}, stop {list(model.eos)}",
    ]
    logger.info("%s", "\n".join(lines))
