# SPDX-License-Identifier: Apache-2.0
"""Task files, their items, and what they ask of a request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diffulex.bench import datasets
from diffulex.bench.__main__ import main
from diffulex.bench.config import BenchmarkConfig
from diffulex.bench.hub import local_folder
from diffulex.bench.requests import cut_at, encode_prompt, request_params
from diffulex.bench.task import BUNDLED, read_tasks, task_names
from diffulex.checkpoint.tokenizer import Tokenizer
from diffulex.errors import ConfigError
from fixtures.checkpoints import EOS_ID, CheckpointBuilder

#: An item that has what any of the bundled prompts names.
ITEM = {
    "question": "What is 1 + 1?",
    "ground_truth_answer": "#### 2",
    "prompt": "def f():\n",
    "prefix": "def f():\n",
    "test_list": ["assert f() == 2"],
    "test_method": "function",
}


def one_task(name: str, include_path: str | None = None) -> Any:
    tasks = read_tasks(name, include_path)
    assert tasks is not None
    return tasks[0]


@pytest.mark.parametrize("name", task_names())
def test_bundled_tasks_are_whole(name: str) -> None:
    task = one_task(name)
    text = task.prompt(ITEM)
    assert "1 + 1" in text or "def f" in text
    assert task.data in datasets.data_sets()
    assert task.generation_kwargs["max_gen_toks"] in (256, 2048, 8192)
    is_code = "humaneval" in name or "mbpp" in name or name in ("smoke_code",) or "stdio" in name
    assert task.unsafe_code == is_code
    scores = task.score(dict(ITEM), ["the answer is \\boxed{2}"]) if not is_code else None
    assert scores is None or scores["exact_match"] == 1.0
    assert task.repeats == (32 if name.endswith("_n32") else 1)


@pytest.mark.parametrize(
    ("name", "start", "end", "stops"),
    [
        ("gsm8k_sdar", "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n",
         ["<|im_end|>", "</s>"]),
        ("gsm8k_llada2", "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>",
         "<|role_end|><role>ASSISTANT</role>", ["<|role_end|>", "</s>"]),
        ("gsm8k_diffusion_gemma", "<bos><|turn>user\n",
         "<turn|>\n<|turn>model\n<|channel>thought\n<channel|>\n", ["<turn|>", "<|turn>", "<eos>"]),
        ("humaneval_sdar", "<|im_start|>user\n", "<|im_start|>assistant\n```python\n",
         ["<|im_end|>", "</s>"]),
    ],
)  # fmt: skip
def test_prompt_families(name: str, start: str, end: str, stops: list[str]) -> None:
    task = one_task(name)
    text = task.prompt(ITEM)
    assert text.startswith(start)
    assert text.endswith(end)
    assert task.until == stops


def test_the_examples_of_a_prompt_with_four() -> None:
    task = one_task("math500_diffulex_4shot")
    text = task.prompt(ITEM)
    *examples, question = text.split("<|im_start|>user\n")[1:]
    # Their answers are what the score of the task takes for right.
    for example, gold in zip(examples, ("[2,5)", "24", "16", "-\\frac{2}{3}"), strict=True):
        asked, answer = example.split("<|im_start|>assistant\n")
        assert asked.endswith("within \\boxed{}.<|im_end|>\n")
        assert answer.endswith("<|im_end|>\n")
        assert task.score({"ground_truth_answer": gold}, [answer]) == {"exact_match": 1.0}
        assert task.score({"ground_truth_answer": "7"}, [answer]) == {"exact_match": 0.0}
    # What follows is the question as it is without them.
    assert f"<|im_start|>user\n{question}" == one_task("math500_diffulex").prompt(ITEM)
    assert (task.until, task.generation_kwargs["max_gen_toks"]) == (["<|im_end|>", "</s>"], 2048)


def test_repeated_answers_are_averaged() -> None:
    task = one_task("math500_diffulex_n32")
    assert task.score(dict(ITEM), [["\\boxed{2}", "\\boxed{3}"]]) == {"exact_match": 0.5}


def test_mathematics_is_never_scored_by_candidates() -> None:
    for name in task_names():
        if name.startswith("math500"):
            assert set(one_task(name).score(dict(ITEM), ["2"])) == {"exact_match"}


def test_paths_of_a_task_file_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: items.jsonl}\n"
        "doc_to_text: '{{question}}'\nprocess_results: !function score.score\n"
    )
    (tmp_path / "score.py").write_text(
        "def score(doc, results):\n    return {'exact_match': 0.25}\n"
    )
    (tmp_path / "items.jsonl").write_text(json.dumps(ITEM) + "\n")
    monkeypatch.chdir("/")
    task = one_task("mine", str(tmp_path))
    assert task.items() == [ITEM]
    assert task.score({}, []) == {"exact_match": 0.25}
    # Found nowhere else, and not if only the bundled tasks are looked at.
    assert read_tasks("gsm8k_sdar", str(tmp_path)) is None
    assert read_tasks("mine") is None
    assert read_tasks("gsm8k_sdar", "") is None
    with pytest.raises(ConfigError, match="include_path: expected a directory"):
        read_tasks("mine", str(tmp_path / "nowhere"))


_OWN = (
    "task: own\ndataset_path: json\ndataset_kwargs: {data_files: items.jsonl}\n"
    "doc_to_text: '{{question}}'\nprocess_results: !function score.score\n"
)


@pytest.mark.parametrize(
    "more",
    [
        "filter_list: [{name: x, filter: [{function: regex, regex_pattern: a}, {function: take_first}]}]",
        "repeats: 4\nfilter_list: [{name: x, filter: [{function: take_first_k, k: 2}]}]",
        "process_docs: !function score.docs",
        "description: 'Answer.'",
        "output_type: multiple_choice",
        "unsafe_code: true",
        "num_fewshot: 2",
        "fewshot_split: train",
        "validation_split: train",
        "metric_list: [{metric: exact_match, aggregation: median}]",
        "dataset_name: main",
        "custom_dataset: !function score.items",
        "metric_list: [exact_match]",
    ],
)
def test_what_is_not_understood_is_left_to_lm_eval(tmp_path: Path, more: str) -> None:
    (tmp_path / "own.yaml").write_text(_OWN + more + "\n")
    # Not even loaded, as there is no such module.
    assert read_tasks("own", str(tmp_path)) is None


def test_what_changes_nothing_is_understood(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def score(doc, results):\n    return {'near': 1.0}\n")
    (tmp_path / "own.yaml").write_text(
        _OWN + "repeats: 2\nfilter_list: [{name: x, filter: [{function: take_first_k, k: 2}]}]\n"
        "description: null\nunsafe_code: false\nmetric_list: [{metric: near, aggregation: mean}]\n"
    )
    task = one_task("own", str(tmp_path))
    assert (task.repeats, task.unsafe_code, task.metrics) == (2, False, ("near",))


def test_programs_are_run_for_our_functions_alone(tmp_path: Path) -> None:
    # Another module of the same name, whose own function would never be called.
    (tmp_path / "functions.py").write_text("def code(doc, results):\n    return {'near': 1.0}\n")
    (tmp_path / "own.yaml").write_text(_OWN.replace("score.score", "functions.code"))
    task = one_task("own", str(tmp_path))
    assert not task.unsafe_code
    assert task.score({}, [""]) == {"near": 1.0}
    (tmp_path / "own.yaml").write_text(
        f"task: own\ninclude: {BUNDLED / '_mbpp_plain_yaml'}\ndataset_kwargs: {{name: mbpp}}\n"
        "unsafe_code: false\n"
    )
    assert one_task("own", str(tmp_path)).unsafe_code


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: a\ninclude: b.yaml\n", "cannot read"),
        ("task: a\ninclude: a.yaml\n", "expected no circle of includes"),
        ("- a\n", "expected a map"),
        ("task: [a\n", "expected YAML"),
        ("task: a\ndataset_path: json\ndoc_to_text: x\nprocess_results: !function no.f\n",
         "expected the module"),
    ],
)  # fmt: skip
def test_broken_task_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_tasks("a", str(tmp_path))


def test_a_prompt_without_its_field_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot write the prompt: 'question' is undefined"):
        one_task("gsm8k_sdar").prompt({})


# Items.


def test_bundled_data_are_those_of_the_manifest() -> None:
    for name, row in datasets.data_sets().items():
        path = datasets.data_path(name) if "file" in row else None
        if path is not None:
            assert datasets.sha256(path) == row["sha256"]
            assert len(datasets.read_items(path)) == row["rows"]
        assert row["licence"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "expected items"), ("{", "expected JSON"), ("[1]", "expected items that are objects")],
)
def test_broken_items_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "items.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        datasets.read_items(path)


def test_the_first_items_are_rows() -> None:
    items = datasets.load_benchmark_dataset("smoke_arith", limit=3)
    assert [set(item) for item in items] == [{"question", "ground_truth_answer"}] * 3
    with pytest.raises(ConfigError, match="expected the split test, got 'train'"):
        datasets.load_benchmark_dataset("smoke_arith", split="train")
    with pytest.raises(ConfigError, match="data set: expected one of"):
        datasets.load_benchmark_dataset("nothing")


def test_a_set_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("datasets", reason="datasets not installed: pip install '.[eval]'")
    monkeypatch.setattr(datasets, "_fetched_path", lambda name: tmp_path / "cache" / f"{name}.json")
    asked: list[Any] = []

    def load_dataset(*arguments: Any, split: str) -> list[dict[str, str]]:
        asked.append((*arguments, split))
        return [{"question": "1 + 1?", "answer": "It is 2.\n#### 2"}]

    monkeypatch.setattr(hub, "load_dataset", load_dataset)
    for _ in range(2):
        assert datasets.load_gsm8k() == [
            {"question": "1 + 1?", "ground_truth_answer": "It is 2.\n#### 2"}
        ]
    assert asked == [("openai/gsm8k", "main", "test")]


def test_what_cannot_be_fetched_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets, "_fetched_path", lambda name: tmp_path / name)
    with pytest.raises(ConfigError, match="prime_intellect_stdio: expected data_files"):
        datasets.load_split("prime_intellect_stdio")
    hub = pytest.importorskip("datasets", reason="datasets not installed: pip install '.[eval]'")

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "load_dataset", offline)
    with pytest.raises(ConfigError, match="gsm8k: cannot read openai/gsm8k: no route"):
        datasets.load_gsm8k()


@pytest.mark.slow
def test_the_command_lists_and_verifies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(datasets, "_fetched_path", lambda name: tmp_path / name)
    assert main(["tasks"]) == 0
    assert "gsm8k_llada2" in capsys.readouterr().out
    assert main(["tasks", "--verify"]) == 1
    shown = capsys.readouterr().out
    assert "8 items" in shown
    assert "missing (MIT)" in shown


def test_folders_are_paths_or_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: str(tmp_path / name))
    assert local_folder("lora_path", str(tmp_path)) == tmp_path
    assert local_folder("lora_path", "org/adapter") == tmp_path / "org/adapter"
    with pytest.raises(ConfigError, match="lora_path: expected a directory or a hub id"):
        local_folder("lora_path", "/no/where/at/all")

    def offline(name: str) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match="lora_path: cannot read org/adapter from the hub: no ro"):
        local_folder("lora_path", "org/adapter")


# Requests.


def params(task: dict[str, Any], **evaluation: Any) -> Any:
    return request_params(BenchmarkConfig.from_dict({"engine": {}, "eval": evaluation}), task)


def test_what_a_user_gives_wins_over_the_task() -> None:
    task = {"max_gen_toks": 100, "temperature": 0.5, "until": ["a", ""], "max_nfe": 7}
    assert params({}).max_tokens == 256
    assert params(task).max_tokens == 100
    assert (params(task).temperature, params(task).max_nfe) == (0.5, 7)
    given = params(task, max_tokens=256, temperature=0.0, max_nfe=3)
    assert (given.max_tokens, given.temperature, given.max_nfe) == (256, 0.0, 3)
    assert params(task).stop == ("a",)
    assert params({"until": "x"}).stop == ("x",)
    assert params(task, engine_stop=False).stop == ()
    assert params({**task, "do_sample": False}).temperature == 0
    assert params({"max_tokens": 5, "max_new_tokens": 6}).max_tokens == 5
    assert params({"top_p": 0.5, "top_k": 3, "seed": 9}).top_p == 0.5
    assert params(task, gen_kwargs={"top_k": 4}).top_k == 4
    with pytest.raises(ConfigError, match="gen_kwargs: expected a parameter of a request"):
        params({}, gen_kwargs={"beams": 4})
    with pytest.raises(ConfigError, match="until: expected at most 16"):
        params({"until": [str(i) for i in range(17)]})


def test_texts_are_cut_at_the_first_stop() -> None:
    assert cut_at("one two three", ["three", "two"]) == "one "
    assert cut_at("one", []) == "one"


def test_begin_tokens_are_never_doubled(tmp_path: Path) -> None:
    CheckpointBuilder().write(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    backend = tokenizer.backend
    backend.bos_token = "<|endoftext|>"
    begin, text = EOS_ID, "ab"
    plain = [ord("a"), ord("b")]
    assert encode_prompt(tokenizer, text, True) == [begin, *plain]
    assert encode_prompt(tokenizer, "<|endoftext|>ab", True) == [begin, *plain]
    assert encode_prompt(tokenizer, "<|endoftext|>ab", False) == plain
    assert encode_prompt(tokenizer, text, False) == plain
    assert encode_prompt(tokenizer, "<|endoftext|>ab", None) == [begin, *plain]
    assert encode_prompt(tokenizer, text, None) == tokenizer.encode(text)
