# SPDX-License-Identifier: Apache-2.0
"""`diffulex run-batch`: files of OpenAI requests."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from diffulex.errors import ConfigError
from diffulex.server.http.api_server import create_app
from diffulex.serving.engine import ServingEngine
from diffulex.serving.engine_loop import EngineLoop
from diffulex.serving.inproc_frontend import InprocFrontend
from diffulex.tools.cli import main
from diffulex.tools.run_batch import BatchLine, answer_lines, parse_line, read_lines
from engine.tiny_engine import TinyModel

CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 6, "temperature": 0}


def line(custom_id: str, url: str = "/v1/chat/completions", **body: object) -> dict:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**CHAT, **body}}


def answers(model: TinyModel, lines: list[BatchLine]) -> tuple[int, dict[str, dict]]:
    def make(name: str, **settings: object) -> ServingEngine:
        return ServingEngine(model.engine(**settings))

    loop = EngineLoop("tiny", {"max_num_reqs": 4}, engine_factory=make)
    app = create_app(InprocFrontend(loop, tokenizer=model.facts.tokenizer), accept_any_model=True)
    output = io.StringIO()
    num_failed = asyncio.run(answer_lines(app, lines, output))
    records = [json.loads(item) for item in output.getvalue().splitlines()]
    return num_failed, {record["custom_id"]: record for record in records}


def test_every_line_is_answered_as_over_http(tmp_path_factory, tmp_path):
    model = TinyModel(tmp_path_factory.mktemp("tiny"), "cpu")
    path = tmp_path / "in.jsonl"
    items = [line(f"r{index}", seed=index) for index in range(20)]
    items += [
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "abc", "max_tokens": 5}},
        line("bad", tools=[{"type": "function"}]),
        line("worse", max_tokens=-1),
    ]
    path.write_text("\n".join(map(json.dumps, items)) + "\n\n")
    num_failed, records = answers(model, read_lines(str(path), "--input-file", parse_line))
    assert num_failed == 2
    assert records.keys() == {item["custom_id"] for item in items}
    ids = {record["id"] for record in records.values()}
    assert ids == {f"batch_req_{number}" for number in range(1, 24)}
    texts = set()
    for index in range(20):
        response = records[f"r{index}"]["response"]
        assert response["status_code"] == 200
        assert response["request_id"] == response["body"]["id"]
        texts.add(response["body"]["choices"][0]["message"]["content"])
    assert len(texts) == 1, "greedy answers in one batch"
    assert records["c"]["response"]["body"]["usage"]["completion_tokens"] <= 5
    for name in ("bad", "worse"):
        assert records[name]["response"]["status_code"] == 400
        assert "error" in records[name]["response"]["body"]


def test_ids_and_texts_of_any_character(tmp_path_factory, tmp_path):
    """Separators of lines may stand in JSON texts, and a lone surrogate in an id."""
    path = tmp_path / "in.jsonl"
    items = [line("\ud800"), line("\u2028", messages=[{"role": "user", "content": "a\u2028\x85b"}])]
    ascii_only = [True, False]
    texts = [json.dumps(item, ensure_ascii=flag) for item, flag in zip(items, ascii_only)]
    path.write_text("\n".join(texts), encoding="utf-8")
    num_failed, records = answers(
        TinyModel(tmp_path_factory.mktemp("tiny"), "cpu"),
        read_lines(str(path), "--input-file", parse_line),
    )
    assert num_failed == 0
    assert records.keys() == {"\ud800", "\u2028"}
    for record in records.values():
        json.dumps(record).encode("ascii")


def test_what_the_batch_itself_sends_is_not_too_much_for_its_queue(tmp_path, monkeypatch):
    seen = []

    async def never(args, lines, output) -> int:
        seen.append(args.max_queue_size)
        return 0

    monkeypatch.setattr("diffulex.tools.run_batch._run", never)
    (tmp_path / "in.jsonl").write_text(json.dumps(line("a")))
    (tmp_path / "c.yaml").write_text(f"input-file: {tmp_path / 'in.jsonl'}\n")
    assert main(["run-batch", "--config", str(tmp_path / "c.yaml")]) == 0
    assert seen == [0]


def test_no_input(capsys):
    assert main(["run-batch", "demo"]) == 2
    assert capsys.readouterr().err.endswith("expected --input-file, got none\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a request in"),
        ("no json", "line 1: expected a JSON object, got 'no json'"),
        ("[1]", r"line 1: expected a JSON object, got '\[1\]'"),
        (json.dumps({**line("a"), "custom_id": 7}), "expected a text as custom_id, got 7"),
        (json.dumps({**line("a"), "method": "GET"}), "expected the method POST, got 'GET'"),
        (json.dumps(line("a", url="/v1/embeddings")), "expected a url of /v1/chat/completions, "),
        (json.dumps({**line("a"), "body": None}), "expected an object as body, got None"),
        (json.dumps(line("a", stream=True)), "expected a request without stream"),
        (
            "\n".join(json.dumps(line("a")) for _ in range(2)),
            "line 2: expected another custom_id, got 'a' again",
        ),
    ],
)
def test_files_that_are_refused_before_anything_is_loaded(tmp_path, content, message):
    path = tmp_path / "in.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_lines(str(path), "--input-file", parse_line)


def test_a_missing_file_is_one_line(capsys):
    assert main(["run-batch", "-i", "/no/such/file"]) == 2
    assert capsys.readouterr().err == (
        "error: --input-file: cannot read /no/such/file: No such file or directory\n"
    )


def test_an_output_that_cannot_be_written(tmp_path, capsys):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(line("a")))
    assert main(["run-batch", "-i", str(path), "-o", str(tmp_path)]) == 2
    assert "--output-file: cannot write" in capsys.readouterr().err
