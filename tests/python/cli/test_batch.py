# SPDX-License-Identifier: Apache-2.0
"""`diffulex batch`: prompts of a file, answers in a folder, and what is left of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffulex.errors import ConfigError
from diffulex.tools.batch import answered_ids, read_prompt
from diffulex.tools.cli import main
from diffulex.tools.run_batch import BatchLine, read_lines

PROMPT = "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?"
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0}


def write(path: Path, *items: object) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def outcome(custom_id: str, status: int) -> dict:
    return {"custom_id": custom_id, "response": {"status_code": status, "body": {}}}


def answers(folder: Path) -> dict[str, dict]:
    found = [
        json.loads(line)
        for path in sorted(folder.glob("answers-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len({item["custom_id"] for item in found}) == len(found)
    return {item["custom_id"]: item["response"] for item in found}


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_folder_is_filled_and_then_resumed(
    tmp_path: Path, num_replicas: int, capfd: pytest.CaptureFixture[str]
) -> None:
    items: list[object] = [{"prompt": PROMPT, "max_tokens": 8, "temperature": 0}, CHAT]
    items += [
        {"custom_id": "own", "url": "/v1/chat/completions", "body": CHAT},
        {"custom_id": "bad", "prompt": PROMPT, "max_tokens": -1},
    ]
    source, folder = write(tmp_path / "in.jsonl", *items), tmp_path / "out"
    command = ["batch", "demo", "--device", "cpu", "-i", str(source), "-o", str(folder)]
    command += ["--shard-lines", "3", "--data-parallel-size", str(num_replicas)]
    assert main(command) == 1
    assert "[3 answered, 1 failed]" in capfd.readouterr().err
    found = answers(folder)
    assert found.keys() == {"line-1", "line-2", "own", "bad"}
    assert [len(path.read_text().splitlines()) for path in sorted(folder.iterdir())] == [3, 1]
    assert found["bad"]["status_code"] == 400
    content = found["own"]["body"]["choices"][0]["message"]["content"]
    assert content == found["line-2"]["body"]["choices"][0]["message"]["content"]
    assert content.endswith("#### 7")
    if num_replicas > 1:
        return
    assert main(command) == 2
    text = f"--output: expected a folder without answers (or --resume), got {folder}"
    assert text in capfd.readouterr().err
    # A run that was cut off in a line, and a line that is new.
    last = folder / "answers-00001.jsonl"
    last.write_text(last.read_text() + '{"custom_id": "hal')
    write(source, *items, {"custom_id": "new", "prompt": PROMPT, "max_tokens": 4})
    # What was refused stays so.
    assert main([*command, "--resume"]) == 1
    assert "[1 answered, 0 failed, 4 kept of which 1 failed]" in capfd.readouterr().err
    assert answers(folder).keys() == {*found, "new"}
    assert main([*command, "--resume"]) == 1
    assert "[0 answered, 0 failed, 5 kept of which 1 failed]" in capfd.readouterr().err
    source.write_text("".join(line for line in source.open() if '"bad"' not in line))
    assert main([*command, "--resume"]) == 0
    assert "[0 answered, 0 failed, 4 kept]" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{}", "expected prompt or messages, got neither"),
        ('{"prompt": "a", "messages": []}', "expected prompt or messages, got prompt, messages"),
        ('{"text": "a"}', "expected prompt or messages, got text"),
        ('["a"]', """expected a JSON object, got '["a"]'"""),
        ('{"custom_id": 3, "prompt": "a"}', "expected a text as custom_id, got 3"),
        ('{"prompt": "a", "stream": true}', "expected a request without stream, got stream=True"),
        ('{"custom_id": "a", "url": "/x", "body": {}}', "expected a url of "),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "first"}\n\n' + content + "\n")
    with pytest.raises(ConfigError) as error:
        read_lines(str(path), "--input", read_prompt)
    assert str(error.value).startswith(f"{path}: line 3: {text}")


def test_a_folder_with_other_files_is_named(tmp_path: Path) -> None:
    write(tmp_path / "answers-00000.jsonl", outcome("a", 200), {"id": 1})
    with pytest.raises(ConfigError, match=r"answers-00000\.jsonl: line 2: expected an answer, got"):
        answered_ids(tmp_path)


def test_what_the_server_failed_at_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", *({"custom_id": i, "prompt": i} for i in "abcd"))
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "answers-00000.jsonl"
    lost = [outcome("b", 500), outcome("d", 503)]
    write(path, outcome("a", 200), *lost, outcome("c", 400))
    asked: list[str] = []

    def answer(args: object, lines: list[BatchLine], output: object) -> int:
        asked.extend(line.custom_id for line in lines)
        return 0

    monkeypatch.setattr("diffulex.tools.batch._answer", answer)
    command = ["batch", "demo", "--device", "cpu", "-i", str(source), "-o", str(folder)]
    assert main([*command, "--resume"]) == 1
    assert "[2 answered, 0 failed, 2 kept of which 1 failed]" in capsys.readouterr().err
    assert asked == ["b", "d"]
    assert [json.loads(line) for line in path.open()] == [outcome("a", 200), outcome("c", 400)]
    assert list(folder.iterdir()) == [path]
    write(path, outcome("a", 200), outcome("b", 500))
    write(source, {"custom_id": "a", "prompt": "a"})
    assert main([*command, "--resume"]) == 0
    assert "[0 answered, 0 failed, 1 kept]" in capsys.readouterr().err


def test_missing_flags_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["batch", "demo"]) == 2
    assert "command line: expected --input, got none" in capsys.readouterr().err
    assert main(["batch", "demo", "--input", "x.jsonl"]) == 2
    assert "command line: expected --output, got none" in capsys.readouterr().err
    assert main(["batch", "demo", "--input", str(tmp_path / "x"), "--output", str(tmp_path)]) == 2
    assert "--input: cannot read" in capsys.readouterr().err
