# SPDX-License-Identifier: Apache-2.0
"""Pictures of latents while steps run: decoded where that is cheap beside the steps, else estimated."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffulex.omni.registry import PipelineSpec

__all__ = ["SHARE", "Previews"]

#: Of the time of the steps of a call, what its previews may decode for.
SHARE = 0.05

#: The estimate is fitted to so many patterns of so many cells a side.
_NUM_PATTERNS, _SIDE, _NUM_SPOTS = 4, 16, 6
#: Previews that are estimated until decoding is thought to take half of what it was measured to.
_NUM_REFUSALS = 64


class Previews:
    """Previews of one pipeline; not thread-safe.

    The estimate is linear, from the channels of a cell of latents to its mean colour: least squares over
    what the VAE itself makes of a few patterns, when it is first needed.
    """

    def __init__(self, pipeline: Any, spec: PipelineSpec, device: str) -> None:
        self._pipeline = pipeline
        self._spec = spec
        self._cuda = device if device.startswith("cuda") else None
        #: [channels + 1, 3]; the last row is added.
        self._map: Any = None
        #: What decoding takes, as it was last measured; halved now and then while it is too much, as the
        #: host may have been busy.
        self._pixel_s = 0.0
        self._num_refused = 0

    def wait(self) -> float:
        """Seconds until the device has done what it was told to."""
        start = time.perf_counter()
        if self._cuda is not None:
            import torch  # noqa: PLC0415 (slow; loaded with the model)

            torch.cuda.synchronize(self._cuda)
        return time.perf_counter() - start

    def draw(
        self, latents: Any, height: int, width: int, allowance_s: float
    ) -> tuple[list[Any], float]:
        """PIL images, and the seconds that decoding took.

        Args:
            latents: as the steps have them.
            height, width: of the pictures.
            allowance_s: what decoding may take.
        """
        import torch  # noqa: PLC0415

        vae, decode_s = self._pipeline.vae, 0.0
        decode = vae.decode

        def stand_in(cells: Any, return_dict: bool = True) -> tuple[Any]:
            nonlocal decode_s
            del return_dict  # the decoders of the pipelines take the first of a tuple
            num_pixels, factor = len(cells) * height * width, height // cells.shape[-2]
            if self._map is None:
                self._fit(decode, cells, factor)
            if self._pixel_s * num_pixels > allowance_s:
                self._num_refused += 1
                if self._num_refused % _NUM_REFUSALS == 0:
                    self._pixel_s /= 2
                return (self._estimate(cells, factor),)
            picture, decode_s = self._timed(decode, cells)
            self._pixel_s = decode_s / num_pixels
            return (picture,)

        assert self._spec.decode is not None
        # How cells come out of the latents, which may be packed and scaled, is in front of this.
        own = vars(vae).get("decode")
        vae.decode = stand_in
        try:
            with torch.inference_mode():
                decoded = self._spec.decode(self._pipeline, latents, height, width)
        finally:
            if own is None:
                del vae.decode
            else:
                vae.decode = own
        return self._pipeline.image_processor.postprocess(decoded, output_type="pil"), decode_s

    def _timed(self, decode: Any, cells: Any) -> tuple[Any, float]:
        self.wait()
        start = time.perf_counter()
        picture = decode(cells, return_dict=False)[0]
        self.wait()
        return picture, time.perf_counter() - start

    def _fit(self, decode: Any, like: Any, factor: int) -> None:
        import torch  # noqa: PLC0415
        from torch.nn.functional import avg_pool2d  # noqa: PLC0415

        patterns = _patterns(_SIDE * factor).to(like)
        if like.dim() == 5:  # one frame
            patterns = patterns[:, :, None]
        cells = self._pipeline.vae.encode(patterns, return_dict=False)[0].mode()
        self._timed(decode, cells)  # what a first call sets up is no cost of the following
        picture, seconds = self._timed(decode, cells)
        self._pixel_s = seconds / (len(cells) * (_SIDE * factor) ** 2)
        colours = avg_pool2d(_flat(picture).double().cpu(), factor)
        rows = [
            item.movedim(1, -1).flatten(0, 2) for item in (_flat(cells).double().cpu(), colours)
        ]
        inputs = torch.cat([rows[0], torch.ones(len(rows[0]), 1, dtype=torch.float64)], dim=1)
        # Channels may depend on each other; torch's default driver starts from memory that nobody has set.
        self._map = torch.linalg.lstsq(inputs, rows[1], driver="gelsd").solution.to(like)

    def _estimate(self, cells: Any, factor: int) -> Any:
        import torch  # noqa: PLC0415
        from torch.nn.functional import interpolate  # noqa: PLC0415

        weights, offset = self._map[:-1], self._map[-1].view(3, 1, 1)
        colours = torch.einsum("bchw,cd->bdhw", _flat(cells), weights) + offset
        colours = interpolate(colours, scale_factor=factor, mode="bilinear")
        return colours if cells.dim() == 4 else colours[:, :, None]


def _flat(tensor: Any) -> Any:
    """[B, C, h, w] of a picture, which some VAEs have as a video of one frame."""
    return tensor if tensor.dim() == 4 else tensor[:, :, 0]


def _patterns(side: int) -> Any:
    """Discs and squares of random colours on grounds of random colours, half of both pure; -1..1."""
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(0)
    place = torch.linspace(0, 1, side)

    def colours() -> Any:
        drawn = torch.rand(_NUM_PATTERNS, 3, 1, 1, generator=generator)
        return torch.cat([drawn[::2].round(), drawn[1::2]])

    found = colours().expand(-1, -1, side, side)
    for number in range(_NUM_SPOTS):
        spots = torch.rand(_NUM_PATTERNS, 3, 1, 1, generator=generator)
        down, right = (place.view(-1, 1) - spots[:, :1]).abs(), (place - spots[:, 1:2]).abs()
        distance = torch.hypot(down, right) if number % 2 else torch.maximum(down, right)
        found = torch.where(distance < 0.05 + 0.2 * spots[:, 2:], colours(), found)
    return found * 2 - 1
