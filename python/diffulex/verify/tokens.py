# SPDX-License-Identifier: Apache-2.0
"""Rules about ids and texts: tokenizer, mask, stop ids, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.verify.report import RuleError

if TYPE_CHECKING:
    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.config import Config

__all__ = ["SAMPLES", "check_mask", "check_stops", "check_template", "check_tokenizer"]

#: Texts that a tokenizer has to give back.
SAMPLES = (
    "Tom has 3 apples.",
    "for i in range(10):\n    print(i ** 2)\n",
    "Grüße, 你好, привет, 🙂!",
    "x_1 = \\frac{1}{2}; $a^2$  two  spaces",
)
_TURN = {"role": "user", "content": "What is 2 + 3?"}
_ANSWER = "It is 5."


def check_tokenizer(tokenizer: Tokenizer, config: Config) -> str:
    """Texts come back, ids lie in the vocabulary, and transformers gives the same ids."""
    backend = _other_backend(config)
    vocab_size = config.model.spec.vocab_size
    if tokenizer.tokenizer_vocab_size > vocab_size:
        raise RuleError(
            f"expected ids below vocab_size {vocab_size}, got a tokenizer with"
            f" {tokenizer.tokenizer_vocab_size}"
        )
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        back = tokenizer.decode(ids)
        if back != text:
            raise RuleError(f"expected {text!r} back, got {back!r}")
        if backend is not None:
            expected = backend.encode(text, add_special_tokens=False)
            if expected != ids:
                raise RuleError(f"{text!r}: expected {expected} as transformers, got {ids}")
    compared = "" if backend is None else ", ids equal to those of transformers"
    return f"{len(SAMPLES)} texts come back{compared}"


def _other_backend(config: Config) -> Any:
    """The tokenizer of transformers, where tokenizer.json is enough to make one."""
    directory = Path(config.model.model_dir)
    if not (directory / "tokenizer.json").is_file():
        return None
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 (slow to import)

    return PreTrainedTokenizerFast.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )


def check_mask(tokenizer: Tokenizer, config: Config) -> str:
    """The mask is a token of its own: in the vocabulary, no stop id, and not written by texts."""
    if config.decoding.traits.has_canvas:
        return "none: a canvas has no masks"
    mask = config.model.mask_token_id
    spec = config.model.spec
    if not 0 <= mask < spec.embedding_rows:
        raise RuleError(f"expected an id below {spec.embedding_rows}, got {mask}")
    if mask in config.model.eos:
        raise RuleError(
            f"expected another id than the stop ids {list(config.model.eos)}, got {mask}"
        )
    text = tokenizer.backend.convert_ids_to_tokens([mask])[0]
    if text is None or text not in tokenizer.backend.get_added_vocab():
        raise RuleError(f"expected an added token of the tokenizer, got {mask} ({text!r})")
    declared = tokenizer.mask_token_id
    if declared not in (None, mask):
        raise RuleError(f"expected the tokenizer's mask token {declared}, got {mask}")
    stored = _config_mask(config)
    if stored not in (None, mask):
        raise RuleError(f"expected mask_token_id {stored} of config.json, got {mask}")
    for sample in (text, *SAMPLES):
        if mask in tokenizer.encode(sample):
            raise RuleError(f"expected no mask among the ids of {sample!r}, got one")
    return f"{mask} ({text})"


def _config_mask(config: Config) -> int | None:
    path = Path(config.model.model_dir) / "config.json"
    value = json.loads(path.read_text(encoding="utf-8")).get("mask_token_id")
    return value if isinstance(value, int) else None


def check_stops(tokenizer: Tokenizer, config: Config) -> str:
    """Every id that ends an answer is known: the end of text, those of the files, the end of a turn."""
    stops = set(config.model.eos)
    if not stops:
        raise RuleError("expected at least one stop id, got none")
    outside = [stop for stop in sorted(stops) if not 0 <= stop < config.model.spec.vocab_size]
    if outside:
        raise RuleError(f"expected ids of the vocabulary, got {outside}")
    wanted = {f"end of text {token}": token for token in tokenizer.eos_token_ids}
    end = _end_of_turn(tokenizer)
    if end is not None:
        wanted[f"end of turn {tokenizer.backend.convert_ids_to_tokens([end])[0]}"] = end
    for name, token in wanted.items():
        if token not in stops:
            raise RuleError(f"expected the {name} ({token}) among the stop ids {sorted(stops)}")
    names = tokenizer.backend.convert_ids_to_tokens(sorted(stops))
    return ", ".join(f"{i} ({n})" for i, n in zip(sorted(stops), names, strict=True))


def _end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The special token that follows the assistant's words in a conversation; None without one."""
    if not tokenizer.has_chat_template:
        return None
    answer = {"role": "assistant", "content": _ANSWER}
    text = tokenizer.render_chat([_TURN, answer, _TURN], add_generation_prompt=False)
    rest = text.partition(_ANSWER)[2]
    ids = tokenizer.encode(rest, add_special_tokens=False)
    added = set(tokenizer.backend.get_added_vocab().values())
    return ids[0] if ids and ids[0] in added else None


def check_template(tokenizer: Tokenizer, config: Config) -> str:
    """A question becomes a prompt that ends where the assistant begins, as transformers renders it."""
    if not tokenizer.has_chat_template:
        return "none in the checkpoint: prompts are raw texts"
    prompt = tokenizer.render_chat([_TURN])
    closed = tokenizer.render_chat([_TURN], add_generation_prompt=False)
    if _TURN["content"] not in prompt:
        raise RuleError(f"expected the words of the user in the prompt, got {prompt!r}")
    if prompt == closed or not prompt.startswith(closed):
        raise RuleError(f"expected the head of an answer at the end of the prompt, got {prompt!r}")
    answer = {"role": "assistant", "content": _ANSWER}
    whole = tokenizer.render_chat([_TURN, answer], add_generation_prompt=False)
    if _ANSWER in whole and not whole.startswith(prompt):
        raise RuleError(
            f"expected a conversation to go on from its prompt {prompt!r}, got {whole!r}"
        )
    backend = _other_backend(config)
    if backend is not None and backend.chat_template is not None:
        expected = backend.apply_chat_template([_TURN], tokenize=False, add_generation_prompt=True)
        if expected != prompt:
            raise RuleError(f"expected {expected!r} as transformers renders it, got {prompt!r}")
    ids = tokenizer.apply_chat_template([_TURN])
    if not config.decoding.traits.has_canvas and config.model.mask_token_id in ids:
        raise RuleError("expected no mask in a prompt, got one")
    return f"{len(ids)} tokens for a question, ending in {prompt[-24:]!r}"
