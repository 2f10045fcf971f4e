# SPDX-License-Identifier: Apache-2.0
"""DiffusionGemma against the native transformers model: encoder, denoising steps, commit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex import ops
from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.nn.gemma_layers import GemmaSelfConditioning
from fixtures.gemma import (
    CANVAS,
    FULL_ATTENTION,
    SLIDING,
    VOCAB,
    WINDOW,
    GemmaOracle,
    make_flat,
)
from fixtures.paged_batch import CAUSAL, FULL, PagedRunner, Rows, Sequence

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
ENCODER, DECODER = 0, 1
SLOTS = 3
LONG_PROMPT = 3 * WINDOW + 2


@pytest.fixture(autouse=True)
def _exact_cuda_products():
    """The float32 tolerance cannot hold with TF32 products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def softcapped(logits: torch.Tensor) -> torch.Tensor:
    return 30 * torch.tanh(logits.float().cpu() / 30)


def assert_equal_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """`actual` are raw logits of the engine."""
    assert actual.shape == expected.shape
    torch.testing.assert_close(softcapped(actual), expected, atol=2e-5, rtol=1e-4)


class Engine:
    """The loaded model with a paged cache and a buffer of self-conditioning signals."""

    def __init__(
        self,
        directory: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        layout: str = "unified",
    ) -> None:
        name, self.spec, _ = detect(directory)
        assert name == "diffusion_gemma"
        self.model: Any = load_model(name, self.spec, directory, dtype, device)
        self.canvas = self.spec.block_size
        self.device = device
        self.runner = PagedRunner(
            self.model, self.canvas, device=device, dtype=dtype, layout=layout
        )
        # Rows that nobody wrote must not matter.
        shape = (SLOTS * self.canvas, self.spec.hidden_size)
        self.signals = torch.full(shape, torch.nan, device=device)

    def sequence(self, prompt: list[int]) -> Sequence:
        room = self.runner.sequence([0] * (len(prompt) + 4 * self.canvas))
        room.tokens[: len(prompt)] = prompt
        return room

    def encode(self, sequence: Sequence, end: int) -> None:
        """Stores the rows up to `end`; every row is an encoder row and the forward knows it."""
        self.runner.forward([Rows(sequence, end, should_store=True, mask_kind=CAUSAL)])

    def batch(self, parts: list[tuple[Rows, int, int | None]], num_dummies: int = 0) -> list:
        """Logits of rows given with their pass kind and the slot of their signal, if any."""
        kinds, rows_of = [], []
        for rows, kind, slot in parts:
            count = rows.end - rows.sequence.num_cached
            kinds += [kind] * count
            start = -1 if slot is None else slot * self.canvas
            rows_of += [start + i if slot is not None else -1 for i in range(count)]
        kinds += [DECODER] * (num_dummies * self.canvas)
        rows_of += [-1] * (num_dummies * self.canvas)
        return self.runner.forward(
            [rows for rows, _, _ in parts],
            num_dummies,
            row_pass_kind=torch.tensor(kinds, dtype=torch.uint8, device=self.device),
            row_self_cond=torch.tensor(rows_of, dtype=torch.int32, device=self.device),
            self_cond=self.signals,
        )

    def canvas_rows(self, sequence: Sequence, canvas: list[int]) -> Rows:
        end = sequence.num_cached + len(canvas)
        return Rows(sequence, end, should_store=False, tokens=canvas, mask_kind=FULL)

    def denoise(
        self, sequence: Sequence, canvas: list[int], slot: int | None = None
    ) -> torch.Tensor:
        return self.batch([(self.canvas_rows(sequence, canvas), DECODER, slot)])[0]

    def save_signal(
        self, logits: torch.Tensor, temperature: float, slot: int, *, is_raw: bool = False
    ) -> None:
        """What the sampler leaves for the next step of a canvas.

        The signal is a mean of many embeddings, normalised afterwards: it magnifies the last bits
        of its logits. Tests of the model alone therefore give it those of the oracle, which have
        the soft-cap applied; `is_raw` are the engine's own.
        """
        rows = logits.shape[0]
        logits = logits.to(self.device)
        inv = torch.full((rows,), 1 / temperature, device=self.device)
        uniforms = torch.full((rows,), 0.5, dtype=torch.float64, device=self.device)
        softcap = self.spec.final_logit_softcap if is_raw else 0.0
        stats = ops.token_stats(logits, inv_temperature=inv, uniforms=uniforms, softcap=softcap)
        out = self.signals[slot * self.canvas : slot * self.canvas + rows]
        ops.soft_embedding(
            logits,
            stats.stats[:, ops.StatsColumn.LOGSUMEXP],
            self.model.soft_embedding_weight,
            inv_temperature=inv,
            normalizer=self.model.embed_scale,
            softcap=softcap,
            out=out,
        )


@pytest.mark.every(5)
@DEVICES
@pytest.mark.parametrize(
    ("prompt_len", "canvas_len", "layout"),
    [
        (1, CANVAS, "unified"),
        (WINDOW - 1, CANVAS, "unified"),
        (WINDOW, 2 * WINDOW, "unified"),
        (LONG_PROMPT, CANVAS, "unified"),
        (LONG_PROMPT, 2 * WINDOW, "unified"),
        (LONG_PROMPT, CANVAS, "distinct"),
    ],
)
def test_steps_and_commits(
    tmp_path: Path, device: str, prompt_len: int, canvas_len: int, layout: str
) -> None:
    oracle = GemmaOracle(canvas=canvas_len)
    oracle.write(tmp_path)
    engine = Engine(tmp_path, device=device, layout=layout)
    prompt = tokens(prompt_len, seed=prompt_len)
    sequence = engine.sequence(prompt)
    engine.encode(sequence, prompt_len)
    pending: list[int] | None = prompt
    for index in range(3):
        temperature, previous = 0.8, None
        for step in range(3):
            canvas = tokens(canvas_len, seed=100 * index + step)
            expected = oracle.denoise(canvas, pending, previous)
            pending = None
            slot = None if step == 0 else index
            actual = engine.denoise(sequence, canvas, slot)
            assert_equal_logits(actual, expected)
            engine.save_signal(expected, temperature, index)
            previous = expected / temperature
            temperature -= 0.1
        pending = tokens(canvas_len, seed=1000 + index)
        start = sequence.num_cached
        sequence.tokens[start : start + canvas_len] = pending
        engine.encode(sequence, start + canvas_len)


@DEVICES
def test_signal_of_raw_logits(tmp_path: Path, device: str) -> None:
    oracle = GemmaOracle()
    oracle.write(tmp_path)
    engine = Engine(tmp_path, device=device)
    prompt, canvas = tokens(LONG_PROMPT, seed=1), tokens(CANVAS, seed=2)
    sequence = engine.sequence(prompt)
    engine.encode(sequence, LONG_PROMPT)
    raw = engine.denoise(sequence, canvas)
    engine.save_signal(raw, 0.7, 2, is_raw=True)
    probabilities = (oracle.denoise(canvas, prompt) / 0.7).softmax(-1)
    weight = oracle.model.model.decoder.embed_tokens.weight.detach()
    expected = probabilities @ weight * weight.shape[1] ** 0.5
    signal = engine.signals[2 * CANVAS :].cpu()
    torch.testing.assert_close(signal, expected, atol=2e-5, rtol=1e-4)
    assert engine.signals[: 2 * CANVAS].isnan().all()
    # The whole chain, with the engine's own logits.
    actual = softcapped(engine.denoise(sequence, canvas, 2))
    expected = oracle.denoise(canvas, None, oracle.denoise(canvas) / 0.7)
    torch.testing.assert_close(actual, expected, atol=5e-4, rtol=1e-3)


@DEVICES
def test_encoder_hidden_states(tmp_path: Path, device: str) -> None:
    oracle = GemmaOracle(seed=3)
    oracle.write(tmp_path)
    engine = Engine(tmp_path, device=device)
    prompt = tokens(LONG_PROMPT, seed=5)
    oracle.denoise(tokens(CANVAS, seed=6), prompt)
    assert oracle.last_hidden is not None
    sequence = engine.sequence(prompt)
    rows = Rows(sequence, LONG_PROMPT, should_store=True, mask_kind=CAUSAL)
    logits = engine.runner.forward([rows])[0]
    weight = engine.model.embedding.weight.float().cpu()
    torch.testing.assert_close(
        logits.float().cpu(), oracle.last_hidden @ weight.T, atol=2e-5, rtol=1e-4
    )


@DEVICES
def test_prompt_in_pieces(tmp_path: Path, device: str) -> None:
    oracle = GemmaOracle(seed=4)
    oracle.write(tmp_path)
    engine = Engine(tmp_path, device=device)
    prompt, canvas = tokens(LONG_PROMPT, seed=7), tokens(CANVAS, seed=8)
    expected = oracle.denoise(canvas, prompt)
    sequence = engine.sequence(prompt)
    for end in (5, 6, 17, LONG_PROMPT):
        engine.encode(sequence, end)
    assert_equal_logits(engine.denoise(sequence, canvas), expected)


@DEVICES
def test_encoder_and_decoder_rows_share_a_batch(tmp_path: Path, device: str) -> None:
    prompts = [tokens(LONG_PROMPT, seed=20), tokens(9, seed=21), tokens(15, seed=22)]
    canvases = [tokens(CANVAS, seed=30 + i) for i in range(3)]
    oracles = [GemmaOracle(seed=9) for _ in prompts]
    first = [
        oracle.denoise(canvas, prompt)
        for oracle, canvas, prompt in zip(oracles, canvases, prompts, strict=True)
    ]
    oracles[0].write(tmp_path)
    engine = Engine(tmp_path, device=device)
    sequences = [engine.sequence(prompt) for prompt in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        engine.encode(sequence, len(prompt))
    # One canvas in its first step, one later, one that is committed; and two dummy requests.
    engine.save_signal(first[1], 0.7, 1)
    second = oracles[1].denoise(canvases[1], None, first[1] / 0.7)
    committed = sequences[2]
    committed.tokens[15 : 15 + CANVAS] = canvases[2]
    commit = Rows(committed, 15 + CANVAS, should_store=True, mask_kind=CAUSAL)
    logits = engine.batch(
        [
            (engine.canvas_rows(sequences[0], canvases[0]), DECODER, None),
            (engine.canvas_rows(sequences[1], canvases[1]), DECODER, 1),
            (commit, ENCODER, None),
        ],
        num_dummies=2,
    )
    assert_equal_logits(logits[0], first[0])
    assert_equal_logits(logits[1], second)
    following = tokens(CANVAS, seed=40)
    expected = oracles[2].denoise(following, canvases[2])
    assert_equal_logits(engine.denoise(committed, following), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_global_key_value_heads": None},
        {"top_k_experts": 1},
        {"top_k_experts": 8},
        {"sliding_window": 2},
        {"num_hidden_layers": 1, "layer_types": [FULL_ATTENTION]},
        {"num_hidden_layers": 4, "layer_types": [FULL_ATTENTION, SLIDING] * 2},
        {"num_hidden_layers": 7, "layer_types": None},
        {"global_head_dim": 16, "num_global_key_value_heads": 2},
        {
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 500.0},
                FULL_ATTENTION: {
                    "rope_type": "proportional",
                    "rope_theta": 900.0,
                    "partial_rotary_factor": 0.5,
                },
            }
        },
        {
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                FULL_ATTENTION: {"rope_type": "default", "rope_theta": 1e6},
            }
        },
    ],
)
def test_shapes(tmp_path: Path, changes: dict[str, Any]) -> None:
    oracle = GemmaOracle(seed=2, **changes)
    oracle.write(tmp_path)
    engine = Engine(tmp_path)
    prompt, canvas = tokens(LONG_PROMPT, seed=1), tokens(CANVAS, seed=2)
    expected = oracle.denoise(canvas, prompt)
    sequence = engine.sequence(prompt)
    engine.encode(sequence, LONG_PROMPT)
    actual = engine.denoise(sequence, canvas)
    assert_equal_logits(actual, expected)
    engine.save_signal(expected, 0.5, 0)
    expected = oracle.denoise(canvas, None, expected / 0.5)
    assert_equal_logits(engine.denoise(sequence, canvas, 0), expected)


def test_both_forms_of_the_configuration(tmp_path: Path) -> None:
    oracle = GemmaOracle(seed=6)
    oracle.write(tmp_path)
    prompt, canvas = tokens(20, seed=1), tokens(CANVAS, seed=2)
    results = []
    for change in (lambda _: None, make_flat):
        change(tmp_path)
        engine = Engine(tmp_path)
        sequence = engine.sequence(prompt)
        engine.encode(sequence, 20)
        results.append(engine.denoise(sequence, canvas))
    assert torch.equal(results[0], results[1])


def test_zero_signal_is_not_no_signal(tmp_path: Path) -> None:
    """Without a signal the scale-less norm still applies: rows differ from encoder rows."""
    GemmaOracle().write(tmp_path)
    engine = Engine(tmp_path)
    sequence = engine.sequence(tokens(5, seed=1))
    engine.encode(sequence, 5)
    canvas = tokens(CANVAS, seed=2)
    plain = engine.denoise(sequence, canvas)
    engine.signals.zero_()
    assert torch.equal(engine.denoise(sequence, canvas, 0), plain)
    rows = engine.canvas_rows(sequence, canvas)
    as_decoder = torch.ones(CANVAS, dtype=torch.uint8)
    assert torch.equal(engine.runner.forward([rows], row_pass_kind=as_decoder)[0], plain)
    assert not torch.allclose(engine.batch([(rows, ENCODER, None)])[0], plain)


def test_first_step_starts_from_the_unit_norm() -> None:
    """By hand: (3, 4) over the root of its mean square, (3, 4) / sqrt(12.5)."""
    spec = SimpleNamespace(hidden_size=2, intermediate_size=4, rms_norm_eps=1e-6)
    module = GemmaSelfConditioning(spec, torch.float32, "cpu")  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    for weight in module.weight_table("").values():
        weight.data.normal_(generator=generator)
    started = module(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2))
    assert started[0].tolist() == pytest.approx([0.848528, 1.131371], abs=1e-6)
    # The weights matter as soon as there is a signal.
    signalled = module(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, -2.0]]))
    assert not torch.allclose(signalled, started, atol=1e-2)


def test_embeddings_in_place_of_ids(tmp_path: Path) -> None:
    GemmaOracle().write(tmp_path)
    engine = Engine(tmp_path)
    prompt = tokens(12, seed=1)
    embeds = engine.model.embed(torch.tensor(prompt))
    before = embeds.clone()
    by_ids = Rows(engine.sequence(prompt), 12, should_store=False, mask_kind=CAUSAL)
    by_rows = Rows(
        engine.sequence(prompt), 12, should_store=False, tokens=[0] * 12, mask_kind=CAUSAL
    )
    expected = engine.runner.forward([by_ids])[0]
    actual = engine.runner.forward([by_rows], inputs_embeds=embeds)[0]
    assert torch.equal(actual, expected)
    assert torch.equal(embeds, before)


def test_embeddings_are_scaled_in_the_dtype_of_the_weights(tmp_path: Path) -> None:
    GemmaOracle(hidden_size=72, intermediate_size=16).write(tmp_path)
    name, spec, _ = detect(tmp_path)
    exact: Any = load_model(name, spec, tmp_path, torch.float32, "cpu")
    rounded: Any = load_model(name, spec, tmp_path, torch.bfloat16, "cpu")
    assert exact.embed_scale == float(torch.tensor(72**0.5))
    assert rounded.embed_scale == 8.5  # sqrt(72) = 8.485 in eight bits
    ids = torch.tensor([3, 4])
    assert torch.equal(
        rounded.embed(ids), rounded.embedding.weight[ids] * torch.tensor(8.5).bfloat16()
    )


@DEVICES
def test_bfloat16(tmp_path: Path, device: str) -> None:
    oracle = GemmaOracle(seed=8, round_to=torch.bfloat16, moe_intermediate_size=16)
    oracle.write(tmp_path)
    engine = Engine(tmp_path, device=device, dtype=torch.bfloat16)
    prompt = tokens(LONG_PROMPT, seed=1)
    sequence = engine.sequence(prompt)
    engine.encode(sequence, LONG_PROMPT)
    errors, scale, pending, previous = [], [], prompt, None
    for step in range(4):
        canvas = tokens(CANVAS, seed=50 + step)
        expected = oracle.denoise(canvas, pending, previous)
        actual = engine.denoise(sequence, canvas, None if step == 0 else 0)
        errors.append(softcapped(actual) - expected)
        scale.append(expected)
        engine.save_signal(expected, 0.6, 0)
        pending, previous = None, expected / 0.6
    relative = torch.cat(errors).square().mean().sqrt() / torch.cat(scale).square().mean().sqrt()
    assert relative <= 0.10


def test_weights_filled_again_are_used(tmp_path: Path) -> None:
    """Folded and packed copies of weights do not survive a new fill."""
    GemmaOracle(seed=1).write(tmp_path / "a")
    other = GemmaOracle(seed=2)
    other.write(tmp_path / "b")
    engine = Engine(tmp_path / "a")
    prompt, canvas = tokens(9, seed=1), tokens(CANVAS, seed=2)
    sequence = engine.sequence(prompt)
    engine.encode(sequence, 9)
    fresh = Engine(tmp_path / "b")
    source, target = fresh.model.weight_table(), engine.model.weight_table()
    for name, tensor in target.items():
        tensor.copy_(source[name])
    sequence = engine.sequence(prompt)
    engine.encode(sequence, 9)
    assert_equal_logits(engine.denoise(sequence, canvas), other.denoise(canvas, prompt))


def test_random_initialisation_is_complete_and_repeatable(tmp_path: Path) -> None:
    GemmaOracle().write(tmp_path)
    name, spec, _ = detect(tmp_path)
    first: Any = load_model(name, spec, tmp_path, torch.float32, "cpu").init_random(5)
    second = type(first)(spec, torch.float32, "cpu").init_random(5)
    table, other = first.weight_table(), second.weight_table()
    assert table.keys() == other.keys()
    for key, tensor in table.items():
        assert torch.equal(tensor, other[key]), key
    assert sum(tensor.numel() for key, tensor in table.items() if key != "lm_head.weight") == (
        spec.num_parameters
    )
    assert first.head.row_major() is first.embedding.weight
