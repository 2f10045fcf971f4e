# SPDX-License-Identifier: Apache-2.0
"""What a request gets back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OmniRequestOutput", "count_blocks"]


@dataclass(frozen=True, slots=True)
class OmniRequestOutput:
    """Images of one request, in the order of their seeds.

    Attributes:
        final_output_type: `image`, `video` or `latents`.
        images: per image what `output_type` says; a video is a list of frames (pil) or an array.
            Empty for latents.
        latents: one tensor per image when the request asked for them.
        metrics: `seeds`, `seed` (the first), `height`, `width`, `num_inference_steps`, the guidance,
            and seconds `preprocess_s`, `execute_s`, `postprocess_s`. With a cache `cache`, of the first
            image, and `caches`, of each: transformer -> branch -> `computed` and `cached` steps, `diffs`
            of steps, `num_blocks` and `num_blocks_run`.
    """

    request_id: str
    prompt: str | None
    final_output_type: str
    images: tuple[Any, ...]
    latents: tuple[Any, ...]
    metrics: Mapping[str, Any]
    finished: bool = True

    @property
    def num_images(self) -> int:
        return len(self.images)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pixels, ready for JSON."""
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "finished": self.finished,
            "final_output_type": self.final_output_type,
            "num_images": self.num_images,
            "metrics": dict(self.metrics),
        }


def count_blocks(cache: Mapping[str, Any]) -> tuple[int, int]:
    """Blocks of all steps and those of them that ran, from `metrics["cache"]`."""
    branches = [branch for found in cache.values() for branch in found.values()]
    total, run = (sum(b[name] for b in branches) for name in ("num_blocks", "num_blocks_run"))
    return total, run
