# SPDX-License-Identifier: Apache-2.0
"""Whole runs of the bundled model: files, interruption, failures, metrics."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from diffulex.bench.__main__ import main
from diffulex.bench.harness import Harness
from diffulex.bench.run_directory import RESPONSE_FILES, read_jsonl
from diffulex.bench.runner import BenchmarkRunner
from diffulex.tools import cli
from fixtures.quick import quick

MODEL = (
    "--model-path", "demo", "--model-name", "auto", "--decoding-strategy", "auto",
    "--engine-arg", "device=cpu", "--engine-arg", "num_pages=256", "--max-model-len", "512",
    "--warmup-requests", "1",
    "--progress", "none",
)  # fmt: skip
FILES = {
    "run.json", "samples.jsonl", "diffulex_stats.json", "report.md", "report.txt", "bench.log",
    *RESPONSE_FILES,
}  # fmt: skip
#: Of users' programs that read the numbers of a run.
STATS_KEYS = {
    "total_samples", "total_tokens", "total_nfe", "total_time", "e2e_total_time_s",
    "e2e_throughput_tok_s", "avg_tokens_per_sample", "avg_nfe_per_sample", "avg_time_per_sample",
    "ttft_s", "tpot_s", "prefill_throughput_tok_s", "decode_throughput_tok_s", "tpf",
    "aggregate_tpf", "last_batch_tpf", "avg_e2e_tps", "avg_decode_tps", "nfe_per_token", "timestamp",
    "decode_tpf_mean", "decode_tpf_aggregate", "tpf_aggregate", "visible_decode_throughput_tok_s",
    "filler_ratio", "completion_reasons", "time_semantics", "token_semantics", "concurrency", "tp",
    "dp",
}  # fmt: skip


def bench(*arguments: str) -> int:
    return main(["eval", *MODEL, *arguments])


def only_run(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def samples(path: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(path / "samples.jsonl"))


def results(path: Path) -> dict[str, Any]:
    (file,) = path.glob("results_*.json")
    return load(file)["results"]


def contents(path: Path) -> dict[str, bytes]:
    """Of every file but the log, which also has what was refused."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "bench.log"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arithmetic and programs, which are run."""
    folder = tmp_path_factory.mktemp("run")
    code = bench(
        "--dataset", "smoke_arith,smoke_code", "--output-dir", str(folder), "--max-tokens", "48",
        "--confirm-run-unsafe-code",
    )  # fmt: skip
    assert code == 0
    return only_run(folder)


def test_a_run_has_all_its_files(run: Path) -> None:
    assert run.name.startswith("run_20")
    assert run.name.endswith("_smoke_arith+smoke_code")
    names = {path.name for path in run.iterdir()}
    log = (run / "bench.log").read_text()
    assert " INFO    engine.startup Diffulex " in log
    assert names - {path.name for path in run.glob("results_*.json")} == FILES


def test_the_manifest_says_what_was_run(run: Path) -> None:
    manifest = load(run / "run.json")
    assert manifest["status"] == "done"
    assert manifest["config"]["engine"]["model_path"] == "demo"
    assert manifest["origins"]["eval.max_tokens"] == "flag"
    assert manifest["sandbox"] in ("namespace", "rlimit")
    assert manifest["engine"]["family"] == "sdar"
    assert set(manifest["engine"]["model_files"]) >= {"config.json"}
    assert manifest["engine"]["tokenizer_files"]
    assert manifest["engine"]["memory_plan"]["num_pages"] > 0
    assert manifest["warmup_requests"] == 1
    assert [segment["task"] for segment in manifest["segments"]] == ["smoke_arith", "smoke_code"]
    task = manifest["tasks"]["smoke_arith"]
    assert task["items"] == 8
    assert task["sampling"]["max_tokens"] == 48  # the task asks for 256, the flag wins
    assert len(task["data_sha256"]) == len(task["first_prompt_sha256"]) == 64


def test_the_numbers_are_those_of_the_samples(run: Path) -> None:
    stats, records = load(run / "diffulex_stats.json"), samples(run)
    assert stats.keys() >= STATS_KEYS
    assert len(records) == stats["total_samples"] == 12
    metrics = [record["metrics"] for record in records]
    assert stats["total_tokens"] == sum(m["completion_tokens"] for m in metrics)
    assert stats["total_nfe"] == sum(m["nfe"] for m in metrics)
    assert stats["e2e_total_time_s"] == pytest.approx(sum(m["total_s"] for m in metrics))
    assert stats["ttft_s"] == pytest.approx(sum(m["ttft_s"] for m in metrics) / 12)
    steps = sum(s["stats"]["total_s"] for s in load(run / "run.json")["segments"])
    assert stats["e2e_throughput_tok_s"] == pytest.approx(stats["total_tokens"] / steps)
    assert sum(stats["completion_reasons"].values()) == 12


def test_scores_are_means_of_the_samples(run: Path) -> None:
    found, records = results(run), samples(run)
    for task in ("smoke_arith", "smoke_code"):
        scores = [r["scores"]["exact_match"] for r in records if r["task"] == task]
        assert found[task]["exact_match,none"] == pytest.approx(sum(scores) / len(scores))
        low, high = found[task]["exact_match_wilson_95"]
        assert low <= found[task]["exact_match,none"] <= high
    assert found["smoke_arith"]["exact_match,none"] > 0  # the bundled model knows some of them
    code = [r for r in records if r["task"] == "smoke_code"]
    assert {r["score_reason"] for r in code} <= {"pass", "syntax", "exception", "assertion", "exit"}


def test_the_older_lists_are_the_texts(run: Path) -> None:
    texts = [record["text"] for record in samples(run)]
    for name in RESPONSE_FILES[1:]:
        assert load(run / name) == texts
    # What the bundled model writes after an answer are special tokens, which have no text.
    assert load(run / RESPONSE_FILES[0]) == texts


def test_the_whole_texts_have_what_comes_after_the_answers(tmp_path: Path) -> None:
    task = (
        "task: to_the_equals_sign\ndataset_path: json\ndataset_kwargs: {data_files: items.json}\n"
        "test_split: train\noutput_type: generate_until\ndoc_to_text: '{{question}}'\n"
        "doc_to_target: '{{answer}}'\nmetadata: {chat: true}\ngeneration_kwargs: {until: ['=']}\n"
        "process_results: !function score.score\n"
    )
    (tmp_path / "task.yaml").write_text(task)
    (tmp_path / "score.py").write_text("def score(doc, answers):\n    return {'right': 1.0}\n")
    question = "Tom has 3 apples. He buys 4 more. How many apples does Tom have?"
    (tmp_path / "items.json").write_text(json.dumps([{"question": question, "answer": "7"}]))
    code = bench(
        "--dataset", "to_the_equals_sign", "--include-path", str(tmp_path), "--output-dir",
        str(tmp_path / "out"), "--max-tokens", "48", "--no-engine-stop",
    )  # fmt: skip
    assert code == 0
    run = only_run(tmp_path / "out")
    (whole,), (cut,) = load(run / RESPONSE_FILES[0]), load(run / RESPONSE_FILES[1])
    assert cut == whole.partition("=")[0] != whole


def test_the_report_names_tasks_and_numbers(run: Path) -> None:
    text = (run / "report.md").read_text()
    assert "| smoke_arith | exact_match | 8 |" in text
    assert "| aggregate e2e tokens/s |" in text
    assert "smoke_code" in (run / "report.txt").read_text()


def _cut(run: Path, folder: Path, kept: int) -> Path:
    """The run as a crash would have left it: `kept` answers and a half of the next."""
    path = folder / run.name
    shutil.copytree(run, path)
    lines = (run / "samples.jsonl").read_text().splitlines()
    (path / "samples.jsonl").write_text("\n".join([*lines[:kept], lines[kept][:40]]))
    manifest = load(path / "run.json")
    manifest["status"], manifest["segments"] = "running", []
    (path / "run.json").write_text(json.dumps(manifest))
    for file in path.glob("results_*.json"):
        file.unlink()
    return path


@pytest.mark.slow
def test_an_interrupted_run_goes_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _cut(run, tmp_path, kept=5)
    asked: list[int] = []
    real = BenchmarkRunner.run

    def counted(self: BenchmarkRunner, prompts: Sequence[Any], *rest: Any) -> Any:
        asked.append(len(prompts))
        return real(self, prompts, *rest)

    monkeypatch.setattr(BenchmarkRunner, "run", counted)
    assert main(["eval", "--resume", str(path), "--progress", "none"]) == 0
    assert asked == [1, 3, 4]  # the warm-up, the rest of the first task, the second one
    assert [r["text"] for r in samples(path)] == [r["text"] for r in samples(run)]
    assert results(path) == results(run)
    manifest = load(path / "run.json")
    assert manifest["status"] == "done"
    assert len(manifest["resumed"]) == 1


def test_other_items_cannot_be_gone_on_with(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _cut(run, tmp_path, kept=2)
    manifest = load(path / "run.json")
    manifest["tasks"]["smoke_arith"]["data_sha256"] = "0" * 64
    (path / "run.json").write_text(json.dumps(manifest))
    assert main(["eval", "--resume", str(path)]) == 2
    assert "resume: expected the same items of smoke_arith" in capsys.readouterr().err
    assert main(["eval", "--resume", str(tmp_path)]) == 2
    assert "expected a folder with run.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-tokens", "8"), ("--no-save-results",), ("--engine-arg", "device=cpu"),
        ("--accept-threshold", "0.5"), ("--preset", "example"), ("--config", "a.yml"),
        ("--dataset", "smoke_arith"), ("--use-lora",), ("--max-num-seqs", "1"),
        ("--profiler", "torch"),
    ],
)  # fmt: skip
def test_an_interrupted_run_keeps_its_settings(
    flags: tuple[str, ...], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _cut(run, tmp_path, kept=2)
    assert main(["eval", "--resume", str(path), *flags]) == 2
    message = f"--resume: expected the settings of that run, got {flags[0].replace('--no-', '--')}"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "key"),
    quick(
        [
            ("engine", "model_files"), ("engine", "tokenizer_files"),
            ("smoke_arith", "first_prompt_sha256"), ("smoke_arith", "sampling"),
        ],
        [("engine", "model_files"), ("smoke_arith", "sampling")],
    ),
)  # fmt: skip
def test_another_model_cannot_go_on(
    section: str, key: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _cut(run, tmp_path, kept=2)
    manifest = load(path / "run.json")
    facts = manifest["engine"] if section == "engine" else manifest["tasks"][section]
    facts[key] = {"other": 1}
    (path / "run.json").write_text(json.dumps(manifest))
    before = contents(path)
    for _ in range(2):  # nor at the next try
        assert main(["eval", "--resume", str(path), "--progress", "none"]) == 2
        error = capsys.readouterr().err
        assert f"resume: expected the {key} of the interrupted run {{'other': 1}}, got" in error
    assert contents(path) == before


@pytest.mark.slow
def test_programs_can_be_run_afterwards(tmp_path: Path) -> None:
    arguments = ("--dataset", "smoke_code", "--output-dir", str(tmp_path), "--max-tokens", "8")
    assert bench(*arguments) == 0
    path = only_run(tmp_path)
    resume = ["eval", "--resume", str(path), "--progress", "none"]
    assert main([*resume, "--confirm-run-unsafe-code"]) == 0
    assert all(record["scores"] is not None for record in samples(path))
    manifest = load(path / "run.json")
    assert manifest["config"]["eval"]["confirm_run_unsafe_code"]
    assert manifest["origins"]["eval.confirm_run_unsafe_code"] == "flag"


def test_packages_that_tests_need_are_looked_for_before_the_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = ["import no_such_package\nassert f() == 2"]
    item = {"question": "?", "test_list": tests, "test_method": "function", "prefix": ""}
    (tmp_path / "items.json").write_text(json.dumps([item]))
    monkeypatch.delattr(BenchmarkRunner, "run")  # nothing is asked
    code = bench(
        "--dataset", "smoke_code", "--dataset-data-files", str(tmp_path / "items.json"),
        "--output-dir", str(tmp_path / "out"), "--confirm-run-unsafe-code",
    )  # fmt: skip
    assert code == 2
    assert "expected the package no_such_package" in capsys.readouterr().err


def test_the_settings_are_logged_for_debugging(tmp_path: Path) -> None:
    log = tmp_path / "bench.log"
    code = bench(
        "--dataset", "smoke_arith", "--output-dir", str(tmp_path / "out"), "--max-tokens", "8",
        "--dataset-limit", "1", "--log-level", "debug", "--log-file", str(log),
    )  # fmt: skip
    assert code == 0
    assert "eval.max_tokens = 8 (flag)" in log.read_text()
    assert "engine.page_size = 32 (default)" in log.read_text()
    # The lines of the engine as well: one file has everything.
    assert " engine.startup Diffulex " in log.read_text()


def test_ctrl_c_leaves_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Harness._record

    def interrupted(self: Harness, *arguments: Any) -> dict[str, Any]:
        if len(self._last) == 3:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(Harness, "_record", interrupted)
    code = bench("--dataset", "smoke_arith", "--output-dir", str(tmp_path), "--max-tokens", "32")
    assert code == 130
    path = only_run(tmp_path)
    assert load(path / "run.json")["status"] == "interrupted"
    assert len(samples(path)) == load(path / "diffulex_stats.json")["total_samples"] == 3
    monkeypatch.undo()
    assert main(["eval", "--resume", str(path), "--progress", "none"]) == 0
    assert len(samples(path)) == 8
    assert len(load(path / "run.json")["segments"]) == 2


def _long_item(folder: Path) -> Path:
    items = [{"question": "What is 1 + 1?", "answer": "#### 2"}] * 2
    items.append({"question": "What is 1 + 1? " * 200, "answer": "#### 2"})
    path = folder / "items.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


@pytest.mark.slow
def test_failed_requests_fail_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (
        "--dataset", "smoke_arith", "--dataset-data-files", str(_long_item(tmp_path)),
        "--output-dir", str(tmp_path / "out"), "--max-tokens", "8", "--no-use-run-subdirectory",
    )  # fmt: skip
    assert bench(*arguments) == 1
    assert "at most 1% failed requests, got 1 of 3" in capsys.readouterr().err
    out = tmp_path / "out"
    (error,) = read_jsonl(out / "errors.jsonl")
    assert error["key"] == ["smoke_arith", 2, 0, 0]
    assert "max_model_len" in error["error"]
    failed = samples(out)[2]
    assert (failed["text"], failed["scores"]["exact_match"]) == ("", 0.0)
    assert results(out)["smoke_arith"]["scored"] == 3  # an empty answer, not one left out
    assert load(out / "run.json")["status"] == "failed"
    assert load(out / "diffulex_stats.json")["failed_requests"] == 1
    # Few enough, and the run is done, with another exit code.
    monkeypatch.setattr("diffulex.bench.harness.MAX_FAILED", 0.5)
    assert bench(*arguments) == 2
    assert "got one; use --resume" in capsys.readouterr().err
    shutil.rmtree(out)
    assert bench(*arguments) == 3


@pytest.mark.slow
def test_a_failed_request_is_an_empty_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def item(question: str) -> dict[str, Any]:
        tests = ["assert f() == 2"]
        return {"question": question, "test_list": tests, "test_method": "function", "prefix": ""}

    path = tmp_path / "items.jsonl"
    questions = ("def f():", "def f(): " * 200)
    path.write_text("".join(json.dumps(item(question)) + "\n" for question in questions))
    monkeypatch.setattr("diffulex.bench.harness.MAX_FAILED", 0.5)
    code = bench(
        "--dataset", "smoke_code", "--dataset-data-files", str(path), "--max-tokens", "8",
        "--output-dir", str(tmp_path / "out"), "--confirm-run-unsafe-code",
    )  # fmt: skip
    assert code == 3
    out = only_run(tmp_path / "out")
    failed = samples(out)[1]
    assert (failed["scores"], failed["score_reason"]) == ({"exact_match": 0.0}, "error")
    assert results(out)["smoke_code"]["scored"] == 2


def test_an_answer_that_cannot_be_scored_counts_as_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: items.jsonl}\n"
        "doc_to_text: '{{question}}'\nprocess_results: !function odd.score\n"
        "metadata: {chat: true}\nmetric_list: [{metric: near}]\n"
    )
    (tmp_path / "odd.py").write_text(
        "def score(doc, results):\n    return {'near': 1.0 / doc['by']}\n"
    )
    items = [{"question": "What is 1 + 1?", "by": by} for by in (1, 0, 2)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    code = bench(
        "--dataset", "mine", "--include-path", str(tmp_path), "--max-tokens", "8",
        "--output-dir", str(tmp_path / "out"),
    )  # fmt: skip
    assert code == 0
    out = only_run(tmp_path / "out")
    records = samples(out)
    assert [record["scores"] for record in records] == [{"near": 1.0}, {"near": 0.0}, {"near": 0.5}]
    reasons = [record["score_reason"] for record in records]
    assert reasons == [None, "cannot score: ZeroDivisionError: float division by zero", None]
    assert records[1]["text"]
    assert results(out)["mine"]["near,none"] == 0.5
    assert results(out)["mine"]["score_errors"] == 1


def test_programs_are_not_run_unless_asked(tmp_path: Path) -> None:
    arguments = ("--dataset", "smoke_code", "--output-dir", str(tmp_path), "--max-tokens", "8")
    assert bench(*arguments) == 0
    path = only_run(tmp_path)
    assert results(path)["smoke_code"] == {"samples": 4, "scored": 0, "status": "not_scored"}
    assert all(record["scores"] is None for record in samples(path))
    assert load(path / "run.json")["sandbox"] == "none"


@pytest.mark.slow
def test_repeats_have_a_spread_and_seeds(tmp_path: Path) -> None:
    code = cli.main(
        ["eval", *MODEL, "--dataset", "smoke_arith", "--output-dir", str(tmp_path), "--repeat", "2",
         "--max-tokens", "16", "--temperature", "1.0", "--dataset-limit", "3", "--seed", "5"]
    )  # fmt: skip
    assert code == 0
    path = only_run(tmp_path)
    records = samples(path)
    assert [(r["doc_id"], r["run"]) for r in records] == [
        (doc, run) for doc in range(3) for run in range(2)
    ]
    texts = [[r["text"] for r in records if r["run"] == run] for run in range(2)]
    assert texts[0] != texts[1]
    repeats = results(path)["smoke_arith"]["exact_match_repeats"]
    assert len(repeats["values"]) == 2
    assert repeats["std"] >= 0


def test_nothing_is_written_without_saving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--dataset", "smoke_arith", "--dataset-limit", "1", "--max-tokens", "8")
    assert bench(*arguments, "--no-save-results", "--output-dir", str(tmp_path / "out")) == 0
    assert not (tmp_path / "out").exists()
    assert "smoke_arith  exact_match" in capsys.readouterr().out


def test_a_prompt_is_not_put_into_two_templates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = ("--dataset-data-files", str(_long_item(tmp_path)))
    assert bench("--dataset", "gsm8k_sdar", "--apply-chat-template", *items) == 2
    message = "apply_chat_template: expected a task whose metadata has chat, got gsm8k_sdar"
    assert message in capsys.readouterr().err


def test_answers_are_texts_of_the_chosen_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        BenchmarkRunner, "_shown", lambda self, output: dataclasses.replace(output, text="#### 7")
    )
    code = bench(
        "--dataset", "smoke_arith", "--output-dir", str(tmp_path), "--max-tokens", "8",
        "--dataset-limit", "2",
    )  # fmt: skip
    assert code == 0
    assert [record["text"] for record in samples(only_run(tmp_path))] == ["#### 7"] * 2


def test_rows_of_a_batch() -> None:
    from diffulex import SamplingParams

    prompts = ["What is 1 + 1?", "Tom has 3 apples."]
    with BenchmarkRunner("demo", device="cpu") as runner:
        totals = runner.evaluate_batch(prompts, SamplingParams(max_tokens=16))
        assert runner.last_outputs is not None
        texts = [output.text for output in runner.last_outputs]
    rows = totals["outputs"]
    assert [row["text"] for row in rows] == texts
    assert totals["num_samples"] == 2
    assert totals["total_tokens"] == sum(len(row["token_ids"]) for row in rows)
    assert totals["total_nfe"] == sum(row["nfe"] for row in rows)
    assert rows[0]["full_text"].startswith(rows[0]["text"][:4])
    assert rows[0].keys() >= {"ttft_s", "tpot_s", "batch_total_time_s", "completion_reason"}
    with pytest.raises(ValueError, match="wait_ready"):
        BenchmarkRunner("demo", wait_ready=False)
