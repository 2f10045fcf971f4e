# SPDX-License-Identifier: Apache-2.0
"""Rules about numbers: logits and tokens against a reference, and the engine against itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.config.sampling_params import SamplingParams
from diffulex.verify.reference import is_canvas, is_shifted
from diffulex.verify.report import RuleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.config.config import Config
    from diffulex.engine.engine import Diffulex
    from diffulex.verify.reference import Reference
    from diffulex.verify.trajectory import Forward, Trajectory

__all__ = [
    "Answers",
    "answers_of",
    "check_greedy",
    "check_logits",
    "check_prefix_cache",
    "check_same",
    "distance",
    "tolerance",
]

#: Largest difference of logits in float32, relative to the largest logit.
_FLOAT32 = 1e-4
#: Root mean square of the difference in 16 bits, relative to that of the logits: dense, with experts
#: (where a rounded score may choose another expert).
_HALF, _HALF_EXPERTS = 0.03, 0.10


def tolerance(config: Config) -> tuple[str, float]:
    """What is compared, and how much it may be."""
    if config.model.dtype == "float32":
        return "largest difference", _FLOAT32
    return "relative RMS", _HALF if config.model.spec.moe is None else _HALF_EXPERTS


def distance(kind: str, got: torch.Tensor, expected: torch.Tensor) -> float:
    """How far logits [rows, V] are from others, in one of the kinds of `tolerance`."""
    if got.shape != expected.shape:
        raise RuleError(f"expected logits {list(expected.shape)}, got {list(got.shape)}")
    difference = (got - expected).abs()
    if kind == "largest difference":
        return float(difference.max() / expected.abs().max().clamp(min=1.0))
    return float((difference.square().mean() / expected.square().mean()).sqrt())


class Answers:
    """The logits of a reference beside those of each forward.

    Args:
        trajectories: of this engine.
        reference: None: what is in `recorded`.
    """

    def __init__(
        self, config: Config, trajectories: Sequence[Trajectory], reference: Reference
    ) -> None:
        self.config = config
        #: Forward, its tokens, its logits here, those of the reference, its trajectory.
        self.rows: list[tuple[Trajectory, Forward, list[int], torch.Tensor, torch.Tensor]] = []
        for trajectory in trajectories:
            for forward, tokens in trajectory.states():
                if forward.logits is None or not forward.logits_rows:
                    continue
                expected = reference.logits(trajectory, forward, tokens)
                got = forward.logits[:, : config.model.spec.vocab_size]
                cap = getattr(config.model.spec, "final_logit_softcap", None)
                if cap:
                    got = cap * torch.tanh(got / cap)
                expected = expected[:, : got.size(1)]
                self.rows.append((trajectory, forward, tokens, got, expected))
                if is_canvas(config.model.spec.family):
                    break  # later forwards are conditioned on this one's draws


def check_logits(answers: Answers) -> str:
    """The logits of every forward are those of the reference for the same tokens."""
    kind, most = tolerance(answers.config)
    if not answers.rows:
        raise RuleError("expected forwards with logits, got none")
    worst = max(distance(kind, got, expected) for *_, got, expected in answers.rows)
    if not worst <= most:
        raise RuleError(f"expected a {kind} of at most {most:g}, got {worst:.3g}")
    num_rows = sum(got.size(0) for *_, got, _ in answers.rows)
    return f"{kind} {worst:.2g} in {len(answers.rows)} forwards, {num_rows} rows"


def check_greedy(config: Config, answers: Answers) -> str:
    """Every token that was written is the reference's most probable one, for what stood there.

    Candidates as good as the best one but for rounding count as well.
    """
    if is_canvas(config.model.spec.family):
        return "not for a canvas, whose tokens are drawn at every temperature"
    shift = int(is_shifted(config.model.spec.family))
    mask, num_written = config.model.mask_token_id, 0
    after = _written_after(answers, mask)
    for index, (_, forward, tokens, _, expected) in enumerate(answers.rows):
        # Some families never write ids that their tokenizer lacks.
        allowed = expected[:, : config.model.tokenizer_vocab_size].clone()
        allowed[:, mask] = -torch.inf
        for row, candidates, scores in zip(forward.logits_rows, allowed, expected, strict=True):
            place = forward.positions[row] + shift
            token = after[index].get(place)
            if token is None or place >= len(tokens) or tokens[place] != mask:
                continue
            num_written += 1
            gap = float(candidates.max() - scores[token])
            if gap > _slack(config, expected):
                raise RuleError(
                    f"position {place}: expected {int(candidates.argmax())}, got {token}"
                    f" (a logit {gap:.3g} lower)"
                )
    if not num_written:
        raise RuleError("expected tokens that were written, got none")
    return f"{num_written} tokens are the most probable ones"


def _slack(config: Config, expected: torch.Tensor) -> float:
    kind, most = tolerance(config)
    scale = (
        expected.abs().max() if kind == "largest difference" else expected.square().mean().sqrt()
    )
    # Both candidates may be off.
    return 2 * most * max(1.0, float(scale)) * (1 if kind == "largest difference" else 4)


def _written_after(answers: Answers, mask: int) -> list[dict[int, int]]:
    """For each forward, what stands at each position after it."""
    found: list[dict[int, int]] = []
    for index, (trajectory, *_) in enumerate(answers.rows):
        following = answers.rows[index + 1 : index + 2]
        if following and following[0][0] is trajectory:
            later = dict(enumerate(following[0][2]))
        else:
            later = dict(enumerate([*trajectory.prompt, *trajectory.answer]))
        found.append({place: token for place, token in later.items() if token != mask})
    return found


def answers_of(engine: Diffulex, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy answers to all prompts together."""
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, seed=0)
    outputs = engine.generate([list(prompt) for prompt in prompts], params, summary=False)
    return [list(output.token_ids) for output in outputs]


def check_same(what: str, got: list[list[int]], expected: list[list[int]]) -> str:
    """Two ways to decode give the same tokens."""
    for index, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one != other:
            pairs = zip(one, other, strict=False)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
            raise RuleError(
                f"prompt {index}: expected the same tokens {what}, got others from token {place} on"
            )
    return f"{sum(map(len, got))} tokens are the same {what}"


def check_prefix_cache(engine: Diffulex, prompt: Sequence[int], count: int) -> str:
    """A prompt whose pages are cached is answered as it was without them."""
    if not engine.config.cache.enable_prefix_caching:
        return "off in this configuration"
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0, seed=0)
    engine.flush_prefix_cache()
    cold, warm = (engine.generate([list(prompt)], params, summary=False)[0] for _ in range(2))
    if warm.metrics.cached_tokens == 0:
        raise RuleError(f"expected cached tokens of a prompt of {len(prompt)}, got none")
    check_same("with a cached prefix", [list(warm.token_ids)], [list(cold.token_ids)])
    return f"{warm.metrics.cached_tokens} of {len(prompt)} tokens cached, the answer is the same"
