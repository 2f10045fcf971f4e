# SPDX-License-Identifier: Apache-2.0
"""`GET /replicas`, and the routes with which an operator drains, resumes and restarts one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from diffulex.server.http.api_errors import ApiError
from diffulex.server.http.error_schema import error_responses
from diffulex.server.http.json_response import JSONBody
from diffulex.server.http.large_bodies import BodyRoute
from diffulex.serving.replicas.group import GroupBusyError

if TYPE_CHECKING:
    from starlette.responses import Response

    from diffulex.serving.replicas.frontend import ReplicaFrontend
    from diffulex.serving.replicas.group import ReplicaGroup

__all__ = ["replica_admin_paths", "replica_router"]

_VERBS = ("drain", "resume", "restart")


def replica_admin_paths(frontend: ReplicaFrontend) -> tuple[str, ...]:
    """Paths of the routes for operators."""
    count = len(frontend.managers)
    return tuple(f"/replicas/{index}/{verb}" for index in range(count) for verb in _VERBS)


class _ReplicaRoutes:
    """The handlers, over one frontend."""

    def __init__(self, frontend: ReplicaFrontend) -> None:
        self._frontend = frontend

    async def replicas(self) -> Response:
        """Answers `/replicas`: state, load, pages, cache hits and devices of each replica."""
        frontend = self._frontend
        return JSONBody({"policy": frontend.router.policy, "replicas": frontend.rows()})

    async def drain(self, index: str) -> Response:
        """Answers `/replicas/{index}/drain`: it gets no more requests."""
        number, group = self._place(index)
        group.hold(number)
        return self._row(number)

    async def resume(self, index: str) -> Response:
        """Answers `/replicas/{index}/resume`: it gets requests again."""
        number, group = self._place(index)
        try:
            group.release(number)
        except GroupBusyError as error:
            raise ApiError(409, str(error)) from error
        return self._row(number)

    async def restart(self, index: str) -> Response:
        """Answers `/replicas/{index}/restart`: begins to drain it, then starts it again."""
        number, group = self._place(index)
        try:
            group.roll([number])
        except GroupBusyError as error:
            raise ApiError(409, str(error)) from error
        return self._row(number)

    def _place(self, index: str) -> tuple[int, ReplicaGroup]:
        count, group = len(self._frontend.managers), self._frontend.group
        if not index.isdecimal() or int(index) >= count:
            raise ApiError(404, f"replica: expected a number below {count}, got {index!r}")
        if group is None:
            raise ApiError(503, "replicas: expected a server that starts them, got another one")
        return int(index), group

    def _row(self, index: int) -> Response:
        return JSONBody(self._frontend.rows()[index])


def replica_router(frontend: ReplicaFrontend, *, has_admin_routes: bool) -> APIRouter:
    """The routes of a server with several replicas."""
    routes = _ReplicaRoutes(frontend)
    router = APIRouter(route_class=BodyRoute)
    common: dict[str, Any] = {"response_model": None}
    router.add_api_route(
        "/replicas", routes.replicas, summary="Replicas and their load", tags=["service"], **common
    )
    if has_admin_routes:
        for verb in _VERBS:
            router.add_api_route(
                f"/replicas/{{index}}/{verb}",
                getattr(routes, verb),
                methods=["POST"],
                summary=f"{verb.capitalize()} a replica",
                tags=["admin"],
                responses=error_responses(404, 409, 503),
                **common,
            )
    return router
