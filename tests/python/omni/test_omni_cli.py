# SPDX-License-Identifier: Apache-2.0
"""``diffulex omni`` as a user meets it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diffulex.tools.cli import main
from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

from PIL import Image  # noqa: E402

from diffulex.omni import OmniDiffusion, cli  # noqa: E402
from diffulex.omni._diffusers_compat import import_diffusers  # noqa: E402
from diffulex.omni.bench.evaluate import Pairs  # noqa: E402
from diffulex.omni.half_blocks import PicturePainter, half_blocks  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["--height", "64", "--width", "64", "--num-inference-steps", "3", "--seed", "1"]


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    """A tiny model that has defaults of its own."""
    path = shutil.copytree(tiny("qwen"), tmp_path_factory.mktemp("cli") / "model")
    defaults = {"height": 64, "width": 64, "num_inference_steps": 3, "true_cfg_scale": 1.0}
    (path / "generation_config.json").write_text(json.dumps({"diffulex": defaults}))
    return path


def error_of(capsys, *arguments, code=2):
    assert main(["omni", *arguments]) == code
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    return line


@pytest.mark.slow
def test_pictures_are_written_and_nothing_else_is_said(model, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "diffulex", "omni", "generate", "a cat", "--model", str(model),
         "-o", "cat.png", "-n", "2", "--seed", "3"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == "cat_0.png\ncat_1.png\n"
    assert re.fullmatch(r"\[64x64, 3 steps, seed 3, [\d.]+ s\]\n", result.stderr)
    for name in ("cat_0.png", "cat_1.png"):
        with Image.open(tmp_path / name) as image:
            assert image.size == (64, 64)


def test_the_same_seed_writes_the_same_file(model, tmp_path, capsys):
    for name in ("one.png", "two.png"):
        assert (
            main(
                ["omni", "generate", "x", "--model", str(model), *SMALL, "-o", str(tmp_path / name)]
            )
            == 0
        )
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    capsys.readouterr()


def test_a_video_is_a_gif_or_an_mp4(tiny, tmp_path, capsys):
    video = ["generate", "x", "--model", str(tiny("wan")), *SMALL, "--num-frames", "5", "-o"]
    assert main(["omni", *video, str(tmp_path / "x.gif")]) == 0
    with Image.open(tmp_path / "x.gif") as image:
        assert (image.size, image.n_frames) == ((64, 64), 5)
    assert main(["omni", *video, str(tmp_path / "x.mp4"), "--fps", "8"]) == 0
    data = (tmp_path / "x.mp4").read_bytes()
    # test_mp4.py has such files played.
    assert (data[4:8], data.count(b"avcC")) == (b"ftyp", 1)
    capsys.readouterr()
    line = error_of(capsys, *video, str(tmp_path / "x.png"))
    assert "--output: expected an .mp4 or .gif file for a video, got" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "prompt: expected some text, got ''"),
        # What Python makes of an argument with the byte 0xff.
        (["generate", "a \udcff circle"], r"prompt: expected UTF-8 text, got 'a \udcff circle'"),
        (["generate"], "the following arguments are required: PROMPT"),
        (["generate", "x", "--sead", "1"],
         "command line: expected a known argument, nearest is --seed, got '--sead'"),
        (["generate", "x", "--seed", "-1"], "seed: expected an integer in [0, 2**63), got -1"),
        (["generate", "x", "--seed", "one"], "argument --seed: expected an integer, got 'one'"),
        (["generate", "x", "-n", "65"],
         "num_outputs_per_prompt: expected an integer in [1, 64], got 65"),
        (["generate", "x", "-o", "x.bmp"],
         "--output: expected a file name that ends in .png, .jpg, .jpeg, .webp, .mp4, .gif, got 'x.bmp'"),
        (["generate", "x", "-o", "no/where.png"],
         "--output: expected a file in an existing directory, got 'no/where.png'"),
        (["generate", "x", "--pipeline-parallel-size", "2", "--cache-backend", "cache_dit"],
         "pipeline_parallel_size: expected cache_backend none with it, got cache_dit"),
        (["generate", "x", "--model", "/no/such"],
         "model: expected a directory with model_index.json or a hub id, got '/no/such'"),
        (["eval", "--limit", "0"],
         "argument --limit: expected an integer of at least 1, got '0'"),
        (["eval", "--num-inference-steps", "0"],
         "num_inference_steps: expected an integer in [1, 1000], got 0"),
        (["eval", "--model", "/no/such", "--output", "x.csv"],
         "--output: expected a .json or .md file, got 'x.csv'"),
        (["eval", "--num-inference-steps", ""],
         "argument --num-inference-steps: expected one value or more, got ''"),
        (["eval", "--vary", "vae_use_slicin=1"],
         "command line: expected a known argument, nearest is --vae-use-slicing, got"
         " '--vae-use-slicin=1'"),
        (["eval", "--vary", "vae_use_slicing=maybe"],
         "--vary vae_use_slicing: expected true or false, got 'maybe'"),
        (["eval", "--vary", "tensor_parallel_size=0"],
         "tensor_parallel_size: expected int >= 1, got 0"),
        # A key may have a digit.
        (["eval", "--vary", "cache_backend=tea_cache,rel_l1_thresh=0"],
         "rel_l1_thresh: expected float > 0, got 0.0"),
        (["eval", "--model", str(ROOT / "examples/zoo/motion_wan")],
         "model: expected one of images, got WanPipeline"),
        (["eval", "--cache", "none=1"],
         "--cache: expected one of tea_cache, cache_dit before a threshold, got 'none=1'"),
        (["eval", "--cache", "tea_cache=x"], "--cache: expected a number, got 'x'"),
        (["eval", "--cache", "none,deep_cache"],
         "cache_backend: expected one of none, tea_cache, cache_dit, got 'deep_cache'"),
        (["generate", "x", "--cache-backend", "tea-cache", "--coefficients=1,2"],
         "coefficients: expected floats 5 numbers, got (1.0, 2.0)"),
        (["bench", "--repeat", "0"],
         "argument --repeat: expected an integer of at least 1, got '0'"),
        (["bench", "--output", "x.csv"],
         "--output: expected a .json or .md file in an existing directory, got 'x.csv'"),
        (["bench", "--prompts", "x.txt"],
         "--prompts: expected --fit-teacache with it, got none"),
        (["bench", "--fit-teacache", "--prompts", "no/x.txt"],
         "--prompts: expected a readable file of text, got [Errno 2]"),
        (["bench", "--fit-teacache", "--output", "x.md"],
         "--output: expected a .json file in an existing directory, got 'x.md'"),
        (["bench", "--fit-teacache", "--cache", "none"],
         "--fit-teacache: expected one --output at most, no --cache and no --vary, got more"),
        (["evil"], "expected one of generate, eval, bench, serve, nearest is eval, got 'evil'"),
    ],
)  # fmt: skip
def test_errors_are_one_line(capsys, arguments, message):
    assert message in error_of(capsys, *arguments)


def test_a_hub_that_is_not_reached_is_one_short_line(capsys, monkeypatch):
    def download(*_args, **_keywords):
        try:
            raise ConnectionRefusedError(111, "Connection refused")
        except OSError as error:
            text = "no model in the cache. Check out the root cause in the stacktrace above."
            raise OSError(text) from error

    monkeypatch.setattr(import_diffusers().DiffusionPipeline, "download", download)
    assert error_of(capsys, "generate", "a", "--model", "no-such/model").endswith(
        "model: expected a directory or a reachable hub id, got 'no-such/model': [Errno 111]"
        " Connection refused"
    )


def test_without_a_bundled_model(capsys, monkeypatch):
    from diffulex.omni import config

    monkeypatch.setattr(config, "_ZOO_MODEL", "examples/zoo/nothing")
    line = error_of(capsys, "generate", "x")
    assert line.endswith(
        "model: expected a directory or a hub id (--model), got none, and neither the"
        " package's source tree nor the working directory has examples/zoo/nothing"
    )


def test_interrupt(model, tmp_path, monkeypatch, capsys):
    from diffulex.omni import cli

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli._Course, "step", interrupt)
    target = tmp_path / "x.png"
    assert main(["omni", "generate", "x", "--model", str(model), "-o", str(target)]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not target.exists()


def test_help(capsys):
    for arguments in ([], ["--help"], ["generate", "--help"], ["eval", "--help"]):
        assert main(["omni", *arguments]) == 0
        assert "usage: diffulex omni" in capsys.readouterr().out


def test_an_evaluation_writes_its_reports(model, tmp_path, capsys):
    files = [tmp_path / "r.json", tmp_path / "r.md"]
    outputs = [part for file in files for part in ("--output", str(file))]
    steps = ["--num-inference-steps", "2,3", "--max-batch-size", "3"]
    assert main(["omni", "eval", "--model", str(model), "--limit", "5", *steps, *outputs]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("5 images, num_inference_steps 2, ")
    report = json.loads(files[0].read_text())
    assert [run["setting"] for run in report["runs"]] == [
        {"num_inference_steps": 2}, {"num_inference_steps": 3},
    ]  # fmt: skip
    for run in report["runs"]:
        low, high = run["wilson_95"]["all"]
        assert low <= run["accuracy"]["all"] <= high
        # A random model draws no caption.
        assert len(run["wrong"]) == 5
    assert files[1].read_text().count("| num_inference_steps ") == 2


def test_an_evaluation_compares_caches(model, tmp_path, capsys):
    files = [tmp_path / "r.json", tmp_path / "r.md"]
    outputs = [part for file in files for part in ("--output", str(file))]
    caches = ["--cache", "none,cache-dit=1", "--max-warmup-steps", "1"]
    caches += ["--vary", "vae_use_slicing=true,vae_cpu_offload=true"]
    assert main(["omni", "eval", "--model", str(model), "--limit", "2", *caches, *outputs]) == 0
    assert (
        "beside the first: 0 lost, 0 gained (p 1), pixels differ by 0." in capsys.readouterr().out
    )
    first, second, third = json.loads(files[0].read_text())["runs"]
    assert first["setting"] == {"cache": "none"}
    assert second["setting"] == {"cache": "cache-dit=1"}
    assert "blocks_run" not in first
    # Of three steps of four blocks the second and third run one block.
    assert second["blocks_run"] == 0.5
    assert 0 < second["pixel_change"] < 1
    assert third["setting"] == {"with": "vae_use_slicing=true,vae_cpu_offload=true"}
    # Neither changes a picture.
    assert third["pixel_change"] == 0
    table = files[1].read_text()
    assert "| blocks run | lost, gained (p) | pixel change |" in table
    assert "| 50.0% | 0, 0 (1) | " in table


def test_pairs_of_runs():
    assert Pairs(0, 0, 0.0).p_value == 1
    assert Pairs(3, 3, 0.0).p_value == 1
    assert Pairs(5, 0, 0.0).p_value == pytest.approx(2 / 32)
    assert Pairs(1, 8, 0.0).p_value == pytest.approx(2 * (1 + 9) / 2**9)


def test_a_measurement_of_speed(model, tmp_path, capsys):
    files = [tmp_path / "r.json", tmp_path / "r.md"]
    outputs = [part for file in files for part in ("--output", str(file))]
    arguments = ["--steps", "4", "--repeat", "2", "-n", "2", "--max-warmup-steps", "1"]
    caches = ["--cache", "none,cache_dit=1"]
    assert main(["omni", "bench", "--model", str(model), *arguments, *caches, *outputs]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[:3] == ["setting", "request", "s"]
    assert [line.split()[0] for line in shown[1:]] == ["none", "cache_dit=1"]
    report = json.loads(files[0].read_text())
    assert report["environment"]["fields"] == {
        "num_inference_steps": 4, "num_outputs_per_prompt": 2,
    }  # fmt: skip
    for run, blocks in zip(report["runs"], (1, (4 + 3) / 16), strict=True):
        assert run["num_images"] == 2
        assert run["blocks_run"] == blocks
        assert 0 < run["fastest_s"] <= run["request_s"]
        assert 0 < run["step_s"] < run["request_s"]
        assert run["decode_s"] > 0
        assert run["peak_bytes"] > 1 << 20
    assert files[1].read_text().count("\n| ") == 4


def test_coefficients_of_a_model(model, tiny, tmp_path, capsys):
    target, prompts = tmp_path / "shapes.json", tmp_path / "prompts.txt"
    target.write_text('{"grammar": 1}')
    prompts.write_text("a cat\n\na dog\na cow\n")
    fit = ["bench", "--fit-teacache", "--steps", "6", "--limit", "2"]
    own = [*fit, "--prompts", str(prompts), "--output", str(target)]
    assert main(["omni", *own, "--model", str(model)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    # Without guidance there is one branch: five pairs of neighbouring steps for each prompt.
    assert second.startswith("2 prompts, 6 steps, 10 pairs of steps: mean change 0.")
    record = json.loads(target.read_text())
    assert record["grammar"] == 1
    assert len(record["tea_cache"]["coefficients"]) == 5
    # What it has found fits what it has seen better than no change, and is read with the model.
    assert record["tea_cache"]["mean_error"] < record["tea_cache"]["mean_change"]
    copy = shutil.copytree(model, tmp_path / "model")
    shutil.copy(target, copy / "shapes.json")
    with OmniDiffusion(model=str(copy), cache_backend="tea_cache") as engine:
        used = engine.engine._worker._cache.config
        assert list(used.coefficients) == record["tea_cache"]["coefficients"]
    options = ["--cache-backend", "tea_cache", first, "--rel-l1-thresh", "1e9"]
    picture = ["generate", "x", "--model", str(model), "-o", str(tmp_path / "x.png")]
    assert main(["omni", *picture, *options]) == 0
    capsys.readouterr()
    line = error_of(
        capsys, *fit, "--model", str(tiny("z_image")), "--height", "64", "--width", "64"
    )
    assert "--fit-teacache: expected a pipeline with an indicator, got ZImagePipeline" in line
    line = error_of(capsys, *fit, "--model", str(model), "--steps", "3", "--limit", "1")
    assert "--fit-teacache: expected more than 4 pairs of steps, got 2" in line


def test_a_picture_in_character_cells():
    image = Image.new("RGB", (4, 4), (255, 0, 0))
    image.putpixel((0, 1), (0, 0, 255))
    lines = half_blocks(image, columns=80, rows=24)
    assert len(lines) == 2
    assert lines[0].startswith("\x1b[38;2;255;0;0;48;2;0;0;255m▀")
    assert lines[0].count("▀") == 4
    wide = half_blocks(Image.new("RGB", (400, 100)), columns=40, rows=24)
    assert (len(wide), wide[0].count("▀")) == (5, 40)
    stream = io.StringIO()
    painter = PicturePainter(stream, columns=10, rows=10)
    painter.show(image, "step 1 of 2")
    painter.show(image, "step 2 of 2")
    assert stream.getvalue().count("\x1b[3A\r\x1b[J") == 1
    assert "step 1 of \n" in stream.getvalue()


class Terminal(io.StringIO):
    """A standard error that claims to be a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("flags", "no_color"), [(["--show-denoising"], ""), (["--show-denoising"], "1"), ([], "")]
)
def test_denoising_is_shown_in_a_terminal(model, tmp_path, monkeypatch, capsys, flags, no_color):
    for name, value in (("NO_COLOR", no_color), ("COLUMNS", "70"), ("LINES", "40")):
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        terminal = Terminal()
        patch.setattr(sys, "stderr", terminal)
        arguments = ["generate", "a cat", "--model", str(model), "-o", str(tmp_path / "x.png")]
        assert main(["omni", *arguments, *flags]) == 0
    capsys.readouterr()
    text = terminal.getvalue()
    if flags and not no_color:
        assert all(f"step {step} of 3" in text for step in (1, 2, 3))
        # Three steps and the result, each over the one before: 32 lines of the picture, a caption.
        assert text.count("\x1b[33A\r\x1b[J") == 3
        assert "▀" in text
    else:
        assert "Denoising" in text
        assert "0/3" in text
        assert "▀" not in text


@pytest.mark.slow
def test_training_runs_from_scenes_to_a_model(tmp_path):
    model = tmp_path / "model"
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples/train_shapes/train.py"), "--out", str(model),
         "--device", "cpu", "--tiny", "--bank", "16", "--batch", "2", "--vae-batch", "2",
         "--vae-seconds", "0.1", "--seconds", "0.1", "--eval", "2", "--eval-batch", "2"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "gate all: at least 85%, got" in result.stdout
    record = json.loads((model / "shapes.json").read_text())
    assert record["gate"]["captions"] == 2
    assert record["recipe"]["transformer_steps"] >= 1
    assert main(["omni", "generate", "a red circle", "--model", str(model), "--num-inference-steps", "2",
                 "-o", str(tmp_path / "x.png")]) == 0  # fmt: skip
    with Image.open(tmp_path / "x.png") as image:
        assert image.size == (64, 64)


def parser_kwargs(words):
    return cli._engine_kwargs(cli.build_parser().parse_with_file(words))


def test_settings_of_the_cache_are_json_and_flags_count_more(capsys):
    settings = {"cache_backend": "cache_dit", "max_warmup_steps": 2, "taylorseer_order": 3}
    given = ["--cache-config", json.dumps(settings), "--max-warmup-steps", "6"]
    assert parser_kwargs(["serve", *given]) == {**settings, "max_warmup_steps": 6}
    options = cli.build_parser().parse_with_file(
        ["bench", "--vary", 'cache_config={"cache_backend":"cache_dit","max_warmup_steps":1}']
    )
    (run,) = [run for run in cli._varied(options, {}).values() if run]
    assert run == {"cache_backend": "cache_dit", "max_warmup_steps": 1}
    for text, message in (
        ("{", "argument --cache-config: expected a JSON object, got '{'"),
        ("[]", "argument --cache-config: expected a JSON object, got '[]'"),
        ('{"dtype": "float"}', "expected a known key, got 'cache_config.dtype'"),
        ('{"max_warmup_steps": -1}', "max_warmup_steps: expected int [0, 2147483647], got -1"),
    ):
        assert message in error_of(capsys, "generate", "a", "--cache-config", text)


def test_dtypes_of_components_are_json_or_a_map_of_a_file(tmp_path, capsys):
    parser, dtypes = cli.build_parser(), {"default": "bfloat16", "vae": "float32"}
    (tmp_path / "x.yaml").write_text(json.dumps({"dtype": dtypes}))
    for given in (["--dtype", json.dumps(dtypes)], ["--config", str(tmp_path / "x.yaml")]):
        options = parser.parse_with_file(["serve", *given])
        assert cli._engine_kwargs(options) == {"dtype": dtypes}
    line = error_of(capsys, "generate", "a", "--dtype", "{vae}")
    assert line.endswith("argument --dtype: expected a JSON object, got '{vae}'")
    line = error_of(capsys, "generate", "a", "--dtype", '{"vae": "int7"}')
    assert "dtype.vae: expected one of auto, float32, bfloat16, float16, got 'int7'" in line
    assert "dtype: expected default or one of " in error_of(
        capsys, "generate", "a", "--dtype", '{"vea": "float32"}'
    )


@pytest.mark.parametrize("words", [["generate", "a"], ["serve"], ["eval"], ["bench"]])
def test_flags_have_short_names_where_a_command_has_no_such_flag(words):
    given = ["--cache", "cache_dit", "--cfg-parallel", "2", "--ulysses", "2", "--ring", "2"]
    options = cli.build_parser().parse_with_file([*words, *given])
    kwargs = cli._engine_kwargs(options)
    assert {kwargs[name] for name in ("cfg_parallel_size", "ulysses_degree", "ring_degree")} == {2}
    sizes = parser_kwargs([*words, "--tp", "2", "--dp", "3", "--pp", "1", "--usp", "4"])
    assert sizes == {
        "tensor_parallel_size": 2,
        "data_parallel_size": 3,
        "pipeline_parallel_size": 1,
        "ulysses_degree": 4,
    }
    has_list = words[0] in ("eval", "bench")
    assert kwargs.get("cache_backend") == (None if has_list else "cache_dit")
    assert getattr(options, "cache", None) == (("cache_dit",) if has_list else None)
