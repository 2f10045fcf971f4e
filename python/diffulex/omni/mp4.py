# SPDX-License-Identifier: Apache-2.0
"""Videos as mp4 files, without a package for it.

The stream is H.264 of the simplest kind: blocks of 16 x 16 pixels that have changed are written as they
are (I_PCM), the others are skipped. No detail is lost but half of the colour's resolution, and files are
large: up to 1.5 bytes per pixel and frame.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["save_video", "write_mp4"]

_BLOCK = 16
_FRAME_NUMBER_BITS = 16
#: Types of macroblocks in slices of each kind.
_PCM_IN_I, _PCM_IN_P = 25, 30
_IDR, _SLICE = 0x65, 0x41
_TIMESCALE = 90_000
#: BT.709, as the stream says.
_RED, _BLUE = 0.2126, 0.0722


class _Bits:
    """Bits of a unit of the stream, the first is the most significant."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._value = self._count = 0

    def u(self, value: int, count: int) -> None:
        """An unsigned number of so many bits."""
        self._value = (self._value << count) | value
        self._count += count
        while self._count >= 8:
            self._count -= 8
            self._data.append(self._value >> self._count)
            self._value &= (1 << self._count) - 1

    def ue(self, *values: int) -> None:
        """Numbers in the code of Exp-Golomb."""
        for value in values:
            length = (value + 1).bit_length()
            self.u(value + 1, 2 * length - 1)

    def align(self) -> None:
        if self._count:
            self.u(0, 8 - self._count)

    def raw(self, data: bytes) -> None:
        """Whole bytes; the bits before them are whole bytes, too."""
        self._data += data

    def unit(self, header: int) -> bytes:
        """The unit, so that no three of its bytes look like the start of another one."""
        self.u(1, 1)
        self.align()
        return bytes([header]) + re.sub(rb"\0\0(?=[\0-\3])", b"\0\0\3", bytes(self._data))


def _sequence_set(width: int, height: int) -> bytes:
    columns, rows = -(-width // _BLOCK), -(-height // _BLOCK)
    bits = _Bits()
    level = 40 if columns * rows <= 8192 else 52
    for value in (66, 0xC0, level):
        bits.u(value, 8)
    # Numbers of frames, order of output, one reference.
    bits.ue(0, _FRAME_NUMBER_BITS - 4, 2, 1)
    bits.u(0, 1)
    bits.ue(columns - 1, rows - 1)
    bits.u(0b11, 2)
    bits.u(1, 1)
    # What is cut off, in pairs of pixels: left, right, top, bottom.
    bits.ue(0, (columns * _BLOCK - width) // 2, 0, (rows * _BLOCK - height) // 2)
    # Only the colours are described: BT.709 from 16 to 235.
    bits.u(0b1001, 4)
    bits.u(0b10101, 5)
    for _ in range(3):
        bits.u(1, 8)
    bits.u(0, 6)
    return bits.unit(0x67)


def _picture_set() -> bytes:
    bits = _Bits()
    bits.ue(0, 0)
    bits.u(0, 2)
    bits.ue(0, 0, 0)
    bits.u(0, 3)
    bits.ue(0, 0, 0)
    # The filter over borders of blocks can be turned off.
    bits.u(0b100, 3)
    return bits.unit(0x68)


def _blocks(frame: NDArray[Any]) -> NDArray[Any]:
    """[H, W, 3] in 0..255 -> [rows, columns, 384] bytes of luma and both colours, padded at the ends."""
    import numpy as np  # noqa: PLC0415 (nothing needs it before a video is written)

    height, width = frame.shape[:2]
    pad = [(0, -height % _BLOCK), (0, -width % _BLOCK), (0, 0)]
    red, green, blue = np.moveaxis(np.pad(frame, pad, mode="edge").astype(np.float32) / 255, -1, 0)
    luma = _RED * red + (1 - _RED - _BLUE) * green + _BLUE * blue
    colours = ((blue - luma) / (2 - 2 * _BLUE), (red - luma) / (2 - 2 * _RED))
    planes = [16 + 219 * luma]
    for colour in colours:
        rows, columns = colour.shape
        planes.append(128 + 224 * colour.reshape(rows // 2, 2, columns // 2, 2).mean((1, 3)))
    parts = []
    for plane, size in zip(planes, (_BLOCK, _BLOCK // 2, _BLOCK // 2)):
        rows, columns = (length // size for length in plane.shape)
        cells = plane.round().astype(np.uint8).reshape(rows, size, columns, size)
        parts.append(cells.transpose(0, 2, 1, 3).reshape(rows, columns, size * size))
    return np.concatenate(parts, -1)


def _slice(number: int, blocks: NDArray[Any], before: NDArray[Any] | None) -> bytes:
    """One frame; without one before it, it stands alone."""
    bits = _Bits()
    bits.ue(0, 7 if before is None else 5, 0)
    bits.u(number % (1 << _FRAME_NUMBER_BITS), _FRAME_NUMBER_BITS)
    if before is None:
        bits.ue(0)
        bits.u(0, 2)
    else:
        bits.u(0, 3)
    # The quantiser stays, the filter over borders is off.
    bits.ue(0, 1)
    skipped = 0
    for row, line in enumerate(blocks):
        for column, block in enumerate(line):
            if before is not None:
                if (block == before[row, column]).all():
                    skipped += 1
                    continue
                bits.ue(skipped)
                skipped = 0
            bits.ue(_PCM_IN_I if before is None else _PCM_IN_P)
            bits.align()
            bits.raw(block.tobytes())
    if skipped:
        bits.ue(skipped)
    return bits.unit(_IDR if before is None else _SLICE)


def _box(kind: str, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I4s", len(body) + 8, kind.encode()) + body


def _full(kind: str, *parts: bytes, flags: int = 0) -> bytes:
    return _box(kind, struct.pack(">I", flags), *parts)


def _numbers(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


_MATRIX = _numbers(1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)


def _samples(width: int, height: int, sizes: Sequence[int], duration: int, start: int) -> bytes:
    sps, pps = _sequence_set(width, height), _picture_set()
    header = bytes([1, *sps[1:4], 0xFF, 0xE1]) + struct.pack(">H", len(sps)) + sps
    header += bytes([1]) + struct.pack(">H", len(pps)) + pps
    entry = bytes(6) + struct.pack(">H", 1) + bytes(16) + struct.pack(">HH", width, height)
    entry += _numbers(72 << 16, 72 << 16, 0) + struct.pack(">H", 1) + bytes(32)
    entry += struct.pack(">Hh", 24, -1) + _box("avcC", header)
    return _box(
        "stbl",
        _full("stsd", _numbers(1), _box("avc1", entry)),
        _full("stts", _numbers(1, len(sizes), duration)),
        _full("stss", _numbers(1, 1)),
        _full("stsc", _numbers(1, 1, len(sizes), 1)),
        _full("stsz", _numbers(0, len(sizes), *sizes)),
        _full("stco", _numbers(1, start)),
    )


def _movie(width: int, height: int, sizes: Sequence[int], duration: int, start: int) -> bytes:
    total = duration * len(sizes)
    media = _box(
        "minf",
        _full("vmhd", bytes(8), flags=1),
        _box("dinf", _full("dref", _numbers(1), _full("url ", flags=1))),
        _samples(width, height, sizes, duration, start),
    )
    track = _box(
        "trak",
        _full(
            "tkhd",
            _numbers(0, 0, 1, 0, total, 0, 0, 0, 0),
            _MATRIX,
            _numbers(width << 16, height << 16),
            flags=3,
        ),
        _box(
            "mdia",
            # The language is "und".
            _full("mdhd", _numbers(0, 0, _TIMESCALE, total), struct.pack(">HH", 0x55C4, 0)),
            _full("hdlr", bytes(4), b"vide", bytes(12), b"video\0"),
            media,
        ),
    )
    # Speed and volume are one.
    head = _numbers(0, 0, _TIMESCALE, total, 1 << 16) + struct.pack(">H", 1 << 8) + bytes(10)
    return _box("moov", _full("mvhd", head, _MATRIX, bytes(24), _numbers(2)), track)


def write_mp4(path: Path, frames: Sequence[NDArray[Any]], fps: float) -> None:
    """Writes a video that browsers play.

    Args:
        path: of the file.
        frames: uint8 [H, W, 3], of one even height and width.
        fps: frames of a second.

    Raises:
        ValueError: there is no frame, or heights and widths are odd or differ.
    """
    shapes = {frame.shape for frame in frames}
    if len(shapes) != 1 or any(length % 2 for length in next(iter(shapes))[:2]):
        raise ValueError(f"frames: expected one even height and width, got {sorted(shapes)}")
    height, width = frames[0].shape[:2]
    samples, before = [], None
    for number, frame in enumerate(frames):
        blocks = _blocks(frame)
        unit = _slice(number, blocks, before)
        samples.append(struct.pack(">I", len(unit)) + unit)
        before = blocks
    kinds = _box("ftyp", b"isom", _numbers(0x200), b"isomiso2avc1mp41")
    settings = (width, height, [len(sample) for sample in samples], round(_TIMESCALE / fps))
    # The place of the first frame is known when the rest is as long as it will be.
    start = len(kinds) + len(_movie(*settings, 0)) + 8
    path.write_bytes(kinds + _movie(*settings, start) + _box("mdat", *samples))


def save_video(path: Path, frames: Sequence[Any], fps: float) -> None:
    """Writes PIL images as .mp4, or as .gif.

    Args:
        path: its suffix decides.
        frames: of one size; even for .mp4.
        fps: frames of a second; a .gif knows hundredths of a second.
    """
    import numpy as np  # noqa: PLC0415 (nothing needs it before a video is written)

    if path.suffix.lower() == ".mp4":
        write_mp4(path, [np.asarray(frame.convert("RGB")) for frame in frames], fps)
        return
    frames[0].save(
        path, save_all=True, append_images=frames[1:], duration=round(1000 / fps), loop=0
    )
