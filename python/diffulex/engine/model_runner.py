# SPDX-License-Identifier: Apache-2.0
"""One step on the device: plan arrays in, sampler output out.

Knows tensors and metadata, not requests. Never calls the scheduler.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from diffulex.engine.batch import AttnMetadata, PlanViews, StepBuffers
from diffulex.engine.graph_runner import GraphRunner, graph_buckets
from diffulex.engine.kv_cache import KVCache, KvLayoutName
from diffulex.errors import ConfigError
from diffulex.layers.linear import pack_weights
from diffulex.logging import get_logger, warn_once
from diffulex.ops.attention import KvLayout, MaskKind
from diffulex.ops.workspace import attention_workspace_bytes, empty_workspace
from diffulex.registry import AutoSampler
from diffulex.sampler.base import SamplerInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diffulex.config import Config
    from diffulex.model.config import ModelSpec
    from diffulex.model.sdar import SdarForDiffusionLM
    from diffulex.sampler.base import Sampler
    from diffulex_ext import _core

__all__ = ["ModelRunner", "decode_workspace_bytes"]

logger = get_logger(__name__)


def decode_workspace_bytes(
    spec: ModelSpec, buckets: Sequence[int], rows: int, max_model_len: int, device_type: str
) -> int:
    """Attention scratch that suffices for a decode step of every bucket.

    Not that of the largest bucket: small batches split the keys, large ones need not.
    """
    return max(
        attention_workspace_bytes(
            bucket,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            rows,
            max_model_len,
            0,
            device_type,
        )
        for bucket in buckets
    )


class _StepShape(NamedTuple):
    """Sizes of a step, dummy requests included."""

    num_rows: int
    num_reqs: int
    num_blocks: int
    num_logits_rows: int
    any_sampled: bool


class ModelRunner:
    """Owns the model, the KV tensors, the graphs and the sampler.

    Order of use: construct, `decide_num_pages` if the configuration leaves it open, `prepare`,
    then per step `next_plan`, (the scheduler fills it), `execute`.
    """

    def __init__(self, config: Config, model: SdarForDiffusionLM) -> None:
        self.config = config
        self.model = model
        self.device = torch.device(config.model.device)
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.sampler: Sampler = AutoSampler.create(config.model.model_name, config)
        self.num_graph_steps = 0
        self.num_graph_fallbacks = 0
        self._is_cuda = self.device.type == "cuda"
        # Of eager steps; grows, and the old one is freed. Graphs have their own.
        self._workspace: Tensor | None = None
        self._workspace_bytes = 0
        self._buckets: tuple[int, ...] = ()
        self._graphs: GraphRunner | None = None
        with self._on_device():
            self._cache = self._make_cache(1)
        self._buffers: StepBuffers | None = None

    def decide_num_pages(self) -> int:
        """Size of the page pool from the memory that is left.

        Raises:
            ConfigError: it could not hold one request of max_model_len.
        """
        per_request = self.config.pages_per_request
        page_bytes = self._page_bytes()
        if self._is_cuda:
            with self._on_device():
                budget = self._free_device_bytes()
            num_pages = budget // page_bytes
        else:
            budget = self.config.cache.cpu_kv_cache_bytes
            most = per_request * self.config.scheduler.max_num_reqs
            num_pages = min(budget // page_bytes, most)
        if num_pages < per_request:
            raise ConfigError(
                f"num_pages: expected memory for at least {per_request} pages of {page_bytes}"
                f" bytes (one request of max_model_len {self.config.scheduler.max_model_len}),"
                f" got {max(budget, 0)} bytes"
            )
        return int(num_pages)

    def prepare(self, config: Config, options: _core.EngineOptions) -> None:
        """Allocates everything the steps need; `config` has the number of pages."""
        self.config = config
        with self._on_device():
            pack_weights(self.model)
            self._cache = self._make_cache(config.cache.num_pages)
            self._buffers = StepBuffers(options, self.device)
            logger.info(
                "KV cache: %d pages of %d tokens, %.1f MiB",
                config.cache.num_pages,
                config.cache.page_size,
                self._cache.nbytes / 2**20,
            )
            if not self._is_cuda:
                return
            scheduler = config.scheduler
            # Row budgets bound a decode batch as well: larger buckets could never be used.
            most = scheduler.max_num_batched_tokens // config.decode_rows
            self._buckets = graph_buckets(min(scheduler.max_num_reqs, max(most, 1)))
            reason = self._no_graph_reason()
            if reason is None:
                self._capture_graphs()
            else:
                warn_once(logger, f"no graphs: {reason}", "decode runs without graphs: %s", reason)

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Makes the model's device current: launches, events and graphs go by the current one."""
        return torch.cuda.device(self.device) if self._is_cuda else contextlib.nullcontext()

    @property
    def kv_cache(self) -> KVCache:
        """The tensors that page ids address."""
        return self._cache

    @property
    def graph_buckets(self) -> tuple[int, ...]:
        """Request counts that have a CUDA graph."""
        return () if self._graphs is None else self._graphs.buckets

    def next_plan(self) -> _core.StepPlan:
        """The plan object for the scheduler to fill."""
        return self._step_buffers.next_plan()

    @torch.inference_mode()
    def execute(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        """Runs the forward and the sampler of the plan handed out by `next_plan`."""
        with self._on_device():
            return self._execute(plan)

    def _execute(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        bucket = self._bucket_for(plan)
        if bucket is not None:
            # Eager steps too: how kernels cut their work depends on the shape of the batch, and
            # with it the last bits of a result.
            plan.pad_requests(bucket)
        shape = _StepShape(
            plan.num_rows,
            plan.num_reqs,
            plan.num_blocks,
            plan.num_logits_rows,
            plan.any_sampled,
        )
        views = self._step_buffers.upload()
        if bucket is not None and self._graphs is not None:
            hidden = self._graphs.replay(bucket)
            self.num_graph_steps += 1
        else:
            hidden = self._forward(views, shape, plan)
        if shape.num_blocks > 0:
            self._sample(views, shape, hidden)
        return self._step_buffers.download()

    @property
    def _step_buffers(self) -> StepBuffers:
        if self._buffers is None:
            raise RuntimeError("ModelRunner: expected prepare() before the first step")
        return self._buffers

    def _forward(self, views: PlanViews, shape: _StepShape, plan: _core.StepPlan) -> Tensor:
        max_context_len = plan.max_context_len
        if self._is_cuda and plan.uniform_q_len:
            # Kernels derive the split of the keys from this bound, which is fixed in a graph.
            max_context_len = self.config.scheduler.max_model_len
        workspace = self._workspace_for(shape.num_reqs, plan.max_seqlen_q, max_context_len)
        metadata = self._metadata(
            views, shape.num_rows, shape.num_reqs, plan.max_seqlen_q, max_context_len, workspace
        )
        ids, positions = views.input_ids[: shape.num_rows], views.positions[: shape.num_rows]
        return cast("Tensor", self.model(ids, positions, metadata, self._cache))

    def _sample(self, views: PlanViews, shape: _StepShape, hidden: Tensor) -> None:
        n, num_blocks = shape.num_logits_rows, shape.num_blocks
        out = self._step_buffers.sampler
        rows = hidden.index_select(0, views.logits_rows[:n])
        self.sampler(
            SamplerInputs(
                logits=self.model.compute_logits(rows),
                inv_temperature=views.row_inv_temperature[:n] if shape.any_sampled else None,
                uniforms=views.row_uniforms[:n] if shape.any_sampled else None,
                tokens=views.blk_tokens[:num_blocks],
                row_index=views.blk_row_index[:num_blocks],
                editable_start=views.blk_editable_start[:num_blocks],
                valid_len=views.blk_valid_len[:num_blocks],
                gate=views.blk_force_top1[:num_blocks],
                accept_threshold=views.blk_accept_threshold[:num_blocks],
                open_steps=views.blk_open_steps[:num_blocks],
                total_steps=views.blk_total_steps[:num_blocks],
                write_ids=out.write_ids[:num_blocks],
                confidence=out.confidence[:num_blocks],
                masks_left=out.masks_left[:num_blocks],
                flags=out.flags[:num_blocks],
            )
        )

    def _metadata(
        self,
        views: PlanViews,
        num_rows: int,
        num_reqs: int,
        max_seqlen_q: int,
        max_context_len: int,
        workspace: Tensor | None,
    ) -> AttnMetadata:
        return AttnMetadata(
            page_tables=views.page_tables[:num_reqs],
            cu_seqlens_q=views.cu_seqlens_q[: num_reqs + 1],
            context_lens=views.context_lens[:num_reqs],
            valid_slices=views.valid_slices[:num_reqs],
            mask_kinds=views.mask_kinds[:num_reqs],
            prefix_lens=views.prefix_lens[:num_reqs],
            padded_prefix_lens=views.padded_prefix_lens[:num_reqs],
            q_starts=None,
            slot_mapping=views.slot_mapping[:num_rows],
            block_size=self.config.decoding.block_size,
            page_size=self.config.cache.page_size,
            max_seqlen_q=max_seqlen_q,
            max_context_len=max_context_len,
            num_splits=0,
            kv_layout=self._cache.kv_layout,
            workspace=workspace,
        )

    def _workspace_for(
        self, num_reqs: int, max_seqlen_q: int, max_context_len: int
    ) -> Tensor | None:
        """Scratch of an eager step; grows, so that steady state allocates nothing."""
        spec = self.config.model.spec
        needed = attention_workspace_bytes(
            num_reqs,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            max_seqlen_q,
            max_context_len,
            0,
            self.device.type,
        )
        if needed > self._workspace_bytes:
            self._workspace = empty_workspace(needed, self.device)
            self._workspace_bytes = needed
        return self._workspace if needed > 0 else None

    def _no_graph_reason(self) -> str | None:
        kernel = self.config.kernel
        if kernel.enforce_eager:
            return "enforce_eager is set"
        if not kernel.enable_full_static_runner:
            return "enable_full_static_runner is off"
        return None

    def _bucket_for(self, plan: _core.StepPlan) -> int | None:
        """Number of requests a decode plan is padded to on CUDA; None: run as it is."""
        if not self._is_cuda or plan.kind.name != "DECODE":
            return None
        if plan.uniform_q_len == self.config.decode_rows:
            for bucket in self._buckets:
                if bucket >= plan.num_reqs:
                    return bucket
            reason = f"{plan.num_reqs} requests exceed the largest bucket {self._buckets[-1]}"
        else:
            reason = f"requests have other than {self.config.decode_rows} rows"
        if self._graphs is not None:
            self.num_graph_fallbacks += 1
            warn_once(logger, f"graph fallback: {reason}", "eager decode step: %s", reason)
        return None

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        spec, buckets, rows = self.config.model.spec, self._buckets, self.config.decode_rows
        max_model_len = self.config.scheduler.max_model_len
        views = self._step_buffers.views
        self._fill_capture_inputs(views, buckets[-1], rows)

        def forward(bucket: int, workspace: Tensor | None) -> Tensor:
            num_rows = bucket * rows
            metadata = self._metadata(views, num_rows, bucket, rows, max_model_len, workspace)
            ids, positions = views.input_ids[:num_rows], views.positions[:num_rows]
            return cast("Tensor", self.model(ids, positions, metadata, self._cache))

        self._graphs = GraphRunner(
            buckets,
            rows,
            spec.hidden_size,
            self.dtype,
            self.device,
            decode_workspace_bytes(spec, buckets, rows, max_model_len, self.device.type),
        )
        self._graphs.capture(forward)

    def _fill_capture_inputs(self, views: PlanViews, num_reqs: int, rows: int) -> None:
        """Real rows over one cached page, nothing stored: kernels must not see empty contexts."""
        offsets = torch.arange(num_reqs + 1, dtype=torch.int32, device=self.device) * rows
        views.input_ids.zero_()
        views.positions.zero_()
        views.slot_mapping.fill_(-1)
        views.page_tables.fill_(-1)
        views.page_tables[:num_reqs, 0] = 0
        views.cu_seqlens_q[: num_reqs + 1] = offsets
        views.valid_slices[:num_reqs] = offsets[1:]
        views.context_lens[:num_reqs] = self.config.cache.page_size
        views.mask_kinds[:num_reqs] = int(MaskKind.BLOCK_CAUSAL)

    def _make_cache(self, num_pages: int) -> KVCache:
        spec, cache = self.config.model.spec, self.config.cache
        return KVCache(
            spec.num_layers,
            num_pages,
            cache.page_size,
            spec.num_kv_heads,
            spec.head_dim,
            self.dtype,
            self.device,
            cast("KvLayoutName", cache.kv_cache_layout),
            cache.k_cache_hdim_split_factor_x,
        )

    def _page_bytes(self) -> int:
        spec = self.config.model.spec
        return KVCache.page_bytes(
            spec.num_layers,
            self.config.cache.page_size,
            spec.num_kv_heads,
            spec.head_dim,
            self.dtype,
        )

    def _free_device_bytes(self) -> int:
        """total * utilisation - used - peak of a forward at maximum rows + held by torch now."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        if not self.config.scheduler.skip_warmup:
            self._warm_up()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        current = torch.cuda.memory_allocated(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        used = total - free
        return int(total * self.config.cache.gpu_memory_utilization) - used - peak + current

    @torch.inference_mode()
    def _warm_up(self) -> None:
        """A prefill of the row budget with logits and statistics of the most rows a step has."""
        scheduler = self.config.scheduler
        num_rows = scheduler.max_num_batched_tokens
        length = min(scheduler.max_model_len, num_rows)
        num_reqs = -(-num_rows // length)
        device, int32 = self.device, torch.int32
        ends = torch.arange(num_reqs + 1, dtype=int32, device=device) * length
        ends = ends.clamp(max=num_rows)
        zeros = torch.zeros(num_reqs, dtype=int32, device=device)
        metadata = AttnMetadata(
            page_tables=torch.full((num_reqs, 1), -1, dtype=int32, device=device),
            cu_seqlens_q=ends,
            context_lens=zeros,
            valid_slices=ends[1:].contiguous(),
            mask_kinds=torch.full_like(zeros, int(MaskKind.BLOCK_CAUSAL)),
            prefix_lens=None,
            padded_prefix_lens=None,
            q_starts=None,
            slot_mapping=torch.full((num_rows,), -1, dtype=int32, device=device),
            block_size=self.config.decoding.block_size,
            page_size=self.config.cache.page_size,
            max_seqlen_q=length,
            max_context_len=0,
            num_splits=0,
            kv_layout=int(
                KvLayout.UNIFIED
                if self.config.cache.kv_cache_layout == "unified"
                else KvLayout.DISTINCT
            ),
            workspace=self._workspace_for(num_reqs, length, 0),
        )
        ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        positions = torch.arange(num_rows, dtype=torch.int64, device=device) % length
        hidden = cast("Tensor", self.model(ids, positions, metadata, self._cache))
        num_logits = min(num_rows, scheduler.max_num_reqs * self.config.decode_rows)
        logits = self.model.compute_logits(hidden[:num_logits])
        reserve = getattr(self.sampler, "reserve", None)
        if reserve is not None:
            reserve(num_logits, logits.size(1))
