# SPDX-License-Identifier: Apache-2.0
"""The rules between configuration keys, applied once."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from diffulex.config.parse import dtype_name, normalise
from diffulex.config.table import (
    BLOCK_SIZES,
    CANVAS_PAGE_SIZES,
    CONFIG_TABLE,
    PAGE_SIZES,
    SECTIONS,
    ConfigKey,
    Support,
)
from diffulex.config.types import PartialConfig
from diffulex.errors import ConfigError
from diffulex.families.detection import family_of_name, matches
from diffulex.log import get_logger, warn_once
from diffulex.registry import AutoModelForDiffusionLM, AutoSampler, AutoScheduler
from diffulex.samplers.selection import modes_of, select_sampler
from diffulex.strategies.rules import STRATEGIES, StrategyRules, rules_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.config.types import ModelFacts

__all__ = ["check_strategy_name", "resolve_sections"]

logger = get_logger(__name__)

# Ops take eight forbidden ids; one is the mask token.
_MAX_SUPPRESSED = 7
# A checkpoint chooses how it is decoded. Devices, memory and files are the user's business.
_CHECKPOINT_SECTIONS = ("decoding", "sampler")
_CHECKPOINT_KEYS = ("model_name", "decoding_thresholds")
_CHECKPOINT_FILE = "generation_config.json: "
#: Keys of `generation_config.json` that are defaults of requests, as transformers names them.
_PUBLISHED_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
# Stands for the mask id of a model without one; nothing is decided by it.
_MASK_FILLER = 4


def resolve_sections(model: str, facts: ModelFacts, explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a configuration, from normalised explicit values and the model's facts.

    Raises:
        ConfigError: illegal value, unsupported value or contradiction.
    """
    checkpoint = _checkpoint_level(facts)
    name = _model_name(facts, explicit, checkpoint)
    entry = _sampler_entry(name)
    published = getattr(entry, "published_defaults", None)
    if published is not None:
        own = normalise(published(facts.generation_config), _CHECKPOINT_FILE)
        checkpoint = {**own, **checkpoint}
    checkpoint = {**_published_sampling(facts, explicit, entry), **checkpoint}
    choice = _Choice(name, explicit, checkpoint, getattr(entry, "family_defaults", None) or {})
    try:
        choice.resolve()
        sampler = select_sampler(name, choice.strategy, choice.mode)
        where = f"family {name}: "
        family = normalise(getattr(sampler, "family_defaults", None) or {}, where=where)
        if facts.spec.block_size is not None and choice.strategy != "fast_dllm_v2":
            family["block_size"] = facts.spec.block_size
        partial = PartialConfig(facts, explicit, checkpoint, family)
        partial.values["model"] = str(model)
        partial.values["model_name"] = name
        choice.apply(partial)
        return _Resolver(partial, rules_of(choice.strategy), sampler).sections()
    except ConfigError as error:
        # A value that the user did not give is not reported as if it were the user's.
        key = str(error).partition(":")[0]
        if key in explicit:
            raise
        if key in checkpoint:
            raise ConfigError(f"{_CHECKPOINT_FILE}{error}") from error
        if key == "block_size" and facts.spec.block_size is not None:
            raise ConfigError(f"config.json: {error}") from error
        raise


def _checkpoint_level(facts: ModelFacts) -> dict[str, Any]:
    """The `diffulex` object of `generation_config.json`, which may choose the decoding alone."""
    where = f"{_CHECKPOINT_FILE}diffulex: "
    checkpoint = normalise(facts.checkpoint_defaults, where=where)
    for name in facts.checkpoint_defaults:
        if name in _CHECKPOINT_KEYS:
            continue
        key = CONFIG_TABLE.get(name)
        if name == "generation_config" or key is None or key.section not in _CHECKPOINT_SECTIONS:
            raise ConfigError(f"{where}expected keys that choose the decoding, got {name!r}")
    return checkpoint


def _published_sampling(
    facts: ModelFacts, explicit: Mapping[str, Any], sampler: Any
) -> dict[str, Any]:
    """Temperature and filters that the checkpoint's authors publish, if they are asked for.

    Otherwise they are named, once, unless nothing would change or every one is given.
    """
    found = facts.generation_config
    ignored: frozenset[str] = getattr(sampler, "ignored_keys", frozenset())
    values = {
        name: found[name]
        for name in _PUBLISHED_SAMPLING
        if found.get(name) is not None and name not in ignored
    }
    if found.get("do_sample") and "temperature" not in ignored:
        values.setdefault("temperature", 1.0)
    if found.get("do_sample") is False or not values.get("temperature"):
        return {}  # greedy, and so are all families; filters act on draws
    choice = explicit.get("generation_config", CONFIG_TABLE["generation_config"].default)
    if choice == "checkpoint":
        return normalise(values, _CHECKPOINT_FILE)
    unused = [f"{name} {value}" for name, value in values.items() if name not in explicit]
    if unused:
        warn_once(
            logger,
            f"published sampling {facts.model_dir}",
            "generation_config.json: %s: not applied, requests that give no temperature are"
            " decoded as the model family is; generation_config=checkpoint applies them",
            ", ".join(unused),
        )
    return {}


def _model_name(
    facts: ModelFacts, explicit: Mapping[str, Any], checkpoint: Mapping[str, Any]
) -> str:
    """The name that selects the sampler: a family has several, and files cannot tell them apart."""
    detected = facts.model_name
    wanted = explicit.get("model_name") or checkpoint.get("model_name")
    if wanted is None or wanted == detected or family_of_name(wanted) is None:
        return detected
    family = family_of_name(detected) or detected
    if wanted in AutoSampler.available() and matches(wanted, family):
        return str(wanted)
    if wanted == checkpoint.get("model_name") and "model_name" not in explicit:
        raise ConfigError(
            f"generation_config.json: model_name: expected a name of the family {family},"
            f" got {wanted!r}"
        )
    return detected


def _sampler_entry(name: str) -> Any:
    if name not in AutoSampler.available():
        raise ConfigError(
            f"model_name: expected one of {', '.join(AutoModelForDiffusionLM.available())} with a"
            f" sampler, got {name!r}"
        )
    return AutoSampler.get(name)


def check_strategy_name(strategy: str) -> None:
    """Raises ConfigError unless a strategy is registered under this name."""
    available = AutoScheduler.available()
    if strategy not in available:
        raise ConfigError(
            f"decoding_strategy: expected one of {', '.join(available)}, got {strategy!r}"
        )


class _Choice:
    """Strategy and sampling mode, which decide what else is a default."""

    def __init__(
        self,
        model_name: str,
        explicit: Mapping[str, Any],
        checkpoint: Mapping[str, Any],
        family: Mapping[str, Any],
    ) -> None:
        self._model_name = model_name
        self._levels = (explicit, checkpoint, family)
        self.strategy: str = self._level_value("decoding_strategy", "multi_bd")
        self.mode: str = self._level_value("sampling_mode", "naive")
        # The mode of a checkpoint belongs to its own strategy.
        givers = self._levels[: 1 if "decoding_strategy" in explicit else 2]
        self._is_mode_given = any("sampling_mode" in level for level in givers)

    def _level_value(self, name: str, default: str) -> Any:
        return next((level[name] for level in self._levels if name in level), default)

    def resolve(self) -> None:
        """Applies what the strategy forces.

        Raises:
            ConfigError: unknown strategy, one that does not decode the model, or a mode that the
                strategy does not have.
        """
        check_strategy_name(self.strategy)
        self._change("strategy", AutoScheduler.canonical(self.strategy), "alias")
        modes = rules_of(self.strategy).sampling_modes
        if not modes_of(self._model_name, self.strategy):
            select_sampler(self._model_name, self.strategy, modes[0])  # raises
        if self.mode not in modes:
            if self._is_mode_given:
                raise ConfigError(
                    f"sampling_mode: expected {' or '.join(modes)} under decoding_strategy"
                    f" {self.strategy}, got {self.mode!r}"
                )
            self._change("mode", modes[0], f"the mode of {self.strategy}")

    def apply(self, partial: PartialConfig) -> None:
        """Writes the choice into the values."""
        partial.values["decoding_strategy"] = self.strategy
        partial.values["sampling_mode"] = self.mode

    def _change(self, attribute: str, value: str, reason: str) -> None:
        old = getattr(self, attribute)
        if old != value:
            name = {"strategy": "decoding_strategy", "mode": "sampling_mode"}[attribute]
            logger.info("%s: changed from %r to %r: %s", name, old, value, reason)
            setattr(self, attribute, value)


class _Resolver:
    """Applies the rules in the order in which they depend on each other."""

    def __init__(self, partial: PartialConfig, rules: StrategyRules, sampler: Any) -> None:
        self._partial = partial
        self._rules = rules
        self._sampler = sampler

    def sections(self) -> dict[str, Any]:
        """The section objects by name."""
        partial = self._partial
        self._check_unread_keys()
        partial.change(
            "multi_block_prefix_full",
            self._rules.has_prefix_full,
            "only d2f has a bidirectional prompt",
        )
        self._rules.resolve(partial)
        self._check_shape()
        self._resolve_program()
        self._check_adapter()
        self._resolve_device()
        self._resolve_ids()
        self._resolve_lengths()
        self._resolve_cache()
        self._resolve_sampler()
        sections = {
            section: cls(**{k.name: partial[k.name] for k in _keys_of(section)})
            for section, cls in SECTIONS.items()
        }
        sections["model"] = dataclasses.replace(
            sections["model"],
            model_dir=partial.facts.model_dir,
            spec=partial.facts.spec,
            program=partial.facts.program,
        )
        return sections

    def _check_unread_keys(self) -> None:
        """Explicit keys that nothing reads: a notice where harmless, else an error."""
        partial, strategy = self._partial, self._partial["decoding_strategy"]
        foreign = tuple(
            start for name in STRATEGIES if name != strategy for start in rules_of(name).keys
        )
        unused: frozenset[str] = getattr(self._sampler, "unused_keys", frozenset())
        ignored: frozenset[str] = getattr(self._sampler, "ignored_keys", frozenset())
        for name, value in partial.explicit.items():
            key = CONFIG_TABLE[name]
            if key.support is Support.IGNORED:
                text = "%s: accepted and ignored (%s), got %r"
                warn_once(logger, f"inert {name}", text, name, key.help, value)
            elif name.startswith(foreign) or name in ignored:
                text = "%s: without effect under decoding_strategy %s, got %r"
                warn_once(logger, f"foreign {name} {strategy}", text, name, strategy, value)
            elif name in unused and value != key.default:
                raise ConfigError(
                    f"{name}: expected it unset under decoding_strategy {strategy} with"
                    f" sampling_mode {partial['sampling_mode']}, which does not read it,"
                    f" got {value!r}"
                )

    def _check_adapter(self) -> None:
        values = self._partial.values
        if not values["use_lora"]:
            if values["lora_path"] and "use_lora" not in self._partial.explicit:
                raise ConfigError(
                    f"lora_path: expected use_lora with it, got {values['lora_path']!r} alone"
                )
        elif not values["lora_path"]:
            raise ConfigError("lora_path: expected the adapter's directory with use_lora, got ''")
        elif values["load_format"] != "auto":
            got = values["load_format"]
            raise ConfigError(f"load_format: expected auto with use_lora, got {got!r}")

    def _check_shape(self) -> None:
        partial = self._partial
        if self._is_canvas:
            return
        # A checkpoint may be trained with a block size the engine lacks; its use is an error.
        for name, sizes in (("block_size", BLOCK_SIZES), ("page_size", PAGE_SIZES)):
            if partial[name] not in sizes:
                also = f" (or {', '.join(map(str, CANVAS_PAGE_SIZES))} under diffusion_gemma)"
                hint = also if partial[name] in CANVAS_PAGE_SIZES and name == "page_size" else ""
                raise ConfigError(
                    f"{name}: expected one of {', '.join(map(str, sizes))}{hint}, got {partial[name]}"
                )

    def _resolve_program(self) -> None:
        """What an exported program decides: it is one sequence on the CPU with a cache of its own."""
        partial, program = self._partial, self._partial.facts.program
        if program is None:
            return
        from diffulex_edge.families import check_strategy  # noqa: PLC0415 (exported programs only)

        check_strategy(partial["decoding_strategy"])
        is_dual = partial["decoding_strategy"] == "fast_dllm_v2"
        block = partial["block_size"] * (partial["buffer_size"] if is_dual else 1)
        if block > program.max_rows:
            raise ConfigError(
                f"block_size: expected at most {program.max_rows} rows that see each other, those of"
                f" the exported program (diffulex edge export --max-rows), got {block}"
            )
        length = min(partial["max_model_len"], program.max_model_len)
        if is_dual and -(-length // block) * block > program.cache_rows:
            raise ConfigError(
                f"block_size: expected whole blocks in the {program.cache_rows} cache rows of the"
                f" exported program, got blocks of {block} for max_model_len {length}"
            )
        for name, value, reason in (
            ("load_format", "pte", "the directory holds an exported program and no weights"),
            ("max_num_reqs", 1, "an exported program holds one sequence"),
            ("device", "cpu", "an exported program runs on the CPU"),
            ("dtype", program.dtype, "dtype of the exported program"),
            ("enable_prefix_caching", False, "an exported program keeps its own cache"),
            ("max_model_len", length, "length of the exported program"),
            ("run_ahead", "off", "an exported program is called by the host"),
        ):
            partial.change(name, value, reason)

    @property
    def _is_canvas(self) -> bool:
        return bool(self._partial["decoding_strategy"] == "diffusion_gemma")

    def _resolve_device(self) -> None:
        values = self._partial.values
        if values["attn_impl"] in ("triton", "triton_grouped"):
            self._partial.change("attn_impl", "auto", "name of an older kernel family")
        self._pick_device()
        is_cuda = values["device"].startswith("cuda")
        if values["attn_impl"] not in ("auto", "cuda" if is_cuda else "cpu"):
            raise ConfigError(
                f"attn_impl: expected auto or the device of the model ({values['device']}),"
                f" got {values['attn_impl']!r}"
            )
        if values["dtype"] == "auto":
            values["dtype"] = dtype_name(self._partial.facts.spec.dtype) if is_cuda else "float32"

    def _pick_device(self) -> None:
        import torch  # noqa: PLC0415

        values = self._partial.values
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
            is_listed = (
                "device_ids" in self._partial.explicit or "device_start" in self._partial.explicit
            )
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
        values, facts, spec = self._partial.values, self._partial.facts, self._partial.facts.spec
        # The checkpoint reader has resolved its own sources; an explicit value went into it.
        if values["mask_token_id"] is None:
            values["mask_token_id"] = spec.mask_token_id
        explicit_stops = [i for i in values["eos"] or () if i >= 0]
        values["eos"] = tuple(dict.fromkeys([*explicit_stops, *spec.stop_token_ids]))
        if self._is_canvas:
            # Nothing is decided by it, but it must not end a request.
            candidates = itertools.chain((_MASK_FILLER,), range(spec.vocab_size))
            values["mask_token_id"] = next(i for i in candidates if i not in values["eos"])
        if values["mask_token_id"] is None:
            raise ConfigError(
                f"mask_token_id: expected it in the files of {facts.model_dir}, got none;"
                " pass mask_token_id"
            )
        mask = values["mask_token_id"]
        if not 0 <= mask < spec.vocab_size:
            raise ConfigError(f"mask_token_id: expected [0, {spec.vocab_size}), got {mask}")
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
            self._partial.change("tokenizer_vocab_size", spec.vocab_size, "rows of the LM head")

    def _resolve_lengths(self) -> None:
        partial = self._partial
        limit = partial.facts.spec.max_positions
        if partial["max_model_len"] > limit:
            partial.change("max_model_len", limit, "positions of the model")
        block, rows = partial["block_size"], partial["block_size"] * partial["buffer_size"]
        if partial["decoding_strategy"] == "fast_dllm_v2":
            block = rows
        need = -(-partial["max_model_len"] // block) * block + block
        rule = "a whole prompt of max_model_len plus one block"
        if partial["enable_chunked_prefill"]:
            need, rule = rows, "the rows of one decoding request"
        need = max(need, rows)
        budget = partial["max_num_batched_tokens"]
        if budget >= need:
            return
        if partial.is_given("max_num_batched_tokens"):
            raise ConfigError(f"max_num_batched_tokens: expected >= {need} ({rule}), got {budget}")
        partial.change("max_num_batched_tokens", need, rule)

    def _resolve_cache(self) -> None:
        partial = self._partial
        block, page = partial["block_size"], partial["page_size"]
        if page % block and block % page and not self._is_canvas:
            raise ConfigError(
                f"page_size: expected a multiple or divisor of block_size {block}, got {page}"
            )
        head_dim, split = partial.facts.spec.head_dim, partial["k_cache_hdim_split_factor_x"]
        if partial["kv_cache_layout"] == "distinct" and head_dim % split:
            raise ConfigError(
                f"k_cache_hdim_split_factor_x: expected a divisor of head size {head_dim},"
                f" got {split}"
            )
        is_cuda = partial["device"].startswith("cuda")
        if partial["skip_warmup"] and is_cuda and partial["num_pages"] == -1:
            raise ConfigError("skip_warmup: expected num_pages to be given, got num_pages -1")

    def _resolve_sampler(self) -> None:
        partial, values = self._partial, self._partial.values
        if values["confidence_type"] == "default":
            values["confidence_type"] = "max_prob"
        vocab_size = partial.facts.spec.vocab_size
        for name in ("suppress_token_ids", "demote_token_ids"):
            for token in values[name]:
                if token >= vocab_size:
                    raise ConfigError(f"{name}: expected ids below {vocab_size}, got {token}")
        suppressed = len(set(values["suppress_token_ids"]))
        if suppressed > _MAX_SUPPRESSED:
            raise ConfigError(
                f"suppress_token_ids: expected at most {_MAX_SUPPRESSED} ids, got {suppressed}"
            )
        steps = values["denoising_steps"]
        if steps is not None and steps > values["block_size"]:
            raise ConfigError(
                f"denoising_steps: expected [1, block_size {values['block_size']}], got {steps}"
            )
        # Some families accept by threshold only when one is given.
        with_threshold = getattr(self._sampler, "rule_with_threshold", None)
        if (
            with_threshold is not None
            and partial.is_given("accept_threshold")
            and not partial.is_given("acceptance_rule")
        ):
            partial.change("acceptance_rule", with_threshold, "an accept_threshold was given")
        for name, default in (("acceptance_rule", "threshold"), ("confidence_space", "processed")):
            if values[name] is None:
                values[name] = default
        if values["temperature"] is None:
            values["temperature"] = 0.0


def _keys_of(section: str) -> list[ConfigKey]:
    return [key for key in CONFIG_TABLE.values() if key.section == section]
