# SPDX-License-Identifier: Apache-2.0
"""Tokenizer and token sequences of the demo model: prompt, worked answer, end of turn, filler."""

from __future__ import annotations

import functools
import json
import multiprocessing
import multiprocessing.pool
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from diffulex.bench import word_problems

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MASK = "<|MASK|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, MASK)
VOCAB_SIZE = 640
CHUNK_SIZE = 2048

CHAT_TEMPLATE = (
    "{#- The model was trained on single turns: only the last user message is rendered. -#}\n"
    "{%- set turn = namespace(content=none) -%}\n"
    "{%- for message in messages -%}\n"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}\n"
    "{{- raise_exception('expected role system, user or assistant, got ' + message['role']) -}}\n"
    "{%- endif -%}\n"
    "{%- if message['role'] == 'user' -%}\n"
    "{%- set turn.content = message['content'] -%}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- if turn.content is none -%}\n"
    "{{- raise_exception('expected a user message, got none') -}}\n"
    "{%- endif -%}\n"
    "{{- '<|im_start|>user\\n' + turn.content + '<|im_end|>\\n' -}}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|im_start|>assistant\\n' -}}\n"
    "{%- endif -%}\n"
)


def render_prompt(question: str) -> str:
    """The ChatML prompt of one question, exactly as the chat template renders it."""
    return f"{TURN_START}user\n{question}{TURN_END}\n{TURN_START}assistant\n"


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """Id of a special token; a tokenizer without it is an error."""
    found: int | None = tokenizer.token_to_id(text)
    if found is None:
        raise ValueError(f"token_id: expected a tokenizer with the token {text}, got one without")
    return found


def build_tokenizer(
    num_problems: int = 20_000,
    seed: int = 7,
    difficulty: word_problems.Difficulty = word_problems.DEFAULT_DIFFICULTY,
) -> Tokenizer:
    """Byte-level BPE over generated problems. Digits are never merged; any UTF-8 text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def corpus() -> Iterator[str]:
        rng = random.Random(f"tokenizer/{seed}")
        for index in range(num_problems):
            level = 1 + index % word_problems.MAX_LEVEL
            problem = word_problems.generate_problem(rng, level, difficulty)
            yield problem.question
            yield problem.solution
            yield "user\nassistant\nsystem\n"

    tokenizer.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"build_tokenizer: expected {VOCAB_SIZE} tokens, got {tokenizer.get_vocab_size()}"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    special = {
        str(token_id(tokenizer, text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for text in SPECIAL_TOKENS
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": special,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "mask_token": MASK,
        "extra_special_tokens": {},
        "model_max_length": max_length,
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


@dataclass(frozen=True)
class Sequences:
    """Training sequences: prompt, answer, end of turn, then end-of-text up to the full length."""

    tokens: np.ndarray[Any, Any]  # [num, length] int16
    prompt_len: np.ndarray[Any, Any]  # [num] int16
    used_len: np.ndarray[Any, Any]  # [num] int16: prompt + answer + end of turn

    def cut(self, start: int, end: int) -> Sequences:
        """Sequences [start, end)."""
        rows = slice(start, end)
        return Sequences(self.tokens[rows], self.prompt_len[rows], self.used_len[rows])

    @staticmethod
    def join(first: Sequences, second: Sequences) -> Sequences:
        """The sequences of ``first``, then those of ``second``."""
        return Sequences(
            np.concatenate([first.tokens, second.tokens]),
            np.concatenate([first.prompt_len, second.prompt_len]),
            np.concatenate([first.used_len, second.used_len]),
        )


@dataclass(frozen=True)
class SequenceSpec:
    """What a worker needs to draw one chunk of sequences."""

    seed: int
    length: int
    block_size: int
    max_noisy_len: int
    tokenizer_json: str
    excluded: frozenset[str]
    difficulty: word_problems.Difficulty = word_problems.DEFAULT_DIFFICULTY
    level_weights: tuple[float, ...] = word_problems.TRAINING_LEVEL_WEIGHTS


def encode_problem(
    tokenizer: Tokenizer, problem: word_problems.Problem
) -> tuple[list[int], list[int]]:
    """Token ids of the prompt and of the response (answer text and end of turn)."""
    prompt = tokenizer.encode(render_prompt(problem.question), add_special_tokens=False).ids
    answer = tokenizer.encode(problem.solution + TURN_END, add_special_tokens=False).ids
    return prompt, answer


@functools.lru_cache(maxsize=1)
def _worker_tokenizer(tokenizer_json: str) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json)


def draw_chunk(spec: SequenceSpec, chunk_id: int) -> Sequences:
    """The sequences of one chunk; the few problems that do not fit the lengths are dropped."""
    tokenizer = _worker_tokenizer(spec.tokenizer_json)
    end_of_text = token_id(tokenizer, END_OF_TEXT)
    problems = list(
        word_problems.training_problems(
            spec.seed, chunk_id, CHUNK_SIZE, spec.excluded, spec.level_weights, spec.difficulty
        )
    )
    tokens = np.full((len(problems), spec.length), end_of_text, dtype=np.int16)
    prompt_lens, used_lens, row = [], [], 0
    for problem in problems:
        prompt, answer = encode_problem(tokenizer, problem)
        used = len(prompt) + len(answer)
        tail = len(prompt) % spec.block_size
        if used > spec.length or tail + len(answer) > spec.max_noisy_len:
            continue
        tokens[row, :used] = prompt + answer
        prompt_lens.append(len(prompt))
        used_lens.append(used)
        row += 1
    return Sequences(
        tokens[:row], np.array(prompt_lens, dtype=np.int16), np.array(used_lens, dtype=np.int16)
    )


def iterate_batches(
    pool: multiprocessing.pool.Pool, spec: SequenceSpec, batch: int, num_batches: int
) -> Iterator[Sequences]:
    """``num_batches`` batches of exactly ``batch`` sequences, drawn ahead by the worker processes.

    Chunks arrive in order, so the batches depend on ``spec`` alone and not on the number of
    workers.
    """
    # Twice the need covers the sequences that are dropped; workers stop with the pool.
    num_chunks = 2 + 2 * (batch * num_batches) // CHUNK_SIZE
    chunks = pool.imap(functools.partial(draw_chunk, spec), range(num_chunks))
    rest = next(chunks)
    for _ in range(num_batches):
        while len(rest.prompt_len) < batch:
            chunk = next(chunks, None)
            if chunk is None:
                raise ValueError(
                    "iterate_batches: expected lengths that fit at least half of the problems, got "
                    f"length {spec.length} and max_noisy_len {spec.max_noisy_len}"
                )
            rest = Sequences.join(rest, chunk)
        yield rest.cut(0, batch)
        rest = rest.cut(batch, len(rest.prompt_len))


def start_workers(num_workers: int) -> multiprocessing.pool.Pool:
    """Worker processes for ``iterate_batches``. Fork is cheap; call before the first CUDA call."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return multiprocessing.get_context("fork").Pool(num_workers)
