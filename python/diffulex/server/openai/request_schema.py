# SPDX-License-Identifier: Apache-2.0
"""Bodies of the requests.

Numbers, texts and flags are never converted from one another; unknown keys are ignored. The JSON
schema that clients see is as narrow as the checks, where JSON schema can say it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    WithJsonSchema,
    model_validator,
)

from diffulex.checkpoint.tokenizer import RENDERER_ARGUMENTS
from diffulex.config.sampling_params import MAX_STOPS, SamplingParams, decoding_arguments
from diffulex.server.http.api_errors import ApiError, shown

__all__ = [
    "MAX_DECODED",
    "MAX_MESSAGES",
    "REQUEST_ID",
    "TEMPLATE_FIELDS",
    "AbortRequest",
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerateRequest",
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
    "sampling_params_from_request",
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
#: A temperature below it is greedy.
_LEAST_TEMPERATURE = 1e-5
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


# Bounds come before these validators in an annotation: after them JSON schema loses them.
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


Ids = Annotated[list[int], PlainValidator(_ids), WithJsonSchema({**_IDS_SCHEMA, "minItems": 0})]
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
RequestId = Annotated[Text, WithJsonSchema({"type": "string", "pattern": f"^{REQUEST_ID}$"})]
TemplateVariables = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "propertyNames": {"not": {"enum": list(_RESERVED)}}}),
]
StreamModeName = Literal["block_append", "denoise", "both"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Decoding(BaseModel):
    """Thresholds of the decoding rule for one request."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})

    accept_threshold: Unit | None = None
    edit_threshold: Unit | None = None
    add_block_threshold: Unit | None = None
    semi_complete_threshold: Unit | None = None
    token_stability_threshold: Unit | None = None


class SamplingFields(_Body):
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
    top_p: Annotated[float, Field(gt=0, le=1), _NUMERIC] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT31), _INTEGRAL] | None = None
    min_p: Unit | None = None
    decoding: Decoding | None = None
    denoise_detail: StrictBool = False
    request_id: RequestId | None = None

    @property
    def wants_max_tokens(self) -> bool:
        """Whether the client itself said how long the answer may be."""
        return "max_tokens" in self.model_fields_set and self.max_tokens is not None


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
    "^functions$": {"enum": [[], None]},
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
_TOP_WITH_LOGPROBS = {
    "anyOf": [
        {"properties": {"top_logprobs": {"enum": [0, None]}}},
        {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]},
    ]
}
_NO_TOKENS_BUT_ECHO = {
    "anyOf": [
        {"properties": {"max_tokens": {"not": {"const": 0}}}},
        {"properties": {"echo": {"const": True}}, "required": ["echo"]},
    ]
}
_NO_TOOLS_BUT_UNUSED = {
    "anyOf": [
        {"properties": {"tools": {"enum": [[], None]}}},
        {"properties": {"tool_choice": {"const": "none"}}, "required": ["tool_choice"]},
    ]
}
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
    schema["allOf"] = [_ONE_END, _TOP_WITH_LOGPROBS, _NO_TOOLS_BUT_UNUSED]
    schema["examples"] = [{"messages": _EXAMPLE_MESSAGES, "max_tokens": 16, "temperature": 0}]


def _completion_schema(schema: dict[str, Any]) -> None:
    schema["patternProperties"] = _REFUSED_EXTRA
    schema["allOf"] = [_NO_LOGPROBS_OF_ECHO, _NO_TOKENS_BUT_ECHO]
    schema["examples"] = [{"prompt": "1 + 2 =", "max_tokens": 16, "temperature": 0}]


class ChatCompletionRequest(_OpenAIFields):
    """Body of `POST /v1/chat/completions`."""

    # Absent messages are refused with a message of their own, so they have a default.
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
    def wants_max_tokens(self) -> bool:
        """Whether the client itself said how long the answer may be, by either name."""
        return self.max_completion_tokens is not None or super().wants_max_tokens


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


class DetokenizeRequest(_Body):
    """Body of `POST /detokenize`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [1, 2]}]})

    model: Text | None = None
    tokens: Ids
    skip_special_tokens: StrictBool = False
    return_token_strs: StrictBool | None = False


def sampling_params_from_request(
    payload: SamplingFields, *, default_max_tokens: int | None = None
) -> SamplingParams:
    """The engine's parameters for a request.

    Args:
        payload: the body of any generating route.
        default_max_tokens: for requests that do not say; None takes the default of the route.

    Raises:
        ApiError: 400, a value is outside its range.
    """
    limit = getattr(payload, "max_completion_tokens", None)
    if limit is None:
        limit = payload.max_tokens if payload.wants_max_tokens else default_max_tokens
    if limit is None:
        limit = type(payload).model_fields["max_tokens"].default
    temperature = 1.0 if payload.temperature is None else payload.temperature
    decoding = payload.decoding
    try:
        return SamplingParams(
            temperature=0.0 if temperature < _LEAST_TEMPERATURE else temperature,
            max_tokens=limit,
            max_nfe=payload.max_nfe,
            max_repetition_run=payload.max_repetition_run,
            ignore_eos=payload.ignore_eos,
            seed=payload.seed,
            stop=tuple(payload.stop),
            stop_token_ids=tuple(payload.stop_token_ids or ()),
            include_stop_str_in_output=payload.include_stop_str_in_output,
            min_tokens=payload.min_tokens or 0,
            top_p=payload.top_p,
            top_k=payload.top_k,
            min_p=payload.min_p,
            skip_special_tokens=getattr(payload, "skip_special_tokens", None),
            logprobs=_num_logprobs(payload),
            **_decoding(decoding),
        )
    except ValueError as error:
        raise ApiError.from_value_error(error) from error


def _decoding(decoding: Decoding | None) -> dict[str, Any]:
    if decoding is None:
        return {}
    return dict(decoding_arguments(decoding.model_dump(exclude_none=True)))


def _num_logprobs(payload: SamplingFields) -> int | None:
    """How many alternatives per token are wanted; None: no log-probabilities at all."""
    if isinstance(payload, ChatCompletionRequest):
        if payload.top_logprobs and not payload.logprobs:
            raise ApiError(
                400,
                f"top_logprobs: expected logprobs=true with it, got {payload.logprobs!r}",
                param="top_logprobs",
            )
        return (payload.top_logprobs or 0) if payload.logprobs else None
    wanted = getattr(payload, "logprobs", None)
    return None if wanted is None else int(wanted)
