# SPDX-License-Identifier: Apache-2.0
"""Forms of the images and videos APIs: fields that a schema checks, and files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from diffulex.omni.api_schema import FORM, MAX_HTTP_STEPS, item_name
from diffulex.server.http.api_errors import ApiError
from diffulex.server.http.multipart import FormPart, parse_form

if TYPE_CHECKING:
    from fastapi import Request

__all__ = ["read_form"]

#: Two fields of a request have an item for each step.
_MAX_PARTS = 64 + 2 * MAX_HTTP_STEPS
#: `name`, `name[part]`, `name[]` and `name[part][]`.
_NAME = re.compile(r"([^][]+)(?:\[([^][]+)\])?(\[\])?")
_Body = TypeVar("_Body", bound=BaseModel)


async def read_form(
    request: Request, schema: type[_Body], files: Mapping[str, int]
) -> tuple[_Body, dict[str, list[bytes]]]:
    """The fields and the files of a request with a form.

    `name[part]` is a field of the object `name`, `name[]` an item of the list `name`, and `name[part][]`
    one of a list in an object; a file may be called `name[]`.

    Args:
        request: whose body is read.
        schema: of the fields, which come as texts.
        files: how many files of a name there may be; any other is refused.

    Raises:
        ApiError: it is no form, or a file is not expected.
        RequestValidationError: the fields are not those of the schema.
    """
    content_type = request.headers.get("content-type", "")
    fields: dict[str, Any] = {}
    found: dict[str, list[bytes]] = {}
    for part in parse_form(content_type, await request.body(), _MAX_PARTS):
        if part.filename is None:
            _add_field(fields, part)
            continue
        name = part.name.removesuffix("[]")
        found.setdefault(name, []).append(part.data)
        most = files.get(name, 0)
        if len(found[name]) > most:
            kind = "no file" if most == 0 else f"at most {most} files"
            raise ApiError(400, f"{name}: expected {kind}, got {len(found[name])}", param=name)
    try:
        return schema.model_validate_strings(fields, context=FORM), found
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def _add_field(fields: dict[str, Any], part: FormPart) -> None:
    match = _NAME.fullmatch(part.name)
    # The schema has no field of another name.
    *outer, name = [key for key in match.groups() if key] if match else [part.name]
    place: Any = fields
    for key in outer:
        place = place.setdefault(key, {}) if isinstance(place, dict) else None
    if isinstance(place, dict) and name == "[]":
        # Items of a list come in their order.
        name = item_name(len(place))
    if not isinstance(place, dict) or name in place:
        raise ApiError(400, f"{part.name}: expected it once, got it again", param=part.name)
    place[name] = part.text()
