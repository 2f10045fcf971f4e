# SPDX-License-Identifier: Apache-2.0
"""Bodies of the requests.

The types of their fields are in `field_types.py`. Unknown keys are ignored.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    WithJsonSchema,
    create_model,
    model_validator,
)

from diffulex.config.sampling_params import DECODING_FIELDS
from diffulex.server.http.api_errors import shown
from diffulex.server.openai.field_types import (
    INT31,
    INTEGRAL,
    NUMERIC,
    AtLeastOne,
    Ids,
    Name,
    Natural,
    Number,
    NumTop,
    PathText,
    Positive,
    Prompt,
    Prompts,
    RequestId,
    Stop,
    StreamModeName,
    Template,
    TemplateVariables,
    Text,
    TrajectoryLevel,
    Unit,
    as_text,
    only,
)
from diffulex.wire.protocol import RequestOptions

__all__ = [
    "MAX_DECODED",
    "MAX_MESSAGES",
    "TOOL_CHOICES",
    "UNUSED_TOOLS",
    "AbortRequest",
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "Decoding",
    "GenerateRequest",
    "ProfileRequest",
    "SamplingFields",
    "StreamOptions",
    "TokenizeRequest",
    "option_fields",
]

#: Most messages of a conversation.
MAX_MESSAGES = 4096
#: Most ids that `/detokenize` takes where the model is not longer.
MAX_DECODED = 1 << 16
#: The engine divides by it in 32 bits.
_LARGEST_TEMPERATURE = 3.4e38
_DEFAULT_MAX_TOKENS = 512


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


def _decoding_fields() -> dict[str, Any]:
    """Fields of bodies for what a request may set of the decoding rule."""
    found = {}
    for name, limits in DECODING_FIELDS.items():
        kind = INTEGRAL if limits.kind is int else NUMERIC
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
    int: Annotated[int, Field(ge=-(2**63), le=2**64 - 1), INTEGRAL],
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
    temperature: Annotated[float, Field(ge=0, le=_LARGEST_TEMPERATURE), NUMERIC] | None = 1.0
    max_nfe: Positive | None = None
    max_repetition_run: Positive | None = None
    ignore_eos: StrictBool = False
    stream: StrictBool | None = False
    user: Name | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1), INTEGRAL] | None = None
    stop: Stop = Field(default_factory=list)
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: StrictBool = False
    min_tokens: Natural | None = None
    template_token_ids: Template | None = None
    top_p: Annotated[float, Field(gt=0, le=1), NUMERIC] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT31), INTEGRAL] | None = None
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

    model: Name | None = None
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

    role: Annotated[str, Field(min_length=1, examples=["user"]), BeforeValidator(as_text)]
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

    profile_prefix: Name | None = None


class WeightsRequest(_Body):
    """Body of `POST /update_weights` and `POST /load_lora`: a directory of the server."""

    path: PathText


class AbortRequest(_Body):
    """Body of `POST /abort`."""

    rid: Name


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

    model: Name | None = None
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
