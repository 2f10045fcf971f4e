# SPDX-License-Identifier: Apache-2.0
"""Block-diffusion decoding of one request, straight from the rules.

No cache, no pages, no batch: every step recomputes the whole sequence with transformers' Qwen3 and
a mask built here. Shares no code with the engine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

# Two correct float32 implementations may differ by this much; a decision inside is undecidable.
PROBABILITY_ERROR = 1e-5
LOGIT_ERROR = 5e-5

DUMMY, ACTIVE, TO_CACHE, IN_CACHE = "DUMMY", "ACTIVE", "TO_CACHE", "IN_CACHE"


class WholeSequenceModel:
    """[n, V] logits of a whole sequence under the block-causal mask."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        keys = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "rope_theta",
            "max_position_embeddings",
            "attention_bias",
            "tie_word_embeddings",
        )
        self.model = Qwen3ForCausalLM(
            Qwen3Config(**{k: config[k] for k in keys}, attn_implementation="sdpa")
        ).eval()
        self.model.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=True)

    def logits(self, tokens: Sequence[int], block_size: int) -> np.ndarray:
        """float32 rows; token i sees token j iff j's block is not later than i's."""
        block = torch.arange(len(tokens)) // block_size
        mask = (block[None, :] <= block[:, None])[None, None]
        with torch.inference_mode():
            out = self.model(
                input_ids=torch.tensor([list(tokens)]), attention_mask=mask, use_cache=False
            )
        return out.logits[0].float().numpy()


@dataclass
class Settings:
    """What decides the tokens of a request."""

    block_size: int
    buffer_size: int
    mask_id: int
    candidate_limit: int  # ids at or past it are never chosen
    stop_ids: frozenset[int]
    max_model_len: int
    add_block: float = 0.1
    semi_complete: float = 0.9
    accept: float = 0.95
    rule: str = "dynamic"
    denoising_steps: int | None = None
    ranking: str = "max_prob"
    factor: float = 1.0
    entropy_bound: float = 0.1
    suppressed: frozenset[int] = frozenset()


@dataclass
class RequestSettings:
    """What a request says."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_ids: frozenset[int] = frozenset()
    max_nfe: int | None = None
    max_repetition_run: int | None = None
    accept: float | None = None


@dataclass
class Block:
    """One block of positions [start, start + B)."""

    start: int
    status: str = DUMMY
    editable_start: int = 0
    steps: int = 0  # sampler steps taken
    open_steps: int = 0  # of those, with an open gate


@dataclass
class Outcome:
    """Result of a decoded request."""

    token_ids: list[int]
    reason: str
    nfe: int
    decided_per_step: list[int] = field(default_factory=list)
    # Smallest distance of a decision from flipping, in units of the float32 error.
    margin: float = math.inf


def philox4x32(key: int, counter: Sequence[int]) -> list[int]:
    """Philox4x32-10 of Salmon et al., SC 2011."""
    mask = 0xFFFFFFFF
    words = list(counter)
    low_key, high_key = key & mask, key >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            (second >> 32) ^ words[1] ^ low_key,
            second & mask,
            (first >> 32) ^ words[3] ^ high_key,
            first & mask,
        ]
        low_key, high_key = (low_key + 0x9E3779B9) & mask, (high_key + 0xBB67AE85) & mask
    return words


def uniform(seed: int, position: int, step: int) -> float:
    """The draw of a position in a sampler step of its block."""
    words = philox4x32(seed, (position, step, 0, 0))
    top = ((words[0] << 32) | words[1]) >> 12
    return (top + 0.5) * 2.0**-52


@dataclass
class Proposal:
    """What the row of one open position offers."""

    token: int
    probability: np.float32
    ranking: float
    entropy: float
    margin: float = math.inf


def propose(row: np.ndarray, settings: Settings, temperature: float, draw: float) -> Proposal:
    """Token, probability and ranking of one row: mode `exclude`, no filters."""
    logits = row.astype(np.float64)
    if temperature >= 1e-5:
        logits = logits / temperature
    weights = np.exp(logits - logits.max())
    probabilities = weights / weights.sum()
    is_candidate = np.arange(len(row)) < settings.candidate_limit
    is_candidate[[settings.mask_id, *settings.suppressed]] = False
    candidates = np.flatnonzero(is_candidate)
    if temperature < 1e-5:
        # The first of equal maxima is the lowest id.
        token = int(candidates[np.argmax(row[candidates])])
        runner_up, best_logit = np.partition(row[candidates], -2)[-2:]
        margin = float(best_logit - runner_up) / LOGIT_ERROR
    else:
        cumulative = np.cumsum(probabilities[candidates])
        above = np.flatnonzero(cumulative > draw * cumulative[-1])
        token = int(candidates[above[0]] if len(above) else candidates[-1])
        distances = np.abs(cumulative[:-1] / cumulative[-1] - draw)
        margin = float(distances.min()) / PROBABILITY_ERROR
    positive = probabilities[probabilities > 0]
    entropy = -float((positive * np.log(positive)).sum())
    second, best = np.partition(probabilities[candidates], -2)[-2:]
    ranking = {
        "max_prob": float(probabilities[token]),
        "margin_confidence": float(best - second),
        "neg_entropy": -entropy,
    }[settings.ranking]
    return Proposal(token, np.float32(probabilities[token]), ranking, entropy, margin)


def acceptance_margin(
    proposals: Mapping[int, Proposal], settings: Settings, threshold: float, is_gate_open: bool
) -> float:
    """How far the accepted set is from changing, in units of the float32 error."""
    values = [abs(float(p.probability) - threshold) for p in proposals.values()]
    if is_gate_open:
        rankings = sorted((p.ranking for p in proposals.values()), reverse=True)
        gaps = [a - b for a, b in itertools.pairwise(rankings)]
        is_threshold = settings.rule.startswith("threshold")
        # The threshold rules need the best position only, and only when none passes.
        values += gaps[:1] if is_threshold else gaps
        if settings.rule in ("factor", "entropy_bound"):
            keys = sorted(p.entropy for p in proposals.values())
            total = 0.0
            for n, key in enumerate(keys, start=1):
                values += [abs(total - settings.entropy_bound)] if n > 1 else []
                total += key
            values += [b - a for a, b in itertools.pairwise(keys)]
            order = sorted((float(p.probability) for p in proposals.values()), reverse=True)
            for n, probability in enumerate(order, start=1):
                values.append(abs((n + 1) * (1 - probability) - settings.factor) / (n + 1))
    return min([math.inf, *values]) / PROBABILITY_ERROR


def accepted_positions(
    proposals: Mapping[int, Proposal],
    settings: Settings,
    threshold: float,
    is_gate_open: bool,
    open_steps: int,
) -> set[int]:
    """Open positions that take their token in this step."""
    if not proposals:
        return set()
    limit = np.float32(threshold)
    confident = {i for i, p in proposals.items() if p.probability > limit}
    if settings.rule == "threshold_non_strict":
        confident = {i for i, p in proposals.items() if p.probability >= limit}
    if not is_gate_open:
        return confident
    ranked = sorted(proposals, key=lambda i: (-proposals[i].ranking, i))
    steps = settings.denoising_steps or settings.block_size
    base, extra = divmod(settings.block_size, steps)
    count = base + (1 if open_steps < extra else 0)
    if open_steps >= steps:
        count = max(1, base + (1 if steps - 1 < extra else 0))
    enough = confident if len(confident) >= count else set(ranked[:count])
    return {
        "threshold": lambda: confident or {ranked[0]},
        "threshold_non_strict": lambda: confident or {ranked[0]},
        "static": lambda: set(ranked[:count]),
        "dynamic": lambda: enough,
        "sequential": lambda: set(sorted(proposals)[:count]),
        "factor": lambda: factor_positions(proposals, settings.factor),
        "entropy_bound": lambda: entropy_positions(proposals, settings.entropy_bound),
    }[settings.rule]()


def factor_positions(proposals: Mapping[int, Proposal], factor: float) -> set[int]:
    """The n most probable, with the largest n for which (n + 1)(1 - p(n)) < factor."""
    order = sorted(proposals, key=lambda i: (-proposals[i].probability, i))
    best = 1
    for n, i in enumerate(order, start=1):
        if (n + 1) * (1 - float(proposals[i].probability)) < factor:
            best = n
    return set(order[:best])


def entropy_positions(proposals: Mapping[int, Proposal], bound: float) -> set[int]:
    """Ascending entropy while the sum of the entropies before does not pass the bound."""
    chosen: set[int] = set()
    total = 0.0
    for i in sorted(proposals, key=lambda i: (proposals[i].entropy, i)):
        if chosen and total > bound:
            break
        chosen.add(i)
        total += proposals[i].entropy
    return chosen


class BruteForceDecoder:
    """Decodes one request with nothing but the rules."""

    def __init__(self, model: WholeSequenceModel, settings: Settings) -> None:
        self.model = model
        self.settings = settings

    def decode(self, prompt: Sequence[int], request: RequestSettings) -> Outcome:
        """Runs the request alone to its end."""
        run = _Run(self.model, self.settings, list(prompt), request)
        return run.outcome()


class _Run:
    def __init__(
        self,
        model: WholeSequenceModel,
        settings: Settings,
        prompt: list[int],
        request: RequestSettings,
    ) -> None:
        self.model, self.settings, self.request = model, settings, request
        size = settings.block_size
        self.prompt_len = len(prompt)
        self.limit = min(self.prompt_len + request.max_tokens, settings.max_model_len)
        self.tokens = dict(enumerate(prompt))  # position -> token; absent = mask
        self.blocks = [
            Block(i * size) for i in range(self.limit // size + settings.buffer_size + 2)
        ]
        full = self.prompt_len // size
        for block in self.blocks[:full]:
            block.status, block.editable_start = TO_CACHE, size
        self.head = full
        if self.prompt_len % size:
            self.blocks[full].status = ACTIVE
            self.blocks[full].editable_start = self.prompt_len % size
        self.nfe = 0
        self.decided: list[int] = []
        self.margin = math.inf

    def outcome(self) -> Outcome:
        is_aligned = self.prompt_len % self.settings.block_size == 0
        self._step(is_pure_prefill=is_aligned)
        while True:
            reason = self._reason()
            if reason is not None:
                end = self._settled_end()
                if reason == "eos_token_generated":
                    end = self._stop_position()
                ids = [self.tokens[i] for i in range(self.prompt_len, end)]
                return Outcome(ids, reason, self.nfe, self.decided, self.margin)
            self._step(is_pure_prefill=False)

    def _buffer(self) -> list[Block]:
        return self.blocks[self.head : self.head + self.settings.buffer_size]

    def _masks(self, block: Block) -> list[int]:
        """Open positions of a block, relative."""
        size = self.settings.block_size
        first = block.editable_start if block.status != TO_CACHE else size
        return [r for r in range(first, size) if block.start + r not in self.tokens]

    def _progress(self, block: Block) -> float:
        size = self.settings.block_size
        return (size - len(self._masks(block))) / size

    def _activate(self) -> None:
        buffer = self._buffer()
        valid = [block for block in buffer if block.status != DUMMY]
        if len(valid) == len(buffer):
            return
        following = buffer[len(valid)]
        if following.start >= self.limit or self._stop_position() is not None:
            return
        if not valid:
            index = following.start // self.settings.block_size
            is_ready = index == 0 or self.blocks[index - 1].status == IN_CACHE
        else:
            is_ready = np.float32(self._progress(valid[-1])) >= np.float32(self.settings.add_block)
        if is_ready:
            following.status = ACTIVE

    def _step(self, is_pure_prefill: bool) -> None:
        settings, size = self.settings, self.settings.block_size
        self.nfe += 1
        if not is_pure_prefill:
            self._activate()
        stored = [block for block in self.blocks if block.status == TO_CACHE]
        active = [] if is_pure_prefill else [b for b in self._buffer() if b.status == ACTIVE]
        if active:
            end = active[-1].start + size
            sequence = [self.tokens.get(i, settings.mask_id) for i in range(end)]
            rows = self.model.logits(sequence, size)
            writes: dict[int, int] = {}
            for block in active:
                writes.update(self._sample(block, rows))
            self.tokens.update(writes)
            self.decided.append(len(writes))
        else:
            self.decided.append(0)
        self._transition(stored)

    def _sample(self, block: Block, rows: np.ndarray) -> dict[int, int]:
        request, settings = self.request, self.settings
        index = block.start // settings.block_size
        is_open = index == 0 or (
            np.float32(self._progress(self.blocks[index - 1])) >= np.float32(settings.semi_complete)
        )
        proposals = {
            r: propose(
                rows[block.start + r],
                settings,
                request.temperature,
                uniform(request.seed, block.start + r, block.steps),
            )
            for r in self._masks(block)
        }
        threshold = settings.accept if request.accept is None else request.accept
        chosen = accepted_positions(proposals, settings, threshold, is_open, block.open_steps)
        margins = [p.margin for p in proposals.values()]
        margins.append(acceptance_margin(proposals, settings, threshold, is_open))
        self.margin = min(self.margin, *margins)
        block.steps += 1
        block.open_steps += is_open
        return {block.start + r: proposals[r].token for r in chosen}

    def _transition(self, stored: list[Block]) -> None:
        for index, block in enumerate(self.blocks):
            before = self.blocks[index - 1].status if index else IN_CACHE
            if block.status == ACTIVE and not self._masks(block) and before in (TO_CACHE, IN_CACHE):
                block.status = TO_CACHE
        for block in stored:
            block.status = IN_CACHE
        while self.blocks[self.head].status == IN_CACHE:
            self.head += 1

    def _settled_end(self) -> int:
        end = self.prompt_len
        while end < self.limit and end in self.tokens:
            end += 1
        return end

    def _stop_position(self) -> int | None:
        if self.request.ignore_eos:
            return None
        stops = self.settings.stop_ids | self.request.stop_ids
        for position in range(self.prompt_len, self.limit):
            if self.tokens.get(position) in stops:
                return position
        return None

    def _reason(self) -> str | None:
        request, end, stop = self.request, self._settled_end(), self._stop_position()
        if stop is not None and stop < end:
            return "eos_token_generated"
        if end == self.limit:
            is_token_limit = self.limit == self.prompt_len + request.max_tokens
            return "max_new_tokens_reached" if is_token_limit else "max_model_len_reached"
        if request.max_nfe is not None and self.nfe >= request.max_nfe:
            return "max_nfe_reached"
        if request.max_repetition_run is not None:
            run = 0
            for position in range(end - 1, self.prompt_len - 1, -1):
                if self.tokens[position] != self.tokens[end - 1]:
                    break
                run += 1
            if run >= request.max_repetition_run:
                return "max_repetition_run_reached"
        return None
