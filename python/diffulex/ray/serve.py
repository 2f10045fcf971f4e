# SPDX-License-Identifier: Apache-2.0
"""The server as an application of Ray Serve: replicas that Serve starts, counts, checks and replaces.

Each replica of the deployment is the application of `diffulex serve` over an engine in a process of the
same node. Serve's proxies listen, choose a replica, and wait for its answers when it is to go; or a door
behind them chooses (`diffulex.ray.prefix`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from diffulex.config.flags import READABLE_KINDS, read_value
from diffulex.config.table import CONFIG_TABLE
from diffulex.distributed.child_process import ChildProcess
from diffulex.distributed.layout import Sizes
from diffulex.errors import ConfigError
from diffulex.ray.backend import TARGET, ConnectedBackend
from diffulex.ray.prefix import CACHE_TOKENS, Door, HttpRequest, PrefixRouter, answer_of
from diffulex.server.args import ServerArgs
from diffulex.server.http.api_server import create_app
from diffulex.server.http.app_options import LARGEST_BODY
from diffulex.server.launch import (
    ipc_directory,
    limits_of,
    load_tokenizer,
    remove_ipc_directory,
    worker_settings,
)
from diffulex.server.server_flags import HttpArgs, http_flags
from diffulex.serving.frontend import FrontendManager
from diffulex.serving.supervisor import Supervisor

__all__ = ["build_openai_app", "openai_app"]

_LABEL = "engine"
_STOP_S = 5.0
#: Requests that a replica may have, in those that its engine decodes at a time.
_ONGOING = 2
#: Those that a door may have: replicas refuse what is too much for them.
_AT_THE_DOOR = 10_000
#: Seconds between the times that replicas tell a router of themselves.
_TELL_S = 1.0
#: Keys beside the settings of a server, here and in an item of `llm_configs`.
_OF_DEPLOYMENT = ("deployment_config", "accelerator_type", "request_router")
_MODEL_KEYS = ("model_loading_config", "engine_kwargs", *_OF_DEPLOYMENT)
_LOADING_KEYS = ("model_id", "model_source")
#: Settings of a server of its own, which Serve has in its place.
_OF_SERVE = (
    *("host", "port", "uds", "root_path", "ssl_keyfile", "ssl_certfile", "early_bind", "inproc"),
    *("config", "zmq_command_addr", "zmq_event_addr", "replica_retries", "min_ready_replicas"),
    *("metrics_port", "restart_backend", "keep_alive_on_backend_death"),
)


def build_openai_app(args: Mapping[str, Any]) -> Any:
    """The application of a file of Serve, or of `serve run diffulex.ray.serve:build_openai_app key=value`.

    Args:
        args: settings of `diffulex serve` by name, `model` among them; or `llm_configs` with one item,
            see docs/ray.md. `deployment_config` has options of the deployment, `request_router` says
            by what replicas are chosen.

    Raises:
        ConfigError: a key is unknown, or a setting illegal.
    """
    given = dict(args)
    if "llm_configs" in given:
        given = _flattened(given)
    deployment = dict(given.pop("deployment_config", None) or {})
    others = {name: given.pop(name, None) for name in ("accelerator_type", "request_router")}
    settings = {name: _read(name, value) for name, value in given.items()}
    return openai_app(settings, deployment, **others)


def openai_app(
    settings: Mapping[str, Any],
    deployment_config: Mapping[str, Any] | None = None,
    *,
    accelerator_type: str | None = None,
    request_router: str | None = None,
    engine_factory: Callable[..., Any] | None = None,
) -> Any:
    """The application of settings that are values of Python already.

    Args:
        settings: fields of `ServerArgs`.
        deployment_config: options of `serve.deployment`, such as `autoscaling_config`.
        accelerator_type: the nodes that replicas may be on.
        request_router: `prefix`: by what their prefix caches hold; None: as Serve does.
        engine_factory: replaces the real engine; importable by name on the nodes.

    Raises:
        ConfigError: a setting is unknown or illegal.
    """
    server = _server_args(settings)
    if request_router not in (None, "prefix"):
        raise ConfigError(f"request_router: expected prefix, or none, got {request_router!r}")
    options = _deployment_options(server, dict(deployment_config or {}), accelerator_type)
    replica: type = _Replica
    if request_router is not None:
        replica = _ReplicaBehindDoor
        router = RequestRouterConfig(
            request_router_class=PrefixRouter, request_routing_stats_period_s=_TELL_S
        )
        options = {"request_router_config": router, **options}
    try:
        deployment = serve.deployment(replica).options(**options)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"deployment_config: expected options of Ray Serve, got {reason}"
        ) from error
    replicas = deployment.bind(dict(settings), engine_factory)
    if request_router is None:
        return replicas
    # The door runs the same code; devices and other options of an actor are those of an engine.
    environment = options["ray_actor_options"].get("runtime_env")
    door = serve.deployment(serve.ingress()(Door)).options(
        name="door",
        ray_actor_options={} if environment is None else {"runtime_env": environment},
        max_ongoing_requests=_AT_THE_DOOR,
        graceful_shutdown_timeout_s=options["graceful_shutdown_timeout_s"],
    )
    return door.bind(replicas, server.max_body_bytes or LARGEST_BODY)


def _flattened(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the one model of `llm_configs`."""
    configs, rest = given["llm_configs"], {k: v for k, v in given.items() if k != "llm_configs"}
    if not isinstance(configs, list) or len(configs) != 1 or not isinstance(configs[0], Mapping):
        count = len(configs) if isinstance(configs, list) else repr(configs)
        raise ConfigError(
            f"llm_configs: expected one model (others are applications of their own), got {count}"
        )
    config = configs[0]
    loading = dict(config.get("model_loading_config") or {})
    _check_names("llm_configs", config, _MODEL_KEYS)
    _check_names("model_loading_config", loading, _LOADING_KEYS)
    source = loading.get("model_source") or loading.get("model_id")
    if not source:
        raise ConfigError("model_loading_config: expected model_id or model_source, got neither")
    result = {**rest, **dict(config.get("engine_kwargs") or {}), "model": source}
    if loading.get("model_id"):
        result["served_model_name"] = [loading["model_id"]]
    return {**result, **{name: config[name] for name in _OF_DEPLOYMENT if config.get(name)}}


def _check_names(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}: expected one of {', '.join(known)}, got {name!r}")


def _read(name: str, value: Any) -> Any:
    """A value of the command line `serve run … key=value`, where all of them are texts."""
    if isinstance(value, list):
        return tuple(value)
    rows = {row.name: row.kind for row in http_flags()}
    kind = CONFIG_TABLE[name].kind.removesuffix("?") if name in CONFIG_TABLE else rows.get(name)
    if not isinstance(value, str) or kind not in READABLE_KINDS:
        return value
    return read_value(name, kind, value)


def _server_args(settings: Mapping[str, Any]) -> ServerArgs:
    known = {*CONFIG_TABLE, *HttpArgs.__dataclass_fields__}
    for name in settings:
        if name in _OF_SERVE:
            raise ConfigError(f"{name}: expected it as an option of Ray Serve, got it here")
        if name not in known:
            raise ConfigError(f"{name}: expected a setting of diffulex serve, got an unknown one")
    for name, legal in (
        ("data_parallel_size", (None, 1)),
        ("distributed_executor", (None, "auto", "mp")),
        # Several replicas may be on one host, and Serve numbers them anew while they run.
        ("master_port", (None, 0)),
    ):
        if settings.get(name) not in legal:
            shown = " or ".join(str(item) for item in legal if item is not None)
            raise ConfigError(
                f"{name}: expected {shown} under Ray Serve, which has replicas itself, got"
                f" {settings[name]!r}"
            )
    # Proxies pass on requests under the names of their nodes.
    args = ServerArgs(**{"allowed_hosts": ("*",), **settings})
    args.check()
    return args


def _deployment_options(
    args: ServerArgs, given: dict[str, Any], accelerator_type: str | None
) -> dict[str, Any]:
    """Options of the deployment: what was given, and what follows from the engine."""
    engine = args.engine_kwargs()
    size = Sizes.of(engine)._replace(data=1).world
    actor = dict(given.pop("ray_actor_options", None) or {})
    if engine.get("device") != "cpu":
        actor.setdefault("num_gpus", size)
    else:
        actor.setdefault("num_cpus", size)
    if accelerator_type is not None:
        actor.setdefault("accelerator_type", accelerator_type)
    max_num_reqs = engine.get("max_num_reqs") or CONFIG_TABLE["max_num_reqs"].default
    return {
        "name": "diffulex",
        "max_ongoing_requests": _ONGOING * int(max_num_reqs),
        "graceful_shutdown_timeout_s": args.drain_timeout,
        "ray_actor_options": actor,
        **given,
    }


class _EngineOfReplica:
    """What a replica of the deployment has. Serve starts it when its engine is ready."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Mapping[str, Any], engine_factory: Callable[..., Any] | None
    ) -> None:
        self._args = args = _server_args(settings)
        tokenizer = load_tokenizer(args)
        self._directory = ipc_directory()
        addresses = (f"ipc://{self._directory / name}" for name in ("command", "event"))
        command, event = addresses
        self._frontend = frontend = FrontendManager.from_zmq(
            model_id=args.served_names[0],
            command_addr=command,
            event_addr=event,
            tokenizer=tokenizer,
            limits=limits_of(args),
            step_timeout_s=args.step_timeout,
        )
        given = {
            "model": args.model,
            "engine_kwargs": worker_settings(args, engine_factory),
            "command_addr": command,
            "event_addr": event,
            "engine_factory": engine_factory,
        }

        self._cache_tokens = 0

        def on_ready(info: Mapping[str, Any]) -> None:
            self._cache_tokens = int(info.get("num_pages", 0)) * int(info.get("page_size", 0))
            if info.get("mask_token_id") is not None:
                tokenizer.protect_mask(info["mask_token_id"])

        # Serve replaces the whole replica when its engine is gone.
        self._supervisor = Supervisor(
            frontend,
            lambda: ConnectedBackend(lambda _: ChildProcess(TARGET, _LABEL, {}), given, _LABEL),  # type: ignore[arg-type,return-value]
            startup_timeout_s=args.startup_timeout,
            is_staying=True,
            kills_stuck=args.kill_stuck_backend,
            on_ready=on_ready,
        )
        frontend.backend_starting()
        self._supervisor.start_backend()
        await asyncio.get_running_loop().run_in_executor(None, self._supervisor.wait_ready)
        self._supervisor.watch()

    def check_health(self) -> None:
        """Raises when the engine is gone: Serve then starts another replica."""
        if not self._frontend.is_healthy:
            raise RuntimeError(
                f"diffulex: expected an engine that serves, got {self._frontend.state}"
            )

    async def __del__(self) -> None:
        """After the last request, and after the application has stopped the frontend."""
        if hasattr(self, "_supervisor"):
            await self._supervisor.stop()
            self._supervisor.stop_backend(_STOP_S)
        if hasattr(self, "_directory"):
            remove_ipc_directory(self._directory)
            del self._directory


@serve.ingress()
class _Replica(_EngineOfReplica):
    """A replica that Serve's proxies choose."""

    def __serve_build_asgi_app__(self) -> Any:
        """The application, which Serve starts and stops."""
        return create_app(self._frontend, args=self._args)


class _ReplicaBehindDoor(_EngineOfReplica):
    """A replica that the router of a door chooses."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Mapping[str, Any], engine_factory: Callable[..., Any] | None
    ) -> None:
        await super().__init__(settings, engine_factory)
        self._app = create_app(self._frontend, args=self._args)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def relay(self, request: HttpRequest) -> AsyncIterator[Any]:
        """What the application answers."""
        async for message in answer_of(self._app, request):
            yield message

    def record_routing_stats(self) -> dict[str, int]:
        """What the router is told."""
        return {CACHE_TOKENS: self._cache_tokens}

    async def __del__(self) -> None:
        try:
            if hasattr(self, "_lifespan"):
                await self._lifespan.__aexit__(None, None, None)
        finally:
            await super().__del__()
