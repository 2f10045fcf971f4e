# SPDX-License-Identifier: Apache-2.0
"""Scores of lists of answers, for programs that bring their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from diffulex.bench.scoring.candidates import last_number

__all__ = ["compute_metrics", "extract_number", "gsm8k_accuracy", "humaneval_pass_at_k"]

_TOLERANCE = 1e-6


def extract_number(text: str) -> float | None:
    """The number after the last ``####``, or else the last number; None without one."""
    _, mark, tail = text.rpartition("####")
    if mark:
        lines = tail.strip().splitlines()
        number = last_number(lines[0]) if lines else None
    else:
        number = last_number(text)
    return None if number is None else float(number)


def gsm8k_accuracy(predictions: Sequence[str], ground_truths: Sequence[str]) -> float:
    """Share of answers with the right number, to 1e-6.

    Raises:
        ValueError: lists of different lengths, or empty ones.
    """
    if len(predictions) != len(ground_truths) or not predictions:
        raise ValueError(
            "gsm8k_accuracy: expected as many answers as solutions, at least one, got"
            f" {len(predictions)} and {len(ground_truths)}"
        )
    pairs = zip(map(extract_number, predictions), map(extract_number, ground_truths), strict=True)
    right = sum(
        left is not None and gold is not None and abs(left - gold) <= _TOLERANCE
        for left, gold in pairs
    )
    return right / len(predictions)


def humaneval_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that one of `k` answers drawn from `num_samples` is right, without bias.

    Raises:
        ValueError: counts that cannot be.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            "humaneval_pass_at_k: expected 0 <= c <= n and 1 <= k <= n, got"
            f" n {num_samples}, c {num_correct}, k {k}"
        )
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def compute_metrics(
    outputs: Sequence[Mapping[str, Any]],
    ground_truths: Sequence[str] | None = None,
    dataset_name: str = "gsm8k",
) -> dict[str, Any]:
    """Totals of the rows of `BenchmarkRunner.generate`, and the accuracy where there are solutions.

    Raises:
        ValueError: solutions of a set other than GSM8K, or of another number.
    """
    count = len(outputs)
    tokens = sum(len(output["token_ids"]) for output in outputs)
    forwards = sum(int(output["nfe"]) for output in outputs)
    seconds = sum(float(output.get("generation_time", 0)) for output in outputs)
    result: dict[str, Any] = {
        "num_samples": count,
        "total_tokens": tokens,
        "total_nfe": forwards,
        "total_time": seconds,
        "avg_tokens_per_sample": tokens / count if count else 0.0,
        "avg_nfe": forwards / count if count else 0.0,
        "aggregate_tpf": tokens / forwards if forwards else 0.0,
    }
    if ground_truths is not None:
        if not dataset_name.startswith("gsm8k"):
            raise ValueError(
                f"compute_metrics: expected gsm8k with solutions, got {dataset_name!r}"
            )
        texts = [str(output["text"]) for output in outputs]
        result["accuracy"] = gsm8k_accuracy(texts, ground_truths)
    return result
