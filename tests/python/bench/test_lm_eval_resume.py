# SPDX-License-Identifier: Apache-2.0
"""Runs of lm-eval that were interrupted: what they keep, and how they go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diffulex.bench.__main__ import main
from fixtures.extras import need_extra
from fixtures.lm_eval_tasks import EVAL

need_extra("eval", "lm_eval", "datasets", "evaluate", "sacrebleu", "sqlitedict", "pytablewriter")

pytestmark = pytest.mark.usefixtures("without_the_tasks_of_lm_eval")


@pytest.mark.slow
def test_ctrl_c_keeps_the_answers_that_are_there(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffulex import Diffulex

    real, finished = Diffulex.step, []

    def interrupted(self: Any) -> Any:
        if len(finished) >= 3:
            raise KeyboardInterrupt
        events = real(self)
        finished.extend(event for event in events if event.output is not None)
        return events

    monkeypatch.setattr(Diffulex, "step", interrupted)
    code = main(
        [*EVAL, "--dataset", "own_words", "--include-path", str(tasks), "--warmup-requests", "0",
         "--output-dir", str(tmp_path), "--engine-arg", "max_num_reqs=1"]
    )  # fmt: skip
    assert code == 130
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    records = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [bool(record["text"]) for record in records] == [True] * 3
    assert json.loads((run / "diffulex_stats.json").read_text())["total_samples"] == 3
    assert (run / "report.md").is_file()


@pytest.mark.slow
def test_an_interrupted_run_of_lm_eval_goes_on(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers and likelihoods that are there are not asked again; the result is that of one run."""
    from diffulex import Diffulex
    from diffulex.bench.runner import BenchmarkRunner
    from diffulex.likelihood import scorer

    arguments = [
        *EVAL, "--dataset", "own_words,own_choices", "--include-path", str(tasks),
        "--mc-num", "8", "--warmup-requests", "0",
    ]  # fmt: skip
    assert main([*arguments, "--output-dir", str(tmp_path / "whole")]) == 0
    monkeypatch.setattr(scorer, "_GROUPS", 0.01)
    real, flush, finished, scored = Diffulex.step, scorer.Scorer._flush, [], []

    def step(self: Any) -> Any:
        if len(finished) >= 3:
            raise KeyboardInterrupt
        events = real(self)
        finished.extend(event for event in events if event.output is not None)
        return events

    def stop(self: Any, *rest: Any) -> None:
        scored.append(rest)
        if len(scored) > 2:
            raise KeyboardInterrupt
        flush(self, *rest)

    monkeypatch.setattr(Diffulex, "step", step)
    parts = [*arguments, "--output-dir", str(tmp_path / "parts"), "--engine-arg", "max_num_reqs=1"]
    assert main(parts) == 130
    (run,) = (tmp_path / "parts").iterdir()
    resume = ["eval", "--resume", str(run)]
    monkeypatch.setattr(Diffulex, "step", real)
    asked, run_batch = [], BenchmarkRunner.run

    def counted(self: Any, prompts: Any, *rest: Any, **options: Any) -> Any:
        asked.append(len(prompts))
        return run_batch(self, prompts, *rest, **options)

    monkeypatch.setattr(BenchmarkRunner, "run", counted)
    monkeypatch.setattr(scorer.Scorer, "_flush", stop)
    assert main(resume) == 130
    monkeypatch.setattr(scorer.Scorer, "_flush", flush)
    assert main(resume) == 0
    assert asked == [3]
    assert main(resume) == 2
    assert "expected a run that was interrupted, got" in capsys.readouterr().err
    manifest = json.loads((run / "run.json").read_text())
    assert (manifest["status"], len(manifest["resumed"])) == ("done", 2)
    stats = json.loads((run / "diffulex_stats.json").read_text())
    assert stats["total_samples"] == 6
    assert stats["likelihood"]["requests"] == 6
    assert not list(run.glob("lm_eval_cache*"))
    (one,), (two,) = ((tmp_path / name).rglob("results_*.json") for name in ("whole", "parts"))
    assert json.loads(one.read_text())["results"] == json.loads(two.read_text())["results"]


@pytest.mark.slow
def test_a_run_that_goes_on_counts_every_answer_once(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed is asked again, although lm-eval keeps its empty answer; what was drawn as well."""
    from diffulex.bench import lm_eval_model
    from diffulex.bench.runner import BenchmarkRunner
    from diffulex.likelihood import scorer

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    asked, manifests, run_batch = [], [], BenchmarkRunner.run

    def failing(self: Any, prompts: Any, *rest: Any, **options: Any) -> Any:
        """The first prompt of the first call is too long."""
        (run,) = tmp_path.iterdir()
        manifests.append(json.loads((run / "run.json").read_text()))
        asked.append(len(prompts))
        first = prompts[0] if len(asked) > 1 else prompts[0] * 1000
        return run_batch(self, [first, *prompts[1:]], *rest, **options)

    monkeypatch.setattr(lm_eval_model, "MAX_FAILED", 0.5)
    monkeypatch.setattr(BenchmarkRunner, "run", failing)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(scorer.Scorer, "_flush", stop)
        code = main(
            [*EVAL, "--dataset", "own_words,drawn_words,own_choices", "--mc-num", "4",
             "--include-path", str(tasks), "--warmup-requests", "0", "--save-trace", "blocks",
             "--output-dir", str(tmp_path)]
        )  # fmt: skip
    assert code == 130
    (run,) = tmp_path.iterdir()
    samples, stats = run / "samples.jsonl", run / "diffulex_stats.json"
    assert json.loads(stats.read_text())["failed_requests"] == 1
    for name in ("samples.jsonl", "errors.jsonl", "trace.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"cut": "o')  # by a crash
    assert main(["eval", "--resume", str(run)]) == 0
    assert asked == [6, 6, 1, 6]
    # What a run that goes on is compared with is there before the first answer.
    assert all(manifest["engine"]["family"] == "sdar" for manifest in manifests)
    assert len(manifests[2]["resumed"]) == 1
    # Answers that are drawn anew bring their time with them: that of the first ones is not counted.
    parts = [manifests[2]["totals"], json.loads((run / "run.json").read_text())["totals"]]
    drawn = [[segment["is_drawn"] for segment in part["segments"]] for part in parts]
    assert drawn == [[False], [False, False, True]]
    records = [json.loads(line) for line in samples.read_text().splitlines()]
    assert [bool(record["error"]) for record in records] == [False] * 12
    assert sum(record["is_drawn"] for record in records) == 6
    found = json.loads(stats.read_text())
    assert (found["total_samples"], found["failed_requests"]) == (12, 0)
    assert len((run / "trace.jsonl").read_text().splitlines()) == 12
    (scored,) = run.rglob("samples_own_words_*.jsonl")
    lines = [json.loads(line) for line in scored.read_text().splitlines()]
    assert [bool(line["resps"][0][0]) for line in lines] == [True] * 6
