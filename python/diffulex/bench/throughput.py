# SPDX-License-Identifier: Apache-2.0
"""``diffulex bench throughput``: an engine under synthetic load, without a server.

With random weights the confidence of a position means nothing. `--force-tpf K` therefore fixes the work:
every open block takes K positions of highest confidence a step, so that steps, rows and the traffic of
the KV cache are the same on every machine and in every version.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.bench.evaluate import aligned, checked_output
from diffulex.bench.manifest import command_line, engine_facts, machine_facts, utc_now
from diffulex.bench.serve.dataset import DatasetSettings, drawable_ids, varied_length
from diffulex.config.flags import (
    Parser,
    UsageError,
    add_config_flag,
    add_engine_flags,
    count,
    engine_kwargs,
    integer,
    positive_integer,
    share,
)
from diffulex.config.sampling_params import TRAJECTORY_LEVELS
from diffulex.errors import ConfigError
from diffulex.interruption import import_at_once
from diffulex.profiling.scopes import Instrument, Stage

if TYPE_CHECKING:
    from diffulex import Diffulex
    from diffulex.engine.metrics import RunStats

__all__ = ["Load", "Throughput", "add_throughput_flags", "fixed_work", "measure", "run_throughput"]

#: What a run is measured by, in the order of the table; also the keys of the JSON file.
_FIGURES = (
    ("requests", "requests"), ("input tokens", "input_tokens"), ("output tokens", "output_tokens"),
    ("steps", "steps"), ("seconds", "seconds"), ("steps/s", "steps_per_s"),
    ("ms per prefill step", "ms_per_prefill_step"), ("ms per decode step", "ms_per_decode_step"),
    ("output tokens/s", "tokens_per_s"), ("decode tokens/s", "decode_throughput_tok_s"),
    ("prefill tokens/s", "prefill_throughput_tok_s"), ("tokens per forward", "tpf_aggregate"),
    ("peak pages", "peak_pages"), ("share of the KV cache", "kv_use"),
    ("steps by graphs", "graph_hit_rate"), ("host time, share", "host_time_share"),
    ("peak requests", "max_concurrency"),
)  # fmt: skip
_FORWARD = "model_runner_run"
#: Keys of the engine whose flag is one of the load.
_OWN_KEYS = ("seed",)


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked.

    Attributes:
        num_prompts: requests, all there from the beginning.
        input_len: prompt tokens.
        output_len: tokens of each answer; none ends earlier.
        input_range: share by which both lengths vary.
        seed: of the prompts.
        num_warmup: requests before the measurement.
        return_trajectory: what every request records of the order it is written in.
    """

    num_prompts: int = 256
    input_len: int = 512
    output_len: int = 256
    input_range: float = 0.0
    seed: int = 0
    num_warmup: int = 4
    return_trajectory: str = "none"


def fixed_work(settings: Mapping[str, Any], force_tpf: int) -> dict[str, Any]:
    """Settings of an engine under which every open block takes `force_tpf` positions a step.

    A block takes ``ceil(block_size / force_tpf)`` steps, and where that leaves a rest, its steps differ
    by one position. A canvas takes as many steps, whatever it converges to.

    Args:
        settings: keyword arguments of the engine.
        force_tpf: from 1 to the size of a block.

    Raises:
        ConfigError: it is larger than a block, or the strategy rewrites tokens, so that its number of
            steps depends on them.
    """
    from diffulex.config.config import Config  # noqa: PLC0415 (slow to import)

    decoding = Config.from_kwargs(**settings).decoding
    if not 1 <= force_tpf <= decoding.block_size:
        raise ConfigError(
            f"force_tpf: expected 1 to block_size {decoding.block_size}, got {force_tpf}"
        )
    num_steps = -(-decoding.block_size // force_tpf)
    if decoding.traits.has_canvas:
        return {
            **settings,
            "diffusion_gemma_max_denoising_steps": num_steps,
            # More equal canvases in a row than there are: none converges early.
            "diffusion_gemma_stability_threshold": num_steps,
        }
    if decoding.traits.rewrites_tokens or decoding.sampling_mode == "edit":
        raise ConfigError(
            "force_tpf: expected a sampler that fills masks, whose steps do not depend on the tokens"
            f" (decoding_strategy multi_bd, sampling_mode naive), got {decoding.decoding_strategy}"
            f" with {decoding.sampling_mode}"
        )
    return {
        **settings,
        "acceptance_rule": "static",
        "denoising_steps": num_steps,
        "forced_gate": "always",
        # No position passes on its own.
        "decoding_thresholds": {**settings.get("decoding_thresholds", {}), "accept_threshold": 1.0},
    }


@dataclass(slots=True)
class _Phases:
    """Steps and seconds by role, and seconds in forwards."""

    prefill_steps: int = 0
    decode_steps: int = 0
    #: Forwards, counted for every request that took part.
    request_steps: int = 0
    forward_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Throughput:
    """A measurement and what it was made with."""

    figures: Mapping[str, Any]
    facts: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": "diffulex.bench.throughput",
            "schema_version": 1,
            **self.figures,
            **self.facts,
        }

    def to_text(self) -> str:
        """A table for a terminal."""
        rows = [[label, _shown(self.figures[key])] for label, key in _FIGURES]
        return aligned([["quantity", "value"], *rows])


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _prompts(engine: Diffulex, load: Load) -> list[tuple[list[int], int]]:
    """Token ids, and the tokens of the answer."""
    rng = random.Random(f"bench throughput/{load.seed}")
    ids = _ids(engine)
    return [
        (
            rng.choices(ids, k=varied_length(rng, load.input_len, load.input_range)),
            varied_length(rng, load.output_len, load.input_range),
        )
        for _ in range(load.num_prompts)
    ]


def _ids(engine: Diffulex) -> list[int]:
    """Ids of ordinary tokens: those of the tokenizer that the model knows, without special ones."""
    model = engine.config.model
    ids = drawable_ids(DatasetSettings(), engine.tokenizer)
    return [i for i in ids if i < model.spec.vocab_size and i != model.mask_token_id]


def _run(
    engine: Diffulex, asked: Sequence[tuple[list[int], int]], phases: _Phases, trajectory: str
) -> None:
    from diffulex.config.sampling_params import SamplingParams  # noqa: PLC0415

    for prompt, length in asked:
        # More forwards than any answer takes: no request ends early.
        most = 4 * (len(prompt) + length) + 64
        params = SamplingParams(
            max_tokens=length, ignore_eos=True, max_nfe=most, return_trajectory=trajectory
        )
        engine.add_request(prompt, params)
    while engine.has_unfinished():
        stats = engine.run_stats
        before, decode_s = stats.num_steps, stats.decode_s
        for event in engine.step():
            if event.output is not None:
                phases.request_steps += event.output.metrics.nfe
        stats = engine.run_stats
        if stats.num_steps > before:
            if stats.decode_s > decode_s:
                phases.decode_steps += 1
            else:
                phases.prefill_steps += 1


def measure(engine: Diffulex, load: Load) -> dict[str, Any]:
    """Runs the load to its end and returns the figures.

    Raises:
        ConfigError: the requests do not fit the engine.
    """
    asked = _prompts(engine, load)
    longest = max(len(prompt) + length for prompt, length in asked)
    limit = engine.config.scheduler.max_model_len
    if longest > limit:
        raise ConfigError(
            f"input_len, output_len: expected at most max_model_len {limit} together, got {longest}"
        )
    _run(engine, asked[: load.num_warmup], _Phases(), load.return_trajectory)
    engine.flush_prefix_cache()
    phases = _Phases()
    before = dataclasses.replace(engine.run_stats)
    # Scheduling and bookkeeping are what is left.
    instrument = Instrument(lambda: [s for s in engine._stages() if s.name == _FORWARD])

    @contextlib.contextmanager
    def timed(_: Stage) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        phases.forward_s += time.perf_counter() - begin

    instrument.add(timed)
    try:
        start = time.perf_counter()
        _run(engine, asked, phases, load.return_trajectory)
        seconds = time.perf_counter() - start
    finally:
        instrument.remove(timed)
    return _figures(engine, asked, _since(before, engine.run_stats), phases, seconds)


def _since(before: RunStats, now: RunStats) -> dict[str, float]:
    """What was added to the totals."""
    return {
        item.name: getattr(now, item.name) - getattr(before, item.name)
        for item in dataclasses.fields(now)
    }


def _figures(
    engine: Diffulex,
    asked: Sequence[tuple[list[int], int]],
    stats: Mapping[str, float],
    phases: _Phases,
    seconds: float,
) -> dict[str, Any]:
    levels = engine.run_stats
    output_tokens = sum(length for _, length in asked)
    graph_steps = stats["num_graph_steps"]
    has_graphs = bool(graph_steps + stats["num_graph_fallbacks"])
    num_steps = int(stats["num_steps"])
    return {
        "requests": len(asked),
        "input_tokens": sum(len(prompt) for prompt, _ in asked),
        "output_tokens": output_tokens,
        "steps": num_steps,
        "prefill_steps": phases.prefill_steps,
        "decode_steps": phases.decode_steps,
        "seconds": seconds,
        "steps_per_s": num_steps / seconds,
        "ms_per_prefill_step": _per(1e3 * stats["prefill_s"], phases.prefill_steps),
        "ms_per_decode_step": _per(1e3 * stats["decode_s"], phases.decode_steps),
        "tokens_per_s": output_tokens / seconds,
        "decode_throughput_tok_s": _per(stats["decode_tokens"], stats["decode_s"]),
        "prefill_throughput_tok_s": _per(stats["prefill_tokens"], stats["prefill_s"]),
        "tpf_aggregate": _per(output_tokens, phases.request_steps),
        "peak_pages": levels.peak_pages,
        "num_pages": levels.num_pages,
        "kv_use": _per(levels.peak_pages, levels.num_pages),
        "graph_hit_rate": graph_steps / num_steps if has_graphs else None,
        "host_time_share": 1 - phases.forward_s / seconds,
        "max_concurrency": levels.max_concurrency,
        "time_semantics": "host_step_wall",
        "token_semantics": "engine_ids",
    }


def _per(value: float, count: float) -> float | None:
    return value / count if count else None


# Command line.


def add_throughput_flags(parser: Parser) -> None:
    """The load, the fixed work, and every key of the engine."""
    load = parser.add_argument_group("load")
    load.add_argument("--num-prompts", type=positive_integer, default=256, help="requests [256]")
    load.add_argument("--input-len", type=positive_integer, default=512, help="tokens [512]")
    load.add_argument("--output-len", type=positive_integer, default=256, help="tokens [256]")
    load.add_argument(
        "--input-range", type=share, default=0.0, help="both lengths vary by this share [0]"
    )
    load.add_argument("--seed", type=integer, default=0, help="of the prompts [0]")
    load.add_argument("--warmup", type=count, default=4, help="requests that do not count [4]")
    load.add_argument(
        "--force-tpf", type=positive_integer, metavar="K",
        help="fixed work: every open block takes K positions a step, whatever the model says",
    )  # fmt: skip
    load.add_argument(
        "--return-trajectory", choices=TRAJECTORY_LEVELS, default=TRAJECTORY_LEVELS[0],
        help="what requests record of the order they are written in: what that costs [none]",
    )  # fmt: skip
    result = parser.add_argument_group("result")
    result.add_argument("--json", action="store_true", help="print JSON instead of a table")
    result.add_argument("--output", type=Path, metavar="FILE", help="write it as .json")
    add_config_flag(parser)
    add_engine_flags(parser, without=_OWN_KEYS)
    own = ("num_prompts", "input_len", "output_len", "input_range", "seed", "warmup", "force_tpf")
    engine = ("model", "device", "dtype", "load_format", "decoding_strategy", "block_size",
              "buffer_size", "max_num_reqs", "max_model_len", "quantization")  # fmt: skip
    parser.shorten_help((*own, "config", "json", "output", *engine))
    parser.set_defaults(command=run_throughput)


def run_throughput(options: argparse.Namespace) -> int:
    """Measures once and prints or writes the figures.

    Raises:
        ConfigError: settings that cannot be used.
    """
    import diffulex  # noqa: PLC0415 (slow to import)

    if options.output is not None:
        if options.output.suffix != ".json":
            raise UsageError(f"--output: expected a .json file, got {str(options.output)!r}")
        checked_output(options.output)
    settings = {"enable_prefix_caching": False, **engine_kwargs(options, without=_OWN_KEYS)}
    if options.force_tpf is not None:
        settings = fixed_work(settings, options.force_tpf)
    load = Load(
        num_prompts=options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
        input_range=options.input_range,
        seed=options.seed,
        num_warmup=options.warmup,
        return_trajectory=options.return_trajectory,
    )
    import_at_once("diffulex.engine.engine")
    with diffulex.Diffulex(**settings) as engine:
        figures = measure(engine, load)
        facts = {
            "date": utc_now(),
            "command": command_line(sys.argv),
            "load": dataclasses.asdict(load),
            "force_tpf": options.force_tpf,
            "version": diffulex.__version__,
            "machine": machine_facts(),
            "engine": engine_facts(engine),
        }
    result = Throughput(figures, facts)
    text = json.dumps(result.as_dict(), indent=1)
    print(text if options.json else result.to_text())
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0
