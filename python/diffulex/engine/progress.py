# SPDX-License-Identifier: Apache-2.0
"""Progress of offline generation: a bar on a terminal, lines elsewhere, or a callback."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex.log import format_duration, get_logger

if TYPE_CHECKING:
    from diffulex.engine.metrics import RequestRecord, RunStats
    from diffulex.engine.output import RequestOutput

__all__ = ["Progress", "ProgressInfo", "adding_bar"]

logger = get_logger(__name__)

_REFRESH_SECONDS = 1.0
_HALF_LIFE_SECONDS = 10.0
_MAX_ACTIVE_SHOWN = 8


@dataclass(frozen=True, slots=True)
class ProgressInfo:
    """State of a run; rates count visible tokens except the decode rate."""

    num_done: int
    num_total: int
    step: int
    last_step_s: float
    elapsed_s: float
    eta_s: float | None
    tpf: float
    mean_e2e_tps: float
    mean_decode_tps: float
    e2e_tps: float
    decode_tps: float


def _tqdm(*args: Any, **options: Any) -> Any:
    # By name: the package ships no types, and only terminals need it.
    return importlib.import_module("tqdm").tqdm(*args, **options)


def adding_bar(items: Sequence[Any], use_tqdm: bool) -> Iterable[Any]:
    """`items`, with a transient bar if one is wanted and stderr is a terminal."""
    if not use_tqdm or not sys.stderr.isatty():
        return items
    bar: Iterable[Any] = _tqdm(items, desc="Adding Requests to Scheduler", leave=False)
    return bar


class Progress:
    """Follows one `generate` call with running sums; O(1) per step between reports."""

    def __init__(
        self,
        records: Sequence[RequestRecord],
        stats: RunStats,
        use_tqdm: bool,
        interval: float,
        on_progress: Callable[[ProgressInfo], None] | None,
        block_state: Callable[[int], str] = lambda req_id: "",
    ) -> None:
        self._block_state = block_state
        self._active = {record.req_id: record for record in records}
        self._stats = stats
        self._interval = interval
        self._on_progress = on_progress
        self._num_total = len(records)
        self._start = self._last_report = time.perf_counter()
        self._has_reported = False
        self._num_done = 0
        self._done_tokens = 0
        self._done_nfe = 0
        self._e2e_sum = 0.0
        self._decode_sum = 0.0
        self._rate = 0.0
        self._rate_at = self._start
        self._rate_tokens = 0
        self._bar: Any = None
        if use_tqdm and sys.stderr.isatty():
            self._bar = _tqdm(
                total=self._num_total, desc="Diffulex Generating", mininterval=_REFRESH_SECONDS
            )

    def finished(self, output: RequestOutput) -> None:
        """Moves a request to the sums of the finished ones."""
        self._active.pop(output.req_id, None)
        metrics = output.metrics
        self._num_done += 1
        self._done_tokens += metrics.completion_tokens
        self._done_nfe += metrics.nfe
        self._e2e_sum += metrics.e2e_tps or 0.0
        self._decode_sum += metrics.decode_tps or 0.0
        if self._bar is not None:
            self._bar.update(1)

    def step(self, last_step_s: float) -> None:
        """Reports if it is time; called after every engine step."""
        now = time.perf_counter()
        period = _REFRESH_SECONDS if self._bar is not None else self._interval
        is_silent = self._bar is None and self._interval <= 0 and self._on_progress is None
        if is_silent or (self._has_reported and now - self._last_report < period):
            return
        self._has_reported = True
        self._last_report = now
        self._report(now, last_step_s)

    def close(self) -> None:
        """Last report; removes the bar."""
        if self._bar is not None:
            self._bar.close()
        elif self._has_reported:
            self._report(time.perf_counter(), 0.0)

    def _report(self, now: float, last_step_s: float) -> None:
        info = self.info(now, last_step_s)
        if self._on_progress is not None:
            self._on_progress(info)
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"TPF {info.tpf:.2f}, {info.e2e_tps:.1f} tokens/s, decoding {info.decode_tps:.1f}"
            )
        elif self._interval > 0:
            logger.info("%s", format_line(info))
            active = self._active_line()
            if active:
                logger.info("%s", active)

    def info(self, now: float, last_step_s: float) -> ProgressInfo:
        """The numbers of a report."""
        stats, done = self._stats, max(self._num_done, 1)
        total_s = max(stats.total_s, 1e-3)
        active_tokens = sum(len(record.token_ids) for record in self._active.values())
        active_nfe = sum(record.num_steps for record in self._active.values())
        tokens, nfe = self._done_tokens + active_tokens, self._done_nfe + active_nfe
        self._update_rate(now, tokens)
        return ProgressInfo(
            num_done=self._num_done,
            num_total=self._num_total,
            step=stats.num_steps,
            last_step_s=last_step_s,
            elapsed_s=now - self._start,
            eta_s=self._eta(),
            tpf=tokens / nfe if nfe else 0.0,
            mean_e2e_tps=self._e2e_sum / done,
            mean_decode_tps=self._decode_sum / done,
            e2e_tps=tokens / total_s,
            decode_tps=stats.decode_tokens / max(stats.decode_s, 1e-3),
        )

    def _update_rate(self, now: float, tokens: int) -> None:
        seconds = now - self._rate_at
        if seconds <= 0:
            return
        rate = (tokens - self._rate_tokens) / seconds
        keep = 0.5 ** (seconds / _HALF_LIFE_SECONDS) if self._rate > 0 else 0.0
        self._rate = keep * self._rate + (1 - keep) * rate
        self._rate_at, self._rate_tokens = now, tokens

    def _eta(self) -> float | None:
        """Expected remaining tokens over the smoothed rate; None before the first token."""
        if self._rate <= 0:
            return None
        mean = self._done_tokens / self._num_done if self._num_done else None
        remaining = 0.0
        for record in self._active.values():
            expected = record.max_tokens if mean is None else min(mean, record.max_tokens)
            remaining += max(expected - len(record.token_ids), 0)
        return remaining / self._rate

    def _active_line(self) -> str:
        running = [record for record in self._active.values() if record.num_steps > 0]
        if not running:
            return ""
        parts = []
        for record in running[:_MAX_ACTIVE_SHOWN]:
            tokens = len(record.token_ids)
            tpf = tokens / record.num_steps
            e2e = tokens / record.total_s if record.total_s > 0 else 0.0
            decode = record.decode_tokens / record.decode_s if record.decode_s > 0 else 0.0
            blocks = self._block_state(record.req_id)
            parts.append(
                f"[req {record.req_id} prompt {len(record.prompt_token_ids)} {record.status}"
                f" new {record.last_new_tokens} tokens {tokens} tpf {tpf:.2f} e2e {e2e:.1f}"
                f" decode {decode:.1f}{' ' if blocks else ''}{blocks}]"
            )
        hidden = len(running) - _MAX_ACTIVE_SHOWN
        return " ".join(parts) + (f" +{hidden} active" if hidden > 0 else "")


def format_line(info: ProgressInfo) -> str:
    """One line of a report."""
    return (
        f"{info.num_done}/{info.num_total} done, step {info.step},"
        f" last {info.last_step_s * 1e3:.1f} ms, elapsed {format_duration(info.elapsed_s)},"
        f" ETA {format_duration(info.eta_s)}, TPF {info.tpf:.2f},"
        f" mean TPS e2e {info.mean_e2e_tps:.1f} decode {info.mean_decode_tps:.1f},"
        f" TPS e2e {info.e2e_tps:.1f} decode {info.decode_tps:.1f}"
    )
