# SPDX-License-Identifier: Apache-2.0
"""Numbers that may be the answer of a text, the likeliest first, as exact fractions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from diffulex.bench.scoring.boxed import boxed_answer, gold_answer

__all__ = ["candidates", "last_number", "numbers_in", "score_candidates"]

_NUMBER = re.compile(
    r"(?<![\w.])[-\u2212]?[ \t]?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?/\s?\d+(?:\.\d+)?)?|(?<![\w.])[-\u2212]?\.\d+"
)
_LATEX_FRACTION = re.compile(r"(-?)\\[dt]?frac\s*\{?(-?\d+)\}?\s*\{?(-?\d+)\}?")
#: A whole number with a proper fraction: 2\\frac{1}{2}, 2 1/2.
_MIXED = re.compile(
    r"(?<![\w.,/])(\d{1,18})(?:\s*\\[dt]?frac\s*\{?(\d{1,18})\}?\s*\{?(\d{1,18})\}?|[ ](\d{1,18})/(\d{1,18})(?![\d/]))"
)
#: Thin spaces and the like between groups of three digits.
_GROUPS = re.compile(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))")
_BULLET = re.compile(r"^(\s*)[-\u2212][ \t]+(?=\$?\.?\d)", re.MULTILINE)
_PHRASES = (
    r"####\s*(.+)",
    r"<answer>\s*(.+?)\s*(?:</answer>|$)",
    r"Final Answer\s*:\**\s*(.+)",
    r"The final answer is\s*:?\s*(.+)",
    r"Answer\s*:\**\s*(.+)",
)
_TAIL_LINES, _TAIL_CHARS = 5, 200


def _fraction(text: str) -> Fraction | None:
    plain = re.sub(r"[\s$,]", "", text.replace("\u2212", "-"))
    top, _, bottom = plain.partition("/")
    try:
        return Fraction(top) / Fraction(bottom or 1)
    except (ValueError, ZeroDivisionError):
        return None


def _improper(mixed: re.Match[str]) -> str:
    whole, top, bottom = (int(group) for group in mixed.groups() if group is not None)
    if 0 < top < bottom:
        return f"{whole * bottom + top}/{bottom}"
    return f"{mixed[1]} {mixed[0][len(mixed[1]) :]}"  # two numbers


def numbers_in(text: str) -> list[Fraction]:
    """Every number of a text, in order."""
    text = _GROUPS.sub("", text.replace("{,}", ",").replace("\\!", ""))
    text = _LATEX_FRACTION.sub(r"\1\2/\3", _MIXED.sub(_improper, text))
    found = (_fraction(match[0]) for match in _NUMBER.finditer(text))
    return [number for number in found if number is not None]


def last_number(text: str) -> Fraction | None:
    """The last number of a text; None if it has none."""
    found = numbers_in(text)
    return found[-1] if found else None


def _places(text: str) -> Iterator[str]:
    """Parts of an answer that may hold its result, the likeliest first."""
    for pattern in _PHRASES:
        found = re.findall(pattern, text, re.IGNORECASE)
        if found:
            yield found[-1]
    box = boxed_answer(text)
    if box != text.strip():
        yield box
    lines = [line for line in text.splitlines() if line.strip()]
    yield from reversed(lines[-_TAIL_LINES:])
    yield text[-_TAIL_CHARS:]


def candidates(text: str) -> list[Fraction]:
    """The numbers that may be the result, without repetitions."""
    text = _BULLET.sub(r"\1", text)
    found: dict[Fraction, None] = {}
    for place in _places(text):
        number = last_number(place)
        if number is not None:
            found[number] = None
    return list(found)


def score_candidates(doc: Mapping[str, Any], text: str) -> dict[str, float]:
    """``exact_match`` of the first candidate, ``exact_match_top2`` of the first two."""
    gold = last_number(gold_answer(doc))
    predicted = candidates(text)
    return {
        "exact_match": float(gold is not None and gold in predicted[:1]),
        "exact_match_top2": float(gold is not None and gold in predicted[:2]),
    }
