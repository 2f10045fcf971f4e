# SPDX-License-Identifier: Apache-2.0
"""Pictures that come in: read from files and uploads, and the sizes that follow from them."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from diffulex.omni.errors import RequestError

__all__ = ["as_mode", "as_rgb", "read_picture", "size_like", "steps_run"]

_FORMATS = ("PNG", "JPEG", "WEBP")


def read_picture(source: str | Path | bytes, name: str, max_pixels: int, mode: str = "RGB") -> Any:
    """A PIL image, upright, as `as_mode` makes it.

    Args:
        source: a file, or its content.
        name: of it, for errors.
        max_pixels: its size is looked at before anything is decoded.
        mode: `RGB` or `RGBA`.

    Raises:
        RequestError: it is no PNG, JPEG or WebP file, cannot be read, or is larger.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415 (of the extra)

    kinds = "expected a readable PNG, JPEG or WebP file"
    try:
        data = source if isinstance(source, bytes) else Path(source).read_bytes()
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise RequestError(
                    f"{name}: expected at most {max_pixels} pixels (max_pixels), got {width}x{height}"
                )
            return as_mode(ImageOps.exif_transpose(image), mode)
    except RequestError:
        raise
    except UnidentifiedImageError:
        raise RequestError(f"{name}: {kinds}, got another") from None
    except Image.DecompressionBombError as error:
        raise RequestError(f"{name}: expected at most {max_pixels} pixels, got {error}") from None
    # Decoders of broken files raise nearly anything.
    except Exception as error:
        raise RequestError(f"{name}: {kinds}, got {error}") from error


def as_rgb(image: Any) -> Any:
    """A PIL image of any mode as RGB; what is transparent shows white behind it.

    As OpenAI documents its edits, only a mask says by its transparency what is to be changed, and no
    pipeline here takes one: the transparency of a picture is how it looks.
    """
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    image = _eight_bits(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    from PIL import Image  # noqa: PLC0415 (of the extra)

    clear = image.convert("RGBA")
    white = Image.new("RGBA", clear.size, "white")
    return Image.alpha_composite(white, clear).convert("RGB")


def as_mode(image: Any, mode: str) -> Any:
    """A PIL image as `RGB`, as `as_rgb` makes it, or as `RGBA`, with its transparency."""
    return as_rgb(image) if mode == "RGB" else _eight_bits(image).convert(mode)


def _eight_bits(image: Any) -> Any:
    """Of 16 bits, which a conversion clips, the upper eight, rounded."""
    if not image.mode.startswith("I"):
        return image
    return image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")


def size_like(
    size: tuple[int, int], area: int, side_multiple: int, multiple: int
) -> dict[str, int]:
    """Height and width of the shape of a picture and about an area, in pixels.

    Args:
        size: width and height of the picture.
        area: of the result.
        side_multiple: what the sides are rounded to first.
        multiple: what they are a multiple of in the end, at least once.
    """
    ratio = size[0] / size[1]
    sides = {"height": math.sqrt(area / ratio), "width": math.sqrt(area * ratio)}
    rounded = {name: round(side / side_multiple) * side_multiple for name, side in sides.items()}
    return {name: max(1, side // multiple) * multiple for name, side in rounded.items()}


def steps_run(num_steps: int, strength: float | None) -> int:
    """How many of the denoising steps are left for a picture that was made noisy up to `strength`."""
    if strength is None:
        return num_steps
    return num_steps - int(max(num_steps - min(num_steps * strength, num_steps), 0))
