# SPDX-License-Identifier: Apache-2.0
"""Tasks asked of a server: what is sent, what is counted, and what comes of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from diffulex.bench.__main__ import main
from diffulex.bench.endpoint import client_facts, request_metrics
from diffulex.bench.run_directory import read_jsonl
from diffulex.bench.serve.record import RequestRecord
from fixtures.live_server import running_server
from fixtures.sse_endpoint import (
    Answer,
    FakeEndpoint,
    Seen,
    chat_frames,
    completion_frames,
    sse_endpoint,
)

USAGE = {
    "prompt_tokens": 7, "completion_tokens": 6, "nfe": 3, "dllm_prefill_steps": 1,
    "dllm_decode_steps": 2, "dllm_decode_output_tokens": 4, "decode_time_s": 0.5, "e2e_tps": 12.0,
    "decode_tps": 8.0,
}  # fmt: skip
CHAT = ("--endpoint-api", "chat")


def evaluate(endpoint: FakeEndpoint | str, folder: Path, *arguments: str) -> int:
    url = endpoint if isinstance(endpoint, str) else endpoint.url
    return main(
        ["eval", "--endpoint", url, "--dataset", "smoke_arith", "--output-dir", str(folder),
         "--warmup-requests", "0", "--progress", "none", *arguments]
    )  # fmt: skip


def only_run(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def says_seven(seen: Seen) -> Answer:
    """The answer to the first item, in two chunks."""
    frames = chat_frames if seen.path.endswith("chat/completions") else completion_frames
    return Answer([(0.0, frame) for frame in frames(["The ", "#### 7"], USAGE)])


def test_a_run_has_the_files_and_numbers_of_the_server(tmp_path: Path) -> None:
    with sse_endpoint(says_seven) as endpoint:
        code = evaluate(
            endpoint, tmp_path, "--endpoint-api", "chat", "--dataset-limit", "3", "--max-tokens",
            "16", "--api-key", "secret", "--temperature", "0",
        )  # fmt: skip
    assert code == 0
    assert endpoint.seen[0].headers["authorization"] == "Bearer secret"
    body = endpoint.seen[0].body
    assert body["messages"][-1]["content"].startswith("Tom has 3 apples.")
    assert (body["max_tokens"], body["temperature"], body["model"]) == (16, 0.0, "fake-model")
    assert body["stream_options"] == {"include_usage": True}
    run = only_run(tmp_path)
    assert "secret" not in "".join(path.read_text() for path in run.iterdir())
    records = list(read_jsonl(run / "samples.jsonl"))
    assert [record["scores"]["exact_match"] for record in records] == [1.0, 0.0, 0.0]
    assert records[0]["client"]["num_chunks"] == 2
    assert records[0]["client"]["token_semantics"] == "server_usage"
    stats = load(run / "diffulex_stats.json")
    assert stats["time_semantics"] == "client_wall"
    assert stats["metric_semantics"] == "server_dllm_usage"
    assert stats["total_tokens"] == 18
    assert stats["tpf_aggregate"] == pytest.approx(6 / 3)
    assert stats["decode_tpf"] == pytest.approx(4 / 2)
    assert stats["aggregate_decode_tps_tok_s"] == pytest.approx(4 / 0.5)
    assert stats["avg_e2e_tps_tok_s"] == 12.0
    assert stats["chunk_tpf"] == 3.0
    assert stats["client_wall_e2e_tps_tok_s"] == pytest.approx(18 / stats["wall_time_s"])
    assert load(run / "run.json")["engine"]["endpoint"] == endpoint.url
    assert "| endpoint |" in (run / "report.md").read_text()


def test_wall_time_is_not_the_sum_of_the_latencies(tmp_path: Path) -> None:
    together = threading.Barrier(8, timeout=30)

    def answer(seen: Seen) -> Answer:
        together.wait()  # passes only if all eight are in flight
        return Answer([(0.05, frame) for frame in chat_frames(["7"], USAGE)])

    with sse_endpoint(answer) as endpoint:
        assert evaluate(endpoint, tmp_path, *CHAT, "--concurrency", "8") == 0
    stats = load(only_run(tmp_path) / "diffulex_stats.json")
    assert stats["concurrency"] == endpoint.most_open == 8
    assert stats["wall_time_s"] < stats["e2e_total_time_s"]
    assert stats["e2e_throughput_tok_s"] == pytest.approx(48 / stats["wall_time_s"])
    assert stats["tpot_undefined"] == 8  # one chunk has no time per token
    assert stats["tpot_s"] is None


def test_rejections_are_tried_again(tmp_path: Path) -> None:
    count = 0

    def answer(seen: Seen) -> Answer:
        nonlocal count
        count += 1
        if count == 1:
            return Answer([(0.0, "{}")], status=429, headers={"Retry-After": "0"})
        return says_seven(seen)

    with sse_endpoint(answer) as endpoint:
        assert evaluate(endpoint, tmp_path, *CHAT, "--dataset-limit", "1") == 0
    stats = load(only_run(tmp_path) / "diffulex_stats.json")
    assert (stats["num_rejected"], stats["num_retries"], stats["failed_requests"]) == (1, 1, 0)


def test_servers_without_counts_are_counted_by_a_tokenizer(tmp_path: Path) -> None:
    def answer(seen: Seen) -> Answer:
        return Answer([(0.0, frame) for frame in completion_frames(["3+4", "=7"])])

    with sse_endpoint(answer) as endpoint:
        code = evaluate(endpoint, tmp_path, "--dataset-limit", "1", "--tokenizer-path", "demo")
    assert code == 0
    stats = load(only_run(tmp_path) / "diffulex_stats.json")
    assert stats["total_tokens"] == 5
    assert stats["token_semantics"] == "retokenized"
    assert stats["metric_semantics"] == "openai_stream_visible_chunks"
    assert stats["tpf_aggregate"] is None


def test_failed_requests_fail_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sse_endpoint(lambda _: Answer([(0.0, "{}")], status=500)) as endpoint:
        assert evaluate(endpoint, tmp_path, *CHAT, "--dataset-limit", "2") == 1
    assert "got 2 of 2" in capsys.readouterr().err
    run = only_run(tmp_path)
    assert load(run / "run.json")["status"] == "failed"
    assert len(list(read_jsonl(run / "errors.jsonl"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--buffer-size", "2"), "endpoint: expected buffer_size to be set where the server"),
        (("--dataset", "own", "--endpoint-api", "chat"), "expected completions for the task own"),
        (("--dataset", "chatty"), "endpoint_api: expected chat, or --tokenizer-path, for the task"),
        (("--dataset", "nothing"), "expected bundled tasks with endpoint, got 'nothing'"),
        (("--endpoint", "ftp://x"), "expected http(s)://host[:port], got 'ftp://x'"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = (
        "task: {}\ndataset_path: json\ndataset_kwargs: {{data_files: items.json}}\n"
        "test_split: train\noutput_type: generate_until\ndoc_to_text: '{}{{{{question}}}}'\n"
        "doc_to_target: '1'\nmetadata: {{chat: {}}}\nprocess_results: !function score.score\n"
    )
    (tmp_path / "own.yaml").write_text(task.format("own", "<|im_start|>user", "false"))
    (tmp_path / "chatty.yaml").write_text(task.format("chatty", "", "true"))
    (tmp_path / "score.py").write_text("def score(doc, answers):\n    return {'right': 1.0}\n")
    (tmp_path / "items.json").write_text('[{"question": "?"}]')
    include = () if arguments[0] != "--dataset" else ("--include-path", str(tmp_path))
    with sse_endpoint(says_seven) as endpoint:
        assert evaluate(endpoint, tmp_path / "out", *include, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not endpoint.seen


def test_steps_of_decoding_are_not_all_forwards() -> None:
    record = RequestRecord(0, completion_tokens=6, e2e_s=2.0)
    record.usage = {"decode_steps": 4, "num_steps": 9}
    metrics = request_metrics(record)
    assert (metrics.nfe, metrics.decode_steps, metrics.prefill_steps) == (4, 4, 0)
    record.usage = {"decode_steps": 4, "num_forward_steps": 5}
    metrics = request_metrics(record)
    assert (metrics.nfe, metrics.decode_steps, metrics.prefill_steps) == (5, 4, 1)


def test_chunks_of_one_answer() -> None:
    record = RequestRecord(0, completion_tokens=9, e2e_s=4.0)
    record.chunk_times_s, record.chunk_chars, record.chunk_tokens = (
        [1.0, 2.0, 3.0],
        [1, 1, 1],
        [3, 3, 3],
    )
    facts = client_facts(record)
    assert (facts["first_chunk_s"], facts["last_chunk_s"], facts["tail_s"]) == (1.0, 3.0, 1.0)
    assert facts["chunk_intervals_s"] == [1.0, 1.0]
    assert facts["first_chunk_visible_tps"] == 3.0
    assert facts["visible_decode_tps"] == 3.0  # six tokens in two seconds
    assert facts["chunk_tpf"] == 3.0
    assert facts["tpot_s"] == pytest.approx(3.0 / 6)


@pytest.mark.slow
@pytest.mark.alone
def test_a_server_and_an_engine_answer_alike(tmp_path: Path) -> None:
    common = ["--dataset", "smoke_arith", "--max-tokens", "48", "--progress", "none"]
    code = main(
        ["eval", "--model-path", "demo", "--model-name", "auto", "--decoding-strategy", "auto",
         "--engine-arg", "device=cpu", "--max-model-len", "512", "--accept-threshold", "0.95",
         "--output-dir", str(tmp_path / "here"), *common]
    )  # fmt: skip
    assert code == 0
    with running_server("--model", "demo", "--device", "cpu") as server:
        arguments = [*common, "--concurrency", "2", "--tokenizer-path", "demo"]
        assert evaluate(server.url, tmp_path / "there", *arguments) == 0
    here, there = (only_run(tmp_path / name) for name in ("here", "there"))
    texts = [[r["text"] for r in read_jsonl(run / "samples.jsonl")] for run in (here, there)]
    assert texts[0] == texts[1]
    stats = [load(run / "diffulex_stats.json") for run in (here, there)]
    assert stats[0]["total_tokens"] == stats[1]["total_tokens"]
    assert stats[1]["metric_semantics"] == "server_dllm_usage"
    assert main(["compare", str(here), str(there), "--max-accuracy-drop", "0"]) == 0
