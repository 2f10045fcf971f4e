# SPDX-License-Identifier: Apache-2.0
"""Logits of every dense family against the stock transformers decoder of its template."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffulex.checkpoint.auto_model import detect, load_model
from fixtures.decoder_oracle import (
    DecoderOracle,
    block_mask,
    d2f_mask,
    full_mask,
    prefix_full_mask,
)
from fixtures.families import DENSE_FAMILIES, family_builder, family_config
from fixtures.paged_batch import FULL, PREFIX_FULL, PagedRunner, Rows
from fixtures.quick import quick

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
#: Families whose base models attend to everything, and decode with D2F.
BIDIRECTIONAL = ("dream", "diffucoder", "llada")
BLOCK = 4


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 300, (count,), generator=generator).tolist()


def assert_equal_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.float().cpu(), expected, atol=2e-5, rtol=1e-4)


class Setup:
    def __init__(self, family: str, directory: Path, device: str = "cpu", **fields) -> None:
        self.device, self.dtype = device, fields.pop("run_dtype", torch.float32)
        self.builder = family_builder(family, **fields)
        self.tensors = self.builder.write(directory)
        name, self.spec, _ = detect(directory, family)
        assert name == self.spec.family == family
        self.model = load_model(name, self.spec, directory, self.dtype, device)
        rounded = {key: tensor.to(self.dtype) for key, tensor in self.tensors.items()}
        self.oracle = DecoderOracle(family, self.builder.config, rounded)
        self.forget()

    def forget(self) -> None:
        """Gives the model pages that nobody wrote."""
        self.runner = PagedRunner(self.model, BLOCK, device=self.device, dtype=self.dtype)


@pytest.fixture(autouse=True)
def _exact_cuda_products():
    """The float32 tolerance cannot hold with TF32 products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Callable[[str, str], Setup]:
    """Setups by family and device: a checkpoint is written and loaded once."""
    return functools.cache(
        lambda family, device: Setup(family, tmp_path_factory.mktemp("model"), device)
    )


@pytest.fixture(params=DENSE_FAMILIES)
def setup(request, built, device) -> Setup:
    found: Setup = built(request.param, device)
    found.forget()
    return found


@pytest.mark.every(5)
@pytest.mark.parametrize("num_tokens", [1, 7, 45])
def test_full_mask_in_one_shot(setup, num_tokens):
    tokens = random_tokens(num_tokens, seed=num_tokens)
    rows = Rows(setup.runner.sequence(tokens), num_tokens, should_store=False, mask_kind=FULL)
    (logits,) = setup.runner.forward([rows])
    assert_equal_logits(logits, setup.oracle.logits(tokens, full_mask(num_tokens)))


def test_block_mask_in_one_shot(setup):
    tokens = random_tokens(30, seed=1)
    (logits,) = setup.runner.forward([Rows(setup.runner.sequence(tokens), 30, False)])
    assert_equal_logits(logits, setup.oracle.logits(tokens, block_mask(30, BLOCK)))


@pytest.mark.parametrize("num_cached", [4, 20])
def test_block_mask_with_a_cached_prefix(setup, num_cached):
    tokens = random_tokens(31, seed=num_cached)
    sequence = setup.runner.sequence(tokens)
    setup.runner.forward([Rows(sequence, num_cached, should_store=True)])
    (logits,) = setup.runner.forward([Rows(sequence, 31, should_store=False)])
    expected = setup.oracle.logits(tokens, block_mask(31, BLOCK))
    assert_equal_logits(logits, expected[num_cached:])


def test_block_mask_in_chunks(setup):
    tokens = random_tokens(40, seed=2)
    sequence = setup.runner.sequence(tokens)
    parts = [
        setup.runner.forward([Rows(sequence, end, should_store=True)])[0] for end in (8, 12, 28, 40)
    ]
    assert_equal_logits(torch.cat(parts), setup.oracle.logits(tokens, block_mask(40, BLOCK)))


def test_mixed_batch(setup):
    """Requests of different lengths, masks and cache contents in one forward, with padding."""
    texts = [random_tokens(count, seed=count) for count in (9, 31, 16, 40)]
    sequences = [setup.runner.sequence(tokens) for tokens in texts]
    setup.runner.forward([Rows(sequences[1], 24, True), Rows(sequences[3], 36, True)])
    batch = [
        Rows(sequences[0], 9, should_store=False, mask_kind=FULL),
        Rows(sequences[1], 31, should_store=False),
        Rows(sequences[2], 16, should_store=True, mask_kind=PREFIX_FULL, prefix=8),
        Rows(sequences[3], 40, should_store=True),
    ]
    results = setup.runner.forward(batch, num_dummies=2)
    masks = [full_mask(9), block_mask(31, BLOCK), d2f_mask(16, 8, BLOCK), block_mask(40, BLOCK)]
    starts = (0, 24, 0, 36)
    for tokens, start, mask, logits in zip(texts, starts, masks, results):
        assert_equal_logits(logits, setup.oracle.logits(tokens, mask)[start:])


@pytest.mark.parametrize("family", BIDIRECTIONAL)
@pytest.mark.parametrize("prompt", [8, 20])
def test_d2f_mask(tmp_path, family, prompt, device):
    """The prompt sees all of itself; blocks follow, from the cache or in the same forward."""
    setup = Setup(family, tmp_path / "model", device)
    tokens = random_tokens(36, seed=prompt)
    expected = setup.oracle.logits(tokens, d2f_mask(36, prompt, BLOCK))
    sequence = setup.runner.sequence(tokens)
    whole = Rows(sequence, 36, should_store=False, mask_kind=PREFIX_FULL, prefix=prompt)
    (logits,) = setup.runner.forward([whole])
    assert_equal_logits(logits, expected)
    first = Rows(sequence, prompt, should_store=True, mask_kind=PREFIX_FULL, prefix=prompt)
    (head,) = setup.runner.forward([first])
    (middle,) = setup.runner.forward([Rows(sequence, prompt + BLOCK, should_store=True)])
    (tail,) = setup.runner.forward([Rows(sequence, 36, should_store=False)])
    assert_equal_logits(torch.cat((head, middle, tail)), expected)


@pytest.mark.parametrize("family", BIDIRECTIONAL)
def test_d2f_prompt_that_ends_inside_a_block(tmp_path, family, device):
    setup = Setup(family, tmp_path / "model", device)
    tokens = random_tokens(24, seed=5)
    sequence = setup.runner.sequence(tokens)
    rows = Rows(sequence, 24, should_store=False, mask_kind=PREFIX_FULL, prefix=10)
    (logits,) = setup.runner.forward([rows])
    assert_equal_logits(logits, setup.oracle.logits(tokens, prefix_full_mask(24, 10, BLOCK)))


def test_embedding_override(setup):
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(12, 64, generator=generator)
    given = embeds.clone().to(setup.runner.device)
    rows = Rows(setup.runner.sequence([0] * 12), 12, should_store=False)
    (logits,) = setup.runner.forward([rows], inputs_embeds=given)
    expected = setup.oracle.logits(None, block_mask(12, BLOCK), inputs_embeds=embeds[None])
    assert_equal_logits(logits, expected)
    assert torch.equal(given.cpu(), embeds)


def test_embed_is_what_the_first_layer_sees(setup):
    tokens = random_tokens(12, seed=8)
    runner = setup.runner
    rows = Rows(runner.sequence(tokens), 12, should_store=False)
    (expected,) = runner.forward([rows])
    embeds = setup.model.embed(torch.tensor(tokens, device=runner.device))
    before = embeds.clone()
    rows = Rows(runner.sequence([0] * 12), 12, should_store=False)
    (logits,) = runner.forward([rows], inputs_embeds=embeds)
    assert torch.equal(logits, expected)
    assert torch.equal(embeds, before)


VARIANTS = {
    "dream/rope_parameters": family_config(
        "dream", rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 30000.0}
    ),
    "dream/own_kv_heads": family_config("dream", num_key_value_heads=None),
    "fast_dllm_v2/tied": family_config("fast_dllm_v2", tie_word_embeddings=True),
    "dream_reasoner/bias": family_config("dream_reasoner", attention_bias=True),
    "dream_reasoner/wide_heads": family_config("dream_reasoner", head_dim=32),
    "stable_diffcoder/bias": family_config("stable_diffcoder", attention_bias=True),
    "stable_diffcoder/head_dim": family_config("stable_diffcoder", head_dim=32),
    "llada/tied": family_config("llada", weight_tying=True),
    "llada/own_kv_heads": family_config("llada", n_kv_heads=None),
    "llada/embedding_size": family_config("llada", embedding_size=320),
    "llada/embedding_size_tied": family_config("llada", embedding_size=320, weight_tying=True),
    "llada/wide_mlp": family_config("llada", mlp_hidden_size=None),
    "llada/llama_layout": {
        **family_config("stable_diffcoder", rms_norm_eps=1e-5, mask_token_id=259),
        "architectures": ["LLaDAForCausalLM"],
        "model_type": "llada",
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(tmp_path, variant, device):
    family = variant.split("/")[0]
    setup = Setup(family, tmp_path / "model", device, config=VARIANTS[variant], seed=1)
    tokens = random_tokens(29, seed=11)
    sequence = setup.runner.sequence(tokens)
    setup.runner.forward([Rows(sequence, 16, should_store=True)])
    (logits,) = setup.runner.forward([Rows(sequence, 29, should_store=False)])
    assert logits.is_contiguous()
    assert logits.shape[1] == 300
    assert_equal_logits(logits, setup.oracle.logits(tokens, block_mask(29, BLOCK))[16:])


@pytest.mark.parametrize(
    ("family", "num_shards"),
    quick(
        [(family, num) for family in DENSE_FAMILIES for num in (1, 2)],
        [*((family, 1) for family in DENSE_FAMILIES), (DENSE_FAMILIES[0], 2)],
    ),
)
def test_every_tensor_of_the_family_is_used(tmp_path, family, num_shards):
    """A changed tensor changes the logits: nothing is loaded into a place that nobody reads."""
    setup = Setup(family, tmp_path / "model", num_shards=num_shards)
    assert setup.model.weight_table().keys() == setup.tensors.keys()
    tokens = random_tokens(8, seed=3)

    def logits() -> torch.Tensor:
        rows = Rows(setup.runner.sequence(tokens), 8, should_store=False)
        return setup.runner.forward([rows])[0]

    before = logits()
    for name in setup.tensors:
        target = setup.model.weight_table()[name]
        kept = target.clone()
        target.copy_(kept + 0.5 * torch.randn(kept.shape))
        assert not torch.equal(logits(), before), name
        setup.model.weight_table()[name].copy_(kept)
    assert torch.equal(logits(), before)


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_number_of_parameters(tmp_path, family):
    setup = Setup(family, tmp_path / "model")
    total = sum(tensor.numel() for tensor in setup.tensors.values())
    assert setup.spec.num_parameters == total


@pytest.mark.every(3)
@pytest.mark.parametrize("family", DENSE_FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(tmp_path, family, dtype, device):
    """Against a float32 oracle with the rounded weights: relative RMS error at most 3 %."""
    setup = Setup(family, tmp_path / "model", device, run_dtype=dtype, seed=2)
    tokens = random_tokens(64, seed=14)
    sequence = setup.runner.sequence(tokens)
    setup.runner.forward([Rows(sequence, 32, should_store=True)])
    (logits,) = setup.runner.forward([Rows(sequence, 64, should_store=False)])
    assert logits.dtype == dtype
    expected = setup.oracle.logits(tokens, block_mask(64, BLOCK))[32:]
    error = logits.float().cpu() - expected
    assert error.pow(2).mean().sqrt() <= 0.03 * expected.pow(2).mean().sqrt()


#: Heads of the sizes that the matrix units take, with and without head norms and biases.
KERNEL_SHAPES = {
    "dream/128": family_config(
        "dream", hidden_size=256, num_attention_heads=2, num_key_value_heads=1
    ),
    "llada/64": family_config("llada", d_model=256, n_heads=4, n_kv_heads=4),
    "dream_reasoner/128": family_config("dream_reasoner", head_dim=128),
    "stable_diffcoder/64": family_config("stable_diffcoder", head_dim=64),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("shape", KERNEL_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_of_kernel_shapes(tmp_path, shape, dtype, device):
    family = shape.split("/")[0]
    fields = {"config": KERNEL_SHAPES[shape], "run_dtype": dtype, "seed": 3}
    setup = Setup(family, tmp_path / "model", device, **fields)
    tokens = random_tokens(48, seed=15)
    expected = setup.oracle.logits(tokens, d2f_mask(48, 16, BLOCK))
    sequence = setup.runner.sequence(tokens)
    prompt = Rows(sequence, 16, should_store=True, mask_kind=PREFIX_FULL, prefix=16)
    (head,) = setup.runner.forward([prompt])
    (tail,) = setup.runner.forward([Rows(sequence, 48, should_store=False)])
    error = torch.cat((head, tail)).float().cpu() - expected
    assert error.pow(2).mean().sqrt() <= 0.03 * expected.pow(2).mean().sqrt()


class TestPitfalls:
    """Ways of being wrong without a failure: each has logits that differ from the right ones."""

    @pytest.mark.parametrize("family", ["dream", "stable_diffcoder", "fast_dllm_v2", "sdar"])
    def test_rotary_base_of_resaved_configurations(self, tmp_path, family):
        nested = {"rope_type": "default", "rope_theta": 777.0}
        config = family_config(family, rope_theta=..., rope_parameters=nested)
        setup = Setup(family, tmp_path / "model", config=config)
        assert setup.spec.rope_theta == 777.0
        tokens = random_tokens(32, seed=4)
        rows = Rows(setup.runner.sequence(tokens), 32, should_store=False)
        (logits,) = setup.runner.forward([rows])
        mask = block_mask(32, BLOCK)
        assert_equal_logits(logits, setup.oracle.logits(tokens, mask))
        wrong = {**config, "rope_parameters": {"rope_theta": 10000.0}}
        other = DecoderOracle(family, wrong, setup.tensors).logits(tokens, mask)
        assert (logits - other).abs().max() > 1e-2

    def test_down_projection_and_head_of_llada(self, tmp_path):
        """With intermediate size = vocabulary the two ``ff_out`` could even be confused."""
        config = family_config("llada", mlp_hidden_size=64, vocab_size=300, n_layers=3)
        setup = Setup("llada", tmp_path / "model", config=config)
        table = setup.model.weight_table()
        for layer in range(3):
            name = f"model.transformer.blocks.{layer}.ff_out.weight"
            down = setup.model.layers[layer].mlp.down.weight
            assert torch.equal(down, setup.tensors[name])
            assert torch.equal(table[name], setup.tensors[name])
        head = setup.tensors["model.transformer.ff_out.weight"]
        assert torch.equal(setup.model.head.weight, head)

    def test_activated_branch_of_llada(self, tmp_path):
        """ff_proj is the gate; swapped, the logits are others."""
        setup = Setup("llada", tmp_path / "model")
        tokens = random_tokens(8, seed=6)
        rows = Rows(setup.runner.sequence(tokens), 8, should_store=False)
        (logits,) = setup.runner.forward([rows])
        swapped = {
            name.replace("ff_proj", "?").replace("up_proj", "ff_proj").replace("?", "up_proj"): t
            for name, t in setup.tensors.items()
        }
        other = DecoderOracle("llada", setup.builder.config, swapped)
        assert (logits - other.logits(tokens, block_mask(8, BLOCK))).abs().max() > 1e-2

    def test_surplus_rows_are_not_sampled(self, tmp_path):
        """Logits end at vocab_size even when the largest one lies beyond it."""

        def edit(tensors):
            tensors["model.transformer.ff_out.weight"][300:] = 50.0

        config = family_config("llada", embedding_size=320)
        setup = Setup("llada", tmp_path / "model", config=config, edit=edit)
        hidden = torch.ones(3, 64)
        assert setup.model.compute_logits(hidden).shape == (3, 300)

    def test_head_of_a_tied_model_is_the_embedding(self, tmp_path):
        config = family_config("fast_dllm_v2", tie_word_embeddings=True)
        setup = Setup("fast_dllm_v2", tmp_path / "model", config=config)
        assert setup.model.head.weight is setup.model.embedding.weight
        rows = torch.randn(2, 64)
        expected = rows @ setup.tensors["model.embed_tokens.weight"].t()
        assert_equal_logits(setup.model.compute_logits(rows), expected)

    @pytest.mark.parametrize("family", ["dream", "fast_dllm_v2"])
    def test_biases_are_used(self, tmp_path, family):
        setup = Setup(family, tmp_path / "model")
        tokens = random_tokens(8, seed=7)
        rows = Rows(setup.runner.sequence(tokens), 8, should_store=False)
        (logits,) = setup.runner.forward([rows])
        without = {
            name: torch.zeros_like(t) if name.endswith(".bias") else t
            for name, t in setup.tensors.items()
        }
        other = DecoderOracle(family, setup.builder.config, without)
        assert (logits - other.logits(tokens, block_mask(8, BLOCK))).abs().max() > 1e-2


def test_init_random_of_a_model_without_head_norms(tmp_path):
    setup = Setup("llada", tmp_path / "model")
    spec = replace(setup.spec, tie_word_embeddings=True)
    models = [type(setup.model)(spec, torch.float32, "cpu").init_random(s) for s in (1, 1, 2)]
    for first, again, other in zip(*(model.parameters() for model in models)):
        assert torch.isfinite(first).all()
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    assert models[0].head.weight is models[0].embedding.weight
