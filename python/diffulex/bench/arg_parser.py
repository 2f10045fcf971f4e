# SPDX-License-Identifier: Apache-2.0
"""Flags of ``eval``. None has a default: what was not given is absent, so that a flag counts also
where its value equals the default of the key."""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.bench.config import (
    STRATEGY_ALIASES,
    BenchmarkConfig,
    EngineConfig,
    EvalConfig,
    read_settings,
)
from diffulex.bench.presets import preset_path, presets
from diffulex.config.flags import UsageError, integer, number, within
from diffulex.config.sampling_params import TRAJECTORY_LEVELS
from diffulex.config.table import CANVAS_PAGE_SIZES, PAGE_SIZES, THRESHOLD_KEYS
from diffulex.families.listing import FAMILIES
from diffulex.strategies.listing import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["add_eval_flags", "benchmark_config", "flag_settings", "refuse_settings"]

_FAMILIES = tuple(name for family in FAMILIES for name in (family.name, *family.aliases))
_CHOICES: dict[str, tuple[Any, ...]] = {
    "model_name": (*_FAMILIES, "auto"),
    "decoding_strategy": (*STRATEGIES, *STRATEGY_ALIASES, "auto"),
    "sampling_mode": ("naive", "edit"),
    "kv_cache_layout": ("unified", "distinct"),
    "token_merge_mode": ("dmax_topk", "iter_smooth_topk"),
    "attn_impl": ("triton", "triton_grouped", "naive", "native", "auto", "cuda", "cpu"),
    "moe_gemm_impl": (
        "triton", "vllm", "vllm_modular", "naive", "grouped", "reference", "auto", "cuda", "cpu",
    ),
    "moe_dispatcher_backend": ("standard", "allgather", "naive", "deepep"),
    "deepep_mode": ("normal", "low_latency", "auto"),
    "page_size": (*PAGE_SIZES, *CANVAS_PAGE_SIZES),
    "save_trace": TRAJECTORY_LEVELS,
    "endpoint_api": ("completions", "chat"),
}  # fmt: skip
#: Flags of settings that may be given for a run that has begun: they change no answer.
_CHANGEABLE = ("concurrency", "confirm_run_unsafe_code", "timeout", "verify_tls")
#: Legal numbers: a description and a test.
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "gpu_memory_utilization": ("a number in (0, 1]", lambda v: 0 < v <= 1),
    "tensor_parallel_size": ("an integer from 1 to 8", lambda v: 1 <= v <= 8),
    "data_parallel_size": ("an integer from 1 to 1024", lambda v: 1 <= v <= 1024),
    "buffer_size": ("an integer of at least 1", lambda v: v >= 1),
    "repeat": ("an integer of at least 1", lambda v: v >= 1),
    "concurrency": ("an integer of at least 1", lambda v: v >= 1),
    "dataset_limit": ("an integer of at least 1", lambda v: v >= 1),
    "max_tokens": ("an integer of at least 1", lambda v: v >= 1),
    "warmup_requests": ("an integer of at least 0", lambda v: v >= 0),
    "mc_num": ("an integer of at least 1", lambda v: v >= 1),
    "mc_batch_size": ("an integer of at least 1", lambda v: v >= 1),
    "likelihood_guidance": ("a number of at least 0", lambda v: v >= 0),
    **{name: ("a number in [0, 1]", lambda v: 0 <= v <= 1) for name in THRESHOLD_KEYS},
}
#: Fields of `EvalConfig` whose flag has another name.
_FLAG_NAMES = {"dataset_name": "dataset", "use_tqdm": ""}
#: Fields with a switch that can only be turned on.
_ON_ONLY = ("use_lora", "ignore_eos")
_HIDDEN = ("expert_parallel_size", "enable_prefill_cudagraph")
#: Fields that are maps or are set by files and ``--engine-arg`` alone.
_NO_FLAG = ("decoding_thresholds", "extra_engine_kwargs", "gen_kwargs")
_PROFILER_FLAGS = {
    "torch_profiler_dir": str,
    "profiler_record_shapes": bool,
    "profiler_memory": bool,
    "profiler_with_stack": bool,
    "profiler_delay_iterations": int,
    "profiler_max_iterations": int,
}
#: Keys of `profiler_config` for flags that do not share their names.
_PROFILER_KEYS = {
    "profiler_record_shapes": "record_shapes",
    "profiler_memory": "profile_memory",
    "profiler_with_stack": "with_stack",
    "profiler_delay_iterations": "delay_iterations",
    "profiler_max_iterations": "max_iterations",
}


def _ranged(name: str, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argument type with the legal range of its key."""
    if name not in _RANGES:
        return kind
    expected, is_legal = _RANGES[name]
    return within(kind, is_legal, expected)


#: What the flags of the short help are for; the others are named as in docs/evaluation.md.
_HELP = {
    "dataset_name": "tasks, with commas between them",
    "dataset_limit": "only the first items of each",
    "include_path": "a folder with further task files",
    "temperature": "0: greedy",
    "max_tokens": "longest answer",
    "output_dir": "the folder of the run is made there",
    "confirm_run_unsafe_code": "run the programs that a model writes",
    "apply_chat_template": "lm-eval builds prompts from messages",
    "num_fewshot": "examples before each question",
    "save_trace": "keep in which order tokens were written",
    "endpoint": "ask this server, not an engine in this process",
    "model_path": "directory or hub id, required",
    "model_name": "family; auto: found from the checkpoint",
    "decoding_strategy": "auto: that of the family",
    "max_num_reqs": "requests decoded together",
}


def add_eval_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``eval``; `benchmark_config` reads what they give."""
    run = parser.add_argument_group("run")
    absent = argparse.SUPPRESS
    run.add_argument(
        "--config", dest="config_file", metavar="FILE", help="settings, .yml, .yaml or .json"
    )
    run.add_argument("--preset", choices=presets(), help="bundled settings of a published row")
    run.add_argument("--resume", metavar="DIR", help="go on with an interrupted run")
    run.add_argument("--log-file", metavar="FILE", help="receives the log as well")
    run.add_argument(
        "--log-level", type=str.lower, choices=("debug", "info", "warning", "error"),
        help="least severe log line [info]",
    )  # fmt: skip
    run.add_argument(
        "--progress", choices=("auto", "bar", "log", "none"), default="auto",
        help="how the state of the run is shown [auto: a bar on a terminal, else log lines]",
    )  # fmt: skip
    run.add_argument(
        "--api-key", help="of --endpoint [environment variable OPENAI_API_KEY, if set]"
    )
    run.add_argument(
        "--engine-arg", action="append", default=[], metavar="KEY=VALUE",
        help="any key of the engine, value as YAML; wins over everything else",
    )  # fmt: skip
    evaluation = parser.add_argument_group("evaluation")
    for item in dataclasses.fields(EvalConfig):
        _add_field(evaluation, item)
    engine = parser.add_argument_group("engine")
    for item in dataclasses.fields(EngineConfig):
        _add_field(engine, item)
    engine.add_argument(
        "--max-num-seqs", type=integer, default=absent, help=argparse.SUPPRESS
    )  # an older name of --max-num-reqs
    for name in THRESHOLD_KEYS:
        engine.add_argument(
            _flag(name), type=_ranged(name, number), default=absent, metavar="T",
            help="decoding threshold, 0 to 1",
        )  # fmt: skip
    _add_profiler_flags(parser)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_field(group: argparse._ArgumentGroup, item: dataclasses.Field[Any]) -> None:
    name = _FLAG_NAMES.get(item.name, item.name)
    if not name or item.name in _NO_FLAG:
        return
    kinds = str(item.type).split(" | ")
    common: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS}
    default = "unset" if item.default is None else str(item.default).lower()
    text = f"{_HELP.get(item.name, '')} [{default}]".lstrip()
    common["help"] = argparse.SUPPRESS if item.name in _HIDDEN else text
    if item.name in _ON_ONLY:
        group.add_argument(_flag(name), action="store_true", **common)
    elif "bool" in kinds:
        group.add_argument(_flag(name), action=argparse.BooleanOptionalAction, **common)
    else:
        kind: Any = integer if "int" in kinds else number if "float" in kinds else str
        choices = _CHOICES.get(item.name)
        metavar = None if choices else kinds[0].upper()
        group.add_argument(
            _flag(name), type=_ranged(item.name, kind), choices=choices, metavar=metavar, **common
        )


def _add_profiler_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("profiler")
    group.add_argument("--profiler", choices=("torch",), help="record steps by this profiler")
    for name, kind in _PROFILER_FLAGS.items():
        common: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": name}
        if kind is bool:
            group.add_argument(_flag(name), action=argparse.BooleanOptionalAction, **common)
        else:
            group.add_argument(_flag(name), type=integer if kind is int else str, **common)


def _profiler_config(options: argparse.Namespace) -> dict[str, Any] | None:
    given = {name: getattr(options, name) for name in _PROFILER_FLAGS if hasattr(options, name)}
    if options.profiler is None:
        if given:
            raise UsageError(f"{_flag(next(iter(given)))}: expected --profiler torch with it")
        return None
    if "torch_profiler_dir" not in given:
        raise UsageError("--profiler: expected --torch-profiler-dir with it, got none")
    return {_PROFILER_KEYS.get(name, name): value for name, value in given.items()}


def engine_arguments(items: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` words as a map; a dot in a key names an entry of a map.

    Raises:
        UsageError: a word has no ``=`` or no key, or its value is no YAML.
    """
    import yaml  # noqa: PLC0415 (slow to import)

    result: dict[str, Any] = {}
    for item in items:
        key, has_value, text = item.partition("=")
        if not has_value or not key.strip():
            raise UsageError(f"--engine-arg: expected KEY=VALUE, got {item!r}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"--engine-arg {key}: expected YAML, got {reason}") from error
        *path, last = key.strip().split(".")
        place = result
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise UsageError(f"--engine-arg {key}: expected {part} to be a map, got {place!r}")
        place[last] = value
    return result


def flag_settings(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The nested settings of the flags that were given."""
    given = vars(options)
    engine_names = [item.name for item in dataclasses.fields(EngineConfig)]
    engine = {n: given[n] for n in (*engine_names, *THRESHOLD_KEYS) if n in given}
    if "max_num_seqs" in given:
        warnings.warn("--max-num-seqs is deprecated, use --max-num-reqs", stacklevel=2)
        engine.setdefault("max_num_reqs", given["max_num_seqs"])
    profiler = _profiler_config(options)
    if profiler is not None:
        engine["profiler_config"] = profiler
    evaluation = {
        item.name: given[item.name] for item in dataclasses.fields(EvalConfig) if item.name in given
    }
    return {"engine": engine, "eval": evaluation}


def refuse_settings(options: argparse.Namespace, beside: str) -> None:
    """Raises UsageError for a flag that chooses settings, which those of a file stand against."""
    flags = {"config_file": "--config", "preset": "--preset", "engine_arg": "--engine-arg"}
    for item in (*dataclasses.fields(EvalConfig), *dataclasses.fields(EngineConfig)):
        flags[item.name] = _flag(_FLAG_NAMES.get(item.name, item.name))
    for name in ("max_num_seqs", *THRESHOLD_KEYS, "profiler", *_PROFILER_FLAGS):
        flags[name] = _flag(name)
    given = [flag for name, flag in flags.items() if getattr(options, name, None) not in (None, [])]
    for flag in given:
        if flag not in map(_flag, _CHANGEABLE):
            raise UsageError(f"{beside}: expected the settings of that run, got {flag}")


def benchmark_config(options: argparse.Namespace) -> BenchmarkConfig:
    """The settings of a command line, checked.

    Raises:
        ConfigError: anything is unknown, missing or contradictory.
    """
    if options.preset is not None and options.config_file is not None:
        raise UsageError("command line: expected --preset or --config, got both")
    path = options.config_file
    if options.preset is not None:
        path = preset_path(options.preset)
    config = BenchmarkConfig()
    if path is not None:
        config.update(read_settings(Path(path)), "file")
    config.update(flag_settings(options), "flag")
    arguments: Mapping[str, Any] = engine_arguments(options.engine_arg)
    config.update({"engine": arguments, "eval": {}}, "engine-arg")
    config.drop_unused()
    config.check()
    return config
