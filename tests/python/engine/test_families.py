# SPDX-License-Identifier: Apache-2.0
"""Every family from its files to tokens: its strategy is found, its settings apply, it decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diffulex import Diffulex, SamplingParams
from fixtures.families import DENSE_FAMILIES, family_builder
from fixtures.moe_families import MOE_FAMILIES, moe_builder
from fixtures.quick import quick

NAMES = (*DENSE_FAMILIES, *MOE_FAMILIES)
STRATEGIES = {
    "dream": "d2f",
    "diffucoder": "d2f",
    "llada": "d2f",
    "fast_dllm_v2": "fast_dllm_v2",
}
LIMITS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_pages": 64, "max_num_reqs": 2}
PROMPTS = [list(range(5, 38)), list(range(40, 45))]
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in NAMES:
        builder = moe_builder(name) if name in MOE_FAMILIES else family_builder(name)
        found[name] = tmp_path_factory.mktemp(name)
        builder.write(found[name])
    return found


def generate(directory: Path, params: SamplingParams = GREEDY, **settings: Any) -> list[Any]:
    with Diffulex(str(directory), **{**LIMITS, **settings}) as engine:
        outputs = list(engine.generate(PROMPTS, params, summary=False))
        mask = engine.config.model.mask_token_id
        for output in outputs:
            assert len(output.token_ids) == params.max_tokens
            assert mask not in output.token_ids
            assert output.completion_reason == "max_new_tokens_reached"
        strategy = engine.config.decoding.decoding_strategy
        return [strategy, engine.config.decoding.sampling_mode, *(o.token_ids for o in outputs)]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", NAMES)
def test_defaults(directories: dict[str, Path], name: str) -> None:
    options = {"model_name": "diffucoder"} if name == "diffucoder" else {}
    strategy, mode, *tokens = generate(directories[name], **options)
    assert (strategy, mode) == (STRATEGIES.get(name, "multi_bd"), "naive")
    assert generate(directories[name], **options)[2:] == tokens


@pytest.mark.parametrize("name", quick(NAMES, ("sdar", "dream", "llada2")))
def test_draws_with_filters(directories: dict[str, Path], name: str) -> None:
    params = SamplingParams(
        max_tokens=12, ignore_eos=True, temperature=1.0, top_k=20, top_p=0.9, seed=11
    )
    first = generate(directories[name], params, decoding_strategy="multi_bd", block_size=4)
    again = generate(
        directories[name], params, decoding_strategy="multi_bd", block_size=4, max_num_reqs=1
    )
    assert first == again


@pytest.mark.parametrize(
    ("model_name", "strategy", "mode"),
    [
        ("llada2_mini", "multi_bd", "naive"),
        ("llada2dot1_mini", "multi_bd", "edit"),
        ("llada2_mini_dmax", "dmax", "edit"),
    ],
)
def test_names_of_llada2_choose_how_it_decodes(
    directories: dict[str, Path], model_name: str, strategy: str, mode: str
) -> None:
    result = generate(directories["llada2"], model_name=model_name)
    assert result[:2] == [strategy, mode]


def test_checkpoint_names_its_strategy(directories: dict[str, Path], tmp_path: Path) -> None:
    defaults = {"diffulex": {"decoding_strategy": "dmax", "block_size": 8, "buffer_size": 2}}
    moe_builder("llada2", generation_config=defaults).write(tmp_path)
    assert generate(tmp_path)[:2] == ["dmax", "edit"]
    assert generate(tmp_path, decoding_strategy="multi_bd")[:2] == ["multi_bd", "naive"]
    with pytest.raises(
        ValueError, match=r"sampling_mode: expected edit under .* dmax, got 'naive'"
    ):
        generate(tmp_path, sampling_mode="naive")
