# SPDX-License-Identifier: Apache-2.0
"""Types of the fields of requests.

Numbers, texts and flags are never converted from one another. The JSON schema that clients see is as
narrow as the checks, where JSON schema can say it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from diffulex.checkpoint.tokenizer import RENDERER_ARGUMENTS
from diffulex.config.sampling_params import MAX_STOPS, TRAJECTORY_LEVELS
from diffulex.server.http.api_errors import shown

__all__ = [
    "INT31",
    "INTEGRAL",
    "NUMERIC",
    "REQUEST_ID",
    "TEMPLATE_FIELDS",
    "AtLeastOne",
    "Ids",
    "Name",
    "Natural",
    "NumTop",
    "Number",
    "PathText",
    "Positive",
    "Prompt",
    "Prompts",
    "RequestId",
    "Stop",
    "StreamModeName",
    "Template",
    "TemplateVariables",
    "Text",
    "TrajectoryLevel",
    "Unit",
    "as_text",
    "only",
    "text_of",
]

#: Form of the ids that clients give to requests.
REQUEST_ID = "[A-Za-z0-9._-]{1,64}"
#: Fields of a conversation that are no variables of its template.
TEMPLATE_FIELDS = ("messages", "chat_template", "add_generation_prompt", "continue_final_message")
#: Names that no variable of a template may have.
_RESERVED = (*TEMPLATE_FIELDS, *RENDERER_ARGUMENTS)
_MAX_IDS, _MAX_PROMPTS = 1 << 22, 1 << 16
#: Largest of most numbers: the engine counts in 32 bits.
INT31 = 2**31 - 1
#: Numbers beyond it count as infinite.
_LARGEST = 1e308


def _integral(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"expected an integer, got {shown(value)}")
    if isinstance(value, float):
        if not math.isfinite(value) or not value.is_integer():
            raise ValueError(f"expected an integer, got {value!r}")
        return int(value)
    return value


def _numeric(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"expected a number, got {shown(value)}")
    if abs(value) > _LARGEST or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {shown(value)}")
    return value


def as_text(value: Any) -> str:
    """A text that UTF-8 can hold: JSON may spell unpaired surrogates."""
    if not isinstance(value, str):
        raise ValueError(f"expected a text, got {shown(value)}")
    return value.encode("utf-8", "replace").decode("utf-8")


# Bounds come before these validators in an annotation: after them JSON schema loses those of numbers, and
# messages call characters items.
INTEGRAL = BeforeValidator(_integral)
NUMERIC = BeforeValidator(_numeric)
AtLeastOne = Annotated[int, Field(ge=1), INTEGRAL]
Positive = Annotated[int, Field(ge=1, le=INT31), INTEGRAL]
Natural = Annotated[int, Field(ge=0, le=INT31), INTEGRAL]
NumTop = Annotated[int, Field(ge=0, le=20), INTEGRAL]
Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST), NUMERIC]
Unit = Annotated[float, Field(ge=0, le=1), NUMERIC]
Text = Annotated[str, BeforeValidator(as_text)]


def text_of(most: int) -> Any:
    """The type of texts of at most so many characters, for what is kept or repeated in answers."""
    return Annotated[str, Field(max_length=most), BeforeValidator(as_text)]


if TYPE_CHECKING:
    Name = str
    PathText = str
else:
    Name, PathText = text_of(1024), text_of(4096)

_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": INT31}
_IDS_SCHEMA = {"type": "array", "items": _ID_SCHEMA, "minItems": 1, "maxItems": _MAX_IDS}
_TEXT_SCHEMA = {"type": "string"}


def _is_id(item: Any) -> bool:
    # 5.0 is an integer to JSON schema.
    return type(item) is int or (type(item) is float and item.is_integer())


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_id, value))


def _ids(value: Any) -> list[int]:
    if isinstance(value, list) and len(value) > _MAX_IDS:
        raise ValueError(f"expected at most {_MAX_IDS} token ids, got {len(value)}")
    if not _is_ids(value):
        raise ValueError(f"expected a list of token ids, got {shown(value)}")
    for item in value:
        if not 0 <= item <= INT31:
            raise ValueError(f"expected token ids in [0, {INT31}], got {item}")
    return list(map(int, value))


def _template(value: Any) -> list[int | None]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a list of token ids and nulls, got {shown(value)}")
    fixed = iter(_ids([item for item in value if item is not None]))
    return [None if item is None else next(fixed) for item in value]


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, str):
        return as_text(value)
    if not isinstance(value, list):
        raise ValueError(f"expected a text or a list of token ids, got {shown(value)}")
    return _ids(value)


def _prompts(value: Any) -> list[str | list[int]]:
    """Every form of a prompt as a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
        return [_prompt(value)]
    if isinstance(value, list) and len(value) > _MAX_PROMPTS:
        raise ValueError(f"expected at most {_MAX_PROMPTS} prompts, got {len(value)}")
    if not isinstance(value, list) or not value:
        raise ValueError(
            "expected a text, a list of token ids, or a list of either with at least one entry,"
            f" got {shown(value)}"
        )
    return [_prompt(item) for item in value]


def _stop(value: Any) -> list[str]:
    if value is None or value == "":  # which is what an empty field of a form sends
        return []
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and len(texts) > MAX_STOPS:
        raise ValueError(f"expected at most {MAX_STOPS} texts, got {len(texts)}")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected a text or a list of texts, got {shown(value)}")
    return [as_text(text) for text in texts]


def _trajectory_level(value: Any) -> str | bool | None:
    if value is None or isinstance(value, bool) or value in TRAJECTORY_LEVELS:
        return value  # type: ignore[no-any-return]
    levels = ", ".join(TRAJECTORY_LEVELS)
    raise ValueError(f"expected {levels}, true or false, got {shown(value)}")


Ids = Annotated[list[int], PlainValidator(_ids), WithJsonSchema({**_IDS_SCHEMA, "minItems": 0})]
Template = Annotated[
    list[int | None],
    PlainValidator(_template),
    WithJsonSchema({**_IDS_SCHEMA, "items": {"anyOf": [_ID_SCHEMA, {"type": "null"}]}}),
]
Prompt = Annotated[
    str | list[int],
    PlainValidator(_prompt),
    WithJsonSchema({"anyOf": [{**_TEXT_SCHEMA, "minLength": 1}, _IDS_SCHEMA]}),
]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {**_TEXT_SCHEMA, "minLength": 1},
                _IDS_SCHEMA,
                {"type": "array", "items": {**_TEXT_SCHEMA, "minLength": 1}, "minItems": 1},
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1},
            ]
        }
    ),
]
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": 256}
Stop = Annotated[
    list[str],
    PlainValidator(_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "maxLength": 256},
                {"type": "array", "items": _STOP_SCHEMA, "maxItems": MAX_STOPS},
                {"type": "null"},
            ]
        }
    ),
]
TrajectoryLevel = Annotated[
    str | bool | None,
    PlainValidator(_trajectory_level),
    WithJsonSchema({"enum": [*TRAJECTORY_LEVELS, True, False, None]}),
]
RequestId = Annotated[Text, WithJsonSchema({"type": "string", "pattern": f"^{REQUEST_ID}$"})]
TemplateVariables = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "propertyNames": {"not": {"enum": list(_RESERVED)}}}),
]
StreamModeName = Literal["block_append", "denoise", "both"]


def only(*values: Any) -> WithJsonSchema:
    """For a field that may be there but ask nothing."""
    return WithJsonSchema({"enum": [*values, None]})
