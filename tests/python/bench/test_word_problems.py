# SPDX-License-Identifier: Apache-2.0
"""The problem generator, judged by an independent reader of the generated English."""

from __future__ import annotations

import functools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from diffulex.bench import problem_file
from diffulex.bench import word_problems as wp
from fixtures.quick import quick

ASSET = Path(__file__).resolve().parents[3] / "python" / "diffulex" / "assets" / "demo"

# -- an independent reader: sentence patterns to arithmetic on the running quantity ------------------

NUM = r"(\d+)"
THING = r"[a-z]+"
#: Pattern of a whole sentence -> new quantity, given the old one and the numbers of the sentence.
RULES: list[tuple[str, object]] = [
    # beginnings
    (rf"\w+ (?:has|starts with|owns) {NUM} {THING}\.", lambda v, a: a),
    (rf"There are {NUM} {THING} in \w+'s room\.", lambda v, a: a),
    (rf"\w+ has {NUM} {THING} with {NUM} {THING} each\.", lambda v, a, b: a * b),
    (rf"There are {NUM} {THING} in each of \w+'s {NUM} {THING}\.", lambda v, a, b: a * b),
    (rf"Each holds {NUM} {THING}\.", lambda v, a: v * a),
    (rf"\w+ has {NUM} [a-z]+ {THING} and {NUM} [a-z]+ {THING}\.", lambda v, a, b: a + b),
    (rf"{NUM} {THING} are shared equally by {NUM} children\.", lambda v, a, k: a // k),
    (rf"\w+ gets an equal share when {NUM} children share {NUM} {THING}\.", lambda v, k, a: a // k),
    (rf"\w+ and \w+ share {NUM} {THING} equally\.", lambda v, a: a // 2),
    # one number more or less
    (rf"\w+ (?:finds|buys) {NUM} more {THING}\.", lambda v, a: v + a),
    (rf"\w+ gets {NUM} {THING} from \w+\.", lambda v, a: v + a),
    (rf"\w+ gives \w+ {NUM} more {THING}\.", lambda v, a: v + a),
    (rf"\w+ wins {NUM} {THING} in a game\.", lambda v, a: v + a),
    (rf"\w+ gives {NUM} {THING} to \w+\.", lambda v, a: v - a),
    (rf"\w+ loses {NUM} {THING}\.", lambda v, a: v - a),
    (rf"\w+ sells {NUM} of the {THING}\.", lambda v, a: v - a),
    (rf"\w+ takes {NUM} of (?:his|her) {THING}\.", lambda v, a: v - a),
    (rf"{NUM} of the {THING} get lost\.", lambda v, a: v - a),
    # factors and parts
    (rf"\w+ trades each {THING} for {NUM} new {THING}\.", lambda v, k: v * k),
    (rf"\w+ works hard and soon has {NUM} times as many {THING}\.", lambda v, k: v * k),
    (rf"The number of {THING} doubles\.", lambda v: v * 2),
    (rf"\w+ doubles (?:his|her) {THING}\.", lambda v: v * 2),
    (rf"The number of {THING} triples\.", lambda v: v * 3),
    (rf"\w+ sorts the {THING} into {NUM} equal piles and keeps one pile\.", lambda v, k: v // k),
    (
        rf"\w+ splits the {THING} evenly into {NUM} {THING} and keeps only one\.",
        lambda v, k: v // k,
    ),
    (rf"\w+ gives half of the {THING} to \w+\.", lambda v: v // 2),
    (rf"\w+ loses half of (?:his|her) {THING}\.", lambda v: v // 2),
    # groups and pairs
    (rf"\w+ buys {NUM} {THING} with {NUM} {THING} each\.", lambda v, a, b: v + a * b),
    (rf"\w+ gets {NUM} {THING} from each of {NUM} friends\.", lambda v, b, a: v + a * b),
    (rf"\w+ finds {NUM} {THING} a day for {NUM} days\.", lambda v, b, a: v + a * b),
    (rf"{NUM} friends give \w+ {NUM} {THING} each\.", lambda v, a, b: v + a * b),
    (rf"\w+ gives {NUM} {THING} to each of {NUM} friends\.", lambda v, b, a: v - a * b),
    (rf"\w+ sells {NUM} {THING} with {NUM} {THING} each\.", lambda v, a, b: v - a * b),
    (rf"\w+ uses {NUM} {THING} a day for {NUM} days\.", lambda v, b, a: v - a * b),
    (rf"{NUM} friends take {NUM} {THING} each\.", lambda v, a, b: v - a * b),
    (
        rf"\w+ and others, {NUM} in all, share {NUM} more {THING} equally\.",
        lambda v, k, a: v + a // k,
    ),
    (
        rf"{NUM} more {THING} are shared equally by {NUM} children with \w+\.",
        lambda v, a, k: v + a // k,
    ),
    (rf"\w+ gets {NUM} {THING} from \w+ and {NUM} from \w+\.", lambda v, a, b: v + a + b),
    (rf"\w+ finds {NUM} {THING} at home and {NUM} at school\.", lambda v, a, b: v + a + b),
    (rf"\w+ gives {NUM} {THING} to \w+ and {NUM} to \w+\.", lambda v, a, b: v - a - b),
    (rf"\w+ loses {NUM} {THING} at home and {NUM} at school\.", lambda v, a, b: v - a - b),
    (
        rf"\w+ buys {NUM} {THING} with {NUM} {THING} each but drops {NUM} of those\.",
        lambda v, a, b, e: v + a * b - e,
    ),
    (
        rf"\w+ has {NUM} {THING} of {NUM} {THING}, keeps {NUM} and gives \w+ the rest\.",
        lambda v, a, b, e: v + a * b - e,
    ),
    # irrelevant, or said for the next sentence
    (rf"\w+ is {NUM} years old\.", lambda v, a: v),
    (rf"\w+ also has {NUM} {THING}\.", lambda v, a: v),
    (rf"The bus ride takes {NUM} minutes\.", lambda v, a: v),
    (rf"\w+ has {NUM} {THING} too\.", lambda v, a: v),
    (rf"\w+ reads {NUM} pages\.", lambda v, a: v),
    (rf"It is {NUM} degrees outside\.", lambda v, a: v),
    (r"\w+ is one of them\.", lambda v: v),
    # questions
    (rf"How many {THING} does \w+ have (?:now|in the end)\?", lambda v: v),
    (rf"How many {THING} are there now\?", lambda v: v),
    (rf"What is the number of {THING} now\?", lambda v: v),
    (rf"Each {THING} costs {NUM} dollars\. What do all the {THING} cost\?", lambda v, k: v * k),
    (
        rf"\w+ sells all the {THING} for {NUM} dollars each\. How many dollars is that\?",
        lambda v, k: v * k,
    ),
    (rf"\w+ puts {NUM} {THING} in each bag\. How many bags are needed\?", lambda v, k: v // k),
    (rf"\w+ packs the {THING} in rows of {NUM}\. How many rows are there\?", lambda v, k: v // k),
    (
        rf"{NUM} children share all the {THING} equally\. How many does each get\?",
        lambda v, k: v // k,
    ),
    (
        rf"\w+ has {NUM} {THING}\. How many more {THING} does \w+ have than \w+\?",
        lambda v, a: v - a,
    ),
    (rf"How many more {THING} does \w+ need to have {NUM}\?", lambda v, a: a - v),
    (
        rf"\w+ has twice as many {THING} as \w+\. How many {THING} do they have together\?",
        lambda v: 3 * v,
    ),
    (
        rf"\w+ has {NUM} times as many {THING} as \w+\. How many {THING} do they have together\?",
        lambda v, k: v + v * k,
    ),
    (
        rf"\w+ has {NUM} more {THING} than \w+\. How many {THING} do they have together\?",
        lambda v, a: v + v + a,
    ),
    (
        rf"\w+ has {NUM} fewer {THING} than \w+\. How many {THING} do they have together\?",
        lambda v, a: v + v - a,
    ),
]
#: "Tom has 4 bags. Each holds 6 beads." must not be read as four beads: it is the same pattern as
#: a plain beginning, so "Each holds" multiplies what that sentence set.
OPENER = re.compile(r"^(?:Then|Later|After that|On Monday|In the evening|Next) ")


def read(question: str) -> int:
    """Answer of a question, read sentence by sentence; two sentences may belong together."""
    sentences = re.findall(r"[^.?]+[.?]", question)
    sentences = [OPENER.sub("", sentence.strip()) for sentence in sentences]
    value, index = 0, 0
    while index < len(sentences):
        for width in (2, 1):
            text = " ".join(sentences[index : index + width])
            match = next(
                ((m, rule) for pattern, rule in RULES if (m := re.fullmatch(pattern, text))), None
            )
            if match is not None:
                found, rule = match
                value = rule(value, *map(int, found.groups()))  # type: ignore[operator]
                index += width
                break
        else:
            raise AssertionError(f"no rule for {sentences[index]!r}")
    return value


@functools.cache
def problems(count: int, level: int, seed: str = "test") -> list[wp.Problem]:
    rng = random.Random(f"{seed}/{level}")
    return [wp.generate_problem(rng, level) for _ in range(count)]


LEVELS = range(wp.MIN_LEVEL, wp.MAX_LEVEL + 1)


@pytest.mark.parametrize(
    "level",
    quick(LEVELS, (3,)),
)
def test_answer_is_what_the_story_says(level: int) -> None:
    for problem in problems(1500, level):
        assert read(problem.question) == problem.answer, problem


@pytest.mark.parametrize("level", LEVELS)
def test_solution_has_one_true_line_per_step_and_the_answer_line(level: int) -> None:
    for problem in problems(500, level):
        *lines, last = problem.solution.split("\n")
        assert len(lines) == level == problem.level
        for line in lines:
            left, operator, right, result = re.fullmatch(  # type: ignore[union-attr]
                r"(\d+)([-+*/])(\d+)=(\d+)", line
            ).groups()
            a, b, c = int(left), int(right), int(result)
            assert {"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": a == b * c}[operator]
            assert c >= 1
        assert last == f"#### {problem.answer}"
        assert lines[-1].endswith(f"={problem.answer}")


@pytest.mark.slow
def test_all_operations_forms_and_distractors_occur() -> None:
    drawn = [problem for level in LEVELS for problem in problems(600, level)]
    operators = Counter(re.findall(r"[-+*/]", "".join(problem.solution for problem in drawn)))
    assert set(operators) == set("+-*/")
    assert min(operators.values()) > 0.08 * sum(operators.values())
    irrelevant = r"years old|also has|bus ride|\d+ \w+ too|reads|degrees"
    share = sum(bool(re.search(irrelevant, p.question)) for p in drawn) / len(drawn)
    assert 0.3 < share < 0.6
    used = {
        pattern for pattern, _ in RULES for problem in drawn if re.search(pattern, problem.question)
    }
    assert len(used) == len(RULES)


def test_higher_levels_use_larger_numbers_within_the_limit() -> None:
    means = []
    for level in LEVELS:
        numbers = [
            int(number)
            for problem in problems(400, level)
            for number in re.findall(r"\d+", problem.solution)
        ]
        means.append(sum(numbers) / len(numbers))
        assert max(numbers) <= wp.DEFAULT_DIFFICULTY.max_values[level - 1]
    assert means[0] < means[2] < means[5]


def test_difficulty_limits_the_numbers_of_its_level() -> None:
    chances = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    hard = wp.Difficulty(
        max_values=(40, 60, 60, 60, 60, 5000), max_groups=(3,) * 6, distractor_chances=chances
    )
    drawn = {
        level: [wp.generate_problem(random.Random(index), level, hard) for index in range(300)]
        for level in (1, 2, 6)
    }
    largest = {
        level: max(int(n) for p in problems for n in re.findall(r"\d+", p.solution))
        for level, problems in drawn.items()
    }
    assert 30 < largest[1] <= 40
    assert 50 < largest[2] <= 60
    assert 2000 < largest[6] <= 5000
    irrelevant = re.compile(r"years old|also has|bus ride|\d+ \w+ too|reads|degrees")
    assert not any(irrelevant.search(problem.question) for problem in drawn[1])
    assert all(irrelevant.search(problem.question) for problem in drawn[2])
    groups = re.compile(r"has (\d+) (?:bags|boxes|packs|jars|baskets) with")
    counts = {
        int(n) for problems in drawn.values() for p in problems for n in groups.findall(p.question)
    }
    assert counts == {2, 3}
    training = wp.training_problems(1, 0, 20, frozenset(), (1, 0, 0, 0, 0, 0), hard)
    for problem in (*training, *wp.heldout_problems(60, difficulty=hard)[::6]):
        assert max(map(int, re.findall(r"\d+", problem.solution))) <= 40
    with pytest.raises(ValueError, match="expected 6 entries in max_groups, got 2"):
        wp.Difficulty(max_groups=(9, 9))


def test_levels_outside_the_range_are_an_error() -> None:
    for level in (0, 7):
        with pytest.raises(ValueError, match=rf"expected a level in \[1, 6\], got {level}"):
            wp.generate_problem(random.Random(0), level)


def test_same_seed_same_problems_and_chunks_differ() -> None:
    first = list(wp.training_problems(3, 0, 50, frozenset()))
    assert first == list(wp.training_problems(3, 0, 50, frozenset()))
    assert first != list(wp.training_problems(3, 1, 50, frozenset()))
    assert first != list(wp.training_problems(4, 0, 50, frozenset()))


def test_training_draws_exclude_held_out_questions() -> None:
    free = list(wp.training_problems(3, 0, 200, frozenset()))
    excluded = {wp.question_hash(problem.question) for problem in free[:100]}
    kept = list(wp.training_problems(3, 0, 200, excluded))
    assert not {wp.question_hash(problem.question) for problem in kept} & excluded
    assert kept[:50] == [p for p in free if wp.question_hash(p.question) not in excluded][:50]
    heldout = {wp.question_hash(problem.question) for problem in wp.heldout_problems(60)}
    assert len(heldout) == 60
    for problem in wp.training_problems(1, 0, 3000, heldout):
        assert wp.question_hash(problem.question) not in heldout


def test_level_weights_are_followed() -> None:
    drawn = Counter(
        p.level for p in wp.training_problems(1, 0, 4000, frozenset(), (0, 1, 0, 0, 3, 0))
    )
    assert set(drawn) == {2, 5}
    assert 2.5 < drawn[5] / drawn[2] < 3.6


@pytest.mark.slow
def test_held_out_asset_is_what_the_generator_makes(tmp_path: Path) -> None:
    heldout = wp.heldout_problems()
    assert len({problem.question for problem in heldout}) == 1000
    assert sorted(Counter(problem.level for problem in heldout).values()) == [166] * 2 + [167] * 4
    problem_file.save_problems(heldout, tmp_path / "heldout.jsonl")
    text = (ASSET / "heldout.jsonl").read_text(encoding="utf-8")
    assert (tmp_path / "heldout.jsonl").read_text(encoding="utf-8") == text
    assert problem_file.load_problems(ASSET / "heldout.jsonl") == heldout
    for index, line in enumerate(text.splitlines()):
        record = json.loads(line)
        assert list(record) == ["id", "level", "question", "answer", "solution"]
        assert record["id"] == index
        assert read(record["question"]) == record["answer"]
