# SPDX-License-Identifier: Apache-2.0
"""Words, files, several answers and help of the command line, in the process of the tests."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from diffulex.config.flags import Parser, UsageError
from diffulex.tools.cli import build_parser, main
from diffulex.tools.completion import script
from diffulex.tools.prompts import read_prompts


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command line and returns (exit code, output, errors)."""

    def run(*arguments: object, stdin: str | None = None) -> tuple[int, str, str]:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main([str(item) for item in arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


class TestWords:
    def test_model_and_prompt(self, run, tiny_model):
        flag = run("generate", "--model", tiny_model, "--max-tokens", 4, "abc")
        for words in (
            (tiny_model, "abc", "--max-tokens", 4),
            (tiny_model, "--max-tokens", 4, "abc"),
            ("--max-tokens", 4, tiny_model, "abc"),
        ):
            assert run("generate", *words)[:2] == flag[:2]
        assert flag[0] == 0

    def test_one_word_that_names_a_model_leaves_the_prompt_to_standard_input(self, run, tiny_model):
        expected = run("generate", tiny_model, "abc", "--max-tokens", 4)
        assert run("generate", tiny_model, "--max-tokens", 4, stdin="abc\n")[:2] == expected[:2]
        by_flag = run("generate", tiny_model, "--prompt", "abc", "--max-tokens", 4)
        assert by_flag[:2] == expected[:2]

    def test_one_word_beside_a_prompt_is_the_model(self, tmp_path):
        (tmp_path / "p.txt").write_text("a\u2028b\x0cc\nd\n", encoding="utf-8")
        for flags, expected in (
            (["--prompt", "Hi"], ["Hi"]),
            (["--prompts-file", str(tmp_path / "p.txt")], ["a\u2028b\x0cc", "d"]),
        ):
            line = ["generate", "org/model", *flags]
            options = build_parser("generate").parse_with_file(line)
            assert read_prompts(options) == expected
            assert options.model == "org/model"

    @pytest.mark.parametrize("word", ["-", "- item", "--raw"])
    def test_late_words_may_begin_with_a_dash(self, tiny_model, word):
        rest = ["--", word] if word == "--raw" else [word]
        line = ["generate", str(tiny_model), "--max-tokens", "4", *rest]
        options = build_parser("generate").parse_with_file(line)
        assert options.words == [str(tiny_model), word]

    def test_chat(self, run, tiny_model):
        expected = run("chat", "--model", tiny_model, "--max-tokens", 4, stdin="abc\n")
        assert run("chat", tiny_model, "--max-tokens", 4, stdin="abc\n")[:2] == expected[:2]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["generate", "a", "b", "c"], "expected MODEL and PROMPT (in quotes), got 3 words"),
            (["generate", "--model", "x", "y", "z"], "MODEL or --model, got both 'y' and 'x'"),
            (["chat", "a", "b"], "expected one MODEL, got 'a' 'b'"),
            (["eval", "a", "--model", "b"], "expected MODEL or --model, got both 'a' and 'b'"),
            (["generate", "demo", "hi", "--prompt", "x"], "got both PROMPT and --prompt"),
            (["complete", "bash"], "nearest is completion, got 'complete'"),
            (["bench", "srve"], "argument BENCHMARK: expected one of eval, tasks, "),
            (["bench", "srve"], "nearest is serve, got 'srve'"),
            (["edge", "exprot"], "nearest is export, got 'exprot'"),
            (["help", "evla"], "nearest is eval, got 'evla'"),
            (["generate", "--log-level", "wraning", "x"], "nearest is warning, got 'wraning'"),
            (["--versoin"], "command: expected one of generate, chat, "),
        ],
    )
    def test_errors(self, run, words, message):
        code, _, errors = run(*words)
        assert code == 2
        assert message in errors
        assert errors.count("\n") == 1


class TestSeveralAnswers:
    def test_json_has_every_answer_of_every_prompt(self, run, tiny_model, tmp_path):
        (tmp_path / "p.txt").write_text("abc\n\nhello\n")
        common = ("generate", tiny_model, "--max-tokens", 5, "--temperature", 1, "--seed", 3)
        code, text, _ = run(*common, "--prompts-file", tmp_path / "p.txt", "--n", 2, "--json")
        records = [json.loads(line) for line in text.splitlines()]
        assert code == 0
        assert [(r["prompt"], r["choice"]) for r in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert records[0]["text"] != records[1]["text"]
        for record in records:
            assert record["usage"]["completion_tokens"] == len(record["token_ids"]) <= 5
            assert "logprobs" not in record
        again = run(*common, "--prompts-file", tmp_path / "p.txt", "--n", 2, "--json")[1]
        assert again == text

    def test_text_has_headings_and_logprobs_are_a_table(self, run, tiny_model, tmp_path):
        (tmp_path / "p.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "hello"}\n')
        code, text, _ = run(
            *("generate", tiny_model, "--max-tokens", 3, "--ignore-eos", "--logprobs", 1),
            *("--prompts-file", tmp_path / "p.jsonl"),
        )
        assert code == 0
        assert text.startswith("==> prompt 1, answer 1 <==\n")
        assert "==> prompt 2, answer 1 <==\n" in text
        table = text.split("forward  logprob  token")[1].splitlines()
        assert len([line for line in table if line.strip()[:1].isdigit()]) == 3

    def test_logprobs_of_one_answer_agree_with_json(self, run, tiny_model):
        common = ("generate", tiny_model, "abc", "--max-tokens", 3, "--ignore-eos", "--logprobs", 2)
        lines = run(*common)[1].splitlines()[-3:]
        record = json.loads(run(*common, "--json")[1])
        for line, item in zip(lines, record["logprobs"], strict=True):
            step, logprob = line.split()[:2]
            assert int(step) == item["step"]
            assert float(logprob) == pytest.approx(item["logprob"], abs=1e-3)
            assert len(item["top"]) == 2

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.txt", "\n \n", "expected a prompt in"),
            ("b.jsonl", '{"text": "x"}\n', "line 1: expected an object with a text as prompt"),
            ("c.jsonl", "no json\n", "line 1: expected an object with a text as prompt"),
            ("missing", None, "--prompts-file: cannot read"),
        ],
    )
    def test_bad_files(self, run, tmp_path, name, content, message):
        if content is not None:
            (tmp_path / name).write_text(content)
        code, _, errors = run("generate", "--prompts-file", tmp_path / name)
        assert code == 2
        assert message in errors

    def test_denoising_of_several_is_refused(self, run, tiny_model):
        code, _, errors = run("generate", tiny_model, "a", "--n", 2, "--show-denoising")
        assert code == 2
        assert "--show-denoising: expected one answer" in errors


class TestConfigFile:
    def test_keys_are_flags_and_the_line_wins(self, tmp_path):
        path = tmp_path / "c.yaml"
        path.write_text(
            "model: other\nmax_tokens: 5\nstop: [a, b]\nenforce-eager: true\ntemperature: 0.5\n"
        )
        line = ["generate", "--config", str(path), "--temperature", "1", "--stop", "c", "hi"]
        options = build_parser("generate").parse_with_file(line)
        assert (options.model, options.max_tokens, options.temperature) == ("other", 5, 1.0)
        assert options.stop == ["c"]
        assert options.enforce_eager is True
        assert options.from_file == {"model", "max_tokens", "enforce_eager"}

    def test_the_model_of_a_file_gives_way_to_a_word(self, run, tiny_model, tmp_path):
        path = tmp_path / "c.yaml"
        path.write_text("model: no/such\nmax_tokens: 4\n")
        code, text, _ = run("generate", tiny_model, "abc", "--config", path)
        assert code == 0
        assert text == run("generate", tiny_model, "abc", "--max-tokens", 4)[1]

    def test_a_prompt_of_a_file_gives_way_to_the_line(self, tmp_path):
        path = tmp_path / "c.yaml"
        path.write_text("prompt: hello\n")
        line = ["generate", "--config", str(path)]
        for words, expected in (([], ["hello"]), (["other"], ["other"])):
            options = build_parser("generate").parse_with_file([*line, *words])
            assert read_prompts(options) == expected

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("max_token: 4\n", "expected a known key, nearest is 'max-tokens', got 'max_token'"),
            ("- 1\n", r"expected a map of settings, got \[1\]"),
            ("ignore_eos: 3\n", "expected true or false as ignore-eos, got 3"),
        ],
    )
    def test_errors(self, tmp_path, content, message):
        path = tmp_path / "c.yaml"
        path.write_text(content)
        with pytest.raises(UsageError, match=message):
            build_parser("chat").parse_with_file(["chat", "--config", str(path)])

    def test_a_command_below_a_command_has_it(self, tmp_path):
        path = tmp_path / "c.yaml"
        path.write_text("num_prompts: 3\nsweep: null\n")
        line = ["bench", "serve", "--config", str(path), "--seed", "5"]
        options = build_parser("bench").parse_with_file(line)
        assert (options.num_prompts, options.seed) == (3, 5)

    def test_what_a_command_requires_may_be_there(self, tmp_path):
        path = tmp_path / "c.yaml"
        path.write_text("quantization: int8\n")
        words = ["quantize", "demo", "out", "--config", str(path)]
        assert build_parser("quantize").parse_with_file(words).quantization == "int8"
        path.write_text("ignore: [x]\n")
        with pytest.raises(UsageError, match="required: --quantization"):
            build_parser("quantize").parse_with_file(words)

    def test_every_command_with_settings_takes_a_file(self):
        without = {
            name
            for name, parser in PARSERS.items()
            if not {"config", "config_file"} & set(parser.names())
        }
        groups = {"", "bench", "edge", "omni"}
        shown = {"doctor", "info", "completion", "trace", "edge info", "edge backends"}
        of_runs = {"bench tasks", "bench report", "bench compare", "bench trace"}
        assert without == groups | shown | of_runs

    def test_commands_without_settings_refuse_it(self):
        with pytest.raises(UsageError, match="got '--config'"):
            build_parser("doctor").parse_with_file(["doctor", "--config", "x"])


def parsers_of(parser: Parser, *names: str) -> Iterator[tuple[str, Parser]]:
    """The words of a command and its parser, if that has help, and those of the commands below it."""
    if not parser.add_help:
        return
    yield " ".join(names), parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from parsers_of(child, *names, name)


PARSERS = dict(parsers_of(build_parser()))


class TestHelp:
    def test_there_is_help_for_every_command(self):
        assert {"omni bench", "edge export", "bench serve", "generate", ""} <= set(PARSERS)

    @pytest.mark.parametrize("command", PARSERS)
    def test_every_command_fits_a_screen(self, command, monkeypatch):
        """Also the long help has no line that a terminal would break."""
        monkeypatch.setenv("COLUMNS", "80")
        parser = PARSERS[command]
        short, full = parser.format_help(), parser.format_help_all()
        assert len(short.splitlines()) <= 50
        assert max(map(len, (short + full).splitlines())) <= 80
        assert ("--help-all" in short) is (short != full)

    @pytest.mark.parametrize(
        "words",
        [
            (),
            ("doctor",),
            ("trace",),
            ("quantize",),
            ("bench", "compare"),
            ("omni",),
            ("edge", "info"),
        ],
    )
    def test_commands_without_more_flags_take_the_long_form_as_well(self, run, words):
        assert run(*words, "--help-all") == run(*words, "--help")

    def test_many_choices_stand_in_the_long_help(self, run):
        text = " ".join(run("bench", "eval", "--help-all")[1].split())
        assert "--moe-gemm-impl NAME [triton] [one of triton, vllm, " in text
        assert "--page-size NAME [32] [one of 4, 8, 16, " in text

    @pytest.mark.parametrize("command", ["generate", "chat", "eval", "serve"])
    def test_one_screen_and_the_rest_on_request(self, run, command, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        code, short, _ = run(command, "--help")
        assert code == 0
        assert len(short.splitlines()) <= 50
        assert max(map(len, short.splitlines())) <= 80
        assert "--help-all" in short
        assert "--run-ahead" not in short
        code, full, _ = run(command, "--help-all")
        assert code == 0
        assert "--run-ahead" in full
        assert "--log-level" in full

    @pytest.mark.parametrize("command", ["eval", "throughput"])
    def test_benchmarks_have_a_screen_too(self, run, command, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        code, short, _ = run("bench", command, "--help")
        assert (code, len(short.splitlines()) <= 50) == (0, True)
        assert max(map(len, short.splitlines())) <= 80
        full = run("bench", command, "--help-all")[1]
        assert len(full) > 2 * len(short)
        assert "--page-size" in full

    def test_temperature_stands_with_sampling(self, run):
        text = run("generate", "--help")[1]
        sampling = text.split("\nsampling:")[1].split("\nengine options:")[0]
        for flag in ("--temperature", "--top-p", "--seed", "--max-tokens", "--stop"):
            assert flag in sampling

    @pytest.mark.parametrize("flag", ["--help", "--help-all"])
    def test_help_of_eval_says_how_tasks_are_run(self, run, flag):
        text = " ".join(run("eval", flag)[1].split())
        assert "With --dataset, --preset, --resume it runs tasks instead: diffulex bench" in text

    @pytest.mark.parametrize("command", ["serve", "omni", "edge", "bench"])
    def test_help_needs_no_extra(self, run, command):
        """In a process in which no package of an extra can be imported."""
        names = (
            "zmq msgpack msgspec fastapi uvicorn pydantic diffusers accelerate PIL executorch yaml"
        )
        code = (
            f"import sys; sys.modules.update(dict.fromkeys({names.split()!r}))\n"
            "from diffulex.tools.cli import main; sys.exit(main(sys.argv[1:]))"
        )
        words = [command, "generate", "--help"] if command == "omni" else [command, "--help"]
        result = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(f"usage: diffulex {command} ")

    def test_a_misspelt_task_does_not_only_ask_for_a_package(self, run, monkeypatch):
        monkeypatch.setitem(sys.modules, "lm_eval", None)
        monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
        code, _, errors = run("eval", "--dataset", "smoke_arit", "--model-path", "demo")
        assert (code, errors.count("\n")) == (2, 1)
        assert "a task of `diffulex bench tasks`, nearest is smoke_arith, or the package" in errors

    def test_help_of_a_command_by_name(self, run):
        assert run("help", "chat")[1] == run("chat", "--help")[1]
        assert run("help", "bench", "serve")[1] == run("bench", "serve", "--help")[1]

    def test_commands_of_commands_alone_print_their_help(self, run):
        for name in ("bench", "edge", "omni"):
            code, text, errors = run(name)
            assert (code, errors) == (0, "")
            assert text == run(name, "--help")[1]
            assert text.startswith(f"usage: diffulex {name} ")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_every_command_and_flag(shell):
    pytest.importorskip("shtab", reason="shtab, a dependency of the package, is not installed")
    text = script(build_parser(), shell)
    words = ("generate", "serve", "--prompts-file", "--run-ahead", "--max-queue-size")
    for word in (*words, "--num-inference-steps", "--hqq"):  # also those of omni and edge
        assert word in text
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=text.encode(), check=True)
