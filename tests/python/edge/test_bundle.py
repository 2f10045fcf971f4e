# SPDX-License-Identifier: Apache-2.0
"""Bundles as users meet them: commands over them, what is refused, what is left behind."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import diffulex_edge
from diffulex import Diffulex
from diffulex.config.config import Config
from diffulex.errors import CheckpointError, ConfigError
from diffulex.tools.cli import main
from diffulex_edge.backends import BACKENDS
from diffulex_edge.bundle import new_directory, read_bundle
from diffulex_edge.errors import EdgeError, ProgramError, native_reason
from diffulex_edge.program import PteProgram
from fixtures.extras import need_extra

need_extra("edge", "executorch", "torchao")

QUESTION = "Tom has 3 apples. He buys 4 more apples. How many apples does Tom have now?"


def error_of(capsys, *arguments: str, code: int = 2) -> str:
    assert main(list(map(str, arguments))) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: "), lines
    return lines[-1]


@pytest.fixture
def copy(bundle, tmp_path):
    """A bundle of its own, to be damaged."""

    def get(name: str) -> Path:
        return Path(shutil.copytree(bundle(name), tmp_path / name))

    return get


class TestCommands:
    def test_generate(self, bundle, capsys):
        assert main(["generate", "--model", str(bundle("demo")), QUESTION]) == 0
        assert "#### 7" in capsys.readouterr().out

    def test_the_program_stands_for_its_directory(self, bundle, capsys):
        assert main(["generate", "--model", str(bundle("demo") / "model.pte"), QUESTION]) == 0
        assert "#### 7" in capsys.readouterr().out

    def test_eval(self, bundle, tmp_path):
        report = tmp_path / "report.json"
        command = ["eval", "--model", str(bundle("demo")), "--limit", "4", "--output", str(report)]
        assert main(command) == 0
        (run,) = json.loads(report.read_text())["runs"]
        assert run["total"]["num_problems"] == 4
        assert run["total"]["num_correct"] >= 3

    def test_info(self, bundle, capsys):
        assert main(["edge", "info", str(bundle("demo")), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["is_unchanged"]
        assert report["constants"]["dlx_model_type"] == "sdar"
        assert report["constants"]["get_max_seq_len"] == 512
        assert report["constants"]["get_max_context_len"] == 544
        assert report["cache_bytes"] == 6 * 2 * 2 * 544 * 64 * 4
        assert [item["shape"] for item in report["inputs"]] == [[1, 256], [256], [256], [64]]

    def test_info_says_that_a_program_was_changed(self, copy, capsys):
        path = copy("demo")
        data = bytearray((path / "model.pte").read_bytes())
        data[-1] ^= 1
        (path / "model.pte").write_bytes(data)
        assert main(["edge", "info", str(path)]) == 0
        assert "CHANGED since the export" in capsys.readouterr().out

    def test_backends(self, capsys):
        assert main(["edge", "backends", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["backends"]
        found = {row["name"]: row for row in rows}
        assert found["xnnpack"]["can_run"]
        assert found["portable"]["can_export"]
        assert set(found) == set(BACKENDS)

    def test_help_names_the_commands(self, capsys):
        assert main(["edge"]) == 0
        text = capsys.readouterr().out
        assert "export" in text
        assert "backends" in text

    def test_misspelt_flag(self, capsys):
        assert "nearest is --max-rows" in error_of(
            capsys, "edge", "export", "-o", "x", "--max-row=8"
        )

    def test_module(self):
        command = [sys.executable, "-m", "diffulex_edge", "backends"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "xnnpack" in result.stdout
        assert not result.stderr


def test_settings_are_forced(bundle, caplog):
    caplog.set_level("INFO", logger="diffulex")
    config = Config.from_kwargs(str(bundle("demo")), max_num_reqs=9, max_model_len=4096)
    assert config.model.load_format == "pte"
    assert (config.model.device, config.model.dtype) == ("cpu", "float32")
    assert config.scheduler.max_num_reqs == 1
    assert config.scheduler.max_model_len == 512
    assert not config.cache.enable_prefix_caching
    assert config.kernel.run_ahead == "off"
    assert "max_num_reqs: changed from 9 to 1: an exported program holds one" in caplog.text


def test_weights_beside_a_program_win(bundle, tmp_path):
    path = shutil.copytree(bundle("demo"), tmp_path / "both")
    demo = Path(diffulex_edge.__file__).parents[1] / "diffulex/assets/demo/model.safetensors"
    shutil.copy(demo, path)
    assert Config.from_kwargs(str(path)).model.program is None
    assert Config.from_kwargs(str(path), load_format="pte").model.program is not None


class TestRefused:
    def test_program_without_its_directory(self, bundle, tmp_path, capsys):
        shutil.copy(bundle("demo") / "model.pte", tmp_path / "x.pte")
        line = error_of(capsys, "generate", "--model", tmp_path / "x.pte", "hi")
        assert f"expected a directory, or model.pte in one, got the file {tmp_path}/x.pte" in line
        shutil.copy(bundle("demo") / "model.pte", tmp_path)
        line = error_of(capsys, "edge", "info", tmp_path / "model.pte")
        assert f"{tmp_path}: expected a config.json, got none" in line

    def test_pte_without_a_program(self, capsys):
        line = error_of(capsys, "generate", "--load-format", "pte", "hi")
        assert "expected a file model.pte" in line

    @pytest.mark.parametrize("name", ["edge.json", "config.json"])
    def test_missing_file(self, copy, capsys, name):
        path = copy("demo")
        (path / name).unlink()
        assert f"expected a {'file ' if name[0] == 'e' else ''}{name}" in error_of(
            capsys, "generate", "--model", path, "hi"
        )

    def test_changed_config(self, copy, capsys):
        path = copy("demo")
        text = (path / "config.json").read_text()
        (path / "config.json").write_text(text + "\n")
        assert "expected the file that was exported" in error_of(
            capsys, "generate", "--model", path, "hi"
        )

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"dtype": "float99"}, "dtype: expected float32, got 'float99'"),
            ({"max_rows": 0}, "max_rows: expected >= 1, got 0"),
            ({"cache_rows": -544}, "cache_rows: expected >= 1, got -544"),
            ({"program": {"sha256": "0", "bytes": "many"}}, "bytes: expected int, got 'many'"),
            ({"program": {"bytes": 1}}, "sha256: expected str, got None"),
        ],
    )
    def test_wrong_facts(self, copy, changes, text):
        path = copy("demo")
        facts = json.loads((path / "edge.json").read_text())
        (path / "edge.json").write_text(json.dumps({**facts, **changes}))
        with pytest.raises(CheckpointError, match=text):
            read_bundle(path)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"program": {}, "max_model_len": "x"}'])
    def test_malformed_edge_file(self, copy, text):
        path = copy("demo")
        (path / "edge.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"edge\.json"):
            read_bundle(path)

    def test_truncated_program(self, copy, capsys):
        path = copy("demo")
        data = (path / "model.pte").read_bytes()
        (path / "model.pte").write_bytes(data[: len(data) // 2])
        line = error_of(capsys, "generate", "--model", path, "hi", code=1)
        assert f"expected at least {len(data)} bytes" in line
        assert "cut short" in line

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04" * 20, b"abcdET12"])
    def test_foreign_program(self, copy, capsys, content):
        path = copy("demo")
        (path / "model.pte").write_bytes(content)
        line = error_of(capsys, "generate", "--model", path, "hi", code=1)
        assert "model.pte" in line

    def test_program_of_another_bundle(self, copy, bundle, capsys):
        path = copy("demo")
        shutil.copy(bundle("llada") / "model.pte", path)
        line = error_of(capsys, "generate", "--model", path, "hi", code=1)
        assert "as in edge.json" in line

    def test_edge_file_of_another_export(self, copy, capsys):
        path = copy("demo")
        facts = json.loads((path / "edge.json").read_text())
        (path / "edge.json").write_text(json.dumps({**facts, "max_rows": 128}))
        line = error_of(capsys, "generate", "--model", path, "hi", code=1)
        assert "dlx_max_rows: expected 128 as in edge.json, got 256" in line

    @pytest.mark.parametrize(
        "command",
        [
            ["generate", "--model", "BUNDLE", "hi"],
            ["edge", "verify", "BUNDLE", "--reference", "demo"],
            ["edge", "bench", "BUNDLE"],
        ],
    )
    def test_damaged_program(self, copy, capsys, command):
        """Of the right length: the runtime would follow its offsets out of the file."""
        path = copy("demo")
        data = bytearray((path / "model.pte").read_bytes())
        middle = len(data) // 2
        data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
        (path / "model.pte").write_bytes(data)
        words = [str(path) if word == "BUNDLE" else word for word in command]
        line = error_of(capsys, *words, code=1)
        assert "expected SHA-256 " in line
        assert "the file is damaged or of another export" in line

    def test_strategy(self, bundle, capsys):
        line = error_of(
            capsys, "generate", "--model", bundle("demo"), "--decoding-strategy", "dmax", "hi"
        )
        assert "decoding_strategy" in line

    def test_block_beyond_the_rows(self, bundle):
        settings = {"decoding_strategy": "fast_dllm_v2", "block_size": 32, "buffer_size": 8}
        with pytest.raises(ConfigError, match=r"at most 128 rows .*--max-rows\), got 256"):
            Diffulex(str(bundle("fast_dllm_v2")), **settings)

    def test_blocks_beyond_the_cache(self, copy):
        """The last block of a dual cache is stored as a whole."""
        settings = {"decoding_strategy": "fast_dllm_v2", "block_size": 32, "buffer_size": 4}
        path = copy("fast_dllm_v2")
        facts = json.loads((path / "edge.json").read_text())
        facts |= {"max_model_len": 130, "cache_rows": 162}
        (path / "edge.json").write_text(json.dumps(facts))
        text = "in the 162 cache rows .* blocks of 128 for max_model_len 130"
        with pytest.raises(ConfigError, match=text):
            Config.from_kwargs(str(path), **settings)
        assert Config.from_kwargs(str(path), max_model_len=128, **settings).model.program

    def test_adapter(self, bundle, tmp_path):
        with pytest.raises(ConfigError, match="expected auto with use_lora, got 'pte'"):
            Config.from_kwargs(str(bundle("demo")), use_lora=True, lora_path=str(tmp_path))

    @pytest.mark.parametrize(
        ("flags", "text"),
        [
            (["--backend", "vulkan"], "expected one of coreml, portable, qnn, xnnpack, got 'vulk"),
            (
                ["--quant", "8w"],
                "expected one of none, fp16, 8da8w, 8da4w, pt2e_dyn8, static_int8 on the backend"
                " xnnpack, got 8w",
            ),
            (["--quant", "fp16,emb=8"], "quant: expected fp16 alone, got 'fp16,emb=8'"),
            (
                ["--quant", "static_int8"],
                "calibration: expected a file of problems with static_int8, got none",
            ),
            (
                ["--quant", "8da8w", "--calibration", "x.jsonl"],
                "calibration: expected the recipe static_int8, got 8da8w",
            ),
            (["--quant", "static_int8", "--calibration", "/nowhere.jsonl"], "/nowhere.jsonl"),
            (["--quant", "9bit"], "quant: expected one of"),
            (["--quant", "bf16"], "quant: expected one of"),
            (["--compute-unit", "all"], "compute_unit: expected the backend coreml, got xnnpack"),
            (["--soc", "SM8650"], "soc: expected the backend qnn, got xnnpack"),
            (
                ["--hqq"],
                "quant: expected head=none, head=8da8w, emb=8, emb=4 or hqq after a recipe",
            ),
            (["--quant", "8da4w-g48"], "expected a group size of 32, 64, 128, 256"),
            (["--max-rows", "2"], "max_rows: expected >= 8, got 2"),
            (["--tolerance", "nan"], "tolerance: expected a finite number > 0, got nan"),
            (["--tolerance", "inf"], "tolerance: expected a finite number > 0, got inf"),
            (["--tolerance", "0"], "tolerance: expected a finite number > 0, got 0.0"),
            (["--max-model-len", "4096"], "max_model_len: expected at most 512"),
            (["--model", "no/such/model/here"], "no/such/model/here"),
            (["--lora", "/nowhere"], "adapter: /nowhere: expected a file"),
        ],
    )
    def test_export(self, tmp_path, capsys, flags, text):
        line = error_of(capsys, "edge", "export", "-o", tmp_path / "out", *flags)
        assert text in line
        assert not list(tmp_path.iterdir())

    def test_export_into_something(self, tmp_path, capsys):
        (tmp_path / "file").write_text("x")
        line = error_of(capsys, "edge", "export", "-o", tmp_path)
        assert "expected a new directory, got the existing" in line
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert "got the file" in error_of(capsys, "edge", "export", "-o", tmp_path / "file")
        assert "expected an existing directory" in error_of(
            capsys, "edge", "export", "-o", tmp_path / "a/b"
        )

    def test_qnn_without_its_sdk(self, tmp_path, capsys, monkeypatch):
        monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
        line = error_of(capsys, "edge", "export", "-o", tmp_path / "out", "--backend", "qnn")
        assert "set QNN_SDK_ROOT to its directory" in line
        monkeypatch.setenv("QNN_SDK_ROOT", str(tmp_path))
        line = error_of(capsys, "edge", "export", "-o", tmp_path / "out", "--backend", "qnn")
        assert "libQnnHtp.so" in line
        assert not list(tmp_path.iterdir())


class TestProgram:
    @pytest.fixture
    def program(self, bundle):
        return PteProgram(bundle("sdar-8da8w") / "model.pte")

    @staticmethod
    def inputs(count: int = 4, **changes):
        values = {
            "tokens": torch.ones(count, dtype=torch.int64),
            "positions": torch.arange(count),
            "visible_end": torch.full((count,), count),
            "logits_rows": torch.arange(2),
        }
        return {**values, **changes}

    def test_call(self, program):
        assert program(**self.inputs()).shape == (2, 300)
        assert program(**self.inputs(1, logits_rows=torch.tensor([0]))).shape == (1, 300)
        assert program(**self.inputs(128)).isfinite().all()

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"tokens": torch.full((4,), 300)}, r"tokens: expected values in \[0, 300\), got 300"),
            ({"tokens": torch.full((4,), -1)}, "tokens: expected values .*, got -1"),
            ({"positions": torch.arange(541, 545)}, r"positions: .* \[0, 544\), got 544"),
            ({"visible_end": torch.full((4,), 600)}, "visible_end: .* got 600"),
            ({"logits_rows": torch.tensor([4])}, r"logits_rows: .* \[0, 4\), got 4"),
            ({"tokens": torch.ones(4)}, "tokens: expected 1 to 128 int64 values, .* torch.float32"),
            ({"tokens": torch.ones(0, dtype=torch.int64)}, r"got \[0\]"),
        ],
    )
    def test_refuses_and_goes_on(self, program, changes, text):
        with pytest.raises(ProgramError, match=text):
            program(**self.inputs(**changes))
        assert program(**self.inputs()).isfinite().all()

    def test_refuses_fixed_shapes_before_it_loads_them(self):
        constants = {"dlx_format": 2, "enable_dynamic_shape": False}

        class Static:
            """A program of a backend with fixed shapes, as the runtime shows it."""

            names = ("forward", *constants)

            def num_methods(self):
                return len(self.names)

            def get_method_name(self, index):
                return self.names[index]

            def load_method(self, name):
                return lambda inputs: [constants[name]]

        program = PteProgram.__new__(PteProgram)
        program.path, program._program = Path("model.pte"), Static()
        with pytest.raises(ProgramError, match="for any number of rows, got one of fixed shapes"):
            program._load_methods()

    def test_refuses_too_many_rows(self, program):
        with pytest.raises(ProgramError, match="expected 1 to 128 int64 values"):
            program(**self.inputs(129))

    def test_loading_is_quiet(self, bundle):
        code = (
            "import sys; from diffulex_edge.program import PteProgram; PteProgram(sys.argv[1])\n"
            "assert not any(n.startswith('executorch.exir') for n in sys.modules), 'heavy import'"
        )
        command = [sys.executable, "-c", code, str(bundle("sdar-8da4w") / "model.pte")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("Failed to load, error: 0x:20", "backend that this machine lacks"),
        ("error 0x14", "operator"),
        ("status 0x23", "no program"),
        ("something else", "something else"),
    ],
)
def test_native_errors_are_translated(text, part):
    assert part in native_reason(RuntimeError(text))


class TestNewDirectory:
    def test_failure_leaves_nothing(self, tmp_path):
        def fail(path: Path) -> None:
            (path / "half").write_text("x")
            raise KeyError

        with pytest.raises(KeyError), new_directory(tmp_path / "out") as path:
            fail(path)
        assert not list(tmp_path.iterdir())

    def test_a_place_where_nothing_can_be_made(self):
        """A directory that nobody may write to, whoever runs this."""
        refused = pytest.raises(ConfigError, match=r"output: cannot make /proc/.*/out: ")
        with refused, new_directory(Path("/proc/self/out")):
            pass

    def test_a_full_disk_is_one_line_and_leaves_nothing(self, tmp_path):
        """As a limit on the size of files, which the system reports in the same way."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        full = pytest.raises(EdgeError, match=rf"^output: cannot write {tmp_path}/out: .* large$")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with full, new_directory(tmp_path / "out") as path:
                (path / "model.pte").write_bytes(bytes(10_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not list(tmp_path.iterdir())

    def test_other_failures_of_the_body_are_its_own(self, tmp_path):
        with pytest.raises(FileNotFoundError), new_directory(tmp_path / "out"):
            (tmp_path / "weights").read_bytes()
        assert not list(tmp_path.iterdir())

    def test_a_link_keeps_pointing_at_the_bundle(self, tmp_path):
        real, link = tmp_path / "real", tmp_path / "link"
        real.mkdir()
        (real / "edge.json").write_text("{}")
        link.symlink_to(real)
        with new_directory(link, overwrite=True) as path:
            (path / "new").write_text("x")
        assert link.is_symlink()
        assert [item.name for item in real.iterdir()] == ["new"]
        assert sorted(item.name for item in tmp_path.iterdir()) == ["link", "real"]

    def test_a_bundle_that_cannot_be_replaced_stays(self, tmp_path, monkeypatch):
        import os

        out, replace = tmp_path / "out", os.replace
        out.mkdir()
        (out / "edge.json").write_text("{}")

        def fail(source, target):
            if str(source).endswith(".tmp"):
                raise PermissionError("no")
            replace(source, target)

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(PermissionError), new_directory(out, overwrite=True):
            pass
        assert [item.name for item in tmp_path.iterdir()] == ["out"]
        assert (out / "edge.json").is_file()

    def test_overwrite_replaces_bundles_only(self, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        (out / "edge.json").write_text("{}")
        with pytest.raises(ConfigError, match="--overwrite"), new_directory(out):
            pass
        with new_directory(out, overwrite=True) as path:
            (path / "new").write_text("x")
        assert [item.name for item in out.iterdir()] == ["new"]
        refused = pytest.raises(ConfigError, match="a new directory, got")
        with refused, new_directory(out, overwrite=True):
            pass
        assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_importing_is_light():
    code = "import sys, diffulex_edge; assert not {'torch', 'executorch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
