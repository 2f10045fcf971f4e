# SPDX-License-Identifier: Apache-2.0
"""The HTTP application: the OpenAI API, the native `/generate`, health, metrics and the page."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from fastapi import APIRouter, FastAPI
from prometheus_client import start_http_server
from starlette.middleware.cors import CORSMiddleware

from diffulex.errors import ConfigError
from diffulex.server.http.api_errors import install_error_handlers
from diffulex.server.http.app_frontend import MinimalFrontend, completed
from diffulex.server.http.app_options import AppContext, AppOptions
from diffulex.server.http.error_schema import declare_errors
from diffulex.server.http.middleware import (
    ApiKeys,
    BodyLimit,
    Canonical,
    JSONOnly,
    LocalOnly,
    Recorder,
)
from diffulex.server.http.request_metrics import RequestMetrics
from diffulex.server.http.service_routes import (
    ADMIN_PATHS,
    WEIGHT_PATHS,
    package_version,
    service_router,
)
from diffulex.server.http.sse import sse
from diffulex.server.openai.generation import LiveRequests
from diffulex.server.openai.generation_routes import generation_router
from diffulex.server.openai.openai_format import (
    chat_delta_chunk,
    chat_finish_chunk,
    denoise_chat_event,
)
from diffulex.server.openai.prompt_encoder import PromptEncoder
from diffulex.server.openai.request_params import sampling_params_from_request
from diffulex.server.openai.request_schema import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerateRequest,
    ProfileRequest,
)
from diffulex.server.openai.tokenizer_routes import tokenizer_router
from diffulex.server.replicas.routes import replica_admin_paths, replica_router
from diffulex.server.ui import mount_ui
from diffulex.serving.replicas.frontend import ReplicaFrontend

__all__ = [
    "AppOptions",
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "GenerateRequest",
    "ProfileRequest",
    "chat_delta_chunk",
    "chat_finish_chunk",
    "create_app",
    "denoise_chat_event",
    "maybe_await",
    "sampling_params_from_request",
    "sse",
]

T = TypeVar("T")

_GENERATING = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses")
#: Paths that need no key. The page holds no secret; what it calls asks for one.
_OPEN = ("/health", "/health/live", "/ready", "/ping", "/version", "/", "/ui", "/metrics")


async def maybe_await(value: Awaitable[T] | T) -> T:
    """The value, awaited if it is awaitable."""
    if inspect.isawaitable(value):
        return await cast("Awaitable[T]", value)
    return value


def create_app(frontend: MinimalFrontend, *, args: Any = None, **options: Any) -> FastAPI:
    """The application over a frontend.

    Args:
        frontend: has `model_id`, `new_request_id()`, `generate(command, is_disconnected=)` and
            `generate_stream(command, is_disconnected=)`. Missing members, and those that are None,
            get defaults: `start`, `stop`, `start_profile`, `stop_profile`, `flush_cache`,
            `abort_request`, `has_request`, `tokenizer`, `info`, `limits`, `state`, `is_healthy`,
            `stats`, `counters`, `heartbeat_age_s`, `num_inflight`, `retry_after_s`, `on_abort`.
        args: a command line whose options are taken.
        options: fields of `AppOptions`; they win over `args`.

    Raises:
        ConfigError: the port of the metrics cannot be listened on.
    """
    settings = AppOptions.of(args, options)
    if args is not None:
        args.log_warnings()
    served = completed(frontend)
    names = settings.served_model_name or (served.model_id,)
    live = LiveRequests(served)
    context = AppContext(served, settings, PromptEncoder(served), live)
    if not settings.disable_metrics:
        context.metrics = RequestMetrics(
            names[0], served, live, num_encoding=lambda: context.num_encoding
        )
    exporter = _start_exporter(context)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await maybe_await(served.start())
            try:
                yield
            finally:
                await maybe_await(served.stop())
        finally:
            context.encoder.close()
            if exporter is not None:
                exporter.shutdown()
                exporter.server_close()

    app = _Application(
        title="Diffulex HTTP Server",
        version=package_version(),
        lifespan=lifespan,
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    install_error_handlers(app)
    for make_router in (generation_router, tokenizer_router, service_router):
        _add_routes(app, make_router(context))
    admin_paths: tuple[str, ...] = ADMIN_PATHS
    if isinstance(frontend, ReplicaFrontend):
        admin = not settings.disable_admin_routes
        _add_routes(app, replica_router(frontend, has_admin_routes=admin))
        admin_paths += replica_admin_paths(frontend)
    if not settings.disable_ui:
        mount_ui(app)
    _add_middleware(app, context, admin_paths)
    return app


def _add_routes(app: FastAPI, router: APIRouter) -> None:
    """The routes as they are: `include_router` would make each of them again."""
    app.router.routes.extend(router.routes)


class _Application(FastAPI):
    """FastAPI, with a document that tells what the application really answers."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self.openapi_schema is None:
            document = super().openapi()
            declare_errors(document)
            _add_limits(document, self.state.context)
            options = self.state.context.options
            if options.api_key or options.admin_api_key:
                _add_security(document, only_weights=not options.api_key)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _add_limits(document: dict[str, Any], context: AppContext) -> None:
    """What this server's options leave of the requests: its models, and how much of each."""
    options, names = context.options, list(context.model_names)
    model_id = {"type": "string", "enum": names}
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model_id":
                    parameter["schema"] = model_id
    schemas = document["components"]["schemas"]
    for name, (low, high) in options.decoding_bounds.items():
        schemas["Decoding"]["properties"][name]["anyOf"][0] |= {"minimum": low, "maximum": high}
    for name, schema in schemas.items():
        if not name.endswith("Request"):
            continue
        fields = schema["properties"]
        if "model" in fields and not options.accept_any_model:
            fields["model"] = {"enum": [*names, "", None]}
        if "n" in fields:
            fields["n"]["anyOf"][0]["maximum"] = options.max_n
        if "chat_template" in fields and not options.trust_request_chat_template:
            fields["chat_template"] = {"type": "null"}
        if name == "CompletionRequest":
            for form in fields["prompt"]["anyOf"][2:]:
                form["maxItems"] = options.max_prompts_per_request


def _add_security(document: dict[str, Any], *, only_weights: bool) -> None:
    schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes["apiKey"] = {"type": "http", "scheme": "bearer"}
    for path, operations in document["paths"].items():
        if path in WEIGHT_PATHS or not (only_weights or path in _OPEN):
            for operation in operations.values():
                operation["security"] = [{"apiKey": []}]


def _start_exporter(context: AppContext) -> Any:
    """The server of the metrics' own port, if there is one.

    It starts before the model is loaded, so that a port in use is found before that.
    """
    options = context.options
    if context.metrics is None or options.metrics_port is None:
        return None
    host, port = options.metrics_host, options.metrics_port
    try:
        server, _ = start_http_server(port, addr=host, registry=context.metrics.registry)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--metrics-port: cannot listen on {host}:{port}: {reason}") from error
    return server


def _add_middleware(app: FastAPI, context: AppContext, admin_paths: tuple[str, ...]) -> None:
    """What is added last comes first."""
    options = context.options
    app.add_middleware(JSONOnly)
    app.add_middleware(
        LocalOnly,
        hosts=options.allowed_hosts,
        origins=options.allowed_origins,
        admin_paths=admin_paths,
    )
    if options.api_key or options.admin_api_key:
        closed = {"/metrics"} if options.metrics_auth else set()
        app.add_middleware(
            ApiKeys,
            keys=options.api_key,
            open_paths=set(_OPEN) - closed,
            admin_keys=options.admin_api_key,
            admin_paths=WEIGHT_PATHS,
        )
    # Around everything that reads a body; a refusal is recorded, and other origins may read it.
    app.add_middleware(BodyLimit, max_bytes=lambda: context.max_body_bytes)
    app.add_middleware(
        Recorder,
        metrics=context.metrics,
        generating=_GENERATING,
        log_requests=options.log_requests,
    )
    app.add_middleware(Canonical)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=["X-Request-Id", "Retry-After"],
        )
