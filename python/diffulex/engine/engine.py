# SPDX-License-Identifier: Apache-2.0
"""Diffulex: requests in, tokens out.

Puts scheduler, runner and tokenizer together. The steps themselves are in step_loop.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from diffulex.checkpoint.memory import check_num_reqs
from diffulex.config.config import Config
from diffulex.config.facts import read_facts
from diffulex.config.parse import Options
from diffulex.config.sampling_params import SamplingParams, merged_params
from diffulex.engine.interrupt import InterruptGuard, deferred_interrupt
from diffulex.engine.ledger import Ledger
from diffulex.engine.live import LiveControls
from diffulex.engine.metrics import RequestRecord, RunStats
from diffulex.engine.observed import Observed
from diffulex.engine.output import GenerationOutputs, RequestOutput, StepOutput, StreamEvent
from diffulex.engine.progress import Progress, ProgressInfo, adding_bar
from diffulex.engine.prompt import Prompt, encode_prompt, repeated, split_prompts, spread_params
from diffulex.engine.ranks.executor import make_executor
from diffulex.engine.replicas.loop import ReplicaLoop
from diffulex.engine.replicas.members import refuse_others
from diffulex.engine.routing import StepQueue, take_all
from diffulex.engine.startup import (
    check_components,
    check_fast_paths,
    import_workers,
    load_weights,
    log_startup,
)
from diffulex.engine.step_loop import StepLoop
from diffulex.engine.text_stream import TextStream
from diffulex.likelihood.estimator import Estimate
from diffulex.likelihood.scorer import OneScore, Scorer, Scores
from diffulex.log import get_logger
from diffulex.profiling.profiler import Profiler
from diffulex.profiling.scopes import Instrument
from diffulex.registry import AutoScheduler
from diffulex.runner.local_executor import LocalExecutor
from diffulex_ext import _core

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.keywords import EngineKeywords, SamplingKeywords
    from diffulex.distributed.coupling import Coupling
    from diffulex.distributed.executor import Executor
    from diffulex.profiling.ring import StepRing

__all__ = ["LLM", "Diffulex", "DiffulexEngine"]

logger = get_logger(__name__)

StreamMode = Literal["block_append", "denoise"]


def check_mode(mode: str) -> None:
    """ValueError for a mode of streams that does not exist."""
    if mode not in ("block_append", "denoise"):
        raise ValueError(f"mode: expected block_append or denoise, got {mode!r}")


class Diffulex(LiveControls, Observed):
    """An engine over one model.

    Args:
        model: `demo` (bundled), a checkpoint directory or a hub id.
        show_progress: a bar while weights load, on a terminal.
        settings: keys of docs/configuration.md.

    Raises:
        ConfigError: bad settings.
        CheckpointError: the model cannot be found or read.

    `add_request`, `abort` and `has_unfinished` may be called from any thread; everything else
    belongs to one thread at a time.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        show_progress: bool = False,
        **settings: Unpack[EngineKeywords],
    ) -> None:
        with _memory_back_on_failure(self):
            self._build(Options.parse(model, settings), show_progress, None)

    @classmethod
    def from_options(cls, options: Options, coupling: Coupling | None = None) -> Diffulex:
        """An engine of options that are parsed already, perhaps a replica that shares its experts."""
        engine = cls.__new__(cls)
        with _memory_back_on_failure(engine):
            engine._build(options, False, coupling)
        return engine

    def _build(self, options: Options, show_progress: bool, coupling: Coupling | None) -> None:
        import_workers(options.given.get("worker_imports", ()))
        facts = read_facts(options)
        config = Config.of(options, facts)
        parallel, rank = config.parallel, 0 if coupling is None else coupling.rank(config)
        if coupling is None and (parallel.data_parallel_size > 1 or parallel.is_of_cluster):
            self._assemble_replicas(config, options, facts.tokenizer)
            return
        config = config.of_rank(rank)
        executor = self._executor = make_executor(config, facts.model_name, coupling)
        # Closed when the weights do not load. No variable holds the model: this frame outlives a failure.
        load = partial(load_weights, rank=rank, stored=facts.stored, on_piece=executor.check)
        self._assemble(
            config, load(config, facts.model_name, show_progress), facts.tokenizer, executor
        )

    @classmethod
    def from_components(
        cls,
        config: Config,
        model: Any,
        tokenizer: Tokenizer | None,
        executor: Executor | None = None,
    ) -> Diffulex:
        """An engine over a model that exists already, for example with random weights.

        Without a tokenizer prompts are token ids and texts are empty. Without an executor the steps
        run in this process; one that is given is the engine's to close, also after a failure here.
        """
        check_components(config, model, has_executor=executor is not None)
        engine = cls.__new__(cls)
        with _memory_back_on_failure(engine):
            engine._assemble(
                config, model, tokenizer, LocalExecutor() if executor is None else executor
            )
        return engine

    def _assemble(
        self, config: Config, model: Any, tokenizer: Tokenizer | None, executor: Executor
    ) -> None:
        decoding = config.decoding
        self._executor: Executor = executor
        check_num_reqs(config)
        self._tokenizer = tokenizer
        if tokenizer is not None and not decoding.traits.has_canvas:
            tokenizer.protect_mask(config.model.mask_token_id)
        start = time.perf_counter()
        self._observe(config, executor)
        executor.load(config, model)
        if config.cache.num_pages == -1:
            config = config.with_num_pages(executor.num_pages())
        self._scheduler: _core.Scheduler = AutoScheduler.create(decoding.decoding_strategy, config)
        prepared = executor.start(config, self._scheduler)
        check_fast_paths(config, prepared)
        self.config = config
        #: Seconds from the loaded model to the first possible step: cache, warm-up, graphs.
        self.warm_up_s = time.perf_counter() - start
        # A canvas has no masks: the id in the configuration is an ordinary token there.
        mask_token_id = -1 if decoding.traits.has_canvas else config.model.mask_token_id
        ledger = Ledger(self._scheduler, executor, tokenizer, mask_token_id)
        self._loop = StepLoop(config, self._scheduler, executor, ledger, tokenizer, self._ring)
        self._prepared = prepared
        log_startup(config, prepared, executor.memory(), tokenizer)
        self._profiler.listen(config.model.device)

    def _assemble_replicas(self, config: Config, options: Options, tokenizer: Tokenizer) -> None:
        """Several engines in separate processes, which do what this one is asked for."""
        check_num_reqs(config)
        self._tokenizer = tokenizer
        if not config.decoding.traits.has_canvas:
            tokenizer.protect_mask(config.model.mask_token_id)
        self._profiler = Profiler(None, Instrument(list))
        loop = ReplicaLoop(config, options, tokenizer)
        self._loop = cast("StepLoop", loop)  # what this class asks of one
        self.config, self.warm_up_s = loop.config, loop.warm_up_s
        refuse_others(self, config.parallel)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; RuntimeError for an engine built without one."""
        if self._tokenizer is None:
            raise RuntimeError(
                "Diffulex.tokenizer: expected a tokenizer, got an engine without one"
            )
        return self._tokenizer

    @property
    def run_stats(self) -> RunStats:
        """Totals since the engine exists; during a `generate` call, those of the call."""
        return self._loop.ledger.run_stats

    # Requests and steps.

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        has_snapshots: bool = False,
        has_text: bool = False,
    ) -> int:
        """Enqueues a prompt (text, token ids or chat messages) and returns its request id.

        Args:
            prompt: text, token ids or chat messages.
            sampling_params: None: the defaults.
            has_snapshots: its step outputs carry the buffer.
            has_text: its step outputs carry text, released together with its tokens.

        Raises:
            PromptError: the prompt is empty, too long or has ids outside the vocabulary.
            OutOfPagesError: the page pool could never hold the request.
        """
        self._loop.check_open()
        token_ids = self._encode(prompt, use_chat_template=False)
        params = sampling_params or SamplingParams()
        return self._loop.add(token_ids, params, has_snapshots=has_snapshots, has_text=has_text)

    def abort(self, req_id: int) -> bool:
        """Ends a request at the next step boundary; False for unknown or finished ids."""
        return self._loop.abort(req_id)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return self._loop.has_unfinished()

    def step(self) -> list[StepOutput]:
        """One forward over the requests the scheduler picks; one entry per request touched.

        Requests of open streams are served as well, but their outputs go to the streams. What
        streams and `generate` calls did to other requests in between is returned first.

        A failure of the forward is raised here; its requests wait again and the engine stays
        usable.
        """
        self._loop.check_open()
        unclaimed = self._loop.router.unclaimed
        if not unclaimed:
            self._loop.run()
        return take_all(unclaimed)

    def record(self, req_id: int) -> RequestRecord:
        """Counts and times of a request that is not finished; KeyError for every other."""
        return self._loop.ledger.record(req_id)

    def watch_buffer(self, req_id: int) -> None:
        """Adds snapshots to the step outputs of a request from now on."""
        self._loop.ledger.watch_buffer(req_id)

    def observe_blocks(self, on_block: Callable[[int], None]) -> None:
        """Calls `on_block` with the forwards each block was denoised in, once it is cached."""
        self._loop.ledger.on_block = on_block

    @property
    def num_active_blocks(self) -> int:
        """Blocks the last step denoised."""
        return self._loop.ledger.num_active_blocks

    @property
    def num_watched_requests(self) -> int:
        """Requests whose logits are looked at on the host; see `Executor.watch`."""
        return self._loop.num_watched

    def flush_prefix_cache(self) -> int:
        """Forgets cached prefixes that no request uses; returns how many pages that frees."""
        self._loop.check_open()
        return self._loop.flush_prefix_cache()

    def stats(self) -> _core.SchedulerStats:
        """Counters of the scheduler."""
        self._loop.check_open()
        return self._loop.stats()

    # Whole generations.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        progress_log_interval: float = 5.0,
        *,
        summary: bool = True,
        use_chat_template: bool = False,
        stream_callback: Callable[[StreamEvent], None] | None = None,
        on_progress: Callable[[ProgressInfo], None] | None = None,
        on_interrupt: Literal["raise", "return"] = "raise",
        n: int = 1,
        **sampling: Unpack[SamplingKeywords],
    ) -> GenerationOutputs:
        """Decodes every prompt to its end and returns the results in prompt order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all prompts, or one each.
            use_tqdm: bars instead of log lines, when stderr is a terminal.
            progress_log_interval: seconds between log lines; 0 for none.
            summary: log the summary block at the end.
            use_chat_template: treat each text as a user message.
            stream_callback: receives the appended text of every request as it becomes final.
            on_progress: receives the numbers of each progress report.
            on_interrupt: after Ctrl-C, `raise` KeyboardInterrupt or `return` what there is.
            n: answers per prompt, which follow each other in the result. They differ by their seeds,
                so not where nothing is drawn.
            sampling: fields of SamplingParams for all prompts, in place of `sampling_params`.

        Raises:
            PromptError: a prompt cannot be served; then none was started.
        """
        self._loop.check_running()
        if on_interrupt not in ("raise", "return"):
            raise ValueError(f"on_interrupt: expected raise or return, got {on_interrupt!r}")
        encoded = [self._encode(p, use_chat_template) for p in split_prompts(prompts)]
        params = spread_params(merged_params(sampling_params, sampling), len(encoded))
        work = repeated(list(zip(encoded, params, strict=True)), n, self.config.sampler)
        start = time.perf_counter()
        run = RunStats(num_replicas=self.config.parallel.data_parallel_size)
        ledger, before = self._loop.ledger, self._loop.counts
        lifetime, ledger.run_stats = ledger.run_stats, run
        try:
            outputs = self._generate(
                work,
                lambda records: Progress(
                    records, run, use_tqdm, progress_log_interval, on_progress, ledger.block_state
                ),
                stream_callback,
                is_raising=on_interrupt == "raise",
                use_tqdm=use_tqdm,
            )
        finally:
            counts = self._loop.counts
            run.num_graphs = counts.captured
            run.num_graph_steps = counts.graph - before.graph
            run.num_graph_fallbacks = counts.graph_fallbacks - before.graph_fallbacks
            run.wall_s = time.perf_counter() - start
            ledger.run_stats = lifetime.merged(run)
        result = GenerationOutputs(outputs, run)
        if summary:
            result.log_summary()
        return result

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> RequestOutput:
        """The assistant's answer to a conversation; `options` as in `generate`, fields of
        SamplingParams among them."""
        self._loop.check_open()
        token_ids = self._encode(messages, use_chat_template=True)
        return self.generate([token_ids], sampling_params, **options)[0]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        mode: StreamMode = "block_append",
        *,
        use_chat_template: bool = False,
        **sampling: Unpack[SamplingKeywords],
    ) -> Generator[StreamEvent, None, None]:
        """Decodes one prompt and yields what happens; closing the iterator aborts the request.

        `block_append` yields tokens and text that can no longer change, and the pieces together
        equal the final ones; a piece has no text while a character is incomplete. `denoise` yields
        one event per step, with a snapshot of the blocks.

        Raises:
            PromptError: the prompt cannot be served.
        """
        self._loop.check_open()
        check_mode(mode)
        token_ids = self._encode(prompt, use_chat_template)
        params = merged_params(sampling_params, sampling) or SamplingParams()
        return self._stream(token_ids, params, mode == "denoise")

    def _stream(
        self, token_ids: tuple[int, ...], params: SamplingParams, has_snapshots: bool
    ) -> Generator[StreamEvent, None, None]:
        queue = StepQueue()
        text = TextStream(self._tokenizer, params)
        req_id, is_finished = -1, False
        self._loop.check_running()
        try:
            with deferred_interrupt():
                req_id = self._loop.add(token_ids, params, has_snapshots=has_snapshots, queue=queue)
            while not is_finished:
                self._loop.check_open()
                if not queue:
                    self._loop.run_or_wait()
                    continue
                step = queue.popleft()
                is_finished = step.is_finished
                event = text.event(step)
                if event.token_ids or event.snapshot is not None or is_finished:
                    yield event
        finally:
            if not is_finished and req_id >= 0:
                self._loop.abandon({req_id})

    def _generate(
        self,
        work: list[tuple[tuple[int, ...], SamplingParams]],
        make_progress: Callable[[list[RequestRecord]], Progress],
        stream_callback: Callable[[StreamEvent], None] | None,
        *,
        is_raising: bool,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        loop, queue = self._loop, StepQueue()
        queue.is_shown = stream_callback is not None
        order: list[int] = []
        done: dict[int, RequestOutput] = {}
        texts: dict[int, TextStream] = {}
        progress: Progress | None = None
        with InterruptGuard() as guard:
            try:
                order.extend(loop.add(*item, queue=queue) for item in adding_bar(work, use_tqdm))
                if stream_callback is not None:
                    texts = {
                        req_id: TextStream(self._tokenizer, params)
                        for req_id, (_, params) in zip(order, work, strict=True)
                    }
                progress = make_progress([loop.ledger.record(req_id) for req_id in order])
                while len(done) < len(order):
                    if guard.is_interrupted:
                        self._interrupt(set(order) - set(done), is_raising)
                    start = time.perf_counter()
                    if not queue:
                        loop.run_or_wait()
                    seconds = time.perf_counter() - start
                    for step in take_all(queue):
                        if stream_callback is not None:
                            event = texts[step.req_id].event(step)
                            if event.token_ids or event.is_finished:
                                stream_callback(event)
                        if step.output is not None:
                            done[step.req_id] = step.output
                            progress.finished(step.output)
                    progress.step(seconds)
            except BaseException:
                loop.abandon(set(order) - set(done))
                raise
            finally:
                if progress is not None:
                    progress.close()
        return [done[req_id] for req_id in order]

    def _interrupt(self, req_ids: set[int], is_raising: bool) -> None:
        """Ctrl-C during a `generate` call, at a step boundary."""
        if is_raising:
            raise KeyboardInterrupt
        for req_id in req_ids:
            self._loop.abort(req_id)

    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        target_ranges: Sequence[tuple[int, int]],
        block_grid: int | None = None,
        *,
        request_ids: Sequence[int] | None = None,
        on_progress: Callable[[int], None] | None = None,
        on_scored: Callable[[OneScore], None] | None = None,
        **estimate: Any,
    ) -> Scores:
        """Estimated log-likelihoods of given tokens, float32 [N], a lower bound in expectation.

        Requests that are under way wait meanwhile, and no prefix is read or kept.

        Args:
            token_ids: N sequences, each with what comes before its tokens to score.
            target_ranges: [begin, end) of the tokens to score.
            block_grid: size of the blocks that are estimated one after the other; 0: the range as a
                whole; None: what the model was trained with.
            request_ids: keys of the draws in [0, 2**63), one per sequence; None: their places.
            on_progress: receives the number of sequences that are done.
            on_scored: receives each sequence's score as it is done.
            estimate: fields of `diffulex.likelihood.estimator.Estimate`: mc_num, batch_size, seed,
                guidance, check_greedy.

        Raises:
            ConfigError: the model denoises a canvas, or is an exported program.
            PromptError: a sequence or a range cannot be scored; then none was.
            RuntimeError: a failed change left some weights old and some new.
            ValueError: a setting of the estimate is out of range.
        """
        self._loop.check_open()
        with self._loop.exclusive():
            self._loop.check_weights()
            scorer = Scorer(self.config, self._executor, block_grid, Estimate(**estimate))
            return scorer.run(
                token_ids,
                target_ranges,
                request_ids=request_ids,
                on_progress=on_progress,
                on_scored=on_scored,
            )

    # Life cycle.

    def __repr__(self) -> str:
        if (config := vars(self).get("config")) is None:
            return "<Diffulex that could not be built>"
        model, strategy = config.model, config.decoding.decoding_strategy
        return f"<Diffulex {model.model}: {strategy} on {model.device}>"

    def close(self) -> None:
        """Ends every request and releases the memory. Idempotent.

        Inside the handler of an exception that a step raised, the traceback holds parts of the engine
        until the handler ends.

        Raises:
            RuntimeError: a step is running, in another thread or around a callback.
        """
        with self._loop.exclusive():
            if self._loop.is_closed:
                return
            try:
                self._profiler.close()
            finally:
                self._loop.close()
            if self.config.model.device.startswith("cuda"):
                _give_memory_back()

    def __enter__(self) -> Diffulex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt, use_chat_template: bool) -> tuple[int, ...]:
        return encode_prompt(prompt, self.config, self._tokenizer, use_chat_template)


#: The names that other engines, and earlier versions, have for it.
LLM = DiffulexEngine = Diffulex


@contextlib.contextmanager
def _memory_back_on_failure(engine: Diffulex) -> Iterator[None]:
    """Frees what the construction of `engine` had made before it failed.

    The caller may handle the error and try again with other settings: neither the frames of the
    traceback nor the unfinished engine may hold a model and a cache meanwhile, so both lose their
    variables before the allocator is asked to give memory back.
    """
    handled = sys.exc_info()[1]
    try:
        yield
    except BaseException as error:
        link: BaseException | None = error
        while link is not None and link is not handled:
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        executor: Executor | None = vars(engine).get("_executor")
        if executor is not None:
            _close_after_failure(executor)
        ring: StepRing | None = vars(engine).get("_ring")
        if ring is not None:
            ring.close()
        vars(engine).clear()
        _give_memory_back()
        raise


def _close_after_failure(executor: Executor) -> None:
    """Closes it; an error while closing is logged, since raised it would hide why the engine failed."""
    try:
        executor.close()
    except Exception:
        logger.exception("close of the executor of an engine that could not start: failed as well")


def _give_memory_back() -> None:
    """Empties the cache of the allocator; nothing without CUDA.

    After an error that the device keeps this fails too, and would hide the first message.
    """
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()
