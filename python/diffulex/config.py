# SPDX-License-Identifier: Apache-2.0
"""Resolution of the configuration: keyword arguments in, one immutable tree out.

Precedence of a key: explicit value, `generation_config.json` of the checkpoint (object
`diffulex`), model family, table default. Every automatic change is logged with old value, new
value and reason. Validation happens here, once.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex.config_table import (
    CONFIG_TABLE,
    SECTIONS,
    THRESHOLD_KEYS,
    CacheConfig,
    ConfigKey,
    DecodingConfig,
    KernelConfig,
    ModelConfig,
    ParallelConfig,
    SamplerConfig,
    SchedulerConfig,
    Support,
    check_value,
)
from diffulex.errors import ConfigError
from diffulex.logging import get_logger, warn_once
from diffulex.registry import AutoModelForDiffusionLM, AutoSampler, AutoScheduler

if TYPE_CHECKING:
    from pathlib import Path

    from diffulex.engine.tokenizer import Tokenizer
    from diffulex.model.config import ModelSpec
    from diffulex_ext import _core

__all__ = [
    "CONFIG_TABLE",
    "CacheConfig",
    "Config",
    "ConfigKey",
    "DecodingConfig",
    "KernelConfig",
    "ModelConfig",
    "ModelFacts",
    "ParallelConfig",
    "SamplerConfig",
    "SchedulerConfig",
]

logger = get_logger(__name__)

# Strategies the documents describe and this engine does not have yet.
_LATER_STRATEGIES = ("d2f", "dmax", "fast_dllm_v2", "diffusion_gemma")
# Fields of the core's options that are options under another name.
_OPTION_NAMES = {"strategy": "decoding_strategy", "stop_token_ids": "eos"}
# Ops take eight forbidden ids; one is the mask token.
_MAX_SUPPRESSED = 7
# Integer keys wider than the 31 bits of the core's counts, with their bits.
_WIDE_KEYS = {"seed": 64, "cpu_kv_cache_bytes": 63}
_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the checkpoint directory says, as the resolution needs it."""

    model_name: str
    model_dir: Path
    spec: ModelSpec
    checkpoint_defaults: Mapping[str, Any]
    tokenizer_vocab_size: int | None = None
    tokenizer: Tokenizer | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """The resolved configuration. Built by `from_kwargs`; never mutated."""

    model: ModelConfig
    decoding: DecodingConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    parallel: ParallelConfig
    kernel: KernelConfig
    sampler: SamplerConfig

    @classmethod
    def from_kwargs(cls, model: str = "demo", **flat: Any) -> Config:
        """Reads the checkpoint's facts and resolves every key.

        Raises:
            ConfigError: unknown key, illegal value, unsupported value or contradiction.
            CheckpointError: the model cannot be found or read.
        """
        return cls.resolve(model, read_model_facts(model, flat), flat)

    @classmethod
    def resolve(cls, model: str, facts: ModelFacts, flat: Mapping[str, Any]) -> Config:
        """`from_kwargs` without reading files."""
        for name in THRESHOLD_KEYS:
            if flat.get(name) is not None:
                text = "%s: deprecated as a flat key, use decoding_thresholds={'%s': ...}"
                warn_once(logger, f"flat {name}", text, name, name)
        return _Resolver(model, facts, _normalise(flat, where="")).config()

    def with_num_pages(self, num_pages: int) -> Config:
        """The same configuration with the size of the page pool decided."""
        if num_pages < 1:
            raise ConfigError(f"num_pages: expected >= 1, got {num_pages}")
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, num_pages=num_pages))

    @property
    def decode_rows(self) -> int:
        """Rows of one request in a decode step."""
        return self.decoding.block_size * self.decoding.buffer_size

    @property
    def pages_per_request(self) -> int:
        """Pages that cover max_model_len positions."""
        return -(-self.scheduler.max_model_len // self.cache.page_size)

    def to_core(self, strategy: str | None = None) -> _core.EngineOptions:
        """Options of the C++ core; validated there once more.

        Args:
            strategy: state machine of the core, for a strategy registered from outside that reuses
                one; None takes the configured name.
        """
        from diffulex_ext import _core  # noqa: PLC0415

        decoding, scheduler, cache = self.decoding, self.scheduler, self.cache
        options = _core.EngineOptions(
            strategy=strategy or decoding.decoding_strategy,
            block_size=decoding.block_size,
            buffer_size=decoding.buffer_size,
            page_size=cache.page_size,
            num_pages=cache.num_pages,
            max_num_reqs=scheduler.max_num_reqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=scheduler.max_model_len,
            mask_token_id=self.model.mask_token_id,
            vocab_size=self.model.spec.vocab_size,
            stop_token_ids=list(self.model.eos),
            thresholds=_core.Thresholds(
                add_block=decoding.add_block_threshold,
                semi_complete=decoding.semi_complete_threshold,
                accept=decoding.accept_threshold,
                edit=decoding.edit_threshold,
                remask=decoding.remask_threshold,
                token_stability=decoding.token_stability_threshold,
            ),
            enable_prefix_caching=cache.enable_prefix_caching,
            enable_chunked_prefill=scheduler.enable_chunked_prefill,
            decode_headroom=scheduler.decode_headroom,
            auto_max_nfe=scheduler.auto_max_nfe,
            auto_max_nfe_warmup_steps=scheduler.auto_max_nfe_warmup_steps,
            auto_max_nfe_tpf_floor=scheduler.auto_max_nfe_tpf_floor,
            max_consecutive_prefill_batches=scheduler.max_consecutive_prefill_batches,
            cache_salt=self._cache_salt(),
            seed=self.sampler.seed,
        )
        try:
            options.validate()
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(_option_names(str(error))) from error
        return options

    def _cache_salt(self) -> int:
        parts = (self.model.model_dir, self.decoding.decoding_strategy, self.model.dtype)
        digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
        return int.from_bytes(digest[:8], "little")


def _option_names(message: str) -> str:
    """A message of the core with the fields under the names of their options."""
    message = re.sub(r"\bEngineOptions\.thresholds\.(\w+)", r"\1_threshold", message)
    message = re.sub(r"\bEngineOptions(\.|(?=:))", lambda m: "" if m[1] else "options", message)
    for field, option in _OPTION_NAMES.items():
        message = re.sub(rf"\b{field}\b", option, message)
    return message


def read_model_facts(model: str, flat: Mapping[str, Any]) -> ModelFacts:
    """Finds the checkpoint and reads its configuration and tokenizer files.

    Raises:
        ConfigError: bad keys in `flat`; reported before anything is read or downloaded.
        CheckpointError: the model cannot be found or read.
    """
    from diffulex.engine.tokenizer import Tokenizer  # noqa: PLC0415
    from diffulex.model.auto_model import detect  # noqa: PLC0415
    from diffulex.model.resolve import resolve_model  # noqa: PLC0415

    explicit = _normalise(flat, where="")
    model_dir = resolve_model(model)
    name, spec, info = detect(
        model_dir, explicit.get("model_name"), mask_token_id=explicit.get("mask_token_id")
    )
    tokenizer = Tokenizer.from_dir(model_dir)
    return ModelFacts(
        model_name=name,
        model_dir=model_dir,
        spec=spec,
        checkpoint_defaults=info.engine_defaults,
        tokenizer_vocab_size=tokenizer.tokenizer_vocab_size,
        tokenizer=tokenizer,
    )


def _normalise(flat: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Checks names, types and ranges; expands `decoding_thresholds`; drops None."""
    result: dict[str, Any] = {}
    try:
        thresholds = flat.get("decoding_thresholds") or {}
        if not isinstance(thresholds, Mapping):
            raise ConfigError(f"decoding_thresholds: expected a mapping, got {thresholds!r}")
        for name, value in thresholds.items():
            if name not in THRESHOLD_KEYS:
                raise ConfigError(_unknown_key(f"decoding_thresholds.{name}", name, THRESHOLD_KEYS))
            result[name] = _checked(name, value)
        for name, value in flat.items():
            if name == "decoding_thresholds" or value is None:
                continue
            if name not in CONFIG_TABLE:
                known = (*CONFIG_TABLE, "decoding_thresholds")
                raise ConfigError(_unknown_key(name, name, known))
            result[name] = _checked(name, value)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from error.__cause__
    return result


def _checked(name: str, value: Any) -> Any:
    """`check_value`, aware of the names of dtypes and of the integers that the core can hold."""
    # A torch dtype is recognised by its text: importing torch here would be slow.
    if name == "dtype" and (isinstance(value, str) or str(value).startswith("torch.")):
        value = _dtype_name(value)
    result = check_value(name, value)
    bits = _WIDE_KEYS.get(name, 31)
    for item in result if isinstance(result, tuple) else (result,):
        if isinstance(item, int) and not -(2**bits) <= item < 2**bits:
            raise ConfigError(f"{name}: expected {CONFIG_TABLE[name].kind} < 2**{bits}, got {item}")
    return result


def _unknown_key(shown: str, name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f", nearest is {near[0]!r}" if near else ""
    return f"configuration: expected a known key{hint}, got {shown!r}"


class _Resolver:
    """Merges the levels and applies the rules between keys."""

    def __init__(self, model: str, facts: ModelFacts, explicit: dict[str, Any]) -> None:
        self._facts = facts
        self._explicit = explicit
        self._values: dict[str, Any] = {key.name: key.default for key in CONFIG_TABLE.values()}
        self._values.update(_family_defaults(facts))
        checkpoint = dict(facts.checkpoint_defaults)
        self._checkpoint = _normalise(checkpoint, where="generation_config.json: ")
        self._values.update(self._checkpoint)
        self._values.update(explicit)
        # A checkpoint may be trained with a block size the engine lacks; only its use is an error.
        check_value("block_size", self._values["block_size"])
        self._values["model"] = str(model)
        self._values["model_name"] = facts.model_name

    def config(self) -> Config:
        self._notices()
        if self._facts.spec.shift:
            raise ConfigError(
                "model_name: models whose logits are shifted are not supported yet,"
                f" got {self._facts.model_name!r}"
            )
        self._resolve_strategy()
        self._resolve_device()
        self._resolve_ids()
        self._resolve_lengths()
        self._resolve_cache()
        self._resolve_sampler()
        sections = {
            section: cls(**{k.name: self._values[k.name] for k in _keys_of(section)})
            for section, cls in SECTIONS.items()
        }
        sections["model"] = dataclasses.replace(
            sections["model"], model_dir=self._facts.model_dir, spec=self._facts.spec
        )
        return Config(**sections)

    def _change(self, name: str, value: Any, reason: str) -> None:
        old = self._values[name]
        if old != value:
            logger.info("%s: changed from %r to %r: %s", name, old, value, reason)
            self._values[name] = value

    def _notices(self) -> None:
        for name, value in self._explicit.items():
            if CONFIG_TABLE[name].support is Support.IGNORED:
                text = "%s: accepted and ignored (%s), got %r"
                warn_once(logger, f"inert {name}", text, name, CONFIG_TABLE[name].help, value)

    def _resolve_strategy(self) -> None:
        name = self._values["decoding_strategy"]
        available = AutoScheduler.available()
        if name not in available:
            if name in _LATER_STRATEGIES:
                raise ConfigError(
                    "decoding_strategy: not supported yet, expected one of"
                    f" {', '.join(available)}, got {name!r}"
                )
            raise ConfigError(
                f"decoding_strategy: expected one of {', '.join(available)}, got {name!r}"
            )
        self._change("decoding_strategy", AutoScheduler.canonical(name), "alias")
        if name != "d2f":
            self._change("multi_block_prefix_full", False, "only d2f has a bidirectional prompt")

    def _resolve_device(self) -> None:
        values = self._values
        if values["attn_impl"] in ("triton", "triton_grouped"):
            self._change("attn_impl", "auto", "name of an older kernel family")
        if values["attn_impl"] == "naive":
            raise ConfigError(
                "attn_impl: not supported yet, expected auto, cuda or cpu, got 'naive'"
            )
        self._pick_device()
        is_cuda = values["device"].startswith("cuda")
        if values["attn_impl"] not in ("auto", "cuda" if is_cuda else "cpu"):
            raise ConfigError(
                f"attn_impl: expected auto or the device of the model ({values['device']}),"
                f" got {values['attn_impl']!r}"
            )
        if values["dtype"] == "auto":
            values["dtype"] = _dtype_name(self._facts.spec.dtype) if is_cuda else "float32"

    def _pick_device(self) -> None:
        import torch  # noqa: PLC0415

        values = self._values
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        wanted = values["device"]
        if wanted == "auto":
            wanted = "cuda" if num_devices else "cpu"
        if wanted == "cpu":
            if values["device_ids"]:
                raise ConfigError(
                    f"device_ids: expected an empty list on cpu, got {list(values['device_ids'])}"
                )
            values["device"] = "cpu"
            return
        listed = values["device_ids"]
        index = listed[0] if listed else values["device_start"]
        if ":" in wanted:
            given = int(wanted.partition(":")[2])
            is_listed = "device_ids" in self._explicit or "device_start" in self._explicit
            if is_listed and given != index:
                raise ConfigError(f"device: expected cuda:{index} as listed, got {wanted!r}")
            index = given
        if num_devices == 0:
            raise ConfigError(f"device: no CUDA device is visible, got {values['device']!r}")
        if index >= num_devices:
            raise ConfigError(
                f"device: expected a CUDA device below {num_devices} (the number of visible"
                f" devices), got cuda:{index}"
            )
        values["device"] = f"cuda:{index}"

    def _resolve_ids(self) -> None:
        values, facts, spec = self._values, self._facts, self._facts.spec
        # The checkpoint reader has resolved its own sources; an explicit value went into it.
        if values["mask_token_id"] is None:
            values["mask_token_id"] = spec.mask_token_id
        if values["mask_token_id"] is None:
            raise ConfigError(
                f"mask_token_id: expected it in the files of {facts.model_dir}, got none;"
                " pass mask_token_id"
            )
        mask = values["mask_token_id"]
        if not 0 <= mask < spec.vocab_size:
            raise ConfigError(f"mask_token_id: expected [0, {spec.vocab_size}), got {mask}")
        explicit_stops = [i for i in values["eos"] or () if i >= 0]
        stops = [*explicit_stops, *spec.stop_token_ids]
        values["eos"] = tuple(dict.fromkeys(stops))
        for stop in values["eos"]:
            if stop >= spec.vocab_size or stop == mask:
                raise ConfigError(
                    f"eos: expected ids below {spec.vocab_size} other than the mask id {mask},"
                    f" got {stop}"
                )
        if values["tokenizer_vocab_size"] is None:
            size = facts.tokenizer_vocab_size or spec.vocab_size
            values["tokenizer_vocab_size"] = min(size, spec.vocab_size)
        elif values["tokenizer_vocab_size"] > spec.vocab_size:
            self._change("tokenizer_vocab_size", spec.vocab_size, "rows of the LM head")

    def _resolve_lengths(self) -> None:
        values = self._values
        limit = self._facts.spec.max_positions
        if values["max_model_len"] > limit:
            self._change("max_model_len", limit, "positions of the model")
        block, rows = values["block_size"], values["block_size"] * values["buffer_size"]
        need = -(-values["max_model_len"] // block) * block + block
        rule = "a whole prompt of max_model_len plus one block"
        if values["enable_chunked_prefill"]:
            need, rule = rows, "the rows of one decoding request"
        need = max(need, rows)
        budget = values["max_num_batched_tokens"]
        if budget >= need:
            return
        is_given = (
            "max_num_batched_tokens" in self._explicit
            or "max_num_batched_tokens" in self._checkpoint
        )
        if is_given:
            raise ConfigError(f"max_num_batched_tokens: expected >= {need} ({rule}), got {budget}")
        self._change("max_num_batched_tokens", need, rule)

    def _resolve_cache(self) -> None:
        values = self._values
        block, page = values["block_size"], values["page_size"]
        if page % block and block % page:
            raise ConfigError(
                f"page_size: expected a multiple or divisor of block_size {block}, got {page}"
            )
        head_dim, split = self._facts.spec.head_dim, values["k_cache_hdim_split_factor_x"]
        if values["kv_cache_layout"] == "distinct" and head_dim % split:
            raise ConfigError(
                f"k_cache_hdim_split_factor_x: expected a divisor of head size {head_dim},"
                f" got {split}"
            )
        is_cuda = values["device"].startswith("cuda")
        if values["skip_warmup"] and is_cuda and values["num_pages"] == -1:
            raise ConfigError("skip_warmup: expected num_pages to be given, got num_pages -1")

    def _resolve_sampler(self) -> None:
        values = self._values
        if values["confidence_type"] == "default":
            values["confidence_type"] = "max_prob"
        suppressed = values["suppress_token_ids"]
        if len(set(suppressed)) > _MAX_SUPPRESSED:
            raise ConfigError(
                f"suppress_token_ids: expected at most {_MAX_SUPPRESSED} ids,"
                f" got {len(set(suppressed))}"
            )
        for token in suppressed:
            if token >= self._facts.spec.vocab_size:
                raise ConfigError(
                    f"suppress_token_ids: expected ids below {self._facts.spec.vocab_size},"
                    f" got {token}"
                )
        steps = values["denoising_steps"]
        if steps is not None and steps > values["block_size"]:
            raise ConfigError(
                f"denoising_steps: expected [1, block_size {values['block_size']}], got {steps}"
            )
        for name in ("acceptance_rule", "confidence_space"):
            if values[name] is None:
                default = {"acceptance_rule": "threshold", "confidence_space": "processed"}
                values[name] = default[name]
        if values["temperature"] is None:
            values["temperature"] = 0.0


def _family_defaults(facts: ModelFacts) -> dict[str, Any]:
    """Flat keys a model family sets; they live in the family's sampler."""
    name = facts.model_name
    if name not in AutoSampler.available():
        raise ConfigError(
            f"model_name: expected one of {', '.join(AutoModelForDiffusionLM.available())} with a"
            f" sampler, got {name!r}"
        )
    family = getattr(AutoSampler.get(name), "family_defaults", None)
    defaults = _normalise(family or {}, where=f"family {name}: ")
    if facts.spec.block_size is not None:
        defaults["block_size"] = facts.spec.block_size
    return defaults


def _keys_of(section: str) -> list[ConfigKey]:
    return [key for key in CONFIG_TABLE.values() if key.section == section]


def _dtype_name(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    return _DTYPE_ALIASES.get(name, name)
