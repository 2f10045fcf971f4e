# SPDX-License-Identifier: Apache-2.0
"""`diffulex omni serve`: a model of images or videos behind HTTP."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from diffulex.omni.api_schema import (
    DiffusionModelList,
    HealthResponse,
    ServerInfoResponse,
    declare_security,
    limit_requests,
)
from diffulex.omni.async_omni_diffusion import AsyncOmniDiffusion
from diffulex.omni.config import OmniDiffusionConfig, default_model_dir
from diffulex.omni.images_metrics import ImagesMetrics
from diffulex.omni.images_routes import create_images_router
from diffulex.omni.loader import find_model
from diffulex.omni.videos_routes import VideoJobs, create_videos_router
from diffulex.server.http.api_errors import install_error_handlers
from diffulex.server.http.error_schema import error_responses
from diffulex.server.http.json_response import JSONBody
from diffulex.server.http.middleware import (
    ApiKeys,
    BodyLimit,
    Canonical,
    JSONOnly,
    LocalOnly,
    Recorder,
)
from diffulex.server.loopback import LOCALHOST, is_loopback
from diffulex.server.ui import IMAGES_PAGE, mount_ui

__all__ = ["ImagesServer", "ServeOptions", "create_images_app", "serve"]

#: Without pictures, and with them.
_MAX_BODY_BYTES, _MAX_FORM_BYTES = 1 << 20, 50 << 20
#: Paths that read forms.
_FORMS = ("/v1/images/edits", "/v1/videos")
_OPEN_PATHS = ("/health", "/metrics", "/", "/ui")
#: Beside the weights of a model that draws the captions of shapes.
_SHAPES_RECORD = "shapes.json"


class ServeOptions(NamedTuple):
    """What a server is told beside the settings of its engine.

    Attributes:
        served_names: of the model; empty: the name of its directory or its hub id.
        api_keys: one of them must come with every request; empty: none is asked for.
        drain_s: how long running requests may take when the server is told to stop.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    drain_s: float = 30.0


def create_images_app(engine: AsyncOmniDiffusion, options: ServeOptions) -> FastAPI:
    """The application over an engine of images or videos, which it closes at its end."""
    names = options.served_names or (_model_name(engine),)
    metrics = ImagesMetrics(engine)
    spec = engine.engine.spec
    videos = VideoJobs(engine, metrics) if spec.media == "video" else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            try:
                if videos is not None:
                    await videos.close()
            finally:
                await engine.close()

    app = _Application(title="Diffulex images", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.videos = videos
    app.state.limits = (engine, names, bool(options.api_keys))
    install_error_handlers(app)
    if videos is None:
        app.include_router(create_images_router(engine, names, metrics))
    else:
        app.include_router(create_videos_router(engine, names, videos))
    _add_service_routes(app, engine, names, metrics)
    mount_ui(app, IMAGES_PAGE)
    _add_middleware(app, options, _MAX_BODY_BYTES if spec.image_input is None else _MAX_FORM_BYTES)
    return app


def _add_service_routes(
    app: FastAPI, engine: AsyncOmniDiffusion, names: tuple[str, ...], metrics: ImagesMetrics
) -> None:
    """What a server tells of itself."""
    created = int(time.time())

    @app.get("/v1/models", responses={200: {"model": DiffusionModelList}, **error_responses()})
    async def models() -> Response:
        """The names of the model."""
        common = {
            "object": "model",
            "created": created,
            "owned_by": "diffulex",
            "type": "diffusion",
        }
        return JSONBody({"object": "list", "data": [{"id": name, **common} for name in names]})

    @app.get("/server_info", responses={200: {"model": ServerInfoResponse}, **error_responses()})
    async def server_info() -> Response:
        """What a page has to know: the pipeline, its defaults, the settings that change pictures."""
        return JSONBody(_describe(engine, names[0]))

    health_body: dict[int | str, dict[str, Any]] = {
        status: {"model": HealthResponse} for status in (200, 503)
    }

    @app.get("/health", responses={**error_responses(), **health_body})
    async def health() -> Response:
        """Whether requests are accepted."""
        return _health(engine, app.state.videos)

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}, **error_responses()},
    )
    async def show_metrics() -> Response:
        """Prometheus text."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


class _Application(FastAPI):
    """FastAPI, with a document that tells what the application really takes and answers."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self.openapi_schema is None:
            document = super().openapi()
            engine, names, has_keys = self.state.limits
            core = engine.engine
            sigmas = ("sigmas", "sigmas[]") if core.has_sigmas else ()
            # Those that need coefficients get them in the same request.
            caches = core.caches({"coefficients": [0.0] * 5})
            limit_requests(document, names, (*core.defaults, *sigmas), core.least_steps, caches)
            if has_keys:
                declare_security(document, _OPEN_PATHS)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _health(engine: AsyncOmniDiffusion, videos: VideoJobs | None) -> Response:
    is_ending = videos is not None and videos.is_ending
    state = "starting" if engine.is_restarting else engine.engine.health()["state"]
    state = "draining" if is_ending else state
    is_ready = engine.is_running and not is_ending
    shown = {"status": state, "waiting": engine.num_waiting}
    return JSONBody(shown, status_code=200 if is_ready else 503)


def _describe(engine: AsyncOmniDiffusion, name: str) -> dict[str, Any]:
    config, spec = engine.config, engine.engine.spec
    directory = Path(config.model.model) if config.model.model else default_model_dir()
    return {
        "model": name,
        "pipeline": spec.name,
        "media": spec.media,
        "edits": spec.image_input is not None,
        "device": engine.engine.device,
        "defaults": engine.engine.defaults,
        "guidance": spec.guidance.argument,
        "size_multiple": engine.engine.size_multiple,
        "has_previews": spec.decode is not None,
        "draws_shapes": (directory / _SHAPES_RECORD).is_file(),
        "cache_backend": config.cache.cache_backend,
        "cache_backends": list(engine.engine.caches()),
        "attention_backend": config.kernels.attention_backend,
        "num_processes": config.parallel.world_size,
        "max_queue_size": config.engine.max_queue_size,
    }


def _add_middleware(app: FastAPI, options: ServeOptions, max_bytes: int) -> None:
    """What is added last comes first."""
    app.add_middleware(JSONOnly, forms=_FORMS)
    # Without keys, pages of other sites must not reach a server of this machine.
    is_local = is_loopback(options.host) and not options.api_keys
    hosts = (LOCALHOST,) if is_local else ()
    app.add_middleware(LocalOnly, hosts=hosts, origins=(), admin_paths=_FORMS)
    if options.api_keys:
        app.add_middleware(ApiKeys, keys=options.api_keys, open_paths=set(_OPEN_PATHS))
    app.add_middleware(BodyLimit, max_bytes=lambda: max_bytes)
    app.add_middleware(Recorder, metrics=None, generating=(), log_requests="none")
    app.add_middleware(Canonical)


def _model_name(engine: AsyncOmniDiffusion) -> str:
    model = engine.config.model.model
    if model is None:
        return default_model_dir().name
    return Path(model).name if Path(model).exists() else model


def serve(engine_kwargs: dict[str, Any], options: ServeOptions) -> int:
    """Loads the model and serves it until SIGINT or SIGTERM; returns the exit code.

    Raises: as `OmniDiffusion`, and OSError: the address cannot be listened on.
    """
    media = find_model(OmniDiffusionConfig.from_kwargs(**engine_kwargs)).spec.media
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # Before the model is loaded: an address in use should be answered at once.
    listener = socket.create_server((options.host, options.port), family=family)
    try:
        engine = AsyncOmniDiffusion(restarts=True, **engine_kwargs)
        server = ImagesServer(create_images_app(engine, options), options.drain_s)
        port = listener.getsockname()[1]
        print(f"serving {media}s on http://{options.host}:{port}", file=sys.stderr, flush=True)
        asyncio.run(server.serve(sockets=[listener]))
    finally:
        listener.close()
    return server.exit_code


class ImagesServer(uvicorn.Server):
    """The first signal lets what was asked for end, a second one does not.

    Args:
        app: of `create_images_app`.
        drain_s: seconds that it may take after the first signal. Requests that run are answered. A
            server of videos goes on until those that are not over then have been fetched, too.
    """

    exit_code = 0

    def __init__(self, app: FastAPI, drain_s: float) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=max(1, int(drain_s)))
        )
        self._videos: VideoJobs | None = app.state.videos
        self._drain_s = drain_s
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._deadline is not None:
            self.should_exit = self.force_exit = True
            self.exit_code = 130 if sig == signal.SIGINT else 0
            return
        self._deadline = time.monotonic() + self._drain_s
        self.should_exit = self._videos is None

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None and self._videos is not None and not self.should_exit:
            self._videos.end()
            left = self._deadline - time.monotonic()
            self.should_exit = self._videos.has_ended or left <= 0
            self.config.timeout_graceful_shutdown = max(1, int(left))
        return await super().on_tick(counter)
