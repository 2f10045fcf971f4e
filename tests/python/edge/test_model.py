# SPDX-License-Identifier: Apache-2.0
"""The decoder in its export form: against transformers, against itself with a cache, and its parts."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from torch import nn

from diffulex.checkpoint.auto_model import detect
from diffulex.errors import CheckpointError, ConfigError
from diffulex.quiet import quiet
from diffulex_edge.backends import BACKENDS
from diffulex_edge.exporter import load_decoder
from diffulex_edge.families import EDGE_FAMILIES, check_family
from diffulex_edge.model import EdgeDecoder, EdgeForm, EdgeNorm, EdgeProgram, visible_mask
from diffulex_edge.unified import KVCache, KVCacheConfig, create_kv_caches
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.decoder_oracle import DecoderOracle, block_mask, d2f_mask, full_mask
from fixtures.families import DENSE_FAMILIES, family_builder, family_config
from fixtures.moe_families import moe_builder

ROWS = 64
BLOCK = 4
MASKS = {"full": full_mask, "block_causal": lambda n: block_mask(n, BLOCK)}


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (1, count), generator=generator)


class Loaded:
    def __init__(self, family: str, directory, **fields) -> None:
        builder = family_builder(family, **fields)
        self.tensors = builder.write(directory)
        self.directory, self.config = directory, builder.config
        _, self.spec, _ = detect(directory, family)
        self.model = load_decoder(directory, self.spec, ROWS, BACKENDS["xnnpack"])


@pytest.fixture(params=DENSE_FAMILIES)
def loaded(request, tmp_path):
    config = family_config(request.param)
    key = "bd_size" if request.param == "fast_dllm_v2" else "block_size"
    return Loaded(request.param, tmp_path / "model", config={**config, key: BLOCK})


@pytest.fixture
def sdar(tmp_path):
    return Loaded("sdar", tmp_path / "model")


def assert_close(found, expected) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_families_are_the_dense_ones():
    assert set(EDGE_FAMILIES) == set(DENSE_FAMILIES)


@pytest.mark.every(4)
@pytest.mark.parametrize("mode", ["full", "block_causal", "d2f"])
def test_logits_are_those_of_transformers(loaded, mode):
    ids = tokens(18)
    mask = d2f_mask(18, 7, BLOCK) if mode == "d2f" else MASKS[mode](18)
    oracle = DecoderOracle(loaded.spec.family, loaded.config, loaded.tensors)
    logits, cache = loaded.model(ids, attention_mode=mode, prompt_len=7)
    assert cache is None
    assert logits.shape == (1, 18, loaded.spec.vocab_size)
    assert_close(logits[0], oracle.logits(ids[0].tolist(), mask))


def test_unified_forward_with_a_cache_equals_one_without(loaded):
    ids = tokens(24)
    expected, _ = loaded.model(ids)
    cache = create_kv_caches(loaded.model).get_cache_tensor()
    pieces = []
    for start in (0, 8, 16):
        part, same = loaded.model(ids[:, start : start + 8], kv_cache=cache, start_pos=start)
        assert same is cache
        pieces.append(part)
    assert_close(torch.cat(pieces, dim=1), expected)


def test_every_backend_form_computes_the_same(sdar):
    ids = tokens(16)
    expected, _ = sdar.model(ids)
    for backend in BACKENDS.values():
        other = load_decoder(sdar.directory, sdar.spec, ROWS, backend)
        assert_close(other(ids)[0], expected)


def test_program_rows_equal_the_unified_forward(sdar):
    """The exported method in pieces, with wrong tokens first, and one row alone."""
    program, ids = EdgeProgram(sdar.model), tokens(16)
    expected, _ = sdar.model(ids)
    for begin, end in ((0, 8), (8, 16)):
        for wrong in (True, False):
            part = ids[:, begin:end] * (0 if wrong else 1)
            positions = torch.arange(begin, end)
            ends = (positions // BLOCK + 1) * BLOCK
            found = program(part, positions, ends, torch.arange(end - begin))
        assert_close(found[0], expected[0, begin:end])
    alone = program(ids[:, 15:], torch.tensor([15]), torch.tensor([16]), torch.tensor([0]))
    assert_close(alone[0, 0], expected[0, 15])


def test_logits_rows_select(sdar):
    ids = tokens(12)
    logits, _ = sdar.model(ids)
    for rows, picked in (("last", logits[:, -1:]), (slice(2, 5), logits[:, 2:5])):
        torch.testing.assert_close(sdar.model(ids, logits_rows=rows)[0], picked)
    index = torch.tensor([7, 0])
    torch.testing.assert_close(sdar.model(ids, logits_rows=index)[0], logits[:, index])


def test_batch_rows_do_not_meet(sdar):
    ids = torch.cat((tokens(8, 1), tokens(8, 2)))
    both, _ = sdar.model(ids)
    for row in range(2):
        torch.testing.assert_close(both[row : row + 1], sdar.model(ids[row : row + 1])[0])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input_ids": torch.full((1, 2), 300)}, r"ids in \[0, 300\)"),
        ({"input_ids": tokens(0)}, r"\[B, S\] with S >= 1"),
        ({"input_ids": tokens(4), "start_pos": 1}, "expected 0 without a cache, got 1"),
        ({"input_ids": tokens(65)}, r"rows within \[0, 64\), got \[0, 65\)"),
        ({"input_ids": tokens(4), "attention_mode": "causal"}, "one of full, block_causal, d2f"),
        ({"input_ids": tokens(4), "attention_mode": "d2f"}, "prompt_len: expected it"),
        ({"input_ids": tokens(4), "positions": torch.zeros(1, 3)}, r"positions: expected \[1, 4\]"),
        ({"input_ids": tokens(4), "positions": torch.arange(1, 5)[None]}, "those from 0 on with"),
        (
            {
                "input_ids": tokens(2),
                "positions": torch.tensor([[1, 0]]),
                "attention_mode": "d2f",
                "prompt_len": 1,
            },
            "those from 0 on with attention_mode 'd2f'",
        ),
        ({"input_ids": tokens(4), "logits_rows": "first"}, "expected 'last'"),
        ({"input_ids": tokens(4), "kv_cache": torch.zeros(1, 2, 1, 2, 64, 32)}, "kv_cache: exp"),
    ],
)
def test_unified_forward_refuses(sdar, arguments, text):
    with pytest.raises(ValueError, match=text):
        sdar.model(**arguments)


def test_positions_with_a_cache_are_contiguous(sdar):
    cache = create_kv_caches(sdar.model).get_cache_tensor()
    with pytest.raises(ValueError, match="contiguous positions with a cache"):
        sdar.model(tokens(3), torch.tensor([[0, 2, 3]]), cache)


class TestLoading:
    def test_missing_tensor(self, tmp_path):
        builder = CheckpointBuilder(edit=lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
        builder.write(tmp_path)
        spec = detect(tmp_path)[1]
        with pytest.raises(CheckpointError, match=r"missing tensors: .*layers\.1\.mlp\.up_proj"):
            load_decoder(tmp_path, spec, ROWS, BACKENDS["xnnpack"])

    def test_unknown_tensor(self, tmp_path):
        CheckpointBuilder(edit=lambda t: t.update(extra=torch.zeros(2))).write(tmp_path)
        spec = detect(tmp_path)[1]
        with pytest.raises(CheckpointError, match="only tensors of the model, got extra"):
            load_decoder(tmp_path, spec, ROWS, BACKENDS["xnnpack"])

    def test_wrong_shape(self, tmp_path):
        name = "model.norm.weight"
        CheckpointBuilder(edit=lambda t: t.update({name: torch.ones(3)})).write(tmp_path)
        spec = detect(tmp_path)[1]
        with pytest.raises(CheckpointError, match=rf"{name}: expected shape \[64\], got \[3\]"):
            load_decoder(tmp_path, spec, ROWS, BACKENDS["xnnpack"])

    def test_tied_head(self, tmp_path):
        CheckpointBuilder(config=tiny_config(tie_word_embeddings=True)).write(tmp_path)
        model = load_decoder(tmp_path, detect(tmp_path)[1], ROWS, BACKENDS["xnnpack"])
        assert model.head.weight is model.embedding.weight

    def test_head_ends_at_the_vocabulary(self, tmp_path):
        config = family_config("llada", embedding_size=304)
        loaded = Loaded("llada", tmp_path, config=config)
        assert loaded.model.head.weight.shape == (300, 64)
        assert loaded.model.embedding.weight.shape == (304, 64)
        assert loaded.model(tokens(4))[0].shape[-1] == 300

    def test_experts_are_refused(self, tmp_path):
        moe_builder("sdar_moe").write(tmp_path)
        with pytest.raises(ConfigError, match=r"families diffucoder, .*, got sdar_moe"):
            check_family(detect(tmp_path)[1])


class TestParts:
    @pytest.mark.parametrize("form", [EdgeForm(), EdgeForm(norm="mean")])
    def test_norm(self, form):
        norm = EdgeNorm(32, 1e-6, form)
        nn.init.normal_(norm.weight, 1.0, 0.1)
        x = torch.randn(5, 32)
        expected = norm.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        torch.testing.assert_close(norm(x), expected)

    @pytest.mark.parametrize("form", [EdgeForm(), EdgeForm(norm="mean")])
    def test_norm_takes_the_scale_out(self, form):
        norm = EdgeNorm(32, 0.0, form)
        nn.init.ones_(norm.weight)
        x = torch.randn(5, 32)
        torch.testing.assert_close(norm(100 * x), norm(x))
        torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(5))

    def test_norm_of_nothing_is_nothing(self):
        norm = EdgeNorm(32, 1e-6, EdgeForm())
        nn.init.ones_(norm.weight)
        assert norm(torch.zeros(2, 32)).eq(0).all()

    def test_norm_keeps_half_precision_and_sums_in_single(self):
        norm = EdgeNorm(32, 1e-6, EdgeForm())
        nn.init.ones_(norm.weight)
        row = norm.mean_row
        norm.half()
        norm.mean_row = row
        x = torch.full((1, 32), 300.0, dtype=torch.float16)  # whose square is infinite in half
        assert norm(x).dtype == torch.float16
        torch.testing.assert_close(norm(x), torch.ones_like(x))

    def test_scores_depend_on_the_distance_alone(self, sdar):
        """What a rotation is for: q at i and k at j meet by i - j."""
        layer, model = sdar.model.layers[0], sdar.model
        x = torch.randn(1, 64).expand(ROWS, 64)
        q, k, _ = layer.project(x, model.cos, model.sin, model.turn)
        scores = q[0] @ k[0].transpose(0, 1)
        torch.testing.assert_close(scores[5, 2], scores[45, 42], atol=1e-4, rtol=1e-4)
        assert abs(float(scores[5, 2] - scores[5, 4])) > 1e-3

    def test_groups_share_their_keys(self, sdar):
        """Against attention over keys that are repeated for every head."""
        layer = sdar.model.layers[0]
        num_q, num_kv, dim = layer.heads
        q, keys = torch.randn(num_q, 3, dim), torch.randn(num_kv, 7, dim)
        values, mask = torch.randn(num_kv, 7, dim), visible_mask(torch.tensor([2, 7, 5]), 7)
        wide = (part.repeat_interleave(num_q // num_kv, dim=0) for part in (keys, values))
        expected = nn.functional.scaled_dot_product_attention(q, *wide, attn_mask=mask)
        found = layer.attend(q, keys, values, mask)
        torch.testing.assert_close(found, expected.transpose(0, 1).reshape(3, -1))

    def test_a_row_that_sees_nothing_is_finite(self, sdar):
        layer = sdar.model.layers[0]
        num_q, num_kv, dim = layer.heads
        keys = torch.randn(num_kv, 7, dim)
        mask = visible_mask(torch.tensor([0]), 7)
        assert layer.attend(torch.randn(num_q, 1, dim), keys, keys, mask).isfinite().all()

    def test_feed_forward_is_gated(self, sdar):
        layer, x = sdar.model.layers[0], torch.randn(3, 64)
        attended = torch.zeros(3, layer.o.in_features)
        h = layer.post_norm(x)
        gate = layer.gate(h)
        expected = x + layer.down(gate * torch.sigmoid(gate) * layer.up(h))
        torch.testing.assert_close(layer.finish(x, attended), expected)

    def test_feed_forward_without_a_gate_gives_the_residual(self, sdar):
        layer, x = sdar.model.layers[0], torch.randn(3, 64)
        layer.gate.weight.zero_()
        attended = torch.zeros(3, layer.o.in_features)
        torch.testing.assert_close(layer.finish(x, attended), x)

    def test_turn_matrix_is_the_rotated_half(self, sdar):
        x = torch.randn(3, 32)
        turned = torch.nn.functional.linear(x, sdar.model.turn)
        torch.testing.assert_close(turned, torch.cat((-x[:, 16:], x[:, :16]), dim=-1))

    def test_rotary_tables_keep_lengths(self, sdar):
        model = sdar.model
        torch.testing.assert_close(model.cos**2 + model.sin**2, torch.ones(ROWS, 32))

    def test_partial_rotary_leaves_the_rest(self, sdar):
        import dataclasses

        spec = dataclasses.replace(sdar.spec, rotary_dim=16)
        model = EdgeDecoder(spec, 8)
        assert (model.cos[:, 16:] == 1).all()
        assert (model.sin[:, 16:] == 0).all()
        assert (model.turn[16:] == 0).all()

    def test_mask_hides_keys_from_the_end_on(self):
        mask = visible_mask(torch.tensor([0, 2, 3]), 3)
        assert (mask == 0).sum(-1).tolist() == [0, 2, 3]
        assert mask.isfinite().all()

    def test_program_holds_one_cache_of_the_asked_length(self, sdar):
        program = EdgeProgram(sdar.model)
        assert [tuple(k.shape) for k, _ in program.caches] == [(2, ROWS, 32)] * 2
        assert not any("_0" in name for name in program.state_dict())


class TestQuiet:
    def test_later_lines_are_not_repeated(self, capfd):
        before = list(logging.root.handlers)
        with quiet():
            logging.root.handlers.clear()  # as in a process of its own
            logging.info("installs a handler")
            os.write(2, b"native line\n")
        assert logging.root.handlers == before
        assert capfd.readouterr().err == ""

    def test_failures_pass(self):
        with pytest.raises(KeyError), quiet():
            raise KeyError


class TestCache:
    config = KVCacheConfig(3, 2, 8, 16)

    def test_shape_and_bytes(self):
        cache = KVCache(self.config, batch_size=2)
        assert cache.get_cache_tensor().shape == (3, 2, 2, 2, 16, 8)
        assert cache.nbytes == 2 * self.config.nbytes == 3 * 2 * 2 * 2 * 16 * 8 * 4

    def test_documented_example(self):
        assert KVCacheConfig(28, 8, 64, 2048, torch.float16).nbytes == 117_440_512

    def test_layer_views(self):
        cache = KVCache(self.config)
        k, v = cache.get_layer_cache(1)
        k.fill_(1)
        v.fill_(2)
        assert cache.get_cache_tensor()[1, 0].eq(1).all()
        assert cache.get_cache_tensor()[1, 1].eq(2).all()
        assert cache.get_cache_tensor()[0].eq(0).all()

    def test_update(self):
        cache = KVCache(self.config)
        rows = torch.randn(1, 2, 3, 8)
        cache.update_layer_cache(2, rows, -rows, 5)
        k, v = cache.get_layer_cache(2)
        torch.testing.assert_close(k[:, :, 5:8], rows)
        torch.testing.assert_close(v[:, :, 5:8], -rows)
        assert cache.length == 8

    @pytest.mark.parametrize("start", [-1, 14, 16])
    def test_update_out_of_range(self, start):
        rows = torch.zeros(1, 2, 3, 8)
        with pytest.raises(ValueError, match=r"rows within \[0, 16\)"):
            KVCache(self.config).update_layer_cache(0, rows, rows, start)

    def test_clear(self):
        cache = KVCache(self.config)
        cache.update_layer_cache(0, *[torch.ones(1, 2, 3, 8)] * 2, 0)
        cache.clear()
        assert cache.length == 0
        assert cache.get_cache_tensor().eq(0).all()

    def test_truncate(self):
        cache = KVCache(self.config)
        cache.update_layer_cache(0, *[torch.ones(1, 2, 3, 8)] * 2, 0)
        cache.truncate(1)
        assert cache.length == 1
        with pytest.raises(ValueError, match=r"length: expected \[0, 1\], got 2"):
            cache.truncate(2)

    def test_from_tensor_shares_memory(self):
        tensor = torch.zeros(3, 2, 1, 2, 16, 8)
        cache = KVCache.from_tensor(tensor, length=4)
        assert cache.config == self.config
        cache.get_layer_cache(0)[0].fill_(1)
        assert tensor[0, 0].eq(1).all()

    def test_from_tensor_of_another_shape(self):
        with pytest.raises(ValueError, match=r"\[L, 2, B, Hkv, T, D\]"):
            KVCache.from_tensor(torch.zeros(3, 2, 1))

    def test_rewinding_gives_the_first_result(self, sdar):
        cache, ids = create_kv_caches(sdar.model).get_cache_tensor(), tokens(12)
        sdar.model(ids[:, :8], kv_cache=cache)
        first, _ = sdar.model(ids[:, 4:8], kv_cache=cache, start_pos=4)
        sdar.model(ids[:, 8:], kv_cache=cache, start_pos=8)
        again, _ = sdar.model(ids[:, 4:8], kv_cache=cache, start_pos=4)
        torch.testing.assert_close(again, first)
