# SPDX-License-Identifier: Apache-2.0
"""`diffulex batch`: prompts of a file, answers in a folder, and what is left of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffulex.errors import ConfigError
from diffulex.tools.batch import answered_ids, read_prompt
from diffulex.tools.cli import main
from diffulex.tools.run_batch import read_lines

PROMPT = "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?"
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0}


def write(path: Path, *items: object) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


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
    assert main([*command, "--resume"]) == 0
    assert "[1 answered, 0 failed, 4 kept]" in capfd.readouterr().err
    assert answers(folder).keys() == {*found, "new"}
    assert main([*command, "--resume"]) == 0
    assert "[0 answered, 0 failed, 5 kept]" in capfd.readouterr().err


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
    (tmp_path / "answers-00000.jsonl").write_text('{"custom_id": "a"}\n{"id": 1}\n')
    with pytest.raises(ConfigError, match=r"answers-00000\.jsonl: line 2: expected an answer, got"):
        answered_ids(tmp_path)


def test_missing_flags_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["batch", "demo"]) == 2
    assert "command line: expected --input, got none" in capsys.readouterr().err
    assert main(["batch", "demo", "--input", "x.jsonl"]) == 2
    assert "command line: expected --output, got none" in capsys.readouterr().err
    assert main(["batch", "demo", "--input", str(tmp_path / "x"), "--output", str(tmp_path)]) == 2
    assert "--input: cannot read" in capsys.readouterr().err
