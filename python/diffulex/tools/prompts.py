# SPDX-License-Identifier: Apache-2.0
"""Prompts of a command line: words, a flag, a file or standard input."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from diffulex.config.flags import UsageError, set_model
from diffulex.errors import PromptError
from diffulex.tools.request_flags import is_model

__all__ = ["checked_text", "read_prompts"]


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of `generate`; sets the model where a word names it.

    Two words are MODEL and PROMPT. One is PROMPT, unless no flag names the model and either the word
    names one on this machine or a flag says the prompt. Words and flags count, then a settings file.

    Raises:
        UsageError: more words than that.
        PromptError: no prompt, more than one source of them, or text that cannot be used.
    """
    word = _prompt_word(options)
    sources = {"PROMPT": word, "--prompt": options.prompt, "--prompts-file": options.prompts_file}
    given = {name: value for name, value in sources.items() if value is not None}
    on_line = {
        name: value for name, value in given.items() if name not in _sources_of_file(options)
    }
    given = on_line or given
    if len(given) > 1:
        raise PromptError(f"prompt: expected one, got both {' and '.join(given)}")
    if "--prompts-file" in given:
        return _prompts_of_file(given["--prompts-file"])
    text = next(iter(given.values()), None)
    if text is None or (text == "-" and "PROMPT" in given):
        if sys.stdin is None or (text is None and sys.stdin.isatty()):
            raise PromptError("prompt: expected PROMPT, --prompt or standard input, got none")
        text = sys.stdin.read().removesuffix("\n")
    if not text.strip():
        raise PromptError("prompt: expected some text, got an empty prompt")
    return [checked_text(str(text))]


def _sources_of_file(options: argparse.Namespace) -> set[str]:
    """The flags for prompts that a settings file gives."""
    names = {"prompt": "--prompt", "prompts_file": "--prompts-file"}
    return {flag for name, flag in names.items() if name in options.from_file}


def _prompt_word(options: argparse.Namespace) -> str | None:
    words = list(options.words)
    if len(words) > 2:
        raise UsageError(
            f"command line: expected MODEL and PROMPT (in quotes), got {len(words)} words"
        )
    has_model = hasattr(options, "model") and "model" not in options.from_file
    on_line = {"--prompt": options.prompt, "--prompts-file": options.prompts_file}
    has_prompt = any(
        value is not None and flag not in _sources_of_file(options)
        for flag, value in on_line.items()
    )
    if len(words) == 2 or (
        len(words) == 1 and not has_model and (has_prompt or is_model(words[0]))
    ):
        set_model(options, words.pop(0))
    return words[0] if words else None


def _prompts_of_file(name: str) -> list[str]:
    """One prompt a line; of a name in .jsonl, the `prompt` of the object in each line."""
    if name == "-":
        if sys.stdin is None:
            raise PromptError("prompt: expected standard input, got a closed one")
        lines = sys.stdin.read().split("\n")
    else:
        try:
            lines = Path(name).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "no UTF-8 text"
            raise PromptError(f"--prompts-file: cannot read {name}: {reason}") from error
    is_json = name.endswith(".jsonl")
    prompts = [
        _prompt_of_json(line, f"{name}: line {number}") if is_json else checked_text(line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise PromptError(f"--prompts-file: expected a prompt in {name}, got none")
    return prompts


def _prompt_of_json(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt.strip():
        raise PromptError(f"{where}: expected an object with a text as prompt, got {line[:80]!r}")
    return checked_text(prompt)


def checked_text(text: str) -> str:
    """The text, or an error that counts in what the user wrote, not in the rendered template."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"prompt: expected UTF-8 text, got {text[error.start]!r} at {error.start}"
        ) from error
    return text
