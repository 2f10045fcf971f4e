# SPDX-License-Identifier: Apache-2.0
"""lm-eval over the engine in this process, and over a server: the same answers and scores."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffulex.bench.__main__ import main
from diffulex.bench.evaluate import read_problems
from diffulex.bench.harness import EvaluationError
from diffulex.bench.likelihood import Pair, request_id
from diffulex.bench.model_args import encode_model_arg_value
from diffulex.errors import ConfigError
from fixtures.extras import need_extra
from fixtures.live_server import running_server
from fixtures.lm_eval_tasks import EVAL

need_extra("eval", "lm_eval", "datasets", "evaluate", "sacrebleu", "sqlitedict", "pytablewriter")

pytestmark = pytest.mark.usefixtures("without_the_tasks_of_lm_eval")


@pytest.fixture(scope="module")
def model() -> Any:
    from diffulex.bench.lm_eval_model import DiffulexLM

    thresholds = encode_model_arg_value({"accept_threshold": 0.9})
    text = f"pretrained=demo,device=cpu,decoding_thresholds={thresholds},max_length=512"
    model = DiffulexLM.create_from_arg_string(text, {"batch_size": 1, "device": "cuda:0"})
    yield model
    model.close()


@pytest.fixture(scope="module")
def likely() -> Any:
    """A model with few samples and short windows."""
    from diffulex.bench.lm_eval_model import DiffulexLM

    text = "pretrained=demo,device=cpu,max_length=128,mc_num=16,mc_batch_size=8,seed=4"
    model = DiffulexLM.create_from_arg_string(text)
    yield model
    model.close()


def _requests(arguments: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type="generate_until", doc={}, arguments=item, idx=index)
        for index, item in enumerate(arguments)
    ]


def _prompts(model: Any, count: int = 4) -> list[str]:
    questions = [problem.question for problem in read_problems(None)[:count]]
    return [
        model.apply_chat_template([{"role": "user", "content": question}]) for question in questions
    ]


def test_answers_come_in_the_order_of_the_requests(model: Any) -> None:
    prompts = _prompts(model)
    asked = [(prompt, {"until": ["\n\n"], "max_gen_toks": 64}) for prompt in prompts]
    answers = model.generate_until(_requests(asked))
    alone = [model.generate_until(_requests([item]))[0] for item in asked]
    assert answers == alone
    assert all("####" in answer for answer in answers)
    assert model.generate_until([]) == []


def test_a_task_says_how_an_answer_ends(model: Any) -> None:
    (prompt,) = _prompts(model, 1)
    settings = {"max_gen_toks": 64, "until": []}
    (whole,) = model.generate_until(_requests([(prompt, settings)]))
    (cut,) = model.generate_until(_requests([(prompt, {**settings, "until": ["=", ""]})]))
    assert cut == whole.partition("=")[0]
    (short,) = model.generate_until(_requests([(prompt, {"max_gen_toks": 4})]))
    assert len(model.tok_encode(short)) <= 4


def test_what_lm_eval_asks_about_a_model(model: Any) -> None:
    assert (model.rank, model.world_size, model.device) == (0, 1, "cpu")
    assert model.batch_size == model.engine.config.scheduler.max_num_reqs
    assert model.tokenizer_name == "demo"
    assert model.tok_decode(model.tok_encode("3 apples")) == "3 apples"
    assert model.engine.config.scheduler.max_model_len == 512
    assert "messages" in model.chat_template(True)
    # The bundled template knows user turns alone.
    history = [{"role": "user", "content": "1 + 1?"}]
    assert model.apply_chat_template(history, add_generation_prompt=False).endswith("1 + 1?")


def test_calls_are_pooled_and_failures_counted(model: Any) -> None:
    before = model.stats()
    (prompt,) = _prompts(model, 1)
    model.generate_until(_requests([(prompt, {"max_gen_toks": 8})]))
    after = model.stats()
    assert after["total_samples"] == before["total_samples"] + 1
    assert after["total_tokens"] > before["total_tokens"]
    with pytest.raises(EvaluationError, match="got 1 of 2: prompt: expected at most 511 tokens"):
        model.generate_until(
            _requests([(prompt, {"max_gen_toks": 8}), ("1 " * 2000, {"max_gen_toks": 8})])
        )


def _instances(kind: str, arguments: list[tuple[str, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(
            request_type=kind, doc={}, arguments=item, idx=index, metadata=("own_choices", index, 1)
        )
        for index, item in enumerate(arguments)
    ]


def _direct(model: Any, pairs: list[tuple[list[int], list[int]]], **options: Any) -> Any:
    sequences = [[*context, *continuation] for context, continuation in pairs]
    ranges = [(len(context), len(context) + len(continuation)) for context, continuation in pairs]
    ids = [request_id([*context, *rest], len(context)) for context, rest in pairs]
    return model.engine.score(sequences, ranges, request_ids=ids, **options)


def test_likelihoods_are_the_scores_of_the_engine(
    likely: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffulex.log._warned", set())
    prompt = _prompts(likely, 1)[0].rstrip()
    texts = [" 8 - 3 = 5", " 8 - 3 = 6", "1"]
    asked = [(prompt, texts[0]), (prompt, texts[1]), ("", texts[2]), ("3 + 4 = ", "7")]
    with caplog.at_level("WARNING"):
        answers = likely.loglikelihood(_instances("loglikelihood", asked))
    encode = likely.tokenizer.encode
    context = likely.tok_encode(prompt)
    first = likely.tokenizer.backend.bos_token_id or likely.tokenizer.backend.eos_token_id
    bare = likely.tok_encode("3 + 4 =")
    whole = likely.tok_encode("3 + 4 = 7")
    pairs = [
        (context, likely.tok_encode(prompt + texts[0])[len(context) :]),
        (context, likely.tok_encode(prompt + texts[1])[len(context) :]),
        ([first], encode(texts[2], add_special_tokens=False)),
        (bare, whole[len(bare) :]),
    ]
    expected = _direct(likely, pairs, mc_num=16, batch_size=8, seed=4)
    assert [value for value, _ in answers] == expected.values.tolist()
    assert all(is_greedy is False for _, is_greedy in answers)
    assert likely.loglikelihood([]) == []
    assert "check_greedy is off" in caplog.text
    assert "likelihoods are meant for base checkpoints" in caplog.text


def test_likelihoods_cost_what_the_statistics_say(likely: Any, tmp_path: Path) -> None:
    before = likely.stats().get("likelihood", {"requests": 0, "forward_passes": 0, "seconds": 0})
    likely.loglikelihood(_instances("loglikelihood", [("1 + 1 =", " 2"), ("1 + 1 =", " 3")]))
    likely._save_dir = tmp_path
    likely.loglikelihood(_instances("loglikelihood", [("1 + 1 =", " 4")]))
    likely._save_dir = None
    after = json.loads((tmp_path / "diffulex_stats.json").read_text())["likelihood"]
    assert after["requests"] == before["requests"] + 3
    assert after["forward_passes"] >= before["forward_passes"] + 2
    assert after["seconds"] > before["seconds"]
    assert after["value"] == "lower bound of the log-likelihood, in expectation"
    assert (after["mc_num"], after["mc_batch_size"], after["seed"]) == (16, 8, 4)
    assert after["block_grid"] == 8


def test_greedy_texts_are_recognised_on_request(likely: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(likely._config.eval, "check_greedy", True)
    context = "8 - 3 ="
    known, vocab_size = likely.tok_encode(context), likely.tokenizer.tokenizer_vocab_size
    # Every token but the mask in the place of one: the likeliest of them is that of greedy decoding.
    mask = likely.engine.config.model.mask_token_id
    tokens = [token for token in range(vocab_size) if token != mask]
    values = _direct(likely, [(known, [token]) for token in tokens], mc_num=1).values
    greedy = likely.tokenizer.decode([tokens[int(values.argmax())]])
    assert greedy != " 2"
    asked = [(context, greedy), (context, " 2")]
    answers = likely.loglikelihood(_instances("loglikelihood", asked))
    assert [flag for _, flag in answers] == [True, False]


def test_rolling_likelihoods_are_sums_over_windows(likely: Any) -> None:
    """Every token once: one token before the first window, as much as fits before the last."""
    text = " ".join(problem.question for problem in read_problems(None)[:4])
    ids = likely.tokenizer.encode(text, add_special_tokens=False)
    most = likely.engine.config.scheduler.max_model_len
    assert most - 1 < len(ids) < 2 * (most - 1)
    first = likely.tokenizer.backend.bos_token_id or likely.tokenizer.backend.eos_token_id
    left = len(ids) - (most - 1)
    pairs = [([first], ids[: most - 1]), (ids[-most:-left], ids[-left:])]
    assert [len(a) + len(b) for a, b in pairs] == [most, most]
    expected = _direct(likely, pairs, mc_num=16, batch_size=8, seed=4)
    (value,) = likely.loglikelihood_rolling(_instances("loglikelihood_rolling", [(text,)]))
    assert value == pytest.approx(float(sum(expected.values.tolist())))
    assert likely.loglikelihood_rolling([]) == []


def test_likelihoods_that_cannot_be_had_are_errors(likely: Any, monkeypatch: Any) -> None:
    with pytest.raises(EvaluationError, match="expected 1 to 127 tokens to score in request 0"):
        likely.loglikelihood(_instances("loglikelihood", [("1 + 1 =", "")]))
    with pytest.raises(EvaluationError, match="expected 1 to 127 tokens to score in request 0"):
        likely.loglikelihood(_instances("loglikelihood", [("", " 12" * 200)]))
    mask = likely.engine.config.model.mask_token_id
    with pytest.raises(EvaluationError, match=r"expected no mask id .* to score in request 0"):
        likely._likelihood.score([Pair([1], [mask])])
    # A context that is too long is cut from the left, as it is for other models.
    long = ("9 " * 300 + "1 + 1 =", " 2")
    ((value, _),) = likely.loglikelihood(_instances("loglikelihood", [long]))
    context, whole = likely.tok_encode(long[0]), likely.tok_encode("".join(long))
    pair = (whole[-128 : len(context)], whole[len(context) :])
    assert value == _direct(likely, [pair], mc_num=16, batch_size=8, seed=4)[0]
    assert likely.stats()["likelihood"]["cut_contexts"] == 1
    engine = likely.engine
    traits = dataclasses.replace(engine.config.decoding.traits, has_canvas=True)
    monkeypatch.setattr(type(engine.config.decoding), "traits", traits)
    with pytest.raises(EvaluationError, match="task own_choices: expected a model that fills") as e:
        likely.loglikelihood(_instances("loglikelihood", [("1 + 1 =", " 2")]))
    assert "generative variant" in str(e.value)
    with pytest.raises(EvaluationError, match="task own_choices: expected a model that fills"):
        likely.loglikelihood_rolling(_instances("loglikelihood_rolling", [("1 + 1 =",)]))


def test_trajectories_are_kept_on_request(tmp_path: Path) -> None:
    from diffulex.bench.lm_eval_model import DiffulexLM
    from diffulex.trace.files import read_traces

    model = DiffulexLM(
        "demo", save_dir=str(tmp_path), device="cpu", save_trace="full", warmup_requests=1
    )
    try:
        prompts = _prompts(model, 2)
        asked = [(prompt, {"until": ["\n\n"], "max_gen_toks": 16}) for prompt in prompts]
        answers = model.generate_until(_requests(asked))
    finally:
        model.close()
    read = list(read_traces(tmp_path / "trace.jsonl"))
    assert [record["question"] for record, _ in read] == prompts
    assert [record["text"] for record, _ in read] == answers
    assert all(1 <= len(trajectory.tokens) <= 16 for _, trajectory in read)


def test_unknown_arguments_are_refused() -> None:
    from diffulex.bench.lm_eval_model import DiffulexLM

    with pytest.raises(ConfigError, match="model_args: expected a key of the engine"):
        DiffulexLM("demo", beams=3)


def _run(folder: Path, tasks: Path, model: str, arguments: str) -> tuple[float, list[str]]:
    """Score and answers of lm-eval's own command."""
    code = main(
        ["lm-eval", "--model", model, "--model_args", arguments, "--tasks", "own_words",
         "--include_path", str(tasks), "--output_path", str(folder), "--log_samples",
         "--apply_chat_template"]
    )  # fmt: skip
    assert code == 0
    (results,) = folder.rglob("results_*.json")
    (samples,) = folder.rglob("samples_*.jsonl")
    scores = json.loads(results.read_text())["results"]["own_words"]
    records = [json.loads(line) for line in samples.read_text().splitlines()]
    records.sort(key=lambda record: record["doc_id"])
    return scores["exact_match,none"], [record["resps"][0][0] for record in records]


@pytest.mark.slow
@pytest.mark.alone
def test_both_ways_of_lm_evals_command_score_the_same(tasks: Path, tmp_path: Path) -> None:
    here = _run(tmp_path / "here", tasks, "diffulex", "pretrained=demo,device=cpu")
    with running_server("--model", "demo", "--device", "cpu") as server:
        url = f"{server.url}/v1/chat/completions"
        arguments = f"model=demo,base_url={url},max_retries=1,num_concurrent=2"
        there = _run(tmp_path / "there", tasks, "local-chat-completions", arguments)
    assert here == there
    assert here[0] > 0.5


@pytest.mark.slow
def test_eval_hands_further_tasks_to_lm_eval(tasks: Path, tmp_path: Path) -> None:
    code = main(
        ["eval", "--model-path", "demo", "--model-name", "auto", "--decoding-strategy", "auto",
         "--dataset", "own_words", "--include-path", str(tasks), "--output-dir", str(tmp_path),
         "--engine-arg", "device=cpu", "--apply-chat-template", "--dataset-limit", "3"]
    )  # fmt: skip
    assert code == 0
    (run,) = tmp_path.iterdir()
    manifest = json.loads((run / "run.json").read_text())
    assert manifest["status"] == "done"
    assert manifest["engine"]["family"] == "sdar"
    assert json.loads((run / "diffulex_stats.json").read_text())["total_samples"] == 3
    assert list(run.rglob("results_*.json"))
    assert list(run.rglob("samples_own_words_*.jsonl"))
    assert "| own_words | exact_match | 3 |" in (run / "report.md").read_text()


def test_likelihoods_do_not_depend_on_what_is_scored_beside_them(likely: Any) -> None:
    asked = [("1 + 1 =", " 2"), ("1 + 1 =", " 3"), ("2 + 5 =", " 7 or 8"), ("", "4 = 4")]
    whole = likely.loglikelihood(_instances("loglikelihood", asked))
    rest = likely.loglikelihood(_instances("loglikelihood", asked[:0:-1]))
    for (value, _), (other, _) in zip(whole[:0:-1], rest, strict=True):
        assert other == pytest.approx(value, rel=2e-5, abs=1e-5)


def test_ctrl_c_keeps_the_likelihoods_that_are_there(
    likely: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lm_eval.api.model import CacheHook, CachingLM

    from diffulex.likelihood import scorer

    asked = [(f"{a} + {b} =", f" {a + b} or {b}") for a in range(4) for b in range(5)]
    texts = [("7 + 5 = 12 " * 60,), *((f"{n} apples and 5 pears",) for n in range(12))]
    whole = likely.loglikelihood(_instances("loglikelihood", asked))
    rolled = likely.loglikelihood_rolling(_instances("loglikelihood_rolling", texts))
    before = likely.stats()["likelihood"]
    flush, left = scorer.Scorer._flush, [0]

    def interrupted(self: Any, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        flush(self, *arguments)

    monkeypatch.setattr(scorer, "_GROUPS", 0.1)
    monkeypatch.setattr(likely, "_progress", "log")
    cached = CachingLM(likely, str(tmp_path / "cache.db"))
    try:
        for kind, items, expected, last in (
            ("loglikelihood", asked, whole, 2),
            ("loglikelihood_rolling", texts, rolled, 8),
        ):
            left[0] = last
            monkeypatch.setattr(scorer.Scorer, "_flush", interrupted)
            with caplog.at_level("INFO"), pytest.raises(KeyboardInterrupt):
                getattr(cached, kind)(_instances(kind, items))
            monkeypatch.setattr(scorer.Scorer, "_flush", flush)
            kept = len(cached.dbdict)
            assert 0 < kept < len(items)
            # The last line: there may be others, of every ten seconds.
            num_done, num_all = map(int, re.findall(r"likelihoods: (\d+)/(\d+) ", caplog.text)[-1])
            assert kept <= num_done < num_all
            caplog.clear()
            answers = getattr(cached, kind)(_instances(kind, items))
            np.testing.assert_allclose(answers, expected, rtol=2e-5, atol=1e-5)
            cached.dbdict.clear()
    finally:
        likely.set_cache_hook(CacheHook(None))
        cached.dbdict.close()
    # Every text once, whatever was interrupted.
    after = likely.stats()["likelihood"]
    assert after["requests"] - before["requests"] >= len(asked) + len(texts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--repeat", "2"), "repeat: expected 1 for own_words"),
        (("--dataset-data-files", "x.json"), "dataset_data_files: expected None for own_words"),
    ],
)
def test_settings_without_a_meaning_for_lm_eval_are_refused(
    flags: tuple[str, ...], message: str, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*EVAL, "--dataset", "own_words", "--include-path", str(tasks), *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_first_call_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffulex.bench.lm_eval_model import DiffulexLM
    from diffulex.bench.runner import BenchmarkRunner

    real, counts = BenchmarkRunner.run, []

    def counted(self: Any, prompts: Any, *rest: Any) -> Any:
        counts.append(len(prompts))
        return real(self, prompts, *rest)

    monkeypatch.setattr(BenchmarkRunner, "run", counted)
    model = DiffulexLM("demo", device="cpu", max_length=512, warmup_requests=1)
    asked = _requests([(prompt, {"max_gen_toks": 4}) for prompt in _prompts(model, 2)])
    for _ in range(2):
        model.generate_until(asked)
    assert counts == [1, 2, 2]
    assert model.stats()["total_samples"] == 4
    model.close()


@pytest.mark.slow
def test_bundled_tasks_may_stand_beside_those_of_lm_eval(
    tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tasks / "both.yaml").write_text(
        "task: ours\ndataset_path: json\ndataset_kwargs: {data_files: items.jsonl}\n"
        "test_split: train\noutput_type: generate_until\ndoc_to_text: '{{question}}'\n"
        "doc_to_target: '{{answer}}'\nmetadata: {chat: true}\n"
        "process_results: !function both.score\n"
    )
    (tasks / "both.py").write_text("def score(doc, answers):\n    return {'right': 1.0}\n")
    arguments = [
        *EVAL, "--dataset", "ours,own_words", "--include-path", str(tasks), "--dataset-limit", "2",
        "--max-tokens", "32", "--output-dir", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main([*arguments, "--no-use-run-subdirectory"]) == 2
    assert "use_run_subdirectory: expected true" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(arguments) == 0
    ours, theirs = sorted((tmp_path / "out").iterdir(), key=lambda path: len(path.name))
    assert "| ours | right | 2 |" in (ours / "report.md").read_text()
    assert "| own_words | exact_match | 2 |" in (theirs / "report.md").read_text()


@pytest.mark.slow
def test_eval_runs_likelihood_tasks_of_lm_eval(tasks: Path, tmp_path: Path) -> None:
    code = main(
        ["eval", "--model-path", "demo", "--model-name", "auto", "--decoding-strategy", "auto",
         "--dataset", "own_choices,own_rolling", "--include-path", str(tasks), "--output-dir",
         str(tmp_path), "--engine-arg", "device=cpu", "--mc-num", "8", "--mc-batch-size", "4"]
    )  # fmt: skip
    assert code == 0
    (run,) = tmp_path.iterdir()
    stats = json.loads((run / "diffulex_stats.json").read_text())["likelihood"]
    assert stats["requests"] == 9
    assert (stats["mc_num"], stats["mc_batch_size"], stats["seed"]) == (8, 4, 0)
    report = (run / "report.md").read_text()
    assert "| own_choices | acc | 3 |" in report
    assert "| own_rolling | word_perplexity (bound) | 3 |" in report
    assert "| likelihood: forward passes |" in report
    assert json.loads((run / "run.json").read_text())["config"]["eval"]["mc_num"] == 8


@pytest.mark.slow
def test_an_unknown_task_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model-path", "demo", "--dataset", "nothing", "--output-dir", str(tmp_path)]
    assert main(arguments) == 2
    assert "expected a bundled task or one of lm-eval, got 'nothing'" in capsys.readouterr().err
