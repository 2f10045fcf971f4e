# SPDX-License-Identifier: Apache-2.0
"""SDAR-MoE and LLaDA2 logits against stock transformers decoders."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.nn.moe import MoeFeedForward
from fixtures.decoder_oracle import DecoderOracle, block_mask, full_mask
from fixtures.moe_families import MOE_FAMILIES, moe_builder, moe_config, stack_experts
from fixtures.paged_batch import FULL, PagedRunner, Rows

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
BLOCK = 4


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 300, (count,), generator=generator).tolist()


def assert_equal_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The float32 rule: |difference| <= 1e-5 * max(1, |logits| max)."""
    assert actual.shape == expected.shape
    limit = 1e-5 * max(1.0, expected.abs().max().item())
    difference = (actual.float().cpu() - expected).abs().max().item()
    assert difference <= limit, f"{difference} > {limit}"


class Setup:
    """A checkpoint in every form it is needed: files, model, oracle."""

    def __init__(self, family: str, directory: Path, device: str = "cpu", **fields: Any) -> None:
        dtype = fields.pop("compute_dtype", torch.float32)
        edit = fields.pop("edit", None)
        kept: dict[str, torch.Tensor] = {}

        def note(tensors: dict[str, torch.Tensor]) -> None:
            # The oracle takes the published layout, whatever is written.
            kept.update(tensors)
            if edit is not None:
                edit(tensors)

        builder = moe_builder(family, edit=note, **fields)
        builder.write(directory)
        name, self.spec, _ = detect(directory)
        assert name == family
        self.model: Any = load_model(name, self.spec, directory, dtype, device)
        rounded = {key: _rounded(key, tensor, dtype) for key, tensor in kept.items()}
        self.oracle = DecoderOracle(family, builder.config, rounded)
        self.runner = PagedRunner(self.model, BLOCK, device=device, dtype=dtype)

    def one_shot(self, tokens: list[int], **fields: Any) -> torch.Tensor:
        sequence = self.runner.sequence(tokens)
        rows = Rows(sequence, len(tokens), should_store=False, **fields)
        return self.runner.forward([rows])[0]


def _rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the engine holds: float32 for the expert bias and, in float16, for the router."""
    if name.endswith("expert_bias") or (name.endswith("mlp.gate.weight") and dtype.itemsize == 2):
        keeps = name.endswith("expert_bias") or dtype == torch.float16
        return tensor if keeps else tensor.to(dtype)
    return tensor.to(dtype)


@pytest.fixture(autouse=True)
def _exact_cuda_products():
    """The float32 rule cannot hold with TF32 products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(params=MOE_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.every(5)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [1, 4, 7, 45])
def test_one_shot(family: str, tmp_path: Path, device: str, num_tokens: int) -> None:
    setup = Setup(family, tmp_path / "model", device)
    tokens = random_tokens(num_tokens, seed=num_tokens)
    expected = setup.oracle.logits(tokens, block_mask(num_tokens, BLOCK))
    assert_equal_logits(setup.one_shot(tokens), expected)
    expected = setup.oracle.logits(tokens, full_mask(num_tokens))
    assert_equal_logits(setup.one_shot(tokens, mask_kind=FULL), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_cached_prefix_and_chunks(family: str, tmp_path: Path, device: str) -> None:
    setup = Setup(family, tmp_path / "model", device, num_shards=3)
    tokens = random_tokens(44, seed=3)
    expected = setup.oracle.logits(tokens, block_mask(44, BLOCK))
    sequence = setup.runner.sequence(tokens)
    parts = [
        setup.runner.forward([Rows(sequence, end, should_store=True)])[0] for end in (4, 16, 24, 44)
    ]
    assert_equal_logits(torch.cat(parts), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_dummy_rows_wake_no_expert(family: str, tmp_path: Path, device: str) -> None:
    """Rows of dummy requests, even of NaN, neither reach an expert nor change the real rows."""
    setup = Setup(family, tmp_path / "model", device)
    texts = [random_tokens(count, seed=count) for count in (9, 31)]
    sequences = [setup.runner.sequence(tokens) for tokens in texts]
    chosen = []
    for block in _moe_blocks(setup.model):
        block.register_forward_hook(
            lambda _block, arguments, _out: chosen.append(arguments[1].routing.ids.clone())
        )
    batch = [Rows(s, len(s.tokens), should_store=False) for s in sequences]
    alone = setup.runner.forward(batch)
    embeds = setup.model.embed(
        torch.tensor([*texts[0], *texts[1], *([0] * 2 * BLOCK)], device=device)
    )
    embeds[40:] = torch.nan
    chosen.clear()
    results = setup.runner.forward(batch, num_dummies=2, inputs_embeds=embeds)
    assert len(chosen) == len(_moe_blocks(setup.model))
    for ids in chosen:
        assert (ids[:40] >= 0).all()
        assert (ids[40:] == -1).all()
    for tokens, logits, before in zip(texts, results, alone):
        assert torch.isfinite(logits).all()
        if device == "cpu":
            assert torch.equal(logits, before)
        assert_equal_logits(logits, setup.oracle.logits(tokens, block_mask(len(tokens), BLOCK)))


def _moe_blocks(model: torch.nn.Module) -> list[MoeFeedForward]:
    return [module for module in model.modules() if isinstance(module, MoeFeedForward)]


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("sdar_moe", {"tie_word_embeddings": True}),
    "not_renormalised": ("sdar_moe", {"norm_topk_prob": False}),
    "dense_layer_by_number": ("sdar_moe", {"mlp_only_layers": [0]}),
    "every_second_layer": ("sdar_moe", {"decoder_sparse_step": 2}),
    "one_expert": ("sdar_moe", {"num_experts_per_tok": 1}),
    "all_experts": ("sdar_moe", {"num_experts_per_tok": 8}),
    "llada2_tied": ("llada2", {"tie_word_embeddings": True}),
    "llada2_without_groups": ("llada2", {"n_group": 1, "topk_group": 1}),
    "llada2_all_groups": ("llada2", {"topk_group": 4}),
    "llada2_not_renormalised": ("llada2", {"norm_topk_prob": False}),
    "llada2_two_shared": ("llada2", {"num_shared_experts": 2}),
    "llada2_no_dense_layer": ("llada2", {"first_k_dense_replace": 0}),
    "llada2_two_dense_layers": ("llada2", {"first_k_dense_replace": 2}),
    "llada2_without_head_norms": ("llada2", {"use_qk_norm": False}),
    "llada2_no_sharing_of_kv_heads": ("llada2", {"num_key_value_heads": 0}),
    "llada2_full_rotary": ("llada2", {"partial_rotary_factor": 1.0, "rotary_dim": 16}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(tmp_path: Path, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    config = moe_config(family, **overrides)
    if variant == "llada2_without_groups":
        # The oracle always adds two scores per group: one group of all experts is its plain choice.
        assert config["n_group"] == 1
    setup = Setup(family, tmp_path / "model", config=config, seed=1)
    tokens = random_tokens(29, seed=11)
    expected = setup.oracle.logits(tokens, block_mask(29, BLOCK))
    assert_equal_logits(setup.one_shot(tokens), expected)


@pytest.mark.parametrize("layout", ["merged", "merged_weight", "gate_up"])
def test_stacked_experts(family: str, tmp_path: Path, layout: str) -> None:
    num_experts = moe_config(family)["num_experts"]
    setup = Setup(
        family,
        tmp_path / "model",
        edit=lambda tensors: stack_experts(tensors, num_experts, layout),
        num_shards=2,
    )
    tokens = random_tokens(21, seed=5)
    assert_equal_logits(setup.one_shot(tokens), setup.oracle.logits(tokens, block_mask(21, BLOCK)))


def test_router_follows_the_oracle(tmp_path: Path) -> None:
    """Identical experts wherever the choice is not a near tie; the bias is far below zero."""
    setup = Setup("llada2", tmp_path / "model")
    chosen: list[torch.Tensor] = []
    scores: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []

    def record(block: MoeFeedForward, arguments: Any, _out: torch.Tensor) -> None:
        chosen.append(arguments[1].routing.ids.clone())
        scores.append(arguments[1].logits.sigmoid() + block.expert_bias)

    for block in _moe_blocks(setup.model):
        block.register_forward_hook(record)
    for layer in setup.oracle.model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _gate, _x, out: wanted.append(out[2]))
    assert all(block.expert_bias.mean() < -0.7 for block in _moe_blocks(setup.model))
    tokens = random_tokens(61, seed=9)
    setup.one_shot(tokens)
    setup.oracle.logits(tokens, block_mask(61, BLOCK))
    assert len(chosen) == len(wanted) == 2
    num_compared = 0
    for ids, choice, expected in zip(chosen, scores, wanted):
        for row in range(61):
            ordered = choice[row].sort(descending=True).values
            if (ordered[:-1] - ordered[1:]).min() > 1e-4:
                assert sorted(ids[row].tolist()) == sorted(expected[row].tolist())
                num_compared += 1
    assert num_compared > 60


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_router_logits_are_float32(
    family: str, tmp_path: Path, dtype: torch.dtype, device: str
) -> None:
    """Whatever the dtype of the model: rounded to it, logits would choose other experts."""
    setup = Setup(family, tmp_path / "model", device, compute_dtype=dtype)
    block = _moe_blocks(setup.model)[0]
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(9, setup.spec.hidden_size, generator=generator).to(device, dtype)
    expected = x.double() @ block.router.double().T
    metadata: Any = SimpleNamespace(
        cu_seqlens_q=torch.tensor([0, 9], dtype=torch.int32, device=device),
        valid_slices=torch.tensor([9], dtype=torch.int32, device=device),
    )
    scratch = block.new_scratch(x, metadata)
    buffer = scratch.out
    assert block(x, scratch) is buffer  # no copy
    assert scratch.out is x
    assert scratch.logits.dtype == torch.float32
    torch.testing.assert_close(scratch.logits.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(family: str, tmp_path: Path, dtype: torch.dtype, device: str) -> None:
    """Against a float32 oracle with the rounded weights: relative RMS error at most 10 %."""
    setup = Setup(family, tmp_path / "model", device, compute_dtype=dtype, seed=2)
    tokens = random_tokens(64, seed=14)
    logits = setup.one_shot(tokens)
    assert logits.dtype == dtype
    expected = setup.oracle.logits(tokens, block_mask(64, BLOCK))
    error = logits.float().cpu() - expected
    assert error.pow(2).mean().sqrt() <= 0.1 * expected.pow(2).mean().sqrt()


def test_init_random_is_seeded_and_fills_everything(family: str, tmp_path: Path) -> None:
    setup = Setup(family, tmp_path / "model")
    model_class = type(setup.model)
    models = [model_class(setup.spec, torch.float32, "cpu").init_random(s) for s in (1, 1, 2)]
    for first, again, other in zip(*(model.parameters() for model in models)):
        assert torch.isfinite(first).all()
        assert first.std() > 0
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_number_of_parameters(family: str, tmp_path: Path) -> None:
    setup = Setup(family, tmp_path / "model")
    assert setup.spec.num_parameters == sum(p.numel() for p in setup.model.parameters())
    idle = sum(
        p.numel()
        * (setup.spec.moe.num_experts - setup.spec.moe.top_k)
        // setup.spec.moe.num_experts
        for p in setup.model.parameters()
        if p.dim() == 3 and len(p) == setup.spec.moe.num_experts
    )
    assert idle > 0
    embedding = (
        0 if setup.spec.tie_word_embeddings else setup.spec.vocab_size * setup.spec.hidden_size
    )
    assert setup.spec.products_per_row == setup.spec.num_parameters - idle - embedding
