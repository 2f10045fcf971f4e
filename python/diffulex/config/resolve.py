# SPDX-License-Identifier: Apache-2.0
"""The second phase of a configuration: which value of a key holds, and what follows from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.config.parse import normalise
from diffulex.config.rules import Resolver
from diffulex.config.table import CONFIG_TABLE
from diffulex.config.types import PartialConfig
from diffulex.errors import ConfigError
from diffulex.families.detection import family_of_name, matches
from diffulex.log import get_logger, warn_once
from diffulex.registry import AutoModelForDiffusionLM, AutoSampler, AutoScheduler
from diffulex.samplers.selection import modes_of, select_sampler
from diffulex.strategies.listing import strategy_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.config.parse import Options
    from diffulex.config.types import ModelFacts

__all__ = ["check_strategy_name", "resolve_sections"]

logger = get_logger(__name__)

# A checkpoint chooses how it is decoded. Devices, memory and files are the user's business.
_CHECKPOINT_SECTIONS = ("decoding", "sampler")
_CHECKPOINT_KEYS = ("model_name", "decoding_thresholds")
_CHECKPOINT_FILE = "generation_config.json: "
#: Keys of `generation_config.json` that are defaults of requests, as transformers names them.
_PUBLISHED_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def resolve_sections(options: Options, facts: ModelFacts) -> dict[str, Any]:
    """The sections of a configuration, from parsed options and the facts.

    Raises:
        ConfigError: illegal value, unsupported value or contradiction.
    """
    explicit, checkpoint = options.given, _checkpoint_level(facts)
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
        strategy = strategy_named(choice.strategy)
        if facts.spec.block_size is not None and not strategy.traits.has_dual_cache:
            family["block_size"] = facts.spec.block_size
        partial = PartialConfig(facts, explicit, checkpoint, family)
        partial.values["model"] = options.model
        partial.values["model_name"] = name
        choice.apply(partial)
        return Resolver(partial, strategy, sampler).sections()
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
    checkpoint = normalise(facts.checkpoint_defaults, where=f"{_CHECKPOINT_FILE}diffulex: ")
    for name, value in facts.checkpoint_defaults.items():
        if name in _CHECKPOINT_KEYS:
            continue
        key = CONFIG_TABLE.get(name)
        is_decoding = key is not None and (key.is_decoding or key.section in _CHECKPOINT_SECTIONS)
        if name == "generation_config" or not is_decoding:
            text = f"{name}: expected only decoding keys, got {value!r}"
            raise ConfigError(_CHECKPOINT_FILE + text)
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
        is_mode = any(strategy in strategy_named(name).sampling_modes for name in available)
        hint = f" ({strategy} is a sampling_mode)" if is_mode else ""
        raise ConfigError(
            f"decoding_strategy: expected one of {', '.join(available)}{hint}, got {strategy!r}"
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
        modes = strategy_named(self.strategy).sampling_modes
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
