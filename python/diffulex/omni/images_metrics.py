# SPDX-License-Identifier: Apache-2.0
"""What a server of images counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from diffulex.omni.outputs import count_blocks

if TYPE_CHECKING:
    from diffulex.omni.async_omni_diffusion import AsyncOmniDiffusion
    from diffulex.omni.outputs import OmniRequestOutput

__all__ = ["ImagesMetrics"]

_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class ImagesMetrics:
    """Counters of one server.

    Args:
        engine: whose waiting requests are told.
    """

    def __init__(self, engine: AsyncOmniDiffusion) -> None:
        self.registry = CollectorRegistry()
        where: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter(
            "diffulex_image_requests", "Requests that have ended.", ["status"], **where
        )
        self._images = Counter("diffulex_images", "Images that were drawn.", **where)
        self._steps = Counter("diffulex_image_steps", "Denoising steps of drawn images.", **where)
        blocks = "Blocks of transformers in the steps of drawn images"
        self._blocks = Counter("diffulex_image_blocks", f"{blocks}, cached ones too.", **where)
        self._cached = Counter(
            "diffulex_image_cached_blocks", f"{blocks} that a cache stood for.", **where
        )
        self._seconds = Histogram(
            "diffulex_image_seconds", "Drawing a request.", buckets=_SECONDS, **where
        )
        self._queue = Histogram(
            "diffulex_image_queue_seconds", "Waiting to be drawn.", buckets=_SECONDS, **where
        )
        waiting = Gauge("diffulex_image_requests_waiting", "Requests that wait.", **where)
        waiting.set_function(lambda: engine.num_waiting)

    def succeeded(self, output: OmniRequestOutput) -> None:
        """A request has its images."""
        metrics = output.metrics
        self._requests.labels("200").inc()
        self._images.inc(output.num_images)
        self._steps.inc(output.num_images * metrics["num_inference_steps"])
        for cache in metrics.get("caches", ()):
            num_blocks, num_run = count_blocks(cache)
            self._blocks.inc(num_blocks)
            self._cached.inc(num_blocks - num_run)
        self._seconds.observe(metrics["execute_s"])
        self._queue.observe(metrics["queue_s"])

    def failed(self, status: int) -> None:
        """A request has ended with an error, or without its client."""
        self._requests.labels(str(status)).inc()
