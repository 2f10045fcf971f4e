# SPDX-License-Identifier: Apache-2.0
"""Body of `POST /v1/responses`: OpenAI's Responses API, as far as text goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator, StrictBool, WithJsonSchema

from diffulex.server.http.api_errors import shown
from diffulex.server.openai.field_types import (
    Name,
    NumTop,
    Positive,
    StreamModeName,
    TemplateVariables,
    Text,
    as_text,
    only,
    text_of,
)
from diffulex.server.openai.request_schema import (
    MAX_MESSAGES,
    UNUSED_TOOLS,
    ChatMessage,
    SamplingFields,
)

__all__ = ["ResponsesRequest"]

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"
#: What `include` may name. All but the log-probabilities belong to items that never occur here.
_INCLUDABLE = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
_MAX_METADATA, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512


def _input(value: Any) -> list[ChatMessage]:
    """A text or a list of messages, as messages."""
    if isinstance(value, str):
        return [_turn("user", as_text(value))]
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a text or a list of at least one message, got {shown(value)}")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"expected at most {MAX_MESSAGES} items, got {len(value)}")
    return [_message(f"[{index}]", item) for index, item in enumerate(value)]


def _message(where: str, item: Any) -> ChatMessage:
    if not isinstance(item, Mapping):
        raise ValueError(f"{where}: expected a message, got {shown(item)}")
    kind = item.get("type", "message")
    if kind != "message":
        raise ValueError(
            f"{where}.type: expected 'message', tools, reasoning and references are not supported,"
            f" got {shown(kind)}"
        )
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise ValueError(f"{where}.role: expected one of {', '.join(_ROLES)}, got {shown(role)}")
    if isinstance(content, str):
        return _turn(role, as_text(content))
    if not isinstance(content, list):
        raise ValueError(f"{where}.content: expected a text or a list, got {shown(content)}")
    parts = [_part(f"{where}.content[{index}]", part) for index, part in enumerate(content)]
    return _turn(role, "\n".join(parts))


def _turn(role: str, content: str) -> ChatMessage:
    return ChatMessage.model_construct(role=role, content=content)


def _part(where: str, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") not in _PARTS:
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise ValueError(f"{where}.type: expected one of {', '.join(_PARTS)}, got {shown(kind)}")
    return as_text(part.get("text"))


_TEXT_SCHEMA = {"type": "string"}
_INPUT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _TEXT_SCHEMA,
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
            "items": {
                "type": "object",
                "properties": {
                    "type": {"const": "message"},
                    "role": {"enum": list(_ROLES)},
                    "content": {
                        "anyOf": [
                            _TEXT_SCHEMA,
                            {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "properties": {
                                        "type": {"enum": list(_PARTS)},
                                        "text": _TEXT_SCHEMA,
                                    },
                                    "required": ["type", "text"],
                                },
                            },
                        ]
                    },
                },
                "required": ["role", "content"],
            },
        },
    ]
}
_NO_REASONING = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"effort": {"enum": ["none", None]}},
            "additionalProperties": {"type": "null"},
        },
        {"type": "null"},
    ]
}
_PLAIN_FORMAT = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]},
        {"type": "null"},
    ]
}
_PLAIN_TEXT = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "format": _PLAIN_FORMAT,
                "verbosity": {"enum": ["medium", None]},
            },
        },
        {"type": "null"},
    ]
}
# Rules on two fields, and fields of the other routes that would be asked in vain.
_RULES: dict[str, Any] = {
    "required": ["input"],
    "patternProperties": {
        "^n$": {"enum": [1, None]},
        "^(messages|max_completion_tokens|prompt_logprobs|structured_outputs)$": {"type": "null"},
        "^logprobs$": {"enum": [False, None]},
        "^(frequency_penalty|presence_penalty)$": {"enum": [0, None]},
        "^repetition_penalty$": {"enum": [1, None]},
        "^logit_bias$": {"enum": [{}, None]},
        "^use_beam_search$": {"enum": [False, None]},
        "^suffix$": {"enum": ["", None]},
        "^best_of$": {"enum": [1, None]},
        "^functions$": {"type": ["array", "null"]},
        "^function_call$": {"enum": ["none", "auto", None]},
        "^response_format$": _PLAIN_FORMAT,
        "^guided_": {"type": "null"},
    },
    "allOf": [
        {
            "anyOf": [
                {"properties": {"top_logprobs": {"enum": [0, None]}}},
                {
                    "properties": {"include": {"type": "array", "contains": {"const": _LOGPROBS}}},
                    "required": ["include"],
                },
            ]
        },
        *UNUSED_TOOLS,
    ],
    "examples": [{"input": "1 + 2 =", "max_output_tokens": 16, "temperature": 0}],
}
if TYPE_CHECKING:
    _Key = str
    _Value = str
else:
    _Key, _Value = text_of(_MAX_KEY_CHARS), text_of(_MAX_VALUE_CHARS)


class ResponsesRequest(SamplingFields):
    """Body of `POST /v1/responses`.

    Fields that block diffusion or this server has not are there to be refused by name; see
    `unsupported_fields`.
    """

    # Everything the client sent is kept, so that refused families of keys are found.
    model_config = ConfigDict(extra="allow", json_schema_extra=lambda schema: schema.update(_RULES))

    model: Name | None = None
    # Absent input is refused by the schema's own message.
    input: Annotated[list[ChatMessage], PlainValidator(_input), WithJsonSchema(_INPUT_SCHEMA)]
    instructions: Text | None = None
    max_output_tokens: Positive | None = None
    max_tokens: Annotated[Positive | None, only()] = None
    metadata: Annotated[dict[_Key, _Value], Field(max_length=_MAX_METADATA)] | None = None
    include: list[Literal[_INCLUDABLE]] | None = None  # type: ignore[valid-type]
    top_logprobs: NumTop | None = None
    stream_mode: StreamModeName | None = None
    skip_special_tokens: StrictBool = True
    chat_template: Text | None = None
    chat_template_kwargs: TemplateVariables | None = None
    # Accepted for what it says about the client; nothing is kept.
    store: StrictBool | None = None
    parallel_tool_calls: StrictBool | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None
    # Refused when they ask for something.
    background: Annotated[StrictBool | None, only(False)] = None
    conversation: Annotated[Any, only()] = None
    context_management: Annotated[Any, only([])] = None
    moderation: Annotated[Any, only()] = None
    previous_response_id: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    reasoning: Annotated[Any, WithJsonSchema(_NO_REASONING)] = None
    text: Annotated[Any, WithJsonSchema(_PLAIN_TEXT)] = None
    tools: Annotated[Any, WithJsonSchema({"type": ["array", "null"]})] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    truncation: Annotated[Any, only("disabled")] = None

    @property
    def wanted_max_tokens(self) -> int | None:
        """How long the answer may be, if the client itself said so."""
        return self.max_output_tokens

    # What the other routes call by another name, or have as a field.

    @property
    def logprobs(self) -> int | None:
        """Alternatives per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None

    @property
    def add_generation_prompt(self) -> bool:
        """The answer is a new turn."""
        return True

    @property
    def continue_final_message(self) -> bool:
        """It never continues a turn of the client's."""
        return False

    @property
    def messages(self) -> list[ChatMessage]:
        """The conversation, instructions first."""
        if self.instructions is None:
            return self.input
        return [_turn("system", self.instructions), *self.input]
