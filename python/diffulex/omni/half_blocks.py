# SPDX-License-Identifier: Apache-2.0
"""A picture in a terminal: every character cell shows two pixels, one above the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["PicturePainter", "half_blocks"]

_RESET = "\x1b[0m"
_UPPER_HALF = "▀"


def half_blocks(image: Image, columns: int, rows: int) -> list[str]:
    """Lines of coloured characters, at most `columns` x `rows`, in the picture's proportions."""
    scale = min(columns / image.width, 2 * rows / image.height, 1.0)
    width = max(1, int(image.width * scale))
    height = max(2, int(image.height * scale) // 2 * 2)
    pixels: Any = image.convert("RGB").resize((width, height)).load()
    lines = []
    for y in range(0, height, 2):
        cells = []
        for x in range(width):
            (r, g, b), (r2, g2, b2) = pixels[x, y], pixels[x, y + 1]
            cells.append(f"\x1b[38;2;{r};{g};{b};48;2;{r2};{g2};{b2}m{_UPPER_HALF}")
        lines.append("".join(cells) + _RESET)
    return lines


class PicturePainter:
    """Draws a picture and the next one over it."""

    def __init__(self, stream: TextIO, columns: int, rows: int) -> None:
        self._stream = stream
        self._columns = columns
        # One line is the caption, one the cursor's.
        self._rows = max(1, rows - 2)
        self._num_lines = 0

    def show(self, image: Image, caption: str) -> None:
        """Replaces the picture before."""
        up = f"\x1b[{self._num_lines}A\r\x1b[J" if self._num_lines else ""
        lines = [*half_blocks(image, self._columns, self._rows), caption[: self._columns]]
        self._num_lines = len(lines)
        self._stream.write(up + "\n".join(lines) + "\n")
        self._stream.flush()

    def keep(self) -> None:
        """The next picture is drawn below this one."""
        self._num_lines = 0
