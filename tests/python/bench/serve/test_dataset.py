# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diffulex.bench.problem_file import load_problems
from diffulex.bench.serve.dataset import BenchRequest, DatasetSettings, make_requests
from diffulex.checkpoint.resolve import demo_dir
from diffulex.checkpoint.tokenizer import Tokenizer
from diffulex.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(demo_dir())


def _settings(name: str, path: Path | None = None, **changes: object) -> DatasetSettings:
    return DatasetSettings(name=name, path=path, **{"num_prompts": 5, **changes})  # type: ignore[arg-type]


def test_word_problems_are_the_held_out_ones_in_an_order_of_the_seed() -> None:
    questions = {p.question for p in load_problems(demo_dir() / "heldout.jsonl")}
    requests = make_requests(_settings("task:word_problems"), "completions", None)
    assert len(requests) == 5
    assert {request.prompt for request in requests} <= questions
    assert requests == make_requests(_settings("task:word_problems"), "completions", None)
    assert requests != make_requests(_settings("task:word_problems", seed=1), "completions", None)


def _gsm8k(folder: Path) -> Path:
    path = folder / "items.jsonl"
    items = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


def test_a_task_asks_its_items(tmp_path: Path) -> None:
    settings = _settings("task:gsm8k_diffulex", _gsm8k(tmp_path), output_len=9)
    requests = make_requests(settings, "completions", None)
    assert len(requests) == 5
    assert requests[3:] == requests[:2]  # three items, which repeat
    for number in range(3):
        assert sum(f"What is {number} + 1?" in str(r.prompt) for r in requests[:3]) == 1
    for request in requests:
        assert str(request.prompt).startswith("<|im_start|>user\n")
        assert str(request.prompt).endswith("<|im_start|>assistant\n")
        assert request.output_len == 9
        assert request.fields() == {"prompt": request.prompt, "stop": ["<|im_end|>", "</s>"]}
    other = make_requests(_settings("task:gsm8k_diffulex", settings.path, seed=4), "generate", None)
    assert {r.prompt for r in other} == {r.prompt for r in requests}
    assert other != requests


def test_a_task_without_a_template_is_a_message_or_goes_through_the_tokenizers(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    settings = _settings("task:gsm8k_chat", _gsm8k(tmp_path), num_prompts=1)
    (asked,) = make_requests(settings, "chat", None)
    assert asked.messages is not None
    ((role, text),) = ((m["role"], m["content"]) for m in asked.messages)
    assert role == "user"
    assert text.startswith("What is ")
    assert asked.fields() == {"messages": asked.messages}
    (rendered,) = make_requests(settings, "completions", tokenizer)
    assert rendered.prompt == tokenizer.render_chat([{"role": "user", "content": text}])


def test_no_item_of_a_task_needs_a_file() -> None:
    (request,) = make_requests(_settings("task:smoke_code", num_prompts=1), "chat", None)
    assert request.messages is not None


@pytest.mark.parametrize(
    ("name", "api", "message"),
    [
        (
            "task:gsm8k_diffulex",
            "chat",
            r"expected --api completions .*\(<\|im_start\|>\), got chat",
        ),
        ("task:gsm8k_chat", "generate", "expected --api chat, or --tokenizer, .* got generate"),
        ("task:nothing", "chat", "expected task:NAME with a task of `diffulex bench tasks`"),
        ("task:", "chat", "expected task:NAME with a task of `diffulex bench tasks`"),
        ("task:smoke_arith,smoke_code", "chat", "expected task:NAME with a task"),
    ],
)
def test_a_task_that_cannot_be_asked_is_refused(
    name: str, api: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_requests(_settings(name, _gsm8k(tmp_path)), api, None)


def test_chat_wraps_prompts_into_messages() -> None:
    (request, *_) = make_requests(_settings("task:word_problems"), "chat", None)
    assert request.prompt is None
    assert request.messages is not None
    (message,) = request.messages
    assert message["role"] == "user"
    assert request.fields() == {"messages": [message]}


def test_random_prompts_have_their_lengths_and_no_special_ids(tokenizer: Tokenizer) -> None:
    settings = _settings("random", num_prompts=200, input_len=20, output_len=8)
    requests = make_requests(settings, "completions", tokenizer)
    assert {len(request.prompt or ()) for request in requests} == {20}
    assert {request.output_len for request in requests} == {8}
    ids = {token_id for request in requests for token_id in request.prompt or ()}
    special = {tokenizer.mask_token_id, *tokenizer.eos_token_ids}
    special |= set(tokenizer.backend.all_special_ids)
    assert special
    assert not ids & special
    assert requests == make_requests(settings, "completions", tokenizer)


def test_random_lengths_vary_by_the_ratio(tokenizer: Tokenizer) -> None:
    settings = _settings("random", num_prompts=300, input_len=20, output_len=8, range_ratio=0.5)
    requests = make_requests(settings, "completions", tokenizer)
    assert {len(request.prompt or ()) for request in requests} == set(range(10, 31))
    assert {request.output_len for request in requests} == set(range(4, 13))


def test_random_ids_come_from_the_range() -> None:
    settings = _settings("random", token_range=(7, 9), input_len=50)
    ids = {i for r in make_requests(settings, "generate", None) for i in r.prompt or ()}
    assert ids == {7, 8}


def test_random_chat_is_text_of_the_tokenizer(tokenizer: Tokenizer) -> None:
    (request, *_) = make_requests(_settings("random"), "chat", tokenizer)
    assert request.messages is not None
    assert isinstance(request.messages[0]["content"], str)
    with pytest.raises(ConfigError, match="expected --tokenizer to turn token ids"):
        make_requests(_settings("random", token_range=(0, 9)), "chat", None)


def test_random_needs_a_vocabulary() -> None:
    with pytest.raises(ConfigError, match="expected --tokenizer or --token-range, got neither"):
        make_requests(_settings("random"), "completions", None)
    with pytest.raises(ConfigError, match="expected 0 <= low < high, got 5,5"):
        make_requests(_settings("random", token_range=(5, 5)), "completions", None)


def test_lines_of_a_file_repeat_in_order(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [{"prompt": "a"}, {"prompt": [3, 4], "max_tokens": 9}]
    path.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    requests = make_requests(_settings("jsonl", path, output_len=2), "completions", None)
    a, b = BenchRequest("a", None, 2), BenchRequest([3, 4], None, 9)
    assert requests == [a, b, a, b, a]


def test_conversations_of_a_file_are_sent_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path.write_text(json.dumps({"messages": messages}), encoding="utf-8")
    (request, *_) = make_requests(_settings("jsonl", path), "chat", None)
    assert request.fields() == {"messages": messages}
    with pytest.raises(ConfigError, match="expected prompts for --api generate, got messages"):
        make_requests(_settings("jsonl", path), "generate", None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":1: expected JSON"),
        ("[1]", "expected an object with prompt or messages"),
        ('{"prompt": "a", "messages": []}', "expected an object with prompt or messages"),
        ('{"prompt": []}', "expected a text or token ids"),
        ('{"prompt": [1.5]}', "expected a text or token ids"),
        ('{"messages": [{"content": "a"}]}', "expected messages with roles"),
        ('{"prompt": "a", "max_tokens": 0}', "expected max_tokens >= 1, got 0"),
        ("", "expected requests in"),
        (
            '{"prompt": "a"}\n{"prompt": "\\ud800"}',
            r":2: expected text, got a lone surrogate '.ud800'",
        ),
        ('{"messages": [{"role": "\\udfff"}]}', ":1: expected text, got a lone surrogate"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        make_requests(_settings("jsonl", path), "completions", None)


#: Ends of lines for `str.splitlines`, but not for JSON, which may have them unescaped.
_ODD_TEXT = "a\u2028b\u2029c\u0085d\x7f"


def test_texts_of_a_file_may_have_odd_separators(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    line = json.dumps({"prompt": _ODD_TEXT}, ensure_ascii=False)
    path.write_bytes(f"{line}\r\n{line}\n".encode())
    requests = make_requests(_settings("jsonl", path, num_prompts=2), "completions", None)
    assert [request.prompt for request in requests] == [_ODD_TEXT] * 2
    turns = [{"value": _ODD_TEXT}, {"value": "b"}]
    content = json.dumps([{"conversations": turns}], ensure_ascii=False)
    path.write_text(content, encoding="utf-8")
    (request, *_) = make_requests(_settings("sharegpt", path), "completions", None)
    assert request.prompt == _ODD_TEXT


def test_sharegpt_takes_the_first_turn_and_the_length_of_the_second(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "1 + 2 = 3"}]
    items = [{"conversations": turns}, {"conversations": turns[:1]}, {"other": 1}, 7]
    path.write_text(json.dumps(items), encoding="utf-8")
    requests = make_requests(_settings("sharegpt", path, num_prompts=2), "completions", tokenizer)
    length = len(tokenizer.encode("1 + 2 = 3"))
    assert requests == [BenchRequest("How many?", None, length)] * 2
    (request, *_) = make_requests(_settings("sharegpt", path, output_len=3), "completions", None)
    assert request.output_len == 3
    bad = {"conversations": [{"value": "a"}, {"value": "\ud800"}]}
    path.write_text(json.dumps([*items, bad]), encoding="utf-8")
    with pytest.raises(ConfigError, match="conversation 5: expected text, got a lone surrogate"):
        make_requests(_settings("sharegpt", path), "completions", None)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected conversations of two turns"):
        make_requests(_settings("sharegpt", path), "completions", None)


def test_files_must_be_given_and_readable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dataset jsonl: expected --dataset-path FILE"):
        make_requests(_settings("jsonl"), "completions", None)
    with pytest.raises(ConfigError, match="cannot read"):
        make_requests(_settings("sharegpt", tmp_path / "none"), "completions", None)
    with pytest.raises(ConfigError, match="expected one of task:word_problems, random"):
        make_requests(_settings("gsm8k"), "completions", None)
