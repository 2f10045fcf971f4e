# SPDX-License-Identifier: Apache-2.0
"""Seeded grade-school word problems with worked steps, for training and judging the demo model.

A problem follows one quantity (``marbles`` of ``Tom``) through a short story. Its *level* is the
number of arithmetic steps of the worked solution, 1 to 6; higher levels use larger numbers and more
distractor sentences. The solution has one line per step and a final line with the answer::

    4*12=48
    48+17=65
    #### 65

Only the standard library is used, and every draw comes from ``random.Random`` seeded with a string,
so the same seed gives the same problems on every platform.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

MIN_LEVEL = 1
MAX_LEVEL = 6
HELDOUT_SEED = 20_250
HELDOUT_COUNT = 1_000
#: Share of each level in training draws: long solutions need more practice than short ones.
TRAINING_LEVEL_WEIGHTS = (0.5, 0.8, 1.0, 1.3, 1.6, 2.0)

#: Keep prompt and solution within the training lengths of the demo model.
_MAX_QUESTION_CHARS = 280
_MAX_SOLUTION_CHARS = 80

_NAMES = (
    ("Tom", "he", "his"), ("Mia", "she", "her"), ("Ben", "he", "his"), ("Anna", "she", "her"),
    ("Leo", "he", "his"), ("Sara", "she", "her"), ("Max", "he", "his"), ("Lily", "she", "her"),
    ("Omar", "he", "his"), ("Emma", "she", "her"), ("Ravi", "he", "his"), ("Nina", "she", "her"),
    ("Sam", "he", "his"), ("Zoe", "she", "her"), ("Paul", "he", "his"), ("Kim", "she", "her"),
)  # fmt: skip
_THINGS = (
    ("marble", "marbles"), ("apple", "apples"), ("sticker", "stickers"), ("pencil", "pencils"),
    ("shell", "shells"), ("book", "books"), ("card", "cards"), ("coin", "coins"),
    ("stamp", "stamps"), ("cookie", "cookies"), ("button", "buttons"), ("bead", "beads"),
    ("egg", "eggs"), ("ticket", "tickets"), ("stone", "stones"), ("flower", "flowers"),
)  # fmt: skip
_CONTAINERS = ("bags", "boxes", "packs", "jars", "baskets")
_OPENERS = ("Then", "Later", "After that", "On Monday", "In the evening", "Next")


@dataclass(frozen=True)
class Difficulty:
    """Limits of the numbers, one entry per level; the defaults are those of the demo model."""

    #: Largest number of any step.
    max_values: tuple[int, ...] = (100, 250, 450, 700, 1000, 1300)
    #: Largest number of groups ("12 bags with 25 marbles each") and largest group.
    max_groups: tuple[int, ...] = (9, 9, 9, 12, 12, 15)
    max_group_sizes: tuple[int, ...] = (12, 15, 20, 20, 25, 25)
    #: Chance that a problem has an irrelevant sentence.
    distractor_chances: tuple[float, ...] = (0.25, 0.35, 0.4, 0.45, 0.5, 0.5)

    def __post_init__(self) -> None:
        for name, values in asdict(self).items():
            if len(values) != MAX_LEVEL:
                raise ValueError(
                    f"Difficulty: expected {MAX_LEVEL} entries in {name}, got {len(values)}"
                )


DEFAULT_DIFFICULTY = Difficulty()


@dataclass(frozen=True)
class Problem:
    """One word problem. ``solution`` is the whole expected answer text, ``answer`` its last number."""

    level: int
    question: str
    answer: int
    solution: str


class Step(NamedTuple):
    """One worked line ``left operator right = result``."""

    left: int
    operator: str
    right: int
    result: int

    def line(self) -> str:
        """The step as it stands in a solution, for example ``3*4=12``."""
        return f"{self.left}{self.operator}{self.right}={self.result}"


class Event(NamedTuple):
    """A piece of the story: its text and the steps it adds (none for a plain statement)."""

    text: str
    steps: tuple[Step, ...]


class _InfeasibleError(Exception):
    """The drawn event has no numbers within the limits of the level; draw again."""


class _Story:
    """Characters, object, limits and the running quantity of one problem being written."""

    def __init__(self, rng: random.Random, level: int, difficulty: Difficulty) -> None:
        self.rng = rng
        self.max_value = difficulty.max_values[level - 1]
        self.max_groups = difficulty.max_groups[level - 1]
        self.max_group_size = difficulty.max_group_sizes[level - 1]
        people = rng.sample(_NAMES, 3)
        self.name, self.pronoun, self.possessive = people[0]
        self.friend = people[1][0]
        self.other_friend = people[2][0]
        (self.thing, self.things), (_, self.other_things) = rng.sample(_THINGS, 2)
        self.container = rng.choice(_CONTAINERS)
        self.value = 0
        #: Set after a sentence about another person, where a pronoun would be ambiguous.
        self.needs_name = False

    def number(self, low: int, high: int) -> int:
        """A number in [low, high], drawn with a bias to short ones; ``_InfeasibleError`` if empty."""
        if high < low:
            raise _InfeasibleError
        if self.rng.random() < 0.35:
            high = max(low, min(high, low + 30))
        return self.rng.randint(low, high)

    def divisor(self, value: int) -> int:
        """A divisor of ``value`` in [2, 9] that leaves a quotient of at least 2."""
        divisors = [k for k in range(2, 10) if value % k == 0 and value // k >= 2]
        if not divisors:
            raise _InfeasibleError
        return self.rng.choice(divisors)

    def factor(self, value: int) -> int:
        """A factor in [2, 9] that keeps the product within the limit."""
        return self.rng.randint(2, min(9, self.bounded(self.max_value // max(value, 1), 2)))

    def groups(self, limit: int) -> Step:
        """A product ``number of groups * group size`` of at most ``limit``."""
        num_groups = self.rng.randint(2, self.bounded(min(self.max_groups, limit // 2), 2))
        size = self.rng.randint(2, self.bounded(min(self.max_group_size, limit // num_groups), 2))
        return Step(num_groups, "*", size, num_groups * size)

    def share(self, limit: int) -> Step:
        """An exact division ``total / children`` with a quotient of at most ``limit``."""
        children = self.rng.randint(2, 9)
        top = self.bounded(min(limit, self.max_value // children, 6 * self.max_group_size), 2)
        each = self.rng.randint(2, top)
        return Step(children * each, "/", children, each)

    @staticmethod
    def bounded(high: int, low: int) -> int:
        """``high`` when the range [low, high] is not empty, else ``_InfeasibleError``."""
        if high < low:
            raise _InfeasibleError
        return high

    def subject(self) -> str:
        """Start of a sentence about the main person: a name or pronoun, maybe after an opener."""
        who = self.name if self.needs_name or self.rng.random() < 0.4 else self.pronoun
        if self.rng.random() < 0.25:
            return f"{self.rng.choice(_OPENERS)} {who}"
        return who[0].upper() + who[1:]

    def say(self, *forms: str) -> str:
        """One of the sentence forms; ``{W}`` subject, ``{n}`` name, ``{f}`` friend, ``{t}`` things."""
        return self.rng.choice(forms).format(
            W=self.subject(),
            n=self.name,
            f=self.friend,
            g=self.other_friend,
            t=self.things,
            t1=self.thing,
            c=self.container,
            his=self.possessive,
        )

    def event(self, steps: tuple[Step, ...], *forms: str) -> Event:
        """An event with the given steps, told in one of the sentence forms."""
        return Event(self.say(*forms), steps)

    def change(self, operator: str, right: int) -> Step:
        """Apply ``value operator right`` to the running quantity and return it as a step."""
        left = self.value
        results = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}
        result = results[operator]
        if not 1 <= result <= self.max_value:
            raise _InfeasibleError
        self.value = result
        return Step(left, operator, right, result)


# -- openings: how the quantity comes to be ----------------------------------------------------


def _start_plain(s: _Story) -> Event:
    s.value = v = s.number(3, s.max_value * 3 // 4)
    return s.event(
        (),
        f"{{n}} has {v} {{t}}.",
        f"{{n}} starts with {v} {{t}}.",
        f"There are {v} {{t}} in {{n}}'s room.",
        f"{{n}} owns {v} {{t}}.",
    )


def _start_groups(s: _Story) -> Event:
    step = s.groups(s.max_value)
    s.value = step.result
    a, b = step.left, step.right
    return s.event(
        (step,),
        f"{{n}} has {a} {{c}} with {b} {{t}} each.",
        f"There are {b} {{t}} in each of {{n}}'s {a} {{c}}.",
        f"{{n}} has {a} {{c}}. Each holds {b} {{t}}.",
    )


def _start_colours(s: _Story) -> Event:
    a = s.number(3, s.max_value // 2)
    b = s.number(3, s.max_value // 2)
    s.value = a + b
    red, blue = s.rng.sample(("red", "blue", "green", "old", "new", "small", "big"), 2)
    text = s.say(f"{{n}} has {a} {red} {{t}} and {b} {blue} {{t}}.")
    return Event(text, (Step(a, "+", b, s.value),))


def _start_share(s: _Story) -> Event:
    step = s.share(s.max_value)
    s.value = step.result
    forms = [
        f"{step.left} {{t}} are shared equally by {step.right} children. {{n}} is one of them.",
        f"{{n}} gets an equal share when {step.right} children share {step.left} {{t}}.",
    ]
    if step.right == 2:
        forms = [f"{{n}} and {{f}} share {step.left} {{t}} equally."]
    return s.event((step,), *forms)


# -- events: what happens to it ----------------------------------------------------------------


def _gain(s: _Story) -> Event:
    a = s.number(2, s.max_value - s.value)
    step = s.change("+", a)
    return s.event(
        (step,),
        f"{{W}} finds {a} more {{t}}.",
        f"{{W}} gets {a} {{t}} from {{f}}.",
        f"{{f}} gives {{n}} {a} more {{t}}.",
        f"{{W}} buys {a} more {{t}}.",
        f"{{W}} wins {a} {{t}} in a game.",
    )


def _lose(s: _Story) -> Event:
    a = s.number(2, s.value - 2)
    step = s.change("-", a)
    return s.event(
        (step,),
        f"{{W}} gives {a} {{t}} to {{f}}.",
        f"{{W}} loses {a} {{t}}.",
        f"{{W}} sells {a} of the {{t}}.",
        f"{{f}} takes {a} of {{his}} {{t}}.",
        f"{a} of the {{t}} get lost.",
    )


def _multiply(s: _Story) -> Event:
    k = s.factor(s.value)
    step = s.change("*", k)
    forms = [
        f"{{W}} trades each {{t1}} for {k} new {{t}}.",
        f"{{W}} works hard and soon has {k} times as many {{t}}.",
    ]
    if k == 2:
        forms += ["The number of {t} doubles.", "{f} doubles {his} {t}."]
    if k == 3:
        forms += ["The number of {t} triples."]
    return s.event((step,), *forms)


def _divide(s: _Story) -> Event:
    k = s.divisor(s.value)
    step = s.change("/", k)
    forms = [
        f"{{W}} sorts the {{t}} into {k} equal piles and keeps one pile.",
        f"{{W}} splits the {{t}} evenly into {k} {{c}} and keeps only one.",
    ]
    if k == 2:
        forms += ["{W} gives half of the {t} to {f}.", "{W} loses half of {his} {t}."]
    return s.event((step,), *forms)


def _gain_groups(s: _Story) -> Event:
    first = s.groups(s.max_value - s.value)
    a, b = first.left, first.right
    second = s.change("+", first.result)
    return s.event(
        (first, second),
        f"{{W}} buys {a} {{c}} with {b} {{t}} each.",
        f"{{W}} gets {b} {{t}} from each of {a} friends.",
        f"{{W}} finds {b} {{t}} a day for {a} days.",
        f"{a} friends give {{n}} {b} {{t}} each.",
    )


def _lose_groups(s: _Story) -> Event:
    first = s.groups(s.value - 2)
    a, b = first.left, first.right
    second = s.change("-", first.result)
    return s.event(
        (first, second),
        f"{{W}} gives {b} {{t}} to each of {a} friends.",
        f"{{W}} sells {a} {{c}} with {b} {{t}} each.",
        f"{{W}} uses {b} {{t}} a day for {a} days.",
        f"{a} friends take {b} {{t}} each.",
    )


def _gain_share(s: _Story) -> Event:
    first = s.share(s.max_value - s.value)
    second = s.change("+", first.result)
    return s.event(
        (first, second),
        f"{{n}} and others, {first.right} in all, share {first.left} more {{t}} equally.",
        f"{first.left} more {{t}} are shared equally by {first.right} children with {{n}}.",
    )


def _gain_two(s: _Story) -> Event:
    room = s.max_value - s.value
    a = s.number(2, room // 2)
    b = s.number(2, room - a)
    steps = (Step(a, "+", b, a + b), s.change("+", a + b))
    return s.event(
        steps,
        f"{{W}} gets {a} {{t}} from {{f}} and {b} from {{g}}.",
        f"{{W}} finds {a} {{t}} at home and {b} at school.",
    )


def _lose_two(s: _Story) -> Event:
    a = s.number(2, (s.value - 2) // 2)
    b = s.number(2, s.value - 2 - a)
    steps = (Step(a, "+", b, a + b), s.change("-", a + b))
    return s.event(
        steps,
        f"{{W}} gives {a} {{t}} to {{f}} and {b} to {{g}}.",
        f"{{W}} loses {a} {{t}} at home and {b} at school.",
    )


def _gain_groups_broken(s: _Story) -> Event:
    first = s.groups(s.max_value - s.value)
    e = s.number(1, first.result - 2)
    rest = first.result - e
    steps = (first, Step(first.result, "-", e, rest), s.change("+", rest))
    a, b = first.left, first.right
    return s.event(
        steps,
        f"{{W}} buys {a} {{c}} with {b} {{t}} each but drops {e} of those.",
        f"{{f}} has {a} {{c}} of {b} {{t}}, keeps {e} and gives {{n}} the rest.",
    )


# -- questions: what is asked in the end -------------------------------------------------------


def _ask_plain(s: _Story) -> Event:
    return s.event(
        (),
        "How many {t} does {n} have now?",
        "How many {t} does {n} have in the end?",
        "How many {t} are there now?",
        "What is the number of {t} now?",
    )


def _ask_cost(s: _Story) -> Event:
    k = s.factor(s.value)
    step = s.change("*", k)
    return s.event(
        (step,),
        f"Each {{t1}} costs {k} dollars. What do all the {{t}} cost?",
        f"{{W}} sells all the {{t}} for {k} dollars each. How many dollars is that?",
    )


def _ask_boxes(s: _Story) -> Event:
    k = s.divisor(s.value)
    step = s.change("/", k)
    return s.event(
        (step,),
        f"{{W}} puts {k} {{t}} in each bag. How many bags are needed?",
        f"{{W}} packs the {{t}} in rows of {k}. How many rows are there?",
        f"{k} children share all the {{t}} equally. How many does each get?",
    )


def _ask_more_than(s: _Story) -> Event:
    a = s.number(2, s.value - 2)
    step = s.change("-", a)
    return s.event((step,), f"{{f}} has {a} {{t}}. How many more {{t}} does {{n}} have than {{f}}?")


def _ask_missing(s: _Story) -> Event:
    a = s.value + s.number(2, s.max_value - s.value)
    step = Step(a, "-", s.value, a - s.value)
    s.value = step.result
    return s.event((step,), f"How many more {{t}} does {{n}} need to have {a}?")


def _ask_together_times(s: _Story) -> Event:
    start = s.value
    first = s.change("*", s.factor(start + start // 2))
    s.value = start
    second = s.change("+", first.result)
    many = "twice" if first.right == 2 else f"{first.right} times"
    text = f"{{f}} has {many} as many {{t}} as {{n}}. How many {{t}} do they have together?"
    return s.event((first, second), text)


def _ask_together_difference(s: _Story) -> Event:
    start = s.value
    if s.rng.random() < 0.5:
        first, word = s.change("+", s.number(2, (s.max_value - 2 * start))), "more"
    else:
        first, word = s.change("-", s.number(2, start - 2)), "fewer"
    s.value = start
    second = s.change("+", first.result)
    question = "than {n}. How many {t} do they have together?"
    return s.event((first, second), f"{{f}} has {first.right} {word} {{t}} {question}")


#: Writers by the number of steps that they add.
_STARTS: dict[int, tuple[Callable[[_Story], Event], ...]] = {
    0: (_start_plain,),
    1: (_start_groups, _start_groups, _start_colours, _start_share),
}
_EVENTS: dict[int, tuple[Callable[[_Story], Event], ...]] = {
    1: (_gain, _lose, _multiply, _divide),
    2: (_gain_groups, _gain_groups, _lose_groups, _gain_share, _gain_two, _lose_two),
    3: (_gain_groups_broken,),
}
_ENDS: dict[int, tuple[Callable[[_Story], Event], ...]] = {
    0: (_ask_plain,),
    1: (_ask_cost, _ask_boxes, _ask_more_than, _ask_missing),
    2: (_ask_together_times, _ask_together_difference),
}


def _distractor(s: _Story) -> str:
    a = s.rng.randint(2, 60)
    return s.say(
        f"{{f}} is {a} years old.",
        f"{{n}} also has {a} {s.other_things}.",
        f"The bus ride takes {a} minutes.",
        f"{{g}} has {a} {{t}} too.",
        f"{{g}} reads {a} pages.",
        f"It is {a} degrees outside.",
    )


def _write(rng: random.Random, level: int, difficulty: Difficulty) -> Problem:
    """One attempt at a problem of exactly ``level`` steps; raises ``_InfeasibleError`` at a dead end."""
    s = _Story(rng, level, difficulty)
    num_start = rng.randint(0, 1)
    num_end = rng.choice((0, 0, 0, 1, 1, 2))
    if num_start + num_end > level:
        raise _InfeasibleError
    sizes = []
    left = level - num_start - num_end
    while left > 0:
        sizes.append(rng.choice([k for k in (1, 1, 2, 2, 3) if k <= left]))
        left -= sizes[-1]
    writers = [_STARTS[num_start], *(_EVENTS[size] for size in sizes), _ENDS[num_end]]
    has_distractor = rng.random() < difficulty.distractor_chances[level - 1]
    distractor_idx = rng.randint(1, len(writers) - 1) if has_distractor else -1

    sentences: list[str] = []
    steps: list[Step] = []
    for index, choices in enumerate(writers):
        s.needs_name = index == distractor_idx
        if s.needs_name:
            sentences.append(_distractor(s))
        event = rng.choice(choices)(s)
        sentences.append(event.text)
        steps.extend(event.steps)
    question = " ".join(sentences)
    answer = steps[-1].result
    solution = "\n".join([step.line() for step in steps] + [f"#### {answer}"])
    if len(question) > _MAX_QUESTION_CHARS or len(solution) > _MAX_SOLUTION_CHARS:
        raise _InfeasibleError
    return Problem(level=level, question=question, answer=answer, solution=solution)


def generate_problem(
    rng: random.Random, level: int, difficulty: Difficulty = DEFAULT_DIFFICULTY
) -> Problem:
    """A problem of exactly ``level`` steps drawn from ``rng``."""
    if not MIN_LEVEL <= level <= MAX_LEVEL:
        raise ValueError(
            f"generate_problem: expected a level in [{MIN_LEVEL}, {MAX_LEVEL}], got {level}"
        )
    while True:
        with contextlib.suppress(_InfeasibleError):
            return _write(rng, level, difficulty)


def question_hash(question: str) -> str:
    """Key by which held-out questions are kept out of training draws."""
    return hashlib.sha256(question.encode()).hexdigest()[:32]


def heldout_problems(
    count: int = HELDOUT_COUNT,
    seed: int = HELDOUT_SEED,
    difficulty: Difficulty = DEFAULT_DIFFICULTY,
) -> list[Problem]:
    """The held-out set: ``count`` distinct problems, balanced over the levels, from a fixed seed."""
    rng = random.Random(f"heldout/{seed}")
    problems: list[Problem] = []
    seen: set[str] = set()
    while len(problems) < count:
        problem = generate_problem(rng, MIN_LEVEL + len(problems) % MAX_LEVEL, difficulty)
        if problem.question not in seen:
            seen.add(problem.question)
            problems.append(problem)
    return problems


def training_problems(
    seed: int,
    chunk_id: int,
    count: int,
    excluded: Collection[str],
    level_weights: Sequence[float] = TRAINING_LEVEL_WEIGHTS,
    difficulty: Difficulty = DEFAULT_DIFFICULTY,
) -> Iterator[Problem]:
    """``count`` training draws of one chunk, none with a question whose hash is in ``excluded``.

    Chunks are independent streams, so worker processes can draw them in any order and the data
    does not depend on how many workers there are.
    """
    rng = random.Random(f"training/{seed}/{chunk_id}")
    levels = range(MIN_LEVEL, MAX_LEVEL + 1)
    drawn = 0
    while drawn < count:
        problem = generate_problem(rng, rng.choices(levels, level_weights)[0], difficulty)
        if question_hash(problem.question) in excluded:
            continue
        drawn += 1
        yield problem


def extract_answer(text: str) -> int | None:
    """The number on the last ``####`` line of a generated answer, or None when there is none."""
    matches = re.findall(r"^####\s*(-?\d+)\s*$", text, flags=re.MULTILINE)
    return int(matches[-1]) if matches else None


def is_correct(problem: Problem, text: str) -> bool:
    """Whether the generated ``text`` ends in exactly the answer of ``problem``."""
    return extract_answer(text) == problem.answer
