# SPDX-License-Identifier: Apache-2.0
"""Models, health, metrics, versions, and the administrative routes."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Body
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from diffulex.server.http.api_errors import ApiError, api_error_of
from diffulex.server.http.app_options import STATE_CODES, state_name
from diffulex.server.http.error_schema import error_responses
from diffulex.server.http.json_response import JSONBody
from diffulex.server.http.large_bodies import BodyRoute
from diffulex.server.openai.request_schema import AbortRequest, ProfileRequest, WeightsRequest
from diffulex.server.openai.response_schema import (
    AbortResponse,
    ModelCard,
    ModelList,
    StatusResponse,
    VersionResponse,
)
from diffulex.server.openai.responses_format import RESPONSE_PREFIX
from diffulex.serving.frontend import OperationFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from diffulex.server.http.app_options import AppContext
    from diffulex.wire.messages import ControlAction

__all__ = ["ADMIN_PATHS", "WEIGHT_PATHS", "package_version", "service_router"]

#: Routes that stop the server's work or change what it answers.
WEIGHT_PATHS = ("/pause", "/resume", "/update_weights", "/load_lora", "/unload_lora")
#: Routes for operators.
ADMIN_PATHS = ("/abort", "/flush_cache", "/start_profile", "/stop_profile", *WEIGHT_PATHS)

#: Keys of `/v1/models` that say how many devices serve.
_SIZES = (
    *("world_size", "tensor_parallel_size", "data_parallel_size"),
    "expert_parallel_size",
)
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Prefixes of the ids that clients see.
_ID_PREFIXES = ("chatcmpl-", "cmpl-", RESPONSE_PREFIX)


class _ServiceRoutes:
    """The handlers, over one application's context."""

    def __init__(self, context: AppContext) -> None:
        self._context = context

    # What is served.

    async def models(self) -> Response:
        """Answers `/v1/models`."""
        cards = [self._card(name) for name in self._context.model_names]
        return JSONBody({"object": "list", "data": cards})

    async def model(self, model_id: str) -> Response:
        """Answers `/v1/models/{id}`."""
        if model_id not in self._context.model_names:
            raise ApiError(
                404,
                f"model: expected one of {', '.join(self._context.model_names)}, got {model_id!r}",
                code="model_not_found",
                param="model",
            )
        return JSONBody(self._card(model_id))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._context.created,
            "owned_by": "diffulex",
            "root": self._context.root,
            "max_model_len": self._context.info.get("max_model_len"),
            **{name: self._context.info.get(name, 1) for name in _SIZES},
        }

    async def server_info(self) -> Response:
        """Answers `/server_info`."""
        return JSONBody(self._describe())

    async def get_server_info(self) -> Response:
        """Answers `/get_server_info`, the name that scripts for other servers know."""
        speed = float(self._context.frontend.stats.get("last_gen_throughput") or 0.0)
        return JSONBody(self._describe() | {"internal_states": [{"last_gen_throughput": speed}]})

    def _describe(self) -> dict[str, Any]:
        context = self._context
        return {
            "served_model_name": list(context.model_names),
            "state": state_name(context.frontend),
            "version": package_version(),
            **context.info,
            "server_args": dict(context.options.settings),
        }

    async def version(self) -> Response:
        """Answers `/version`."""
        info = self._context.info
        return JSONBody(
            {
                "version": package_version(),
                "extension_version": info.get("extension_version"),
                "cuda": str(info.get("device", "")).startswith("cuda"),
            }
        )

    # Health.

    async def health(self, request: Request) -> Response:
        """Answers `/health` and `/ready`: whether requests are served."""
        context = self._context
        degraded = list(context.frontend.degraded)
        wants_all = request.query_params.get("all") == "1"
        if context.frontend.is_healthy and not (degraded and wants_all):
            return JSONBody({"status": "ready"} | ({"degraded": degraded} if degraded else {}))
        state = "degraded" if context.frontend.is_healthy else state_name(context.frontend)
        failure = ApiError(
            503, f"server: expected the state ready, got {state}", code=STATE_CODES.get(state)
        )
        headers = {"Retry-After": str(context.retry_after_s)}
        body = failure.body() | {"status": state} | ({"degraded": degraded} if degraded else {})
        return JSONBody(body, status_code=503, headers=headers)

    async def live(self) -> Response:
        """Answers `/health/live`: the HTTP process runs."""
        return JSONBody({"status": "live"})

    async def ping(self) -> Response:
        """Answers `/ping`."""
        return Response(status_code=200)

    async def metrics(self) -> Response:
        """Answers `/metrics`."""
        assert self._context.metrics is not None
        return Response(self._context.metrics.text(), media_type=_METRICS_TYPE)

    # Administration.

    async def abort(self, payload: AbortRequest) -> Response:
        """Answers `/abort`: ends a request by its id, in the form of any route."""
        rid = payload.rid
        for prefix in _ID_PREFIXES:
            rid = rid.removeprefix(prefix)
        return JSONBody({"aborted": await self._context.live.abort(rid)})

    async def flush_cache(self) -> Response:
        """Answers `/flush_cache`."""
        data = await self._operate("flush_cache", self._context.frontend.flush_cache())
        return JSONBody({"status": "ok", **data})

    async def start_profile(
        self,
        request: Request,
        payload: ProfileRequest | None = Body(default=None),  # noqa: B008
    ) -> Response:
        """Answers `/start_profile`."""
        prefix = None if payload is None else payload.profile_prefix
        work = self._context.frontend.start_profile(prefix)
        data = await self._operate("start_profile", work)
        return JSONBody({"status": "ok", **data})

    async def stop_profile(self) -> Response:
        """Answers `/stop_profile`."""
        data = await self._operate("stop_profile", self._context.frontend.stop_profile())
        return JSONBody({"status": "ok", **data})

    async def pause(self) -> Response:
        """Answers `/pause`: requests keep their place and wait."""
        return await self._control("pause")

    async def resume(self) -> Response:
        """Answers `/resume`."""
        return await self._control("resume")

    async def update_weights(self, payload: WeightsRequest) -> Response:
        """Answers `/update_weights`: reads a checkpoint into the model that serves."""
        return await self._control("update_weights", payload.path)

    async def load_lora(self, payload: WeightsRequest) -> Response:
        """Answers `/load_lora`: merges an adapter into the weights."""
        return await self._control("load_lora", payload.path)

    async def unload_lora(self) -> Response:
        """Answers `/unload_lora`."""
        return await self._control("unload_lora")

    async def no_weights(self, request: Request) -> Response:
        """Answers the routes of weights where everybody could call them."""
        raise ApiError(
            404,
            f"{request.url.path}: expected --admin-api-key, --api-key or a loopback --host,"
            " got a server that is open to everybody",
        )

    async def _control(self, action: ControlAction, path: str | None = None) -> Response:
        data = await self._operate(action, self._context.frontend.control(action, path))
        return JSONBody({"status": "ok", **data})

    async def _operate(self, name: str, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
        """What an operation of the frontend answers: 409 when the engine refuses."""
        try:
            return await work
        except OperationFailed as error:
            raise ApiError(409, f"{name}: {error}") from error
        except RuntimeError as error:
            self._context.check_accepting()
            raise api_error_of(error, retry_after_s=self._context.retry_after_s) from error


def package_version() -> str:
    """Version of the installed package."""
    try:
        return version("diffulex")
    except PackageNotFoundError:  # an uninstalled checkout
        return "unknown"


def service_router(context: AppContext) -> APIRouter:
    """Everything that neither generates nor tokenises."""
    routes, options = _ServiceRoutes(context), context.options
    router = APIRouter(route_class=BodyRoute)

    def add(path: str, endpoint: Any, model: Any, tag: str, *statuses: int, **more: Any) -> None:
        responses = error_responses(*statuses)
        if model is not None:
            responses[200] = {"model": model}
        more.setdefault("methods", ["GET"])
        summary = endpoint.__doc__.split(":")[-1].strip().rstrip(".").removeprefix("Answers ")
        router.add_api_route(
            path,
            endpoint,
            response_model=None,
            responses=responses,
            summary=summary.replace("`", ""),
            tags=[tag],
            **more,
        )

    add("/v1/models", routes.models, ModelList, "models")
    add("/v1/models/{model_id:path}", routes.model, ModelCard, "models", 400, 404)
    add("/server_info", routes.server_info, None, "service")
    add("/get_server_info", routes.get_server_info, None, "service")
    add("/version", routes.version, VersionResponse, "service")
    add("/health", routes.health, StatusResponse, "service", 503)
    add("/ready", routes.health, StatusResponse, "service", 503)
    add("/health/live", routes.live, StatusResponse, "service")
    add("/ping", routes.ping, None, "service", response_class=Response)
    if context.metrics is not None and options.metrics_port is None:
        add("/metrics", routes.metrics, None, "service", response_class=PlainTextResponse)
    if not options.disable_admin_routes:
        post = {"methods": ["POST"]}
        add("/abort", routes.abort, AbortResponse, "admin", 400, 413, 415, 503, **post)
        statuses = (400, 409, 413, 415, 503)
        add("/flush_cache", routes.flush_cache, StatusResponse, "admin", *statuses, **post)
        add("/start_profile", routes.start_profile, StatusResponse, "admin", *statuses, **post)
        add("/stop_profile", routes.stop_profile, StatusResponse, "admin", *statuses, **post)
        for path in WEIGHT_PATHS:
            if options.has_weight_routes:
                route = getattr(routes, path[1:])
                add(path, route, StatusResponse, "admin", *statuses, **post)
            else:
                router.add_api_route(
                    path, routes.no_weights, include_in_schema=False, methods=["POST"]
                )
    return router
