# SPDX-License-Identifier: Apache-2.0
"""A checkpoint against every rule that can be tested without knowing its author's answers."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diffulex.checkpoint.auto_model import load_model
from diffulex.config.config import Config
from diffulex.config.facts import read_facts
from diffulex.config.parse import Options
from diffulex.config.sampling_params import SamplingParams
from diffulex.engine.engine import Diffulex
from diffulex.errors import ConfigError
from diffulex.runner.local_executor import LocalExecutor
from diffulex.verify import tokens
from diffulex.verify.fixture import FILE_NAME, Fixture, check_fixture
from diffulex.verify.names import RULES
from diffulex.verify.numbers import (
    Answers,
    answers_of,
    check_greedy,
    check_logits,
    check_prefix_cache,
    check_same,
)
from diffulex.verify.reference import has_reference, is_canvas, load_reference, sees_prompt
from diffulex.verify.report import Report, RuleError
from diffulex.verify.trajectory import record

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.types import ModelFacts
    from diffulex.verify.trajectory import Trajectory

__all__ = ["verify"]

#: Tokens of the longest prompt: more than a page, and no multiple of a block.
_LONGEST_PROMPT = 91
_NUM_PAGES = 64
#: Of one answer that is compared with a reference. Few confident tokens are enough to end a block.
_MOST_FORWARDS, _ACCEPT = 16, 0.02
_EAGER = {"enforce_eager": True, "run_ahead": "off"}


def verify(
    model: str,
    *,
    rules: Collection[str] = RULES,
    fixture: Path | None = None,
    record_to: Path | None = None,
    show: Callable[[str], None] | None = None,
    **settings: Any,
) -> Report:
    """Tests a checkpoint on this machine.

    Args:
        model: as for `Diffulex`.
        rules: those to test; the first is always tested.
        fixture: recorded answers; None: `diffulex_verify.safetensors` beside the weights, if it is there.
        record_to: where to write the answers of this run.
        show: receives a line per rule, as soon as it is tested.
        settings: of the engine.

    Raises:
        ConfigError: a setting or a rule is unknown.
        CheckpointError: the fixture cannot be read.
    """
    unknown = set(rules) - set(RULES)
    if unknown:
        raise ConfigError(f"rules: expected some of {', '.join(RULES)}, got {sorted(unknown)}")
    run = _Run(model, Report(model, show), set(rules), settings)
    run.test(fixture, record_to)
    return run.report


class _Run:
    """One verification."""

    def __init__(
        self, model: str, report: Report, rules: set[str], settings: Mapping[str, Any]
    ) -> None:
        self.report = report
        self._model_name = model
        self._rules = rules
        self._settings = dict(settings)
        self._options = Options.parse(model, self._settings)
        self._model: Any = None

    def _check(self, rule: str, test: Callable[[], str]) -> None:
        if rule in self._rules:
            self.report.check(rule, test)

    def test(self, fixture: Path | None, record_to: Path | None) -> None:
        """Every rule in order; those after the first need a checkpoint that loads."""
        if not self.report.check("checkpoint", self._load):
            return
        tokenizer, config = self._tokenizer, self._config
        self._check("tokenizer", lambda: tokens.check_tokenizer(tokenizer, config))
        self._check("mask", lambda: tokens.check_mask(tokenizer, config))
        self._check("stop ids", lambda: tokens.check_stops(tokenizer, config))
        self._check("chat template", lambda: tokens.check_template(tokenizer, config))
        beside = Path(config.model.model_dir) / FILE_NAME
        if fixture is None and beside.is_file():
            fixture = beside
        recorded = None if fixture is None else Fixture.load(fixture)
        self._prompts = self._make_prompts() if recorded is None else recorded.prompts
        self._check("prefix cache", self._prefix_cache)
        self._check("graphs", self._graphs)
        numeric = self._rules & {"logits", "greedy tokens", "recorded answers"}
        if not numeric and record_to is None:
            return
        self._trajectories: list[Trajectory] = []
        if not self.report.check("decoding", self._decode):
            return
        self._model = None  # room for the other one
        gc.collect()
        if numeric & {"logits", "greedy tokens"}:
            self._compare(has_fixture=recorded is not None)
        if recorded is not None:
            self._check(
                "recorded answers",
                lambda: check_fixture(self._exact, self._trajectories, recorded),
            )
        if record_to is not None:
            Fixture.of(self._trajectories).save(record_to)

    # The checkpoint.

    def _load(self) -> str:
        facts = read_facts(self._options)
        self._facts: ModelFacts = facts
        tokenizer = facts.tokenizer
        assert tokenizer is not None
        self._tokenizer: Tokenizer = tokenizer
        config = self._resolve({})
        if config.model.quantization not in ("auto", "none"):
            raise ConfigError(
                f"quantization: expected auto or none, since the checkpoint itself is compared, got"
                f" {config.model.quantization!r}"
            )
        self._config = config
        adapter = Path(config.model.lora_path).expanduser() if config.model.use_lora else None
        self._model = load_model(
            facts.model_name,
            facts.spec,
            facts.model_dir,
            getattr(torch, config.model.dtype),
            config.model.device,
            lora_path=adapter,
            merge_lora=config.model.pre_merge_lora,
        )
        num = sum(parameter.numel() for parameter in self._model.parameters())
        return (
            f"{facts.spec.family}, {num:,} parameters in {config.model.dtype} on"
            f" {config.model.device}"
        )

    def _resolve(self, forced: Mapping[str, Any]) -> Config:
        limits: dict[str, Any] = {"max_num_reqs": 4, "num_pages": _NUM_PAGES}
        room = _LONGEST_PROMPT + self._count + (self._facts.spec.canvas_length or 0)
        limits["max_model_len"] = min(self._facts.spec.max_positions, 64 * -(-room // 64))
        options = Options.parse(self._model_name, {**limits, **self._settings, **forced})
        return Config.of(options, self._facts)

    @property
    def _count(self) -> int:
        """Tokens of an answer: a few blocks, or one canvas."""
        block = self._facts.spec.block_size or 32
        return block if self._facts.spec.canvas_length else min(2 * block, block + 8) + 3

    def _make_prompts(self) -> list[list[int]]:
        encode, texts = self._tokenizer.encode, tokens.SAMPLES
        room = self._config.scheduler.max_model_len - self._count
        long = encode(" ".join(4 * texts), add_special_tokens=False)[: min(room, _LONGEST_PROMPT)]
        return [long, encode(texts[0], add_special_tokens=False), encode(texts[2])[:21]]

    def _engine(self, forced: Mapping[str, Any], executor: LocalExecutor | None = None) -> Diffulex:
        config = self._resolve(forced)
        return Diffulex.from_components(config, self._model, self._tokenizer, executor)

    # The engine against itself.

    def _prefix_cache(self) -> str:
        with self._engine(_EAGER) as engine:
            return check_prefix_cache(engine, self._prompts[0], self._count)

    def _graphs(self) -> str:
        traits = self._config.decoding.traits
        is_cuda = self._config.model.device.startswith("cuda")
        ahead = "on" if traits.can_run_ahead and not is_cuda else "auto"
        with self._engine(_EAGER) as engine:
            expected = answers_of(engine, self._prompts, self._count)
        executor = LocalExecutor()
        fast = {"enforce_eager": False, "run_ahead": ahead}
        with self._engine(fast, executor) as engine:
            got = answers_of(engine, self._prompts, self._count)
            counts = executor.counts
        same = check_same("as step by step", got, expected)
        return f"{same} ({counts.graph} steps by graphs, {counts.ahead} ahead of the host)"

    # The engine against others.

    def _decode(self) -> str:
        """Decodes the prompts one block at a time, so that a reference sees what the model saw."""
        self._exact = self._resolve(self._exact_settings())
        params = SamplingParams(
            max_tokens=self._count, max_nfe=_MOST_FORWARDS, ignore_eos=True, temperature=0.0, seed=0
        )
        executor = LocalExecutor()
        with Diffulex.from_components(
            self._exact, self._model, self._tokenizer, executor
        ) as engine:
            self._trajectories = [
                record(engine, executor, self._model, prompt, params) for prompt in self._prompts
            ]
        num = sum(len(trajectory.forwards) for trajectory in self._trajectories)
        return f"{len(self._prompts)} prompts in {num} forwards"

    def _exact_settings(self) -> dict[str, Any]:
        family, decoding = self._facts.spec.family, self._config.decoding
        settings: dict[str, Any] = {**_EAGER, "enable_prefix_caching": False}
        if is_canvas(family):
            return settings
        settings["buffer_size"] = 1
        settings["decoding_thresholds"] = {"accept_threshold": _ACCEPT}
        if sees_prompt(family):
            return {**settings, "decoding_strategy": "d2f", "d2f_block_grid": False}
        block = decoding.block_size
        if decoding.traits.has_dual_cache:  # it has small blocks within those of the attention
            block = self._facts.spec.block_size or block
        return {
            **settings,
            "decoding_strategy": "multi_bd",
            "sampling_mode": "naive",
            "block_size": block,
        }

    def _compare(self, *, has_fixture: bool) -> None:
        family = self._facts.spec.family
        if not has_reference(family):
            if not has_fixture:
                self._check("logits", lambda: _no_reference(family))
            return
        if self._config.model.use_lora:
            if not has_fixture:
                self._check("logits", _no_adapter)
            return
        found: list[Answers] = []

        def logits() -> str:
            model = self._exact.model
            reference = load_reference(
                family,
                Path(model.model_dir),
                getattr(torch, model.dtype),
                model.device,
                self._exact.decoding.block_size,
            )
            found.append(Answers(self._exact, self._trajectories, reference))
            return check_logits(found[0])

        passed = self.report.check("logits", logits)
        if "greedy tokens" in self._rules and (passed or found):
            self.report.check("greedy tokens", lambda: check_greedy(self._exact, found[0]))


def _no_adapter() -> str:
    raise RuleError(
        "expected weights without an adapter, or recorded answers (--fixture), got use_lora:"
        " transformers alone applies none"
    )


def _no_reference(family: str) -> str:
    raise RuleError(
        f"expected a family that transformers knows, or recorded answers (--fixture), got {family}"
    )
