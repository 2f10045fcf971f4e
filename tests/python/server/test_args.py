# SPDX-License-Identifier: Apache-2.0
"""The server's command line: its flags and the table of the engine's settings."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import uvicorn

from diffulex.config.table import CONFIG_TABLE
from diffulex.errors import ConfigError
from diffulex.log import _warned
from diffulex.server import __main__ as server_main
from diffulex.server import requirements
from diffulex.server.args import (
    INTERNAL_ENGINE_KEYS,
    ServerArgs,
    build_arg_parser,
    parse_args,
    parse_device_ids,
)
from diffulex.server.flags_markdown import render_markdown
from diffulex.server.launch import main
from diffulex.server.server_flags import http_flags
from diffulex.tools import cli

# Section 10.1: what a flag puts into the engine's keywords.
UPSTREAM_FLAGS = [
    ("--model-name sdar", {"model_name": "sdar"}),
    ("--decoding-strategy d2f", {"decoding_strategy": "d2f"}),
    ("--sampling-mode edit", {"sampling_mode": "edit"}),
    ("--mask-token-id 7", {"mask_token_id": 7}),
    ("--tensor-parallel-size 1", {"tensor_parallel_size": 1}),
    ("--data-parallel-size 1", {"data_parallel_size": 1}),
    ("--master-addr other", {"master_addr": "other"}),
    ("--master-port 2334", {"master_port": 2334}),
    ("--distributed-timeout-seconds 60", {"distributed_timeout_seconds": 60}),
    ("--device-ids 0,2", {"device_ids": [0, 2]}),
    ("--block-size 8", {"block_size": 8}),
    ("--buffer-size 2", {"buffer_size": 2}),
    ("--page-size 16", {"page_size": 16}),
    ("--max-num-batched-tokens 512", {"max_num_batched_tokens": 512}),
    ("--max-num-reqs 3", {"max_num_reqs": 3}),
    ("--max-model-len 99", {"max_model_len": 99}),
    ("--disable-prefill-cudagraph", {"enable_prefill_cudagraph": False}),
    ("--disable-full-static-runner", {"enable_full_static_runner": False}),
    ("--prefill-cudagraph-max-len 4", {"prefill_cudagraph_max_len": 4}),
    ("--disable-torch-compile", {"enable_torch_compile": False}),
    ("--enable-cudagraph-torch-compile", {"enable_cudagraph_torch_compile": True}),
    ("--torch-compile-mode default", {"torch_compile_mode": "default"}),
    ("--auto-max-nfe-warmup-steps 3", {"auto_max_nfe_warmup_steps": 3}),
    ("--auto-max-nfe-tpf-floor 0.5", {"auto_max_nfe_tpf_floor": 0.5}),
    ("--gpu-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
    ("--enforce-eager", {"enforce_eager": True}),
    ("--attn-impl cpu", {"attn_impl": "cpu"}),
    ("--disable-prefix-caching", {"enable_prefix_caching": False}),
    ("--kv-cache-layout distinct", {"kv_cache_layout": "distinct"}),
    ("--moe-dispatcher-backend standard", {"moe_dispatcher_backend": "standard"}),
    ("--moe-gemm-impl auto", {"moe_gemm_impl": "auto"}),
    ("--add-block-threshold 0.2", {"decoding_thresholds": {"add_block_threshold": 0.2}}),
    ("--semi-complete-threshold 0.3", {"decoding_thresholds": {"semi_complete_threshold": 0.3}}),
    ("--accept-threshold 0.4", {"decoding_thresholds": {"accept_threshold": 0.4}}),
    ("--remask-threshold 0.5", {"decoding_thresholds": {"remask_threshold": 0.5}}),
    (
        "--token-stability-threshold 0.6",
        {"decoding_thresholds": {"token_stability_threshold": 0.6}},
    ),
    ("--use-lora --lora-path x --pre-merge-lora", {"use_lora": True, "lora_path": "x"}),
]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("DIFFULEX_API_KEY", raising=False)
    _warned.clear()


def engine_kwargs(line: str) -> dict:
    return parse_args(line.split()).engine_kwargs()


@pytest.mark.parametrize(("line", "expected"), UPSTREAM_FLAGS)
def test_flags_reach_the_engine(line, expected):
    kwargs = engine_kwargs(line)
    assert {name: kwargs[name] for name in expected} == expected


def test_nothing_given_leaves_the_choice_to_checkpoint_and_family():
    args = parse_args([])
    assert args.engine_kwargs() == {"device_ids": [], "decoding_thresholds": {}}
    assert (args.model, args.host, args.port) == ("demo", "127.0.0.1", 8000)
    assert args.served_names == ("demo",)


def test_every_key_of_the_engine_has_a_flag_and_a_field():
    flags = {flag for action in build_arg_parser()._actions for flag in action.option_strings}
    fields = ServerArgs.__dataclass_fields__
    for name in CONFIG_TABLE:
        is_internal = name in INTERNAL_ENGINE_KEYS
        assert (name in fields) is (not is_internal or name == "model"), name
        assert is_internal or f"--{name.replace('_', '-')}" in flags, name


def test_every_server_setting_has_a_flag_and_help():
    flags = {flag for action in build_arg_parser()._actions for flag in action.option_strings}
    for row in http_flags():
        assert row.flag in flags
        assert row.help.endswith("."), row.name
        assert row.name not in CONFIG_TABLE or row.name == "model"


def test_mask_token_id_and_profiler_config_are_absent_unless_given():
    assert not {"mask_token_id", "profiler_config"} & set(engine_kwargs(""))
    line = "--profiler torch --torch-profiler-dir /t --profiler-memory --profiler-max-iterations 3"
    assert engine_kwargs(line)["profiler_config"] == {
        "profiler": "torch",
        "torch_profiler_dir": "/t",
        "record_shapes": False,
        "profile_memory": True,
        "with_stack": False,
        "delay_iterations": 0,
        "max_iterations": 3,
    }
    line = "--profiler torch --torch-profiler-dir /t"
    assert engine_kwargs(line)["profiler_config"]["max_iterations"] == 200  # bounds the files


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--attn-impl triton_grouped", "attn_impl", "auto"),
        ("--attn-impl triton", "attn_impl", "auto"),
        ("--moe-gemm-impl triton", "moe_gemm_impl", "auto"),
        ("--moe-gemm-impl vllm", "moe_gemm_impl", "auto"),
        ("--moe-gemm-impl vllm_modular", "moe_gemm_impl", "auto"),
    ],
)
def test_legacy_names_are_mapped_with_one_warning(line, name, value, caplog):
    with caplog.at_level(logging.WARNING, logger="diffulex"):
        args = parse_args(line.split())
        assert args.engine_kwargs()[name] == value
        assert args.engine_kwargs()[name] == value
    assert [record.getMessage().count("deprecated") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--attn-impl naive", "attn_impl: expected one of auto, cuda, cpu, triton_grouped, triton"),
        ("--attn-impl reference", "attn_impl: expected one of auto, cuda, cpu, triton_grouped"),
        ("--moe-gemm-impl cutlass", "moe_gemm_impl: expected one of auto, cuda, cpu, naive, got"),
        ("--moe-gemm-impl reference", "moe_gemm_impl: expected one of auto, cuda, cpu, naive, got"),
        ("--moe-gemm-impl naive", "moe_gemm_impl: only 'auto' is supported so far"),
    ],
)
def test_kernels_that_do_not_exist_are_refused_before_anything_starts(line, message):
    with pytest.raises(ConfigError, match=message):
        parse_args(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "--deepep-mode normal",
        "--deepep-num-max-dispatch-tokens-per-rank 8",
        "--torch-compile-mode default",
        "--disable-torch-compile",
    ],
)
def test_flags_without_effect_are_accepted_with_a_warning(line, caplog):
    with caplog.at_level(logging.WARNING, logger="diffulex"):
        kwargs = engine_kwargs(line)
    assert "deepep_mode" not in kwargs
    assert any("no effect" in record.getMessage() for record in caplog.records)


def test_engine_args_are_yaml_and_reach_the_engine():
    kwargs = parse_args(
        ["--engine-arg", "num_pages=64", "--engine-arg", "suppress-token-ids=[1, 2]"]
    ).engine_kwargs()
    assert kwargs["num_pages"] == 64
    assert kwargs["suppress_token_ids"] == [1, 2]
    kwargs = parse_args(["--engine-arg", "decoding_thresholds={edit_threshold: 0.5}"])
    assert kwargs.engine_kwargs()["decoding_thresholds"] == {"edit_threshold": 0.5}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--port 70000", "--port: expected >= 0 and <= 65535, got 70000"),
        ("--port x", "expected an integer, got 'x'"),
        ("--block-size 5000", "block_size: expected"),
        ("--accept-threshold 1.5", "accept_threshold: expected"),
        ("--engine-arg num_page=3", "nearest is 'num_pages'"),
        ("--engine-arg block_size=8 --block-size 8", "got --block-size as well"),
        ("--engine-arg num_pages=1 --engine-arg num_pages=2", "got it again"),
        ("--engine-arg num_pages", "expected KEY=VALUE"),
        ("--engine-arg model=x", "expected it as --model"),
        ("--served-model-nam x", "nearest is --served-model-name"),
        ("--use-lora", "--lora-path: expected a directory"),
        ("--profiler torch", "--torch-profiler-dir: expected a directory"),
        ("--ssl-keyfile k", "expected both, got only --ssl-keyfile"),
        ("--ssl-keyfile /no/k --ssl-certfile /no/c", "got /no/k, /no/c: [Errno 2]"),
        ("--metrics-auth", "--metrics-auth: expected --api-key with it"),
        ("--metrics-auth --api-key k --metrics-port 9", "port asks for no key"),
        ("--trust-remote-code", "code of checkpoints is never run"),
        ("--allowed-origins notjson", "expected a JSON list of texts, got 'notjson'"),
        ('--allowed-methods {"a":1}', "expected a JSON list of texts"),
        ("--allowed-headers [1]", "expected a JSON list of texts, got '[1]'"),
        ("--request-timeout nan", "--request-timeout: expected >= 0, got nan"),
        ("--max-n 0", "--max-n: expected >= 1, got 0"),
        ("--log-level loud", "argument --log-level: expected one of critical, error, warning, "),
        ("--config /nowhere.yaml", "expected a readable YAML file"),
        ("--device-ids 0,x", "expected an integer, got 'x'"),
        ("--inproc --early-bind", "--early-bind: expected two processes, got --inproc"),
        ("--root-path api", "expected a path that starts with /"),
        ("--decoding-strategy foo", "decoding_strategy: expected one of block_diffusion, d2f, "),
        ("--engine-arg model_name=foo", "model_name: expected one of diffucoder, "),
    ],
)
def test_errors_are_one_line_that_names_the_setting(line, message):
    with pytest.raises(ConfigError) as caught:
        parse_args(line.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_file_gives_what_the_command_line_does_not(tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text(
        "port: 8001\nhost: 0.0.0.0\napi-key: [a, b]\nenforce_eager: true\naccess_log: false\n"
        "disable_prefix_caching: true\nauto-max-nfe: false\ndevice_ids: [0, 1]\nuds: null\n"
        'allowed_origins: ["https://x", "https://y"]\nengine_arg: {num_pages: 64}\n'
        "accept_threshold: 0.25\nserved_model_name: mine\n"
    )
    args = parse_args(["--config", str(path), "--port", "9", "--api-key", "c"])
    assert (args.port, args.host, args.access_log, args.uds) == (9, "0.0.0.0", False, None)
    assert args.api_key == ("c",)
    assert args.served_names == ("mine",)
    assert args.allowed_origins == ("https://x", "https://y")
    kwargs = args.engine_kwargs()
    assert kwargs["enforce_eager"] is True
    assert kwargs["enable_prefix_caching"] is False
    assert kwargs["auto_max_nfe"] is False
    assert kwargs["device_ids"] == [0, 1]
    assert kwargs["num_pages"] == 64
    assert kwargs["decoding_thresholds"] == {"accept_threshold": 0.25}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "expected a known key, nearest is 'port', got 'prot'"),
        ("[1]", "expected a map of settings"),
        ("port: x", "expected an integer, got 'x'"),
        ("enforce_eager: maybe", "expected true or false"),
        ("disable_ui: 3", "expected true or false as disable-ui, got 3"),
        ("port: {a: 1}", "expected no map as port"),
        ("config: other.yaml", "expected a known key"),
        ("a: [", "expected a readable YAML file"),
    ],
)
def test_errors_of_config_files(tmp_path, text, message):
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        parse_args(["--config", str(path)])


@pytest.mark.parametrize("name", ["api_key", "admin_api_key"])
def test_api_keys_of_the_environment(monkeypatch, name):
    monkeypatch.setenv(f"DIFFULEX_{name.upper()}", "one, two,")
    flag = "--" + name.replace("_", "-")
    assert getattr(parse_args([]), name) == ("one", "two")
    assert getattr(parse_args([flag, "three"]), name) == ("three",)
    with pytest.raises(ConfigError, match=f"{flag}: expected a key, got an empty one"):
        parse_args([flag, " "])


def test_secrets_are_not_shown(monkeypatch):
    keys = ["--api-key", "hidden", "--admin-api-key", "hidden-too"]
    args = parse_args([*keys, "--block-size", "8"])
    shown = args.public_settings()
    assert shown["block_size"] == 8
    assert "hidden" not in str(shown)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, []), ("  ", []), ("1", [1]), ("0, ,2,", [0, 2])]
)
def test_parse_device_ids(value, expected):
    assert parse_device_ids(value) == expected


def test_parse_device_ids_rejects_other_texts():
    with pytest.raises(ValueError, match="'x'"):
        parse_device_ids("1,x")


def test_a_public_address_without_keys_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING, logger="diffulex"):
        parse_args([]).log_warnings()
        parse_args(["--host", "0.0.0.0", "--api-key", "k"]).log_warnings()
        assert not caplog.records
        parse_args(["--host", "0.0.0.0"]).log_warnings()
    assert "anybody" in caplog.text


def test_lines_of_the_http_server_have_the_form_of_the_others(monkeypatch, capsys):
    for name in ("diffulex", "uvicorn", "uvicorn.access"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    args = parse_args(["--log-format", "json"])
    args.configure_logging()
    uvicorn.Config(None, **args.uvicorn_options())
    extra = {"color_message": "\x1b[36m%s\x1b[0m asked"}  # uvicorn adds it for terminals
    logging.getLogger("uvicorn.access").info("%s asked", "somebody", extra=extra)
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["msg"], line["logger"]) == ("somebody asked", "uvicorn.access")
    assert "color_message" not in line
    uvicorn.Config(None, **parse_args(["--no-access-log"]).uvicorn_options())
    logging.getLogger("uvicorn.access").info("hidden")
    assert capsys.readouterr().err == ""


def test_importing_needs_neither_torch_nor_the_extra():
    """Section 1, rule 4."""
    code = (
        "import sys\n"
        "blocked = {'torch', 'transformers', 'diffulex_ext', 'fastapi', 'uvicorn', 'zmq', 'msgpack',"
        " 'msgspec', 'prometheus_client', 'yaml'}\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in blocked: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from diffulex.server.args import parse_args\n"
        "parse_args(['--block-size', '8'])\n"
        "import diffulex.wire.protocol, diffulex.serving.zmq_queue, diffulex.serving.frontend\n"
        "blocked -= {'fastapi', 'msgspec', 'prometheus_client'}\n"
        "import diffulex.server.http.api_server, diffulex.serving.engine_loop\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_needs_no_packages(flag, monkeypatch, capsys):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    assert cli.main(["serve", flag]) == 0
    short = capsys.readouterr().out
    assert "--port" in short
    assert "--max-queue-size" not in short
    assert cli.main(["serve", "--help-all"]) == 0
    assert "--max-queue-size" in capsys.readouterr().out


def test_the_model_may_be_a_word():
    assert parse_args(["some/model", "--port", "0"]).model == "some/model"
    assert parse_args(["--port", "0", "some/model"]).model == "some/model"
    with pytest.raises(ConfigError, match="expected MODEL or --model, got both 'a' and 'b'"):
        parse_args(["a", "--model", "b"])
    with pytest.raises(ConfigError, match="expected one MODEL, got 'a' 'b'"):
        parse_args(["a", "b"])


def test_the_word_wins_over_the_file(tmp_path):
    (tmp_path / "c.yaml").write_text("model: b\nport: 1\n")
    args = parse_args(["a", "--config", str(tmp_path / "c.yaml")])
    assert (args.model, args.port) == ("a", 1)


@pytest.mark.parametrize("module", ["fastapi", "httptools"])
@pytest.mark.parametrize("run", [server_main.main, lambda argv: cli.main(["serve", *argv])])
def test_missing_packages_are_one_clear_line(run, module, monkeypatch, capsys):
    def find_spec(name):
        return None if name == module else object()

    monkeypatch.setattr(requirements, "find_spec", find_spec)
    assert run([]) == 2
    message = capsys.readouterr().err
    assert message.startswith("diffulex serve: error: serve: expected the packages")
    assert message.count("\n") == 1
    assert "pip install '.[serve]' in the source directory" in message
    assert "diffulex[serve]" not in message, "an index may have a package of this name"
    assert f"got none of {module}" in message


def test_the_document_is_up_to_date():
    path = Path(__file__).resolve().parents[3] / "docs" / "server_flags.md"
    assert path.read_text(encoding="utf-8") == render_markdown(), (
        "run: python -m diffulex.server.flags_markdown > docs/server_flags.md"
    )


@pytest.mark.parametrize("line", ["--port 99999", "--nope", "--engine-arg page_size=7"])
def test_bad_arguments_end_with_one_line_and_exit_code_2(line, capsys):
    assert main(line.split()) == 2
    message = capsys.readouterr().err
    assert message.startswith("diffulex serve: error: ")
    assert message.count("\n") == 1


def test_prompts_in_the_log_are_asked_for_twice(monkeypatch):
    monkeypatch.delenv("DIFFULEX_LOG_PROMPTS", raising=False)
    full = ["demo", "--log-requests", "full"]
    with pytest.raises(
        ConfigError,
        match="--log-requests full: expected DIFFULEX_LOG_PROMPTS=1 and --log-level debug with it, got"
        " DIFFULEX_LOG_PROMPTS=0 and debug",
    ):
        parse_args([*full, "--log-level", "debug"])
    monkeypatch.setenv("DIFFULEX_LOG_PROMPTS", "1")
    with pytest.raises(ConfigError, match="got DIFFULEX_LOG_PROMPTS=1 and info"):
        parse_args(full)
    assert parse_args([*full, "--log-level", "debug"]).log_requests == "full"
