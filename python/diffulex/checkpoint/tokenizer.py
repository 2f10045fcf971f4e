# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, from the plain tokenizer files of a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from diffulex.checkpoint.detokenizer import IncrementalDecoder, robust_decode
from diffulex.checkpoint.plain_tokenizer import read_plain_tokenizer
from diffulex.checkpoint.template_bound import bounded_rendering
from diffulex.errors import CheckpointError, PromptError
from diffulex.log import get_logger

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RENDERER_ARGUMENTS", "Tokenizer"]

logger = get_logger(__name__)

#: Parts the names of control tokens in messages: no character, and none that a text has.
_GUARD = "\ufdd0"
#: Arguments of transformers' renderer that no variable of a template may be named after.
RENDERER_ARGUMENTS = (
    "conversation",
    "tokenize",
    "sanitize_control_tokens",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)


class Tokenizer:
    """A stock tokenizer of transformers, or a plain one that does the same; code in the checkpoint
    directory is never run."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        # The engine checks lengths itself, with an error; the backend would print a warning.
        backend.model_max_length = sys.maxsize
        self._mask_text: str | None = backend.mask_token

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer:
        """Reads ``tokenizer.json``, or else ``vocab.json`` and ``merges.txt`` (Qwen2 byte level).

        Raises:
            CheckpointError: neither form is present, or the files cannot be read.
        """
        has_vocab = (path / "vocab.json").is_file() and (path / "merges.txt").is_file()
        if not (path / "tokenizer.json").is_file() and not has_vocab:
            raise CheckpointError(
                f"tokenizer: {path}: expected tokenizer.json, or vocab.json and merges.txt, got neither"
            )
        plain = read_plain_tokenizer(path, partial(_full_backend, path))
        return cls(_full_backend(path) if plain is None else plain)

    @cached_property
    def tokenizer_vocab_size(self) -> int:
        """Largest id plus one; the model's vocabulary is often larger."""
        return int(max(self.backend.get_vocab().values())) + 1

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of a text that one token stands for, at most."""
        longest = max(map(len, self.backend.get_vocab()))
        # A normaliser may compose characters: at most four into one.
        is_normalised = getattr(self.backend.backend_tokenizer, "normalizer", None) is not None
        return 4 * longest if is_normalised else longest

    @property
    def mask_token_id(self) -> int | None:
        """Id of the declared mask token, if the files declare one."""
        token_id: int | None = self.backend.mask_token_id
        return token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Id of the declared end token; further stop ids belong to the checkpoint's configuration."""
        token_id = self.backend.eos_token_id
        return () if token_id is None else (int(token_id),)

    @property
    def has_chat_template(self) -> bool:
        return self.backend.chat_template is not None

    def use_chat_template(self, template: str) -> None:
        """Replaces the template of the files by this text."""
        self.backend.chat_template = template

    def check_chat_template(self) -> None:
        """Compiles the template, if there is one; which messages it takes is not looked at.

        Raises:
            CheckpointError: it is no Jinja template.
        """
        from jinja2 import TemplateSyntaxError  # noqa: PLC0415 (only what renders needs it)

        if not self.has_chat_template:
            return
        try:
            with bounded_rendering():
                self.backend.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"chat template: line {error.lineno}: {error.message or 'no Jinja template'}"
            ) from error
        except PromptError as error:
            raise CheckpointError(str(error)) from error
        except Exception as error:  # it compiled, and may want other messages
            logger.debug("chat template: a message alone is not rendered: %s", error)

    def protect_mask(self, mask_token_id: int) -> None:
        """Names the mask where the files do not declare it; see `encode`."""
        text = self.backend.convert_ids_to_tokens([mask_token_id])[0]
        if text is not None and text in self.backend.get_added_vocab():
            self._mask_text = str(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt.

        The name of the mask token in a text stands for its characters: a model that fills masks
        would overwrite the position. A text that begins with the begin token gets no second one.

        Raises:
            PromptError: the text has code points that UTF-8 cannot hold (undecodable input).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"prompt: expected UTF-8 text, got {text[error.start]!r} at {error.start}"
            ) from error
        pieces = self._at_marks(text)
        if self._mask_text:
            pieces = [part for piece in pieces for part in _parted(piece, self._mask_text)]
        if len(pieces) > 1:
            return self._encode_pieces(text, pieces, add_special_tokens)
        token_ids = list(self.backend.encode(text, add_special_tokens=add_special_tokens))
        return self._without_second_begin(text, token_ids) if add_special_tokens else token_ids

    def _encode_pieces(
        self, text: str, pieces: Sequence[str], add_special_tokens: bool
    ) -> list[int]:
        """Encodes each piece alone, so that no name across two of them is one token."""
        token_ids: list[int] = []
        for piece in pieces:
            token_ids.extend(self.backend.encode(piece, add_special_tokens=False))
        if not add_special_tokens:
            return token_ids
        begin = list(self.backend.encode("", add_special_tokens=True))
        end: list[int] = []
        while begin and begin[-1] in self.eos_token_ids and begin[-1] != self.backend.bos_token_id:
            end.insert(0, begin.pop())
        return self._without_second_begin(text, [*begin, *token_ids, *end])

    @cached_property
    def _control_names(self) -> list[str]:
        """The names of control tokens, those of turns for example, the longest first."""
        tokens = self.backend.added_tokens_decoder.values()
        names = {token.content for token in tokens if token.special and len(token.content) > 1}
        return sorted(names, key=len, reverse=True)

    @cached_property
    def _name_lengths(self) -> dict[str, list[int]]:
        """The lengths of control names by the two characters around the place of their mark."""
        lengths: dict[str, set[int]] = {}
        for name in self._control_names:
            cut = _cut(len(name))
            around = name[cut - 1 : cut + 1]
            lengths.setdefault(around, set()).add(len(name))
        return {around: sorted(found) for around, found in lengths.items()}

    def _at_marks(self, text: str) -> list[str]:
        """The text parted at the marks of `_guarded`, and at no others; in linear time."""
        first, *rest = text.split(_GUARD)
        pieces, parts = [], [first]
        for part in rest:
            if self._is_name(parts[-1], part):
                pieces.append(_GUARD.join(parts))
                parts = []
            parts.append(part)
        return [*pieces, _GUARD.join(parts)]

    def _is_name(self, before: str, after: str) -> bool:
        """Whether the texts around a mark end and begin with the halves of one name."""
        for length in self._name_lengths.get(before[-1:] + after[:1], ()):
            cut = _cut(length)
            name = before[-cut:] + after[: length - cut]
            if len(name) == length and name in self._known_names:
                return True
        return False

    @cached_property
    def _known_names(self) -> frozenset[str]:
        return frozenset(self._control_names)

    def _guarded_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self._guarded_value(value) for key, value in message.items()}

    def _guarded_value(self, value: Any) -> Any:
        """A value of a message, a list of tool calls for example, with every text in it guarded."""
        if isinstance(value, str):
            return self._guarded(value)
        if isinstance(value, Mapping):
            return {self._guarded_value(k): self._guarded_value(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._guarded_value(item) for item in value]
        return value

    def _guarded(self, text: str) -> str:
        """The text of a message with a mark in every name of a control token: `encode` parts the
        name there, so that it stands for its characters and no message can forge a turn."""
        for name in self._control_names:
            if name in text:
                cut = _cut(len(name))
                text = text.replace(name, f"{name[:cut]}{_GUARD}{name[cut:]}")
        return text

    def _without_second_begin(self, text: str, token_ids: list[int]) -> list[int]:
        begin = self.backend.bos_token_id
        has_own = begin is not None and text.startswith(self.backend.bos_token)
        is_double = has_own and token_ids[:2] == [begin, begin]
        return token_ids[1:] if is_double else token_ids

    def apply_chat_template(
        self, /, messages: Sequence[Mapping[str, str]], **variables: Any
    ) -> list[int]:
        """Token ids of a conversation, ending where the assistant's answer starts.

        Args:
            messages: objects with ``role`` and ``content``.
            variables: further variables of the template, for example ``enable_thinking=False``.

        Raises:
            PromptError: the checkpoint has no template, or the template rejects the messages, takes
                too long or writes too much.
        """
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def render_chat(
        self,
        /,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The text that `apply_chat_template` encodes; its special tokens are already in it.

        Names of control tokens in a message stand for their characters: a mark parts them.
        A template that does not know the role `developer` gets `system` for it.
        """
        template = variables.get("chat_template") or self.backend.chat_template
        if template is None:
            raise PromptError("chat template: expected one in the checkpoint, got none")
        _check_messages(messages)
        for name in RENDERER_ARGUMENTS:
            if name in variables:
                raise PromptError(
                    f"chat template: expected names of its own variables, got {name!r}, which is"
                    " an argument of the renderer"
                )
        try:
            turns = [self._guarded_message(message) for message in messages]
            if "developer" not in str(template):
                for turn in turns:
                    turn["role"] = "system" if turn["role"] == "developer" else turn["role"]
            with bounded_rendering():
                text = self.backend.apply_chat_template(
                    turns,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **variables,
                )
        except PromptError:
            raise
        except Exception as error:  # a template is code of the checkpoint: it may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise PromptError(f"chat template: it rejected the messages: {reason}") from error
        return str(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that form no character become U+FFFD."""
        return str(
            self.backend.decode(
                list(token_ids),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def incremental_decoder(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for a sequence that grows."""
        return IncrementalDecoder(robust_decode(self, skip_special_tokens))


def _full_backend(path: Path) -> Any:
    """The tokenizer of transformers."""
    if (path / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast as BackendClass  # noqa: PLC0415 (slow to import)
    else:
        from transformers import Qwen2Tokenizer as BackendClass  # noqa: PLC0415 (slow to import)
    try:
        return BackendClass.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizer libraries raise bare Exception for bad files
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"tokenizer: {path}: cannot read the tokenizer files: "
            f"{reason[0] if reason else type(error).__name__}"
        ) from error


def _cut(length: int) -> int:
    """Where a name of this length is parted."""
    return max(1, length // 2)


def _parted(text: str, name: str) -> list[str]:
    """The text cut within every occurrence of a name."""
    cut = _cut(len(name))
    first, *rest = text.split(name)
    pieces = [first]
    for piece in rest:
        pieces[-1] += name[:cut]
        pieces.append(name[cut:] + piece)
    return pieces


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise PromptError(f"messages: expected a list of messages, got {messages!r}")
    if not messages:
        raise PromptError("messages: expected at least one, got none")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise PromptError(
                f"messages[{index}]: expected an object with role and content, got {message!r}"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise PromptError(
                    f"messages[{index}].{key}: expected a text, got {message.get(key)!r}"
                )
