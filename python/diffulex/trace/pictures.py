# SPDX-License-Identifier: Apache-2.0
"""Pictures of a trajectory: plots of its order, and a GIF of its cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.trace.trajectory import replayed

if TYPE_CHECKING:
    from diffulex.trace.trajectory import Trajectory

__all__ = ["write_gif", "write_plot"]

_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_NO_CONFIDENCE = "#9aa0a6"
_CELL, _GAP, _PER_ROW = 12, 2, 64
_FRAME_MS, _LAST_MS = 200, 1500
_COLORS = {
    "page": (255, 255, 255),
    "open": (208, 213, 219),
    "new": (26, 127, 55),
    "old": (9, 105, 218),
    "settled": (54, 60, 69),
}


def _need(module: str, what: str, package: str) -> Any:
    import importlib  # noqa: PLC0415 (of optional packages)

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what}: expected the package {package} (pip install {package}), got none"
        ) from error


def _check_full(trajectories: Sequence[Trajectory], what: str) -> None:
    for trajectory in trajectories:
        if trajectory.level != "full":
            raise ConfigError(
                f"{what}: expected trajectories of level full, got {trajectory.level}"
            )


def write_plot(trajectories: Sequence[Trajectory], path: Path) -> None:
    """Three plots below each other: the step that wrote each position, coloured by confidence (grey: it
    had none); decided tokens per step; confidences.

    Raises:
        ConfigError: no tokens in a trajectory, another suffix, or no matplotlib.
    """
    _check_full(trajectories, "--plot")
    if path.suffix not in _PLOT_SUFFIXES:
        raise ConfigError(
            f"--plot: expected a name in {', '.join(_PLOT_SUFFIXES)}, got {path.name!r}"
        )
    _need("matplotlib", "--plot", "matplotlib").use("Agg")
    pyplot = _need("matplotlib.pyplot", "--plot", "matplotlib")
    figure, (order, counts, confidence) = pyplot.subplots(
        3, 1, figsize=(8, 9), layout="constrained"
    )
    places, steps, values = [], [], []
    for trajectory in trajectories:
        for token in trajectory.tokens:
            places.append(token.position - trajectory.prompt_len)
            steps.append(token.step)
            values.append(math.nan if token.confidence is None else token.confidence)
    colors = pyplot.get_cmap("viridis").with_extremes(bad=_NO_CONFIDENCE)
    dots = order.scatter(
        places, steps, c=values, s=14, cmap=colors, vmin=0, vmax=1, plotnonfinite=True
    )
    figure.colorbar(dots, ax=order, label="confidence")
    order.set(xlabel="position in the answer", ylabel="step of the last write")
    longest = max((len(trajectory.steps) for trajectory in trajectories), default=0)
    sums = [0] * longest
    for trajectory in trajectories:
        for index, step in enumerate(trajectory.steps):
            sums[index] += step.new_tokens
    means = [value / len(trajectories) for value in sums]
    counts.bar(range(1, longest + 1), means, color="#0969da")
    counts.set(xlabel="step", ylabel="decided tokens" + (", mean" if len(trajectories) > 1 else ""))
    confidence.hist(
        [v for v in values if not math.isnan(v)], bins=20, range=(0, 1), color="#1a7f37"
    )
    confidence.set(xlabel="confidence of the last write", ylabel="tokens")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def write_gif(trajectory: Trajectory, path: Path) -> None:
    """One square per position and one frame per step: open, new in this step, decided, final.

    Raises:
        ConfigError: no tokens in the trajectory, or no Pillow.
    """
    _check_full([trajectory], "--gif")
    image, draw = (_need(f"PIL.{name}", "--gif", "pillow") for name in ("Image", "ImageDraw"))
    mask, first = trajectory.mask_token_id, trajectory.prompt_len
    states: list[list[str]] = []
    for step, tokens in replayed(trajectory):
        new = {change.position - first for change in step.changes}
        states.append(
            [
                "open" if token == mask else "new" if at in new else
                "settled" if at < step.settled else "old"
                for at, token in enumerate(tokens)
            ]
        )  # fmt: skip
    count = max(map(len, states), default=0)
    if count == 0:
        raise ConfigError("--gif: expected a request with steps, got one without")
    width = min(count, _PER_ROW) * (_CELL + _GAP) + _GAP
    height = -(-count // _PER_ROW) * (_CELL + _GAP) + _GAP
    frames = []
    for cells in states:
        picture = image.new("RGB", (width, height), _COLORS["page"])
        pen = draw.Draw(picture)
        for at, state in enumerate(cells):
            row, column = divmod(at, _PER_ROW)
            left, top = _GAP + column * (_CELL + _GAP), _GAP + row * (_CELL + _GAP)
            pen.rectangle((left, top, left + _CELL - 1, top + _CELL - 1), fill=_COLORS[state])
        frames.append(picture)
    times = [_FRAME_MS] * (len(frames) - 1) + [_LAST_MS]
    try:
        frames[0].save(
            path, format="GIF", save_all=True, append_images=frames[1:], duration=times, loop=0
        )
    except OSError as error:
        raise ConfigError(f"--gif: cannot write {path}: {error.strerror}") from error
