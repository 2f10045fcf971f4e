# SPDX-License-Identifier: Apache-2.0
"""The documented runtime classes: views and adapters."""

from __future__ import annotations

import pytest
import torch

from diffulex import ConfigError, Diffulex, PromptError
from diffulex.checkpoint.auto_model import detect
from diffulex.engine.output import BlockSnapshot, DenoiseSnapshot
from diffulex_edge.backends import BACKENDS
from diffulex_edge.exporter import load_decoder
from diffulex_edge.runtime import (
    SAMPLER_REGISTRY,
    BlockStatus,
    DiffusionBlock,
    DiffusionBlockManager,
    DiffusionEngine,
    DiffusionGenerationConfig,
    DreamSampler,
    FastDLLMV2Sampler,
    FastdLLMV2Sampler,
    GenerationConfig,
    InferenceEngine,
    LLaDASampler,
    NoShiftLogitsSampler,
    SDARSampler,
    ShiftLogitsSampler,
    get_sampler_class,
    sample_tokens,
    top_k_logits,
    top_p_logits,
)
from fixtures.edge import DEMO, HOST, questions
from fixtures.extras import need_extra

need_extra("edge", "executorch", "torchao")

MASK = 9
LOWEST = torch.finfo(torch.float32).min


def block(**fields) -> DiffusionBlock:
    return DiffusionBlock(**{"start_pos": 8, "length": 4, "mask_token_id": MASK, **fields})


class TestBlock:
    def test_begins_masked(self):
        item = block()
        assert item.tokens == [MASK] * 4
        assert item.local_mask_token_ids == [0, 1, 2, 3]
        assert item.global_mask_token_ids == [8, 9, 10, 11]
        assert item.status is BlockStatus.PENDING
        assert item.accept_threshold == 0.95

    def test_life(self):
        item = block()
        item.activate()
        assert item.is_active
        for place in range(4):
            assert not item.is_complete
            item.accept_token(place, place)
        assert item.status is BlockStatus.COMPLETE
        item.confirm()
        assert item.status is BlockStatus.CONFIRMED
        assert item.accepted_token_ids == item.get_sequence_tokens() == [0, 1, 2, 3]

    def test_prompt_tail_is_not_open(self):
        item = block(tokens=[1, 2, MASK, MASK], editable_start=2)
        assert item.local_mask_token_ids == [2, 3]
        item.activate()
        item.accept_token(3, 5)
        assert item.accepted_token_ids == [5]

    @pytest.mark.parametrize("fields", [{"length": 0}, {"start_pos": -1}, {"tokens": [1]}])
    def test_malformed(self, fields):
        with pytest.raises(ValueError, match="expected"):
            block(**fields)

    @pytest.mark.parametrize(
        ("place", "token", "error"),
        [(4, 1, IndexError), (-1, 1, IndexError), (0, MASK, ValueError), (1, 1, ValueError)],
    )
    def test_accept_refuses(self, place, token, error):
        item = block(tokens=[MASK, 3, MASK, MASK])
        item.activate()
        with pytest.raises(error, match="accept_token: expected"):
            item.accept_token(place, token)

    def test_pending_blocks_take_nothing(self):
        with pytest.raises(ValueError, match="active block, got pending"):
            block().accept_token(0, 1)

    def test_activate_twice(self):
        item = block()
        item.activate()
        with pytest.raises(ValueError, match="pending block, got active"):
            item.activate()

    def test_confirm_with_masks(self):
        with pytest.raises(ValueError, match="complete block, got 4 masks"):
            block().confirm()

    def test_complete_blocks_take_nothing(self):
        item = block(tokens=[1, 2, 3, MASK], editable_start=3)
        item.activate()
        item.accept_token(3, 4)
        with pytest.raises(ValueError, match="active block, got complete"):
            item.accept_token(3, 5)
        assert item.tokens == [1, 2, 3, 4]

    def test_a_mask_of_the_prompt_is_not_open(self):
        item = block(tokens=[1, MASK, MASK, MASK], editable_start=2)
        item.activate()
        assert item.local_mask_token_ids == [2, 3]
        with pytest.raises(ValueError, match="open position, got 1"):
            item.accept_token(1, 5)

    def test_a_block_without_masks_is_complete_as_soon_as_it_is_active(self):
        item = block(tokens=[1, 2, 3, 4])
        item.activate()
        assert item.status is BlockStatus.COMPLETE
        assert not item.is_active


class TestManager:
    @pytest.fixture
    def manager(self):
        manager = DiffusionBlockManager(MASK)
        manager.create_blocks([1, 2, 3, 4, 5], 7, 4)
        return manager

    def test_blocks_lie_on_the_absolute_grid(self, manager):
        assert [item.start_pos for item in map(manager.get_block, range(2))] == [4, 8]
        assert len(manager) == 2
        assert manager.get_block(0).tokens == [5, MASK, MASK, MASK]
        assert manager.get_block(0).editable_start == 1

    def test_first_block_is_active(self, manager):
        assert manager.has_active_blocks
        assert manager.get_active_block() is manager.get_block(0)
        assert manager.get_block(0).pre_block_complete
        assert not manager.get_block(1).pre_block_complete

    def test_mask_positions(self, manager):
        assert manager.get_all_mask_positions() == [5, 6, 7, 8, 9, 10, 11]

    def test_confirm_opens_the_next(self, manager):
        manager.update_block(0, [1, 2, 3], [6, 7, 8])
        assert manager.confirm_current_block()
        assert manager.get_active_block() is manager.get_block(1)
        assert manager.get_block(1).pre_block_complete
        manager.update_block(1, range(4), [1, 1, 1, 1])
        assert not manager.confirm_current_block()
        assert not manager.has_active_blocks

    def test_confirm_needs_a_complete_block(self, manager):
        with pytest.raises(ValueError, match="got 3 masks"):
            manager.confirm_current_block()

    def test_sequence_repeats_no_prompt(self, manager):
        manager.update_block(0, [1, 2, 3], [6, 7, 8])
        assert manager.build_sequence([1, 2, 3, 4, 5]) == [1, 2, 3, 4, 5, 6, 7, 8] + [MASK] * 4

    def test_unknown_block(self, manager):
        with pytest.raises(IndexError, match=r"\[0, 2\), got 2"):
            manager.get_block(2)

    def test_reset(self, manager):
        manager.reset()
        assert len(manager) == 0
        assert manager.get_active_block() is None

    def test_a_prompt_of_whole_blocks_leaves_the_first_one_open(self):
        manager = DiffusionBlockManager(MASK)
        manager.create_blocks([1, 2, 3, 4], 4, 4)
        assert len(manager) == 1
        assert manager.get_block(0).start_pos == 4
        assert manager.get_block(0).tokens == [MASK] * 4

    @pytest.mark.parametrize("size", [0, -4])
    def test_blocks_have_tokens(self, size):
        with pytest.raises(ValueError, match=f"block_size: expected >= 1, got {size}"):
            DiffusionBlockManager(MASK).create_blocks([1], 4, size)

    def test_more_blocks_are_appended_and_wait(self, manager):
        numbers = manager.create_blocks(range(12), 4, 4)
        assert numbers == [2]
        assert manager.get_block(2).status is BlockStatus.PENDING
        assert manager.get_active_blocks() == [manager.get_block(0)]

    def test_a_token_for_every_position_or_none(self, manager):
        with pytest.raises(ValueError, match="tokens: expected 2, got 1"):
            manager.update_block(0, [1, 2], [6])
        assert manager.get_block(0).tokens == [5, MASK, MASK, MASK]

    def test_follows_the_blocks_of_a_snapshot(self):
        def seen(*blocks):
            items = [
                BlockSnapshot(number, start, status, tokens, (), (0.0,) * len(tokens))
                for number, (start, status, tokens) in enumerate(blocks)
            ]
            return DenoiseSnapshot(0, MASK, 5, (), tuple(items))

        manager = DiffusionBlockManager(MASK)
        manager.follow(seen((4, "ACTIVE", (7, MASK, 6, MASK)), (8, "DUMMY", (MASK,) * 4)))
        first, second = map(manager.get_block, range(2))
        assert (first.status, second.status) == (BlockStatus.ACTIVE, BlockStatus.PENDING)
        assert (first.editable_start, second.editable_start) == (1, 0)
        assert (first.pre_block_complete, second.pre_block_complete) == (True, False)
        manager.follow(seen((4, "TO_CACHE", (7, 5, 6, 4)), (8, "ACTIVE", (MASK,) * 4)))
        assert (first.status, second.status) == (BlockStatus.COMPLETE, BlockStatus.ACTIVE)
        assert second.pre_block_complete
        manager.follow(seen((8, "ACTIVE", (3, MASK, MASK, MASK))))
        assert first.status is BlockStatus.CONFIRMED
        assert len(manager) == 2
        assert manager.build_sequence([0, 0, 0, 0, 7]) == [0, 0, 0, 0, 7, 5, 6, 4, 3] + [MASK] * 3


class TestFilters:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 5.0, -1.0]])

    @pytest.mark.parametrize("p", [None, 1.0, 2.0])
    def test_top_p_off(self, p):
        result = top_p_logits(self.logits, p)
        torch.testing.assert_close(result, self.logits)
        assert result is not self.logits

    def test_top_p_keeps_the_crossing_entry(self):
        kept = top_p_logits(self.logits, 0.7) > LOWEST
        assert kept.tolist() == [[True, True, False, False], [False, False, True, False]]

    def test_top_p_keeps_one(self):
        assert (top_p_logits(self.logits, 0.0) > LOWEST).sum(-1).tolist() == [1, 1]

    def test_inputs_stay(self):
        before = self.logits.clone()
        top_p_logits(self.logits, 0.1)
        top_k_logits(self.logits, 1)
        assert torch.equal(self.logits, before)

    @pytest.mark.parametrize("k", [None, 0, -1, 4, 99])
    def test_top_k_off(self, k):
        torch.testing.assert_close(top_k_logits(self.logits, k), self.logits)

    def test_top_k(self):
        assert (top_k_logits(self.logits, 2) > LOWEST).sum(-1).tolist() == [2, 3]  # a tie

    def test_top_k_of_one(self):
        assert top_k_logits(self.logits, 1).argmax(-1).tolist() == [0, 2]

    def test_shapes(self):
        assert top_k_logits(self.logits.view(1, 2, 4), 1).shape == (1, 2, 4)


class TestSampleTokens:
    logits = TestFilters.logits

    def test_greedy(self):
        confidence, tokens, probability = sample_tokens(self.logits)
        expected = self.logits.softmax(-1).amax(-1)
        assert tokens.tolist() == [0, 2]
        torch.testing.assert_close(confidence, expected)
        torch.testing.assert_close(probability, expected)

    def test_lowest_id_among_equals(self):
        assert sample_tokens(torch.zeros(1, 5))[1].tolist() == [0]

    def test_margin(self):
        confidence, _, probability = sample_tokens(self.logits, margin_confidence=True)
        top = self.logits.softmax(-1).topk(2).values
        torch.testing.assert_close(confidence, top[:, 0] - top[:, 1])
        torch.testing.assert_close(probability, top[:, 0])

    def test_neg_entropy_is_negative(self):
        confidence, _, _ = sample_tokens(self.logits, neg_entropy=True)
        probs = self.logits.softmax(-1)
        torch.testing.assert_close(confidence, (probs * probs.log()).sum(-1))
        assert (confidence < 0).all()

    def test_temperature_draws_with_its_generator(self):
        def draw(seed):
            generator = torch.Generator().manual_seed(seed)
            return sample_tokens(torch.zeros(64, 8), 1.0, generator=generator)[1].tolist()

        assert draw(1) == draw(1) != draw(2)

    def test_filters_bound_the_draws(self):
        logits = self.logits[:1].expand(64, 4)
        assert set(sample_tokens(logits, 2.0, top_k=2)[1].tolist()) == {0, 1}
        assert set(sample_tokens(logits, 1.0, top_p=0.5)[1].tolist()) == {0}

    def test_negative_temperature(self):
        with pytest.raises(ValueError, match="temperature: expected >= 0, got -1"):
            sample_tokens(self.logits, -1)


class TestShift:
    logits = torch.arange(12.0).view(3, 4)

    def test_no_shift(self):
        assert NoShiftLogitsSampler().shift(self.logits) is self.logits

    def test_shift_takes_the_last_row_of_what_came_before(self):
        last = torch.full((4,), -1.0)
        shifted = ShiftLogitsSampler().shift(self.logits, last)
        torch.testing.assert_close(shifted, torch.cat((last[None], self.logits[:-1])))

    def test_no_shift_has_no_use_for_what_came_before(self):
        last = torch.full((4,), -1.0)
        assert torch.equal(NoShiftLogitsSampler().shift(self.logits, last), self.logits)

    def test_shift_leaves_its_input(self):
        before = self.logits.clone()
        ShiftLogitsSampler().shift(self.logits, self.logits[2])
        assert torch.equal(self.logits, before)

    def test_shift_without_it_never_takes_its_own_last_row(self):
        shifted = ShiftLogitsSampler().shift(self.logits)
        torch.testing.assert_close(shifted[0], self.logits[0])
        assert not torch.equal(shifted[0], self.logits[-1])

    def test_last_logits(self):
        assert torch.equal(ShiftLogitsSampler().fetch_last_logits(self.logits), self.logits[-1])


class TestSamplers:
    @staticmethod
    def rows(*peaks: float) -> torch.Tensor:
        """Row i prefers token i with the given logit."""
        logits = torch.zeros(len(peaks), 10)
        for row, peak in enumerate(peaks):
            logits[row, row] = peak
        return logits

    @staticmethod
    def active(length: int = 3, threshold: float = 0.9):
        item = DiffusionBlock(0, length, MASK, accept_threshold=threshold)
        item.activate()
        return item

    @pytest.mark.parametrize("kind", [LLaDASampler, SDARSampler])
    def test_accepts_what_passes(self, kind):
        output = kind()(self.active(), self.rows(9.0, 0.5, 9.0))
        assert output.accepted == (0, 2)
        assert output.tokens == (0, 1, 2)

    @pytest.mark.parametrize("kind", [LLaDASampler, SDARSampler])
    def test_accepts_the_best_where_none_passes(self, kind):
        assert kind()(self.active(), self.rows(0.5, 2.0, 1.0)).accepted == (1,)

    @pytest.mark.parametrize("kind", [DreamSampler, FastdLLMV2Sampler])
    def test_shifted_families_read_the_row_before(self, kind):
        rows, last = self.rows(9.0, 9.0, 9.0), self.rows(0, 0, 0, 9.0)[3]
        assert kind()(self.active(), rows, last).tokens == (3, 0, 1)

    def test_threshold_is_of_the_block(self):
        rows = self.rows(3.0, 4.0, 3.5)
        strict = LLaDASampler()(self.active(threshold=0.99), rows)
        loose = LLaDASampler()(self.active(threshold=0.1), rows)
        assert strict.accepted == (1,)
        assert loose.accepted == (0, 1, 2)

    def test_ranks_by_the_confidence_and_passes_by_probability(self):
        """Margin decides who is forced, not what counts as confident."""
        rows = torch.zeros(2, 10)
        rows[0, :2] = torch.tensor([3.0, 2.9])
        rows[1, 0] = 2.4
        item = self.active(2, threshold=0.99)
        assert LLaDASampler()(item, rows).accepted == (1,)
        assert LLaDASampler()(item, rows, margin_confidence=True).accepted == (1,)

    def test_decided_positions_stay(self):
        item = self.active()
        item.accept_token(0, 7)
        assert 0 not in LLaDASampler()(item, self.rows(9.0, 9.0, 9.0)).accepted

    def test_mask_is_never_written(self):
        logits = torch.zeros(1, 10)
        logits[0, MASK] = 9.0
        assert LLaDASampler()(self.active(1), logits).accepted == ()

    def test_registry(self):
        assert set(SAMPLER_REGISTRY) == {"fast_dllm_v2", "dream", "llada", "sdar"}
        assert get_sampler_class("dream") is DreamSampler
        assert FastDLLMV2Sampler is FastdLLMV2Sampler

    def test_sdar_is_not_shifted(self):
        assert not issubclass(SDARSampler, ShiftLogitsSampler)

    def test_registry_gives_every_family_its_own_class(self):
        assert len(set(SAMPLER_REGISTRY.values())) == len(SAMPLER_REGISTRY)
        assert all(get_sampler_class(name) is kind for name, kind in SAMPLER_REGISTRY.items())

    def test_unknown_family(self):
        with pytest.raises(ValueError, match="expected one of dream, fast_dllm_v2, llada, sdar"):
            get_sampler_class("gpt")


class TestEngine:
    @pytest.fixture(scope="class")
    def engine(self, bundle):
        with DiffusionEngine.from_pte(bundle("demo")) as engine:
            yield engine

    @pytest.fixture(scope="class")
    def prompt(self, engine):
        question = {"role": "user", "content": questions(DEMO, 1)[0]}
        return engine.engine.tokenizer.apply_chat_template([question])

    @pytest.fixture(scope="class")
    def expected(self, prompt):
        with Diffulex(str(DEMO), **HOST) as engine:
            (output,) = engine.generate([prompt], max_tokens=96, summary=False)
        return output

    def test_names(self):
        assert InferenceEngine is DiffusionEngine
        assert GenerationConfig is DiffusionGenerationConfig

    def test_generates_as_the_engine(self, engine, prompt, expected):
        result = engine.generate(prompt, DiffusionGenerationConfig(max_new_tokens=96))
        assert result.token_ids == expected.token_ids
        assert result.sequence == (*prompt, *expected.token_ids)
        assert result.text == expected.text
        assert result.finish_reason == "stop"
        assert result.nfe == result.stats.nfe == expected.metrics.nfe
        assert result.stats.completion_tokens == len(result.token_ids)

    def test_an_end_of_sequence_id_is_a_stop_id(self, engine, prompt, expected):
        third = expected.token_ids[2]
        assert third not in expected.token_ids[:2]
        config = DiffusionGenerationConfig(max_new_tokens=96, eos_token_id=third)
        result = engine.generate(prompt, config)
        assert (result.token_ids, result.finish_reason) == (expected.token_ids[:2], "stop")

    def test_from_model_generates_the_same(self, prompt, expected):
        _, spec, _ = detect(DEMO)
        model = load_decoder(DEMO, spec, spec.max_positions + 32, BACKENDS["xnnpack"])
        with DiffusionEngine.from_model(model, DEMO) as engine:
            result = engine.generate(prompt, DiffusionGenerationConfig(max_new_tokens=96))
        assert result.token_ids == expected.token_ids

    def test_from_model_without_files(self):
        _, spec, _ = detect(DEMO)
        model = load_decoder(DEMO, spec, 128, BACKENDS["xnnpack"])
        with DiffusionEngine.from_model(model) as engine:
            result = engine.generate([5, 6, 7], DiffusionGenerationConfig(max_new_tokens=4))
        assert 0 < len(result.token_ids) <= 4

    def test_callback_sees_every_step_and_blocks_follow(self, engine, prompt):
        events = []
        result = engine.generate(
            prompt, DiffusionGenerationConfig(max_new_tokens=40), events.append
        )
        assert len(events) == result.nfe
        assert len(engine.blocks) >= 1
        blocks = [engine.blocks.get_block(index) for index in range(len(engine.blocks))]
        decided = [token for block in blocks for token in block.accepted_token_ids]
        assert decided[: len(result.token_ids)] == list(result.token_ids)
        assert {block.status for block in blocks} <= set(BlockStatus)
        assert BlockStatus.CONFIRMED in {block.status for block in blocks}

    def test_no_tokens_asked(self, engine, prompt):
        result = engine.generate(prompt, DiffusionGenerationConfig(max_new_tokens=0))
        assert (result.token_ids, result.finish_reason, result.nfe) == ((), "length", 0)

    def test_iterations_bound_the_steps_of_a_block(self, engine, prompt):
        few = DiffusionGenerationConfig(max_new_tokens=32, num_iterations=1, ignore_eos=True)
        result = engine.generate(prompt, few)
        mask = engine.engine.config.model.mask_token_id
        assert mask not in result.token_ids
        assert len(result.token_ids) == 32
        assert result.nfe <= 32 // 8 + 3

    def test_a_bad_configuration_is_no_end(self):
        _, spec, _ = detect(DEMO)
        model = load_decoder(DEMO, spec, 128, BACKENDS["xnnpack"])
        few = {"max_new_tokens": 4}
        with DiffusionEngine.from_model(model) as engine:
            first = engine.generate([5, 6, 7], DiffusionGenerationConfig(**few)).token_ids
            for _ in range(2):
                with pytest.raises(ConfigError, match="block_size"):
                    engine.generate([5], DiffusionGenerationConfig(block_size=7, **few))
            again = engine.generate([5, 6, 7], DiffusionGenerationConfig(**few)).token_ids
            assert again == first
            engine.generate([5, 6, 7], DiffusionGenerationConfig(mask_token_id=9, **few))
            assert engine.blocks.mask_token_id == 9

    def test_filters_are_the_checkpoints_unless_given(self):
        params = DiffusionGenerationConfig().sampling_params()
        assert (params.top_k, params.top_p) == (None, None)

    def test_limits(self, engine):
        with pytest.raises(PromptError, match="at most 511 tokens"):
            engine.generate([1] * 600)

    def test_text(self, engine):
        assert engine.generate("Hello", DiffusionGenerationConfig(max_new_tokens=8)).token_ids

    @pytest.mark.parametrize(
        "fields", [{"max_new_tokens": -1}, {"margin_confidence": True, "neg_entropy": True}]
    )
    def test_config_refuses(self, fields):
        with pytest.raises(ValueError, match="expected"):
            DiffusionGenerationConfig(**fields)
