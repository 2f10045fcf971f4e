# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, from the plain tokenizer files of a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from diffulex.errors import CheckpointError, PromptError

if TYPE_CHECKING:
    from pathlib import Path

_REPLACEMENT = "\ufffd"


class Tokenizer:
    """A stock tokenizer of transformers; code in the checkpoint directory is never run."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        # The engine checks lengths itself, with an error; the backend would print a warning.
        backend.model_max_length = sys.maxsize

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer:
        """Reads ``tokenizer.json``, or else ``vocab.json`` and ``merges.txt`` (Qwen2 byte level).

        Raises:
            CheckpointError: neither form is present, or the files cannot be read.
        """
        has_vocab = (path / "vocab.json").is_file() and (path / "merges.txt").is_file()
        if (path / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast as BackendClass  # noqa: PLC0415 (slow to import)
        elif has_vocab:
            from transformers import Qwen2Tokenizer as BackendClass  # noqa: PLC0415 (slow to import)
        else:
            raise CheckpointError(
                f"tokenizer: {path}: expected tokenizer.json, or vocab.json and merges.txt, got neither"
            )
        try:
            backend = BackendClass.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the tokenizer libraries raise bare Exception for bad files
            reason = str(error).strip().splitlines()
            raise CheckpointError(
                f"tokenizer: {path}: cannot read the tokenizer files: "
                f"{reason[0] if reason else type(error).__name__}"
            ) from error
        return cls(backend)

    @cached_property
    def tokenizer_vocab_size(self) -> int:
        """Largest id plus one; the model's vocabulary is often larger."""
        return int(max(self.backend.get_vocab().values())) + 1

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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt.

        Raises:
            PromptError: the text has code points that UTF-8 cannot hold (undecodable input).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"prompt: expected UTF-8 text, got {text[error.start]!r} at {error.start}"
            ) from error
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], **variables: object
    ) -> list[int]:
        """Token ids of a conversation, ending where the assistant's answer starts.

        Args:
            messages: objects with ``role`` and ``content``.
            variables: further variables of the template, for example ``enable_thinking=False``.

        Raises:
            PromptError: the checkpoint has no template, or the template rejects the messages.
        """
        return self.encode(self.render_chat(messages, **variables), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, str]], **variables: object) -> str:
        """The text that `apply_chat_template` encodes; its special tokens are already in it."""
        if not self.has_chat_template:
            raise PromptError("chat template: expected one in the checkpoint, got none")
        _check_messages(messages)
        try:
            text = self.backend.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **variables,
            )
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
        return IncrementalDecoder(self, skip_special_tokens)


class IncrementalDecoder:
    """Turns a growing id sequence into text that is only ever appended to.

    The pieces of all `push` calls and the final `flush` together equal the text of the whole
    sequence. Only a window of recent ids is decoded again, so the cost does not grow with the
    length of the text:

        ids:  ... forgotten ... | context      | since then           |  <- window
        text: ... returned ...  | returned (num_returned chars) | new |
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        #: Leading ids of the window whose text is complete; the window starts at such a point too.
        self._num_context = 0
        self._num_returned = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that becomes final with these ids; may be empty."""
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        # Bytes at the end that do not form a character yet appear as one replacement character.
        is_open = text.endswith(_REPLACEMENT)
        final = text.removesuffix(_REPLACEMENT) if is_open else text
        piece = final[self._num_returned :]
        self._num_returned = len(final)
        if not is_open:
            # The newest ids stay as context: some decoders treat the first id of a text specially.
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_returned = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """Text still held back; bytes that were never completed give U+FFFD."""
        piece = self._decode(self._window)[self._num_returned :]
        self._num_returned += len(piece)
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)


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
