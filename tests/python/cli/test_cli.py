# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: each test runs a separate process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import diffulex
from diffulex import Diffulex, SamplingParams
from diffulex.checkpoint.resolve import DEMO_PURPOSE, DEMO_QUESTION, demo_dir
from fixtures.checkpoints import MASK_ID
from fixtures.command_line import error_line

SUMMARY = re.compile(
    r"^\[(\d+) tokens, NFE (\d+), TPF (\d+\.\d\d), (\d+\.\d) tokens/s, (\w+)\]$", re.MULTILINE
)
needs_demo = pytest.mark.skipif(
    not (demo_dir() / "model.safetensors").is_file(), reason="the bundled model is not in this tree"
)


def expected_text(tiny_model, prompt, **params) -> str:
    with Diffulex(str(tiny_model), device="cpu") as engine:
        ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        return engine.generate([ids], SamplingParams(**params), summary=False)[0].text


class TestVersion:
    def test_output(self, run_cli):
        result = run_cli("--version")
        assert result.returncode == 0
        assert result.stdout.decode() == f"diffulex {diffulex.__version__}\n"

    def test_loads_no_torch(self):
        code = (
            "import sys; from diffulex.tools.cli import main; main(['--version']); "
            "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


class TestStreams:
    """Standard streams that are closed or full."""

    def shell(self, command: str) -> subprocess.CompletedProcess:
        text = f"{sys.executable} -m diffulex {command}"
        return subprocess.run(["bash", "-c", text], capture_output=True, timeout=180, check=False)

    @pytest.mark.parametrize(
        ("command", "message"),
        [
            ("--version >/dev/full", "standard output: No space left on device"),
            ("--version >&-", "standard output: expected an open stream, got a closed one"),
            ("generate --raw --model MODEL abc >/dev/full", "No space left on device"),
            ("doctor --help >/dev/full", "No space left on device"),
        ],
    )
    def test_output_that_cannot_be_written(self, tiny_model, command, message):
        result = self.shell(command.replace("MODEL", str(tiny_model)))
        assert message in error_line(result, code=1)

    @pytest.mark.parametrize("command", ["generate <&-", "chat <&-"])
    def test_closed_input(self, command):
        assert "standard input" in error_line(self.shell(command))

    def test_closed_error_stream(self, tiny_model):
        result = self.shell(f"generate --model {tiny_model} --max-tokens 4 abc 2>&-")
        assert result.returncode == 0
        assert result.stdout.decode() == expected_text(tiny_model, "abc", max_tokens=4) + "\n"

    def test_bare_command_prints_its_help(self, run_cli):
        result = run_cli()
        assert result.returncode == 0
        assert "generate" in result.stdout.decode()
        assert result.stderr == b""

    def test_output_encoding_without_the_characters(self, tiny_model):
        # The locale's encoding has no mask character.
        result = self.shell(f"generate --model {tiny_model} --max-tokens 4 --show-denoising abc")
        ascii_only = subprocess.run(
            [sys.executable, "-m", "diffulex", "generate", "--model", tiny_model,
             "--max-tokens", "4", "--show-denoising", "abc"],
            capture_output=True, check=False, timeout=180,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
        )  # fmt: skip
        assert result.returncode == ascii_only.returncode == 0, ascii_only.stderr
        assert b"   0 | ?" in ascii_only.stdout


class TestGenerate:
    def test_text_on_stdout_and_summary_on_stderr(self, run_cli, tiny_model):
        result = run_cli("generate", "--model", tiny_model, "--max-tokens", "13", "héllo")
        assert result.returncode == 0, result.stderr
        text = expected_text(tiny_model, "héllo", max_tokens=13)
        assert result.stdout.decode() == text + "\n"
        tokens, nfe, tpf, speed, reason = SUMMARY.search(result.stderr.decode()).groups()
        assert int(tokens) <= 13
        assert int(nfe) >= 1
        assert float(tpf) == pytest.approx(int(tokens) / int(nfe), abs=0.01)
        assert float(speed) > 0
        assert reason in ("max_new_tokens_reached", "eos_token_generated")

    def test_prompt_from_an_option_and_from_stdin_are_the_same(self, run_cli, tiny_model):
        common = ("generate", "--model", tiny_model, "--max-tokens", "6")
        first = run_cli(*common, "--prompt", "abc")
        second = run_cli(*common, stdin="abc\n")
        assert first.returncode == second.returncode == 0
        assert first.stdout == second.stdout

    def test_raw_prompt_skips_the_template(self, run_cli, tiny_model):
        result = run_cli("generate", "--model", tiny_model, "--max-tokens", "8", "--raw", "abc")
        with Diffulex(str(tiny_model), device="cpu") as engine:
            output = engine.generate("abc", SamplingParams(max_tokens=8), summary=False)[0]
        assert result.stdout.decode() == output.text + "\n"

    def test_engine_flags_reach_the_engine(self, run_cli, tiny_model):
        common = ("generate", "--model", tiny_model, "--max-tokens", "16", "--ignore-eos", "abc")
        one_by_one = run_cli(*common, "--accept-threshold", "1.0", "--block-size", "4")
        at_once = run_cli(*common, "--accept-threshold", "0.0", "--block-size", "4")
        slow, fast = (SUMMARY.search(r.stderr.decode()) for r in (one_by_one, at_once))
        assert int(slow[2]) > int(fast[2])

    def test_show_denoising_in_a_pipe(self, run_cli, tiny_model):
        result = run_cli(
            *("generate", "--model", tiny_model, "--max-tokens", "8", "--show-denoising", "abc")
        )
        assert result.returncode == 0, result.stderr
        frames, final = [], []
        for line in result.stdout.decode().split("\n"):
            (frames if re.match(r" *\d+ \| ", line) else final).append(line)
        assert "░" in frames[0]
        # One line per forward behind the masks at the start.
        nfe = int(SUMMARY.search(result.stderr.decode())[2])
        assert [int(line.split("|")[0]) for line in frames] == list(range(nfe + 1))
        text = expected_text(tiny_model, "abc", max_tokens=8)
        assert "\n".join(final) == text + "\n"

    @needs_demo
    def test_without_a_model_the_bundled_one_answers(self, run_cli):
        prompt = "Tom has 3 bags with 4 marbles each. Then he buys 5 more marbles. "
        result = run_cli("generate", prompt + "How many marbles does Tom have now?")
        assert result.returncode == 0, result.stderr
        assert "####" in result.stdout.decode()


class TestChat:
    def test_turns_reset_and_quit(self, run_cli, tiny_model):
        lines = ["abc", "", "abc", "/reset", "abc", "/quit", "never"]
        result = run_cli(
            *("chat", "--model", tiny_model, "--max-tokens", "8"), stdin="\n".join(lines)
        )
        assert result.returncode == 0, result.stderr
        assert len(SUMMARY.findall(result.stderr.decode())) == 3
        first = expected_text(tiny_model, "abc", max_tokens=8)
        with Diffulex(str(tiny_model), device="cpu") as engine:
            messages = [
                {"role": "user", "content": "abc"},
                {"role": "assistant", "content": first},
                {"role": "user", "content": "abc"},
            ]
            ids = engine.tokenizer.apply_chat_template(messages)
            output = engine.generate([ids], SamplingParams(max_tokens=8), summary=False)[0]
        # After the reset the first turn repeats.
        assert result.stdout.decode() == f"{first}\n{output.text}\n{first}\n"

    def test_unknown_command_and_too_long_turn_do_not_end_it(self, run_cli, tiny_model):
        stdin = "/what\n" + "x" * 600 + "\nabc\n"
        result = run_cli("chat", "--model", tiny_model, "--max-tokens", "4", stdin=stdin)
        errors = [x for x in result.stderr.decode().splitlines() if x.startswith("error: ")]
        assert result.returncode == 2
        assert "unknown command '/what'" in errors[0]
        assert "expected at most" in errors[1]
        assert result.stdout.decode() == expected_text(tiny_model, "abc", max_tokens=4) + "\n"

    @needs_demo
    def test_bundled_model_says_what_it_is_for(self, run_cli):
        """In the first line of chat, and in place of an empty answer to a free sentence."""
        result = run_cli("chat", stdin="hello\n")
        first, *others = result.stderr.decode().splitlines()
        assert first == DEMO_PURPOSE
        assert others[-1] == f"note: the answer is empty, {DEMO_PURPOSE}"
        result = run_cli("generate", "hello")
        assert DEMO_PURPOSE in result.stderr.decode()
        assert "####" in run_cli("generate", DEMO_QUESTION).stdout.decode()

    def test_other_models_say_nothing_of_the_kind(self, run_cli, tiny_model):
        result = run_cli("chat", "--model", tiny_model, "--max-tokens", "2", stdin="hello\n/help\n")
        assert DEMO_PURPOSE not in result.stderr.decode()
        assert "/reset forgets" in result.stderr.decode()

    def test_input_that_is_not_text_does_not_end_it(self, run_cli, tiny_model):
        stdin = b"\xff\xfe\nabc\n"
        result = run_cli("chat", "--model", tiny_model, "--max-tokens", "4", stdin=stdin)
        assert "expected UTF-8 text, got '\\udcff' at 0" in result.stderr.decode()
        assert result.stdout.decode() == expected_text(tiny_model, "abc", max_tokens=4) + "\n"

    @needs_demo
    def test_bundled_model_answers_every_turn(self, run_cli):
        question = (
            "Tom has 3 bags with 4 marbles each. Then he buys 5 more marbles. "
            "How many marbles does Tom have now?\n"
        )
        result = run_cli("chat", stdin=question * 3)
        assert result.returncode == 0, result.stderr
        assert result.stdout.decode().count("#### 17\n") == 3

    def test_empty_answer_is_remarked(self, run_cli, tiny_model):
        text = expected_text(tiny_model, "abc", max_tokens=1)
        with Diffulex(str(tiny_model), device="cpu") as engine:
            ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": "abc"}])
            first = engine.generate([ids], SamplingParams(max_tokens=1), summary=False)[0]
        assert text == first.text
        result = run_cli(
            *("generate", "--model", tiny_model, "--max-tokens", "1"),
            *("--stop-token-ids", first.token_ids[0], "abc"),
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout == b"\n"
        assert "note: the answer is empty" in result.stderr.decode()


class TestEval:
    def write_problems(self, path, count=6) -> None:
        problems = [
            {
                "id": i,
                "level": 1 + i % 2,
                "question": f"{i}+1?",
                "answer": i,
                "solution": f"#### {i}",
            }
            for i in range(count)
        ]
        path.write_text("\n".join(map(json.dumps, problems)) + "\n")

    def test_reports(self, run_cli, tiny_model, tmp_path):
        data, report, document = (tmp_path / name for name in ("p.jsonl", "r.json", "r.md"))
        self.write_problems(data)
        result = run_cli(
            *("eval", "--model", tiny_model, "--data", data, "--limit", "5", "--max-tokens", "8"),
            *("--buffer-size", "1,2", "--accept-threshold", "0.5", "--batch", "3"),
            *("--output", report, "--output", document),
        )
        assert result.returncode == 0, result.stderr
        content = json.loads(report.read_text())
        assert [run["setting"]["buffer_size"] for run in content["runs"]] == [1, 2]
        for run in content["runs"]:
            assert run["setting"]["accept_threshold"] == 0.5
            assert run["total"]["num_problems"] == 5
            assert [(x["group"], x["num_problems"]) for x in run["levels"]] == [("1", 3), ("2", 2)]
            assert run["metrics"]["concurrency"] == 3
            assert run["metrics"]["total_tokens"] <= 5 * 8
        assert content["environment"]["command"].startswith("diffulex eval --model")
        assert "| level | problems | correct |" in document.read_text()
        table = result.stdout.decode()
        assert "accuracy" in table
        assert table.splitlines()[0].split()[-4:] == ["NFE", "tok/s", "decode", "seconds"]
        # Without a terminal the progress is in the log.
        assert "5/5 done" in result.stderr.decode()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--output", "report.txt"], "output: expected a .json or .md file"),
            (["--output", "/no/such/dir/r.json"], "output: expected an existing directory"),
            (["--output", "/proc/r.json"], "output: cannot write /proc/r.json"),
            (["--output", "directory.json"], "output: expected a file, got the directory"),
            (["--data", "/no/such/file"], "data: cannot read /no/such/file"),
            (["--limit", "0"], "--limit: expected an integer of at least 1"),
            (["--accept-threshold", "0.5,1.5"], "accept_threshold"),
        ],
    )
    def test_bad_arguments(self, run_cli, tiny_model, tmp_path, arguments, message):
        self.write_problems(tmp_path / "p.jsonl")
        (tmp_path / "directory.json").mkdir()
        arguments = [x.replace("directory.json", f"{tmp_path}/directory.json") for x in arguments]
        base = ("eval", "--model", tiny_model, "--data", tmp_path / "p.jsonl", "--max-tokens", "4")
        assert message in error_line(run_cli(*base, *arguments))


class TestBadInput:
    """One line on standard error, exit code 2, no traceback."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["frobnicate"], "expected one of generate, chat, eval, serve"),
            (["generte"], "nearest is generate, got 'generte'"),
            (["eval", "--buffer-size", ""], "--buffer-size: expected one value or more, got ''"),
            (["generate", "--model", "nosuch", "hi"], "expected 'demo', a directory or a hub id"),
            (["generate", "--model", "no/such", "hi"], "cannot be fetched from the hub"),
            (["generate", ""], "got an empty prompt"),
            (["generate", "--prompt", "  "], "got an empty prompt"),
            (["generate", "--model", "x", "a", "--prompt", "b"], "got both PROMPT and --prompt"),
            (["generate", "--blok-size", "4", "hi"], "nearest is --block-size"),
            (["generate", "--outptu", "x", "hi"], "known argument, got '--outptu'"),
            (["doctor", "--blok-size", "4"], "known argument, got '--blok-size'"),
            (["generate", "--top-p", "-0.9", "hi"], "top_p: expected float >= 0, got -0.9"),
            (["chat", "--top-k=many"], "--top-k: expected an integer, got 'many'"),
            (["generate", "--min-p", "2", "hi"], "min_p: expected float [0, 1], got 2.0"),
            (
                ["generate", "--decoding-strategy", "d3f", "hi"],
                "decoding_strategy: expected one of block_diffusion, d2f, diffusion_gemma, dmax",
            ),
            (["generate", "--decoding-strategy", "edit", "hi"], "(edit is a sampling_mode), got"),
            (
                ["generate", "--sampling-mode", "edit", "hi"],
                "sampling_mode: expected naive for the model sdar under decoding_strategy multi_bd",
            ),
            (
                ["generate", "--decoding-strategy", "fast_dllm_v2", "hi"],
                "decoding_strategy: expected multi_bd or d2f for the model sdar",
            ),
            (
                ["generate", "--frame-delay", "-1", "hi"],
                "--frame-delay: expected seconds in [0, 10]",
            ),
            (["generate", "--frame-delay", "nan", "hi"], "--frame-delay: expected seconds"),
            (["generate", "--frame-delay", "inf", "hi"], "--frame-delay: expected seconds"),
            (["generate", "--max-tokens", "many", "hi"], "--max-tokens: expected an integer"),
            (["generate", "--block-size", "x", "hi"], "--block-size: expected an integer"),
        ],
    )
    def test_without_a_model(self, run_cli, arguments, message):
        assert message in error_line(run_cli(*arguments))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["x" * 600], "prompt: expected at most 511 tokens"),
            (["--block-size", "5", "hi"], "block_size"),
            (["--buffer-size", "0", "hi"], "buffer_size"),
            (["--accept-threshold", "1.5", "hi"], "accept_threshold"),
            (["--device", "tpu", "hi"], "device"),
            (["--device", "cuda", "hi"], "no CUDA device is visible"),
            (["--max-model-len", str(2**31), "hi"], "max_model_len: expected int < 2**31"),
            (["--num-pages", str(10**30), "hi"], "num_pages: expected int < 2**31"),
            (["--eos", str(2**40), "hi"], "eos: expected ids? < 2**31"),
            (["--dtype", "int8", "hi"], "dtype: expected one of auto, float32"),
            (["--num-pages", str(2**31 - 1), "hi"], "options: expected rows, slots and page"),
            (["--model-name", "dream", "hi"], "model_name"),
            (["--mask-token-id", "3000", "hi"], "mask token"),
            (["--max-num-batched-tokens", "16", "hi"], "max_num_batched_tokens"),
            (["--num-pages", "1", "--max-tokens", "400", "hi" * 100], "pages"),
            (
                ["--tensor-parallel-size", "3", "hi"],
                "tensor_parallel_size: expected one of 1, 2, 4",
            ),
        ],
    )
    def test_impossible_configurations(self, run_cli, tiny_model, arguments, message):
        result = run_cli("generate", "--model", tiny_model, *arguments)
        assert message in error_line(result)

    def test_empty_standard_input(self, run_cli, tiny_model):
        assert "empty prompt" in error_line(run_cli("generate", "--model", tiny_model, stdin=""))

    def test_standard_input_that_is_not_text(self, run_cli, tiny_model):
        result = run_cli("generate", "--model", tiny_model, stdin=b"\xff\xfe\xfa")
        assert "expected UTF-8 text, got '\\udcff' at 0" in error_line(result)

    @pytest.mark.parametrize(
        ("name", "edit", "message"),
        [
            ("config.json", lambda path: path.unlink(), "expected a config.json"),
            ("config.json", lambda path: path.write_text("{"), "not valid JSON"),
            ("model.safetensors", lambda path: path.unlink(), "expected model.safetensors"),
            (
                "model.safetensors",
                lambda path: path.write_bytes(path.read_bytes()[:5000]),
                "cannot read",
            ),
            ("tokenizer.json", lambda path: path.unlink(), "tokenizer"),
            (
                "config.json",
                lambda path: path.write_text(path.read_text().replace("SDARFor", "LlamaFor")),
                "sdar",
            ),
        ],
    )
    def test_broken_checkpoints(self, run_cli, tiny_model, tmp_path, name, edit, message):
        broken = tmp_path / "broken"
        shutil.copytree(tiny_model, broken)
        edit(broken / name)
        if message == "sdar":
            config = json.loads((broken / "config.json").read_text())
            (broken / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
        assert message in error_line(run_cli("generate", "--model", broken, "hi"))

    def test_mask_token_in_the_vocabulary_is_never_generated(self, run_cli, tiny_model):
        with Diffulex(str(tiny_model), device="cpu") as engine:
            output = engine.generate("abc", SamplingParams(max_tokens=40), summary=False)[0]
        assert MASK_ID not in output.token_ids


class TestDoctor:
    @needs_demo
    @pytest.mark.parametrize("name", ["doctor", "info"])
    def test_healthy(self, run_cli, name):
        result = run_cli(name)
        text = result.stdout.decode()
        assert result.returncode == 0, text
        assert text.endswith("healthy\n")
        assert "self-test cpu block_attention: ok" in text
        assert "self-test cpu model demo: ok" in text

    def test_json(self, run_cli):
        result = run_cli("doctor", "--json")
        content = json.loads(result.stdout)
        assert {"python", "build", "torch", "cuda devices"} <= content["facts"].keys()
        assert {"free memory", "cpu kernels", "cuda driver"} <= content["facts"].keys()
        assert content["facts"]["packages"]["transformers"][0].isdigit()
        assert {"executorch", "diffusers"} <= content["facts"]["optional packages"].keys()
        assert {"xnnpack", "coreml", "qnn"} <= content["facts"]["edge backends"].keys()
        assert "diffusers" in content["facts"]["image engine"]
        failed = [check for check in content["checks"] if not check["is_ok"]]
        assert content["is_healthy"] is (not failed)
        assert result.returncode == (1 if failed else 0)

    def test_plug_ins_are_listed(self, monkeypatch, tmp_path):
        from diffulex.tools import doctor

        for name in ("my_model", "another"):
            info = tmp_path / f"{name}-1.2.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
            (info / "entry_points.txt").write_text(
                f"[diffulex.plugins]\nAutoSampler.mine = {name}:Mine\n"
            )
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(doctor, "_self_tests", dict)
        facts = doctor.examine().facts
        assert facts["plug-ins"]["AutoSampler.mine"] == (
            "another:Mine (another 1.2) and my_model:Mine (my_model 1.2)"
        )

    def test_models_at_hand_are_listed(self, monkeypatch, tmp_path):
        """The bundled one, and those of the hub's cache that an engine can run."""
        from huggingface_hub import constants

        from diffulex.tools import doctor

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
        assert list(doctor._models()) == ["demo"]
        for name, config in (
            ("mine", '{"model_type": "sdar"}'),
            ("other", '{"model_type": "bert"}'),
            ("cut", "{"),
        ):
            repo = tmp_path / "hub" / f"models--org--{name}"
            (repo / "snapshots" / "abc").mkdir(parents=True)
            (repo / "refs").mkdir()
            (repo / "refs" / "main").write_text("abc")
            (repo / "snapshots" / "abc" / "config.json").write_text(config)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        found = doctor._models()
        assert list(found) == ["demo", "org/cut", "org/mine"]
        assert found["org/mine"] == "sdar, 0.00 GB"
        assert found["org/cut"].startswith("not readable: ")

    def test_broken_parts_are_reported(self, monkeypatch):
        from diffulex.tools import doctor

        def fail(device: str) -> str:
            raise RuntimeError(f"no luck on {device}\nmore text")

        monkeypatch.setattr(doctor, "_self_tests", lambda: {"op": fail, "other": lambda _: "fine"})
        report = doctor.examine()
        assert not report.is_healthy
        checks = {check.name: check for check in report.checks if check.device == "cpu"}
        assert checks["op"].detail == "no luck on cpu"
        assert checks["other"].is_ok
        assert "self-test cpu op: FAILED (no luck on cpu)" in report.to_text()
        assert report.to_text().endswith("broken: see the failed self-tests")

    @pytest.mark.parametrize(
        ("archs", "free", "findings"),
        [
            (["90a"], 2, {"kernels": (True, "portable, built for 90a"), "free memory": (True, "2.0 of 8.0 GiB")}),
            (["80-real"], 2, {"kernels": (False, "a build for compute capability 9.0, got one for 80-real")}),
            ([], 2, {"kernels": (False, "got one for no device")}),
            (["80"], 0.5, {"kernels": (True, "built for 80"), "free memory": (False, "at least 1 GiB, got 0.5 of")}),
        ],
    )  # fmt: skip
    def test_devices_that_are_not_here(self, monkeypatch, archs, free, findings):
        """What it says of a device, by a fake one: the ops are not run."""
        import torch

        from diffulex.ops import device
        from diffulex.tools import doctor

        gib = 1 << 30
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_name": lambda index: "NVIDIA H200",
            "get_device_capability": lambda device=None: (9, 0),
            "mem_get_info": lambda device=None: (int(free * gib), 8 * gib),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(device, "has_hopper_kernels", lambda _: False)
        facts = {"cuda_archs": archs, "version": "0"}
        monkeypatch.setattr(doctor, "_build_facts", lambda: facts)
        monkeypatch.setattr(doctor, "_self_tests", dict)
        report = doctor.examine()
        text = report.facts["cuda devices"]["cuda:0"]
        assert text == f"NVIDIA H200, compute capability 9.0, {free:.1f} of 8.0 GiB free"
        checks = {check.name: check for check in report.checks if check.device == "cuda:0"}
        for name, (is_ok, detail) in findings.items():
            assert checks[name].is_ok is is_ok
            assert detail in checks[name].detail
        assert report.is_healthy is all(is_ok for is_ok, _ in findings.values())

    def test_memory_of_the_host(self, tmp_path):
        from diffulex.tools.doctor import _host_memory

        path = tmp_path / "meminfo"
        path.write_text("MemTotal:  4194304 kB\nMemAvailable: 1048576 kB\nHugePages_Total: 0\n")
        assert _host_memory(path) == "1.0 of 4.0 GiB"
        path.write_text("MemTotal: 1 kB\n")
        assert _host_memory(path) == _host_memory(tmp_path / "none") == "unknown"
