# SPDX-License-Identifier: Apache-2.0
"""Settings of an evaluation: where a value comes from, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diffulex.bench.arg_parser import add_eval_flags, benchmark_config
from diffulex.bench.config import THRESHOLD_DEFAULTS, BenchmarkConfig
from diffulex.bench.presets import preset_path, presets
from diffulex.bench.requests import request_params
from diffulex.bench.task import read_tasks
from diffulex.config.flags import Parser, UsageError
from diffulex.errors import ConfigError


def parse(*arguments: str) -> BenchmarkConfig:
    parser = Parser()
    add_eval_flags(parser)
    return benchmark_config(parser.parse_checked(arguments))


def write(path: Path, settings: dict[str, Any]) -> Path:
    path.write_text(json.dumps(settings))
    return path


def test_later_places_win(tmp_path: Path) -> None:
    settings = {
        "engine": {"model_path": "file", "page_size": 16, "block_size": 8, "buffer_size": 2},
        "eval": {"max_tokens": 10, "dataset_limit": 3},
    }
    file = write(tmp_path / "a.json", settings)
    config = parse(
        "--config", str(file), "--page-size", "8", "--max-tokens", "20", "--buffer-size", "3",
        "--engine-arg", "buffer_size=5",
    )  # fmt: skip
    assert config.model_path == "file"
    assert (config.engine.page_size, config.engine.block_size) == (8, 8)
    assert config.engine.buffer_size == 5
    assert (config.eval.max_tokens, config.dataset_limit) == (20, 3)
    assert config.origins == {
        "engine.model_path": "file",
        "engine.page_size": "flag",
        "engine.block_size": "file",
        "engine.buffer_size": "engine-arg",
        "eval.max_tokens": "flag",
        "eval.dataset_limit": "file",
    }
    assert config.origin("eval.temperature") == "default"


def test_a_flag_with_the_default_value_overrides_a_file(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.json",
        {
            "model_path": "m", "max_tokens": 9, "ignore_eos": True, "save_results": False,
            "enforce_eager": True, "accept_threshold": 0.5,
        },
    )  # fmt: skip
    config = parse(
        "--config", str(file), "--max-tokens", "256", "--save-results", "--no-enforce-eager",
        "--accept-threshold", "0.9", "--dataset-split", "test",
    )  # fmt: skip
    assert config.eval.max_tokens == 256
    assert config.eval.save_results
    assert config.eval.ignore_eos
    assert not config.engine.enforce_eager
    assert config.thresholds == {"accept_threshold": 0.9}
    assert config.origin("eval.dataset_split") == "flag"


def test_likelihood_settings(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse("--model-path", "m", "--mc-num", "8", "--check-greedy")
    assert (config.eval.mc_num, config.eval.mc_batch_size, config.eval.check_greedy) == (
        8,
        32,
        True,
    )
    assert config.eval.likelihood_guidance == 0
    for flag, value, expected in (
        ("--mc-num", "0", "at least 1"),
        ("--mc-batch-size", "0", "at least 1"),
        ("--likelihood-guidance", "-1", "at least 0"),
    ):
        with pytest.raises(UsageError, match=f"argument {flag}: expected .* of {expected}"):
            parse("--model-path", "m", f"{flag}={value}")
    file = {"model_path": "m", "mc_num": 0}
    with pytest.raises(ConfigError, match=r"eval\.mc_num: expected at least 1, got 0"):
        BenchmarkConfig.from_dict(file).check()


def test_trajectories_are_kept_on_request() -> None:
    assert parse("--model-path", "m").eval.save_trace == "none"
    assert parse("--model-path", "m", "--save-trace", "full").eval.save_trace == "full"
    with pytest.raises(UsageError, match=r"--save-trace: expected one of .*, got 'all'"):
        parse("--model-path", "m", "--save-trace", "all")
    file = {"model_path": "m", "save_trace": "all"}
    with pytest.raises(ConfigError, match=r"eval\.save_trace: expected none or blocks or full"):
        BenchmarkConfig.from_dict(file).check()
    with pytest.raises(ConfigError, match="expected none with an endpoint"):
        parse("--endpoint", "http://localhost:1", "--save-trace", "blocks")


def test_files_are_nested_or_flat(tmp_path: Path) -> None:
    flat = {"model_path": "m", "diffusion_block_size": 16, "num_pages": 7, "max_tokens": 5}
    nested = {
        "engine": {"model_path": "m", "block_size": 16, "num_pages": 7},
        "eval": {"max_tokens": 5},
    }
    configs = [BenchmarkConfig.from_dict(item) for item in (flat, nested)]
    assert configs[0].to_dict() == configs[1].to_dict()
    assert configs[0].engine.extra_engine_kwargs == {"num_pages": 7}
    assert configs[0].get_diffulex_kwargs()["num_pages"] == 7
    for path, save in ((tmp_path / "a.yml", "save_yaml"), (tmp_path / "a.json", "save_json")):
        getattr(configs[0], save)(path)
        assert BenchmarkConfig.from_file(path).to_dict() == configs[0].to_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": {"complete_threshold": 1}, "eval": {}}, "nearest is 'semi_complete_threshold'"),
        ({"add_new_block_threshold": 0.1}, "nearest is 'add_block_threshold'"),
        ({"engine": {"max_token": 1}, "eval": {}}, "engine: expected a known key"),
        ({"engine": {}, "eval": {"dataset": "x"}}, "nearest is 'dataset_name'"),
        ({"decoding_thresholds": {"accept": 0.9}}, "nearest is 'accept_threshold'"),
        ({"engine": {}, "eval": {}, "more": 1}, "expected engine and eval alone, got 'more'"),
        ({"max_tokens": "many"}, "eval.max_tokens: expected int, got 'many'"),
        ({"page_size": True}, "engine.page_size: expected int, got True"),
        ({"accept_threshold": "high"}, "engine.accept_threshold: expected a number"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        BenchmarkConfig.from_dict(settings)


def test_a_null_is_no_choice() -> None:
    config = BenchmarkConfig.from_dict({"model_path": "m", "max_tokens": None, "page_size": None})
    assert (config.eval.max_tokens, config.engine.page_size) == (256, 32)
    assert config.origins == {"engine.model_path": "file"}


def test_threshold_defaults_hold_where_none_is_given() -> None:
    assert BenchmarkConfig.from_dict({}).thresholds == THRESHOLD_DEFAULTS
    given = BenchmarkConfig.from_dict({"decoding_thresholds": {"edit_threshold": 0.5}})
    assert given.thresholds == {"edit_threshold": 0.5}


@pytest.mark.parametrize("alias", ["multi_block_diffusion", "block_diffusion", "fast_dllm"])
def test_strategy_aliases(alias: str) -> None:
    assert BenchmarkConfig.from_dict({"decoding_strategy": alias}).decoding_strategy == "multi_bd"


def test_without_lora_its_path_is_empty() -> None:
    config = BenchmarkConfig.from_dict({"use_lora": False, "lora_path": "somewhere"})
    assert config.engine.lora_path == ""
    with pytest.raises(ConfigError, match="use_lora: expected a lora_path"):
        parse("--model-path", "m", "--use-lora")


def test_a_file_may_name_the_adapter_that_a_flag_turns_on(tmp_path: Path) -> None:
    file = str(write(tmp_path / "a.json", {"model_path": "m", "lora_path": "adapter"}))
    assert parse("--config", file, "--use-lora").engine.lora_path == "adapter"
    assert parse("--config", file).engine.lora_path == ""


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_has_items(tmp_path: Path, limit: int) -> None:
    file = write(tmp_path / "a.json", {"model_path": "m", "dataset_limit": limit})
    with pytest.raises(ConfigError, match=f"eval.dataset_limit: expected at least 1, got {limit}"):
        parse("--config", str(file))


def test_a_flag_wins_over_the_parameters_of_a_file(tmp_path: Path) -> None:
    settings = {"model_path": "m", "gen_kwargs": {"max_tokens": 9, "seed": 3}, "temperature": 0.5}
    file = str(write(tmp_path / "a.json", settings))
    params = request_params(parse("--config", file, "--max-tokens", "7"), {"max_tokens": 5})
    assert (params.max_tokens, params.seed, params.temperature) == (7, 3, 0.5)
    assert request_params(parse("--config", file), {"max_tokens": 5}).max_tokens == 9


def test_nothing_is_read_unless_it_is_named() -> None:
    config = parse("--model-path", "m")
    assert config.origins == {"engine.model_path": "flag"}
    assert config.dataset_limit is None
    with pytest.raises(ConfigError, match="model_path: expected a directory or a hub id"):
        parse()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--engine-arg", "block_size"),
        ("--engine-arg", "=4"),
        ("--config", "settings.toml"),
        ("--page-size", "5"),
        ("--accept-threshold", "1.5"),
        ("--max-model-len", "8192"),
        ("--block-size", "64"),
        ("--profiler", "torch"),
        ("--torch-profiler-dir", "x"),
        ("--save-trace", "everything"),
        ("--temprature", "1"),
        ("--preset", "example", "--config", "a.yml"),
    ],
)
def test_wrong_command_lines_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        parse("--model-path", "m", *arguments)


def test_engine_arguments_are_yaml_and_reach_into_maps() -> None:
    config = parse(
        "--model-path", "m", "--engine-arg", "decoding_thresholds.accept_threshold=0.97",
        "--engine-arg", "device_ids=[0, 1]", "--engine-arg", "enforce_eager=true",
        "--accept-threshold", "0.5",
    )  # fmt: skip
    kwargs = config.get_diffulex_kwargs()
    assert kwargs["decoding_thresholds"] == {"accept_threshold": 0.97}
    assert kwargs["device_ids"] == [0, 1]
    assert kwargs["enforce_eager"] is True


def test_the_older_name_of_a_flag_warns() -> None:
    with pytest.warns(UserWarning, match="--max-num-seqs is deprecated"):
        config = parse("--model-path", "m", "--max-num-seqs", "3")
    assert config.engine.max_num_reqs == 3


def test_profiler_flags_become_one_setting() -> None:
    config = parse(
        "--model-path", "m", "--profiler", "torch", "--torch-profiler-dir", "d",
        "--profiler-max-iterations", "4", "--profiler-with-stack",
    )  # fmt: skip
    assert config.get_diffulex_kwargs()["profiler_config"] == {
        "torch_profiler_dir": "d",
        "max_iterations": 4,
        "with_stack": True,
    }


def test_values_of_other_engines_mean_the_native_ones() -> None:
    config = parse("--model-path", "m", "--attn-impl", "triton", "--moe-gemm-impl", "vllm")
    assert not {"attn_impl", "moe_gemm_impl"} & config.get_diffulex_kwargs().keys()


def test_presets_load_and_hold_no_path_of_a_machine() -> None:
    assert len(presets()) >= 12
    for name in presets():
        config = parse("--preset", name)
        assert config.model_path
        assert BenchmarkConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
        assert not re.search(r"[\"' ]/|[A-Z]:\\\\|\.\./", preset_path(name).read_text())
    with pytest.raises(UsageError):
        parse("--preset", "nothing")


@pytest.mark.parametrize("name", presets())
def test_presets_ask_in_the_markup_of_their_family(name: str) -> None:
    config = parse("--preset", name)
    (task,) = read_tasks(config.dataset_name) or []
    assert ("<role>" in task.template) == config.model_name.startswith("llada2")
    assert ("<|turn>" in task.template) == (config.model_name == "diffusion_gemma")


@pytest.mark.parametrize("name", ["llada_instruct_gsm8k", "diffucoder_instruct_gsm8k"])
def test_presets_have_room_for_long_prompts_and_begin(name: str) -> None:
    config = parse("--preset", name)
    assert config.engine.max_model_len == 2048
    assert config.eval.add_bos_token is True


def test_reading_settings_imports_nothing_heavy() -> None:
    code = (
        "import sys; import diffulex.bench; from diffulex.bench import BenchmarkConfig, EvalConfig;"
        "bad = {'lm_eval', 'pandas', 'sympy', 'torch', 'datasets'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_the_older_entry_point_evaluates() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diffulex_bench.main", "--model-path", "demo", "--dataset", "nothing",
         "--include-path", ""],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "dataset" in done.stderr


def test_the_older_package_has_the_same_names() -> None:
    import diffulex_bench

    assert diffulex_bench.BenchmarkConfig is BenchmarkConfig


def test_settings_are_described_with_their_origins() -> None:
    config = BenchmarkConfig.from_dict({"model_path": "demo", "accept_threshold": 0.5})
    config.update({"max_tokens": 9}, "flag")
    lines = config.describe()
    assert "engine.model_path = 'demo' (file)" in lines
    assert "eval.max_tokens = 9 (flag)" in lines
    assert "engine.block_size = 32 (default)" in lines


def test_files_of_other_programs_for_servers() -> None:
    endpoint = {
        "base_url": "http://x", "model": "m", "engine_name": "sglang", "api_key": "EMPTY",
        "tokenizer_path": "demo", "batch_size": 4, "trust_remote_code": True, "timeout": 60,
        "chat_completions": True, "verify": False,
    }  # fmt: skip
    settings = {"endpoint": endpoint, "eval": {"dataset_name": "smoke_arith", "max_tokens": 5}}
    config = BenchmarkConfig.from_dict(settings)
    config.check()
    chosen = config.eval
    assert (chosen.endpoint, chosen.endpoint_model, chosen.endpoint_api) == (
        "http://x",
        "m",
        "chat",
    )
    assert (chosen.concurrency, chosen.timeout, chosen.verify_tls) == (4, 60.0, False)
    assert (chosen.dataset_name, chosen.max_tokens) == ("smoke_arith", 5)
    assert config.tokenizer_path == "demo"
    with pytest.raises(ConfigError, match=r"endpoint.api_key: expected EMPTY .*, got one$"):
        BenchmarkConfig.from_dict({"endpoint": {"api_key": "secret"}, "eval": {}})
    with pytest.raises(ConfigError, match=r"endpoint: expected one of .*, got 'speed'"):
        BenchmarkConfig.from_dict({"endpoint": {"speed": 1}, "eval": {}})
