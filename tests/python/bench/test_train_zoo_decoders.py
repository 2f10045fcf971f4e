# SPDX-License-Identifier: Apache-2.0
"""The zoo's reference decoders on the worked traces of the strategies, with scripted proposals."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "examples" / "train_demo"))
sys.path.append(str(ROOT / "examples" / "train_zoo"))

import block_decoders  # noqa: E402
import canvas_decoder  # noqa: E402
import dual_cache_decoder  # noqa: E402
from canvas_model import CanvasModel, CanvasShape  # noqa: E402
from dual_cache_decoder import Mode  # noqa: E402
from transformer import Shape, Transformer  # noqa: E402

MASK = 99
LETTER = {"DUMMY": "D", "ACTIVE": "A", "TO_CACHE": "T", "IN_CACHE": "I"}


def editing_config(**changes: Any) -> block_decoders.EditingConfig:
    fields: dict[str, Any] = {
        "block_size": 4,
        "mask_token_id": MASK,
        "stop_ids": (50,),
        "accept_threshold": 0.5,
        "edit_threshold": 0.5,
        "max_tokens": 8,
        "max_model_len": 64,
    }
    return block_decoders.EditingConfig(**{**fields, **changes})


def proposals(length: int, script: dict[int, tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Proposed ids and confidences; positions without an entry propose token 1, unsure."""
    ids = [script.get(i, (1, 0.0))[0] for i in range(length)]
    return ids, [script.get(i, (1, 0.0))[1] for i in range(length)]


def run_editing(request: Any, steps: list[dict[int, tuple[int, float]]]) -> list[str]:
    trace = []
    for script in steps:
        request.begin_step()
        request.finish_step(*proposals(len(request.tokens), script))
        trace.append("".join(LETTER[status.name] for status in request.statuses))
    return trace


def test_edit_trace() -> None:
    """strategies 8.7: a token is rewritten; the confirming step of a block stores it as well."""
    request = block_decoders.EditRequest(editing_config(), [1, 2, 3, 4])
    sure = {4: (5, 0.9), 5: (60, 0.9), 6: (7, 0.9), 7: (8, 0.9)}
    last = {8: (9, 0.9), 9: (10, 0.9), 10: (11, 0.9), 11: (12, 0.9)}
    steps = [
        {4: (5, 0.9), 5: (6, 0.8)},
        {4: (5, 0.9), 5: (60, 0.9), 6: (7, 0.9), 7: (8, 0.9)},
        sure,
        last,
        last,
    ]
    trace = []
    for script in steps:
        trace += run_editing(request, [script])
        if request.nfe == 2:
            assert request.records[1].same_token_ratio == 0.5
        assert (request.completion() is None) == (request.nfe < 5)
    assert trace == ["IAD", "IAD", "IID", "IIA", "III"]
    completion = request.completion()
    assert completion is not None
    assert completion.token_ids == [5, 60, 7, 8, 9, 10, 11, 12]


def test_edit_needs_more_than_its_threshold_and_stops_after_the_limit() -> None:
    request = block_decoders.EditRequest(editing_config(max_post_edit_steps=2), [1, 2, 3, 4])
    fill = {i: (10 + i, 0.9) for i in range(4, 8)}
    run_editing(request, [fill])
    run_editing(request, [{**fill, 4: (77, 0.5)}])  # 0.5 is not above the edit threshold
    assert request.tokens[4] == 14
    assert request.records[1].commit_ready
    request = block_decoders.EditRequest(editing_config(max_post_edit_steps=2), [1, 2, 3, 4])
    trace = run_editing(request, [fill, {**fill, 4: (77, 0.9)}, {**fill, 4: (78, 0.9)}])
    assert trace[-2:] == ["IAD", "ITD"]  # the second step without masks is the last
    assert request.tokens[4] == 78


def test_edit_times_out_by_filling_all_masks() -> None:
    config = editing_config(max_post_edit_steps=1, accept_threshold=0.5)
    request = block_decoders.EditRequest(config, [1, 2, 3, 4])
    # The first position is rewritten in every step.
    run_editing(request, [{4: (60 + index, 0.9)} for index in range(5)])
    assert request.records[1].commit_ready
    assert MASK not in request.tokens[4:8]


def test_uncommitted_stop_id_is_not_final() -> None:
    request = block_decoders.EditRequest(editing_config(), [1, 2, 3, 4])
    run_editing(request, [{4: (50, 0.9), 5: (6, 0.9), 6: (7, 0.9), 7: (8, 0.9)}])
    assert request.completion() is None
    run_editing(request, [{4: (5, 0.9), 5: (6, 0.9), 6: (50, 0.9), 7: (8, 0.9)}])
    assert request.completion() is None
    run_editing(request, [{4: (5, 0.9), 5: (6, 0.9), 6: (50, 0.9), 7: (8, 0.9)}])
    completion = request.completion()
    assert completion is not None
    assert completion.token_ids == [5, 6]
    assert completion.reason == "eos_token_generated"


def test_dmax_trace() -> None:
    """strategies 8.8, N = 1: leftmost prefix, refresh, descriptors, hard store."""
    request = block_decoders.DMaxRequest(editing_config(), [1, 2, 3, 4])
    steps = [
        {4: (5, 0.9), 5: (6, 0.4), 6: (7, 0.8), 7: (8, 0.3)},
        {4: (5, 0.95), 5: (6, 0.7), 6: (7, 0.6), 7: (8, 0.2)},
        {4: (5, 0.97), 5: (61, 0.96), 6: (7, 0.7), 7: (8, 0.6)},
        {4: (5, 0.99), 5: (61, 0.98), 6: (7, 0.95), 7: (8, 0.93)},
        {},
    ]
    descriptors: list[dict[int, tuple[int, float]]] = [
        {4: (5, 0.9)},
        {4: (5, 0.95), 5: (6, 0.7), 6: (7, 0.6)},
        {4: (5, 0.97), 5: (61, 0.96), 6: (7, 0.7), 7: (8, 0.6)},
        {},
        {},
    ]
    trace = []
    for script, expected in zip(steps, descriptors, strict=True):
        trace += run_editing(request, [script])
        assert request.descriptors == expected
    assert trace == ["IAD", "IAD", "IAD", "ITD", "IID"]
    assert request.tokens[4:8] == [5, 61, 7, 8]


def test_dmax_commits_at_once_when_all_are_confident_and_at_the_step_bound() -> None:
    request = block_decoders.DMaxRequest(editing_config(), [1, 2, 3, 4])
    sure = {i: (i, 0.9) for i in range(4, 8)}
    assert run_editing(request, [sure]) == ["ITD"]
    request = block_decoders.DMaxRequest(editing_config(), [1, 2, 3, 4])
    restless = [{i: (10 * step + i, 0.6) for i in range(4, 8)} for step in range(4)]
    assert run_editing(request, restless)[-2:] == ["IAD", "ITD"]


def test_merged_embedding_keeps_the_norm() -> None:
    table = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    hard = torch.zeros(1, 2, 8)
    ids, p = torch.tensor([[3, -1]]), torch.tensor([[0.6, 0.9]])
    merged = block_decoders.merge_embeddings(table, hard, ids, p, 5)
    assert torch.equal(merged[0, 1], hard[0, 1])
    mixed = 0.6 * table[3] + 0.4 * table[5]
    norm = 0.6 * table[3].norm() + 0.4 * table[5].norm()
    torch.testing.assert_close(merged[0, 0], mixed * norm / (mixed.norm() + 1e-6))


def dual_config(**changes: Any) -> dual_cache_decoder.DualCacheConfig:
    fields: dict[str, Any] = {
        "sub_block": 4,
        "num_sub_blocks": 4,
        "mask_token_id": MASK,
        "stop_ids": (),
        "accept_threshold": 0.5,
        "max_tokens": 12,
        "max_model_len": 64,
    }
    return dual_cache_decoder.DualCacheConfig(**{**fields, **changes})


def run_dual(request: Any, writes: list[list[int]]) -> list[str]:
    """Each step is sure of the listed positions; every row proposes its next position + 1."""
    trace = []
    size, sub = request.config.block, request.config.sub_block
    for sure in writes:
        request.begin_step()
        trace.append(f"{request.mode.name}{request.sub_idx}")
        base, start = request.base, request.sub_range()[0]
        block = [base + row + 2 for row in range(size)]
        block_p = [0.9 if base + row + 1 in sure else 0.1 for row in range(size)]
        inner = [start + row + 2 for row in range(sub)]
        inner_p = [0.9 if start + row + 1 in sure else 0.1 for row in range(sub)]
        request.finish_step((block, block_p), (inner, inner_p), base + 1)
    return trace


def test_dual_cache_trace() -> None:
    """strategies 8.6: two forwards a sub-block, a commit with the seed, then the next block."""
    request = dual_cache_decoder.DualCacheRequest(dual_config(), [1, 2, 3, 4, 5, 6])
    writes = [[6], [7], [8, 9], [10, 11], [12, 13], [14, 15], [], [17]]
    trace = run_dual(request, writes[:-1])
    assert trace == ["INIT1", "REFINE1", "INIT2", "REFINE2", "INIT3", "REFINE3", "COMMIT3"]
    assert request.completion() is None
    assert request.tokens[:17] == list(range(1, 18))
    assert run_dual(request, writes[-1:]) == ["INIT0"]
    completion = request.completion()
    assert completion is not None
    assert (completion.token_ids, completion.nfe) == (list(range(7, 19)), 8)


def test_dual_cache_aligned_prompt_gets_its_seed_from_the_prefill() -> None:
    config = dual_config(num_sub_blocks=2, max_tokens=3)
    request = dual_cache_decoder.DualCacheRequest(config, list(range(1, 9)))
    assert run_dual(request, [[], [9], [10, 11]]) == ["PREFILL0", "INIT0", "REFINE0"]
    completion = request.completion()
    assert completion is not None
    assert completion.token_ids == [9, 10, 11]


def test_dual_cache_repeats_init_while_the_first_token_is_open_and_forces_one() -> None:
    request = dual_cache_decoder.DualCacheRequest(dual_config(), list(range(1, 9)))
    assert run_dual(request, [[10], [11], [8, 9]]) == ["INIT2", "INIT2", "INIT2"]
    assert request.tokens[8:12] == [9, 10, 11, 12]
    # A forward that is sure of nothing takes the best position, the lowest on a tie.
    request = dual_cache_decoder.DualCacheRequest(dual_config(), list(range(1, 9)))
    assert run_dual(request, [[10], [], [9]]) == ["INIT2", "INIT2", "REFINE2"]
    assert request.tokens[8:12] == [9, 10, 11, MASK]


def test_dual_cache_snapshot_is_stale_only_with_the_block_cache() -> None:
    for use_block_cache in (True, False):
        config = dual_config(use_block_cache=use_block_cache)
        request = dual_cache_decoder.DualCacheRequest(config, [1, 2, 3, 4, 5, 6])
        run_dual(request, [[6]])
        request.begin_step()
        assert request.mode is Mode.REFINE
        assert (request.snapshot[6] == MASK) == use_block_cache


def tiny_dual_model() -> Transformer:
    shape = Shape(
        vocab_size=32, mask_token_id=31, eos_token_id=30, block_size=8, hidden_size=32,
        intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, rotary_dim=8, qkv_bias=True,
    )  # fmt: skip
    model = Transformer(shape)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            base = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(base + 0.4 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("use_block_cache", [True, False])
def test_dual_cache_requests_do_not_influence_one_another(use_block_cache: bool) -> None:
    config = dual_config(
        mask_token_id=31, num_sub_blocks=2, use_block_cache=use_block_cache, max_tokens=20
    )
    model, options = tiny_dual_model(), {"device": torch.device("cpu"), "num_candidates": 32}
    prompts = [[3, 1, 4], list(range(8)), list(range(13)), list(range(16))]
    together = dual_cache_decoder.decode_dual_cache(model, prompts, config, **options)
    alone = [
        dual_cache_decoder.decode_dual_cache(model, [prompt], config, **options)[0]
        for prompt in prompts
    ]
    assert together == alone
    assert [len(completion.token_ids) for completion in alone] == [20] * 4


# -- canvas ----------------------------------------------------------------------------------------


def test_entropy_bound_takes_the_prefix_in_order_of_entropy() -> None:
    entropy = torch.tensor([[0.05, 0.2, 0.04, 0.0, 0.2]])
    accepted = canvas_decoder.accept_by_entropy(entropy, 0.1)
    # Sums before each, in order 0.0, 0.04, 0.05, 0.2, 0.2: 0, 0, 0.04, 0.09, 0.29.
    assert accepted.tolist() == [[True, True, True, True, False]]
    assert canvas_decoder.accept_by_entropy(torch.tensor([[3.0, 2.0]]), 0.1).tolist() == [
        [False, True]
    ]


def test_canvas_visibility_is_that_of_the_trace() -> None:
    """strategies 8.9 with a window of 4: second canvas at 10..13."""
    positions, visible = canvas_decoder.canvas_visibility(torch.tensor([6]), 2, 4, 14, 4)
    rows = visible[0]
    for row in range(4, 8):
        context = [int(positions[0, 8 + k]) for k in range(14) if rows[row, 8 + k]]
        assert context == [7, 8, 9]
        assert rows[row, :8].tolist() == [False] * 4 + [True] * 4
    ninth = [int(positions[0, 8 + k]) for k in range(14) if rows[8 + 9, 8 + k]]
    assert ninth == [6, 7, 8, 9]
    assert not rows[8:, :8].any()


def test_canvas_loop_counts_forwards_and_ends_at_the_limit() -> None:
    shape = CanvasShape(
        vocab_size=20, eos_token_id=19, canvas_length=4, hidden_size=32, intermediate_size=32,
        num_attention_heads=2, head_dim=16, sliding_window=4,
        layer_types=("sliding_attention", "full_attention"), num_experts=4,
        moe_intermediate_size=16,
    )  # fmt: skip
    model = CanvasModel(shape)
    model.initialise(0)
    config = canvas_decoder.CanvasConfig(
        stop_ids=(), canvas_length=4, max_denoising_steps=3, max_tokens=6
    )
    prompts = [[1, 2, 3, 4, 5, 6], [7]]
    completions = canvas_decoder.decode_canvas(
        model.eval(), prompts, config, device=torch.device("cpu")
    )
    # An untrained model is never confident: encode, 3 steps, encode, 3 steps.
    assert [completion.nfe for completion in completions] == [8, 8]
    assert [len(completion.token_ids) for completion in completions] == [6, 6]
    always = dataclasses.replace(config, confidence_threshold=100.0, stability_threshold=0)
    completions = canvas_decoder.decode_canvas(model, prompts, always, device=torch.device("cpu"))
    assert [completion.nfe for completion in completions] == [4, 4]
