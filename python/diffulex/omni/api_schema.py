# SPDX-License-Identifier: Apache-2.0
"""Bodies of the responses of an image or video server, as its OpenAPI document describes them.

The routes build plain maps; these classes are the description that clients and tests read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    WithJsonSchema,
)

from diffulex.omni.cache.choice import cache_schema
from diffulex.omni.cache.selector import NO_CACHE
from diffulex.server.http.error_schema import declare_errors, error_responses

__all__ = [
    "FORM",
    "MAX_HTTP_STEPS",
    "NUMBERS",
    "SIZE_PATTERN",
    "TEXT_PATTERN",
    "WHOLE",
    "CacheFields",
    "DiffusionModelList",
    "HealthResponse",
    "ImagesResponse",
    "ServerInfoResponse",
    "VideoDeletedResponse",
    "VideoListResponse",
    "VideoResponse",
    "declare_security",
    "form_body",
    "image_responses",
    "item_name",
    "limit_requests",
]

#: WIDTHxHEIGHT, or auto.
SIZE_PATTERN = "^(auto|[1-9][0-9]{0,5}x[1-9][0-9]{0,5})$"
#: A text with something that `str.strip` leaves.
TEXT_PATTERN = (
    r"[^\u0009-\u000d\u001c-\u0020\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
)
_SCHEMAS = "#/components/schemas/"
_OutputFormat = Literal["png", "jpeg", "webp"]


def _whole(value: object, info: ValidationInfo) -> object:
    is_text = isinstance(value, str) and re.fullmatch("-?[0-9]{1,20}", value) is not None
    if (is_text and info.context is FORM) or (isinstance(value, float) and value.is_integer()):
        return int(value)  # type: ignore[call-overload]
    return value


def _numbers(value: object, info: ValidationInfo) -> object:
    items = _items(value) if info.context is FORM else None
    return value if items is None else [_as_number(text) for text in items]


def _items(value: object) -> list[str] | None:
    """Texts of a list, whose fields of a form have names that `item_name` gives; else None."""
    if not isinstance(value, Mapping) or [*value] != [item_name(i) for i in range(len(value))]:
        return None
    return [*value.values()]


def _as_number(text: str) -> float | str:
    """A text that is none stays, and is refused with its place."""
    with suppress(ValueError):
        return float(text)
    return text


def _settings(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, Mapping):
        return value
    if info.context is not FORM:
        return {name: _with_integers(item) for name, item in value.items()}
    found = {}
    for name, text in value.items():
        items = _items(text)
        found[name] = _read(text) if items is None else [_read(item) for item in items]
    return {name: _with_integers(item) for name, item in found.items()}


def _read(text: object) -> object:
    """What a text says in JSON; one that is none is a text without quotes."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)  # type: ignore[arg-type]
    return text


def _with_integers(value: object) -> object:
    """Settings are numbers, texts and flat lists of them: what is deeper is refused as it is."""
    return [_as_integer(item) for item in value] if isinstance(value, list) else _as_integer(value)


def _as_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: Of a validation: fields are texts.
FORM: dict[str, Any] = {}
#: Of a request, and so of its schedule and of what a cache is told about each step.
MAX_HTTP_STEPS = 200


def item_name(place: int) -> str:
    """Key of an item of a list in a form; no part of an object is called so."""
    return f"[{place}]"


#: Of an integer, after its bounds: JSON may write it with a fraction of zero.
WHOLE = BeforeValidator(_whole)
#: Of a list of numbers: a form has its items by their places.
NUMBERS = BeforeValidator(_numbers)


class CacheFields(BaseModel):
    """A cache of a request, in place of the engine's."""

    cache_backend: str | None = None
    cache_config: (
        Annotated[
            dict[str, JsonValue],
            BeforeValidator(_settings),
            WithJsonSchema(cache_schema()),
            Field(description="Settings of the cache; what is left open is the engine's."),
        ]
        | None
    ) = None


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class DrawnMetrics(BaseModel):
    """How something was drawn; with a cache also what it has left out."""

    model_config = ConfigDict(extra="allow")
    seed: int
    seeds: list[int]
    height: int
    width: int
    num_inference_steps: int
    queue_s: float
    preprocess_s: float
    execute_s: float
    postprocess_s: float


class ImageData(_Closed):
    """One picture: a file in base64."""

    b64_json: str


class ImagesResponse(_Closed):
    """Body of `/v1/images/generations` and `/v1/images/edits` in one piece."""

    created: int
    data: list[ImageData]
    output_format: _OutputFormat
    size: str
    diffulex: DrawnMetrics


class StepOfSteps(_Closed):
    """How far a picture is."""

    step: int
    num_steps: int


class _ImageEvent(_Closed):
    b64_json: str
    created_at: int
    size: str
    background: Literal["opaque"]
    quality: Literal["auto"]
    output_format: _OutputFormat


class PartialImageEvent(_ImageEvent):
    """A preview in a stream."""

    type: Literal["image_generation.partial_image", "image_edit.partial_image"]
    partial_image_index: int
    diffulex: StepOfSteps


class CompletedImageEvent(_ImageEvent):
    """A picture at the end of a stream."""

    type: Literal["image_generation.completed", "image_edit.completed"]
    diffulex: DrawnMetrics


class VideoError(_Closed):
    """Why a video failed."""

    code: str | None
    message: str


class VideoResponse(_Closed):
    """A video, before, while and after it is drawn."""

    id: str
    object: Literal["video"]
    created_at: int
    completed_at: int | None
    expires_at: int | None
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int
    model: str
    prompt: str
    seconds: str
    size: str
    error: VideoError | None
    remixed_from_video_id: None
    diffulex: DrawnMetrics | None


class VideoListResponse(_Closed):
    """Body of `GET /v1/videos`; the ids are of its first and last video where it has some."""

    object: Literal["list"]
    data: list[VideoResponse]
    has_more: bool
    first_id: str = ""
    last_id: str = ""


class VideoDeletedResponse(_Closed):
    """Body of `DELETE /v1/videos/{video_id}`."""

    id: str
    object: Literal["video.deleted"]
    deleted: Literal[True]


class DiffusionModelCard(_Closed):
    """One name of the served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["diffusion"]


class DiffusionModelList(_Closed):
    """Body of `/v1/models`."""

    object: Literal["list"]
    data: list[DiffusionModelCard]


class HealthResponse(_Closed):
    """Body of `/health`, whether requests are accepted or not."""

    status: Literal["ready", "dead", "closed", "starting", "draining"]
    waiting: int


class ServerInfoResponse(_Closed):
    """Body of `/server_info`."""

    model: str
    pipeline: str
    media: Literal["image", "video"]
    edits: bool
    device: str
    defaults: dict[str, Any]
    guidance: str
    size_multiple: int
    has_previews: bool
    draws_shapes: bool
    cache_backend: str
    cache_backends: list[str]
    attention_backend: str
    num_processes: int
    max_queue_size: int


#: Bodies that no route of FastAPI names: those of a stream.
_EVENTS = (PartialImageEvent, CompletedImageEvent)


_LAST_EVENT = {
    "type": "object",
    "properties": {"data": {"const": "[DONE]"}},
    "required": ["data"],
}


def _event(name: str, body: str) -> dict[str, Any]:
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": _SCHEMAS + body},
    }
    return {
        "type": "object",
        "properties": {"event": {"const": name}, "data": data},
        "required": ["event", "data"],
    }


def image_responses(kind: str) -> dict[int | str, dict[str, Any]]:
    """Entries of the OpenAPI document for a route of images.

    The schema of a stream is that of each of its events, the last of which has no name.

    Args:
        kind: first part of their names.
    """
    events = {
        f"{kind}.partial_image": "PartialImageEvent",
        f"{kind}.completed": "CompletedImageEvent",
        "error": "ErrorResponse",
    }
    stream = {"schema": {"anyOf": [_event(*item) for item in events.items()] + [_LAST_EVENT]}}
    return {
        200: {
            "model": ImagesResponse,
            "description": "The pictures, in one piece or as server-sent events",
            "content": {"text/event-stream": stream},
        },
        **error_responses(400, 404, 413, 415, 429, 503, 504),
    }


def form_body(schema: type[BaseModel], files: Mapping[str, int]) -> dict[str, Any]:
    """A request body that is a form.

    Args:
        schema: of its fields; those of an object are fields `name[part]`, of a list `name[]` and
            `name[part][]`.
        files: how many files of a name there may be.
    """
    document = schema.model_json_schema()
    parts = document.pop("$defs", {})
    fields: dict[str, Any] = {}
    for name, field in document["properties"].items():
        inner = parts.get(field.get("$ref", "").rpartition("/")[2]) or _forms(field).get("object")
        found = {name: field}
        if inner is not None:
            found = {f"{name}[{part}]": form for part, form in inner["properties"].items()}
        for part, form in found.items():
            fields[f"{part}[]" if "array" in _forms(form) else part] = form
    for name, most in files.items():
        file = {"type": "string", "format": "binary"}
        several = {"type": "array", "items": file, "minItems": 1, "maxItems": most}
        fields[name] = file if most == 1 else {"anyOf": [file, several]}
    form = {
        "type": "object",
        "properties": fields,
        "required": [*document["required"], *(name for name, most in files.items() if most)],
        "additionalProperties": False,
    }
    return {"required": True, "content": {"multipart/form-data": {"schema": form}}}


def _forms(field: Mapping[str, Any]) -> dict[str | None, Any]:
    return {form.get("type"): form for form in field.get("anyOf", ())}


def limit_requests(
    document: dict[str, Any],
    names: Iterable[str],
    fields: Iterable[str],
    least_steps: int,
    caches: Iterable[str],
) -> None:
    """Adds what FastAPI does not know: failures, events, and what this model leaves of the requests.

    Args:
        document: of the application.
        names: what `model` may be.
        fields: of requests that the model has.
        least_steps: of a request.
        caches: that requests may have.
    """
    declare_errors(document)
    schemas = document["components"]["schemas"]
    for body in _EVENTS:
        schema = body.model_json_schema(mode="serialization", ref_template=_SCHEMAS + "{model}")
        schemas.update(schema.pop("$defs", {}) | {body.__name__: schema})
    known = (
        "guidance_scale",
        "guidance_scale_2",
        "true_cfg_scale",
        "strength",
        "sigmas",
        "sigmas[]",
    )
    optional = {*known} - {*fields}
    for schema in _request_schemas(document):
        properties = schema["properties"]
        properties["model"] = {"enum": [*names, None]}
        properties["cache_backend"] = {"enum": [*caches, None]}
        for name in [name for name in properties if name.startswith("cache_config")]:
            if {*caches} <= {NO_CACHE}:
                properties[name] = {"type": "null"}
        properties["num_inference_steps"]["anyOf"][0]["minimum"] = least_steps
        for name in {"sigmas", "sigmas[]"} & {*properties}:
            properties[name]["anyOf"][0]["minItems"] = least_steps
        for name in optional & {*properties}:
            properties[name] = {"type": "null"}


def _request_schemas(document: dict[str, Any]) -> list[dict[str, Any]]:
    schemas = document["components"]["schemas"]
    named = [schema for name, schema in schemas.items() if name.endswith("Request")]
    operations = [item for methods in document["paths"].values() for item in methods.values()]
    contents = [item.get("requestBody", {}).get("content", {}) for item in operations]
    forms = [media["schema"] for content in contents for media in content.values()]
    return [*named, *(schema for schema in forms if "properties" in schema)]


def declare_security(document: dict[str, Any], open_paths: Iterable[str]) -> None:
    """Says that all other paths ask for a key."""
    schemes = document["components"].setdefault("securitySchemes", {})
    schemes["apiKey"] = {"type": "http", "scheme": "bearer"}
    for path, operations in document["paths"].items():
        for operation in operations.values() if path not in open_paths else ():
            operation["security"] = [{"apiKey": []}]
