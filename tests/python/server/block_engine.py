# SPDX-License-Identifier: Apache-2.0
"""A fake engine that denoises blocks at random and reports its steps as the real one does.

Until a block is committed any of its positions may be written, rewritten or masked again; nothing
final must be said about it.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from byte_tokenizer import EOS, MASK, ByteTokenizer
from diffulex.checkpoint.detokenizer import robust_decode
from diffulex.engine.answer_text import special_stops
from diffulex.engine.answers import RequestEnd, close, deliver, open_record
from diffulex.engine.metrics import RequestRecord
from diffulex.engine.output import BlockSnapshot, DenoiseSnapshot, StepOutput
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
    record: RequestRecord
    has_snapshots: bool
    token_ids: list[int] = field(default_factory=list)
    nfe: int = 0
    num_committed: int = 0  # blocks
    new_tokens: int = 0
    is_finished: bool = False
    completion_reason: str | None = None

    @property
    def prefix_len(self) -> int:
        return len(self.prompt)

    @property
    def num_blocks(self) -> int:
        return (len(self.token_ids) - self.prefix_len) // BLOCK

    def committed(self) -> list[int]:
        return self.token_ids[self.prefix_len :][: self.num_committed * BLOCK]

    def answer(self) -> list[int]:
        """What is final, without end token and masks."""
        kept = self.token_ids[self.prefix_len :][: self.max_tokens]
        if self.completion_reason != "max_nfe_reached":
            kept = self.committed()[: self.max_tokens]
            end = self._end(kept)
            return kept if end is None else kept[:end]
        return kept[: [*kept, MASK].index(MASK)]

    def snapshot(self) -> DenoiseSnapshot:
        starts = range(self.prefix_len, len(self.token_ids), BLOCK)[self.num_committed :]
        blocks = (
            BlockSnapshot(
                block_id=(start - self.prefix_len) // BLOCK,
                start=start,
                status="ACTIVE",
                token_ids=tuple(self.token_ids[start : start + BLOCK]),
                newly_written=(),
                confidences=(0.5,) * BLOCK,
            )
            for start in starts
        )
        return DenoiseSnapshot(self.req_id, MASK, self.prefix_len, (), tuple(blocks))

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
        elif len(committed) >= self.max_tokens:
            self.completion_reason = "max_new_tokens_reached"
        elif self.max_nfe is not None and self.nfe >= self.max_nfe:
            self.completion_reason = "max_nfe_reached"
        self.is_finished = self.completion_reason is not None


class BlockEngine(DiffulexAsyncEngineMixin):
    """An engine around `FakeRequest`."""

    mask_token_id = MASK

    def __init__(self, seed: int = 0, answers: dict[int, list[int]] | None = None) -> None:
        self.tokenizer = ByteTokenizer()
        self.rng = random.Random(seed)
        self.answers = answers or {}
        self.live: dict[int, FakeRequest] = {}
        self.aborted: list[int] = []
        self.num_added = self.num_steps = 0
        self.failure: Exception | None = None
        self.exited = False

    def add_request(self, prompt, sampling_params, *, has_text=False, has_snapshots=False) -> int:
        req_id, self.num_added = self.num_added, self.num_added + 1
        params, special = special_stops(self.tokenizer, sampling_params)
        length = -(-params.max_tokens // BLOCK) * BLOCK
        answer = list(self.answers.get(req_id, []))
        answer += [self.rng.choice([65, 66, 0xC3, 0xA9, 10]) for _ in range(length - len(answer))]
        limits = self.serving_limits()
        room = params.max_tokens if limits is None else limits.max_model_len - len(prompt)
        decode = robust_decode(self.tokenizer, params.skip_special_tokens is not False)
        record = open_record(
            *(req_id, tuple(prompt), params, decode, special),
            has_text=has_text,
            added_at=time.perf_counter(),
        )
        self.live[req_id] = FakeRequest(
            req_id,
            list(prompt),
            answer[:length],
            min(params.max_tokens, room),
            params.max_nfe,
            params.ignore_eos,
            params.stop_token_ids,
            record,
            has_snapshots,
            token_ids=list(prompt),
        )
        return req_id

    def record(self, req_id):
        return self.live[req_id].record

    def step(self):
        self.num_steps += 1
        if self.failure is not None:
            raise self.failure
        start = time.perf_counter()
        return [self._denoise(request, start) for request in list(self.live.values())]

    def _denoise(self, request: FakeRequest, start: float) -> StepOutput:
        request.denoise(self.rng)
        record, answer = request.record, request.answer()
        appended = answer[len(record.token_ids) :]
        record.start_step(start)
        record.add_step(time.perf_counter() - start, True, request.new_tokens, appended)
        snapshot = request.snapshot() if request.has_snapshots else None
        step = deliver(record, appended, request.new_tokens, snapshot)
        if not (request.is_finished or record.is_over):
            return step
        del self.live[request.req_id]
        generated = tuple(request.token_ids[request.prefix_len :])
        reason = request.completion_reason if request.is_finished else "stop"
        if not request.is_finished:
            record.is_cut = True
            self.aborted.append(request.req_id)
        return close(record, step, RequestEnd(tuple(answer), reason, generated))

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
