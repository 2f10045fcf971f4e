# SPDX-License-Identifier: Apache-2.0
"""What the application asks of a frontend, and what stands in where a program's own has less."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast, runtime_checkable

from diffulex.checkpoint.tokenizer import Tokenizer
from diffulex.server.http.api_errors import ApiError
from diffulex.serving.frontend import FrontendManager
from diffulex.serving.frontend_state import FrontendLimits, ServerState
from diffulex.serving.replicas.frontend import ReplicaFrontend

if TYPE_CHECKING:
    from diffulex.wire.messages import ControlAction
    from diffulex.wire.protocol import ServingEvent, ServingGenerate, ServingReply

__all__ = ["AppFrontend", "AppTokenizer", "MinimalFrontend", "completed"]

IsDisconnected = Callable[[], Awaitable[bool]]


class MinimalFrontend(Protocol):
    """What every frontend has."""

    model_id: str

    def new_request_id(self) -> str:
        """A name no other request has."""

    async def generate(
        self, command: ServingGenerate, *, is_disconnected: IsDisconnected | None = None
    ) -> ServingReply:
        """The reply to a command; RuntimeError when it fails."""

    def generate_stream(
        self, command: ServingGenerate, *, is_disconnected: IsDisconnected | None = None
    ) -> AsyncIterator[ServingEvent]:
        """The events of a command; the last one is a reply or an error."""


class AppTokenizer(Protocol):
    """What the application asks of a tokenizer; `Tokenizer` explains each."""

    @property
    def backend(self) -> Any: ...
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def max_token_chars(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def render_chat(self, messages: Sequence[Mapping[str, str]], **variables: Any) -> str: ...


@runtime_checkable
class AppFrontend(MinimalFrontend, Protocol):
    """What the application uses; `FrontendManager` explains each.

    `state` is the value of a `ServerState`, or a word of the program's own, which is shown.
    """

    @property
    def tokenizer(self) -> AppTokenizer | None: ...

    info: dict[str, Any]
    limits: FrontendLimits
    stats: dict[str, Any]
    counters: dict[str, int]
    on_abort: Callable[[str, str], None] | None

    @property
    def state(self) -> str: ...
    @property
    def is_healthy(self) -> bool: ...
    @property
    def heartbeat_age_s(self) -> float | None: ...
    @property
    def degraded(self) -> Sequence[int]: ...
    @property
    def num_inflight(self) -> int: ...
    @property
    def retry_after_s(self) -> int: ...

    def start(self) -> Awaitable[None] | None: ...
    def stop(self) -> Awaitable[None] | None: ...
    def has_request(self, rid: str) -> bool: ...
    async def abort_request(self, rid: str) -> bool: ...
    async def start_profile(self, prefix: str | None = None) -> dict[str, Any]: ...
    async def stop_profile(self) -> dict[str, Any]: ...
    async def flush_cache(self) -> dict[str, Any]: ...
    async def control(self, action: ControlAction, path: str | None = None) -> dict[str, Any]: ...


class _Defaults:
    """A frontend that is always ready, without limits, and tells nothing."""

    tokenizer = None
    info: Mapping[str, Any] = {}
    limits = FrontendLimits(max_queue_size=0)
    stats: Mapping[str, Any] = {}
    counters: Mapping[str, int] = {}
    on_abort = None
    state = ServerState.READY
    is_healthy = None
    heartbeat_age_s = None
    degraded: Sequence[int] = ()
    num_inflight = 0
    retry_after_s = 1

    async def start(self) -> None:
        """Nothing is to be started."""

    async def stop(self) -> None:
        """Nothing is to be stopped."""

    def has_request(self, rid: str) -> bool:
        return False

    async def abort_request(self, rid: str) -> NoReturn:
        raise _cannot("abort")

    async def start_profile(self, prefix: str | None = None) -> NoReturn:
        raise _cannot("start_profile")

    async def stop_profile(self) -> NoReturn:
        raise _cannot("stop_profile")

    async def flush_cache(self) -> NoReturn:
        raise _cannot("flush_cache")

    async def control(self, action: ControlAction, path: str | None = None) -> NoReturn:
        raise _cannot(action)


def _cannot(name: str) -> ApiError:
    return ApiError(503, f"{name}: expected a frontend that can, got one that cannot")


class _WithDefaults:
    """An object of a program; members that are missing or None are those of another object."""

    def __init__(self, given: Any, defaults: Any) -> None:
        self._given = given
        self._defaults = defaults

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._given, name, None)
        if value is not None:
            return value
        try:
            return getattr(self._defaults, name)
        except AttributeError:
            return getattr(self._given, name)


class _Completed(_WithDefaults):
    """A program's frontend; what it says in its own way has the form of `AppFrontend`."""

    def __init__(self, given: MinimalFrontend) -> None:
        super().__init__(given, _Defaults())

    @property
    def tokenizer(self) -> AppTokenizer | None:
        """The tokenizer, completed as well."""
        given = self.__getattr__("tokenizer")
        if given is None or isinstance(given, Tokenizer):
            return given
        # Without more it has a template, tokens of any length, and no other one inside.
        defaults = SimpleNamespace(has_chat_template=True, max_token_chars=None, backend=given)
        return cast("AppTokenizer", _WithDefaults(given, defaults))

    @property
    def state(self) -> str:
        """The state in lower case; it may be a text or a member of an enumeration."""
        state = self.__getattr__("state")
        return str(state.value if isinstance(state, Enum) else state).lower()

    @property
    def is_healthy(self) -> bool:
        """Whether it is ready, if it does not say otherwise."""
        is_healthy = self.__getattr__("is_healthy")
        return self.state == ServerState.READY if is_healthy is None else bool(is_healthy)

    @property
    def retry_after_s(self) -> int:
        """Whole seconds, at least one."""
        return max(1, int(self.__getattr__("retry_after_s")))

    @property
    def on_abort(self) -> Callable[[str, str], None] | None:
        """What a frontend that has such a member calls; others call nothing."""
        callback: Callable[[str, str], None] | None = self.__getattr__("on_abort")
        return callback

    @on_abort.setter
    def on_abort(self, callback: Callable[[str, str], None]) -> None:
        if hasattr(self._given, "on_abort"):
            self._given.on_abort = callback

    async def start_profile(self, prefix: str | None = None) -> dict[str, Any]:
        return _data(await self.__getattr__("start_profile")(prefix))

    async def stop_profile(self) -> dict[str, Any]:
        return _data(await self.__getattr__("stop_profile")())

    async def flush_cache(self) -> dict[str, Any]:
        return _data(await self.__getattr__("flush_cache")())

    async def control(self, action: ControlAction, path: str | None = None) -> dict[str, Any]:
        return _data(await self.__getattr__("control")(action, path))


def _data(answer: Any) -> dict[str, Any]:
    """What an operation tells; those of programs may tell nothing."""
    return answer if isinstance(answer, dict) else {}


def completed(frontend: MinimalFrontend) -> AppFrontend:
    """The frontend itself if it is ours, else with defaults for missing members."""
    if isinstance(frontend, (FrontendManager, ReplicaFrontend)):
        return cast("AppFrontend", frontend)
    return cast("AppFrontend", _Completed(frontend))
