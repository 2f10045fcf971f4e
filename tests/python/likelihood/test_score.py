# SPDX-License-Identifier: Apache-2.0
"""`Diffulex.score` against whole forwards of stock decoders, for every family that fills masks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from brute_force_score import BruteForce
from diffulex import ConfigError, Diffulex, PromptError, SamplingParams
from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.config.config import Config
from diffulex.config.types import ModelFacts
from diffulex.families.listing import FAMILIES
from diffulex.likelihood import forward
from diffulex.likelihood.forward import ScoreForward
from diffulex.likelihood.scorer import OneScore, native_grid
from fixtures.checkpoints import Tensors
from fixtures.decoder_oracle import DecoderOracle
from fixtures.families import DENSE_FAMILIES, SHIFTED, family_builder
from fixtures.gemma import GemmaOracle
from fixtures.moe_families import MOE_FAMILIES, moe_builder

BIDIRECTIONAL = ("llada", "dream", "diffucoder")
FILLING = (*DENSE_FAMILIES, *MOE_FAMILIES)
MASK_ID, VOCAB_SIZE = 259, 300
GRID = 4
RANDOM = np.random.default_rng(11)
SEQUENCES = [RANDOM.integers(0, 256, n).tolist() for n in (11, 14, 9, 5)]
RANGES = [(5, 11), (6, 13), (4, 8), (4, 5)]
#: No two of them share rows.
MANY = [[(token + k) % 256 for token in ids] for k in range(12) for ids in SEQUENCES]
#: Contexts of one length, two of them equal; continuations of one, of two and of several blocks.
CONTEXTS = [SEQUENCES[0][:6], SEQUENCES[1][:6], SEQUENCES[0][:6]]
CHOICES = [[7], [8], [7, 9, 1], [7, 9, 2, 3, 4, 5, 6], [7, 9, 2, 3, 4, 5, 6, 8, 8, 1]]


class Model:
    """A tiny checkpoint, its engine and its oracle."""

    def __init__(
        self,
        family: str,
        folder: Path,
        edit: Callable[[Tensors], None] | None = None,
        **settings: Any,
    ) -> None:
        self.family = family
        directory = folder / family
        make = moe_builder if family in MOE_FAMILIES else family_builder
        builder = make(family, edit=edit or _sharpen)
        tensors = builder.write(directory)
        self.oracle = DecoderOracle(family, builder.config, tensors)
        self.engine = Diffulex(
            str(directory), model_name=family, num_pages=64,
            **{"device": "cpu", "dtype": "float32", "max_model_len": 64, **settings},
        )  # fmt: skip

    def brute_force(
        self, grid: int | None = None, forbidden: Sequence[int] = (), **fields: Any
    ) -> BruteForce:
        if grid is None:
            grid = 0 if self.family in BIDIRECTIONAL else GRID
        padding = range(self.engine.config.model.tokenizer_vocab_size, VOCAB_SIZE)
        return BruteForce(
            self.oracle.logits, MASK_ID, grid, int(self.family in SHIFTED),
            forbidden=[*forbidden, *padding], **fields,
        )  # fmt: skip


def _sharpen(tensors: Tensors) -> None:
    for name in ("lm_head.weight", "model.transformer.ff_out.weight"):
        if name in tensors:
            tensors[name] *= 6


@contextlib.contextmanager
def model_of(family: str, folder: Path, **settings: Any) -> Iterator[Model]:
    model = Model(family, folder, **settings)
    with model.engine:
        yield model


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with model_of("llada", tmp_path_factory.mktemp("models")) as model:
        yield model


@pytest.fixture(scope="module")
def sdar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with model_of("sdar", tmp_path_factory.mktemp("models")) as model:
        yield model


@pytest.mark.every(3)
@pytest.mark.parametrize("family", FILLING)
def test_scores_are_those_of_the_rules(family: str, tmp_path: Path) -> None:
    """Sample by sample, with the same draws; and the flag of greedy decoding."""
    with model_of(family, tmp_path) as model:
        rule = model.brute_force()
        sequences, ranges = list(SEQUENCES), list(RANGES)
        greedy = rule.greedy(SEQUENCES[0][:6], 5)
        sequences.append(greedy)
        ranges.append((6, len(greedy)))
        grid = None if family in BIDIRECTIONAL else GRID
        options = {"mc_num": 6, "batch_size": 4, "seed": 3}
        scores = model.engine.score(sequences, ranges, grid, check_greedy=True, **options)
        expected = [
            rule.sampled(ids, *span, mc_num=6, batch=4, seed=3, place=place)
            for place, (ids, span) in enumerate(zip(sequences, ranges, strict=True))
        ]
        assert np.asarray(scores).dtype == np.float32
        np.testing.assert_allclose(scores.values, expected, rtol=2e-4, atol=2e-4)
        flags = [rule.is_greedy(ids, *span) for ids, span in zip(sequences, ranges, strict=True)]
        assert list(scores.is_greedy) == flags
        assert flags == [False, False, False, False, True]
        assert scores.forward_passes > 0
        assert scores.seconds > 0


@pytest.fixture
def exact_products() -> Iterator[None]:
    """The tolerance of float32 cannot hold with TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.cuda
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("family", FILLING)
def test_a_gpu_scores_as_the_cpu(family: str, tmp_path: Path) -> None:
    """With the tolerance of the CPU against the rules."""
    pairs = [(context, choice) for context in CONTEXTS for choice in CHOICES]
    sequences = [*SEQUENCES, *(context + choice for context, choice in pairs)]
    ranges = [*RANGES, *((len(c), len(c) + len(choice)) for c, choice in pairs)]
    grid = None if family in BIDIRECTIONAL else GRID
    found = []
    for device in ("cpu", "cuda"):
        with model_of(family, tmp_path / device, device=device, enforce_eager=True) as model:
            found.append(
                model.engine.score(sequences, ranges, grid, mc_num=6, check_greedy=True, seed=3)
            )
    here, there = found
    np.testing.assert_allclose(there.values, here.values, rtol=2e-4, atol=2e-4)
    assert there.is_greedy == here.is_greedy


@pytest.mark.cuda
@pytest.mark.parametrize("guidance", [0.0, 0.5])
def test_logits_on_a_gpu_take_the_stated_bytes(
    guidance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most four times: float32 logits, those of the head, and what their sums take meanwhile."""
    stated, peaks, needs = 256 << 10, [], []
    answers = ScoreForward._answers

    def measured(self: ScoreForward, group: Any, batch: Any, hidden: torch.Tensor) -> Any:
        num_queries = sum(len(rows.queries) for rows in group.rows)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = answers(self, group, batch, hidden)
        torch.cuda.synchronize()
        # Rows, tokens and answers of the queries themselves.
        peaks.append(torch.cuda.max_memory_allocated() - before - 96 * num_queries)
        needs.append(num_queries * VOCAB_SIZE * 4 * (2 if guidance else 1))
        return result

    options = {"mc_num": 32, "guidance": guidance}
    settings = {"device": "cuda", "enforce_eager": True, "max_num_batched_tokens": 8192}
    with model_of("llada", tmp_path, **settings) as model:
        whole = model.engine.score(MANY, RANGES * 12, **options)  # workspaces of libraries as well
        monkeypatch.setattr(ScoreForward, "_answers", measured)
        monkeypatch.setattr(forward, "_LOGITS_BYTES", stated)
        pieces = model.engine.score(MANY, RANGES * 12, **options)
    np.testing.assert_allclose(pieces.values, whole.values, rtol=2e-5, atol=1e-5)
    assert max(needs) > 5 * stated
    assert max(peaks) <= 4 * stated


def _prefer_masks(tensors: Tensors) -> None:
    _sharpen(tensors)
    tensors["lm_head.weight"][MASK_ID] *= 10


@pytest.mark.parametrize(
    ("settings", "preferred"),
    [
        ({}, []),
        ({"suppress_token_ids": [3, 4]}, [3, 4]),
        ({"tokenizer_vocab_size": 200}, [210, 219]),
        ({"mask_suppression": "renormalize"}, []),
    ],
)
def test_greedy_decoding_never_takes_what_samplers_never_take(
    settings: dict[str, Any], preferred: list[int], tmp_path: Path
) -> None:
    """The mask would be the likeliest token, then those that are forbidden as well."""

    def prefer(tensors: Tensors) -> None:
        _sharpen(tensors)
        head = tensors["lm_head.weight"]
        likely = head[219].clone()
        for place, token in enumerate([*preferred, MASK_ID], 5):
            head[token] = likely * place

    prompt = SEQUENCES[0][:6]
    with model_of("sdar", tmp_path, edit=prefer, **settings) as model:
        best = model.brute_force().rows([*prompt, *[MASK_ID] * 6], 6)[6:].argmax(-1)
        assert set(best.tolist()) == {MASK_ID}
        rule = model.brute_force(
            forbidden=preferred, is_renormalized="mask_suppression" in settings
        )
        greedy = rule.greedy(prompt, 6)
        scores = model.engine.score([greedy], [(6, 12)], check_greedy=True, mc_num=1)
        assert scores.is_greedy == (True,)


def test_families_know_how_they_see() -> None:
    seen = {family.name for family in FAMILIES if family.is_bidirectional}
    assert seen == set(BIDIRECTIONAL)


@pytest.mark.parametrize(("family", "grid"), [("llada", 0), ("sdar", 4), ("fast_dllm_v2", 32)])
@pytest.mark.parametrize("block_size", [None, 8])
def test_the_grid_is_what_the_model_was_trained_with(
    family: str, grid: int, block_size: int | None, tmp_path: Path
) -> None:
    """Not the blocks in which the engine decodes."""
    settings = {} if block_size is None else {"block_size": block_size}
    with model_of(family, tmp_path, **settings) as model:
        assert block_size in (None, model.engine.config.decoding.block_size)
        native = model.engine.score(SEQUENCES, RANGES, mc_num=4)
        assert native.block_grid == grid
        rule = model.brute_force(grid)
        expected = [
            rule.sampled(ids, *span, mc_num=4, batch=4, seed=0, place=place)
            for place, (ids, span) in enumerate(zip(SEQUENCES, RANGES, strict=True))
        ]
        np.testing.assert_allclose(native.values, expected, rtol=2e-4, atol=2e-4)
        other = model.engine.score(SEQUENCES, RANGES, 2, mc_num=4)
        assert other.block_grid == 2
        assert not np.allclose(native.values, other.values, atol=1e-3)


def test_a_checkpoint_that_does_not_say_its_blocks_is_pointed_out(
    sdar: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("diffulex.log._warned", set())
    config = sdar.engine.config
    spec = dataclasses.replace(config.model.spec, block_size=None)
    silent = dataclasses.replace(config, model=dataclasses.replace(config.model, spec=spec))
    assert native_grid(silent) == config.att_block_size
    assert "does not say its block size; blocks of 4" in caplog.text


def test_one_token_is_exact(llada: Model) -> None:
    ids = SEQUENCES[0]
    score = llada.engine.score([ids], [(7, 8)])
    seen = [*ids[:7], MASK_ID, *ids[8:]]
    logits = llada.oracle.logits(seen, torch.ones(len(ids), len(ids), dtype=torch.bool))
    assert score[0] == pytest.approx(float(torch.log_softmax(logits[7], -1)[ids[7]]), abs=1e-4)
    assert score.forward_passes == 1


def test_mean_of_4096_samples_is_the_exhaustive_value(llada: Model) -> None:
    """Four tokens, within three standard errors of the mean over every choice of masks."""
    ids, span = SEQUENCES[0][:8], (4, 8)
    exact = llada.brute_force().exhaustive(ids, *span)
    # Requests differ by their place: 16 of 256 samples each.
    scores = llada.engine.score([ids] * 16, [span] * 16, mc_num=256, batch_size=1)
    error = np.std(scores.values, ddof=1) / math.sqrt(16)
    assert 0 < error < 0.1 * abs(exact)
    assert abs(float(np.mean(scores.values)) - exact) < 3 * error


def test_blocks_add_up(sdar: Model) -> None:
    """Two blocks: that of the first one, and that of the second behind the clean first one."""
    ids = SEQUENCES[1][:12]
    whole = sdar.engine.score([ids], [(4, 12)], GRID, mc_num=512)
    first = sdar.engine.score([ids[:8]], [(4, 8)], GRID, mc_num=512)
    assert whole[0] < first[0]
    rule = sdar.brute_force()
    exact = rule.exhaustive(ids, 4, 12)
    assert exact == pytest.approx(
        rule.exhaustive(ids[:8], 4, 8) + rule.exhaustive(ids, 8, 12), abs=1e-6
    )
    assert whole[0] == pytest.approx(exact, rel=0.05)


def test_guidance_moves_away_from_no_prompt(llada: Model) -> None:
    plain = llada.engine.score(SEQUENCES, RANGES, mc_num=4, seed=1)
    scores = llada.engine.score(SEQUENCES, RANGES, mc_num=4, seed=1, guidance=0.5)
    rule = llada.brute_force(guidance=0.5)
    expected = [
        rule.sampled(ids, *span, mc_num=4, batch=4, seed=1, place=place)
        for place, (ids, span) in enumerate(zip(SEQUENCES, RANGES, strict=True))
    ]
    np.testing.assert_allclose(scores.values, expected, rtol=2e-4, atol=2e-4)
    assert not np.allclose(scores.values, plain.values, atol=1e-2)


@pytest.mark.parametrize("name", ["llada", "sdar"])
def test_the_seed_fixes_the_scores(name: str, request: pytest.FixtureRequest) -> None:
    engine = request.getfixturevalue(name).engine
    once = engine.score(SEQUENCES, RANGES, mc_num=4, seed=9)
    again = engine.score(SEQUENCES, RANGES, mc_num=4, seed=9)
    assert once.values.tolist() == again.values.tolist()
    other = engine.score(SEQUENCES, RANGES, mc_num=4, seed=10)
    assert once[0] != other[0]


@pytest.mark.parametrize("name", ["llada", "sdar"])
def test_small_budgets_take_more_forwards_and_give_the_same(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    work = MANY, RANGES * 12
    large = request.getfixturevalue(name).engine.score(*work, mc_num=8)
    with model_of(name, tmp_path, max_num_batched_tokens=128) as model:
        progress: list[int] = []
        small = model.engine.score(*work, mc_num=8, on_progress=progress.append)
        np.testing.assert_allclose(small.values, large.values, rtol=1e-4)
        assert small.forward_passes > large.forward_passes
        assert progress[-1] == len(work[0])
        assert progress == sorted(progress)
        assert len(progress) > 1


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("family", "guidance"),
    [("llada", 0.0), ("llada", 0.5), ("dream", 0.0), ("sdar", 0.0), ("fast_dllm_v2", 0.0)],
)
def test_requests_that_share_forwards_score_as_they_do_alone(
    family: str, guidance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within float32: other sequences of a forward may change the order of sums in a product."""
    grid = 0 if family in BIDIRECTIONAL else GRID
    pairs = [(context, choice) for context in CONTEXTS for choice in CHOICES]
    sequences = [context + choice for context, choice in pairs]
    ranges = [(len(context), len(context) + len(choice)) for context, choice in pairs]
    ids = [3 * place + 5 for place in range(len(pairs))]
    options = {"mc_num": 4, "guidance": guidance, "check_greedy": True}
    sizes: list[tuple[int, int]] = []
    run = ScoreForward.run

    def counted(self: ScoreForward, batch: Any) -> Any:
        if not batch.wants_best:
            rows = [len(item.token_ids) for item in batch.rows]
            sizes.append((sum(rows), sum(item.is_stored for item in batch.rows)))
        return run(self, batch)

    monkeypatch.setattr(ScoreForward, "run", counted)
    with model_of(family, tmp_path) as model:
        together = model.engine.score(sequences, ranges, grid, request_ids=ids, **options)
        ((shared, num_stored),) = sizes
        sizes.clear()
        order = list(reversed(range(len(pairs))))
        alone = [
            model.engine.score(
                [sequences[place]], [ranges[place]], grid, request_ids=[ids[place]], **options
            )
            for place in order
        ]
    np.testing.assert_allclose(together.values[order], [s[0] for s in alone], rtol=2e-5, atol=1e-5)
    assert together.is_greedy is not None
    assert [together.is_greedy[place] for place in order] == [s.is_greedy[0] for s in alone]
    assert len(alone) == len(sizes) == len(pairs)
    assert shared < (0.8 if grid else 0.95) * sum(num_tokens for num_tokens, _ in sizes)
    # Of each of the two contexts one copy; the longest choices go on in other blocks.
    assert num_stored == (2 if grid else 0)
    assert together.forward_passes < sum(scores.forward_passes for scores in alone)


def test_one_row_answers_for_all_choices_of_one_token(llada: Model) -> None:
    sequences = [[*SEQUENCES[0][:7], token] for token in range(40)]
    scores = llada.engine.score(sequences, [(7, 8)] * 40)
    assert scores.forward_passes == 1
    seen = [*SEQUENCES[0][:7], MASK_ID]
    logits = llada.oracle.logits(seen, torch.ones(8, 8, dtype=torch.bool))
    expected = torch.log_softmax(logits[7], -1)[:40]
    np.testing.assert_allclose(scores.values, expected, rtol=1e-4)


def test_ids_of_requests_fix_their_draws(sdar: Model) -> None:
    engine, ids = sdar.engine, [9, 2**63 - 1, 9, 0]
    scores = engine.score(SEQUENCES, RANGES, mc_num=4, request_ids=ids)
    places = engine.score(SEQUENCES, RANGES, mc_num=4)
    # One token: nothing is drawn.
    assert scores[3] == pytest.approx(places[3], rel=2e-5, abs=1e-5)
    assert scores[0] != places[0]
    alone = engine.score(SEQUENCES[1:2], RANGES[1:2], mc_num=4, request_ids=ids[1:2])
    assert scores[1] == pytest.approx(alone[0], rel=2e-5, abs=1e-5)
    for wrong in ([1, 2, 3, -1], [1, 2, 3, 2**63], [1, 2, 3, "4"], [1, 2, 3, True]):
        with pytest.raises(ValueError, match=r"expected request_ids in \[0, 2\*\*63\), got"):
            engine.score(SEQUENCES, RANGES, request_ids=wrong)
    with pytest.raises(ValueError, match="one of request_ids per sequence, got 4 sequences and 1"):
        engine.score(SEQUENCES, RANGES, request_ids=[1])


@pytest.mark.parametrize("check_greedy", [False, True])
def test_what_is_done_is_told_at_once(check_greedy: bool, tmp_path: Path) -> None:
    """So that Ctrl-C loses the current batch alone."""
    work = MANY, RANGES * 12
    done: dict[int, tuple[float, bool]] = {}

    def stop(score: OneScore) -> None:
        done[score.place] = score.value, score.is_greedy
        assert score.forward_passes > 0
        if len(done) == 33:
            raise KeyboardInterrupt

    options = {"mc_num": 8, "check_greedy": check_greedy}
    with model_of("sdar", tmp_path, max_num_batched_tokens=128) as model:
        with pytest.raises(KeyboardInterrupt):
            model.engine.score(*work, on_scored=stop, **options)
        assert len(done) == 33
        whole = model.engine.score(*work, **options)
        flags = whole.is_greedy or (False,) * len(whole)
        assert done == {place: (float(whole[place]), flags[place]) for place in done}


@pytest.mark.parametrize("guidance", [0.0, 0.5])
def test_logits_are_made_in_pieces_of_bounded_size(
    llada: Model, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"mc_num": 4, "guidance": guidance}
    whole = llada.engine.score(SEQUENCES, RANGES, **options)
    sizes: list[int] = []
    logits = ScoreForward._logits

    def spy(self: ScoreForward, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return logits(self, hidden, rows)

    monkeypatch.setattr(ScoreForward, "_logits", spy)
    monkeypatch.setattr(forward, "_LOGITS_BYTES", 6 * VOCAB_SIZE * 4)
    pieces = llada.engine.score(SEQUENCES, RANGES, **options)
    assert max(sizes) == (3 if guidance else 6)
    np.testing.assert_allclose(pieces.values, whole.values, rtol=2e-5, atol=1e-5)
    monkeypatch.setattr(forward, "_LOGITS_BYTES", 1)
    sizes.clear()
    llada.engine.score(SEQUENCES, RANGES, **options)
    assert set(sizes) == {1}


def test_guidance_needs_room_for_both_kinds_of_rows(tmp_path: Path) -> None:
    with model_of("llada", tmp_path, max_model_len=96, max_num_batched_tokens=128) as model:
        ids = [1] * 65
        assert model.engine.score([ids[:64]], [(63, 64)], guidance=1)[0] < 0
        assert model.engine.score([ids], [(64, 65)])[0] < 0
        with pytest.raises(PromptError, match=r"at most 64 tokens with guidance .* got 65"):
            model.engine.score([ids], [(64, 65)], guidance=1)


def test_bfloat16(sdar: Model, tmp_path: Path) -> None:
    exact = sdar.engine.score(SEQUENCES, RANGES, mc_num=8)
    with model_of("sdar", tmp_path, dtype="bfloat16") as model:
        rounded = model.engine.score(SEQUENCES, RANGES, mc_num=8, check_greedy=True)
    assert rounded.values.dtype == np.float32
    assert rounded.is_greedy is not None
    np.testing.assert_allclose(rounded.values, exact.values, rtol=0.05)
    assert rounded.values.tolist() != exact.values.tolist()


def test_scoring_leaves_running_requests_alone(sdar: Model) -> None:
    engine, params = sdar.engine, SamplingParams(max_tokens=16, ignore_eos=True)
    expected = engine.generate([SEQUENCES[1]], params, summary=False)[0].token_ids
    before = engine.stats().num_free_pages
    req_id = engine.add_request(SEQUENCES[1], params)
    output = None
    while engine.has_unfinished():
        for step in engine.step():
            output = step.output or output
        engine.score(SEQUENCES, RANGES, mc_num=2)
    assert output is not None
    assert output.req_id == req_id
    assert output.token_ids == expected
    assert engine.stats().num_free_pages == before


def test_what_cannot_be_scored_is_refused(sdar: Model) -> None:
    engine, ids = sdar.engine, SEQUENCES[0]
    for sequence, span, message in (
        ([], (0, 0), r"sequence 0: expected 1 to 64 tokens, got 0"),
        ([1] * 65, (0, 1), r"sequence 0: expected 1 to 64 tokens, got 65"),
        ([1, 300], (0, 1), r"expected ids in \[0, 300\), got 300"),
        ([1, 2.5], (0, 1), r"expected ids in \[0, 300\), got 2.5"),
        (ids, (3, 12), r"expected a range in \[0, 11\], got \[3, 12\)"),
        (ids, (4, 3), r"expected a range in \[0, 11\], got \[4, 3\)"),
        (ids, (1,), r"sequence 0: expected a range of two integers, got \(1,\)"),
        (ids, (1.0, 3.0), r"sequence 0: expected a range of two integers, got \(1.0, 3.0\)"),
        (ids, 3, "sequence 0: expected a range of two integers, got 3"),
        ([1, MASK_ID], (0, 2), "expected no mask id 259 in its range, got one"),
    ):
        with pytest.raises(PromptError, match=message):
            engine.score([sequence], [span])
    with pytest.raises(PromptError, match="expected one range per sequence, got 1 sequences and 0"):
        engine.score([ids], [])
    for grid in (-1, True, 2.0):
        with pytest.raises(ValueError, match="expected block_grid of at least 0 or None"):
            engine.score([ids], [(3, 5)], grid)
    with pytest.raises(ValueError, match="expected guidance 0 with a block grid, got 1"):
        engine.score([ids], [(3, 5)], guidance=1)
    with pytest.raises(TypeError, match="samples"):
        engine.score([ids], [(3, 5)], samples=3)
    assert engine.score([], []).values.tolist() == []
    assert engine.score([ids], [(3, 3)]).values.tolist() == [0.0]


def test_shifted_rows_need_a_token_before_the_range(tmp_path: Path) -> None:
    with model_of("dream", tmp_path) as model:
        with pytest.raises(PromptError, match="expected a token before the range"):
            model.engine.score([SEQUENCES[0]], [(0, 2)])
        assert model.engine.score([SEQUENCES[0]], [(1, 2)])[0] < 0


def test_a_canvas_has_no_estimate(tmp_path: Path) -> None:
    GemmaOracle().write(tmp_path)
    name, spec, info = detect(tmp_path)
    facts = ModelFacts(name, tmp_path, spec, info.engine_defaults)
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "num_pages": 16}
    config = Config.resolve(str(tmp_path), facts, {**settings, "page_size": 8})
    model = load_model(name, spec, tmp_path, torch.float32, "cpu")
    with (
        Diffulex.from_components(config, model, None) as engine,
        pytest.raises(
            ConfigError, match=r"a canvas \(diffusion_gemma\), for which there is no such"
        ),
    ):
        engine.score([SEQUENCES[0]], [(3, 5)])
