# SPDX-License-Identifier: Apache-2.0
"""From what a task asks and a user chose to the token ids and parameters of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from diffulex.bench.config import BenchmarkConfig
from diffulex.bench.task import stop_terms
from diffulex.config.sampling_params import MAX_STOPS, SamplingParams
from diffulex.errors import ConfigError

__all__ = ["cut_at", "encode_prompt", "request_params", "warm_up_params"]

_LENGTH_KEYS = ("max_gen_toks", "max_tokens", "max_new_tokens")
_EVAL_KEYS = ("temperature", "max_nfe", "max_repetition_run", "ignore_eos", "seed")
_WARM_UP_TOKENS = 64
_FURTHER_KEYS = ("top_p", "top_k", "seed")


def request_params(config: BenchmarkConfig, task: Mapping[str, Any]) -> SamplingParams:
    """Parameters of a request: what a file or a flag gave, else what the task asks, else defaults.

    Args:
        config: the user's settings.
        task: `generation_kwargs` of the task.

    Raises:
        ConfigError: more stop texts than a request can have.
    """
    asked: dict[str, Any] = {key: task[key] for key in (*_EVAL_KEYS, *_FURTHER_KEYS) if key in task}
    for key in _LENGTH_KEYS:
        if task.get(key) is not None:
            asked["max_tokens"] = int(task[key])
            break
    if task.get("do_sample") is False:
        asked["temperature"] = 0.0
    values = {**dict.fromkeys(_EVAL_KEYS), "max_tokens": None, **asked}
    for key in ("max_tokens", *_EVAL_KEYS):
        is_given = config.origin(f"eval.{key}") != "default"
        if is_given or asked.get(key) is None:
            values[key] = getattr(config.eval, key)
    stops = stop_terms(task.get("until"))
    if len(stops) > MAX_STOPS:
        raise ConfigError(f"until: expected at most {MAX_STOPS} stop texts, got {len(stops)}")
    for key, value in (config.eval.gen_kwargs or {}).items():
        if key not in (*_EVAL_KEYS, *_FURTHER_KEYS, "max_tokens"):
            raise ConfigError(f"gen_kwargs: expected a parameter of a request, got {key!r}")
        if not config.is_later(f"eval.{key}", "eval.gen_kwargs"):
            values[key] = value
    return SamplingParams(
        **values,
        stop=tuple(stops) if config.eval.engine_stop else (),
        return_trajectory=config.eval.save_trace if config.eval.save_results else "none",
    )


def warm_up_params(params: SamplingParams) -> SamplingParams:
    """The same for a request that is not counted: a short answer will do."""
    count = min(params.max_tokens, _WARM_UP_TOKENS)
    return dataclasses.replace(params, max_tokens=count, return_trajectory="none")


def cut_at(text: str, stops: list[str]) -> str:
    """The text before the first stop term in it."""
    for stop in stops:
        text = text.split(stop, 1)[0]
    return text


def _has_control_tokens(tokenizer: Any, text: str) -> bool:
    tokens = tokenizer.backend.added_tokens_decoder.values()
    return any(token.special and token.content in text for token in tokens)


def encode_prompt(tokenizer: Any, text: str, add_bos_token: bool | None) -> list[int]:
    """Token ids of a prompt with one begin token (True), none (False), or (None) what the tokenizer
    adds to plain texts, and nothing to a text that has control tokens already."""
    begin, begin_id = tokenizer.backend.bos_token, tokenizer.backend.bos_token_id
    has_begin = bool(begin) and text.startswith(begin)
    is_bare = has_begin or (add_bos_token is None and _has_control_tokens(tokenizer, text))
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=not is_bare)
    if add_bos_token is None or begin_id is None:
        return token_ids
    while token_ids[:1] == [begin_id]:
        token_ids = token_ids[1:]
    return [begin_id, *token_ids] if add_bos_token else token_ids
