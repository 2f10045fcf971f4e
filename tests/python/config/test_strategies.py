# SPDX-License-Identifier: Apache-2.0
"""Strategy, sampling mode and family: who forces what, and which combinations are refused."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from diffulex import SamplingParams, strategies
from diffulex.config.config import Config
from diffulex.config.sampling_params import DECODING_FIELDS
from diffulex.config.table import CONFIG_TABLE
from diffulex.config.types import ModelFacts
from diffulex.errors import ConfigError
from diffulex.families.listing import family_named
from diffulex.families.spec import ModelSpec
from diffulex.registry import AutoReq, AutoSampler
from diffulex.samplers.selection import select_sampler
from diffulex.strategies import listing
from diffulex.strategies.listing import ALIASES, STRATEGIES, owner_of, strategy_named
from diffulex_ext import _core

ROOT = Path(__file__).parents[3]
LLADA2 = family_named("llada2")
LLADA2_NAMES = (LLADA2.name, *LLADA2.aliases)
FAMILIES = (
    "diffucoder",
    "dream",
    "dream_reasoner",
    "fast_dllm_v2",
    "llada",
    *LLADA2_NAMES,
    "sdar",
    "sdar_moe",
    "stable_diffcoder",
)


def facts(
    name: str,
    checkpoint: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    **spec: Any,
) -> ModelFacts:
    shapes: dict[str, Any] = {
        "family": name,
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
    }
    return ModelFacts(
        name,
        Path("/models/x"),
        ModelSpec(**{**shapes, **spec}),
        checkpoint or {},
        260,
        generation_config=generation_config or {},
    )


def resolve(name: str, /, *, given: ModelFacts | None = None, **flat: Any) -> Config:
    flat.setdefault("device", "cpu")
    return Config.resolve("x", given or facts(name), flat)


# Family: strategy, mode, rule, accept, block, buffer, space (samplers 5.2, 6, 7, 8).
FAMILY_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "dream": ("d2f", "naive", "threshold", 0.9, 32, 4, "processed"),
    "diffucoder": ("d2f", "naive", "threshold", 0.9, 32, 4, "processed"),
    "llada": ("d2f", "naive", "threshold", 0.9, 32, 4, "processed"),
    "dream_reasoner": ("multi_bd", "naive", "dynamic", 0.9, 32, 1, "processed"),
    "stable_diffcoder": ("multi_bd", "naive", "static", 0.95, 4, 1, "raw"),
    "sdar": ("multi_bd", "naive", "dynamic", 0.95, 32, 1, "processed"),
    "sdar_moe": ("multi_bd", "naive", "dynamic", 0.95, 32, 1, "processed"),
    "llada2": ("multi_bd", "naive", "dynamic", 0.95, 32, 1, "processed"),
    "llada2_moe": ("multi_bd", "naive", "dynamic", 0.95, 32, 1, "processed"),
    "llada2_mini": ("multi_bd", "naive", "dynamic", 0.95, 32, 1, "processed"),
    "llada2dot1_mini": ("multi_bd", "edit", "threshold", 0.7, 32, 1, "raw"),
    "llada2_mini_dmax": ("dmax", "edit", "leftmost_prefix", 0.5, 32, 1, "raw"),
    "fast_dllm_v2": ("fast_dllm_v2", "naive", "threshold", 0.9, 8, 4, "tempered"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_family_defaults(name: str) -> None:
    config = resolve(name)
    decoding, sampler = config.decoding, config.sampler
    assert (
        decoding.decoding_strategy,
        decoding.sampling_mode,
        sampler.acceptance_rule,
        decoding.accept_threshold,
        decoding.block_size,
        decoding.buffer_size,
        sampler.confidence_space,
    ) == FAMILY_DEFAULTS[name]
    assert sampler.temperature == 0.0
    assert config.model.model_name == name


def test_further_family_values() -> None:
    assert resolve("dream").decoding.semi_complete_threshold == 0.95
    assert resolve("llada2dot1_mini").decoding.edit_threshold == 0.5
    assert resolve("dream_reasoner").sampler.force_accept_last_step
    assert resolve("fast_dllm_v2").sampler.top_p == 0.95
    assert resolve("sdar").sampler.top_p is None
    multi_bd = resolve("fast_dllm_v2", decoding_strategy="multi_bd")
    assert (multi_bd.decoding.block_size, multi_bd.sampler.acceptance_rule) == (32, "threshold")


def test_stable_diffcoder_takes_a_threshold_when_one_is_given() -> None:
    assert resolve("stable_diffcoder").sampler.acceptance_rule == "static"
    given = resolve("stable_diffcoder", accept_threshold=0.9)
    assert given.sampler.acceptance_rule == "threshold_non_strict"
    chosen = resolve("stable_diffcoder", accept_threshold=0.9, acceptance_rule="static")
    assert chosen.sampler.acceptance_rule == "static"
    from_files = facts("stable_diffcoder", {"accept_threshold": 0.8})
    assert resolve("", given=from_files).sampler.acceptance_rule == "threshold_non_strict"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("strategy", ["multi_bd", "d2f", "dmax", "fast_dllm_v2"])
@pytest.mark.parametrize("mode", ["naive", "edit"])
def test_combinations(name: str, strategy: str, mode: str) -> None:
    is_llada2 = name in LLADA2_NAMES
    expected = {
        ("multi_bd", "naive"): name != "llada2dot1_mini",
        ("multi_bd", "edit"): is_llada2,
        ("dmax", "edit"): is_llada2,
        ("d2f", "naive"): name not in ("llada2dot1_mini", "fast_dllm_v2"),
        ("fast_dllm_v2", "naive"): name == "fast_dllm_v2",
    }.get((strategy, mode), False)
    if expected:
        config = resolve(name, decoding_strategy=strategy, sampling_mode=mode)
        assert config.decoding.decoding_strategy == strategy
        assert config.decoding.sampling_mode == mode
        return
    with pytest.raises(ConfigError, match=r"^(decoding_strategy|sampling_mode): .*, got"):
        resolve(name, decoding_strategy=strategy, sampling_mode=mode)


def test_refusals_name_model_strategy_and_mode() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^sampling_mode: expected naive for the model sdar under .* multi_bd, got 'edit'",
    ):
        resolve("sdar", sampling_mode="edit")
    for other in ("dmax", "fast_dllm_v2", "diffusion_gemma"):
        message = f"^decoding_strategy: expected multi_bd or d2f for the model sdar, got '{other}'"
        with pytest.raises(ConfigError, match=message):
            resolve("sdar", decoding_strategy=other)
    with pytest.raises(
        ConfigError, match=r"sampling_mode: expected edit under .* dmax, got 'naive'"
    ):
        resolve("llada2", decoding_strategy="dmax", sampling_mode="naive")
    with pytest.raises(ConfigError, match=r"expected edit for the model llada2dot1_mini .*'naive'"):
        resolve("llada2dot1_mini", sampling_mode="naive")
    with pytest.raises(ConfigError, match=r"sampling_mode: expected naive under .* d2f"):
        resolve("llada2", decoding_strategy="d2f", sampling_mode="edit")


@pytest.mark.parametrize(
    ("name", "legal", "others"),
    [
        ("fast_dllm_v2", "multi_bd or fast_dllm_v2", ("d2f", "dmax", "diffusion_gemma")),
        ("diffusion_gemma", "diffusion_gemma", ("multi_bd", "d2f", "dmax", "fast_dllm_v2")),
    ],
)
def test_a_chosen_strategy_is_never_replaced(
    name: str, legal: str, others: tuple[str, ...]
) -> None:
    """Who compares strategies must not measure the same one several times."""
    spec = {"mask_token_id": None} if name == "diffusion_gemma" else {}
    for other in others:
        expected = f"decoding_strategy: expected {legal} for the model {name}, got '{other}'"
        with pytest.raises(ConfigError, match=f"^{expected}"):
            resolve("", given=facts(name, **spec), decoding_strategy=other)
        with pytest.raises(ConfigError, match=rf"^generation_config\.json: {expected}"):
            resolve("", given=facts(name, {"decoding_strategy": other}, **spec))


def test_mode_of_a_checkpoint_belongs_to_its_strategy() -> None:
    """A strategy of the user's comes with its own mode; only the user's mode can contradict it."""
    editing = facts("llada2", {"decoding_strategy": "multi_bd", "sampling_mode": "edit"})
    assert resolve("", given=editing, decoding_strategy="d2f").decoding.sampling_mode == "naive"
    filling = facts("llada", {"decoding_strategy": "d2f", "sampling_mode": "naive"})
    with pytest.raises(ConfigError, match=r"^decoding_strategy: .* llada, got 'dmax'"):
        resolve("", given=filling, decoding_strategy="dmax")


def test_dmax_takes_its_mode_when_none_is_given(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "diffulex"):
        config = resolve("llada2", decoding_strategy="dmax")
    assert config.decoding.sampling_mode == "edit"
    assert config.decoding.accept_threshold == 0.5
    assert "sampling_mode: changed from 'naive' to 'edit': the mode of dmax" in caplog.text


def test_d2f_forces_its_prompt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "diffulex"):
        config = resolve("sdar", decoding_strategy="d2f", enable_prefix_caching=True)
    assert config.decoding.multi_block_prefix_full is True
    assert config.cache.enable_prefix_caching is False
    assert "enable_prefix_caching: changed from True to False: d2f" in caplog.text
    with pytest.raises(ConfigError, match=r"enable_chunked_prefill: expected False under .* d2f"):
        resolve("sdar", decoding_strategy="d2f", enable_chunked_prefill=True)
    assert resolve("sdar").decoding.multi_block_prefix_full is False


def test_soft_storing_turns_the_prefix_cache_off() -> None:
    assert resolve("llada2_mini_dmax").cache.enable_prefix_caching
    soft = resolve("llada2_mini_dmax", dmax_store_soft_embeddings=True)
    assert not soft.cache.enable_prefix_caching


def test_fast_dllm_v2_shapes(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"buffer_size: expected >= 2 .* got 1"):
        resolve("fast_dllm_v2", buffer_size=1)
    with caplog.at_level(logging.INFO, "diffulex"):
        resolve("fast_dllm_v2", block_size=8, buffer_size=3)
    assert "block_size * buffer_size is 24, the checkpoint was trained with blocks of 32" in (
        caplog.text
    )
    config = resolve("fast_dllm_v2", max_model_len=1000, page_size=8)
    assert config.max_context_len == 1024
    assert config.pages_per_request == 128
    assert config.att_block_size == 32
    # A whole prompt of 1000, rounded up to 32, plus a block of 32.
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: expected >= 1056"):
        resolve("fast_dllm_v2", max_model_len=1000, max_num_batched_tokens=1055)


GEMMA_FILE = {
    "max_denoising_steps": 32,
    "t_min": 0.3,
    "t_max": 0.9,
    "stability_threshold": 2,
    "confidence_threshold": 0.01,
    "sampler_config": {"entropy_bound": 0.2},
}


def test_diffusion_gemma_is_forced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "diffulex"):
        config = resolve(
            "diffusion_gemma",
            given=facts("diffusion_gemma", block_size=64, mask_token_id=None),
            block_size=32,
            buffer_size=4,
        )
    decoding = config.decoding
    assert decoding.decoding_strategy == "diffusion_gemma"
    assert (decoding.block_size, decoding.buffer_size) == (64, 1)
    for text in ("block_size: changed", "buffer_size: changed"):
        assert text in caplog.text
    assert config.model.mask_token_id not in config.model.eos
    resolve("diffusion_gemma", page_size=256)
    with pytest.raises(ConfigError, match=r"page_size: expected one of 4, 8, 16, 32 .*got 256"):
        resolve("sdar", page_size=256)


def test_ids_of_a_huge_vocabulary_are_not_listed() -> None:
    """The weights are compared with it later, and say that it is wrong."""
    given = facts("diffusion_gemma", vocab_size=2**31 - 1, mask_token_id=None)
    assert resolve("", given=given).model.mask_token_id not in given.spec.stop_token_ids


def test_a_canvas_has_no_masks_to_allow() -> None:
    with pytest.raises(
        ConfigError,
        match=r"allow_mask_in_prompt: expected False under decoding_strategy diffusion_gemma, .* True",
    ):
        resolve("diffusion_gemma", allow_mask_in_prompt=True)
    assert resolve("sdar", allow_mask_in_prompt=True).decoding.allow_mask_in_prompt


def test_diffusion_gemma_levels() -> None:
    def values(config: Config) -> tuple[Any, ...]:
        decoding = config.decoding
        return (
            decoding.diffusion_gemma_max_denoising_steps,
            decoding.diffusion_gemma_t_min,
            decoding.diffusion_gemma_t_max,
            decoding.diffusion_gemma_stability_threshold,
            decoding.diffusion_gemma_confidence_threshold,
            decoding.diffusion_gemma_entropy_bound,
        )

    assert values(resolve("diffusion_gemma")) == (48, 0.4, 0.8, 1, 0.005, 0.1)
    published = facts("diffusion_gemma", generation_config=GEMMA_FILE)
    assert values(resolve("", given=published)) == (32, 0.3, 0.9, 2, 0.01, 0.2)
    # An explicit value that equals the default beats the file.
    explicit = resolve("", given=published, diffusion_gemma_max_denoising_steps=48)
    assert explicit.decoding.diffusion_gemma_max_denoising_steps == 48
    # The engine's own object in the file beats the published keys.
    own = facts("diffusion_gemma", {"diffusion_gemma_t_min": 0.1}, generation_config=GEMMA_FILE)
    assert resolve("", given=own).decoding.diffusion_gemma_t_min == 0.1
    bad = facts("diffusion_gemma", generation_config={"t_min": -1.0})
    with pytest.raises(ConfigError, match=r"generation_config.json: diffusion_gemma_t_min: .*-1"):
        resolve("", given=bad)
    with pytest.raises(ConfigError, match=r"t_max: expected a temperature above .*0.5, got 0.5"):
        resolve("diffusion_gemma", diffusion_gemma_t_min=0.5, diffusion_gemma_t_max=0.5)


def test_checkpoint_chooses_strategy_and_the_user_goes_before_it() -> None:
    own = facts("llada2", {"decoding_strategy": "dmax", "sampling_mode": "edit"})
    assert resolve("", given=own).decoding.decoding_strategy == "dmax"
    user = resolve("", given=own, decoding_strategy="multi_bd", sampling_mode="naive")
    assert user.decoding.decoding_strategy == "multi_bd"
    assert user.sampler.acceptance_rule == "dynamic"
    named = facts("llada2", {"model_name": "llada2dot1_mini"})
    assert resolve("", given=named).decoding.sampling_mode == "edit"
    wrong = facts("llada2", {"model_name": "sdar"})
    with pytest.raises(ConfigError, match=r"generation_config.json: model_name: .*got 'sdar'"):
        resolve("", given=wrong)


def test_names_of_one_family() -> None:
    config = resolve("", given=facts("llada2"), model_name="llada2_mini_dmax")
    assert config.model.model_name == "llada2_mini_dmax"
    assert config.decoding.decoding_strategy == "dmax"
    assert resolve("", given=facts("dream"), model_name="diffucoder").model.model_name == (
        "diffucoder"
    )


UNREAD = [
    ("llada2dot1_mini", {"acceptance_rule": "static"}),
    ("llada2dot1_mini", {"denoising_steps": 4}),
    ("llada2_mini_dmax", {"confidence_type": "neg_entropy"}),
    ("llada2_mini_dmax", {"penalty_lambda": 1.0}),
    ("diffusion_gemma", {"forced_gate": "always"}),
    ("diffusion_gemma", {"demote_token_ids": [3]}),
]


@pytest.mark.parametrize(("name", "flat"), UNREAD)
def test_keys_a_sampler_does_not_read_are_refused(name: str, flat: dict[str, Any]) -> None:
    key = next(iter(flat))
    with pytest.raises(ConfigError, match=f"{key}: expected it unset under .*does not read it"):
        resolve(name, **flat)


def test_keys_of_other_strategies_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "diffulex"):
        resolve("dream", fdv2_use_block_cache=False)
        resolve("diffusion_gemma", temperature=0.5)
    assert "fdv2_use_block_cache: without effect under decoding_strategy d2f" in caplog.text
    assert "temperature: without effect under decoding_strategy diffusion_gemma" in caplog.text


UNREAD_BY_FILLING = (
    "edit_threshold",
    "max_post_edit_steps",
    "penalty_lambda",
    "remask_threshold",
    "token_stability_threshold",
)
UNREAD_PARAMS = [
    ("sdar", {}, UNREAD_BY_FILLING),
    ("dream", {}, UNREAD_BY_FILLING),
    ("llada2dot1_mini", {}, ("remask_threshold",)),
    (
        "llada2_mini_dmax",
        {},
        ("edit_threshold", "max_post_edit_steps", "penalty_lambda", "remask_threshold"),
    ),
    (
        "fast_dllm_v2",
        {},
        (
            "add_block_threshold",
            "edit_threshold",
            "max_post_edit_steps",
            "penalty_lambda",
            "remask_threshold",
            "semi_complete_threshold",
            "token_stability_threshold",
        ),
    ),
    ("fast_dllm_v2", {"decoding_strategy": "multi_bd"}, UNREAD_BY_FILLING),
]


@pytest.mark.parametrize(("name", "flat", "unread"), UNREAD_PARAMS)
def test_thresholds_of_a_request_that_nothing_reads_are_noticed_once(
    name: str,
    flat: dict[str, Any],
    unread: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diffulex.log._warned", set())
    config = resolve(name, num_pages=64, **flat)
    decoding = config.decoding
    given = {name: item.kind(item.high / 2) for name, item in DECODING_FIELDS.items()}
    params = SamplingParams(**given)
    make_request = AutoReq.get(decoding.decoding_strategy)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "diffulex"):
        make_request([1, 2, 3], SamplingParams(), config)
        assert caplog.messages == []
        for _ in range(2):
            make_request([1, 2, 3], params, config)
    assert sorted(caplog.messages) == [
        f"SamplingParams.{key}: without effect under decoding_strategy"
        f" {decoding.decoding_strategy} with sampling_mode {decoding.sampling_mode}, got {given[key]!r}"
        for key in unread
    ]


@pytest.mark.parametrize(
    ("name", "flat", "message"),
    [
        ("diffusion_gemma", {"buffer_size": 4}, "expected 1, which decoding_strategy"),
        ("dream", {"enable_prefix_caching": True}, "expected False, which decoding_strategy d2f"),
        ("fast_dllm_v2", {"add_block_threshold": 0.625}, "without effect under decoding_strategy"),
    ],
)
def test_keys_that_the_strategy_decides_are_noticed(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    flat: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr("diffulex.log._warned", set())
    with caplog.at_level(logging.WARNING, "diffulex"):
        resolve(name, **flat)
    ((key, value),) = flat.items()
    (line,) = (text for text in caplog.messages if text.startswith(f"{key}: {message}"))
    assert line.endswith(f", got {value!r}")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "diffulex"):
        resolve(name)
    assert caplog.messages == []


def test_every_key_that_a_strategy_decides_is_one() -> None:
    for strategy in STRATEGIES.values():
        assert set(strategy.unread_keys) <= set(CONFIG_TABLE)


def test_mask_suppression_off_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mask_suppression: expected one of exclude, renorm"):
        resolve("sdar", mask_suppression="off")


def test_a_registered_sampler_replaces_a_built_in_one() -> None:
    class Mine:
        family_defaults: ClassVar[dict[str, Any]] = {"accept_threshold": 0.25}

    before = AutoSampler.get("llada2")
    AutoSampler.register("llada2", Mine, exist_ok=True)
    try:
        assert select_sampler("llada2", "multi_bd", "naive") is Mine
        assert resolve("llada2").decoding.accept_threshold == 0.25
        assert select_sampler("llada2", "multi_bd", "edit") is not Mine
    finally:
        AutoSampler.register("llada2", before, exist_ok=True)
    assert select_sampler("llada2", "multi_bd", "naive") is before


@pytest.mark.parametrize("name", [*FAMILIES, "diffusion_gemma"])
def test_every_family_default_is_legal_in_the_core(name: str) -> None:
    config = resolve(name, num_pages=64)
    options = config.to_core()
    assert options.strategy == config.decoding.decoding_strategy
    assert options.is_editing == (config.decoding.sampling_mode == "edit")
    # The page tables of both sides have the same width.
    plan = _core.StepPlan(options)
    assert plan.max_pages_per_req == config.pages_per_request
    assert plan.att_block_size == config.att_block_size


def test_strategy_fields_of_the_core() -> None:
    merged = resolve("llada2_mini_dmax", num_pages=9, token_merge_top_k=4).to_core()
    assert (merged.token_merge_top_k, merged.dmax_store_soft_embeddings) == (4, False)
    unmerged = resolve("llada2_mini_dmax", num_pages=9, token_merge_weight=0).to_core()
    assert unmerged.token_merge_top_k == 0
    dual = resolve("fast_dllm_v2", num_pages=9, fdv2_use_block_cache=False).to_core()
    assert (dual.fdv2_use_block_cache, dual.group_decode_by_rows) == (False, False)
    for run_ahead, is_grouped in (("auto", True), ("off", True), ("on", False)):
        config = resolve("fast_dllm_v2", num_pages=9, run_ahead=run_ahead)
        on_cuda = dataclasses.replace(config.model, device="cuda")
        config = dataclasses.replace(config, model=on_cuda)
        assert config.to_core().group_decode_by_rows == is_grouped
    shifted = resolve("", given=facts("dream", shift=True), num_pages=9).to_core()
    assert shifted.logits_shift
    local = resolve("", given=facts("fast_dllm_v2", shift=True), num_pages=9).to_core()
    assert not local.logits_shift
    canvas = resolve(
        "diffusion_gemma",
        num_pages=9,
        diffusion_gemma_max_denoising_steps=7,
        diffusion_gemma_stability_threshold=3,
        diffusion_gemma_t_min=0.25,
        diffusion_gemma_t_max=0.5,
    ).to_core()
    assert (canvas.max_denoising_steps, canvas.stability_threshold) == (7, 3)
    assert (canvas.t_min, canvas.t_max) == (0.25, 0.5)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("name", "flat"), [("sdar", {}), ("fast_dllm_v2", {}), ("diffusion_gemma", {"block_size": 256})]
)
def test_least_row_budget_is_that_of_the_core(
    name: str, flat: dict[str, Any], chunked: bool
) -> None:
    common = {**flat, "max_model_len": 500, "num_pages": 64, "enable_chunked_prefill": chunked}
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: expected >= (\d+)") as refused:
        resolve(name, **common, max_num_batched_tokens=1)
    least = int(str(refused.value).split(">= ")[1].split()[0])
    resolve(name, **common, max_num_batched_tokens=least).to_core()


def test_every_record_has_a_state_machine_of_the_core() -> None:
    assert sorted(STRATEGIES) == _core.strategy_names()
    assert all(name == strategy.name for name, strategy in STRATEGIES.items())
    assert {*STRATEGIES, *ALIASES} <= set(AutoReq.available())


def test_strategies_have_the_order_of_the_list_of_the_core() -> None:
    """Messages of both sides name them in it."""
    rows = (ROOT / "csrc/core/strategy/strategies.def").read_text(encoding="utf-8")
    assert list(STRATEGIES) == re.findall(r"^DIFFULEX_STRATEGY\((\w+),", rows, re.MULTILINE)


@pytest.mark.parametrize("text", ["", "STRATEGY = 'd2f'\n"])
def test_a_module_of_the_package_without_a_record_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"{strategies.__name__}.helper_without_record"
    (tmp_path / "helper_without_record.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(strategies, "__path__", [*strategies.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, module, None)  # so that it is forgotten afterwards
    del sys.modules[module]
    importlib.invalidate_caches()
    with pytest.raises(TypeError, match=f"^{module}: expected a Strategy called STRATEGY, .*, got"):
        list(listing._records())
    vars(strategies).pop("helper_without_record")


def test_custom_strategy_is_configured_as_multi_bd_and_runs_step_by_step() -> None:
    custom, built_in = strategy_named("confirming_bd"), strategy_named("multi_bd")
    assert built_in.traits.can_run_ahead
    assert custom.traits == dataclasses.replace(built_in.traits, can_run_ahead=False)
    assert dataclasses.replace(custom, traits=built_in.traits) == built_in


@pytest.mark.parametrize(
    ("key", "owner"),
    [
        ("d2f_block_grid", "d2f"),
        ("token_merge_weight", "dmax"),
        ("fdv2_use_block_cache", "fast_dllm_v2"),
        ("diffusion_gemma_t_min", "diffusion_gemma"),
        ("block_size", None),
    ],
)
def test_a_key_belongs_to_at_most_one_strategy(key: str, owner: str | None) -> None:
    assert owner_of(key) == owner


def test_no_code_asks_for_the_name_of_a_strategy() -> None:
    names = "|".join(STRATEGIES)
    asks = re.compile(rf"""([!=]=|\bin) *[(\["']+({names})["']""")
    python = ("python/diffulex", "python/diffulex_edge")
    kinds = [*((name, "*.py") for name in python), ("csrc", "*.cpp"), ("include", "*.h")]
    sources = [path for folder, kind in kinds for path in (ROOT / folder).rglob(kind)]
    assert len({path.suffix for path in sources}) == 3
    assert len(sources) > 400
    assert [str(path) for path in sources if asks.search(path.read_text(encoding="utf-8"))] == []


def test_a_family_keeps_modules_of_a_scheme() -> None:
    given = facts("diffusion_gemma", mask_token_id=None)
    for scheme, kept in (("int4", ("*.self_attn.*",)), ("int8", ()), ("auto", ())):
        assert resolve("", given=given, quantization=scheme).model.quantization_ignore == kept
    for own in ((), ("*.mlp.*",)):
        chosen = resolve("", given=given, quantization="int4", quantization_ignore=own)
        assert chosen.model.quantization_ignore == own
