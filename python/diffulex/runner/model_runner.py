# SPDX-License-Identifier: Apache-2.0
"""One step on the device: plan arrays in, sampler output out.

Knows tensors and metadata, not requests. Only its decode loop calls the scheduler, which is handed in
by the caller.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from diffulex.checkpoint.memory import at_most_available, check_num_pages
from diffulex.distributed.comm import LOCAL
from diffulex.errors import ConfigError
from diffulex.likelihood.forward import RowRunner, ScoreForward
from diffulex.log import get_logger, warn_once
from diffulex.nn.kv_cache import KVCache, KvLayoutName, kv_dtype
from diffulex.nn.linear import pack_weights, set_batch_invariant
from diffulex.ops.settled import batch_invariant
from diffulex.profiling.memory import MemoryReport, tensor_bytes
from diffulex.runner.attention_workspace import AttentionWorkspace
from diffulex.runner.batch import ArenaViews, StepBuffers, StepShape
from diffulex.runner.context_classes import ContextClasses
from diffulex.runner.decode_graphs import (
    Bucket,
    DecodeGraphs,
    ForwardGraphs,
    decode_buckets,
    max_graph_rows,
    packs_rows,
)
from diffulex.runner.decode_loop import DecodeLoop, has_graph_of_logits, num_loop_logits
from diffulex.runner.kernels import choices_of
from diffulex.runner.model_call import BlankRows, ModelCall, head_logits
from diffulex.runner.open_engines import memory_holders, register_open
from diffulex.runner.packed_steps import num_head_graphs
from diffulex.runner.row_watch import RowWatch
from diffulex.runner.runner_stages import stages_of
from diffulex.runner.sampler_inputs import SamplerInputsBuilder
from diffulex.runner.step_forward import StepForward
from diffulex.runner.warm_up import GraphMemory, free_device_bytes, max_logits_rows
from diffulex.samplers.base import RowSampler, Sampler
from diffulex.samplers.selection import make_sampler, share_rows
from diffulex.strategies.listing import strategy_named
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.likelihood.rows import ScoreBatch, Scored
    from diffulex.nn.attention_metadata import AttnMetadata
    from diffulex.profiling.kernel_choices import KernelChoice
    from diffulex.profiling.ring import StepTimes
    from diffulex.profiling.scopes import Stage
    from diffulex.runner.loop_steps import LoopEntry, LoopStep
    from diffulex.samplers.inputs import SamplerInputs
    from diffulex.strategies.traits import StrategyTraits

__all__ = ["ModelRunner"]

logger = get_logger(__name__)


_Part = TypeVar("_Part")


def _prepared(part: _Part | None) -> _Part:
    if part is None:
        raise RuntimeError("ModelRunner: expected prepare() before the first step")
    return part


@contextlib.contextmanager
def _invariant_on(device: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    with device, batch_invariant():
        yield


class ModelRunner:
    """Owns the model, the KV tensors, the graphs and the sampler.

    Order of use: construct, `decide_num_pages` if the configuration leaves it open, `prepare`,
    then per step `next_plan`, (the scheduler fills it), `execute`.
    """

    def __init__(self, config: Config, model: Any) -> None:
        self.config = config
        self._strategy = strategy_named(config.decoding.decoding_strategy)
        self.model = model
        self.device = torch.device(config.model.device)
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.sampler: Sampler = make_sampler(config)
        if isinstance(self.sampler, RowSampler):
            self.sampler.bind_model(model)
        self._is_cuda = self.device.type == "cuda"
        #: An exported program keeps K and V itself and is told what each row sees.
        self._program = model if getattr(model, "owns_kv", False) else None
        self._workspace = AttentionWorkspace(config.local_spec, self.device)
        self._graphs = DecodeGraphs(
            decode_buckets(config),
            ContextClasses(config),
            is_packed=packs_rows(config),
            is_strict=config.kernel.require_fast_paths,
            max_rows=max_graph_rows(config),
        )
        #: What the capture of the graphs took at the start.
        self.capture_s, self._graph_bytes = 0.0, 0
        if self._program is None:
            set_batch_invariant(model, config.kernel.batch_invariant)
        with self._on_device():
            self._call = ModelCall(config, model)
            self._cache = self._make_cache(1)
        self._buffers: StepBuffers | None = None
        self._inputs_builder: SamplerInputsBuilder | None = None
        self._prepared_forward: StepForward | None = None
        self._decode_loop: DecodeLoop | None = None
        #: Receives when the stages of a step began; None: no records are kept.
        self.times: StepTimes | None = None
        #: Is given the hidden states [T, H] of every step that the host has planned.
        self.on_hidden: Callable[[Tensor], None] | None = None
        #: Looks at logits on the host while a request asks for it; see its file.
        self.row_watch = RowWatch(config, self.sampler, share_rows(model, self.sampler))
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
                pack_weights(self.model)  # their last form is what the rest is measured beside
                parts = self.config, self._call, self._cache, self._workspace, self.sampler
                budget = free_device_bytes(*parts, self._graph_memory())
        else:
            most = per_request * self.config.scheduler.max_num_reqs * page_bytes
            budget = min(at_most_available(self.config.cache.cpu_kv_cache_bytes), most)
        num_pages = budget // page_bytes
        if num_pages < per_request:
            raise ConfigError(
                f"num_pages: expected memory for at least {per_request} pages of {page_bytes}"
                f" bytes (one request of max_model_len {self.config.scheduler.max_model_len}),"
                f" got {max(budget, 0)} bytes{memory_holders(self) if self._is_cuda else ''}"
            )
        return int(num_pages)

    def _graph_memory(self) -> GraphMemory | None:
        """What `_capture_graphs` will take; None without graphs."""
        if self.no_graph_reason is not None:
            return None
        config, shapes = self.config, self._graphs.captured_shapes()
        if not shapes:
            return None
        fitting = [num_loop_logits(config, b) for b in shapes if has_graph_of_logits(config, b)]
        has_logits = self._wants_loop(self._strategy.traits)
        num_heads = num_head_graphs(config, self._graphs) if has_logits else 0
        return GraphMemory(shapes, max(fitting, default=0) if has_logits else 0, num_heads)

    def prepare(
        self,
        config: Config,
        options: _core.EngineOptions,
        arenas: Sequence[Tensor] | None = None,
    ) -> None:
        """Allocates everything the steps need; `config` has the number of pages.

        `arenas` is memory for the plans that other ranks have as well.
        """
        self.config = config
        self._check_preemption()
        with self._on_device():
            pack_weights(self.model)
            if self._program is None:
                check_num_pages(config, self._page_bytes())
            self._cache = self._make_cache(config.cache.num_pages)
            # The state machine of the core: another one than the name of a strategy from outside says.
            core_traits = strategy_named(options.strategy).traits
            has_loop = self._has_decode_loop(options, core_traits)
            self._buffers = StepBuffers(options, self.device, has_mirror=has_loop, hosts=arenas)
            self._inputs_builder = SamplerInputsBuilder(
                options, core_traits, self._buffers.sampler, self._call.signals
            )
            if options.logits_shift:
                self._keep_rows(options.max_num_reqs)
            self._prepared_forward = StepForward(
                config, self._call, self._cache, self._buffers, self._graphs.shapes()
            )
            if has_loop:
                self._make_decode_loop(options, core_traits)
            if not self._is_cuda:
                return
            reason = self.no_graph_reason
            if reason is None:
                self._capture_graphs()
            else:
                warn_once(logger, f"no graphs: {reason}", "decode runs without graphs: %s", reason)

    def _check_preemption(self) -> None:
        """A request that loses its pages computes its cache again in other forwards than before."""
        config = self.config
        need = config.pages_per_request * config.scheduler.max_num_reqs
        if config.kernel.batch_invariant and config.cache.num_pages < need:
            raise ConfigError(
                f"batch_invariant: expected num_pages >= {need} (max_num_reqs"
                f" {config.scheduler.max_num_reqs} of max_model_len"
                f" {config.scheduler.max_model_len}), so that no request is preempted, got"
                f" {config.cache.num_pages}"
            )

    def _has_decode_loop(self, options: _core.EngineOptions, traits: StrategyTraits) -> bool:
        if type(self).execute is not ModelRunner.execute:
            return False  # a custom runner must see every step
        if not (isinstance(self.sampler, RowSampler) and self.sampler.is_capturable):
            return False  # and so must a custom sampler
        if options.token_merge_top_k > 0 and options.dmax_store_soft_embeddings:
            return False  # the loop could take no step: graphs serve the host's
        return self._wants_loop(traits)

    def _wants_loop(self, traits: StrategyTraits) -> bool:
        """Whether decode steps of a strategy with these traits are to run ahead."""
        if not traits.can_run_ahead:
            return False
        if self.config.kernel.run_ahead != "auto":
            return self.config.kernel.run_ahead == "on"
        # Mixed embeddings and signals pass the last bits of one step's logits to the next, and
        # products of another shape round differently: such strategies run ahead only on request. So do
        # those whose steps have another shape on the host.
        is_rounding = traits.feeds_back or self._strategy.has_other_host_shapes(self.config)
        return self._is_cuda and not is_rounding

    def _make_decode_loop(self, options: _core.EngineOptions, traits: StrategyTraits) -> None:
        config = self.config
        if isinstance(self.sampler, RowSampler):
            # Graphs keep the addresses of the sampler's buffers: no later step may replace them, not
            # even one larger than every graph (a prefill, a batch beyond the buckets).
            self.sampler.reserve(max_logits_rows(config), config.model.spec.vocab_size)
        self._decode_loop = DecodeLoop(
            config,
            options,
            traits,
            self.model,
            self.sampler,
            self.step_buffers,
            self._prepared_inputs,
            self._graphs,
            self._step_forward.run_bucket,
        )

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """How ops run: with the model's device as the current one, by which launches, events and graphs
        go, and with results that do not depend on the batch if that is wanted."""
        device: contextlib.AbstractContextManager[object] = (
            torch.cuda.device(self.device) if self._is_cuda else contextlib.nullcontext()
        )
        return _invariant_on(device) if self.config.kernel.batch_invariant else device

    def _keep_rows(self, max_num_reqs: int) -> None:
        if not isinstance(self.sampler, RowSampler):
            raise ConfigError(
                f"model_name: expected a RowSampler for shifted logits, got"
                f" {type(self.sampler).__name__}"
            )
        self.sampler.keep_rows(self.step_buffers.max_logits_rows, max_num_reqs)

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

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that are captured."""
        loop, forwards = self._decode_loop, self._graphs.forwards
        num_forwards = 0 if forwards is None else forwards.num_captured
        return num_forwards + (0 if loop is None else loop.num_graphs)

    def memory(self) -> MemoryReport:
        """Where the memory of this rank is; between steps."""
        forward = self._step_forward
        scratch = [self._workspace.memory, forward.decode_workspace]
        free = total = allocated = reserved = None
        if self._is_cuda:
            free, total = torch.cuda.mem_get_info(self.device)
            allocated = torch.cuda.memory_allocated(self.device)
            reserved = torch.cuda.memory_reserved(self.device)
        return MemoryReport(
            weights=tensor_bytes(self.model),
            kv_pool=self._cache.nbytes,
            workspace=tensor_bytes(scratch),
            step_buffers=tensor_bytes(self.step_buffers, self._decode_state()),
            graph_pools=self._graph_bytes,
            sampler_state=tensor_bytes(vars(self.sampler)),
            allocated=allocated,
            reserved=reserved,
            device_free=free,
            device_total=total,
        )

    def _decode_state(self) -> object:
        return None if self._decode_loop is None else self._decode_loop.arrays

    def kernel_choices(self) -> list[KernelChoice]:
        """Which kernel each op of a step takes, and why."""
        return choices_of(self.config, self.device, self.model)

    def expect_draws(self) -> None:
        """Announces a request that draws its tokens; before its first step, from any thread."""
        if self._inputs_builder is not None:
            self._inputs_builder.has_sampled_requests = True

    def next_plan(self) -> _core.StepPlan:
        """The plan object for the scheduler to fill."""
        return self.step_buffers.next_plan()

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
        if self.times is not None:
            self.times.graph_bucket = self._decode_loop.graph_bucket(place)
        return self._decode_loop.collect(scheduler, plan, place)

    @property
    def graphs(self) -> DecodeGraphs:
        """What decode steps are padded to."""
        return self._graphs

    @property
    def loop(self) -> DecodeLoop | None:
        """What runs decode steps ahead; None: the host plans all of them."""
        return self._decode_loop

    @torch.inference_mode()
    def follow(self, told: LoopEntry | LoopStep) -> int:
        """Enqueues a step of the loop of which another rank has told; the place of its result."""
        assert self._decode_loop is not None
        with self._on_device():
            return self._decode_loop.follow(told)

    @torch.inference_mode()
    def execute(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        """Runs the forward and the sampler of the plan handed out by `next_plan`."""
        with self._on_device():
            return self._execute(plan)

    @torch.inference_mode()
    def score(self, batch: ScoreBatch) -> Scored:
        """Answers the queries of rows that belong to no request; the cache of the steps is not read."""
        if self._program is not None:
            raise ConfigError(
                "score: expected a model with a cache of pages, got an exported program"
            )
        rows = RowRunner(
            max_logits_rows(self.config),
            self._make_cache,
            self._workspace.of,
            self._unplanned_rows,
            partial(head_logits, self.model),
        )
        with self._on_device():
            return ScoreForward(self.config, rows).run(batch)

    def _unplanned_rows(
        self, ids: Tensor, positions: Tensor, metadata: AttnMetadata, cache: KVCache
    ) -> Tensor:
        """Hidden states [T, H] of tokens [T] that no scheduler has planned."""
        rows = BlankRows.of(positions, self.config.decoding.token_merge_top_k)
        rows.input_ids = ids
        return self._call(rows, ids.size(0), metadata, cache)

    def _execute(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        bucket, shape, views = self._before_forward(plan)
        times = self.times
        if times is not None:
            times.forward = time.perf_counter()
            if bucket is not None and self._graphs.forwards_of(bucket) is not None:
                times.graph_bucket = bucket.num_reqs
        hidden = self._model_forward(views, shape, plan, bucket)
        if self.on_hidden is not None:
            self.on_hidden(hidden[: shape.num_rows])
        if times is not None:
            times.sample = time.perf_counter()
        if shape.num_blocks > 0 or shape.num_logits_rows > 0:
            self._sample(views, shape, hidden, plan, bucket)
        elif self._inputs_builder is not None:
            self._inputs_builder.skip()
        output = self.step_buffers.download()
        if self.row_watch.is_active:
            self.row_watch.after_sampling(plan, output)
        return output

    def _before_forward(self, plan: _core.StepPlan) -> tuple[Bucket | None, StepShape, ArenaViews]:
        bucket = self._graphs.take_padded(plan) if self._is_cuda else None
        forwards = self._graphs.forwards_of(bucket)
        if bucket is not None and forwards is not None:
            forwards.prepare(bucket)
        shape = StepShape.of(plan)
        views = self.step_buffers.upload()
        if self._program is not None:
            ends = torch.from_numpy(_core.visible_ends(plan))
            self._program.begin_step(ends, views.logits_rows[: shape.num_logits_rows])
        return bucket, shape, views

    def _model_forward(
        self, views: ArenaViews, shape: StepShape, plan: _core.StepPlan, bucket: Bucket | None
    ) -> Tensor:
        if bucket is not None and self._graphs.forwards_of(bucket) is not None:
            return self._graphs.replay(bucket)
        if plan.kind == _core.PlanKind.DECODE:
            return self._eager_decode(views, shape, plan, bucket)
        return self._eager_prefill(views, shape, plan)

    def _eager_decode(
        self, views: ArenaViews, shape: StepShape, plan: _core.StepPlan, bucket: Bucket | None
    ) -> Tensor:
        return self._forward(views, shape, plan, bucket)

    def _eager_prefill(self, views: ArenaViews, shape: StepShape, plan: _core.StepPlan) -> Tensor:
        return self._forward(views, shape, plan)

    @property
    def step_buffers(self) -> StepBuffers:
        """Plans and outputs; RuntimeError before `prepare`."""
        return _prepared(self._buffers)

    @property
    def _prepared_inputs(self) -> SamplerInputsBuilder:
        return _prepared(self._inputs_builder)

    @property
    def _step_forward(self) -> StepForward:
        return _prepared(self._prepared_forward)

    def _forward(
        self,
        views: ArenaViews,
        shape: StepShape,
        plan: _core.StepPlan,
        bucket: Bucket | None = None,
    ) -> Tensor:
        most_rows, max_context_len = plan.max_seqlen_q, plan.max_context_len
        if bucket is not None:
            # As in a graph: kernels derive the split of the keys from these bounds.
            most_rows, max_context_len = bucket.rows_per_request, bucket.max_context_len
        workspace = self._workspace.of(shape.num_reqs, most_rows, max_context_len)
        return self._step_forward.run(
            views, shape.num_rows, shape.num_reqs, most_rows, max_context_len, workspace
        )

    def _sample(
        self,
        views: ArenaViews,
        shape: StepShape,
        hidden: Tensor,
        plan: _core.StepPlan,
        bucket: Bucket | None,
    ) -> None:
        logits = self._logits(views.logits_rows[: shape.num_logits_rows], hidden, bucket)
        if self.row_watch.is_active:
            logits = self.row_watch.before_sampling(plan, logits)
        self._decide(self._prepared_inputs.inputs(views, shape, logits))

    def _logits(self, rows: Tensor, hidden: Tensor, bucket: Bucket | None) -> Tensor:
        if bucket is None or not self._has_loop_logits(bucket):
            return head_logits(self.model, hidden.index_select(0, rows))
        count = num_loop_logits(self.config, bucket)
        if count == hidden.size(0):
            return head_logits(self.model, hidden).index_select(0, rows)
        padded = torch.nn.functional.pad(rows, (0, count - rows.size(0)))
        return head_logits(self.model, hidden.index_select(0, padded))[: rows.size(0)]

    def _decide(self, inputs: SamplerInputs) -> None:
        self.sampler(inputs)

    def stages(self) -> list[Stage]:
        """Stages of a step on this rank."""
        return stages_of(
            *(self, self._strategy.traits, self._graphs, self.step_buffers),
            *(self._prepared_inputs, self.sampler, self._decode_loop),
        )

    def _has_loop_logits(self, bucket: Bucket) -> bool:
        """Whether the head runs over as many rows of a padded step as it does where the loop takes it.

        A product of fewer rows may round differently, and both loops must decide alike. With shifted
        logits and a dual cache this matters only to engines that run ahead; others leave out the
        rows that decide nothing.
        """
        traits = self._strategy.traits
        has_same = traits.can_run_ahead and not self._strategy.has_other_host_shapes(self.config)
        has_same = has_same and not self._graphs.is_packed
        if self._prepared_inputs.has_carry or traits.has_dual_cache:
            has_same = has_same and self._wants_loop(traits)
        return has_same and has_graph_of_logits(self.config, bucket)

    @property
    def no_graph_reason(self) -> str | None:
        """Why decode steps run without graphs; None where they have some."""
        kernel = self.config.kernel
        if not self._is_cuda:
            return f"{self.device.type} has none"
        if kernel.enforce_eager:
            return "enforce_eager is set"
        if not kernel.enable_full_static_runner:
            return "enable_full_static_runner is off"
        return getattr(self.model, "comm", LOCAL).no_capture_reason

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        free = torch.cuda.mem_get_info(self.device)[0]
        start = time.perf_counter()
        shapes = self._graphs.captured_shapes()
        if not shapes:
            return
        # With a loop these graphs serve the steps it does not take, and are captured on demand.
        forward = self._step_forward
        self._graphs.forwards = ForwardGraphs(
            self.config, shapes[0], forward.fill_bucket, forward.run_bucket
        )
        if self._decode_loop is not None:
            self._decode_loop.capture(forward.fill_bucket)
        else:
            # Packed ones follow when they are needed: few of them are.
            self._graphs.forwards.capture(tuple(b for b in shapes if not b.packed_rows))
        self._graph_bytes = max(free - torch.cuda.mem_get_info(self.device)[0], 0)
        self.capture_s = time.perf_counter() - start

    def _make_cache(self, num_pages: int) -> KVCache:
        cache = self.config.cache
        return KVCache(
            self.config.local_spec.kv_layers if self._program is None else (),
            num_pages,
            cache.page_size,
            kv_dtype(cache.kv_cache_dtype, self.dtype),
            self.device,
            cast("KvLayoutName", cache.kv_cache_layout),
            cache.k_cache_hdim_split_factor_x,
        )

    def _page_bytes(self) -> int:
        spec, page_size = self.config.local_spec, self.config.cache.page_size
        dtype = kv_dtype(self.config.cache.kv_cache_dtype, self.dtype)
        return KVCache.page_bytes(spec.kv_layers, page_size, dtype)
