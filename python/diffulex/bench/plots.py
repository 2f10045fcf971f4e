# SPDX-License-Identifier: Apache-2.0
"""Pictures of runs, as SVG that stays the same for the same numbers."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from diffulex.bench.runs import Run

__all__ = ["check_matplotlib", "figure_svg", "plots_of"]

_SPEED = "e2e_throughput_tok_s"


def check_matplotlib(what: str) -> None:
    """Raises ConfigError where plots cannot be drawn."""
    try:
        import matplotlib as mpl  # noqa: F401, PLC0415 (an optional dependency)
    except ImportError as error:
        raise ConfigError(
            f"{what}: expected matplotlib for the plot, got none: pip install matplotlib"
        ) from error


@contextlib.contextmanager
def figure_svg(target: Path | io.BytesIO, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, written to `target` at the end of the block."""
    import matplotlib as mpl  # noqa: PLC0415 (an optional dependency)

    mpl.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    # Text stays text and ids do not change from run to run.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "diffulex"}):
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        try:
            yield figure, axes
            figure.savefig(target, format="svg", metadata={"Date": None})
        finally:
            plt.close(figure)


def _drawn(draw: Any) -> str:
    """The SVG element that `draw(axes)` makes."""
    target = io.BytesIO()
    with figure_svg(target, (7, 4)) as (_, axes):
        draw(axes)
        axes.grid(alpha=0.3)
    text = target.getvalue().decode()
    return text[text.index("<svg") :]


def _sampled(run: Run, key: str) -> list[float]:
    """A figure of every answer that has it."""
    values = ((sample.get("metrics") or {}).get(key) for sample in run.samples)
    return [float(value) for value in values if value is not None]


def _quality(runs: Sequence[Run], key: str, label: str) -> str | None:
    points = [(run.name, run.number(key), run.accuracy) for run in runs]
    known = [(name, x, y) for name, x, y in points if x is not None and y is not None]
    if not known:
        return None

    def draw(axes: Any) -> None:
        for name, x, y in known:
            axes.plot([x], [100 * y], marker="o", linestyle="none", label=name)
        axes.set_xlabel(label)
        axes.set_ylabel("accuracy, %")
        axes.legend(fontsize="small")

    return _drawn(draw)


def _distribution(runs: Sequence[Run], key: str, label: str) -> str | None:
    series = [(run.name, sorted(_sampled(run, key))) for run in runs]
    known = [(name, values) for name, values in series if values]
    if not known:
        return None

    def draw(axes: Any) -> None:
        for name, values in known:
            shares = [100 * (place + 1) / len(values) for place in range(len(values))]
            axes.step(values, shares, where="post", label=name)
        axes.set_xlabel(label)
        axes.set_ylabel("answers, % at most")
        axes.legend(fontsize="small")

    return _drawn(draw)


def plots_of(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Title and SVG of every picture for which the runs have numbers."""
    pictures = [
        (
            "Accuracy against tokens per forward",
            _quality(runs, "tpf_aggregate", "tokens per forward"),
        ),
        ("Accuracy against throughput", _quality(runs, _SPEED, "tokens/s")),
        ("Tokens of the answers", _distribution(runs, "completion_tokens", "tokens")),
        ("Tokens per forward of the answers", _distribution(runs, "tpf", "tokens per forward")),
        ("Time to the first token", _distribution(runs, "ttft_s", "seconds")),
        ("Time of the answers", _distribution(runs, "total_s", "seconds")),
    ]
    return [(title, picture) for title, picture in pictures if picture is not None]
