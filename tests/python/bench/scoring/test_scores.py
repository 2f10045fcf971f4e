# SPDX-License-Identifier: Apache-2.0
"""Which answers count."""

from __future__ import annotations

import importlib.util
import os
import signal
from fractions import Fraction

import pytest

from diffulex.bench import metrics
from diffulex.bench.scoring import boxed, verifier
from diffulex.bench.scoring.boxed import boxed_answer, score_boxed
from diffulex.bench.scoring.candidates import candidates, score_candidates

#: Solution, answer, whether the box of the answer counts. The texts alone decide.
PAIRS = [
    ("5", r"\boxed{5}", True),
    ("5", "5", True),
    ("5", " 5. ", True),
    ("5", r"\boxed{6}", False),
    ("5", "", False),
    ("5", r"\boxed{}", False),
    ("#### 18", r"so \boxed{18}", True),
    ("3 + 15 = 18\n#### 18", r"\boxed{3}", False),
    ("1,234", r"\boxed{1234}", True),
    ("1234", r"\boxed{1,234}", True),
    ("1234567", r"\boxed{1{,}234{,}567}", True),
    ("1,2", r"\boxed{12}", False),
    (r"\frac{2}{3}", r"\boxed{\frac{5}{3}}", False),
    (r"2\sqrt{3}", r"\boxed{7\sqrt{3}}", False),
    (r"(3,\frac{\pi}{2})", r"\boxed{(5,\frac{\pi}{2})}", False),
    (r"(3,\frac{\pi}{2})", r"\boxed{\left( 3, \frac{\pi}{2} \right)}", True),
    (r"\frac12", r"\boxed{\frac{1}{2}}", True),
    (r"\frac{1}{2}", r"\boxed{1/2}", True),
    (r"\frac{1}{2}", r"\boxed{0.5}", True),
    ("0.5", r"\boxed{.5}", True),
    (".5", r"\boxed{0.50}", True),
    (r"\frac{3}{4}", r"\boxed{0.75}", True),
    (r"\frac{3}{4}", r"\boxed{\dfrac{3}{4}}", True),
    (r"\frac{3}{4}", r"\boxed{\tfrac34}", True),
    (r"-\frac{3}{4}", r"\boxed{-3/4}", True),
    (r"\frac{3}{4}", r"\boxed{\frac{4}{3}}", False),
    (r"\sqrt3", r"\boxed{\sqrt{3}}", True),
    (r"\sqrt{2}", r"\boxed{\sqrt{3}}", False),
    ("10", r"\boxed{10\text{ cm}}", True),
    (r"10\text{ cm}", r"\boxed{10}", True),
    ("10", r"\boxed{10 \mbox{ inches}^2}", True),
    ("10", r"\boxed{10 \text{ meters}}", True),
    ("90", r"\boxed{90^\circ}", True),
    (r"90^{\circ}", r"\boxed{90}", True),
    (r"50\%", r"\boxed{50}", True),
    ("50", r"\boxed{50%}", True),
    (r"\$25", r"\boxed{25}", True),
    ("25", r"\boxed{$25}", True),
    ("25", r"\boxed{25 dollars}", True),
    ("x=5", r"\boxed{5}", True),
    ("5", r"\boxed{x = 5}", True),
    ("5", r"\boxed{x = 6}", False),
    (r"\text{East}", r"\boxed{East}", True),
    ("East", r"\boxed{\text{West}}", False),
    (r"\text{(A)}", r"\boxed{(A)}", True),
    ("x^2+1", r"\boxed{x^2 + 1}", True),
    ("x^2+1", r"\boxed{x^2 - 1}", False),
    (r"\{1,2\}", r"\boxed{\{1, 2\}}", True),
    (r"[0,1)", r"\boxed{[0,\!1)}", True),
    (r"[0,1)", r"\boxed{[0,1]}", False),
    ("7", r"\boxed{1} no, \boxed{7}", True),
    ("7", r"\boxed{7} no, \boxed{1}", False),
    ("7", r"\boxed{7} and \boxed{1", True),
    (r"\frac{1}{\sqrt{2}}", r"\boxed{\frac{1}{\sqrt2}}", True),
    (r"\frac{a}{b}", r"\boxed{\frac ab}", True),
    ("-5", r"\boxed{5}", False),
    ("-5", r"\boxed{-5.0}", True),
    ("-5", "\\boxed{\u22125}", True),
    ("100", r"\boxed{100.00}", True),
    ("1e3", r"\boxed{1000}", True),
    ("0", r"\boxed{0}", True),
    ("0", r"\boxed{}", False),
    (r"\pi", r"\boxed{ \pi }", True),
    ("ab" * 100, r"\boxed{" + "ab" * 100 + "}", False),
    (r"6\text{PM}", r"\boxed{6\text{AM}}", False),
    ("4", r"\boxed{4\text{ or 5}}", False),
    ("10", r"\boxed{10\text{cm}}", True),
    ("10", r"\boxed{10\text{ miles per hour}}", True),
    ("10", r"\boxed{10\text{ km/h}}", True),
    ("7", r"\boxed{7/" + "3" * 320 + "}", False),
    ("7", r"\boxed{\frac{7}{" + "3" * 5000 + "}}", False),
    ("7", r"\boxed{" + "3" * 5000 + "}", False),
    ("7", r"\boxed{1e999999999}", False),
    ("7", r"\boxed{nan}", False),
]


@pytest.fixture
def texts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxed, "verify", lambda gold, predicted: False)


@pytest.mark.usefixtures("texts_alone")
@pytest.mark.parametrize(("gold", "answer", "is_right"), PAIRS)
def test_boxed_answers(gold: str, answer: str, is_right: bool) -> None:
    assert score_boxed({"answer": gold}, answer) == {"exact_match": float(is_right)}
    assert score_boxed({"ground_truth_answer": gold}, answer) == {"exact_match": float(is_right)}


def test_a_box_may_hold_boxes() -> None:
    assert boxed_answer(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed_answer(r"first \boxed{1}, then \boxed {2}.") == "2"
    assert boxed_answer("  none  ") == "none"


def test_an_item_without_a_solution_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected answer or ground_truth_answer"):
        score_boxed({"question": "?"}, "5")


def test_long_repetitions_are_no_answer() -> None:
    assert boxed.repetition("ab" * 100) > 0.9
    assert boxed.repetition("The quick brown fox jumps over the lazy dog, then sleeps.") < 0.1


needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None,
    reason="math-verify not installed: pip install '.[bench]'",
)


@needs_math_verify
def test_symbolic_equality() -> None:
    assert verifier.math_backend() == "math-verify"
    assert score_boxed({"answer": r"x^2+2x+1"}, r"\boxed{(x+1)^2}") == {"exact_match": 1.0}
    assert score_boxed({"answer": r"\frac{2}{3}"}, r"\boxed{\frac{5}{3}}") == {"exact_match": 0.0}


@pytest.mark.slow
@needs_math_verify
def test_a_comparison_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verifier.verify("1", "1")
    (child,) = verifier._children
    os.kill(child.pid, signal.SIGSTOP)  # so that no answer comes, however busy the host is
    monkeypatch.setattr(verifier, "_SECONDS", 0.05)
    assert not verifier.verify("x", "y")
    assert child.poll() is not None
    monkeypatch.undo()
    assert verifier.verify("2", "2")


def test_without_the_package_texts_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert verifier.math_backend() == "normalize"
    assert not verifier.verify("1", "1")


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("#### 1,234", 1234),
        ("<answer>7</answer> of 9", 7),
        ("Final Answer: 12 apples", 12),
        ("The final answer is 3/4.", Fraction(3, 4)),
        (r"so \boxed{\frac{3}{4}}", Fraction(3, 4)),
        (r"\boxed{12}, as 3 + 9 = 12", 12),
        ("He pays $1,234.50 in all.", Fraction("1234.5")),
        ("It is -5", -5),
        ("first 3\nthen 4\n", 4),
        (r"\boxed{70{,}000}", 70_000),
        (r"\boxed{1\,234}", 1234),
        (r"\boxed{1\,234\,567}", 1_234_567),
        (r"\boxed{1,\!234}", 1234),
        ("Total:\n- 18", 18),
        ("Answer:\n- 18", 18),
        ("Total: $-\n18", 18),
        ("-18", -18),
        ("x = - 18", -18),
        (r"\boxed{- 18}", -18),
        (r"\boxed{2\frac{1}{2}}", Fraction(5, 2)),
        (r"\boxed{-2\frac12}", Fraction(-5, 2)),
        ("It takes 2 1/2 hours", Fraction(5, 2)),
        (r"\boxed{3\frac{7}{2}}", Fraction(7, 2)),
    ],
)
def test_the_likeliest_number(text: str, first: Fraction | int) -> None:
    assert candidates(text)[0] == first


def test_numbers_without_end_are_no_error() -> None:
    doc = {"answer": "7"}
    for text in ("3" * 5000, "7/" + "3" * 5000, "2 1/" + "3" * 5000, r"2\frac{1}{" + "3" * 5000):
        assert score_candidates(doc, rf"\boxed{{{text}}}")["exact_match"] == 0.0


def test_two_candidates_are_two_chances() -> None:
    doc = {"ground_truth_answer": "so #### 5"}
    assert score_candidates(doc, "#### 5") == {"exact_match": 1.0, "exact_match_top2": 1.0}
    assert score_candidates(doc, "#### 6\nor 5") == {"exact_match": 0.0, "exact_match_top2": 1.0}
    assert score_candidates(doc, "none") == {"exact_match": 0.0, "exact_match_top2": 0.0}


def test_numbers_of_solutions() -> None:
    assert metrics.extract_number("a 3\n#### 1,234") == 1234
    assert metrics.extract_number("it costs 1,234") == 1234
    assert metrics.extract_number("nothing") is None
    assert metrics.gsm8k_accuracy(["#### 3", "4"], ["#### 3", "#### 5"]) == 0.5
    with pytest.raises(ValueError, match="as many answers as solutions"):
        metrics.gsm8k_accuracy(["1"], [])


def test_pass_at_k_is_unbiased() -> None:
    assert metrics.humaneval_pass_at_k(4, 1, 1) == pytest.approx(0.25)
    assert metrics.humaneval_pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert metrics.humaneval_pass_at_k(4, 3, 2) == 1.0
    assert metrics.humaneval_pass_at_k(4, 0, 4) == 0.0
    with pytest.raises(ValueError, match="humaneval_pass_at_k"):
        metrics.humaneval_pass_at_k(2, 1, 3)


def test_totals_of_rows() -> None:
    rows = [
        {"token_ids": [1, 2], "nfe": 1, "generation_time": 0.5, "text": "#### 1"},
        {"token_ids": [1, 2, 3, 4], "nfe": 2, "generation_time": 0.5, "text": "#### 2"},
    ]
    numbers = metrics.compute_metrics(rows, ["#### 1", "#### 3"])
    assert numbers["accuracy"] == 0.5
    assert (numbers["total_tokens"], numbers["avg_nfe"], numbers["aggregate_tpf"]) == (6, 1.5, 2.0)
