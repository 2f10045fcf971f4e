# SPDX-License-Identifier: Apache-2.0
"""SDAR logits against the transformers Qwen3 decoder with the block mask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffulex.checkpoint.auto_model import detect, load_model
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.decoder_oracle import DecoderOracle, block_mask
from fixtures.paged_batch import PagedRunner, Rows

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


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
    def __init__(self, builder: CheckpointBuilder, directory: Path, device: str, **runner) -> None:
        tensors = builder.write(directory)
        name, self.spec, _ = detect(directory)
        dtype = runner.get("dtype", torch.float32)
        self.model = load_model(name, self.spec, directory, dtype, device)
        rounded = {key: tensor.to(dtype) for key, tensor in tensors.items()}
        block_size = runner.pop("block_size", self.spec.block_size)
        self.oracle = DecoderOracle("sdar", builder.config, rounded)
        self.block_size = block_size
        self.runner = PagedRunner(self.model, block_size, device=device, **runner)

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """Logits of the oracle."""
        return self.oracle.logits(tokens, block_mask(len(tokens), self.block_size))


@pytest.fixture(autouse=True)
def _exact_cuda_products():
    """The float32 rule cannot hold with TF32 products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(params=DEVICES)
def setup(request, tmp_path) -> Setup:
    return Setup(CheckpointBuilder(), tmp_path / "model", request.param)


@pytest.mark.parametrize("num_tokens", [1, 4, 7, 32, 45])
def test_one_shot(setup, num_tokens):
    tokens = random_tokens(num_tokens, seed=num_tokens)
    sequence = setup.runner.sequence(tokens)
    (logits,) = setup.runner.forward([Rows(sequence, num_tokens, should_store=False)])
    assert_equal_logits(logits, setup.expected(tokens))


@pytest.mark.parametrize("num_cached", [4, 8, 20, 40])
def test_cached_prefix(setup, num_cached):
    tokens = random_tokens(44, seed=num_cached)
    sequence = setup.runner.sequence(tokens)
    setup.runner.forward([Rows(sequence, num_cached, should_store=True)])
    (logits,) = setup.runner.forward([Rows(sequence, 44, should_store=False)])
    assert_equal_logits(logits, setup.expected(tokens)[num_cached:])


def test_chunked_prefill(setup):
    tokens = random_tokens(52, seed=3)
    sequence = setup.runner.sequence(tokens)
    parts = [
        setup.runner.forward([Rows(sequence, end, should_store=True)])[0]
        for end in (4, 16, 24, 44, 52)
    ]
    assert_equal_logits(torch.cat(parts), setup.expected(tokens))


def test_rows_without_a_slot_leave_the_cache_unchanged(setup):
    """Denoising repeats a block with other tokens; only the committed ones may be remembered."""
    tokens = random_tokens(24, seed=4)
    sequence = setup.runner.sequence(tokens)
    setup.runner.forward([Rows(sequence, 12, should_store=True)])
    for seed in (5, 6):
        guess = random_tokens(4, seed)
        rows = Rows(sequence, 16, should_store=False, tokens=guess)
        (logits,) = setup.runner.forward([rows])
        assert_equal_logits(logits, setup.expected(tokens[:12] + guess)[12:])
    setup.runner.forward([Rows(sequence, 16, should_store=True)])
    (logits,) = setup.runner.forward([Rows(sequence, 24, should_store=False)])
    assert_equal_logits(logits, setup.expected(tokens)[16:])


def test_batch_of_different_lengths_with_padding(setup):
    texts = [random_tokens(count, seed=count) for count in (9, 31, 4, 40)]
    sequences = [setup.runner.sequence(tokens) for tokens in texts]
    setup.runner.forward([Rows(sequences[1], 24, True), Rows(sequences[3], 36, True)])
    batch = [Rows(s, len(s.tokens), should_store=index == 0) for index, s in enumerate(sequences)]
    starts = [sequence.num_cached for sequence in sequences]
    results = setup.runner.forward(batch, num_dummies=2)
    for tokens, start, logits in zip(texts, starts, results):
        assert_equal_logits(logits, setup.expected(tokens)[start:])


def test_embedding_override_is_used_and_not_modified(setup):
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(12, 64, generator=generator)
    given = embeds.clone().to(setup.runner.device)
    sequence = setup.runner.sequence([0] * 12)
    rows = Rows(sequence, 12, should_store=False)
    (logits,) = setup.runner.forward([rows], inputs_embeds=given)
    mask = block_mask(12, setup.block_size)
    assert_equal_logits(logits, setup.oracle.logits(None, mask, inputs_embeds=embeds[None]))
    assert torch.equal(given.cpu(), embeds)


VARIANTS = {
    "tied": tiny_config(tie_word_embeddings=True),
    "attention_bias": tiny_config(attention_bias=True),
    "block_8": tiny_config(block_size=8),
    "no_sharing_of_kv_heads": tiny_config(num_key_value_heads=4),
    "head_dim_64": tiny_config(head_dim=64, hidden_size=128),
    "rope_parameters_only": tiny_config(
        rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 30000.0}
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(tmp_path, variant, device):
    setup = Setup(CheckpointBuilder(VARIANTS[variant], seed=1), tmp_path / "model", device)
    tokens = random_tokens(29, seed=11)
    sequence = setup.runner.sequence(tokens)
    setup.runner.forward([Rows(sequence, 16, should_store=True)])
    (logits,) = setup.runner.forward([Rows(sequence, 29, should_store=False)])
    assert_equal_logits(logits, setup.expected(tokens)[16:])


@pytest.mark.parametrize("device", DEVICES)
def test_distinct_cache_layout(tmp_path, device):
    setup = Setup(CheckpointBuilder(), tmp_path / "model", device, layout="distinct")
    tokens = random_tokens(30, seed=12)
    sequence = setup.runner.sequence(tokens)
    setup.runner.forward([Rows(sequence, 20, should_store=True)])
    (logits,) = setup.runner.forward([Rows(sequence, 30, should_store=False)])
    assert_equal_logits(logits, setup.expected(tokens)[20:])


@pytest.mark.parametrize("device", DEVICES)
def test_block_size_other_than_the_checkpoint(tmp_path, device):
    setup = Setup(CheckpointBuilder(), tmp_path / "model", device, block_size=16)
    tokens = random_tokens(40, seed=13)
    sequence = setup.runner.sequence(tokens)
    setup.runner.forward([Rows(sequence, 32, should_store=True)])
    (logits,) = setup.runner.forward([Rows(sequence, 40, should_store=False)])
    assert_equal_logits(logits, setup.expected(tokens)[32:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(tmp_path, dtype, device):
    """Against a float32 oracle with the rounded weights: relative RMS error at most 3 %."""
    builder = CheckpointBuilder(tiny_config(num_hidden_layers=4), seed=2)
    setup = Setup(builder, tmp_path / "model", device, dtype=dtype)
    tokens = random_tokens(64, seed=14)
    sequence = setup.runner.sequence(tokens)
    setup.runner.forward([Rows(sequence, 32, should_store=True)])
    (logits,) = setup.runner.forward([Rows(sequence, 64, should_store=False)])
    assert logits.dtype == dtype
    expected = setup.expected(tokens)[32:]
    error = logits.float().cpu() - expected
    assert error.pow(2).mean().sqrt() <= 0.03 * expected.pow(2).mean().sqrt()


def test_init_random_is_seeded_and_fills_everything(tmp_path):
    from diffulex.nn.decoder import DecoderForDiffusionLM

    CheckpointBuilder().write(tmp_path / "model")
    _, spec, _ = detect(tmp_path / "model")
    models = [DecoderForDiffusionLM(spec, torch.float32, "cpu").init_random(s) for s in (1, 1, 2)]
    for first, again, other in zip(*(model.parameters() for model in models)):
        assert torch.isfinite(first).all()
        assert first.std() > 0
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    tied = replace(spec, tie_word_embeddings=True)
    model = DecoderForDiffusionLM(tied, torch.float32, "cpu").init_random(0)
    assert model.head.weight is model.embedding.weight
