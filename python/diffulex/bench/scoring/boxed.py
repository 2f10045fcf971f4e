# SPDX-License-Identifier: Apache-2.0
"""Equality of mathematical answers: the last box of the answer against that of the solution.

Two answers are equal if their normalised texts are, or if both are the same number, or if the package
math-verify, where it is installed, finds them equal.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from diffulex.bench.scoring.verifier import verify

__all__ = ["boxed_answer", "gold_answer", "is_equal", "normalised", "score_boxed"]

_BOX = "\\boxed"
_MAX_PLAIN, _MAX_REPETITION, _MAX_COMPARED = 128, 0.2, 2048
#: Words after a number that say what it counts.
_UNITS = (
    "degrees?", "dollars?", "cents?", "units?", "square", "sq", "cubic", "cm", "mm", "km", "m", "inches",
    "inch", "feet", "foot", "ft", "miles?", "mph", "hours?", "minutes?", "seconds?", "days?", "weeks?",
    "months?", "years?", "points?", "apples?", "people", "students?", "percent", "kg", "grams?", "g",
    "(?:centi|milli|kilo)?met(?:er|re)s?", "(?:milli)?lit(?:er|re)s?", "kilograms?", "milligrams?", "mg",
    "ml", "lb", "lbs", "oz", "pounds?", "ounces?", "tons?", "cups?", "pints?", "quarts?", "gallons?", "yards?",
    "yd", "acres?", "hr", "hrs", "min", "mins", "sec", "secs", "s", "h", "kph", "kmh", "rpm", "per", "radians?",
    "rad", "knots?", "euros?", "bits?", "bytes?", "pages?", "books?", "cards?", "coins?", "marbles?", "cookies",
    "ways?", "games?", "times", "steps?", "sides?", "terms?", "integers?", "numbers?", "values?", "solutions?",
    "digits?", "boys", "girls", "children", "men", "women", "players?", "members?", "votes?",
)  # fmt: skip
_UNIT_TAIL = re.compile(
    rf"(?<=\d)(?:\s+(?:{'|'.join(_UNITS)})(?:\^\{{?\d\}}?)?)+\.?$", re.IGNORECASE
)


_UNIT = re.compile("|".join(_UNITS), re.IGNORECASE)
_UNIT_TEXT = re.compile(r"(?<=[\d}])\s*\\(?:text|mbox|mathrm)\{([^{}]*)\}(?:\^\{?\d\}?)?$")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?")
#: Longer numbers are compared as texts.
_MAX_NUMBER = 400


def boxed_answer(text: str) -> str:
    """The content of the last ``\\boxed{...}`` whose braces are balanced, or the whole text."""
    start = text.rfind(_BOX)
    while start >= 0:
        place = start + len(_BOX)
        while text[place : place + 1] == " ":
            place += 1
        if text[place : place + 1] == "{" and (end := _closing_brace(text, place)) >= 0:
            return text[place + 1 : end].strip()
        start = text.rfind(_BOX, 0, start)
    return text.strip()


def _closing_brace(text: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return -1


def gold_answer(doc: Mapping[str, Any]) -> str:
    """The right answer of an item: `answer` or `ground_truth_answer`, after the last ``####``.

    Raises:
        ValueError: the item has neither.
    """
    for key in ("answer", "ground_truth_answer"):
        if doc.get(key) is not None:
            return str(doc[key]).rpartition("####")[2].strip()
    raise ValueError(f"item: expected answer or ground_truth_answer, got keys {sorted(doc)}")


def _braced_arguments(text: str, command: str, count: int) -> str:
    """``\\frac12`` as ``\\frac{1}{2}``: every argument of a command in braces."""
    parts = text.split(command)
    result = parts[0]
    for part in parts[1:]:
        rest, done = part.lstrip(), ""
        for _ in range(count):
            if not rest:
                break
            if rest[0] == "{":
                end = _closing_brace(rest, 0)
                if end < 0:
                    break
                done, rest = done + rest[: end + 1], rest[end + 1 :]
            elif rest[0] == "\\" and (name := re.match(r"\\[a-zA-Z]+", rest)):
                done, rest = f"{done}{{{name[0]}}}", rest[name.end() :]
            elif rest[0] in "[":  # a root of another order
                break
            else:
                done, rest = f"{done}{{{rest[0]}}}", rest[1:]
        result += command + done + rest
    return result


def _text_contents(text: str) -> str:
    """A unit in ``\\text{ cm}`` after a number is dropped, other texts stay without the command."""
    unit = _UNIT_TEXT.search(text)
    if unit and all(_UNIT.fullmatch(word) for word in re.split(r"[\s/.]+", unit[1].strip(" ./"))):
        text = text[: unit.start()]
    return re.sub(r"\\(?:text|mbox|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", text)


def normalised(text: str) -> str:
    """A text of LaTeX or plain mathematics without differences of writing."""
    text = text.strip().replace("\n", "").rstrip(".").strip()
    for old, new in (
        ("\\!", ""), ("\\,", ""), ("\\;", ""), ("\\ ", " "), ("~", " "), ("tfrac", "frac"),
        ("dfrac", "frac"), ("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""),
        ("\\degree", ""), ("\\$", ""), ("$", ""), ("\\%", ""), ("%", ""), ("\\(", ""), ("\\)", ""),
        ("\\[", ""), ("\\]", ""), ("{,}", ","), ("\u2212", "-"),
    ):  # fmt: skip
        text = text.replace(old, new)
    text = _text_contents(text.strip())
    text = _UNIT_TAIL.sub("", text.strip())
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text)
    text = re.sub(r"(?<![\d])\.(?=\d)", "0.", text)
    head, equals, tail = text.partition("=")
    if equals and len(head.strip()) <= 2 and "=" not in tail:
        text = tail
    text = _braced_arguments(_braced_arguments(text, "\\sqrt", 1), "\\frac", 2)
    text = re.sub(r"\s+", "", text)
    if text == "0.5":
        return "\\frac{1}{2}"
    if ratio := re.fullmatch(r"(-?)(\d+)/(-?\d+)", text):
        return f"{ratio[1]}\\frac{{{ratio[2]}}}{{{ratio[3]}}}"
    return text


def _number(text: str) -> Fraction | None:
    if len(text) > _MAX_NUMBER:
        return None
    if ratio := re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(-?\d+)\}", text):
        bottom = int(ratio[3])
        return None if bottom == 0 else Fraction(int(ratio[1] + ratio[2]), bottom)
    return Fraction(text) if _DECIMAL.fullmatch(text) else None


def repetition(text: str) -> float:
    """Share of a text that its suffixes have in common with their neighbours in sorted order: near
    0 for ordinary texts, near 1 for one character again and again."""
    text = text[:_MAX_COMPARED]
    order = sorted(range(len(text)), key=lambda start: text[start:])
    total = 0
    for left, right in itertools.pairwise(order):
        length, most = 0, len(text) - max(left, right)
        while length < most and text[left + length] == text[right + length]:
            length += 1
        total += length
    return 2 * total / (len(text) * (len(text) + 1)) if text else 0.0


def _is_babble(text: str) -> bool:
    return len(text) > _MAX_PLAIN and repetition(text) > _MAX_REPETITION


def is_equal(gold: str, predicted: str) -> bool:
    """Whether two answers, without their boxes, are the same."""
    if _is_babble(gold) or _is_babble(predicted):
        return False
    left, right = normalised(gold), normalised(predicted)
    if left == right:
        return left != ""
    numbers = _number(left), _number(right)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return bool(left and right) and verify(gold, predicted)


def score_boxed(doc: Mapping[str, Any], text: str) -> dict[str, float]:
    """``exact_match`` of one answer."""
    gold = boxed_answer(gold_answer(doc))
    return {"exact_match": float(is_equal(gold, boxed_answer(text)))}
