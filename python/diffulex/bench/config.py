# SPDX-License-Identifier: Apache-2.0
"""Settings of an evaluation: a model with its engine, and what is asked of it.

Values come from four places, of which a later one wins: the defaults below, a file, flags, and
``--engine-arg``. Where each came from is kept, because a default may be replaced by what a task asks
for, and a value that was given may not.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffulex.bench.legacy_keys import core_value, endpoint_sections
from diffulex.config.sampling_params import TRAJECTORY_LEVELS
from diffulex.config.table import CONFIG_TABLE, THRESHOLD_KEYS, Support
from diffulex.errors import ConfigError
from diffulex.strategies.listing import owner_of

__all__ = ["BenchmarkConfig", "EngineConfig", "EvalConfig", "Origin", "read_settings"]

#: Where a value came from: default, file, flag or engine-arg.
Origin = str
#: Later ones win.
_ORIGINS = ("default", "file", "flag", "engine-arg")
THRESHOLD_DEFAULTS = {
    "add_block_threshold": 0.1,
    "semi_complete_threshold": 0.9,
    "accept_threshold": 0.9,
    "remask_threshold": 0.4,
    "token_stability_threshold": 0.0,
}
STRATEGY_ALIASES = {
    "multi_block_diffusion": "multi_bd",
    "block_diffusion": "multi_bd",
    "fast_dllm": "multi_bd",
}
_KEY_ALIASES = {"diffusion_block_size": "block_size"}
#: Keys of the engine that are settings of an evaluation under another name, or none.
_NOT_FORWARDED = {"model", "temperature"}
#: Keys whose default here is not passed on: the checkpoint says what fits, or only dmax has them.
_LEFT_TO_THE_ENGINE = {"mask_token_id", "dmax_sampler_fast_path"}


@dataclass(slots=True)
class EngineConfig:
    """The model and how it is decoded; `docs/evaluation.md` lists the fields."""

    model_path: str = ""
    tokenizer_path: str | None = None
    model_name: str = "dream"
    decoding_strategy: str = "d2f"
    sampling_mode: str = "naive"
    max_post_edit_steps: int = 16
    mask_token_id: int = 151666
    use_lora: bool = False
    lora_path: str = ""
    pre_merge_lora: bool = True
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_model_len: int = 2048
    max_num_batched_tokens: int = 4096
    max_num_reqs: int = 128
    skip_warmup: bool = False
    auto_max_nfe_warmup_steps: int = 8
    auto_max_nfe_tpf_floor: float = 1.0
    enable_full_static_runner: bool = True
    prefill_cudagraph_max_len: int = 0
    enable_cudagraph_torch_compile: bool = False
    enable_vllm_layers: bool = True
    enforce_eager: bool = False
    attn_impl: str = "triton_grouped"
    enable_prefix_caching: bool = True
    kv_cache_layout: str = "unified"
    page_size: int = 32
    block_size: int = 32
    buffer_size: int = 4
    multi_block_prefix_full: bool | None = None
    token_merge_mode: str = "dmax_topk"
    token_merge_top_k: int = 1
    token_merge_renormalize: bool = True
    token_merge_weight: float = 1.0
    dmax_sampler_fast_path: bool = True
    dmax_force_prefill_active: bool = False
    enable_vectorized_sampler: bool = False
    enable_vectorized_sampler_compile: bool = False
    moe_dispatcher_backend: str = "standard"
    moe_gemm_impl: str = "triton"
    deepep_mode: str = "auto"
    deepep_num_max_dispatch_tokens_per_rank: int = 256
    enable_prefill_cudagraph: bool = False
    enable_torch_compile: bool = True
    torch_compile_mode: str = "reduce-overhead"
    decoding_thresholds: dict[str, float] | None = None
    #: Further keys of docs/configuration.md.
    extra_engine_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class EvalConfig:
    """What is asked, and where the results go; `docs/evaluation.md` lists the fields."""

    dataset_name: str = "gsm8k_diffulex"
    dataset_split: str = "test"
    dataset_limit: int | None = None
    include_path: str | None = None
    dataset_data_files: str | None = None
    temperature: float = 0.0
    max_tokens: int = 256
    max_nfe: int | None = None
    max_repetition_run: int | None = None
    ignore_eos: bool = False
    add_bos_token: bool | None = None
    output_dir: str = "benchmark_results"
    use_run_subdirectory: bool = True
    save_results: bool = True
    use_tqdm: bool = False
    confirm_run_unsafe_code: bool = False
    apply_chat_template: bool = False
    num_fewshot: int | None = None
    seed: int | None = None
    system_instruction: str | None = None
    gen_kwargs: dict[str, Any] | None = None
    save_trace: str = "none"
    repeat: int = 1
    warmup_requests: int = 2
    code_time_scale: float = 3.0
    engine_stop: bool = True
    endpoint: str | None = None
    endpoint_api: str = "completions"
    endpoint_model: str | None = None
    concurrency: int = 1
    request_rate: float | None = None
    timeout: float = 600.0
    verify_tls: bool = True
    mc_num: int = 128
    mc_batch_size: int = 32
    likelihood_guidance: float = 0.0
    check_greedy: bool = False


_ENGINE_FIELDS = {f.name: f for f in dataclasses.fields(EngineConfig)}
_EVAL_FIELDS = {f.name: f for f in dataclasses.fields(EvalConfig)}
_BOOLEANS = {"true": True, "false": False}


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _checked(section: str, item: dataclasses.Field[Any], value: Any) -> Any:
    """The value in the type of its field.

    Raises:
        ConfigError: it has another one.
    """
    kinds = str(item.type).split(" | ")
    if value is None:
        return _default(item)
    is_bool = isinstance(value, bool)
    if "bool" in kinds and isinstance(value, str) and value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    if "float" in kinds and isinstance(value, (int, float)) and not is_bool:
        return float(value)
    accepted = {"bool": bool, "int": int, "str": str}
    for kind in kinds:
        if kind.startswith("dict") and isinstance(value, Mapping):
            return dict(value)
        if kind in accepted and isinstance(value, accepted[kind]) and (kind == "bool") == is_bool:
            return value
    expected = " or ".join(kind for kind in kinds if kind != "None")
    raise ConfigError(f"{section}.{item.name}: expected {expected}, got {value!r}")


def _has_effect(name: str) -> bool:
    return name in CONFIG_TABLE and CONFIG_TABLE[name].support is Support.FULL


def is_engine_key(name: str) -> bool:
    """Whether a key belongs to the section `engine`."""
    known = name in _ENGINE_FIELDS or name in THRESHOLD_KEYS or name in _KEY_ALIASES
    return known or (name in CONFIG_TABLE and name not in _NOT_FORWARDED)


def check_key(name: str, section: str) -> None:
    """Raises ConfigError, with the nearest name, for a key that `section` does not have."""
    if section == "eval":
        known = list(_EVAL_FIELDS)
    else:
        known = [*_ENGINE_FIELDS, *THRESHOLD_KEYS, *_KEY_ALIASES, *CONFIG_TABLE]
        known = [key for key in known if is_engine_key(key)]
        known += [] if section == "engine" else list(_EVAL_FIELDS)
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f", nearest is {near[0]!r}" if near else ""
    raise ConfigError(f"{section or 'configuration'}: expected a known key{hint}, got {name!r}")


def sections(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of the engine and those of the evaluation, from nested or flat settings.

    Raises:
        ConfigError: a key is unknown, or a section is no map.
    """
    if isinstance(settings.get("endpoint"), Mapping):
        engine, evaluation = endpoint_sections(settings)
        settings = {"engine": engine, "eval": evaluation}
    engine, evaluation = {}, {}
    if "engine" in settings and "eval" in settings:
        for name in settings:
            if name not in ("engine", "eval"):
                raise ConfigError(f"configuration: expected engine and eval alone, got {name!r}")
        for name, target in (("engine", engine), ("eval", evaluation)):
            part = settings[name] or {}
            if not isinstance(part, Mapping):
                raise ConfigError(f"{name}: expected a map, got {part!r}")
            for key, value in part.items():
                check_key(str(key), name)
                target[str(key)] = value
        return engine, evaluation
    for key, value in settings.items():
        check_key(str(key), "")
        (engine if is_engine_key(str(key)) else evaluation)[str(key)] = value
    return engine, evaluation


class BenchmarkConfig:
    """An `EngineConfig` and an `EvalConfig`, with the origin of every value."""

    def __init__(self, engine: EngineConfig | None = None, eval: EvalConfig | None = None) -> None:
        self.engine = EngineConfig() if engine is None else engine
        self.eval = EvalConfig() if eval is None else eval
        #: ``engine.key`` or ``eval.key`` -> where the value came from; absent is a default.
        self.origins: dict[str, Origin] = {}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any], origin: Origin = "file") -> BenchmarkConfig:
        """Settings in nested or flat form.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type.
        """
        config = cls()
        config.update(settings, origin)
        config.drop_unused()
        return config

    @classmethod
    def from_file(cls, path: str | Path) -> BenchmarkConfig:
        """A YAML or JSON file, by its suffix; ConfigError as for `from_dict`."""
        return cls.from_dict(read_settings(Path(path)))

    from_yaml = from_file
    from_json = from_file

    def update(self, settings: Mapping[str, Any], origin: Origin) -> None:
        """Applies settings over those there are; a null means the default and is not a choice."""
        engine, evaluation = sections(settings)
        for name, value in engine.items():
            self._set_engine(_KEY_ALIASES.get(name, name), value, origin)
        for name, value in evaluation.items():
            setattr(self.eval, name, _checked("eval", _EVAL_FIELDS[name], value))
            self._note(f"eval.{name}", value, origin)

    def drop_unused(self) -> None:
        """Takes the path of an adapter off if, after every place was read, none is used."""
        if not self.engine.use_lora:
            self.engine.lora_path = ""

    def _note(self, key: str, value: Any, origin: Origin) -> None:
        if value is None:
            self.origins.pop(key, None)
        else:
            self.origins[key] = origin

    def _set_engine(self, name: str, value: Any, origin: Origin) -> None:
        if name in THRESHOLD_KEYS:
            self._set_thresholds({name: value}, origin)
        elif name == "decoding_thresholds":
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"engine.{name}: expected a map, got {value!r}")
            self._set_thresholds(value or {}, origin)
        elif name in _ENGINE_FIELDS:
            if name == "decoding_strategy":
                value = STRATEGY_ALIASES.get(value, value)
            setattr(self.engine, name, _checked("engine", _ENGINE_FIELDS[name], value))
            self._note(f"engine.{name}", value, origin)
        elif value is not None:
            self.engine.extra_engine_kwargs[name] = value
            self._note(f"engine.{name}", value, origin)

    def _set_thresholds(self, given: Mapping[str, Any], origin: Origin) -> None:
        for name, value in given.items():
            if name not in THRESHOLD_KEYS:
                near = difflib.get_close_matches(name, THRESHOLD_KEYS, n=1, cutoff=0.5)
                hint = f", nearest is {near[0]!r}" if near else ""
                raise ConfigError(
                    f"engine.decoding_thresholds: expected a known key{hint}, got {name!r}"
                )
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"engine.{name}: expected a number in [0, 1], got {value!r}")
            if self.engine.decoding_thresholds is None:
                self.engine.decoding_thresholds = {}
            self.engine.decoding_thresholds[name] = float(value)
            self._note(f"engine.{name}", value, origin)

    def check(self) -> None:
        """Raises ConfigError where values contradict each other."""
        engine, evaluation = self.engine, self.eval
        if evaluation.endpoint is not None:
            self._check_endpoint()
        elif not engine.model_path:
            raise ConfigError("model_path: expected a directory or a hub id, got none")
        if engine.use_lora and not engine.lora_path:
            raise ConfigError("use_lora: expected a lora_path with it, got none")
        if engine.max_num_batched_tokens < engine.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens: expected at least max_model_len {engine.max_model_len},"
                f" got {engine.max_num_batched_tokens}"
            )
        if engine.block_size > engine.page_size:
            raise ConfigError(
                f"block_size: expected at most page_size {engine.page_size},"
                f" got {engine.block_size}"
            )
        for name in ("timeout", "request_rate"):
            value = getattr(evaluation, name)
            if value is not None and not value > 0:
                raise ConfigError(f"eval.{name}: expected a number above 0, got {value}")
        lowest = {
            "concurrency": 1,
            "repeat": 1,
            "warmup_requests": 0,
            "max_tokens": 1,
            "dataset_limit": 1,
        }
        lowest |= {"mc_num": 1, "mc_batch_size": 1, "likelihood_guidance": 0}
        for name, low in lowest.items():
            value = getattr(evaluation, name)
            if value is not None and value < low:
                raise ConfigError(f"eval.{name}: expected at least {low}, got {value}")
        if evaluation.save_trace not in TRAJECTORY_LEVELS:
            raise ConfigError(
                f"eval.save_trace: expected {' or '.join(TRAJECTORY_LEVELS)},"
                f" got {evaluation.save_trace!r}"
            )

    def _check_endpoint(self) -> None:
        """Raises ConfigError where the engine of a server is given settings here."""
        for key, origin in self.origins.items():
            section, _, name = key.partition(".")
            is_ours = section == "eval" or name in ("model_path", "tokenizer_path", "model_name")
            if not is_ours and origin in ("flag", "engine-arg"):
                raise ConfigError(
                    f"endpoint: expected {name} to be set where the server is started, got it here"
                )
        if self.eval.save_trace != "none":
            raise ConfigError(
                "eval.save_trace: expected none with an endpoint, which sends no trajectories,"
                f" got {self.eval.save_trace!r}"
            )
        if self.eval.endpoint_api not in ("completions", "chat"):
            raise ConfigError(
                f"endpoint_api: expected completions or chat, got {self.eval.endpoint_api!r}"
            )

    def origin(self, key: str) -> Origin:
        """Where the value of ``engine.key`` or ``eval.key`` came from."""
        return self.origins.get(key, "default")

    def is_later(self, key: str, other: str) -> bool:
        """Whether a value came from a place that wins over that of another."""
        return _ORIGINS.index(self.origin(key)) > _ORIGINS.index(self.origin(other))

    @property
    def model_path(self) -> str:
        return self.engine.model_path

    @model_path.setter
    def model_path(self, value: str) -> None:
        self.engine.model_path = value

    @property
    def dataset_name(self) -> str:
        return self.eval.dataset_name

    @dataset_name.setter
    def dataset_name(self, value: str) -> None:
        self.eval.dataset_name = value

    @property
    def dataset_limit(self) -> int | None:
        return self.eval.dataset_limit

    @dataset_limit.setter
    def dataset_limit(self, value: int | None) -> None:
        self.eval.dataset_limit = value

    @property
    def output_dir(self) -> str:
        return self.eval.output_dir

    @output_dir.setter
    def output_dir(self, value: str) -> None:
        self.eval.output_dir = value

    @property
    def tokenizer_path(self) -> str:
        return self.engine.tokenizer_path or self.engine.model_path

    @property
    def model_name(self) -> str:
        return self.engine.model_name

    @property
    def decoding_strategy(self) -> str:
        return self.engine.decoding_strategy

    @property
    def thresholds(self) -> dict[str, float]:
        """The decoding thresholds that were given, or the defaults where none was."""
        given = self.engine.decoding_thresholds
        return dict(THRESHOLD_DEFAULTS if given is None else given)

    def to_dict(self) -> dict[str, Any]:
        """Nested settings; `from_dict` reads them back."""
        engine = dataclasses.asdict(self.engine)
        engine.update(engine.pop("extra_engine_kwargs"))
        return {"engine": engine, "eval": dataclasses.asdict(self.eval)}

    def describe(self) -> list[str]:
        """One line a value, with where it came from."""
        return [
            f"{section}.{name} = {value!r} ({self.origin(f'{section}.{name}')})"
            for section, values in self.to_dict().items()
            for name, value in values.items()
        ]

    def save_yaml(self, path: str | Path) -> None:
        """Writes the settings as YAML."""
        import yaml  # noqa: PLC0415 (slow to import)

        text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        Path(path).write_text(text, encoding="utf-8")

    def save_json(self, path: str | Path) -> None:
        """Writes the settings as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def get_diffulex_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `diffulex.Diffulex`, its `model` included.

        A default that the engine has as well is left out, so that what a checkpoint says about it
        counts.
        """
        kwargs: dict[str, Any] = {"model": self.engine.model_path}
        skipped = ("model_path", "tokenizer_path", "decoding_thresholds", "extra_engine_kwargs")
        for name in _ENGINE_FIELDS:
            if name in skipped or name not in CONFIG_TABLE:
                continue
            is_default = self.origin(f"engine.{name}") == "default"
            value = core_value(name, getattr(self.engine, name), is_given=not is_default)
            if value is None or (is_default and name in _LEFT_TO_THE_ENGINE):
                continue
            if not is_default or value != CONFIG_TABLE[name].default:
                kwargs[name] = value
        for name in ("model_name", "decoding_strategy"):
            if kwargs.get(name) == "auto":
                del kwargs[name]
        if kwargs.get("decoding_strategy") == owner_of("dmax_sampler_fast_path"):
            kwargs.setdefault("dmax_sampler_fast_path", self.engine.dmax_sampler_fast_path)
        thresholds = self.thresholds
        if self.engine.decoding_thresholds is None:
            thresholds = {n: v for n, v in thresholds.items() if _has_effect(n)}
        kwargs["decoding_thresholds"] = thresholds
        return {**kwargs, **self.engine.extra_engine_kwargs}

    def get_sampling_params(self) -> Any:
        """The `SamplingParams` of a request of which no task says anything."""
        from diffulex.config.sampling_params import SamplingParams  # noqa: PLC0415

        chosen = self.eval
        return SamplingParams(
            temperature=chosen.temperature,
            max_tokens=chosen.max_tokens,
            max_nfe=chosen.max_nfe,
            max_repetition_run=chosen.max_repetition_run,
            ignore_eos=chosen.ignore_eos,
            seed=chosen.seed,
        )


def read_settings(path: Path) -> dict[str, Any]:
    """The map in a ``.yml``, ``.yaml`` or ``.json`` file.

    Raises:
        ConfigError: another suffix, or the file cannot be read or holds no map.
    """
    if path.suffix not in (".yml", ".yaml", ".json"):
        raise ConfigError(f"config: expected a .yml, .yaml or .json file, got {str(path)!r}")
    import yaml  # noqa: PLC0415 (slow to import)

    try:
        text = path.read_text(encoding="utf-8")
        settings = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config: {path}: expected {path.suffix[1:]}, got {reason}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"config: {path}: expected a map of settings, got {settings!r}")
    return settings
