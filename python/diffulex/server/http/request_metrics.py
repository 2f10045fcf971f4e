# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics: what the HTTP side observes, and what the backend's heartbeats report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from diffulex.server.http.app_options import state_name
from diffulex.wire.finish_reasons import openai_finish_reason

if TYPE_CHECKING:
    from diffulex.server.http.app_frontend import AppFrontend
    from diffulex.server.http.request_record import RequestRecord
    from diffulex.wire.protocol import ServingReply

__all__ = ["RequestMetrics"]

_PREFIX = "diffulex_"
_TOKENS_PER_FORWARD = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_POWERS = tuple(2.0**i for i in range(13))
_TTFT = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60)
_PER_TOKEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_LATENCY = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)

# Help of what heartbeats report; names beyond the table are shown without.
_BACKEND_HELP = {
    "requests_running": "Requests that have a slot.",
    "requests_waiting": "Requests that wait for a slot.",
    "forward_steps_total": "Forward evaluations of the model.",
    "step_time_seconds": "Wall time of a step.",
    "batch_size": "Requests of a step.",
    "block_denoise_steps": "Steps an active block needed until it was committed.",
    "active_blocks": "Blocks being denoised.",
    "kv_cache_usage_ratio": "Share of the pages in use.",
    "kv_pages": "Pages of the KV cache.",
    "kv_pages_free": "Pages no request uses.",
    "prefix_cache_queries_total": "Pages looked up in the prefix cache.",
    "prefix_cache_hits_total": "Pages found in the prefix cache.",
    "preemptions_total": "Requests that lost their pages for others.",
    "replica_state": "1 for the state in which a replica is.",
    "replica_restarts_total": "Starts of a replica after its first.",
    "router_requests_total": "Requests sent to a replica.",
    "router_hit_tokens_total": "Prompt tokens that were cached where the router sent them.",
    "requests_retried_total": "Requests that started again because their replica was lost.",
    "requests_lost_total": "Requests that ended because their replica was lost.",
    "parallel_info": "Sizes of the groups of devices, as labels.",
}


class RequestMetrics:
    """The metrics of one application, in a separate registry.

    Args:
        model_name: label of every metric.
        frontend: where the backend's state and numbers are looked up at each scrape.
        live: the ids in use.
        num_encoding: tells how many requests are parsed or encoded.
    """

    def __init__(
        self,
        model_name: str,
        frontend: AppFrontend,
        live: Sized = (),
        num_encoding: Callable[[], int] = lambda: 0,
    ) -> None:
        self._model = model_name
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests_total", "HTTP requests.", "route", "status")
        self._finished = self._counter(
            "request_finished_total", "Finished answers.", "finish_reason", "finish_detail"
        )
        self._aborted = self._counter("request_aborted_total", "Requests without answer.", "reason")
        self._prompt = self._counter("prompt_tokens_total", "Tokens of prompts.")
        self._generated = self._counter("generation_tokens_total", "Tokens of answers.")
        self._cached = self._counter(
            "cached_prompt_tokens_total", "Tokens of prompts found in the prefix cache."
        )
        self._inflight = Gauge(
            _PREFIX + "requests_inflight_http",
            "HTTP requests that generate, in progress.",
            ("model_name",),
            registry=self.registry,
        ).labels(model_name)
        self._histograms = {
            name: self._histogram(name, text, buckets).labels(model_name)
            for name, text, buckets in (
                ("tokens_per_forward", "Answer tokens per forward.", _TOKENS_PER_FORWARD),
                ("nfe_per_request", "Forwards of a request.", _POWERS),
                ("time_to_first_token_seconds", "Arrival to first committed token.", _TTFT),
                ("time_to_first_snapshot_seconds", "Arrival to first snapshot.", _TTFT),
                ("time_per_output_token_seconds", "Time in the engine per token.", _PER_TOKEN),
                ("e2e_request_latency_seconds", "Arrival to the end of the answer.", _LATENCY),
                ("queue_time_seconds", "Arrival to the first step.", _LATENCY),
                ("prefill_time_seconds", "Time of the prefill steps.", _LATENCY),
                ("decode_time_seconds", "Time of the decode steps.", _LATENCY),
            )
        }
        self.registry.register(_BackendCollector(model_name, frontend, live, num_encoding))
        frontend.on_abort = self.observe_abort

    def text(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)

    def start(self, record: RequestRecord) -> None:
        """A generating request arrived."""
        self._inflight.inc()

    def finish(self, record: RequestRecord, is_generating: bool) -> None:
        """A request ended."""
        self._requests.labels(self._model, record.route, str(record.status)).inc()
        if not is_generating:
            return
        self._inflight.dec()
        for reply in record.replies:
            self._observe_reply(reply)
        if record.replies:
            self._observe("e2e_request_latency_seconds", record.elapsed_s)
        self._observe("time_to_first_snapshot_seconds", record.first_snapshot_s)

    def observe_abort(self, rid: str, reason: str) -> None:
        """The frontend aborted a request."""
        self._aborted.labels(self._model, reason).inc()

    def _observe_reply(self, reply: ServingReply) -> None:
        detail = reply.finish_detail or reply.finish_reason or "completed_without_reason"
        reason = openai_finish_reason(detail)
        self._finished.labels(self._model, reason, detail).inc()
        tokens = len(reply.token_ids)
        self._prompt.labels(self._model).inc(reply.prompt_tokens or 0)
        self._generated.labels(self._model).inc(tokens)
        self._cached.labels(self._model).inc(reply.cached_tokens or 0)
        if reply.nfe > 0:
            self._observe("tokens_per_forward", tokens / reply.nfe)
            self._observe("nfe_per_request", reply.nfe)
        self._observe("time_to_first_token_seconds", reply.ttft_s)
        self._observe("queue_time_seconds", reply.queue_time_s)
        self._observe("prefill_time_seconds", reply.prefill_time_s)
        self._observe("decode_time_seconds", reply.engine_decode_time_s)
        busy_s = (reply.prefill_time_s or 0) + (reply.engine_decode_time_s or 0)
        if tokens and busy_s:
            self._observe("time_per_output_token_seconds", busy_s / tokens)

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(
            _PREFIX + name, text, ("model_name",), buckets=tuple(buckets), registry=self.registry
        )


class _BackendCollector(Collector):
    """Reads the newest heartbeat of the frontend at each scrape."""

    def __init__(
        self, model_name: str, frontend: AppFrontend, live: Sized, num_encoding: Callable[[], int]
    ) -> None:
        self._model = model_name
        self._frontend = frontend
        self._live = live
        self._num_encoding = num_encoding

    def collect(self) -> Iterator[Metric]:
        """The metrics of the backend."""
        frontend = self._frontend
        # A backend that finishes its last requests is up, although no new ones are accepted.
        is_up = frontend.is_healthy or state_name(frontend) == "draining"
        yield self._gauge("backend_up", "Whether the backend serves.", [({}, float(is_up))])
        age = frontend.heartbeat_age_s
        if age is not None:
            text = "Age of the newest heartbeat."
            yield self._gauge("backend_heartbeat_age_seconds", text, [({}, age)])
        text = "Ids of generating HTTP requests in use."
        yield self._gauge("requests_live", text, [({}, len(self._live))])
        text = "Requests whose body is parsed or whose prompt is encoded."
        yield self._gauge("requests_encoding", text, [({}, self._num_encoding())])
        text = "Requests the frontend waits for."
        yield self._gauge("requests_tracked", text, [({}, frontend.num_inflight)])
        for name, text in (
            ("events_dropped", "Events that had no reader any more, or could not be read."),
            ("snapshots_coalesced", "Snapshots merged for slow clients."),
        ):
            yield self._counter(
                f"{name}_total", text, [({}, float(frontend.counters.get(name, 0)))]
            )
        stats = frontend.stats
        for name, value in (stats.get("gauges") or {}).items():
            yield self._gauge(name, _help(name), _samples(value))
        for name, value in (stats.get("counters") or {}).items():
            yield self._counter(name, _help(name), _samples(value))
        for name, series in (stats.get("histograms") or {}).items():
            yield self._histogram(name, series)
        yield self._info(frontend.info)

    def _gauge(self, name: str, text: str, samples: list[Any]) -> Metric:
        return self._fill(GaugeMetricFamily, name, text, samples)

    def _counter(self, name: str, text: str, samples: list[Any]) -> Metric:
        return self._fill(CounterMetricFamily, name.removesuffix("_total"), text, samples)

    def _fill(self, family: Any, name: str, text: str, samples: list[Any]) -> Metric:
        labels = sorted({key for found, _ in samples for key in found})
        metric = family(_PREFIX + name, text, labels=["model_name", *labels])
        for found, value in samples:
            shown = [self._model, *(str(found.get(key, "")) for key in labels)]
            metric.add_metric(shown, float(value))
        result: Metric = metric
        return result

    def _histogram(self, name: str, series: Any) -> Metric:
        labels = sorted({key for item in series for key in item.get("labels") or {}})
        metric = HistogramMetricFamily(_PREFIX + name, _help(name), labels=["model_name", *labels])
        for item in series:
            found = item.get("labels") or {}
            total, buckets = 0, []
            bounds = [*map(str, map(float, item["bounds"])), "+Inf"]
            for bound, count in zip(bounds, item["counts"], strict=True):
                total += count
                buckets.append((bound, total))
            shown = [self._model, *(str(found.get(key, "")) for key in labels)]
            metric.add_metric(shown, buckets, item["sum"])
        return metric

    def _info(self, info: Mapping[str, Any]) -> Metric:
        names = ("model", "decoding_strategy", "block_size", "device", "dtype", "extension_version")
        shown = {name: str(info.get(name, "")) for name in names}
        shown["model_name"] = self._model
        metric = InfoMetricFamily(_PREFIX + "engine", "What is served.")
        metric.add_metric([], shown)
        return metric


def _samples(value: Any) -> list[Any]:
    """A plain number, or one entry per set of labels."""
    if isinstance(value, (int, float)):
        return [({}, value)]
    return [(item.get("labels") or {}, item["value"]) for item in value]


def _help(name: str) -> str:
    return _BACKEND_HELP.get(name, "Reported by the backend.")
