# SPDX-License-Identifier: Apache-2.0
"""Answers for the rows of a data set of Ray Data: the class for `Dataset.map_batches`.

An actor has one engine, which decodes the rows of several batches together: Ray gives it the next batch
while the last rows of the one before are still open (`max_concurrency`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diffulex.config.sampling_params import SamplingParams
from diffulex.engine.async_llm import AsyncLLM
from diffulex.errors import ConfigError, EngineDeadError, PromptError, SamplingParamsError
from diffulex.log import get_logger

__all__ = ["Generator"]

logger = get_logger(__name__)

#: Columns that a row may have its prompt in.
_PROMPT, _MESSAGES = "prompt", "messages"


class Generator:
    """Adds an answer to every row of a batch, for `map_batches` with asynchronous actors.

    A row has `prompt`, a text or token ids, or `messages`, a conversation (a list of maps, or its JSON).
    It keeps its columns and gains `text`, `token_ids`, `finish_reason`, `nfe` (forwards that it took) and
    `error`. A row that cannot be served has its reason there, and no answer; the others go on. So does a
    row with `sampling_params`, a map of fields that replace those of all rows.

    Args:
        model: `demo` (bundled), a checkpoint directory or a hub id.
        sampling_params: fields of SamplingParams for all rows.
        use_chat_template: treat a text as the message of a user.
        settings: keys of docs/configuration.md.

    Raises:
        ConfigError: a field of `sampling_params` is unknown or illegal.
    """

    def __init__(
        self,
        model: str = "demo",
        sampling_params: Mapping[str, Any] | None = None,
        *,
        use_chat_template: bool = False,
        **settings: Any,
    ) -> None:
        self._params = dict(sampling_params or {})
        _sampling(self._params)
        self._use_chat_template = use_chat_template
        self._engine = AsyncLLM(model, **settings)
        self._starting: asyncio.Lock | None = None
        self._is_open = False

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with the columns of the answers.

        Args:
            batch: columns by name.

        Raises:
            ConfigError: it has neither column, or both; or the settings of the engine are bad.
            EngineDeadError: the engine is gone, and this is no actor. An actor ends instead, and Ray starts
                another one, which gets its batches.
        """
        if not any(len(column) for column in batch.values()):
            return dict(batch)
        given = [name for name in (_PROMPT, _MESSAGES) if name in batch]
        if len(given) != 1:
            names = ", ".join(batch) or "none"
            raise ConfigError(f"batch: expected a column prompt or messages, got {names}")
        await self._open()
        column = batch[given[0]]
        own = batch.get("sampling_params", [None] * len(column))
        rows = [
            self._answer(given[0], value, more) for value, more in zip(column, own, strict=True)
        ]
        try:
            answers = await asyncio.gather(*rows)
        except EngineDeadError as death:
            ray = sys.modules.get("ray")  # has been imported, where this is an actor
            if (
                ray is None
                or not ray.is_initialized()
                or ray.get_runtime_context().get_actor_id() is None
            ):
                raise
            # Raised, it would end the data set: Ray replaces actors, and tries tasks again, that are gone.
            logger.error("the actor ends with its engine: %s", death)
            os._exit(1)
        return {**batch, **{name: _column([row[name] for row in answers]) for name in answers[0]}}

    async def close(self) -> None:
        """Releases the engine. An actor that ends need not."""
        await self._engine.close()

    async def _open(self) -> None:
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if not self._is_open:
                await self._engine.start()
                self._is_open = True

    async def _answer(self, kind: str, value: Any, more: Any) -> dict[str, Any]:
        """The new columns of one row."""
        try:
            params = _sampling({**self._params, **_mapping("sampling_params", more)})
            if kind == _MESSAGES:
                output = await self._engine.chat(_messages(value), params)
            else:
                output = await self._engine.generate(
                    _prompt(value), params, use_chat_template=self._use_chat_template
                )
        except EngineDeadError:
            raise
        except (PromptError, SamplingParamsError, ConfigError, TypeError, ValueError) as error:
            return _row(error=" ".join(str(error).split()))
        if output.error is not None:
            return _row(error=output.error)
        return _row(
            text=output.text,
            token_ids=list(output.token_ids),
            finish_reason=output.finish_reason,
            nfe=output.metrics.nfe,
        )


def _row(
    text: str = "",
    token_ids: Sequence[int] = (),
    finish_reason: str = "error",
    nfe: int = 0,
    error: str = "",
) -> dict[str, Any]:
    return {
        "text": text,
        "token_ids": np.asarray(token_ids, np.int64),
        "finish_reason": finish_reason,
        "nfe": nfe,
        "error": error,
    }


def _column(values: list[Any]) -> Any:
    """A column; answers of equal lengths are no matrix."""
    if not isinstance(values[0], np.ndarray):
        return np.asarray(values)
    column = np.empty(len(values), object)
    column[:] = values
    return column


def _sampling(fields: Mapping[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**fields)
    except TypeError as error:
        raise ConfigError(
            f"sampling_params: expected fields of SamplingParams, got {error}"
        ) from error


def _prompt(value: Any) -> Any:
    """A text or token ids, as a column of Ray holds them."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _messages(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise PromptError(f"messages: expected a list as JSON, got {value[:80]!r}") from error
    value = list(value) if isinstance(value, (list, tuple, np.ndarray)) else value
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise PromptError(f"messages: expected a list of maps, got {value!r}")
    # A column of maps has all keys in every row.
    return [{key: item[key] for key in item if item[key] is not None} for item in value]


def _mapping(name: str, value: Any) -> dict[str, Any]:
    """A map from a column, in which keys of other rows are None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: expected a map, got {value!r}")
    return {key: item for key, item in value.items() if item is not None}
