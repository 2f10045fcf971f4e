# SPDX-License-Identifier: Apache-2.0
"""The command as a user runs it, against a fake endpoint."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from diffulex.tools.cli import main
from fixtures.sse_endpoint import Answer, FakeEndpoint, Seen, chat_frames, sse_endpoint

_USAGE = {"prompt_tokens": 7, "completion_tokens": 9, "nfe": 3, "dllm_decode_steps": 2}


def _answer(_: Seen) -> Answer:
    return Answer([(0.01, part) for part in chat_frames(["abc", "defghi"], _USAGE)])


def _run(endpoint: FakeEndpoint, *arguments: str) -> int:
    flags = ["--base-url", endpoint.url, "--num-prompts", "6", "--max-concurrency", "2"]
    return main(["bench", "serve", *flags, *arguments])


def test_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with sse_endpoint(_answer) as endpoint:
        assert _run(endpoint) == 0
    text = capsys.readouterr().out
    rows = dict(line.split("  ", 1) for line in text.splitlines() if "  " in line)
    assert rows["completed requests"].strip() == "6"
    assert rows["output tokens"].strip() == "54"
    assert rows["tokens per forward (TPF)"].strip() == "3.00"
    assert "block latency" in text
    # Four requests warm the server up and do not count.
    assert len(endpoint.seen) == 10
    assert {seen.body["model"] for seen in endpoint.seen} == {"fake-model"}


def test_json_has_the_settings_and_no_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "top-secret")
    with sse_endpoint(_answer) as endpoint:
        flags = ["--json", "--warmup", "0", "--goodput", "e2el:60000", "ttft:0.001"]
        assert _run(endpoint, *flags, "--metadata", "gpu=none", "note=a=b") == 0
    text = capsys.readouterr().out
    content = json.loads(text)
    assert (content["schema"], content["schema_version"]) == ("diffulex.bench.serve", 1)
    assert content["completed"] == 6
    assert content["request_goodput"] == 0.0
    assert content["request_rate"] == "inf"
    assert content["metadata"] == {"gpu": "none", "note": "a=b"}
    assert content["model_id"] == "fake-model"
    assert "top-secret" not in text
    assert len(endpoint.seen) == 6
    assert {seen.headers["authorization"] for seen in endpoint.seen} == {"Bearer top-secret"}


def test_results_and_records_are_saved(tmp_path: Path) -> None:
    tmp_path = tmp_path / "made" / "for it"
    with sse_endpoint(_answer) as endpoint:
        assert _run(endpoint, "--save-result", "--result-dir", str(tmp_path)) == 0
    (result,) = tmp_path.glob("*.json")
    (records,) = tmp_path.glob("*.records.jsonl")
    assert json.loads(result.read_text("utf-8"))["completed"] == 6
    lines = [json.loads(line) for line in records.read_text("utf-8").splitlines()]
    assert [line["request_id"] for line in lines] == list(range(6))
    assert {line["text"] for line in lines} == {"abcdefghi"}
    assert all(line["usage"] == _USAGE and len(line["itl_s"]) == 1 for line in lines)


def test_a_sweep_runs_every_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sse_endpoint(_answer) as endpoint:
        flags = ["--sweep", "max-concurrency=1,3", "--warmup", "0"]
        assert _run(endpoint, *flags, "--save-result", "--result-dir", str(tmp_path)) == 0
    table = capsys.readouterr().out.strip().splitlines()[-3:]
    assert "tokens/s per user" in table[0]
    assert [line.split()[0] for line in table[1:]] == ["1", "3"]
    (path,) = tmp_path.glob("*.csv")
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    assert [row["max_concurrency"] for row in rows] == ["1", "3"]
    assert float(rows[1]["output_throughput"]) > float(rows[0]["output_throughput"])
    assert len(list(tmp_path.glob("*.records.jsonl"))) == 2
    assert endpoint.most_open == 3


def _dying_after(count: int) -> Callable[[Seen], Answer]:
    """An endpoint that serves so many requests."""
    left = iter(range(count))
    gone = Answer([(0, '{"error": {"message": "gone"}}')], 500)
    return lambda seen: gone if next(left, None) is None else _answer(seen)


def test_a_sweep_keeps_the_runs_before_the_endpoint_died(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--sweep", "max-concurrency=4,3,2", "--warmup", "0", "--save-result"]
    for shown in ([], ["--json"]):
        directory = tmp_path / f"shown{len(shown)}"
        directory.mkdir()
        with sse_endpoint(_dying_after(12)) as endpoint:
            assert _run(endpoint, *flags, "--result-dir", str(directory), *shown) == 1
        output = capsys.readouterr()
        assert output.err.splitlines()[-1].endswith("the first: HTTP 500: gone")
        results = [json.loads(path.read_text("utf-8")) for path in sorted(directory.glob("*.json"))]
        assert [(r["max_concurrency"], r["completed"]) for r in results] == [(4, 6), (3, 6)]
        assert len(list(directory.glob("*.records.jsonl"))) == 2
        (path,) = directory.glob("*.csv")
        rows = list(csv.DictReader(path.open(encoding="utf-8")))
        assert [row["max_concurrency"] for row in rows] == ["4", "3"]
        if shown:
            assert json.loads(output.out) == results
        else:
            assert [line.split()[0] for line in output.out.splitlines()[-2:]] == ["4", "3"]


def test_failed_requests_make_the_command_fail(capsys: pytest.CaptureFixture[str]) -> None:
    count = 0

    def answer(seen: Seen) -> Answer:
        nonlocal count
        count += 1
        full = Answer([(0, '{"error": {"message": "full"}}')], 429)
        return full if count == 2 else _answer(seen)

    with sse_endpoint(answer) as endpoint:
        assert _run(endpoint, "--warmup", "0", "--max-concurrency", "1") == 1
    text = capsys.readouterr().out
    assert "failed: http_429" in text
    assert "rejections (429, 503)" in text


def test_a_refusal_of_everything_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = Answer([(0, '{"error": {"message": "bad key"}}')], 401)
    with sse_endpoint(lambda _: refusal) as endpoint:
        assert _run(endpoint) == 1
        assert _run(endpoint, "--warmup", "0") == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: warm-up: HTTP 401: bad key"
    assert second.endswith("expected answers, got 6 failures; the first: HTTP 401: bad key")


def test_an_endpoint_that_is_down_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with sse_endpoint(_answer) as endpoint:
        pass
    assert _run(endpoint) == 1
    assert _run(endpoint, "--model", "m") == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: bench serve: {endpoint.url}: expected a server, got: ")
    assert second.startswith(f"error: warm-up: {endpoint.url}: expected a server, got: ")


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ((404, "{}"), "expected status 200, got 404"),
        ((200, "<html>"), "expected a list of models, got b'<html>'"),
        ((200, '{"data": []}'), "expected a list of models"),
    ],
)
def test_a_server_without_models_must_be_told_one(
    capsys: pytest.CaptureFixture[str], models: tuple[int, str], message: str
) -> None:
    with sse_endpoint(_answer) as endpoint:
        endpoint.models = models
        assert _run(endpoint) == 1
        assert message in capsys.readouterr().err
        assert _run(endpoint, "--model", "mine") == 0
    assert {seen.body["model"] for seen in endpoint.seen} == {"mine"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "localhost"], "base_url: expected http(s)://host[:port]"),
        (["--base-url", "http://ex..ample"], "got 'http://ex..ample': label empty or too long"),
        (
            ["--api-key", "sch\u20acssel"],
            "--api-key: expected printable Latin-1 characters, got U+20AC",
        ),
        (
            ["--api-key", "a\nHost: b"],
            "--api-key: expected printable Latin-1 characters, got U+000A",
        ),
        (["--request-rate", "0"], "expected a number above 0 or inf, got '0'"),
        (["--timeout", "inf"], "expected a number above 0, got 'inf'"),
        (["--range-ratio", "1"], "expected a share in [0, 1)"),
        (["--warmup", "-1"], "expected a count, got '-1'"),
        (["--extra-body", "[1]"], "expected a JSON object, got '[1]'"),
        (["--goodput", "ttft:fast"], "expected a number, got 'fast'"),
        (["--goodput", "itl:3"], "goodput: expected one of ttft, tpot, e2el, got 'itl'"),
        (["--metadata", "gpu"], "expected KEY=VALUE, got 'gpu'"),
        (["--sweep", "seed=1"], "expected max-concurrency or request-rate and values"),
        (["--sweep", "request-rate="], "expected values after request-rate="),
        (["--percentiles", "50,101"], "percentiles: expected values in [0, 100], got 101"),
        (
            ["--save-result", "--result-dir", "/proc/no/such"],
            "result_dir: cannot make /proc/no/such",
        ),
        (["--dataset", "random"], "expected --tokenizer or --token-range, got neither"),
        (["--tokenizer", "/no/such"], "/no/such"),
    ],
)
def test_wrong_flags_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
