# SPDX-License-Identifier: Apache-2.0
"""Every row of the configuration table, and the rules between rows."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from diffulex.config.config import Config
from diffulex.config.table import CONFIG_TABLE, THRESHOLD_KEYS, IgnoredConfig, Support
from diffulex.config.types import ModelFacts
from diffulex.errors import ConfigError
from diffulex.families.spec import ModelSpec
from diffulex.quantization.stored import StoredQuantization, StoredRule
from diffulex.registry import AutoSampler

SPEC: dict[str, Any] = {
    "family": "sdar",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_layers": 2,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "max_positions": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rotary_dim": 32,
    "mask_token_id": 259,
    "stop_token_ids": (256, 258),
    "block_size": 4,
}


class _FamilySampler:
    family_defaults: ClassVar[dict[str, Any]] = {
        "accept_threshold": 0.95,
        "acceptance_rule": "dynamic",
        "buffer_size": 1,
        "confidence_space": "processed",
        "temperature": 0.0,
    }


class _PlainSampler:
    pass


@pytest.fixture(autouse=True)
def _samplers() -> Any:
    AutoSampler.register("config_test", _FamilySampler)
    AutoSampler.register("config_test_plain", _PlainSampler)
    yield
    AutoSampler.unregister("config_test")
    AutoSampler.unregister("config_test_plain")


def facts(
    name: str = "config_test", checkpoint: dict[str, Any] | None = None, **spec: Any
) -> ModelFacts:
    return ModelFacts(name, Path("/models/x"), ModelSpec(**{**SPEC, **spec}), checkpoint or {}, 260)


def resolve(given: ModelFacts | None = None, /, **flat: Any) -> Config:
    flat.setdefault("device", "cpu")
    return Config.resolve("x", given or facts(), flat)


# (key, legal values, illegal values) from the configuration reference.
RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("load_format", ["auto", "dummy"], ["", "safetensors", 1]),
    ("block_size", [4, 8, 16, 32], [0, 1, 2, 5, 64, 256, 8.0, "8", True]),
    ("buffer_size", [1, 2, 32], [0, -1, 1.5, 33]),
    ("dmax_sampler_fast_path", [True, False], [1, "on"]),
    ("add_block_threshold", [0, 0.5, 1], [-0.01, 1.01, float("nan"), "0.5"]),
    ("semi_complete_threshold", [0, 1.0], [-1, 2]),
    ("accept_threshold", [0, 0.95, 1], [-0.1, 1.5, float("inf")]),
    ("remask_threshold", [0, 1], [1.1]),
    ("token_stability_threshold", [0, 1], [-0.5]),
    ("max_num_reqs", [1, 512], [0, -3]),
    ("max_model_len", [2, 2048], [1, 0]),
    ("gpu_memory_utilization", [0.1, 1, 1.0], [0, 1.01, -0.5]),
    ("num_pages", [-1, 1, 1000], [0, -2]),
    ("page_size", [4, 8, 16, 32], [1, 2, 12, 64]),
    ("enable_prefix_caching", [True, False], [1, "yes"]),
    ("kv_cache_layout", ["unified", "distinct"], ["split"]),
    ("kv_cache_dtype", ["auto", "fp8_e4m3"], ["fp8", "float16", 1]),
    ("k_cache_hdim_split_factor_x", [1, 4, 8], [0]),
    ("cpu_kv_cache_bytes", [1, 1 << 31], [0]),
    ("require_fast_paths", [True, False], [1, "on"]),
    ("step_records", [0, 1, 65536], [-1, 1.5, True]),
    ("auto_max_nfe", [True, False], [0]),
    ("auto_max_nfe_warmup_steps", [1, 8], [0]),
    ("auto_max_nfe_tpf_floor", [0.5, 1], [0, -1]),
    ("enable_chunked_prefill", [True, False], ["no"]),
    ("allow_mask_in_prompt", [True, False], [None.__class__]),
    ("decode_headroom", [True, False], [None.__class__]),
    ("max_consecutive_prefill_batches", [0, 3], [-1]),
    ("mixed_step_rows", [0, 64], [-1, 1 << 20]),
    ("skip_warmup", [True, False], [2]),
    ("mask_token_id", [0, 259], [-1, 300, 1.0]),
    ("tokenizer_vocab_size", [1, 260], [0]),
    ("eos", [-1, 5, [5, 6]], [-2, [300], "end"]),
    ("dtype", ["auto", "float32", "bfloat16", "float16", "bf16", "fp32"], ["int8", "fp8"]),
    ("device", ["auto", "cpu"], ["gpu", "cuda:x", "cpu:0"]),
    ("master_port", [0, 65535], [-1, 65536]),
    ("distributed_timeout_seconds", [1], [0]),
    ("device_start", [0], [-1]),
    ("temperature", [0, 1.0, 2], [-0.1]),
    ("generation_config", ["engine", "checkpoint"], ["auto", "vllm", None.__class__]),
    ("seed", [0, 2**64 - 1], [-1, 2**64]),
    ("mask_suppression", ["exclude", "renormalize"], ["off"]),
    (
        "acceptance_rule",
        ["threshold", "dynamic", "static", "entropy_bound", "leftmost_prefix", "hierarchy"],
        ["best"],
    ),
    ("low_threshold", [0, 0.5, 1], [-0.1, 1.1]),
    ("demote_token_ids", [[], [1, 2], 3], [[-1], [300], "a"]),
    ("top_p", [0, 0.5, 1, 2.0], [-0.1, float("nan"), "1"]),
    ("top_k", [-1, 0, 5], [1.5, "5", 2**31]),
    ("min_p", [0, 0.5, 1], [-0.1, 1.1]),
    ("sampling_mode", ["naive"], ["edits", "edit"]),
    ("edit_threshold", [0, 0.5, 1], [-0.1, 1.1]),
    ("max_post_edit_steps", [0, 16], [-1, 1.5]),
    ("penalty_lambda", [0, 3.0], [-0.1]),
    ("token_merge_mode", ["dmax_topk", "iter_smooth_topk"], ["mean"]),
    ("token_merge_top_k", [1, 8], [0, 9, -1]),
    ("token_merge_renormalize", [True, False], [1]),
    ("token_merge_weight", [0, 0.5], [-0.1]),
    ("dmax_store_soft_embeddings", [True, False], [0]),
    ("d2f_block_grid", [True, False], ["no", 1]),
    ("fdv2_use_block_cache", [True, False], ["no"]),
    ("fdv2_exact_graph_buckets", [True, False], ["no"]),
    ("diffusion_gemma_max_denoising_steps", [1, 48], [0, -1]),
    ("diffusion_gemma_stability_threshold", [0, 2], [-1, 0.5]),
    ("diffusion_gemma_t_min", [0, 0.4], [-0.1]),
    ("diffusion_gemma_t_max", [0.8, 1], [0, -1]),
    ("diffusion_gemma_confidence_threshold", [0.005, 1], [0, -1]),
    ("diffusion_gemma_entropy_bound", [0.1, 3], [0, -0.1]),
    ("denoising_steps", [1, 4], [0, 5]),
    ("confidence_type", ["max_prob", "margin_confidence", "neg_entropy"], ["margin"]),
    ("confidence_space", ["processed", "tempered", "raw"], ["cooked"]),
    ("factor", [0.1, 1], [0, -1]),
    ("entropy_bound", [0, 0.1], [-0.1]),
    ("forced_gate", ["prev_semi_complete", "always"], ["never"]),
    ("suppress_token_ids", [[], [1, 2], (3,)], [[-1], [300], [1, 2, 3, 4, 5, 6, 7, 8], ["a"]]),
    ("enforce_eager", [True, False], [1]),
    ("run_ahead", ["auto", "on", "off"], ["maybe", True]),
    ("batch_invariant", [True, False], [1, "yes"]),
    ("check_run_ahead", [True, False], [1]),
    ("data_parallel_size", [1, 4, 1024], [0, 1025, True]),
    ("data_parallel_policy", ["prefix", "least_loaded", "round_robin"], ["random"]),
    ("tensor_parallel_size", [1], [0, 9, True]),
    ("expert_parallel_size", [1], [0, 32769, True]),
    ("moe_parallel_mode", ["auto"], ["both", "", 1]),
    ("moe_dispatcher_backend", ["standard"], ["deepep", "naive", "both", 1]),
    ("distributed_timeout_seconds", [1, 7200], [0, 1.5]),
    ("collective_timeout_seconds", [0, 60], [-1, 1.5]),
    ("distributed_backend", ["auto", "nccl", "gloo"], ["mpi", True]),
    ("custom_all_reduce", ["auto", "on", "off"], ["maybe", True]),
    ("check_ranks", [True, False], [1]),
    ("distributed_executor", ["auto", "mp", "ray"], ["mpi", 1]),
    ("ray_address", ["auto", "local"], [3, "", " "]),
    ("master_addr", ["localhost", "10.0.0.1"], [3, "", " "]),
    ("ray_placement_timeout", [1, 120], [0, 1.5]),
    ("worker_imports", ["mine", ["mine.models", "os"], ()], ["my-models", [1], "a..b"]),
    ("quantization", ["auto", "none", "fp8", "fp8_block", "int8", "int4"], ["fp4", "", 8]),
    ("quantization_group_size", [32, 64, 128], [0, 16, 256]),
    ("quantization_ignore", ["*.o_proj", ["*.q_proj", "lm_head"], ()], [[1]]),
    ("quantize_head", [True, False], [1]),
    ("attn_impl", ["auto", "cpu", "triton", "triton_grouped"], ["flash", "cuda", "naive"]),
    ("prefill_cudagraph_max_len", [0, 10], [-1]),
]

#: Keys that only go together with others.
BESIDE = {
    key: {"quantization": "int4"}
    for key in ("quantization_group_size", "quantization_ignore", "quantize_head")
}


@pytest.mark.parametrize(("key", "legal", "illegal"), RANGES, ids=[row[0] for row in RANGES])
def test_range(key: str, legal: list[Any], illegal: list[Any]) -> None:
    beside = BESIDE.get(key, {})
    for value in legal:
        resolve(**{key: value}, **beside)
    for value in illegal:
        with pytest.raises(ConfigError, match=key):
            resolve(**{key: value}, **beside)


def test_every_rank_has_a_device(caplog: pytest.LogCaptureFixture) -> None:
    four = dataclasses.replace(facts(), num_devices=4)
    cuda: dict[str, Any] = {"device": "cuda", "dtype": "float32", "tensor_parallel_size": 2}
    with caplog.at_level(logging.INFO, "diffulex"):
        config = resolve(four, **cuda, device_ids=[3, 1, 0])
    (line,) = (text for text in caplog.messages if text.startswith("device_ids: "))
    assert line.endswith("from (3, 1, 0) to (3, 1): each rank has one device, the rest is not used")
    assert [config.of_rank(rank).model.device for rank in range(2)] == ["cuda:3", "cuda:1"]
    config = resolve(four, **cuda, device_start=2)
    assert [config.of_rank(rank).model.device for rank in range(2)] == ["cuda:2", "cuda:3"]
    assert resolve(tensor_parallel_size=2).of_rank(1).model.device == "cpu"
    assert resolve(four, device="cuda:2").of_rank(0).model.device == "cuda:2"  # the only one
    with pytest.raises(ConfigError, match="device_ids: expected 2 devices for tensor_parallel_si"):
        resolve(four, device="cuda", tensor_parallel_size=2, device_start=3)


def test_low_precision_on_several_gpus() -> None:
    sizes = {"num_q_heads": 4, "head_dim": 64, "rotary_dim": 64, "intermediate_size": 640}
    four = dataclasses.replace(facts(**sizes), num_devices=4)
    shared: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "quantization": "fp8"}
    assert resolve(four, **shared, tensor_parallel_size=2).model.quantization == "fp8"
    text = r"tensor_parallel_size: expected 1, 2 for groups of 128 of attention outputs \(K 256\), got 4"
    with pytest.raises(ConfigError, match=text):
        resolve(four, **shared, tensor_parallel_size=4)


CHOICES = [
    ("quantization_group_size", 64), ("quantization_ignore", "*.o_proj"), ("quantize_head", True),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), CHOICES)
def test_choices_of_quantising_need_a_scheme(key: str, value: Any) -> None:
    for scheme in ("auto", "none"):
        with pytest.raises(ConfigError, match=rf"{key}: expected .* unless quantization is"):
            resolve(quantization=scheme, **{key: value})
        resolve(quantization=scheme, **{key: CONFIG_TABLE[key].default})
    resolve(quantization="int4", **{key: value})


def test_groups_are_those_of_four_bits() -> None:
    message = "quantization_group_size: expected 128 unless quantization is one of int4, got 64 with 'int8'"
    with pytest.raises(ConfigError, match=message):
        resolve(quantization="int8", quantization_group_size=64)


def test_a_program_has_the_values_of_its_checkpoint() -> None:
    """What its config.json says about codes speaks of the weights that were exported."""
    stored = StoredQuantization("config.json: quantization_config", (StoredRule("fp8"),))
    given = dataclasses.replace(facts(), stored=stored)
    assert resolve(given).model.quantization == "fp8"
    assert resolve(given, quantization="none").model.quantization == "none"
    program: Any = SimpleNamespace(max_rows=64, max_model_len=64, cache_rows=64, dtype="float32")
    given = dataclasses.replace(given, program=program)
    assert resolve(given).model.quantization == "auto"
    with pytest.raises(ConfigError, match="quantization: expected auto or none with an exported"):
        resolve(given, quantization="fp8")


def test_every_documented_attention_kernel_exists() -> None:
    key = CONFIG_TABLE["attn_impl"]
    for value in key.legal.removeprefix("one of ").split(", "):
        if value == "cuda":  # for a model on such a device
            with pytest.raises(ConfigError, match=r"attn_impl: expected auto or the device"):
                resolve(attn_impl=value)
        else:
            assert resolve(attn_impl=value).kernel.attn_impl in ("auto", "cpu")


# (key, value the engine does not have, text of the documented range)
UNSUPPORTED = [
    ("dmax_force_prefill_active", True, "True, False"),
    ("greedy_tie_break", "highest", "lowest, highest"),
    ("filters_at_zero_temperature", True, "True, False"),
    ("moe_gemm_impl", "naive", "auto, cuda, cpu, naive"),
]


@pytest.mark.parametrize(("key", "value", "legal"), UNSUPPORTED, ids=[u[0] for u in UNSUPPORTED])
def test_unsupported_value_names_key_value_and_range(key: str, value: Any, legal: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: only .* is supported so far .*{legal}"):
        resolve(**{key: value})
    resolve(**{key: CONFIG_TABLE[key].default})


def test_every_key_is_covered() -> None:
    covered = {row[0] for row in RANGES} | {row[0] for row in UNSUPPORTED}
    elsewhere = {
        "model",
        "revision",
        "profiler_config",
        "model_name",
        "decoding_strategy",
        "multi_block_prefix_full",
        "max_num_batched_tokens",
        "device_ids",
        "master_addr",
        "enable_full_static_runner",
        "force_accept_last_step",
    }
    free = {n for n, key in CONFIG_TABLE.items() if key.support is Support.IGNORED}
    rest = {
        "lora_path",
        "pre_merge_lora",
        "use_lora",
        "deepep_mode",
        "deepep_num_max_dispatch_tokens_per_rank",
    }
    assert set(CONFIG_TABLE) == covered | elsewhere | free | rest


def test_random_weights_take_no_adapter() -> None:
    resolve(load_format="dummy")
    with pytest.raises(ConfigError, match="load_format: expected auto with use_lora, got 'dummy'"):
        resolve(load_format="dummy", use_lora=True, lora_path="adapter")


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"nearest is 'block_size', got 'blok_size'"):
        resolve(blok_size=4)
    with pytest.raises(ConfigError, match=r"decoding_thresholds.accept"):
        resolve(decoding_thresholds={"accept": 0.5})
    with pytest.raises(ConfigError, match=r"expected a mapping"):
        resolve(decoding_thresholds=0.5)


def test_thresholds_may_be_partial_and_flat_keys_override() -> None:
    config = resolve(decoding_thresholds={"semi_complete_threshold": 0.5})
    assert config.decoding.semi_complete_threshold == 0.5
    assert config.decoding.add_block_threshold == 0.1
    config = resolve(decoding_thresholds={"accept_threshold": 0.5}, accept_threshold=0.6)
    assert config.decoding.accept_threshold == 0.6
    assert "edit_threshold" in THRESHOLD_KEYS


def test_precedence_explicit_checkpoint_family_global() -> None:
    assert resolve(facts("config_test_plain")).decoding.accept_threshold == 0.9
    assert resolve().decoding.accept_threshold == 0.95
    checkpoint = facts(checkpoint={"accept_threshold": 0.8, "buffer_size": 3})
    assert resolve(checkpoint).decoding.accept_threshold == 0.8
    assert resolve(checkpoint, accept_threshold=0.7).decoding.accept_threshold == 0.7
    assert resolve(checkpoint).decoding.buffer_size == 3
    assert resolve(facts("config_test_plain")).decoding.buffer_size == 4
    # An explicit value equal to the default still beats the checkpoint.
    assert resolve(checkpoint, accept_threshold=0.95).decoding.accept_threshold == 0.95


def test_block_size_order_and_unsupported_training_size() -> None:
    assert resolve().decoding.block_size == 4
    assert resolve(facts(checkpoint={"block_size": 8})).decoding.block_size == 8
    assert resolve(facts(block_size=None)).decoding.block_size == 32
    message = r"^config\.json: block_size: expected one of 4, 8, 16, 32, got 64"
    with pytest.raises(ConfigError, match=message):
        resolve(facts(block_size=64))
    assert resolve(facts(block_size=64), block_size=32).decoding.block_size == 32


def test_bad_checkpoint_default_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"generation_config.json: .*blocksize"):
        resolve(facts(checkpoint={"blocksize": 8}))


@pytest.mark.parametrize(
    "key", ["device", "lora_path", "max_num_reqs", "num_pages", "model", "master_addr", "shm_name"]
)
def test_checkpoint_may_choose_its_decoding_alone(key: str) -> None:
    value = {"max_num_reqs": 8, "num_pages": 8}.get(key, "cpu")
    message = rf"^generation_config\.json: {key}: expected only decoding keys, got {value!r}$"
    with pytest.raises(ConfigError, match=message):
        resolve(facts(checkpoint={key: value}))
    older = {"remask_threshold": 0.5, "enable_vectorized_sampler": True}
    assert resolve(facts(checkpoint=older)).ignored.remask_threshold == 0.5


def test_a_checkpoint_may_give_keys_without_effect_that_tell_of_decoding() -> None:
    ignored = [key for key in CONFIG_TABLE.values() if key.section == "ignored"]
    legal = {key.name for key in ignored if key.is_decoding}
    assert legal == {
        "remask_threshold",
        "enable_vectorized_sampler",
        "enable_vectorized_sampler_compile",
    }
    for key in ignored:
        given = facts(checkpoint={key.name: key.default})
        if key.name in legal:
            assert resolve(given).ignored == IgnoredConfig()
        else:
            with pytest.raises(ConfigError, match=f"{key.name}: expected only decoding keys, got"):
                resolve(given)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 7),
        ("buffer_size", 0),
        ("decoding_strategy", "d3f"),
        ("sampling_mode", "edit"),
        ("denoising_steps", 99),
        ("suppress_token_ids", [4000]),
        ("temperature", -1),
    ],
)
def test_value_of_a_checkpoint_is_not_reported_as_the_users(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^generation_config\.json: (diffulex: )?{key}: "):
        resolve(facts(checkpoint={key: value}))
    with pytest.raises(ConfigError, match=f"^{key}: "):
        resolve(**{key: value})


PUBLISHED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def published(**found: Any) -> ModelFacts:
    return dataclasses.replace(facts(), generation_config={**PUBLISHED, **found})


def test_published_sampling_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "diffulex"):
        assert resolve(published()).sampler.temperature == 0.0
        resolve(published())
    text = "generation_config.json: temperature 0.6, top_k 20, top_p 0.95: not applied"
    assert caplog.text.count(text) == 1
    assert "generation_config=checkpoint applies them" in caplog.text


def test_published_sampling_is_honoured_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "diffulex"):
        sampler = resolve(published(), generation_config="checkpoint").sampler
        assert (sampler.temperature, sampler.top_k, sampler.top_p) == (0.6, 20, 0.95)
        sampler = resolve(published(), generation_config="checkpoint", temperature=0).sampler
        assert (sampler.temperature, sampler.top_k) == (0.0, 20)
        greedy = published(do_sample=False)
        assert resolve(greedy, generation_config="checkpoint").sampler.temperature == 0.0
        bare = dataclasses.replace(facts(), generation_config={"do_sample": True})
        assert resolve(bare, generation_config="checkpoint").sampler.temperature == 1.0
    assert caplog.text == ""
    with pytest.raises(ConfigError, match=r"^generation_config\.json: temperature: .*-1"):
        resolve(published(temperature=-1), generation_config="checkpoint")


def test_adapter_needs_its_switch() -> None:
    with pytest.raises(
        ConfigError, match=r"lora_path: expected use_lora with it, got '/nope' alone"
    ):
        resolve(lora_path="/nope")


def test_empty_strategy_is_not_unset() -> None:
    with pytest.raises(ConfigError, match=r"decoding_strategy: expected one of .*, got ''"):
        resolve(decoding_strategy="")


def test_strategy_names() -> None:
    assert resolve(decoding_strategy="block_diffusion").decoding.decoding_strategy == "multi_bd"
    with pytest.raises(ConfigError, match=r"decoding_strategy: expected one of .*got 'multi'"):
        resolve(decoding_strategy="multi")


def test_prefix_full_is_forced_off_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "diffulex"):
        config = resolve(multi_block_prefix_full=True)
    assert config.decoding.multi_block_prefix_full is False
    assert "multi_block_prefix_full: changed from True to False" in caplog.text


def test_max_model_len_is_clamped_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "diffulex"):
        config = resolve(facts(max_positions=512), max_model_len=1000)
    assert config.scheduler.max_model_len == 512
    assert "max_model_len: changed from 1000 to 512: positions of the model" in caplog.text


def test_row_budget() -> None:
    # round_up(2001, 4) + 4 = 2008 rows hold the longest prompt and a block.
    resolve(max_model_len=2001, max_num_batched_tokens=2008)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: expected >= 2008 .*got 2007"):
        resolve(max_model_len=2001, max_num_batched_tokens=2007)
    resolve(max_model_len=2001, max_num_batched_tokens=8, enable_chunked_prefill=True)
    with pytest.raises(ConfigError, match=r"expected >= 16 .*decoding request.*got 15"):
        resolve(buffer_size=4, max_num_batched_tokens=15, enable_chunked_prefill=True)
    # Unset, it follows max_model_len.
    assert resolve(max_model_len=4096).scheduler.max_num_batched_tokens == 4100


def test_special_ids() -> None:
    config = resolve()
    assert config.model.mask_token_id == 259
    assert config.model.eos == (256, 258)
    assert config.model.tokenizer_vocab_size == 260
    assert resolve(eos=[7, 256]).model.eos == (7, 256, 258)
    assert resolve(eos=-1).model.eos == (256, 258)
    with pytest.raises(ConfigError, match=r"eos: expected ids .* other than the mask id 259"):
        resolve(eos=259)
    with pytest.raises(ConfigError, match=r"mask_token_id: expected it in the files"):
        resolve(facts(mask_token_id=None))
    assert resolve(facts(mask_token_id=None), mask_token_id=0).model.mask_token_id == 0
    assert resolve(tokenizer_vocab_size=400).model.tokenizer_vocab_size == 300


def test_distinct_layout_needs_a_divisor() -> None:
    resolve(kv_cache_layout="distinct", k_cache_hdim_split_factor_x=16)
    with pytest.raises(ConfigError, match=r"divisor of head size 32, got 5"):
        resolve(kv_cache_layout="distinct", k_cache_hdim_split_factor_x=5)
    resolve(k_cache_hdim_split_factor_x=5)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve(device="auto").model.device == "cpu"
    with pytest.raises(ConfigError, match=r"no CUDA device is visible"):
        resolve(device="cuda")
    with pytest.raises(ConfigError, match=r"device_ids: expected an empty list on cpu"):
        resolve(device_ids=[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve(device="auto").model.device == "cuda:0"
    assert resolve(device="auto", device_ids=[1]).model.device == "cuda:1"
    assert resolve(device="cuda", device_start=1).model.device == "cuda:1"
    assert resolve(device="cuda:1").model.device == "cuda:1"
    assert resolve(device="cuda").model.dtype == "bfloat16"
    assert resolve(device="cpu").model.dtype == "float32"
    with pytest.raises(ConfigError, match=r"device: expected cuda:0 as listed, got 'cuda:1'"):
        resolve(device="cuda:1", device_ids=[0])
    with pytest.raises(ConfigError, match=r"below 2"):
        resolve(device="cuda:2")
    with pytest.raises(ConfigError, match=r"attn_impl: expected auto or the device"):
        resolve(device="cuda", attn_impl="cpu")
    with pytest.raises(ConfigError, match=r"skip_warmup: expected num_pages"):
        resolve(device="cuda", skip_warmup=True)


def test_ignored_keys_log_a_notice_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "diffulex"):
        resolve(enable_vllm_layers=False)
        resolve(enable_vllm_layers=False)
    assert caplog.text.count("enable_vllm_layers: accepted and ignored") == 1


def test_page_count_is_fixed_by_a_new_object() -> None:
    config = resolve()
    assert config.cache.num_pages == -1
    assert config.with_num_pages(7).cache.num_pages == 7
    assert config.cache.num_pages == -1
    with pytest.raises(ConfigError, match=r"num_pages"):
        config.with_num_pages(0)
    assert resolve(max_model_len=33, page_size=16).pages_per_request == 3


def test_core_options_carry_every_value() -> None:
    config = resolve(
        block_size=8,
        buffer_size=3,
        page_size=16,
        num_pages=99,
        max_num_reqs=5,
        max_num_batched_tokens=640,
        max_model_len=512,
        decoding_thresholds={"add_block_threshold": 0.25, "token_stability_threshold": 0.5},
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        decode_headroom=False,
        auto_max_nfe=True,
        auto_max_nfe_warmup_steps=3,
        auto_max_nfe_tpf_floor=0.5,
        max_consecutive_prefill_batches=2,
        mixed_step_rows=96,
        seed=11,
    )
    options = config.to_core()
    assert (options.block_size, options.buffer_size, options.page_size) == (8, 3, 16)
    assert (options.num_pages, options.max_num_reqs) == (99, 5)
    assert (options.max_num_batched_tokens, options.max_model_len) == (640, 512)
    assert (options.mask_token_id, options.vocab_size) == (259, 300)
    assert list(options.stop_token_ids) == [256, 258]
    assert options.thresholds.add_block == pytest.approx(0.25)
    assert options.thresholds.accept == pytest.approx(0.95)
    assert options.thresholds.token_stability == pytest.approx(0.5)
    assert not options.enable_prefix_caching
    assert options.enable_chunked_prefill
    assert not options.decode_headroom
    assert (options.auto_max_nfe, options.auto_max_nfe_warmup_steps) == (True, 3)
    assert options.auto_max_nfe_tpf_floor == 0.5
    assert options.max_consecutive_prefill_batches == 2
    assert options.mixed_step_rows == 96
    assert options.seed == 11


def test_core_refusals_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"expected rows, slots and page entries below 2\^31"):
        resolve(max_num_reqs=2**31 - 1, num_pages=10).to_core()


def test_keys_without_effect_are_one_section() -> None:
    ignored = {name for name, key in CONFIG_TABLE.items() if key.support is Support.IGNORED}
    assert {name for name, key in CONFIG_TABLE.items() if key.section == "ignored"} == ignored
    assert len(ignored) >= 10
    # A checkpoint may have them: its file is often one of another engine.
    checkpoint = {"decoding_thresholds": {"remask_threshold": 0.5}}
    assert resolve(facts(checkpoint=checkpoint)).ignored.remask_threshold == 0.5
