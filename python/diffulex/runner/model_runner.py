# SPDX-License-Identifier: Apache-2.0
"""One step on the device: plan arrays in, sampler output out.

Knows tensors and metadata, not requests. Only its decode loop calls the scheduler, which is handed in
by the caller.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

import torch

from diffulex.errors import ConfigError
from diffulex.log import get_logger, warn_once
from diffulex.nn.kv_cache import KVCache, KvLayoutName
from diffulex.nn.linear import pack_weights
from diffulex.runner.attention_workspace import AttentionWorkspace
from diffulex.runner.batch import PlanViews, StepBuffers, StepShape
from diffulex.runner.context_classes import ContextClasses
from diffulex.runner.decode_graphs import Bucket, DecodeGraphs, ForwardGraphs, decode_buckets
from diffulex.runner.decode_loop import DecodeLoop, has_graph_of_logits
from diffulex.runner.model_call import ModelCall, head_logits
from diffulex.runner.open_engines import memory_holders, register_open
from diffulex.runner.row_watch import RowWatch
from diffulex.runner.sampler_inputs import SamplerInputsBuilder
from diffulex.runner.step_forward import StepForward
from diffulex.runner.warm_up import GraphMemory, free_device_bytes, max_logits_rows
from diffulex.samplers.selection import make_sampler
from diffulex_ext import _core

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.samplers.base import Sampler

__all__ = ["ModelRunner"]

# Whose decode steps a device can plan by itself; docs/configuration.md, run_ahead.
_LOOP_STRATEGIES = ("multi_bd", "d2f", "dmax", "fast_dllm_v2", "diffusion_gemma")

logger = get_logger(__name__)


class ModelRunner:
    """Owns the model, the KV tensors, the graphs and the sampler.

    Order of use: construct, `decide_num_pages` if the configuration leaves it open, `prepare`,
    then per step `next_plan`, (the scheduler fills it), `execute`.
    """

    def __init__(self, config: Config, model: Any) -> None:
        self.config = config
        self.model = model
        self.device = torch.device(config.model.device)
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.sampler: Sampler = make_sampler(config)
        bind_model = getattr(self.sampler, "bind_model", None)
        if bind_model is not None:
            bind_model(model)
        self._is_cuda = self.device.type == "cuda"
        #: An exported program keeps K and V itself and is told what each row sees.
        self._program = model if getattr(model, "owns_kv", False) else None
        self._workspace = AttentionWorkspace(config.model.spec, self.device)
        self._graphs = DecodeGraphs(decode_buckets(config), ContextClasses(config))
        with self._on_device():
            self._call = ModelCall(config, model)
            self._cache = self._make_cache(1)
        self._buffers: StepBuffers | None = None
        self._inputs_builder: SamplerInputsBuilder | None = None
        self._prepared_forward: StepForward | None = None
        self._decode_loop: DecodeLoop | None = None
        #: Looks at logits on the host while a request asks for it; see its file.
        self.row_watch = RowWatch(config, self.sampler)
        register_open(self)

    def decide_num_pages(self) -> int:
        """Size of the page pool from the memory that is left.

        Raises:
            ConfigError: it could not hold one request of max_model_len.
        """
        per_request = self.config.pages_per_request
        if self._program is not None:
            return per_request * self.config.scheduler.max_num_reqs
        page_bytes = self._page_bytes()
        if self._is_cuda:
            with self._on_device():
                budget = free_device_bytes(
                    self.config,
                    self._call,
                    self._cache,
                    self._workspace,
                    self.sampler,
                    self._graph_memory(),
                )
            num_pages = budget // page_bytes
        else:
            budget = self.config.cache.cpu_kv_cache_bytes
            most = per_request * self.config.scheduler.max_num_reqs
            num_pages = min(budget // page_bytes, most)
        if num_pages < per_request:
            raise ConfigError(
                f"num_pages: expected memory for at least {per_request} pages of {page_bytes}"
                f" bytes (one request of max_model_len {self.config.scheduler.max_model_len}),"
                f" got {max(budget, 0)} bytes{memory_holders(self) if self._is_cuda else ''}"
            )
        return int(num_pages)

    def _graph_memory(self) -> GraphMemory | None:
        """What `_capture_graphs` will take; None without graphs."""
        if self._no_graph_reason() is not None:
            return None
        config, shapes = self.config, self._graphs.shapes()
        if not self._wants_loop(config.decoding.decoding_strategy):
            return GraphMemory(shapes, 0)
        fitting = [bucket.num_rows for bucket in shapes if has_graph_of_logits(config, bucket)]
        return GraphMemory(shapes, max(fitting, default=0))

    def prepare(self, config: Config, options: _core.EngineOptions) -> None:
        """Allocates everything the steps need; `config` has the number of pages."""
        self.config = config
        with self._on_device():
            pack_weights(self.model)
            self._cache = self._make_cache(config.cache.num_pages)
            has_loop = self._has_decode_loop(options)
            self._buffers = StepBuffers(options, self.device, has_mirror=has_loop)
            self._inputs_builder = SamplerInputsBuilder(
                options, self._buffers.sampler, self._call.signals
            )
            if options.logits_shift:
                self._keep_rows(options.max_num_reqs)
            self._prepared_forward = StepForward(
                config, self._call, self._cache, self._buffers, self._graphs.shapes()
            )
            if has_loop:
                self._make_decode_loop(options)
            logger.info(
                "KV cache: %d pages of %d tokens, %.1f MiB",
                config.cache.num_pages,
                config.cache.page_size,
                self._cache.nbytes / 2**20,
            )
            if not self._is_cuda:
                return
            reason = self._no_graph_reason()
            if reason is None:
                self._capture_graphs()
            else:
                warn_once(logger, f"no graphs: {reason}", "decode runs without graphs: %s", reason)

    def _has_decode_loop(self, options: _core.EngineOptions) -> bool:
        if type(self).execute is not ModelRunner.execute:
            return False  # a custom runner must see every step
        if not getattr(self.sampler, "is_capturable", False):
            return False  # and so must a custom sampler
        if options.token_merge_top_k > 0 and options.dmax_store_soft_embeddings:
            return False  # the loop could take no step: graphs serve the host's
        return self._wants_loop(options.strategy)

    def _wants_loop(self, strategy: str) -> bool:
        """Whether decode steps of the strategy are to run ahead."""
        if strategy not in _LOOP_STRATEGIES:
            return False
        if self.config.kernel.run_ahead != "auto":
            return self.config.kernel.run_ahead == "on"
        # Mixed embeddings and signals pass the last bits of one step's logits to the next, and
        # products of another shape round differently: dmax and diffusion_gemma run ahead only on
        # request. So does a dual cache whose steps have another shape on the host.
        is_rounding = strategy in ("dmax", "diffusion_gemma") or self._has_other_host_shapes()
        return self._is_cuda and not is_rounding

    def _has_other_host_shapes(self) -> bool:
        """Whether the host runs steps of other shapes than the loop: it leaves out rows that decide
        nothing (encoded canvases, the rest of whole blocks, padding).
        """
        decoding = self.config.decoding
        if decoding.decoding_strategy == "diffusion_gemma":
            return True
        is_dual = decoding.decoding_strategy == "fast_dllm_v2"
        return is_dual and (decoding.fdv2_use_block_cache or decoding.fdv2_exact_graph_buckets)

    def _make_decode_loop(self, options: _core.EngineOptions) -> None:
        config = self.config
        reserve = getattr(self.sampler, "reserve", None)
        if reserve is not None:
            # Graphs keep the addresses of the sampler's buffers: no later step may replace them, not
            # even one larger than every graph (a prefill, a batch beyond the buckets).
            reserve(max_logits_rows(config), config.model.spec.vocab_size)
        self._decode_loop = DecodeLoop(
            config,
            options,
            self.model,
            self.sampler,
            self._step_buffers,
            self._prepared_inputs,
            self._graphs,
            self._step_forward.run_bucket,
        )

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Makes the model's device current: launches, events and graphs go by the current one."""
        return torch.cuda.device(self.device) if self._is_cuda else contextlib.nullcontext()

    def _keep_rows(self, max_num_reqs: int) -> None:
        keep_rows = getattr(self.sampler, "keep_rows", None)
        if keep_rows is None:
            raise ConfigError(
                f"model_name: expected a sampler with keep_rows for shifted logits, got"
                f" {type(self.sampler).__name__}"
            )
        keep_rows(self._step_buffers.max_logits_rows, max_num_reqs)

    @property
    def kv_cache(self) -> KVCache:
        """The tensors that page ids address."""
        return self._cache

    @property
    def graph_buckets(self) -> tuple[int, ...]:
        """Request counts that have a CUDA graph."""
        if self._decode_loop is not None:
            return self._decode_loop.graph_buckets
        forwards = self._graphs.forwards
        shapes = () if forwards is None else forwards.captured
        counts = {b.num_reqs for b in shapes if b.rows_per_request == self.config.decode_rows}
        return tuple(sorted(counts))

    @property
    def num_graph_steps(self) -> int:
        """Decode steps that replayed a graph."""
        loop = self._decode_loop
        return self._graphs.num_steps + (0 if loop is None else loop.num_graph_steps)

    @property
    def num_ahead_steps(self) -> int:
        """Decode steps that the device began before the host had completed the previous one."""
        return 0 if self._decode_loop is None else self._decode_loop.num_ahead_steps

    @property
    def num_graph_fallbacks(self) -> int:
        """Decode steps that no graph fitted."""
        return self._graphs.num_fallbacks

    def expect_draws(self) -> None:
        """Announces a request that draws its tokens; before its first step, from any thread."""
        if self._inputs_builder is not None:
            self._inputs_builder.has_sampled_requests = True

    def next_plan(self) -> _core.StepPlan:
        """The plan object for the scheduler to fill."""
        return self._step_buffers.next_plan()

    @torch.inference_mode()
    def start_loop(self, scheduler: _core.Scheduler, plan: _core.StepPlan) -> int | None:
        """Hands the plan in flight to the decode loop; None: `execute` must run it."""
        loop = self._decode_loop
        if loop is None or self.row_watch.is_active or not loop.takes(scheduler, plan):
            return None
        with self._on_device():
            return loop.start(scheduler, plan)

    @torch.inference_mode()
    def run_ahead(self, scheduler: _core.Scheduler, plan: _core.StepPlan) -> int | None:
        """Enqueues the step after the plan in flight, which the loop runs; None: not now."""
        assert self._decode_loop is not None
        with self._on_device():
            return self._decode_loop.run_ahead(scheduler, plan)

    @torch.inference_mode()
    def collect(
        self, scheduler: _core.Scheduler, plan: _core.StepPlan, place: int
    ) -> _core.SamplerOutput:
        """The output of the plan in flight, which the loop runs under `place`."""
        assert self._decode_loop is not None
        return self._decode_loop.collect(scheduler, plan, place)

    @torch.inference_mode()
    def execute(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        """Runs the forward and the sampler of the plan handed out by `next_plan`."""
        with self._on_device():
            return self._execute(plan)

    def _execute(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        bucket = self._graphs.bucket_for(plan) if self._is_cuda else None
        forwards = self._graphs.forwards
        if bucket is not None:
            plan.pad_requests(bucket.num_reqs)
            if forwards is not None:
                forwards.prepare(bucket)
        shape = StepShape.of(plan)
        views = self._step_buffers.upload()
        if self._program is not None:
            ends = torch.from_numpy(_core.visible_ends(plan))
            self._program.begin_step(ends, views.logits_rows[: shape.num_logits_rows])
        if bucket is not None and forwards is not None:
            hidden = self._graphs.replay(bucket)
        else:
            hidden = self._forward(views, shape, plan)
        if shape.num_blocks > 0 or shape.num_logits_rows > 0:
            self._sample(views, shape, hidden, plan, bucket)
        elif self._inputs_builder is not None:
            self._inputs_builder.skip()
        output = self._step_buffers.download()
        if self.row_watch.is_active:
            self.row_watch.after_sampling(plan, output)
        return output

    @property
    def _step_buffers(self) -> StepBuffers:
        if self._buffers is None:
            raise RuntimeError("ModelRunner: expected prepare() before the first step")
        return self._buffers

    @property
    def _prepared_inputs(self) -> SamplerInputsBuilder:
        if self._inputs_builder is None:
            raise RuntimeError("ModelRunner: expected prepare() before the first step")
        return self._inputs_builder

    @property
    def _step_forward(self) -> StepForward:
        if self._prepared_forward is None:
            raise RuntimeError("ModelRunner: expected prepare() before the first step")
        return self._prepared_forward

    def _forward(self, views: PlanViews, shape: StepShape, plan: _core.StepPlan) -> Tensor:
        max_context_len = plan.max_context_len
        if self._is_cuda and plan.uniform_q_len:
            # As in a graph: kernels derive the split of the keys from this bound.
            max_context_len = self._graphs.bound(
                shape.num_reqs, plan.uniform_q_len, plan.max_context_len
            )
        workspace = self._workspace.of(shape.num_reqs, plan.max_seqlen_q, max_context_len)
        return self._step_forward.run(
            views, shape.num_rows, shape.num_reqs, plan.max_seqlen_q, max_context_len, workspace
        )

    def _sample(
        self,
        views: PlanViews,
        shape: StepShape,
        hidden: Tensor,
        plan: _core.StepPlan,
        bucket: Bucket | None,
    ) -> None:
        assert self._inputs_builder is not None
        rows = views.logits_rows[: shape.num_logits_rows]
        if bucket is not None and self._has_loop_logits(bucket):
            logits = head_logits(self.model, hidden).index_select(0, rows)
        else:
            logits = head_logits(self.model, hidden.index_select(0, rows))
        if self.row_watch.is_active:
            self.row_watch.before_sampling(plan, logits)
        self.sampler(self._inputs_builder.inputs(views, shape, logits))

    def _has_loop_logits(self, bucket: Bucket) -> bool:
        """Whether the head runs over all rows of a padded step, as it does where the loop takes it.

        A product of fewer rows may round differently, and both loops must decide alike. With shifted
        logits and a dual cache this matters only to engines that run ahead; others leave out the
        rows that decide nothing.
        """
        strategy = self.config.decoding.decoding_strategy
        is_known = strategy in _LOOP_STRATEGIES and not self._has_other_host_shapes()
        if self._prepared_inputs.has_carry or strategy == "fast_dllm_v2":
            is_known = is_known and self._wants_loop(strategy)
        return is_known and has_graph_of_logits(self.config, bucket)

    def _no_graph_reason(self) -> str | None:
        kernel = self.config.kernel
        if kernel.enforce_eager:
            return "enforce_eager is set"
        if not kernel.enable_full_static_runner:
            return "enable_full_static_runner is off"
        return None

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        free = torch.cuda.mem_get_info(self.device)[0]
        shapes = self._graphs.shapes()
        most = max(bucket.num_rows for bucket in shapes)
        # With a loop these graphs serve the steps it does not take, and are captured on demand.
        forward = self._step_forward
        self._graphs.forwards = ForwardGraphs(
            self.config, most, forward.fill_bucket, forward.run_bucket
        )
        if self._decode_loop is not None:
            self._decode_loop.capture(forward.fill_bucket)
        else:
            self._graphs.forwards.capture(shapes)
        taken = free - torch.cuda.mem_get_info(self.device)[0]
        logger.info("CUDA graphs: %d shapes, %.1f MiB", len(shapes), taken / 2**20)

    def _make_cache(self, num_pages: int) -> KVCache:
        cache = self.config.cache
        return KVCache(
            self.config.model.spec.kv_layers if self._program is None else (),
            num_pages,
            cache.page_size,
            self.dtype,
            self.device,
            cast("KvLayoutName", cache.kv_cache_layout),
            cache.k_cache_hdim_split_factor_x,
        )

    def _page_bytes(self) -> int:
        spec, page_size = self.config.model.spec, self.config.cache.page_size
        return KVCache.page_bytes(spec.kv_layers, page_size, self.dtype)
