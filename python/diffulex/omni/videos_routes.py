# SPDX-License-Identifier: Apache-2.0
"""The videos API of OpenAI over the engine: jobs that are started, looked at, downloaded and deleted."""

from __future__ import annotations

import asyncio
import re
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from starlette.types import Receive, Scope, Send

from diffulex.omni.api_schema import (
    MAX_HTTP_STEPS,
    TEXT_PATTERN,
    WHOLE,
    CacheFields,
    VideoDeletedResponse,
    VideoListResponse,
    VideoResponse,
    form_body,
)
from diffulex.omni.async_omni_diffusion import AsyncOmniDiffusion, Progress
from diffulex.omni.errors import OmniError
from diffulex.omni.forms import read_form
from diffulex.omni.images_metrics import ImagesMetrics
from diffulex.omni.images_routes import Size, as_failure, check_model, parse_size
from diffulex.omni.mp4 import save_video
from diffulex.omni.outputs import OmniRequestOutput
from diffulex.omni.pictures import read_picture
from diffulex.omni.request import MAX_SEED
from diffulex.server.http.api_errors import CLIENT_CLOSED, ApiError
from diffulex.server.http.error_schema import error_responses
from diffulex.server.http.json_response import JSONBody

__all__ = ["VideoJobs", "VideoRequest", "create_videos_router"]

_MAX_FRAMES = 1025
_SCALE = Field(default=None, ge=0, le=20)
#: Finished videos that are kept, and for how long.
_MAX_KEPT, _KEPT_S = 32, 3600
#: OpenAI's clients write seconds as a text.
_SECONDS_PATTERN = (
    r"^(0\.[0-9]{0,5}[1-9]|[1-9][0-9]?(\.[0-9]{1,6})?|[1-5][0-9]{2}(\.[0-9]{1,6})?|600)$"
)
_MAX_SECONDS = 600


def _as_number(value: object) -> object:
    is_text = isinstance(value, str) and re.fullmatch(_SECONDS_PATTERN, value) is not None
    return float(value) if is_text else value  # type: ignore[arg-type]


_Seconds = Annotated[
    float,
    Field(gt=0, le=_MAX_SECONDS),
    BeforeValidator(_as_number),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": _MAX_SECONDS},
                {"type": "string", "pattern": _SECONDS_PATTERN},
            ]
        }
    ),
]
#: OpenAI's name of the file that a video begins with.
_PICTURE = "input_reference"
_STOPPING = "videos: expected a running server, got one that ends"


class VideoRequest(CacheFields):
    """Fields of a request for a video; what is left open takes the model's default."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "anyOf": [
                {"properties": {name: {"type": "null"}}} for name in ("seconds", "num_frames")
            ]
        },
    )
    prompt: str = Field(max_length=32_000, json_schema_extra={"pattern": TEXT_PATTERN})
    model: str | None = None
    size: Size = None
    seconds: _Seconds | None = None
    fps: float = Field(default=16, ge=1, le=120)
    num_frames: Annotated[int, Field(ge=1, le=_MAX_FRAMES), WHOLE] | None = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int, Field(ge=1, le=MAX_HTTP_STEPS), WHOLE] | None = None
    guidance_scale: Annotated[float | None, _SCALE] = None
    guidance_scale_2: Annotated[float | None, _SCALE] = None
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED), WHOLE] | None = None

    def fields(self, frame_multiple: int) -> dict[str, Any]:
        """Fields of the engine's request.

        Args:
            frame_multiple: a video has a multiple of it plus 1 frames; `seconds` is rounded to that.

        Raises:
            ApiError: the size is none, or the video is too long.
        """
        own = {"prompt", "model", "size", "seconds", "fps"}
        given = self.model_dump(exclude=own, exclude_none=True)
        if self.seconds is not None:
            if self.num_frames is not None:
                raise ApiError(
                    400, "seconds: expected no num_frames with it, got both", param="seconds"
                )
            frames = round(self.seconds * self.fps / frame_multiple) * frame_multiple + 1
            if frames > _MAX_FRAMES:
                message = f"seconds: expected at most {_MAX_FRAMES} frames, got {frames}"
                raise ApiError(400, message, param="seconds")
            given["num_frames"] = frames
        return {**given, **parse_size(self.size), "output_type": "pil"}


@dataclass(eq=False)
class _Job:
    """A video, before, while and after it is drawn."""

    body: VideoRequest
    values: dict[str, Any]
    id: str = field(default_factory=lambda: f"video_{secrets.token_hex(12)}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    status: Literal["queued", "in_progress", "completed", "failed"] = "queued"
    progress: int = 0
    completed_at: int | None = None
    error: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    num_bytes: int = 0
    is_fetched: bool = False
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed")

    def shown(self, model: str) -> dict[str, Any]:
        """The object of the API."""
        values, ended = self.values, self.completed_at
        return {
            "id": self.id,
            "object": "video",
            "created_at": self.created_at,
            "completed_at": ended,
            "expires_at": None if ended is None else ended + _KEPT_S,
            "status": self.status,
            "progress": self.progress,
            "model": self.body.model or model,
            "prompt": self.body.prompt,
            "seconds": f"{values['num_frames'] / self.body.fps:g}",
            "size": f"{values['width']}x{values['height']}",
            "error": self.error,
            "remixed_from_video_id": None,
            "diffulex": self.metrics,
        }


class VideoJobs:
    """The videos of a server; their files are in a directory of its own, which `close` removes.

    Args:
        engine: draws them.
        metrics: counts what happens.
    """

    def __init__(self, engine: AsyncOmniDiffusion, metrics: ImagesMetrics) -> None:
        self._engine = engine
        self.metrics = metrics
        #: That are still waited for when the server ends; None before it is told to.
        self._last: list[_Job] | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="diffulex-videos-")
        self._jobs: dict[str, _Job] = {}
        #: Those of them that are over; who ended first comes first.
        self._kept: list[_Job] = []

    def start(self, body: VideoRequest, pictures: Sequence[Any] | None = None) -> _Job:
        """Puts a request in line.

        Args:
            body: of the request.
            pictures: that the video begins with; None: the request is no form.

        Raises:
            ApiError: it does not fit the model, too many wait, or the server ends.
        """
        if self._last is not None:
            raise ApiError(503, _STOPPING)
        engine = self._engine.engine
        fields = body.fields(engine.spec.frame_multiple)
        if pictures:
            fields["pil_image"] = list(pictures)
        try:
            job = _Job(body, {**engine.defaults, **engine.size_of(fields), **fields})
            events = self._engine.start(body.prompt, request_id=job.id, **fields)
        except Exception as error:
            picture = None if pictures is None else _PICTURE
            raise as_failure(error, self.metrics, body, picture) from error
        self._jobs[job.id] = job
        job.task = asyncio.create_task(self._draw(job, events))
        return job

    def all(self) -> list[_Job]:
        """The oldest first."""
        return list(self._jobs.values())

    def get(self, video_id: str) -> _Job:
        """Raises ApiError 404 where there is none."""
        if video_id not in self._jobs:
            raise ApiError(404, f"video: expected a known one, got {video_id!r}", param="video_id")
        return self._jobs[video_id]

    def path(self, job: _Job) -> Path:
        """Its file, once it is completed."""
        return Path(self._directory.name, f"{job.id}.mp4")

    async def remove(self, video_id: str) -> None:
        """Stops a video that is not over, and forgets it. Raises: as `get`."""
        job = self.get(video_id)
        del self._jobs[video_id]
        await self._stop(job)
        self._drop(job)

    def end(self) -> None:
        """From now on none is started; those that are not over are waited for."""
        if self._last is None:
            self._last = [job for job in self._jobs.values() if not job.is_over]

    @property
    def is_ending(self) -> bool:
        """Whether `end` was called."""
        return self._last is not None

    @property
    def has_ended(self) -> bool:
        """Whether those that `end` waits for have failed, were fetched, or are forgotten."""
        return self._last is not None and all(
            job.id not in self._jobs or job.status == "failed" or job.is_fetched
            for job in self._last
        )

    async def close(self) -> None:
        """Stops all and removes their files. May be called again."""
        while self._jobs:  # a request that comes meanwhile may add one
            job = self._jobs.popitem()[1]
            await self._stop(job)
            self._drop(job)
        self._directory.cleanup()

    async def _stop(self, job: _Job) -> None:
        assert job.task is not None
        if not job.is_over:
            self.metrics.failed(CLIENT_CLOSED)
            # Also of a task that has not begun yet, which would not do it itself.
            await self._engine.abort(job.id)
        job.task.cancel()
        with suppress(asyncio.CancelledError):
            await job.task

    def _keep(self, job: _Job) -> None:
        """Of a job that is over: until its time is up, or newer ones need its place."""
        job.timer = asyncio.get_running_loop().call_later(_KEPT_S, self._forget, job)
        self._kept.append(job)
        most = self._engine.config.engine.max_video_bytes
        while len(self._kept) > _MAX_KEPT or sum(kept.num_bytes for kept in self._kept) > most:
            self._forget(self._kept[0])

    def _forget(self, job: _Job) -> None:
        self._jobs.pop(job.id, None)
        self._drop(job)

    def _drop(self, job: _Job) -> None:
        """Of a job that is not listed any more."""
        if job.timer is not None:
            job.timer.cancel()
            self._kept.remove(job)
        self.path(job).unlink(missing_ok=True)

    async def _draw(
        self, job: _Job, events: AsyncGenerator[Progress | OmniRequestOutput, None]
    ) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Progress):
                        job.status = "in_progress"
                        job.progress = min(99, 100 * event.step // event.num_steps)
                        continue
                    frames, path = event.images[0], self.path(job)
                    await _finished(asyncio.to_thread(save_video, path, frames, job.body.fps))
                    self._check_bytes(job)
                    self.metrics.succeeded(event)
                    job.metrics = dict(event.metrics)
            job.status, job.progress = "completed", 100
        except Exception as error:
            failure = as_failure(error, self.metrics)
            job.error = {"code": failure.body()["error"]["code"], "message": str(failure)}
            job.status, job.num_bytes = "failed", 0
            self.path(job).unlink(missing_ok=True)
        job.completed_at = int(time.time())
        self._keep(job)

    def _check_bytes(self, job: _Job) -> None:
        """Raises ApiError 507 where its file alone is more than may be kept."""
        most = self._engine.config.engine.max_video_bytes
        job.num_bytes = self.path(job).stat().st_size
        if job.num_bytes > most:
            raise ApiError(
                507, f"video: expected at most {most} bytes (max_video_bytes), got {job.num_bytes}"
            )


async def _finished(work: Coroutine[Any, Any, None]) -> None:
    """Waits for it also when this task is cancelled: a file is whole before it is removed."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def create_videos_router(
    engine: AsyncOmniDiffusion, served_names: tuple[str, ...], jobs: VideoJobs
) -> APIRouter:
    """`/v1/videos` over an engine.

    Args:
        engine: draws videos.
        served_names: what `model` may be.
        jobs: keeps them.
    """
    router = APIRouter()

    @router.post(
        "/v1/videos",
        responses=_responses(VideoResponse, 400, 404, 413, 415, 429, 503),
        openapi_extra={"requestBody": _body_schema(_files(engine))},
    )
    async def create(request: Request) -> Response:
        """Starts a video; a form, as clients of OpenAI send it, or JSON."""
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() == "multipart/form-data":
            body, pictures = await _read_video(engine, request, jobs)
        else:
            body, pictures = await _read_json(request), None
        check_model(body.model, served_names)
        return JSONBody(jobs.start(body, pictures).shown(served_names[0]))

    @router.get("/v1/videos", responses=_responses(VideoListResponse, 400, 404))
    async def list_all(
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """The videos that are kept."""
        found = jobs.all()
        if order == "desc":
            found.reverse()
        if after is not None:
            found = found[found.index(jobs.get(after)) + 1 :]
        data = [job.shown(served_names[0]) for job in found[:limit]]
        ids = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return JSONBody({"object": "list", "data": data, "has_more": len(found) > limit, **ids})

    @router.get("/v1/videos/{video_id}", responses=_responses(VideoResponse, 404))
    async def retrieve(video_id: str) -> Response:
        """How far a video is."""
        return JSONBody(jobs.get(video_id).shown(served_names[0]))

    @router.delete("/v1/videos/{video_id}", responses=_responses(VideoDeletedResponse, 404))
    async def delete(video_id: str) -> Response:
        """Stops a video, or forgets a finished one."""
        await jobs.remove(video_id)
        return JSONBody({"id": video_id, "object": "video.deleted", "deleted": True})

    @router.get(
        "/v1/videos/{video_id}/content",
        response_class=FileResponse,
        responses={200: {"content": {"video/mp4": {}}}, **error_responses(400, 404, 409)},
    )
    async def content(video_id: str, variant: Literal["video"] = "video") -> Response:
        """The file of a completed video."""
        job = jobs.get(video_id)
        if job.status != "completed":
            raise ApiError(409, f"video: expected a completed one, got one that is {job.status}")
        return _Content(job, jobs.path(job))

    return router


class _Content(FileResponse):
    """A file that counts as fetched when all of it was sent."""

    def __init__(self, job: _Job, path: Path) -> None:
        super().__init__(path, media_type="video/mp4", filename=f"{job.id}.mp4")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        self._job.is_fetched = True


def _responses(model: type[BaseModel], *failures: int) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": model}, **error_responses(*failures)}


def _files(engine: AsyncOmniDiffusion) -> dict[str, int]:
    """Files of a form: the picture that a video begins with, where the pipeline takes one."""
    takes = engine.engine.spec.image_input
    return {} if takes is None else {_PICTURE: takes.most}


async def _read_video(
    engine: AsyncOmniDiffusion, request: Request, jobs: VideoJobs
) -> tuple[VideoRequest, list[Any]]:
    """The fields and the pictures of a form. Raises: ApiError."""
    takes = engine.engine.spec.image_input
    files = _files(engine)
    if takes is None:
        return (await read_form(request, VideoRequest, files))[0], []
    try:
        engine.check_room()  # a full server reads no upload
        body, found = await read_form(request, VideoRequest, files)
        most = engine.config.engine.max_pixels
        with engine.reserve():
            pictures = [
                await asyncio.to_thread(read_picture, data, _PICTURE, most, takes.mode)
                for data in found.get(_PICTURE, ())
            ]
    except OmniError as error:
        raise as_failure(error, jobs.metrics, None, _PICTURE) from error
    return body, pictures


def _body_schema(files: dict[str, int]) -> dict[str, Any]:
    body = form_body(VideoRequest, files)
    body["content"]["application/json"] = {"schema": VideoRequest.model_json_schema()}
    return body


async def _read_json(request: Request) -> VideoRequest:
    try:
        return VideoRequest.model_validate_json(await request.body())
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
