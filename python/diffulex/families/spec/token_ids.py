# SPDX-License-Identifier: Apache-2.0
"""Mask and stop ids of a checkpoint, resolved from its plain files.

Ids are compared, not strings: published checkpoints name the same mask token differently in
different files of one directory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diffulex.errors import CheckpointError
from diffulex.families.spec.reader import read_optional_json, token_id_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_MASK_TEXTS = ("<|mask|>", "<MASK>", "<|MASK|>", "|<MASK>|", "<|mdm_mask|>", "<[MASK_TOKEN]>")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "added_tokens.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Facts that the tokenizer files of a directory state, without building a tokenizer."""

    is_present: bool
    #: Text -> ids of the added tokens; two files may disagree, so every id is kept. A declared mask
    #: token is among them even if it is an ordinary token of the vocabulary.
    added: Mapping[str, frozenset[int]] = field(default_factory=dict)
    mask_texts: tuple[str, ...] = ()
    eos_text: str | None = None

    def ids_of(self, text: str) -> frozenset[int]:
        return self.added.get(text, frozenset())

    @property
    def added_ids(self) -> frozenset[int]:
        return frozenset().union(*self.added.values())


def _token_text(value: object) -> str | None:
    """Special tokens are stored as a string or as an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _collect(added: dict[str, set[int]], text: object, token_id: object, where: Path) -> None:
    if not isinstance(text, str):
        raise CheckpointError(f"{where}: added token: expected a text, got {text!r}")
    try:
        number = int(str(token_id))
    except ValueError as error:
        raise CheckpointError(
            f"{where}: added token {text!r}: expected an id, got {token_id!r}"
        ) from error
    added.setdefault(text, set()).add(number)


def read_tokenizer_files(model_dir: Path) -> TokenizerFiles:
    """Reads added tokens and special-token names from whichever files exist."""
    settings = read_optional_json(model_dir / "tokenizer_config.json")
    special = read_optional_json(model_dir / "special_tokens_map.json")
    added: dict[str, set[int]] = {}
    where = model_dir / "tokenizer_config.json"
    decoder = settings.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise CheckpointError(f"{where}: added_tokens_decoder: expected an object, got {decoder!r}")
    for token_id, entry in decoder.items():
        _collect(added, _token_text(entry), token_id, where)
    where = model_dir / "added_tokens.json"
    for text, token_id in read_optional_json(where).items():
        _collect(added, text, token_id, where)
    where = model_dir / "tokenizer.json"
    tokenizer = read_optional_json(where)
    entries = tokenizer.get("added_tokens") or []
    if not isinstance(entries, list):
        raise CheckpointError(f"{where}: added_tokens: expected a list, got {entries!r}")
    for entry in entries:
        if isinstance(entry, dict):
            _collect(added, _token_text(entry), entry.get("id"), where)
    found = (_token_text(source.get("mask_token")) for source in (settings, special))
    masks = tuple(dict.fromkeys(text for text in found if text is not None))
    ordinary = _ordinary_ids(model_dir, tokenizer) if set(masks) - added.keys() else {}
    for text in masks:
        if text not in added and isinstance(ordinary.get(text), int):
            added[text] = {ordinary[text]}
    eos = _token_text(settings.get("eos_token")) or _token_text(special.get("eos_token"))
    return TokenizerFiles(
        is_present=any((model_dir / name).is_file() for name in _TOKENIZER_FILES),
        added={text: frozenset(ids) for text, ids in added.items()},
        mask_texts=masks,
        eos_text=eos,
    )


def _ordinary_ids(model_dir: Path, tokenizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Text -> id of the tokens that are not added."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        return vocab
    return read_optional_json(model_dir / "vocab.json")


def resolve_mask_token_id(
    config: Mapping[str, Any],
    files: TokenizerFiles,
    *,
    vocab_size: int,
    override: int | None,
    family_default: int | None,
) -> int:
    """The mask id: override, configuration, tokenizer files, known texts, family default.

    Raises:
        CheckpointError: two sources disagree (without override), no source has an id, or the id
            is outside the vocabulary.
    """
    found: dict[str, int] = {}
    if override is not None:
        found["the mask_token_id option"] = override
    else:
        stated = token_id_list(config.get("mask_token_id"), "config.json: mask_token_id")
        if len(stated) > 1:
            raise CheckpointError(
                f"config.json: mask_token_id: expected one token id, got {list(stated)}"
            )
        for token_id in stated:
            found["config.json"] = token_id
        for text in (*files.mask_texts, *_MASK_TEXTS):
            for token_id in sorted(files.ids_of(text)):
                found[f"token {text!r} of the tokenizer files ({token_id})"] = token_id
        has_default = family_default is not None and (
            not files.is_present or family_default in files.added_ids
        )
        if not found and has_default and family_default is not None:
            found["the family default"] = family_default
    if not found:
        raise CheckpointError(
            "mask token: expected an id in config.json or a mask token in the tokenizer files, "
            "got neither; pass mask_token_id"
        )
    if len(set(found.values())) > 1:
        sources = ", ".join(f"{value} from {name}" for name, value in found.items())
        raise CheckpointError(
            f"mask token: expected one id, got {sources}; pass mask_token_id to choose"
        )
    source, token_id = next(iter(found.items()))
    if not 0 <= token_id < vocab_size:
        raise CheckpointError(
            f"mask token: expected an id below vocab_size {vocab_size}, got {token_id} from {source}"
        )
    return token_id


def resolve_stop_token_ids(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    files: TokenizerFiles,
    *,
    vocab_size: int,
    turn_end_texts: Sequence[str],
    turn_end_ids: Sequence[int],
) -> tuple[int, ...]:
    """Union, in ascending order, of every stop id the checkpoint or its family names.

    `turn_end_texts` are looked up in the tokenizer files; without tokenizer files `turn_end_ids`
    are used, as far as they lie inside the vocabulary.
    """
    stops = set(token_id_list(config.get("eos_token_id"), "config.json: eos_token_id"))
    stops |= set(
        token_id_list(generation_config.get("eos_token_id"), "generation_config.json: eos_token_id")
    )
    if files.eos_text is not None:
        stops |= files.ids_of(files.eos_text)
    for text in turn_end_texts:
        stops |= files.ids_of(text)
    if not files.is_present:
        stops |= {token_id for token_id in turn_end_ids if token_id < vocab_size}
    outside = sorted(token_id for token_id in stops if token_id >= vocab_size)
    if outside:
        raise CheckpointError(
            f"stop token: expected ids below vocab_size {vocab_size}, got {outside[0]}"
        )
    return tuple(sorted(stops))
