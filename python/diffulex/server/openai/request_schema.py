# SPDX-License-Identifier: Apache-2.0
"""Bodies of the requests.

Numbers, texts and flags are never converted from one another; unknown keys are ignored. The JSON
schema that clients see is as narrow as the checks, where JSON schema can say it.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    WithJsonSchema,
    create_model,
    model_validator,
)

from diffulex.checkpoint.tokenizer import RENDERER_ARGUMENTS
from diffulex.config.sampling_params import DECODING_FIELDS, MAX_STOPS, TRAJECTORY_LEVELS
from diffulex.server.http.api_errors import shown
from diffulex.wire.protocol import RequestOptions

__all__ = [
    "MAX_DECODED",
    "MAX_MESSAGES",
    "REQUEST_ID",
    "TEMPLATE_FIELDS",
    "TOOL_CHOICES",
    "UNUSED_TOOLS",
    "AbortRequest",
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "Decoding",
    "GenerateRequest",
    "Ids",
    "NumTop",
    "Positive",
    "ProfileRequest",
    "SamplingFields",
    "StreamModeName",
    "StreamOptions",
    "TemplateVariables",
    "Text",
    "TokenizeRequest",
    "as_text",
    "only",
    "option_fields",
]

#: Most messages of a conversation.
MAX_MESSAGES = 4096
#: Form of the ids that clients give to requests.
REQUEST_ID = "[A-Za-z0-9._-]{1,64}"
#: Fields of a conversation that are no variables of its template.
TEMPLATE_FIELDS = ("messages", "chat_template", "add_generation_prompt", "continue_final_message")
#: Names that no variable of a template may have.
_RESERVED = (*TEMPLATE_FIELDS, *RENDERER_ARGUMENTS)
#: Most ids that `/detokenize` takes where the model is not longer.
MAX_DECODED = 1 << 16
_MAX_IDS, _MAX_PROMPTS = 1 << 22, 1 << 16
_INT31 = 2**31 - 1
#: The engine divides by it in 32 bits.
_LARGEST_TEMPERATURE = 3.4e38
#: Numbers beyond it count as infinite.
_LARGEST = 1e308
_DEFAULT_MAX_TOKENS = 512


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
_INTEGRAL = BeforeValidator(_integral)
_NUMERIC = BeforeValidator(_numeric)
AtLeastOne = Annotated[int, Field(ge=1), _INTEGRAL]
Positive = Annotated[int, Field(ge=1, le=_INT31), _INTEGRAL]
Natural = Annotated[int, Field(ge=0, le=_INT31), _INTEGRAL]
NumTop = Annotated[int, Field(ge=0, le=20), _INTEGRAL]
Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST), _NUMERIC]
Unit = Annotated[float, Field(ge=0, le=1), _NUMERIC]
Text = Annotated[str, BeforeValidator(as_text)]

_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": _INT31}
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
        if not 0 <= item <= _INT31:
            raise ValueError(f"expected token ids in [0, {_INT31}], got {item}")
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


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


def _decoding_fields() -> dict[str, Any]:
    """Fields of bodies for what a request may set of the decoding rule."""
    found = {}
    for name, limits in DECODING_FIELDS.items():
        kind = _INTEGRAL if limits.kind is int else _NUMERIC
        bounded = Annotated[limits.kind, Field(ge=0, le=limits.high), kind]  # type: ignore[name-defined]
        found[name] = (Union[bounded, None], None)  # noqa: UP007
    return found


if TYPE_CHECKING:
    _DecodingFields = BaseModel
else:
    _DecodingFields = create_model("_DecodingFields", __base__=BaseModel, **_decoding_fields())


class Decoding(_DecodingFields):
    """Settings of the decoding rule for one request."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})


#: What a body takes for a type of the wire.
_WIRE_TYPES: dict[Any, Any] = {
    bool: StrictBool,
    int: Annotated[int, Field(ge=-(2**63), le=2**64 - 1), _INTEGRAL],
    float: Number,
    str: Text,
    type(None): None,
}


def option_fields(options: type[Any]) -> dict[str, Any]:
    """Fields of bodies for those of a dataclass: type and default by name."""
    hints = typing.get_type_hints(options)
    found = {}
    for item in dataclasses.fields(options):
        kinds = typing.get_args(hints[item.name]) or (hints[item.name],)
        found[item.name] = (Union[tuple(_WIRE_TYPES[kind] for kind in kinds)], item.default)  # noqa: UP007
    return found


if TYPE_CHECKING:
    _Options = _Body
else:
    _Options = create_model("_Options", __base__=_Body, **option_fields(RequestOptions))


class SamplingFields(_Options):
    """What all generating requests have in common."""

    max_tokens: Positive | None = _DEFAULT_MAX_TOKENS
    temperature: Annotated[float, Field(ge=0, le=_LARGEST_TEMPERATURE), _NUMERIC] | None = 1.0
    max_nfe: Positive | None = None
    max_repetition_run: Positive | None = None
    ignore_eos: StrictBool = False
    stream: StrictBool | None = False
    user: Text | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1), _INTEGRAL] | None = None
    stop: Stop = Field(default_factory=list)
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: StrictBool = False
    min_tokens: Natural | None = None
    template_token_ids: Template | None = None
    top_p: Annotated[float, Field(gt=0, le=1), _NUMERIC] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT31), _INTEGRAL] | None = None
    min_p: Unit | None = None
    return_trajectory: TrajectoryLevel = None
    decoding: Decoding | None = None
    request_id: RequestId | None = None

    @property
    def wanted_max_tokens(self) -> int | None:
        """How long the answer may be, if the client itself said so."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else None

    @property
    def wants_max_tokens(self) -> bool:
        """Whether the client itself said how long the answer may be."""
        return self.wanted_max_tokens is not None

    @property
    def is_echo_only(self) -> bool:
        """Whether the prompt itself is all that is asked for."""
        return False


class GenerateRequest(SamplingFields):
    """Body of `POST /generate`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "1 + 2 =", "max_tokens": 16, "stream": False}]}
    )

    prompt: Prompt
    stream_mode: StreamModeName = "denoise"
    skip_special_tokens: StrictBool = False
    add_special_tokens: StrictBool = True
    logprobs: NumTop | None = None
    return_prompt_token_ids: StrictBool = False


class StreamOptions(_Body):
    """`stream_options` of the OpenAI routes."""

    include_usage: StrictBool | None = False
    continuous_usage_stats: StrictBool | None = False


def only(*values: Any) -> WithJsonSchema:
    """For a field that may be there but ask nothing."""
    return WithJsonSchema({"enum": [*values, None]})


_RESPONSE_FORMAT_SCHEMA = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
        {"type": "null"},
    ]
}


class _OpenAIFields(SamplingFields):
    """What both OpenAI routes have in common, also what is only there to be refused."""

    # Everything the client sent is kept, so that refused families of keys are found.
    model_config = ConfigDict(extra="allow")

    model: Text | None = None
    n: AtLeastOne | None = 1
    stream_mode: StreamModeName | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: StrictBool = True
    frequency_penalty: Annotated[Number | None, only(0)] = None
    presence_penalty: Annotated[Number | None, only(0)] = None
    repetition_penalty: Annotated[Number | None, only(1)] = None
    logit_bias: Annotated[dict[str, Any] | None, only({})] = None
    use_beam_search: Annotated[StrictBool | None, only(False)] = None
    prompt_logprobs: Annotated[Any, only()] = None
    response_format: Annotated[Any, WithJsonSchema(_RESPONSE_FORMAT_SCHEMA)] = None
    structured_outputs: Annotated[Any, only()] = None


_EXAMPLE_MESSAGES: list[Any] = [{"role": "user", "content": "1 + 2 ="}]


def _message_schema(schema: dict[str, Any]) -> None:
    """Only the assistant may have said nothing."""
    schema["required"] = ["role"]
    schema["anyOf"] = [
        {"properties": {"role": {"const": "assistant"}}},
        {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
    ]


class ChatMessage(_Body):
    """One turn; parts of a content list are joined by newlines."""

    model_config = ConfigDict(json_schema_extra=_message_schema)

    role: Annotated[Text, Field(min_length=1, examples=["user"])]
    content: Annotated[
        str,
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "null"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {
                                "type": {"const": "text"},
                                "text": {"type": "string"},
                            },
                            "required": ["type", "text"],
                        },
                    },
                ]
            }
        ),
    ]

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        content = data.get("content")
        if content is None and data.get("role") == "assistant":
            return {**data, "content": ""}
        if isinstance(content, str):
            return {**data, "content": as_text(content)}
        if isinstance(content, list):
            return {**data, "content": "\n".join(_part(part) for part in content)}
        raise ValueError(f"content: expected a text or a list of text parts, got {shown(content)}")

    def to_message(self) -> dict[str, str]:
        """The form the tokenizer takes."""
        return {"role": self.role, "content": self.content}


def _part(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise ValueError(f"content: expected parts of type 'text', got {shown(kind)}")
    return as_text(part.get("text"))


_REFUSED_EXTRA = {
    "^guided_": {"type": "null"},
    "^functions$": {"type": ["array", "null"]},
    "^function_call$": {"enum": ["none", "auto", None]},
}
# The document's form of rules on two fields: of both only one, and one only with the other.
_ONE_END: dict[str, Any] = {
    "not": {
        "properties": {
            "add_generation_prompt": {"const": True},
            "continue_final_message": {"const": True},
        },
        "required": ["add_generation_prompt", "continue_final_message"],
    }
}
#: A choice that can switch the tools off, and the field that it then makes meaningless.
TOOL_CHOICES = (("tool_choice", "tools"), ("function_call", "functions"))


def _only_with(name: str, idle: dict[str, Any], other: str, value: Any) -> dict[str, Any]:
    """A field asks for something only where another one has a value."""
    needed = {"properties": {other: {"const": value}}, "required": [other]}
    return {"anyOf": [{"properties": {name: idle}}, needed]}


_TOP_WITH_LOGPROBS = _only_with("top_logprobs", {"enum": [0, None]}, "logprobs", True)
_NO_TOKENS_BUT_ECHO = _only_with("max_tokens", {"not": {"const": 0}}, "echo", True)
UNUSED_TOOLS = tuple(
    _only_with(tools, {"enum": [[], None]}, choice, "none") for choice, tools in TOOL_CHOICES
)
_NO_LOGPROBS_OF_ECHO = {
    "not": {
        "properties": {"echo": {"const": True}, "logprobs": {"type": "integer"}},
        "required": ["echo", "logprobs"],
    }
}


def _chat_schema(schema: dict[str, Any]) -> None:
    schema["required"] = [*schema.get("required", []), "messages"]
    best_of = {"type": ["integer", "null"], "minimum": 1}
    schema["patternProperties"] = {**_REFUSED_EXTRA, "^best_of$": best_of}
    schema["allOf"] = [_ONE_END, _TOP_WITH_LOGPROBS, *UNUSED_TOOLS]
    schema["examples"] = [{"messages": _EXAMPLE_MESSAGES, "max_tokens": 16, "temperature": 0}]


def _completion_schema(schema: dict[str, Any]) -> None:
    schema["patternProperties"] = _REFUSED_EXTRA
    schema["allOf"] = [_NO_LOGPROBS_OF_ECHO, _NO_TOKENS_BUT_ECHO, UNUSED_TOOLS[1]]
    schema["examples"] = [{"prompt": "1 + 2 =", "max_tokens": 16, "temperature": 0}]


class ChatCompletionRequest(_OpenAIFields):
    """Body of `POST /v1/chat/completions`."""

    # Absent messages are refused with a special error message, so they have a default.
    model_config = ConfigDict(json_schema_extra=_chat_schema)

    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES)] = Field(
        default_factory=list, json_schema_extra={"minItems": 1}
    )
    max_completion_tokens: Positive | None = None
    logprobs: StrictBool | None = None
    top_logprobs: NumTop | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    chat_template: Text | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Annotated[Any, WithJsonSchema({"type": ["array", "null"]})] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None

    @property
    def wanted_max_tokens(self) -> int | None:
        """How long the answer may be, by either name."""
        limit = self.max_completion_tokens
        return super().wanted_max_tokens if limit is None else limit


class CompletionRequest(_OpenAIFields):
    """Body of `POST /v1/completions`."""

    model_config = ConfigDict(json_schema_extra=_completion_schema)

    prompt: Prompts
    max_tokens: Natural | None = 16
    echo: StrictBool | None = False
    logprobs: NumTop | None = None
    suffix: Annotated[Text | None, only("")] = None
    best_of: AtLeastOne | None = None
    add_special_tokens: StrictBool = True

    @property
    def is_echo_only(self) -> bool:
        """Whether the prompt itself is all that is asked for."""
        return bool(self.echo) and self.max_tokens == 0


class ProfileRequest(_Body):
    """Body of `POST /start_profile`; may be left out."""

    profile_prefix: Text | None = None


class WeightsRequest(_Body):
    """Body of `POST /update_weights` and `POST /load_lora`: a directory of the server."""

    path: Text


class AbortRequest(_Body):
    """Body of `POST /abort`."""

    rid: Text


class TokenizeRequest(_Body):
    """Body of `POST /tokenize`: a prompt, or messages."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
                {"properties": {"messages": {"type": "array"}}, "required": ["messages"]},
            ],
            "allOf": [_ONE_END],
            "examples": [{"prompt": "1 + 2 ="}, {"messages": _EXAMPLE_MESSAGES}],
        }
    )

    model: Text | None = None
    prompt: Text | None = None
    messages: (
        Annotated[
            list[ChatMessage],
            Field(max_length=MAX_MESSAGES, json_schema_extra={"minItems": 1}),
        ]
        | None
    ) = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    chat_template: Text | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: StrictBool | None = False
