# SPDX-License-Identifier: Apache-2.0
"""diffulex-edge-run: answers and ids of the engine over the same bundle, bad input, an interrupt."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from diffulex import Diffulex, SamplingParams
from diffulex.checkpoint.tokenizer import Tokenizer
from fixtures.edge import DEMO, questions
from fixtures.extras import need_extra

if TYPE_CHECKING:
    from collections.abc import Sequence

need_extra("edge", "executorch", "torchao")

ROOT = Path(__file__).resolve().parents[3]
NUM_PROBLEMS = 8
#: "Tom has 3 apples. He buys 4 more apples. ..." in the chat template of the bundled model.
PROMPT = (
    "637 285 198 429 294 220 18 388 13 412 448 220 19 333 388 13 301 291 388 330 475 "
    "322 334 30 638 198 637 288 198"
)


@pytest.fixture(scope="session")
def runner() -> Path:
    """The program: that of DIFFULEX_EDGE_RUN, or of a build of this tree."""
    given = os.environ.get("DIFFULEX_EDGE_RUN")
    found = (
        [Path(given)]
        if given
        else sorted(ROOT.glob("build/cp*/examples/edge_runner/diffulex-edge-run"))
    )
    if not found:
        reason = "diffulex-edge-run is not built: install executorch, then build this tree again"
        if "edge" in os.environ.get("DIFFULEX_REQUIRE_EXTRAS", "").split(","):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found[-1]


@pytest.fixture(scope="session")
def text_runner(runner, bundle) -> Path:
    """The program, if it was built with the tokenizers library."""
    result = run(runner, bundle("demo"), "--tokenize", "--prompt", "a")
    if "expected a build with the tokenizers library" in result.stderr:
        reason = "diffulex-edge-run takes no text: scripts/build_tokenizers.sh, then build it again"
        if "edge" in os.environ.get("DIFFULEX_REQUIRE_EXTRAS", "").split(","):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return runner


def run(runner: Path, *arguments: Any, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(runner), *map(str, arguments)]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=120, check=False
    )


def prompt_ids(engine: Diffulex) -> list[list[int]]:
    chats = [[{"role": "user", "content": text}] for text in questions(DEMO, NUM_PROBLEMS)]
    return [engine.tokenizer.apply_chat_template(chat) for chat in chats]


def assert_repeats(
    runner: Path, bundle: Path, flags: Sequence[Any], params: dict[str, Any], **settings: Any
) -> None:
    with Diffulex(str(bundle), **settings) as engine:
        prompts = prompt_ids(engine)
        sampling = SamplingParams(max_tokens=96, **params)
        expected = [list(engine.generate([ids], sampling)[0].token_ids) for ids in prompts]
    text = "\n".join(" ".join(map(str, ids)) for ids in prompts)
    result = run(
        runner,
        bundle,
        "--ids",
        "-",
        "--json",
        "--max-tokens",
        96,
        "--threads",
        1,
        *flags,
        text=text,
    )
    assert (result.returncode, result.stderr) == (0, "")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["token_ids"] for answer in answers] == expected
    assert any(expected)


@pytest.mark.parametrize("buffer_size", [1, 4])
def test_answers_as_the_engine(runner, bundle, buffer_size):
    assert_repeats(
        runner, bundle("demo"), ["--buffer-size", buffer_size], {}, buffer_size=buffer_size
    )


def test_draws_as_the_engine(runner, bundle):
    flags = ["--temperature", 0.7, "--top-p", 0.9, "--seed", 3]
    assert_repeats(runner, bundle("demo"), flags, {"temperature": 0.7, "top_p": 0.9, "seed": 3})


def test_a_bundle_has_the_settings_of_its_program(bundle):
    path = bundle("demo")
    facts = json.loads((path / "edge.json").read_text())
    conf = (path / "session.conf").read_text()
    assert f"max_model_len = {facts['max_model_len']}\n" in conf
    assert f"mask_token_id = {facts['mask_token_id']}\n" in conf


def test_stats_are_one_line(runner, bundle):
    result = run(runner, bundle("demo"), "--ids", PROMPT, "--stats", "--threads", 1)
    assert result.returncode == 0
    assert re.fullmatch(r"[\d ]+\n", result.stdout)
    assert re.fullmatch(r"prompt \d+ tokens, answer \d+ tokens in .* MB\n", result.stderr)


def test_stats_are_an_object_with_json(runner, bundle):
    flags = ["--ids", "-", "--stats", "--json", "--threads", 1, "--max-tokens", 24]
    result = run(runner, bundle("demo"), *flags, text=f"{PROMPT}\n{PROMPT}\n")
    assert (result.returncode, result.stderr.count("\n")) == (0, 1)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    found = json.loads(result.stderr)
    assert found["prompt_tokens"] == 2 * len(PROMPT.split())
    assert found["generated_tokens"] == sum(len(answer["token_ids"]) for answer in answers)
    assert found["nfe"] == sum(answer["nfe"] for answer in answers)
    moments = ("model_load_start", "model_load_end", "inference_start", "prompt_eval_end")
    times = [found[f"{name}_ms"] for name in (*moments, "first_token", "inference_end")]
    assert times == sorted(times)
    assert found["SCALING_FACTOR_UNITS_PER_SECOND"] == 1000
    assert 0 < found["aggregate_sampling_time_ms"] < times[-1]
    assert found["peak_rss_mb"] > 5


def test_errors_are_one_line(runner, bundle, tmp_path):
    path = bundle("demo")
    program = (path / "model.pte").read_bytes()
    conf = (path / "session.conf").read_text()
    (tmp_path / "cut.pte").write_bytes(program[: len(program) // 2])
    (tmp_path / "foreign.pte").write_bytes(b"no program" * 10)
    (tmp_path / "session.conf").write_text(conf)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/session.conf").write_text(conf.replace("top_k", "top_q"))
    damaged = bytearray(program)
    damaged[64:4096] = bytes(byte ^ 0xFF for byte in program[64:4096])
    (tmp_path / "damaged.pte").write_bytes(damaged)
    for arguments, expected in (
        ([tmp_path / "damaged.pte", "--ids", "1"], "expected an undamaged program"),
        ([tmp_path / "cut.pte", "--ids", "1"], "the file is cut short"),
        ([tmp_path / "foreign.pte", "--ids", "1"], "expected an ExecuTorch program"),
        ([tmp_path, "--ids", "1"], "model.pte: expected a readable program, got none"),
        ([tmp_path / "old", "--ids", "1"], "expected an integer as top_k, got none"),
        ([path / "none", "--ids", "1"], "session.conf: expected a readable file, got none"),
        ([path, "--ids", ""], "prompt"),
        ([path, "--ids", "1,x"], 'expected token ids, or -, got "1,x"'),
        ([path, "--ids", "1", "--temperature", "-1"], "temperature"),
        ([path, "--ids", "1", "--buffer-size", "99"], "buffer_size"),
        ([path, "--ids", "1", "--buffer-size", "0"], "buffer_size"),
        ([path, "--ids", "1", "--prompt", "a"], "expected a text or --ids, got both"),
        ([path, "--idss", "1"], "expected a known flag, got --idss"),
        ([path, "--ids", " ".join(["1"] * 600)], "max_model_len"),
    ):
        result = run(runner, *arguments)
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        assert result.stderr.startswith("diffulex-edge-run: ")
        assert result.stderr.count("\n") == 1
        assert expected in result.stderr


#: What byte-level vocabularies, their splits and the library below have trouble with.
TEXTS = (
    "!", "!?!?...---", "a!", "Don't we'll I'VE it's", "a  b   c\td", "   leading and trailing   ",
    "x=1234567*3.14; if(a<b){return -1;}", "naïve café — “quotes” …", "日本語のテキスト 数字１２３",
    "🙂👩\u200d👧 emoji", "مرحبا", "a\u0301 \u00bd \u2167 \u200b", "no\u00a0break and\u2003em",
)  # fmt: skip


def test_text_is_tokenised_as_in_python(text_runner, bundle):
    tokenizer = Tokenizer.from_dir(bundle("demo"))
    texts = [*TEXTS, *questions(DEMO, 100)]
    raw = run(text_runner, bundle("demo"), "--tokenize", "--raw", text="\n".join(texts))
    assert (raw.returncode, raw.stderr) == (0, "")
    found = [[int(word) for word in line.split()] for line in raw.stdout.splitlines()]
    assert found == [tokenizer.encode(text) for text in texts]
    chat = run(text_runner, bundle("demo"), "--tokenize", text="\n".join(texts))
    found = [[int(word) for word in line.split()] for line in chat.stdout.splitlines()]
    assert found == [
        tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts
    ]


def test_blank_lines_are_tokenised_as_empty_and_blank_texts(text_runner, bundle):
    tokenizer = Tokenizer.from_dir(bundle("demo"))
    texts = ["", "Tom has 3 apples.", "", " ", " \t", "Tom"]
    raw = run(text_runner, bundle("demo"), "--tokenize", "--raw", text="\n".join(texts))
    assert (raw.returncode, raw.stderr) == (0, "")
    found = [[int(word) for word in line.split()] for line in raw.stdout.splitlines()]
    assert found == [tokenizer.encode(text) for text in texts]
    assert (found[0], found[2]) == ([], [])
    chat = run(text_runner, bundle("demo"), "--tokenize", text="\n".join(texts) + "\n\n")
    found = [[int(word) for word in line.split()] for line in chat.stdout.splitlines()]
    assert found == [
        tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in [*texts, ""]
    ]


def test_text_is_answered_as_by_the_engine(text_runner, bundle):
    texts = questions(DEMO, NUM_PROBLEMS)
    with Diffulex(str(bundle("demo"))) as engine:
        params = SamplingParams(max_tokens=96)
        chats = [[{"role": "user", "content": text}] for text in texts]
        expected = [engine.chat(chat, params, summary=False) for chat in chats]
    flags = ["--max-tokens", 96, "--threads", 1]
    result = run(text_runner, bundle("demo"), "--json", *flags, text="\n".join(texts))
    assert (result.returncode, result.stderr) == (0, "")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(answer["text"], answer["token_ids"]) for answer in found] == [
        (answer.text, list(answer.token_ids)) for answer in expected
    ]
    one = run(text_runner, bundle("demo"), "--prompt", texts[0], *flags)
    assert (one.returncode, one.stdout) == (0, expected[0].text + "\n")


def test_wrong_texts_are_one_line(text_runner, bundle, tmp_path):
    (tmp_path / "session.conf").write_bytes((bundle("demo") / "session.conf").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    path = bundle("demo")
    for arguments, expected in (
        ([path, "--prompt", "word " * 600], "max_model_len"),
        ([path, "--raw", "--prompt", ""], "expected at least one prompt token, got 0"),
        ([tmp_path, "--prompt", "a"], "tokenizer.json: expected a byte-pair tokenizer"),
        ([path, "--tokenize", "--ids", "1"], "--tokenize: expected texts"),
    ):
        result = run(text_runner, *arguments)
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        assert result.stderr.startswith("diffulex-edge-run: ")
        assert result.stderr.count("\n") == 1
        assert expected in result.stderr


def test_blank_lines_are_skipped_and_errors_name_theirs(runner, bundle):
    command = [bundle("demo"), "--ids", "-", "--json", "--max-tokens", 8]
    result = run(runner, *command, text=f"{PROMPT}\n\n \t\r\n{PROMPT}\n\n")
    assert (result.returncode, result.stderr) == (0, "")
    first, second = (json.loads(line)["token_ids"] for line in result.stdout.splitlines())
    assert first == second
    result = run(runner, *command, text=f"{PROMPT}\n\n1 x\n")
    assert result.returncode == 2
    assert result.stderr == ('diffulex-edge-run: line 3: token ids: expected integers, got "x"\n')


def test_an_interrupt_ends_the_answer(runner, bundle):
    flags = ["--ids", PROMPT, "--ignore-eos", "--max-tokens", "400", "--threads", "1"]
    command = [str(runner), str(bundle("demo")), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as run:
        assert run.stdout is not None
        text = run.stdout.read(1)
        run.send_signal(signal.SIGINT)
        text += run.stdout.read()
        run.wait(timeout=60)
    assert run.returncode == 130
    assert 0 < len(text.split()) < 400
