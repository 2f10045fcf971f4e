# SPDX-License-Identifier: Apache-2.0
"""The model of lm-eval that answers with an engine in this process: ``--model diffulex``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lm_eval.models  # noqa: F401 (fills the registry, which is only done while it is empty)
from lm_eval.api.model import LM, hash_args
from lm_eval.api.registry import register_model

from diffulex.bench.config import BenchmarkConfig, is_engine_key
from diffulex.bench.harness import MAX_FAILED, EvaluationError
from diffulex.bench.likelihood import (
    LikelihoodCalls,
    Pair,
    context_pair,
    prefix_token,
    rolling_pairs,
)
from diffulex.bench.live import Live
from diffulex.bench.model_args import decode_model_arg_value
from diffulex.bench.requests import cut_at, encode_prompt, request_params, warm_up_params
from diffulex.bench.results import metrics_record, run_stats
from diffulex.bench.run_directory import SAMPLES, TRACE
from diffulex.bench.runner import BenchmarkRunner
from diffulex.bench.task import stop_terms
from diffulex.errors import ConfigError
from diffulex.log import get_logger, warn_once
from diffulex.trace.files import TraceFile, trace_record

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from diffulex.config.sampling_params import SamplingParams
    from diffulex.engine.output import RequestOutput
    from diffulex.likelihood.scorer import OneScore

__all__ = ["DiffulexLM"]

logger = get_logger(__name__)

#: Arguments of lm-eval, or of older programs, that mean nothing to an engine that schedules itself.
_IGNORED = ("batch_size", "max_batch_size")
_EVAL_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_nfe": "max_nfe",
    "max_repetition_run": "max_repetition_run",
    "temperature": "temperature",
    "ignore_eos": "ignore_eos",
    "add_bos_token": "add_bos_token",
    "seed": "seed",
    "engine_stop": "engine_stop",
    "warmup_requests": "warmup_requests",
    "save_trace": "save_trace",
    "mc_num": "mc_num",
    "mc_batch_size": "mc_batch_size",
    "likelihood_guidance": "likelihood_guidance",
    "check_greedy": "check_greedy",
}


def _settings(pretrained: str, arguments: Mapping[str, Any]) -> BenchmarkConfig:
    """The settings of a constructor's arguments; family and strategy are found if none is given."""
    engine: dict[str, Any] = {"model_path": pretrained}
    evaluation: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _EVAL_NAMES:
            evaluation[_EVAL_NAMES[name]] = value
        elif name == "max_length":
            engine["max_model_len"] = value
        elif is_engine_key(name):
            engine[name] = value
        else:
            raise ConfigError(
                f"model_args: expected a key of the engine or a request, got {name!r}"
            )
    engine.setdefault("model_name", "auto")
    engine.setdefault("decoding_strategy", "auto")
    evaluation.setdefault("warmup_requests", 0)  # lm-eval's own command knows none
    config = BenchmarkConfig.from_dict({"engine": engine, "eval": evaluation}, origin="flag")
    config.check()
    return config


class _Call(NamedTuple):
    """A question of lm-eval, as the engine gets it."""

    request: Instance
    prompt: list[int]
    params: SamplingParams

    @property
    def is_drawn(self) -> bool:
        return bool(self.request.args[1].get("do_sample"))


@register_model("diffulex")
class DiffulexLM(LM):  # type: ignore[misc]
    """An engine as a model of lm-eval.

    Args:
        pretrained: directory or hub id.
        tokenizer_path: directory of another tokenizer.
        save_dir: where ``diffulex_stats.json``, ``samples.jsonl`` and ``errors.jsonl`` are written.
        wait_ready: must be True.
        progress: how the state of a call is shown, as for `Live`.
        config: settings that are resolved already, in place of `arguments`.
        arguments: fields of the engine, flat thresholds, ``max_length``, ``max_new_tokens`` and the
            other parameters of a request; what is given wins over the task.

    Raises:
        ConfigError: an argument is unknown or cannot be used.
    """

    def __init__(
        self,
        pretrained: str,
        tokenizer_path: str | None = None,
        save_dir: str | None = None,
        wait_ready: bool = True,
        progress: str = "auto",
        config: BenchmarkConfig | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        decoded = {
            name: decode_model_arg_value(value)
            for name, value in arguments.items()
            if name not in _IGNORED
        }
        self._config = config or _settings(pretrained, decoded)
        kwargs = self._config.get_diffulex_kwargs()
        model = kwargs.pop("model")
        tokenizer_path = tokenizer_path or self._config.engine.tokenizer_path
        self._runner = BenchmarkRunner(model, tokenizer_path, wait_ready, **kwargs)
        self.tokenizer = self._runner.tokenizer
        self._progress, self._is_warm = progress, False
        self._likelihood = LikelihoodCalls(self._runner.engine, self._config.eval)
        self._name = tokenizer_path or model
        self._save_dir = None if save_dir is None else Path(save_dir)
        self._records: list[dict[str, Any]] = []
        self._segments: list[dict[str, Any]] = []

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> DiffulexLM:
        """A model from lm-eval's arguments; its ``--device`` counts unless `arg_dict` has one, or it
        is that command's default, for which the engine finds its device itself."""
        device = (additional_config or {}).get("device")
        arguments = dict(arg_dict)
        if device not in (None, "cuda", "cuda:0"):
            arguments.setdefault("device", device)
        return cls(**arguments)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> DiffulexLM:
        """As `create_from_arg_obj`, from ``key=value,key=value``."""
        from lm_eval.utils import simple_parse_args_string  # noqa: PLC0415

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def batch_size(self) -> int:
        """Requests that may run together."""
        return self._runner.engine.config.scheduler.max_num_reqs

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return self._runner.engine.config.model.device.partition(":")[0]

    @property
    def engine(self) -> Any:
        """The engine that answers."""
        return self._runner.engine

    @property
    def rank(self) -> int:
        """0: one process asks."""
        return 0

    @property
    def world_size(self) -> int:
        """1: one process asks."""
        return 1

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer, as a part of file names."""
        return str(self._name).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The checkpoint's template, which lm-eval writes beside its results."""
        return str(self.tokenizer.backend.chat_template or "") if chat_template else None

    def tok_encode(self, string: str, **_: Any) -> list[int]:
        """Token ids of a prompt, with the begin token that `add_bos_token` asks for."""
        return encode_prompt(self.tokenizer, string, self._config.eval.add_bos_token)

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; without a generation prompt its last message goes on."""
        variables = {} if add_generation_prompt else {"continue_final_message": True}
        return str(
            self.tokenizer.render_chat(
                chat_history, add_generation_prompt=add_generation_prompt, **variables
            )
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers, in order; all greedy requests go to the engine at once, then all drawn ones.

        Apart, because a run that goes on asks the drawn ones again and forgets their time.

        Raises:
            EvaluationError: more than 1 % of the requests failed.
            KeyboardInterrupt: Ctrl-C, after the answers that were there have been saved.
        """
        if not requests:
            return []
        params = [request_params(self._config, request.args[1]) for request in requests]
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        self._warm_up(prompts, params)
        calls = [_Call(*call) for call in zip(requests, prompts, params, strict=True)]
        answers: dict[int, str] = {}
        errors: dict[int, str] = {}
        live = Live("answers", len(prompts), self._style(disable_tqdm), num_right=None)
        try:
            for is_drawn in (False, True):
                part = {
                    place: call for place, call in enumerate(calls) if call.is_drawn == is_drawn
                }
                if part:
                    self._answer(part, is_drawn, live, answers, errors)
        finally:
            live.close()
        if len(errors) > MAX_FAILED * len(calls):
            raise EvaluationError(
                f"lm-eval: expected at most {MAX_FAILED:.0%} failed requests, got"
                f" {len(errors)} of {len(calls)}: {next(iter(errors.values()))}"
            )
        return [answers[place] for place in range(len(calls))]

    def _answer(
        self,
        calls: Mapping[int, _Call],
        is_drawn: bool,
        live: Live,
        answers: dict[int, str],
        errors: dict[int, str],
    ) -> None:
        """Adds the answers of one batch, and what failed in it, by their places in the call."""
        result = self._runner.run(
            [call.prompt for call in calls.values()],
            [call.params for call in calls.values()],
            lambda _, output: live.finished(output, None),
        )
        failed = {place: result.errors.get(number) for number, place in enumerate(calls)}
        last = []
        for (place, call), output in zip(calls.items(), result.outputs, strict=True):
            context, kwargs = call.request.args
            text = "" if output is None else cut_at(output.text, stop_terms(kwargs.get("until")))
            answers[place], error = text, failed[place]
            if output is None and error is None:
                continue  # Ctrl-C came before its end
            last.append(
                {
                    "prompt_sha256": hashlib.sha256(context.encode()).hexdigest(),
                    "text": text,
                    "reason": "error" if output is None else output.completion_reason,
                    "error": error,
                    "metrics": None if output is None else metrics_record(output.metrics),
                    "cache_key": hash_args("generate_until", (context, kwargs)),
                    # lm-eval keeps none of these: a run that goes on asks them again.
                    "is_drawn": is_drawn,
                }
            )
            if output is None:
                errors[place] = str(error)
            else:
                self.cache_hook.add_partial("generate_until", (context, kwargs), text)
        self._records += last
        self._commit_cache()
        self._save_traces([call.request.args[0] for call in calls.values()], result.outputs)
        self._segments.append({"stats": dataclasses.asdict(result.stats), "is_drawn": is_drawn})
        self._save(last, {place: error for place, error in failed.items() if error is not None})
        if result.is_interrupted:
            raise KeyboardInterrupt

    def _warm_up(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> None:
        """Before the first call, a few answers that are not counted."""
        count = 0 if self._is_warm else self._config.eval.warmup_requests
        self._is_warm = True
        if not count:
            return
        short = [warm_up_params(item) for item in params[:count]]
        if self._runner.run(prompts[:count], short).is_interrupted:
            raise KeyboardInterrupt
        self._runner.engine.flush_prefix_cache()

    def stats(self, last: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """The numbers of all calls together; `last` has the answers of the last one."""
        return run_stats(self._records, self._segments, last) | self._likelihood.stats()

    @property
    def totals(self) -> dict[str, Any]:
        """What `go_on` takes, for JSON."""
        return {"segments": self._segments, **self._likelihood.stats()}

    def go_on(self, totals: Mapping[str, Any], records: Sequence[dict[str, Any]]) -> None:
        """Counts on from an interrupted run: its `totals` and the answers it has saved.

        Those that failed or were drawn are asked again.
        """
        self._segments += [part for part in totals.get("segments", ()) if not part.get("is_drawn")]
        self._records += filter(self.is_kept, records)
        if "likelihood" in totals:
            self._likelihood.go_on(totals["likelihood"])

    @staticmethod
    def is_kept(record: Mapping[str, Any]) -> bool:
        """Whether a run that goes on takes over an answer, rather than asking again."""
        return not (record["error"] or record.get("is_drawn"))

    def _save_traces(
        self, questions: Sequence[str], outputs: Sequence[RequestOutput | None]
    ) -> None:
        if self._save_dir is None or self._config.eval.save_trace == "none":
            return
        self._save_dir.mkdir(parents=True, exist_ok=True)
        with TraceFile(self._save_dir / TRACE) as file:
            for question, output in zip(questions, outputs, strict=True):
                if output is not None:
                    file.append(
                        trace_record(output, self.tokenizer, question=question, model=self._name)
                    )

    def _save(self, last: Sequence[Mapping[str, Any]], errors: Mapping[int, str]) -> None:
        if self._save_dir is None:
            return
        self._save_dir.mkdir(parents=True, exist_ok=True)
        stats = self.stats(last)
        text = json.dumps(stats, indent=2)
        (self._save_dir / "diffulex_stats.json").write_text(text + "\n", encoding="utf-8")
        with (self._save_dir / SAMPLES).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in last)
        with (self._save_dir / "errors.jsonl").open("a", encoding="utf-8") as file:
            for place, message in errors.items():
                file.write(json.dumps({"request": place, "error": message}) + "\n")

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(estimated log-likelihood, whether greedy decoding gives the text) of every text.

        The second is False unless `check_greedy` is set. Each is in lm-eval's cache as soon as it is
        known.

        Raises:
            EvaluationError: the model has no estimate of likelihoods, or a text cannot be scored.
            KeyboardInterrupt: Ctrl-C; what was known is in the cache.
        """
        if not requests:
            return []
        self._check_likelihood(requests)
        first = prefix_token(self.tokenizer)
        pairs = [
            context_pair(self.tok_encode, self._encode_plain, first, *request.args)
            for request in requests
        ]
        if not self._config.eval.check_greedy:
            warn_once(
                logger, "check_greedy",
                "likelihoods: greedy decoding was not compared (check_greedy is off): reported as"
                " different",
            )  # fmt: skip
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)

        def keep(score: OneScore) -> None:
            answers[score.place] = answer = score.value, score.is_greedy
            self.cache_hook.add_partial("loglikelihood", requests[score.place].args, answer)

        self._score(pairs, keep, disable_tqdm)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Estimated log-likelihood of every text, window by window: a bound, not a perplexity.

        Raises:
            EvaluationError: as `loglikelihood`.
        """
        if not requests:
            return []
        self._check_likelihood(requests)
        first = prefix_token(self.tokenizer)
        most = self.engine.config.scheduler.max_model_len
        windows = [
            rolling_pairs(self._encode_plain(request.args[0]), first, most) for request in requests
        ]
        owners = [place for place, pairs in enumerate(windows) for _ in pairs]
        values: list[list[float]] = [[] for _ in requests]
        answers = [0.0] * len(requests)

        def keep(score: OneScore) -> None:
            place = owners[score.place]
            values[place].append(score.value)
            if len(values[place]) == len(windows[place]):
                answers[place] = math.fsum(values[place])
                args = requests[place].args
                self.cache_hook.add_partial("loglikelihood_rolling", args, answers[place])

        self._score([pair for pairs in windows for pair in pairs], keep, disable_tqdm)
        return answers

    def _style(self, disable_tqdm: bool) -> str:
        """No bar where lm-eval shows its own."""
        is_bar = disable_tqdm and self._progress in ("auto", "bar")
        return "log" if is_bar else self._progress

    def _score(
        self, pairs: Sequence[Pair], keep: Callable[[OneScore], None], disable_tqdm: bool
    ) -> None:
        try:
            self._likelihood.score(pairs, keep, self._style(disable_tqdm))
        finally:
            self._commit_cache()
            self._save((), {})

    def _commit_cache(self) -> None:
        """Waits until what lm-eval's cache was given is on the disk."""
        cache = self.cache_hook.dbdict
        if cache is not None:
            cache.commit()

    def _encode_plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _check_likelihood(self, requests: Sequence[Instance]) -> None:
        names = ", ".join(sorted({str(request.task_name) for request in requests}))
        if self.engine.config.decoding.traits.has_canvas:
            raise EvaluationError(
                f"task {names}: expected a model that fills masks for likelihoods, got one that"
                f" denoises a canvas ({self.engine.config.model.spec.family}); choose a generative"
                " variant of the task (generate_until)"
            )
        if self.tokenizer.has_chat_template:
            warn_once(
                logger, "likelihood of a chat model",
                "task %s: likelihoods are meant for base checkpoints, and this one has a chat"
                " template", names,
            )  # fmt: skip

    def close(self) -> None:
        """Releases the engine."""
        self._runner.close()
