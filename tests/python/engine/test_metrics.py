# SPDX-License-Identifier: Apache-2.0
"""Metrics against values worked out by hand."""

from __future__ import annotations

import logging
import re

import pytest

from diffulex import Diffulex
from diffulex.engine.metrics import RequestRecord, RunStats
from diffulex.engine.output import (
    GenerationOutputs,
    RequestOutput,
    decode_token_ids_robust,
)
from diffulex.engine.progress import Progress, ProgressInfo


def make_outputs() -> GenerationOutputs:
    """Two requests over five engine steps.

    step   seconds  role     request 0: new, appended    request 1: new, appended
    0      0.5      prefill  2, (7 8)                     0, ()
    1      0.25     decode   3, (9 10)                    2, ()
    2      0.25     decode   0, ()                        1, (4 5 6)
    3      0.5      decode   2, (11 12 13) finished       1, (7) finished
    """
    first = RequestRecord(0, (1, 2, 3, 4, 5, 6), 10, added_at=1.0)
    second = RequestRecord(1, (1, 2, 3, 4), 10, added_at=1.0)
    stats = RunStats()
    script = [
        (0.5, False, (2, [7, 8]), (0, [])),
        (0.25, True, (3, [9, 10]), (2, [])),
        (0.25, True, (0, []), (1, [4, 5, 6])),
        (0.5, True, (2, [11, 12, 13]), (1, [7])),
    ]
    for seconds, is_decode, one, two in script:
        stats.add_step(seconds, 2, 12, 0 if is_decode else 12)
        for record, (new, appended) in ((first, one), (second, two)):
            record.start_step(3.0)
            record.add_step(seconds, is_decode, new, appended)
    first.prefill_positions += [6, 7]
    stats.wall_s = 2.0
    outputs = []
    for record, completion, cached in ((first, 6, 4), (second, 4, 0)):
        metrics = record.metrics(completion, cached, 1)
        outputs.append(
            RequestOutput(
                record.req_id,
                record.prompt_token_ids,
                tuple(record.token_ids[:completion]),
                "text",
                "full",
                "max_new_tokens_reached" if record.req_id else "eos_token_generated",
                metrics,
            )
        )
    return GenerationOutputs(outputs, stats)


def test_request_metrics() -> None:
    first, second = (output.metrics for output in make_outputs())
    assert (first.completion_tokens, first.decided_tokens, first.decode_tokens) == (6, 7, 5)
    assert (first.nfe, first.prefill_steps, first.decode_steps) == (4, 1, 3)
    assert first.tpf == 6 / 4
    assert first.decode_tpf == 5 / 3
    # Positions 6 and 7 were decided in the prefill step.
    assert first.visible_decode_tokens == 4
    assert first.ttft_s == 0.5
    assert first.first_commit_s == 0.5
    assert first.queue_s == 2.0
    assert first.tpot_s == (1.5 - 0.5) / 6
    assert first.e2e_tps == 6 / 1.5
    assert first.decode_tps == 5 / 1.0
    assert first.new_tokens_per_step == (2, 3, 0, 2)
    assert first.is_decode_step == (False, True, True, True)
    assert second.ttft_s == 0.75
    assert second.first_commit_s == 1.0
    assert second.tpot_s == (1.5 - 0.75) / 3
    assert second.visible_decode_tokens == 4


def test_run_metrics() -> None:
    run = make_outputs()
    numbers = run.as_dict()
    assert numbers["total_tokens"] == 10
    assert numbers["total_decided_tokens"] == 11
    assert numbers["filler_ratio"] == pytest.approx(1 - 10 / 11)
    assert (numbers["total_nfe"], numbers["request_nfe"]) == (4, 8)
    assert numbers["nfe_per_token"] == 0.8
    assert run.tpf == numbers["tpf_aggregate"] == numbers["aggregate_tpf"] == 10 / 8
    assert numbers["tpf"] == numbers["decode_tpf_mean"] == pytest.approx((5 / 3 + 4 / 3) / 2)
    assert numbers["decode_tpf_aggregate"] == 9 / 6
    assert numbers["e2e_throughput_tok_s"] == 10 / 1.5
    assert numbers["decode_throughput_tok_s"] == 9 / 1.0
    assert numbers["visible_decode_throughput_tok_s"] == 8 / 1.0
    assert numbers["prefill_throughput_tok_s"] == 12 / 0.5
    assert numbers["throughput"] == 11 / 1.5
    assert numbers["avg_e2e_tps"] == pytest.approx((6 / 1.5 + 4 / 1.5) / 2)
    assert numbers["avg_decode_tps"] == pytest.approx((5 + 4) / 2)
    assert numbers["e2e_total_time_s"] == 3.0
    assert numbers["wall_time_s"] == 2.0
    assert numbers["ttft_s"] == 0.625
    assert numbers["ttft_s_p50"] == 0.625
    assert numbers["tpot_s"] == pytest.approx((1 / 6 + 0.25) / 2)
    assert numbers["prefix_hit_ratio"] == 0.4
    assert numbers["num_preemptions"] == 2
    assert numbers["concurrency"] == 2
    assert numbers["completion_reasons"] == {
        "eos_token_generated": 1,
        "max_new_tokens_reached": 1,
    }
    assert numbers["time_semantics"] == "host_step_wall"
    assert numbers["token_semantics"] == "engine_ids"


def test_pooling_sums_totals_and_recomputes_means() -> None:
    run = make_outputs()
    pooled = GenerationOutputs.pooled([run, run])
    assert len(pooled) == 4
    assert pooled.total_tokens == 20
    assert pooled.stats.total_s == 3.0
    assert pooled.stats.wall_s == 4.0
    assert pooled.stats.max_concurrency == 2
    assert pooled.e2e_throughput_tok_s == run.e2e_throughput_tok_s
    assert pooled.ttft_s == run.ttft_s


def test_empty_and_single_token_requests_have_no_rates() -> None:
    record = RequestRecord(0, (1,), 5, added_at=0.0)
    metrics = record.metrics(0, 0, 0)
    assert metrics.tpf is None
    assert metrics.decode_tpf is None
    assert metrics.tpot_s is None
    assert metrics.e2e_tps is None
    record.add_step(0.1, True, 1, [3])
    assert record.metrics(1, 0, 0).tpot_s is None
    assert GenerationOutputs([], RunStats()).as_dict()["tpf"] == 0.0


def test_summary_and_formats(caplog: pytest.LogCaptureFixture) -> None:
    run = make_outputs()
    with caplog.at_level(logging.INFO, "diffulex"):
        run.log_summary()
    for part in ("TPF", "NFE", "TPS", "4 engine steps, 8 request forwards", "filler 9.1%"):
        assert part in caplog.text
    assert run.to_benchmark_format()[1] == {
        "text": "text",
        "full_text": "full",
        "token_ids": [4, 5, 6, 7],
        "nfe": 4,
    }
    assert run.postfix() == {"tpf": "1.25", "dtps": "4.5", "e2eps": "3.3"}
    assert run[0].full_token_ids == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    assert [output.finish_reason for output in run] == ["stop", "length"]
    assert [output.is_truncated for output in run] == [False, True]


def test_robust_decoding_skips_ids_without_a_string() -> None:
    class Holes:
        def decode(self, ids: list[int]) -> str:
            if 13 in ids:
                raise TypeError("no token")
            return "".join(chr(96 + i) for i in ids)

    assert decode_token_ids_robust(Holes(), [1, 13, 2]) == "ab"  # type: ignore[arg-type]


def test_progress_reports_first_interval_and_last(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[ProgressInfo] = []
    stats = RunStats()
    records = [RequestRecord(i, (1, 2), 8, added_at=0.0) for i in range(10)]
    progress = Progress(records, stats, False, 1000.0, seen.append)
    outputs = make_outputs()
    with caplog.at_level(logging.INFO, "diffulex"):
        for record in records:
            record.add_step(0.5, True, 2, [1, 2])
        stats.add_step(0.5, 10, 40, 0)
        stats.decode_tokens = 20
        progress.step(0.5)
        progress.step(0.5)
        progress.finished(outputs[0])
        progress.close()
    assert len(seen) == 2
    assert (seen[0].num_done, seen[0].num_total, seen[0].step) == (0, 10, 1)
    assert seen[0].tpf == 2.0
    assert seen[0].decode_tps == 40.0
    assert seen[0].eta_s is not None
    assert seen[1].num_done == 1
    assert "0/10 done, step 1, last 500.0 ms" in caplog.text
    assert "+2 active" in caplog.text


def test_cached_tokens_never_exceed_the_prompt() -> None:
    record = RequestRecord(0, (1, 2, 3, 4, 5), 10, added_at=0.0)
    # Resumed after a preemption, with decoded tokens among the cached ones.
    metrics = record.metrics(8, 12, 1)
    assert metrics.cached_tokens == 5
    assert record.metrics(8, 4, 0).cached_tokens == 4
    output = RequestOutput(0, record.prompt_token_ids, (), "", "", "aborted", metrics)
    assert GenerationOutputs([output], RunStats()).prefix_hit_ratio == 1.0


#: Every figure of a run that users' programs may read.
RUN_KEYS = {
    "num_requests", "completion_reasons", "total_tokens", "total_decided_tokens", "total_nfe",
    "request_nfe", "total_time", "wall_time_s", "step_time_s", "e2e_total_time_s", "prefill_time_s",
    "decode_time_s", "mixed_time_s", "tpf", "decode_tpf_mean", "decode_tpf_aggregate",
    "tpf_aggregate", "aggregate_tpf", "nfe_per_token", "ttft_s", "tpot_s", "e2e_throughput_tok_s",
    "decode_throughput_tok_s", "visible_decode_throughput_tok_s", "prefill_throughput_tok_s",
    "throughput", "avg_e2e_tps", "avg_decode_tps", "filler_ratio", "prefix_hit_ratio",
    "num_preemptions", "time_semantics", "token_semantics", "concurrency", "tp", "dp",
    *(f"{name}_p{percent}" for name in ("ttft_s", "tpot_s") for percent in (50, 90, 99)),
}  # fmt: skip


def test_the_numbers_of_a_run_are_complete() -> None:
    numbers = make_outputs().as_dict()
    assert numbers.keys() >= RUN_KEYS
    assert numbers["prefill_time_s"] + numbers["decode_time_s"] == numbers["step_time_s"] == 1.5
    # Batches have one role: no step is mixed, and no time counts twice.
    assert numbers["mixed_time_s"] == 0.0


def test_positions_decided_again_count_again() -> None:
    record = RequestRecord(0, (1, 2), 4, added_at=0.0)
    record.add_step(0.5, True, 4, [])
    record.add_step(0.5, True, 2, [5, 6, 7])  # two of the four were masked once more
    metrics = record.metrics(3, 0, 0)
    assert (metrics.decided_tokens, metrics.decode_tokens, metrics.completion_tokens) == (6, 6, 3)
    assert metrics.decode_tpf == 6 / 2
    assert metrics.tpf == 3 / 2
    run = GenerationOutputs(
        [RequestOutput(0, (1, 2), (5, 6, 7), "", "", "stop", metrics)], RunStats()
    )
    assert run.filler_ratio == 1 - 3 / 6


def test_two_calls_pooled_are_one_call() -> None:
    def output(req_id: int, tokens: int) -> tuple[RequestOutput, RunStats]:
        record, stats = RequestRecord(req_id, (1, 2, 3), 9, added_at=0.0), RunStats()
        for is_decode in (False, True):
            stats.add_step(0.25, 1, 8, 0 if is_decode else 8)
            record.add_step(0.25, is_decode, tokens, [4] * tokens)
        stats.wall_s = 1.0
        metrics = record.metrics(2 * tokens, 0, 0)
        return RequestOutput(req_id, (1, 2, 3), (4,) * (2 * tokens), "", "", "stop", metrics), stats

    (one, stats_of_one), (two, stats_of_two) = output(0, 2), output(1, 5)
    calls = [GenerationOutputs([one], stats_of_one), GenerationOutputs([two], stats_of_two)]
    together = GenerationOutputs([one, two], stats_of_one.merged(stats_of_two))
    assert GenerationOutputs.pooled(calls).as_dict() == together.as_dict()
    assert together.as_dict()["ttft_s"] == 0.25
    assert together.as_dict()["tpf"] == (2 + 5) / 2


def test_progress_shows_the_blocks_of_active_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Prompt of 11, blocks of 8: the first block of the answer begins with 3 tokens of the prompt."""
    with Diffulex("demo", device="cpu", num_pages=64, buffer_size=2) as engine:
        size, ids = engine.config.decoding.block_size, list(range(5, 16))
        with caplog.at_level(logging.INFO, "diffulex.engine.progress"):
            engine.generate(
                [ids], max_tokens=32, ignore_eos=True, summary=False, progress_log_interval=1e-9
            )
    states = re.findall(r"b(\d+)/(\d+) act=(\d+) mask=(\d+)/(\d+)\]", caplog.text)
    numbers = [tuple(map(int, state)) for state in states]
    # Positions 8 to 42.
    assert {last for _, last, _, _, _ in numbers} == {-(-(11 + 32) // size) - 11 // size}
    firsts = [first for first, *_ in numbers]
    assert firsts == sorted(firsts)
    assert firsts[0] == 1
    assert firsts[-1] > 2
    assert all(act <= 2 and mask <= open_ in (8, 16) for _, _, act, mask, open_ in numbers)
    assert any(act and mask for _, _, act, mask, _ in numbers)


def test_steps_between_reports_look_at_no_request() -> None:
    class Unread(RequestRecord):
        reads = 0

        def __getattribute__(self, name: str) -> object:
            Unread.reads += 1
            return super().__getattribute__(name)

    records = [Unread(index, (1, 2), 8, added_at=0.0) for index in range(100)]
    progress = Progress(records, RunStats(), False, 1000.0, None)
    progress.step(0.1)  # the first report
    assert Unread.reads > 100
    Unread.reads = 0
    for _ in range(1000):
        progress.step(0.1)
    assert Unread.reads == 0
