# SPDX-License-Identifier: Apache-2.0
"""What weights and caches in low precision cost: the curves of a zoo under every scheme, problem by problem.

    python -m diffulex.bench.zoo_schemes examples/zoo --output schemes.md

Every curve runs at its default settings with the weights as stored and with each scheme, on the same
problems; `kv` is a cache of 8 bits, alone or with a scheme, and `int4+all` has 4 bits where the family would
keep its dtype too. A row tells how many answers were lost and gained, and the standard error of the difference.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffulex
from diffulex.bench.evaluate import markdown_table, read_problems, run_problems
from diffulex.bench.zoo import read_zoo
from diffulex.config.flags import positive_integer
from diffulex.config.sampling_params import SamplingParams
from diffulex.errors import ConfigError, DiffulexError
from diffulex.quantization.scheme import SCHEMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex.bench.evaluate import RunReport
    from diffulex.bench.zoo import Curve

__all__ = ["LIMITS", "Comparison", "compare"]

#: Curves of the table: the beginnings of their names.
CURVES = (
    *(
        "multi_bd, 1 block",
        "multi_bd, 4 blocks",
        "d2f, 4 blocks, blocks from the prompt's end (LLaDA)",
    ),
    *("fast_dllm_v2", "edit (LLaDA2)", "dmax, 2 blocks", "diffusion_gemma"),
)
#: Points that a scheme may lose: on the mean of the curves, and on one of them.
LIMITS = dict.fromkeys(SCHEMES, (0.5, 1.5)) | {
    "int4": (1.5, 2.5),
    "int4+all": (1.5, 2.5),
    "kv": (0.5, 0.7),
    "fp8+kv": (1.5, 1.5),
}
#: Percent that the tokens per forward may change, and on the curve of `edit`.
MAX_TPF_CHANGE, MAX_EDIT_TPF_CHANGE = 3.0, 4.0
_HEADER = ["curve", "scheme", "accuracy", "lost", "gained", "points", "TPF", "change", "accepted"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One curve under one scheme beside the same curve with the weights as stored."""

    curve: str
    scheme: str
    num_problems: int
    num_correct: int
    lost: int
    gained: int
    tpf: float
    base_tpf: float

    @property
    def points(self) -> float:
        """Change of the accuracy in percent."""
        return 100 * (self.gained - self.lost) / self.num_problems

    @property
    def error(self) -> float:
        """Standard error of `points`, from the pairs that differ."""
        share = (self.gained - self.lost) / self.num_problems
        variance = (self.gained + self.lost) / self.num_problems - share * share
        return 100 * math.sqrt(max(variance, 0.0) / self.num_problems)

    @property
    def tpf_change(self) -> float:
        """In percent."""
        return 100 * (self.tpf / self.base_tpf - 1)

    @property
    def is_accepted(self) -> bool:
        is_edit = self.curve.startswith("edit")
        allowed = MAX_EDIT_TPF_CHANGE if is_edit else MAX_TPF_CHANGE
        return self.points >= -LIMITS[self.scheme][1] and abs(self.tpf_change) <= allowed

    def cells(self) -> list[str]:
        """Texts in the order of the table's header."""
        return [
            self.curve,
            self.scheme,
            f"{100 * self.num_correct / self.num_problems:.1f}",
            str(self.lost),
            str(self.gained),
            f"{self.points:+.1f} ± {self.error:.1f}",
            f"{self.tpf:.2f}",
            f"{self.tpf_change:+.1f} %",
            "yes" if self.is_accepted else "no",
        ]


def compare(curve: str, scheme: str, base: RunReport, run: RunReport) -> Comparison:
    """Pairs the answers of two runs over the same problems."""
    before, after = set(base.wrong_ids), set(run.wrong_ids)
    return Comparison(
        curve,
        scheme,
        run.total.num_problems,
        run.total.num_correct,
        lost=len(after - before),
        gained=len(before - after),
        tpf=run.total.tpf,
        base_tpf=base.total.tpf,
    )


def table(rows: Sequence[Comparison]) -> list[str]:
    """Lines of Markdown: every row, then the mean of each scheme over its curves."""
    lines = markdown_table([_HEADER, *(row.cells() for row in rows)])
    means = [["scheme", "mean of the curves", "limit", "accepted"]]
    for scheme in dict.fromkeys(row.scheme for row in rows):
        points = [row.points for row in rows if row.scheme == scheme]
        mean, limit = sum(points) / len(points), LIMITS[scheme][0]
        means.append([scheme, f"{mean:+.2f}", f"-{limit:g}", "yes" if mean >= -limit else "no"])
    return [*lines, "", *markdown_table(means)]


def _run(
    curve: Curve, scheme: str, problems: Sequence[Any], settings: Mapping[str, Any]
) -> RunReport:
    kwargs = {"model": curve.model, **settings, **curve.engine}
    parts = scheme.split("+")
    if parts[-1] == "all":
        kwargs["quantization_ignore"] = ()
    if parts[-1] == "kv":
        kwargs["kv_cache_dtype"] = "fp8_e4m3"
    kwargs["quantization"] = "none" if parts[0] == "kv" else parts[0]
    with diffulex.Diffulex(**kwargs) as engine:
        return run_problems(engine, problems, SamplingParams(**curve.sampling))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 2 where its settings cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("zoo", type=Path, help="a directory with zoo.json")
    schemes = [scheme for scheme in LIMITS if not scheme.endswith("+all")]
    parser.add_argument("--schemes", nargs="+", default=schemes, choices=LIMITS)
    parser.add_argument(
        "--curves", nargs="+", help="beginnings of their names [those of the table]"
    )
    parser.add_argument("--limit", type=positive_integer, help="only the first problems")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=positive_integer, default=32, help="requests at once")
    parser.add_argument("--output", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    try:
        text = "\n".join(table(_rows(options))) + "\n"
    except DiffulexError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


def _rows(options: argparse.Namespace) -> list[Comparison]:
    """Every curve of the table under every scheme, printed as they come.

    Raises:
        ConfigError: the zoo has no such curve, or cannot be read.
    """
    zoo = read_zoo(options.zoo)
    beginnings = tuple(options.curves or CURVES)
    curves = [curve for curve in zoo.curves if curve.name.startswith(beginnings)]
    unmatched = [name for name in beginnings if not any(c.name.startswith(name) for c in curves)]
    # A zoo may have a part of the table; what is asked for by name it must have.
    if unmatched and (options.curves or not curves):
        raise ConfigError(
            f"--curves: expected beginnings of the curves of {options.zoo}, got"
            f" {', '.join(map(repr, unmatched))}, which no curve begins with"
        )
    problems = read_problems(zoo.data)[: options.limit]
    settings = {"device": options.device, "max_num_reqs": options.batch}
    rows: list[Comparison] = []
    for curve in curves:
        base = _run(curve, "none", problems, settings)
        for scheme in options.schemes:
            row = compare(curve.name, scheme, base, _run(curve, scheme, problems, settings))
            rows.append(row)
            print(" | ".join(row.cells()), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
