# SPDX-License-Identifier: Apache-2.0
"""A fake engine that denoises blocks at random, with the attributes that the serving mixin reads.

Until a block is committed any of its positions may be written, rewritten or masked again; the
mixin must never say anything final about it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

from byte_tokenizer import EOS, MASK, ByteTokenizer
from diffulex.serving.tick import DiffulexAsyncEngineMixin

BLOCK, BUFFER = 4, 3


@dataclass
class FakeRequest:
    """One request; the answer it will have is decided when it is added."""

    req_id: int
    prompt: list[int]
    target: list[int]  # whole blocks
    max_tokens: int
    max_nfe: int | None
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    nfe: int = 0
    num_committed: int = 0  # blocks
    new_tokens: int = 0
    is_finished: bool = False
    completion_reason: str | None = None
    is_multi_block: bool = True
    mask_token_id: int | None = MASK
    matched_stop_id: int | None = None
    _last_execution_is_prefill: bool = False

    @property
    def prefix_len(self) -> int:
        return len(self.prompt)

    @property
    def num_blocks(self) -> int:
        return (len(self.token_ids) - self.prefix_len) // BLOCK

    @property
    def dllm_block_buffer(self) -> SimpleNamespace:
        start = self.prefix_len + self.num_committed * BLOCK
        return SimpleNamespace(
            first_running_block=SimpleNamespace(start=start),
            last_running_block=SimpleNamespace(end=len(self.token_ids)),
        )

    def committed(self) -> list[int]:
        return self.token_ids[self.prefix_len :][: self.num_committed * BLOCK]

    @property
    def truncated_response(self) -> list[int]:
        kept = self.token_ids[self.prefix_len :][: self.max_tokens]
        if self.completion_reason == "max_nfe_reached":
            return kept
        kept = self.committed()[: self.max_tokens]
        end = self._end(kept)
        return kept if end is None else kept[:end]

    @property
    def full_response(self) -> list[int]:
        return self.token_ids[self.prefix_len :]

    def _end(self, ids: list[int]) -> int | None:
        for index, token in enumerate(ids):
            if (token == EOS and not self.ignore_eos) or token in self.stop_token_ids:
                return index
        return None

    def denoise(self, rng: random.Random) -> None:
        """One forward: rewrites open blocks, commits a leading run of them."""
        self.nfe += 1
        while len(self.token_ids) - self.prefix_len < min(
            len(self.target), (self.num_committed + BUFFER) * BLOCK
        ):
            if self.num_blocks > self.num_committed and rng.random() < 0.5:
                break
            self.token_ids.extend([MASK] * BLOCK)
        before = self.token_ids.count(MASK)
        for position in range(self.prefix_len + self.num_committed * BLOCK, len(self.token_ids)):
            draw = rng.random()
            if draw < 0.3:
                self.token_ids[position] = self.target[position - self.prefix_len]
            elif draw < 0.4:
                self.token_ids[position] = rng.choice([MASK, 65, 0xC3, EOS])
        while self.num_committed < self.num_blocks and rng.random() < 0.4:
            start = self.prefix_len + self.num_committed * BLOCK
            wanted = self.target[self.num_committed * BLOCK :][:BLOCK]
            self.token_ids[start : start + BLOCK] = wanted
            self.num_committed += 1
        self.new_tokens = max(0, before - self.token_ids.count(MASK))
        self._check_end()

    def _check_end(self) -> None:
        committed = self.committed()
        end = self._end(committed[: self.max_tokens])
        if end is not None:
            self.completion_reason = "eos_token_generated"
            if committed[end] in self.stop_token_ids:
                self.matched_stop_id = committed[end]
        elif len(committed) >= self.max_tokens:
            self.completion_reason = "max_new_tokens_reached"
        elif self.max_nfe is not None and self.nfe >= self.max_nfe:
            self.completion_reason = "max_nfe_reached"
        self.is_finished = self.completion_reason is not None


class BlockEngine(DiffulexAsyncEngineMixin):
    """Twenty lines of an engine around `FakeRequest`."""

    def __init__(self, seed: int = 0, answers: dict[int, list[int]] | None = None) -> None:
        self.tokenizer = ByteTokenizer()
        self.rng = random.Random(seed)
        self.answers = answers or {}
        self.live: dict[int, FakeRequest] = {}
        self.aborted: list[int] = []
        self.num_added = self.num_steps = 0
        self.failure: Exception | None = None
        self.exited = False

    def add_request(self, prompt, sampling_params) -> int:
        req_id, self.num_added = self.num_added, self.num_added + 1
        length = -(-sampling_params.max_tokens // BLOCK) * BLOCK
        answer = list(self.answers.get(req_id, []))
        answer += [self.rng.choice([65, 66, 0xC3, 0xA9, 10]) for _ in range(length - len(answer))]
        self.live[req_id] = FakeRequest(
            req_id,
            list(prompt),
            answer[:length],
            sampling_params.max_tokens,
            sampling_params.max_nfe,
            sampling_params.ignore_eos,
            sampling_params.stop_token_ids,
            token_ids=list(prompt),
        )
        return req_id

    def step(self):
        self.num_steps += 1
        if self.failure is not None:
            raise self.failure
        touched = list(self.live.values())
        for request in touched:
            request.denoise(self.rng)
            if request.is_finished:
                del self.live[request.req_id]
        return touched, False

    def is_finished(self) -> bool:
        return not self.live

    def abort_request(self, req_id: int) -> bool:
        self.aborted.append(req_id)
        return self.live.pop(req_id, None) is not None

    def start_profile(self, prefix=None):
        raise RuntimeError("profiling is off")

    def stop_profile(self):
        return {"trace": "here"}

    def flush_cache(self):
        return {"num_dropped_units": 0}

    def exit(self) -> None:
        self.exited = True
