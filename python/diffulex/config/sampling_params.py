# SPDX-License-Identifier: Apache-2.0
"""Parameters of one request."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from diffulex.errors import SamplingParamsError, UnknownParameterError

if TYPE_CHECKING:
    from diffulex.config.table import SamplerConfig
    from diffulex_ext import _core

__all__ = [
    "DECODING_FIELDS",
    "MAX_STOPS",
    "TRAJECTORY_LEVELS",
    "DecodingField",
    "SamplingParams",
    "choice_seed",
    "decoding_arguments",
    "greedy_if_tiny",
    "merged_params",
]

T = TypeVar("T")


class DecodingField(NamedTuple):
    """A setting of the decoding rule that a request may set, from 0 to `high`.

    Attributes:
        kind: int or float.
        is_read: a sampler or strategy reads it.
    """

    kind: type = float
    high: float = 1.0
    is_read: bool = True


#: What a request may set of the decoding rule, by name: that of the engine's default.
DECODING_FIELDS = {
    "accept_threshold": DecodingField(),
    "edit_threshold": DecodingField(),
    "add_block_threshold": DecodingField(),
    "semi_complete_threshold": DecodingField(),
    "token_stability_threshold": DecodingField(),
    "remask_threshold": DecodingField(is_read=False),
    "max_post_edit_steps": DecodingField(int, 2**31 - 1),
    "penalty_lambda": DecodingField(high=3.4e38),
}
#: How much of the course of a request is recorded.
TRAJECTORY_LEVELS = ("none", "blocks", "full")
#: Most stop texts of a request.
MAX_STOPS = 16
_MAX_STOP_CHARS, _MAX_LOGPROBS = 256, 20
_SEED_BITS = 63
_GREEDY_BELOW = 1e-5


def _naming_the_nearest(cls: type[T]) -> type[T]:
    """A dataclass whose constructor answers an unknown name with the nearest one."""
    construct: Any = cls.__init__
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(construct)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f", nearest is {near[0]!r}" if near else f" ({', '.join(names)})"
                if name == "n":
                    hint = " (n is one of generate: generate(prompts, params, n=3))"
                raise UnknownParameterError(
                    f"SamplingParams: expected a known parameter{hint}, got {name!r}"
                )
        construct(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@_naming_the_nearest
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded and when it ends.

    A field that is None takes the engine's default, which is the checkpoint's or the family's.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: generated tokens, at least 1.
        max_nfe: cap on the forwards the request takes part in; None: no cap.
        max_repetition_run: equal tokens at the end of the answer that end the request.
        ignore_eos: stop ids do not end the request.
        stop_token_ids: stop ids in addition to those of the model.
        stop: a text or texts that end the answer, which is cut before the first of them.
        include_stop_str_in_output: cut after it instead.
        min_tokens: neither a stop id nor a stop text ends the answer before it has as many tokens.
            Stop ids are not sampled at these positions.
        skip_special_tokens: leave special tokens out of the text; None: the default of the caller,
            True in the Python API.
        logprobs: record the log-probability of every token when it took its final value, and of so
            many of the likeliest tokens beside it; None: do not.
        template_token_ids: the whole answer, with fixed tokens and free positions (None); only the
            free ones are decoded, and neither stop ids nor stop texts end it before its last fixed
            token. At most `max_tokens` of them; None and an empty one are no template.
        return_trajectory: record in which order the answer was written: `none`, `blocks` (steps and
            their blocks) or `full` (also every change of a position); True is `full`.
        seed: key of the random draws, any integer of 64 bits; -1 is none. Without one a request at
            temperature 0 has the engine's seed, so that its answer is the same every time also
            where a strategy draws all the same; above it the engine's seed and the request id give
            one.
        top_p: nucleus of the draws; 1 or more is off, 0 keeps one candidate. Filters act on
            draws: greedy requests have none.
        top_k: candidates of the draws; 0 or less is off.
        min_p: least share of the best probability a candidate has; 0 is off.
        accept_threshold: confidence that accepts a position.
        edit_threshold: confidence that overwrites a token.
        add_block_threshold: progress of the last block that opens the next one.
        semi_complete_threshold: progress of the predecessor that grants a forced acceptance.
        token_stability_threshold: least same-token ratio of the last block to open the next one.
        remask_threshold: read by no sampler; as the key of the engine, for files of other engines.
        max_post_edit_steps: steps that a filled block may go on changing, where tokens are edited.
        penalty_lambda: taken from the logit of the token before, where tokens are edited.
    """

    temperature: float | None = None
    max_tokens: int = 512
    max_nfe: int | None = None
    max_repetition_run: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    accept_threshold: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    edit_threshold: float | None = None
    add_block_threshold: float | None = None
    semi_complete_threshold: float | None = None
    token_stability_threshold: float | None = None
    remask_threshold: float | None = None
    max_post_edit_steps: int | None = None
    penalty_lambda: float | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    return_trajectory: str = "none"
    template_token_ids: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        self._check_stops()
        for name, low in (("max_tokens", 1), ("max_nfe", 1), ("max_repetition_run", 1)):
            value = getattr(self, name)
            if value is None and name != "max_tokens":
                continue
            if not _is_int(value) or not low <= value < 2**31:
                raise _illegal(name, f"an integer in [{low}, 2**31)", value)
        for name in ("temperature", "top_p"):
            self._check_number(name, math.inf)
        self._check_number("min_p", 1)
        for name, limits in DECODING_FIELDS.items():
            self._check_number(name, limits.high, limits.kind)
        if self.top_k is not None and not (_is_int(self.top_k) and -(2**31) <= self.top_k < 2**31):
            raise _illegal("top_k", "an integer in [-2**31, 2**31)", self.top_k)
        self._check_seed()
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _illegal(name, "True or False", getattr(self, name))
        if self.skip_special_tokens not in (None, True, False):
            raise _illegal("skip_special_tokens", "True, False or None", self.skip_special_tokens)
        if not _is_int(self.min_tokens) or not 0 <= self.min_tokens <= self.max_tokens:
            raise _illegal("min_tokens", f"an integer in [0, {self.max_tokens}]", self.min_tokens)
        if self.logprobs is not None and not (
            _is_int(self.logprobs) and 0 <= self.logprobs <= _MAX_LOGPROBS
        ):
            raise _illegal("logprobs", f"an integer in [0, {_MAX_LOGPROBS}]", self.logprobs)

        self._check_trajectory()
        self._check_template()

    def _check_trajectory(self) -> None:
        level: object = self.return_trajectory
        if isinstance(level, bool):
            level = "full" if level else "none"
        if level not in TRAJECTORY_LEVELS:
            expected = f"{', '.join(TRAJECTORY_LEVELS)}, True or False"
            raise _illegal("return_trajectory", expected, level)
        object.__setattr__(self, "return_trajectory", level)

    def _check_template(self) -> None:
        name = "template_token_ids"
        given: Any = self.template_token_ids
        given = () if given is None else _plain(given)
        if isinstance(given, (str, bytes, Mapping, Set)) or not isinstance(given, Iterable):
            raise _illegal(name, "a list of token ids and None", given)
        ids = tuple(map(_plain, given))
        object.__setattr__(self, name, ids)
        if not ids:
            return
        for token in ids:
            if token is not None and not (_is_int(token) and 0 <= token < 2**31):
                raise _illegal(name, "token ids >= 0, and None at free positions", token)
        if len(ids) > self.max_tokens:
            raise _illegal(name, f"at most max_tokens ({self.max_tokens}) positions", len(ids))
        if self.logprobs is not None:
            raise _illegal(
                "logprobs", "None with a template: fixed tokens have none", self.logprobs
            )
        if self.max_repetition_run is not None:
            expected = "None with a template, which it could end before its last fixed token"
            raise _illegal("max_repetition_run", expected, self.max_repetition_run)
        object.__setattr__(self, "max_tokens", len(ids))
        last = max((at for at, token in enumerate(ids, 1) if token is not None), default=0)
        object.__setattr__(self, "min_tokens", max(last, min(self.min_tokens, len(ids))))

    def _check_seed(self) -> None:
        if self.seed is None:
            return
        if not _is_int(self.seed) or not -(2**63) <= self.seed < 2**64:
            raise _illegal("seed", "an integer in [-2**63, 2**64)", self.seed)
        if self.seed == -1:  # from programs that have to fill the field
            object.__setattr__(self, "seed", None)

    def _check_stops(self) -> None:
        stops: object = self.stop_token_ids
        if isinstance(stops, (str, bytes)) or not isinstance(stops, Iterable):
            raise _illegal("stop_token_ids", "a list of token ids", stops)
        object.__setattr__(self, "stop_token_ids", tuple(stops))
        for token in self.stop_token_ids:
            if not _is_int(token) or not 0 <= token < 2**31:
                raise _illegal("stop_token_ids", "token ids >= 0", token)
        texts: object = self.stop
        if isinstance(texts, str):
            texts = (texts,)
        if isinstance(texts, bytes) or not isinstance(texts, Iterable):
            raise _illegal("stop", "a text or a list of texts", texts)
        object.__setattr__(self, "stop", tuple(texts))
        if len(self.stop) > MAX_STOPS:
            raise _illegal("stop", f"at most {MAX_STOPS} texts", len(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= _MAX_STOP_CHARS:
                raise _illegal("stop", f"texts of 1 to {_MAX_STOP_CHARS} characters", text)

    def _check_number(self, name: str, high: float, kind: type = float) -> None:
        value = getattr(self, name)
        if value is None:
            return
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 0 <= value <= high:
            noun = "an integer" if kind is int else "a number"
            legal = "a finite number >= 0" if math.isinf(high) else f"{noun} in [0, {high:.10g}]"
            raise _illegal(name, legal, value)

    @property
    def decoding(self) -> dict[str, float]:
        """The settings of the decoding rule that this request sets, by name."""
        chosen = {name: getattr(self, name) for name in DECODING_FIELDS}
        return {name: value for name, value in chosen.items() if value is not None}

    def with_defaults(self, defaults: SamplerConfig) -> SamplingParams:
        """The same parameters with the engine's temperature and filters where none were given."""
        names = ("temperature", "top_p", "top_k", "min_p")
        missing = {n: getattr(defaults, n) for n in names if getattr(self, n) is None}
        return dataclasses.replace(self, **missing)

    def to_core(self, default_temperature: float = 0.0) -> _core.SamplingParams:
        """Parameters of the C++ core."""
        from diffulex_ext import _core  # noqa: PLC0415

        temperature = default_temperature if self.temperature is None else self.temperature
        return _core.SamplingParams(
            temperature=float(temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=self.top_k or 0,
            min_p=float(self.min_p or 0.0),
            max_tokens=self.max_tokens,
            max_nfe=self.max_nfe or 0,
            max_repetition_run=self.max_repetition_run or 0,
            ignore_eos=self.ignore_eos,
            stop_token_ids=list(self.stop_token_ids),
            seed=None if self.seed is None else self.seed % 2**64,
            template_token_ids=[
                -1 if token is None else token for token in self.template_token_ids
            ],
            **{
                name: getattr(self, name)
                for name, limits in DECODING_FIELDS.items()
                if limits.is_read
            },
        )


def decoding_arguments(decoding: Mapping[str, object]) -> dict[str, object]:
    """Keyword arguments of `SamplingParams` for a request's `decoding` map.

    Raises:
        SamplingParamsError: a key is unknown.
    """
    for name in decoding:
        if name not in DECODING_FIELDS:
            raise SamplingParamsError(
                f"SamplingParams.decoding: expected keys of {', '.join(DECODING_FIELDS)},"
                f" got {name!r}"
            )
    return dict(decoding)


def merged_params(
    params: SamplingParams | Iterable[SamplingParams] | None, changes: Mapping[str, Any]
) -> Any:
    """`params`, or those of `changes`; both at once would leave open which of them counts.

    Raises:
        SamplingParamsError: an unknown name, an illegal value, or parameters given both ways.
    """
    if not changes:
        return params
    given = SamplingParams(**changes)
    if params is not None:
        raise SamplingParamsError(
            "sampling_params: expected parameters as an object or as keywords, got both,"
            f" {', '.join(changes)} as keywords"
        )
    return given


def greedy_if_tiny(temperature: float | None) -> float | None:
    """A temperature; 0 for one so close to 0 that it is meant to be 0. None: that of the engine."""
    if temperature is not None and temperature < _GREEDY_BELOW:
        return 0.0
    return temperature


def choice_seed(seed: int, choice: int) -> int:
    """Seed of one of several answers: that of the request, then those that follow it."""
    if seed >= 0 and choice:
        return (seed + choice) & (1 << _SEED_BITS) - 1
    value = seed + choice
    return (1 << 64) - 1 if value == -1 else value  # the same key: -1 itself is no seed


def _plain(value: Any) -> Any:
    """The numbers of an array or a scalar of numpy or torch as those of Python; others as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _illegal(name: str, expected: str, value: object) -> SamplingParamsError:
    return SamplingParamsError(f"SamplingParams.{name}: expected {expected}, got {value!r}")
