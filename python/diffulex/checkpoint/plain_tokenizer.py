# SPDX-License-Identifier: Apache-2.0
"""A tokenizer without surprises, read without transformers.

Importing transformers takes as long as the first answer of a small model. Files that say nothing which
only transformers understands are read with the libraries below it, tokenizers and jinja2; whatever else
is asked of such a tokenizer goes to the one of transformers, which is made then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template, nodes
    from tokenizers import Tokenizer

__all__ = ["PlainTokenizer", "read_plain_tokenizer"]

_NAMED = ("bos_token", "eos_token", "pad_token", "mask_token", "unk_token")
#: Keys of tokenizer_config.json that this module understands.
_KNOWN = frozenset(
    {
        *_NAMED,
        "added_tokens_decoder",
        "backend",
        "clean_up_tokenization_spaces",
        "extra_special_tokens",
        "model_max_length",
        "tokenizer_class",
    }
)
_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
#: Further files that change what transformers makes of the others.
_OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates")
_VARIABLES = frozenset({"messages", "add_generation_prompt", "namespace", "raise_exception"})


def read_plain_tokenizer(path: Path, make_full: Callable[[], Any]) -> PlainTokenizer | None:
    """The tokenizer of a directory, or None where transformers is needed to understand it.

    Args:
        path: of the checkpoint.
        make_full: makes the tokenizer of transformers.
    """
    try:
        content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the full one says what is wrong
        return None
    if not isinstance(content, dict) or not isinstance(settings, dict):
        return None
    if any((path / name).exists() for name in _OTHER_FILES) or not _is_plain(content, settings):
        return None
    from tokenizers import Tokenizer  # noqa: PLC0415

    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        template = path / "chat_template.jinja"
        text = template.read_text(encoding="utf-8") if template.is_file() else None
    except Exception:  # tokenizers raises bare Exception; the full one says what is wrong
        return None
    return PlainTokenizer(tokenizer, settings, text, make_full)


def _is_plain(content: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether the files agree and hold nothing but what `PlainTokenizer` implements."""
    if settings.keys() - _KNOWN or settings.get("tokenizer_class") not in _CLASSES:
        return False
    if settings.get("extra_special_tokens") or settings.get("clean_up_tokenization_spaces"):
        return False
    if any(content.get(name) is not None for name in ("truncation", "padding", "post_processor")):
        return False
    try:
        added = {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in content.get("added_tokens", ())
        }
        special = {token["content"] for token in added.values() if token["special"]}
    except (AttributeError, KeyError, TypeError):  # the full one says what is wrong
        return False
    named = [settings[name] for name in _NAMED if settings.get(name) is not None]
    is_known = all(isinstance(name, str) and name in special for name in named)
    return is_known and settings.get("added_tokens_decoder") == added


class PlainTokenizer:
    """What `diffulex.checkpoint.tokenizer` uses of a tokenizer of transformers, with the same results.

    Everything else is an attribute of the full one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: Mapping[str, Any],
        chat_template: str | None,
        make_full: Callable[[], Any],
    ) -> None:
        self.backend_tokenizer = tokenizer
        self.model_max_length = sys.maxsize
        self.chat_template = chat_template
        self._make_full = make_full
        self._full: Any = None
        self._template: tuple[str, Template | None] | None = None
        for name in _NAMED:
            text = settings.get(name)
            setattr(self, name, text)
            setattr(self, f"{name}_id", None if text is None else tokenizer.token_to_id(text))
        self.added_tokens_decoder = tokenizer.get_added_tokens_decoder()
        self.get_vocab = tokenizer.get_vocab

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is not filled yet, or private
            raise AttributeError(name)
        return getattr(self._complete(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._complete()(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._complete())

    def _complete(self) -> Any:
        """The tokenizer of transformers."""
        if self._full is None:
            self._full = self._make_full()
        self._full.chat_template = self.chat_template
        return self._full

    def get_added_vocab(self) -> dict[str, int]:
        """Text -> id of the tokens beside the model's vocabulary."""
        return {token.content: index for index, token in self.added_tokens_decoder.items()}

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Names of tokens; None for ids without one."""
        return [self.backend_tokenizer.id_to_token(index) for index in ids]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; there are no special tokens to add."""
        ids: list[int] = self.backend_tokenizer.encode(
            text, add_special_tokens=add_special_tokens
        ).ids
        return ids

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Text of token ids."""
        if clean_up_tokenization_spaces:
            return str(self._complete().decode(ids, skip_special_tokens, True))
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Any:
        """The text of a conversation; anything unusual is left to the full one."""
        is_plain = not tokenize and not variables and bool(messages)
        is_plain = is_plain and all(
            message.keys() == {"role", "content"} and set(map(type, message.values())) == {str}
            for message in messages
        )
        template = self._plain_template() if is_plain else None
        if template is None:
            return self._complete().apply_chat_template(
                messages,
                tokenize=tokenize,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        return template.render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
        )

    def _plain_template(self) -> Template | None:
        """The compiled template, or None where transformers offers it more than jinja2 does."""
        if self.chat_template is None:
            return None
        if self._template is None or self._template[0] != self.chat_template:
            self._template = self.chat_template, _compile(self.chat_template)
        return self._template[1]


def _compile(text: str) -> Template | None:
    from jinja2 import TemplateError, meta  # noqa: PLC0415 (only what renders needs it)
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    # Looking for names computes what is constant: operators wait until their results are bounded.
    environment.intercepted_binops = frozenset(environment.default_binop_table)
    # A global would not be asked for; every other name that a template needs is looked at below.
    shown = {"namespace": environment.globals["namespace"], "raise_exception": raise_exception}
    environment.globals.clear()
    try:
        tree = environment.parse(text)
        names = meta.find_undeclared_variables(tree)
    except TemplateError:
        return None
    if names - _VARIABLES or not _is_plain_tree(tree):
        return None
    environment.globals.update(shown)
    return environment.from_string(text)


def _is_plain_tree(tree: nodes.Template) -> bool:
    """No filter that transformers replaces, and no private name in a namespace."""
    from jinja2 import nodes  # noqa: PLC0415

    names = [node.attr for node in tree.find_all(nodes.NSRef)]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == "namespace":
            if call.args or call.dyn_args or call.dyn_kwargs:
                return False
            names += [item.key for item in call.kwargs]
    return not any(node.name == "tojson" for node in tree.find_all(nodes.Filter)) and not any(
        name.startswith("_") for name in names
    )
