# SPDX-License-Identifier: Apache-2.0
"""Word problems in words that the demo model has never seen.

The arithmetic is that of its own problems; what it does not know is that all of these verbs take away.
A trainer is told no more about an answer than whether its last number is right.
"""

from __future__ import annotations

import random

from diffulex.bench.word_problems import Problem

_NAMES = ("Tom", "Mia", "Ben", "Anna", "Leo", "Sara", "Max", "Lily", "Omar", "Emma")
_THINGS = ("marbles", "apples", "stickers", "pencils", "shells", "books", "cards", "coins")
_VERBS = ("donates", "breaks", "uses", "tears", "posts", "returns")
_LARGEST = 90


def draw_problems(seed: str, count: int) -> list[Problem]:
    """Problems of one step, no two alike; the same for a seed on every machine."""
    rng = random.Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = _draw(rng)
        found.setdefault(problem.question, problem)
    return list(found.values())


def _draw(rng: random.Random) -> Problem:
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    value = rng.randint(10, _LARGEST)
    amount = rng.randint(2, value - 2)
    question = (
        f"{name} has {value} {things}. {name} {rng.choice(_VERBS)} {amount} {things}."
        f" How many {things} does {name} have now?"
    )
    result = value - amount
    return Problem(1, question, result, f"{value}-{amount}={result}\n#### {result}")
