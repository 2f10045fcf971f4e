# SPDX-License-Identifier: Apache-2.0
"""What `create_app` can be told, and what the routes share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from diffulex.config.sampling_params import MAX_STOPS
from diffulex.server.http.api_errors import ApiError
from diffulex.server.http.large_bodies import LargeBodies
from diffulex.server.openai.generation import LiveRequests
from diffulex.server.openai.prompt_encoder import PromptEncoder
from diffulex.server.openai.request_schema import MAX_MESSAGES

if TYPE_CHECKING:
    from diffulex.server.http.app_frontend import AppFrontend
    from diffulex.server.http.request_metrics import RequestMetrics
    from diffulex.wire.protocol import ServingGenerate

__all__ = ["LARGEST_BODY", "STATE_CODES", "AppContext", "AppOptions", "state_name"]

# A full prompt takes some 8 bytes per token as ids or as text: a batch of 32, within these bounds.
_BODY_BYTES_PER_TOKEN, _LEAST_BODY, LARGEST_BODY = 256, 4 << 20, 32 << 20
# Token ids of the prompts of a body: more would hold up the event loop while they are taken over.
_MAX_IDS = 1 << 20

#: The code that clients get in each state that is not healthy.
STATE_CODES = {
    "starting": "starting",
    "draining": "draining",
    "stopped": "server_shutdown",
    "dead": "engine_dead",
    "unresponsive": "engine_unresponsive",
    "stuck": "engine_stuck",
    # Of /health?all=1 alone.
    "degraded": "replica_degraded",
}


@dataclass(frozen=True, slots=True)
class AppOptions:
    """Options of the application; docs/serving.md explains them by their flags.

    Attributes:
        model: the model as it was given, for `root` in the list of models.
        has_weight_routes: False: weights cannot be changed, since nothing keeps strangers from it.
        settings: what `/server_info` shows of the command line; no secrets.
        metrics_port: a separate port for `/metrics`; None serves it beside the other routes.
        ping_interval: seconds after which a stream that is silent sends a comment; 0: never.
    """

    model: str = ""
    served_model_name: tuple[str, ...] = ()
    accept_any_model: bool = False
    v1_stream_mode: str = "block_append"
    default_max_tokens: int = 512
    min_accept_threshold: float = 0.0
    max_accept_threshold: float = 1.0
    max_request_post_edit_steps: int = 1024
    max_request_penalty: float = 1000.0
    max_trajectory_tokens: int = 8192
    max_n: int = 16
    max_prompts_per_request: int = 256
    trust_request_chat_template: bool = False
    api_key: tuple[str, ...] = ()
    admin_api_key: tuple[str, ...] = ()
    has_weight_routes: bool = True
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_body_bytes: int = 0
    disable_metrics: bool = False
    metrics_auth: bool = False
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    disable_ui: bool = False
    disable_admin_routes: bool = False
    disable_dllm_usage: bool = False
    log_requests: str = "summary"
    settings: Mapping[str, Any] = field(default_factory=dict)
    ping_interval: float = 15.0

    @classmethod
    def of(cls, args: Any, options: Mapping[str, Any]) -> AppOptions:
        """Options of a command line, changed by explicit ones."""
        names = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(options) - names)
        if unknown:
            raise TypeError(f"create_app: expected options of AppOptions, got {unknown[0]!r}")
        given = args.app_options() if args is not None else {}
        return cls(**{**given, **options})

    @property
    def decoding_bounds(self) -> dict[str, tuple[float, float]]:
        """Least and largest value that a request may set, by name of `decoding`."""
        return {
            "accept_threshold": (self.min_accept_threshold, self.max_accept_threshold),
            "max_post_edit_steps": (0, self.max_request_post_edit_steps),
            "penalty_lambda": (0, self.max_request_penalty),
        }


def state_name(frontend: AppFrontend) -> str:
    """The state of a frontend in lower case."""
    return frontend.state.lower()


@dataclass(slots=True)
class AppContext:
    """What the routes of one application share."""

    frontend: AppFrontend
    options: AppOptions
    encoder: PromptEncoder
    live: LiveRequests
    metrics: RequestMetrics | None = None
    bodies: LargeBodies = field(default_factory=LargeBodies)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names the model answers to, the default one first."""
        return self.options.served_model_name or (self.frontend.model_id,)

    @property
    def root(self) -> str:
        """Last component of the model's path."""
        return PurePath(self.options.model or self.frontend.model_id).name

    @property
    def info(self) -> Mapping[str, Any]:
        """What the backend said about itself."""
        return self.encoder.info

    @property
    def num_encoding(self) -> int:
        """Requests whose body is parsed or whose prompt is encoded."""
        return self.bodies.num_open + self.encoder.num_open

    @property
    def max_body_bytes(self) -> int:
        """Largest body that is read."""
        if self.options.max_body_bytes > 0:
            return self.options.max_body_bytes
        length = int(self.info.get("max_model_len") or 0)
        return max(_LEAST_BODY, min(LARGEST_BODY, length * _BODY_BYTES_PER_TOKEN))

    @property
    def body_limits(self) -> Mapping[str, Mapping[str, int]]:
        """How long the fields of a body may be, in the form of `body_parser`."""
        length = int(self.info.get("max_model_len") or _LEAST_BODY)
        count = self.options.max_prompts_per_request
        total = max(length, min(count * length, _MAX_IDS))
        prompt = {"items": count, "ids": length, "total": total}
        if self.encoder.max_chars is not None:
            prompt["chars"] = self.encoder.max_chars
        return {
            "prompt": prompt,
            "messages": {"items": MAX_MESSAGES},
            "input": {"items": MAX_MESSAGES},
            "stop": {"items": MAX_STOPS},
            "tokens": {"ids": self.encoder.max_listed, "total": self.encoder.max_listed},
        }

    @property
    def retry_after_s(self) -> int:
        """Value of the header `Retry-After`."""
        return self.frontend.retry_after_s

    def check_accepting(self) -> None:
        """ApiError 503 while the server takes no requests."""
        state = state_name(self.frontend)
        code = STATE_CODES.get(state)
        # A step that takes long may end: its requests and new ones wait for it.
        if code is not None and state != "stuck":
            raise ApiError(
                503,
                f"server: expected the state ready, got {state}",
                code=code,
                retry_after_s=self.retry_after_s,
            )

    def check_can_run(self, commands: Sequence[ServingGenerate]) -> None:
        """ApiError 400 for more than the queue ever takes, which clients would repeat in vain."""
        limits = self.frontend.limits
        most = limits.max_inflight(self.info)
        if most is not None and len(commands) > most:
            raise ApiError(
                400,
                f"n: expected at most {most} choices of all prompts together (--max-queue-size"
                f" and --max-num-reqs), got {len(commands)}",
                param="n",
            )
        wanted = sum(command.size for command in commands) if limits.max_queued_tokens > 0 else 0
        if wanted > limits.max_queued_tokens:
            raise ApiError(
                400,
                f"max_tokens: expected at most {limits.max_queued_tokens} tokens of prompts and"
                f" answers together (--max-queued-tokens), got {wanted}",
                param="max_tokens",
            )

    def check_model(self, name: str | None) -> str:
        """The name to answer with; ApiError 404 for a model that is not served."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names and not self.options.accept_any_model:
            raise ApiError(
                404,
                f"model: expected one of {', '.join(self.model_names)}, got {name!r}",
                code="model_not_found",
                param="model",
            )
        return name
