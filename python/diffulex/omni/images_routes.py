# SPDX-License-Identifier: Apache-2.0
"""The images API of OpenAI over the image engine: pictures, and previews as they are drawn.

Edits take the same fields, in a form with the pictures.
"""

from __future__ import annotations

import asyncio
import base64
import io
import re
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from diffulex.errors import ConfigError
from diffulex.log import get_logger
from diffulex.omni.api_schema import (
    MAX_HTTP_STEPS,
    NUMBERS,
    SIZE_PATTERN,
    TEXT_PATTERN,
    WHOLE,
    CacheFields,
    form_body,
    image_responses,
)
from diffulex.omni.async_omni_diffusion import AsyncOmniDiffusion, Progress
from diffulex.omni.cache.choice import CACHE_SETTINGS
from diffulex.omni.errors import (
    OmniError,
    QueueFull,
    RequestAborted,
    RequestTimeout,
    WorkerDeadError,
)
from diffulex.omni.forms import read_form
from diffulex.omni.images_metrics import ImagesMetrics
from diffulex.omni.outputs import OmniRequestOutput
from diffulex.omni.pictures import as_rgb, read_picture, steps_run
from diffulex.omni.request import MAX_SEED
from diffulex.server.http.api_errors import ApiError
from diffulex.server.http.disconnect import ClientLeftError, run_while_connected
from diffulex.server.http.json_response import JSONBody
from diffulex.server.http.sse import DONE, EventStream, sse

__all__ = [
    "EditRequest",
    "ImageRequest",
    "Size",
    "as_failure",
    "check_model",
    "create_images_router",
    "parse_size",
]

logger = get_logger(__name__)

_MAX_N = 10
_SCALE = Field(default=None, ge=0, le=20)
_CLIENT_CLOSED = 499
Size = Annotated[
    str | None,
    Field(description="WIDTHxHEIGHT, or auto.", json_schema_extra={"pattern": SIZE_PATTERN}),
]
#: Streams draw one image, and nothing else has previews.
_STREAM_RULE: list[JsonValue] = [
    {"properties": {"stream": {"const": True}, "n": {"const": 1}}, "required": ["stream"]},
    {
        "properties": {
            "stream": {"enum": [False, None]},
            "partial_images": {"enum": [0, None]},
            "diffulex": {"properties": {"preview_every": {"type": "null"}}},
        }
    },
]
#: Fields of bodies by those of the engine's requests, which its errors begin with, where they differ.
_PARAMS = {"height": "size", "width": "size", "num_outputs_per_prompt": "n"}
#: What bodies may have in place of a field.
_STAND_INS = {"num_frames": "seconds", "num_inference_steps": "sigmas"}
_PICTURE = "image"
#: What an error of the engine means for its client; the first that fits.
_STATUS: tuple[tuple[type[BaseException], int], ...] = (
    (QueueFull, 429),
    (RequestTimeout, 504),
    (WorkerDeadError, 503),
    (RequestAborted, 503),
    (ConfigError, 400),
    (ValueError, 400),
    (OmniError, 500),
)


class PreviewOptions(BaseModel):
    """Extension: previews of a stream without the limit of three."""

    model_config = ConfigDict(extra="forbid", strict=True)
    preview_every: Annotated[
        Annotated[int, Field(ge=1), WHOLE] | None, Field(description="Steps between previews.")
    ] = None


class ImageRequest(CacheFields):
    """Body of a request for images; what is left open takes the model's default."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"anyOf": _STREAM_RULE}
    )
    prompt: str = Field(max_length=32_000, json_schema_extra={"pattern": TEXT_PATTERN})
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_N), WHOLE] = 1
    size: Size = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    quality: Literal["auto"] | None = None
    background: Literal["auto", "opaque"] | None = None
    user: str | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3), WHOLE] | None = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int, Field(ge=1, le=MAX_HTTP_STEPS), WHOLE] | None = None
    sigmas: (
        Annotated[
            list[Annotated[float, Field(gt=0, le=1)]],
            Field(
                min_length=1,
                max_length=MAX_HTTP_STEPS,
                description="Noise left before each step, falling; as many as there are steps.",
            ),
            NUMBERS,
        ]
        | None
    ) = None
    guidance_scale: Annotated[float | None, _SCALE] = None
    true_cfg_scale: Annotated[float | None, _SCALE] = None
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED), WHOLE] | None = None
    timeout_s: float | None = Field(default=None, gt=0)
    diffulex: PreviewOptions = PreviewOptions()

    def fields(self) -> dict[str, Any]:
        """Fields of the engine's request.

        Raises:
            ApiError: the size is none.
        """
        names = (
            "negative_prompt",
            "num_inference_steps",
            "sigmas",
            "guidance_scale",
            "true_cfg_scale",
            "seed",
            "timeout_s",
            "cache_backend",
            "cache_config",
        )
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        given |= parse_size(self.size)
        return {**given, "num_outputs_per_prompt": self.n, "output_type": "pil"}


class EditRequest(ImageRequest):
    """Fields of a form for edits, beside the pictures."""

    strength: float | None = Field(default=None, gt=0, le=1)

    def fields(self) -> dict[str, Any]:
        given = super().fields()
        return given if self.strength is None else {**given, "strength": self.strength}


def parse_size(size: str | None) -> dict[str, int]:
    """`width` and `height` of WIDTHxHEIGHT; of auto and None nothing.

    Raises:
        ApiError: it is none of these.
    """
    if size is None or size == "auto":
        return {}
    if re.fullmatch(SIZE_PATTERN, size) is None:
        raise ApiError(400, f"size: expected WIDTHxHEIGHT or auto, got {size!r}", param="size")
    width, _, height = size.partition("x")
    return {"width": int(width), "height": int(height)}


def check_model(model: str | None, served_names: tuple[str, ...]) -> None:
    """Raises ApiError 404 where a request names another model."""
    if model is not None and model not in served_names:
        names = ", ".join(served_names)
        message = f"model: expected one of {names}, got {model!r}"
        raise ApiError(404, message, code="model_not_found", param="model")


class _Draw(NamedTuple):
    """A request on its way to the engine. `kind`: of the events of its stream."""

    body: ImageRequest
    fields: dict[str, Any]
    kind: str

    def failure(self, error: Exception, metrics: ImagesMetrics) -> ApiError:
        """As `as_failure`."""
        return as_failure(
            error, metrics, self.body, _PICTURE if "pil_image" in self.fields else None
        )


def create_images_router(
    engine: AsyncOmniDiffusion, served_names: tuple[str, ...], metrics: ImagesMetrics
) -> APIRouter:
    """`/v1/images/generations` and `/v1/images/edits` over an engine.

    Args:
        engine: draws images.
        served_names: what `model` may be.
        metrics: counts what happens.
    """
    router = APIRouter()
    takes = engine.engine.spec.image_input
    form = form_body(EditRequest, {_PICTURE: 0 if takes is None else takes.most})

    @router.post("/v1/images/generations", responses=image_responses("image_generation"))
    async def generate(body: ImageRequest, request: Request) -> Response:
        """Draws a prompt; with `stream` its previews come as events."""
        _check_body(body, served_names)
        draw = _Draw(body, body.fields(), "image_generation")
        return await _answer(engine, draw, request, metrics)

    @router.post(
        "/v1/images/edits",
        responses=image_responses("image_edit"),
        openapi_extra={"requestBody": form},
    )
    async def edit(request: Request) -> Response:
        """Changes pictures as a prompt says; with `stream` its previews come as events."""
        try:
            body, pictures = await _read_edit(engine, request, served_names)
        except OmniError as error:
            raise as_failure(error, metrics, None, _PICTURE) from error
        draw = _Draw(body, {**body.fields(), "pil_image": pictures}, "image_edit")
        return await _answer(engine, draw, request, metrics)

    return router


def _check_body(body: ImageRequest, served_names: tuple[str, ...]) -> None:
    """What takes neither the pictures nor the engine. Raises ApiError."""
    check_model(body.model, served_names)
    if not body.stream and (body.partial_images or body.diffulex.preview_every):
        message = "partial_images: expected stream true with previews, got false"
        raise ApiError(400, message, param="partial_images")
    if body.stream and body.n > 1:
        raise ApiError(400, f"n: expected 1 with stream, got {body.n}", param="n")


async def _read_edit(
    engine: AsyncOmniDiffusion, request: Request, served_names: tuple[str, ...]
) -> tuple[EditRequest, list[Any]]:
    """The fields and the pictures of a form. Raises: ApiError, QueueFull, RequestError."""
    takes = engine.engine.spec.image_input
    if takes is None:
        name = engine.engine.spec.name
        raise ApiError(400, f"edits: expected a pipeline that changes pictures, got {name}")
    engine.check_room()  # a full server reads no upload
    body, files = await read_form(request, EditRequest, {_PICTURE: takes.most})
    _check_body(body, served_names)
    most = engine.config.engine.max_pixels

    def read() -> list[Any]:
        return [read_picture(data, _PICTURE, most, takes.mode) for data in files.get(_PICTURE, ())]

    with engine.reserve():
        pictures = await asyncio.to_thread(read)
    if not pictures:
        raise ApiError(400, f"{_PICTURE}: expected a picture, got none", param=_PICTURE)
    return body, pictures


async def _answer(
    engine: AsyncOmniDiffusion, draw: _Draw, request: Request, metrics: ImagesMetrics
) -> Response:
    """The images, in one piece or as a stream."""
    body = draw.body
    if body.stream:
        return await _stream(engine, draw, request, metrics)
    try:
        output = await run_while_connected(
            request.receive, lambda _: engine.generate(body.prompt, **draw.fields)
        )
    except ClientLeftError:
        metrics.failed(_CLIENT_CLOSED)
        return Response(status_code=_CLIENT_CLOSED)
    except Exception as error:
        raise draw.failure(error, metrics) from error
    metrics.succeeded(output)
    data = await asyncio.to_thread(
        lambda: [_encode(image, body.output_format) for image in output.images]
    )
    return JSONBody(
        {
            "created": int(time.time()),
            "data": [{"b64_json": text} for text in data],
            "output_format": body.output_format,
            "size": _size(output),
            "diffulex": dict(output.metrics),
        }
    )


async def _stream(
    engine: AsyncOmniDiffusion, draw: _Draw, request: Request, metrics: ImagesMetrics
) -> Response:
    """The events; what fails before the first step is an ordinary answer."""
    body = draw.body
    values = {**engine.engine.defaults, **draw.fields}
    all_steps = len(values.get("sigmas", ())) or values["num_inference_steps"]
    num_steps = max(1, steps_run(all_steps, values.get("strength")))
    every, most = body.diffulex.preview_every, None
    if every is None and body.partial_images:
        every, most = -(-num_steps // (body.partial_images + 1)), body.partial_images
    events = engine.generate_stream(body.prompt, preview_every=every, **draw.fields)

    async def first_event(_: Any) -> Progress | OmniRequestOutput:
        return await anext(events)

    try:
        first = await run_while_connected(request.receive, first_event)
    except ClientLeftError:
        metrics.failed(_CLIENT_CLOSED)
        return Response(status_code=_CLIENT_CLOSED)
    except Exception as error:
        raise draw.failure(error, metrics) from error
    frames = _frames(first, events, draw, most, metrics)

    def count(is_sent: bool) -> None:
        if not is_sent:
            metrics.failed(_CLIENT_CLOSED)

    return EventStream(frames, headers={}, on_end=count)


async def _frames(
    first: Progress | OmniRequestOutput,
    events: AsyncGenerator[Progress | OmniRequestOutput, None],
    draw: _Draw,
    most: int | None,
    metrics: ImagesMetrics,
) -> AsyncGenerator[bytes, None]:
    number, output_format = 0, draw.body.output_format
    common = {"background": "opaque", "quality": "auto", "output_format": output_format}
    try:
        event: Progress | OmniRequestOutput | None = first
        while event is not None:
            if isinstance(event, OmniRequestOutput):
                # Several of the one image where it has layers.
                pictures, kind = event.images, f"{draw.kind}.completed"
                more: dict[str, Any] = {"diffulex": dict(event.metrics)}
                metrics.succeeded(event)
            elif event.previews and (most is None or number < most):
                pictures, kind = event.previews[:1], f"{draw.kind}.partial_image"
                steps = {"step": event.step, "num_steps": event.num_steps}
                more = {"partial_image_index": number, "diffulex": steps}
                number += 1
            else:
                event = await anext(events, None)
                continue
            for picture in pictures:
                text, size = await asyncio.to_thread(_encode, picture, output_format), picture.size
                shown = {"type": kind, "b64_json": text, "created_at": int(time.time())}
                shown["size"] = "x".join(map(str, size))
                yield sse({**shown, **common, **more}, event=kind)
            event = await anext(events, None)
    except Exception as error:
        yield sse(draw.failure(error, metrics).body(), event="error")
    finally:
        # A client that has left takes its request along.
        await events.aclose()
    yield DONE


def _encode(picture: Any, output_format: str) -> str:
    """A PIL image as base64 of a file."""
    if output_format == "jpeg":
        picture = as_rgb(picture)
    file = io.BytesIO()
    picture.save(file, output_format.upper())
    return base64.b64encode(file.getvalue()).decode("ascii")


def _size(output: OmniRequestOutput) -> str:
    return f"{output.metrics['width']}x{output.metrics['height']}"


def as_failure(
    error: Exception,
    metrics: ImagesMetrics,
    body: CacheFields | None = None,
    picture: str | None = None,
) -> ApiError:
    """What an error of the engine is for its client; it is counted.

    Args:
        error: that was raised.
        metrics: counts it.
        body: of the request, one of whose fields it may name.
        picture: field with the pictures of a form.
    """
    failure = _as_api_error(error)
    if failure.status == 400 and failure.param is None:
        failure.param = _param_of(str(error), body, picture)
    metrics.failed(failure.status)
    return failure


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    for kind, status in _STATUS:
        if isinstance(error, kind):
            if status == 500:
                logger.error("request failed: %s\n%s", error, getattr(error, "trace", ""))
            return ApiError(status, str(error))
    logger.error("request failed", exc_info=error)
    return ApiError(500, "internal error, see the log", code="internal_error")


def _param_of(message: str, body: CacheFields | None, picture: str | None) -> str | None:
    """The field that an error begins with, as its client calls it; None: it has no such field."""
    found = re.match(r"(\w+)(?: \+ \w+)*: ", message)
    name = found[1] if found else ""
    if name in ("pil_image", picture):
        return picture
    if body is None:
        return None
    if name in CACHE_SETTINGS:
        # Of a request without a cache they are those of the engine.
        has_cache = body.cache_backend is not None or body.cache_config is not None
        return "cache_config" if has_cache else None
    name = _PARAMS.get(name, name)
    other = _STAND_INS.get(name, "")
    if getattr(body, name, None) is None and getattr(body, other, None) is not None:
        name = other
    return name if name in type(body).model_fields else None
