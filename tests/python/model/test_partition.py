# SPDX-License-Identifier: Apache-2.0
"""Layers that are cut over ranks: what each has, what the loader gives it, and what they add up to."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffulex.checkpoint.loader import load_weights
from diffulex.checkpoint.slices import WeightSlice
from diffulex.distributed.shard import ONE_RANK, Shard, shard_range
from diffulex.errors import CheckpointError
from diffulex.nn.attention import BlockAttention
from diffulex.nn.embedding import OutputHead, TokenEmbedding
from diffulex.nn.feed_forward import GatedMLP, MLPScratch
from diffulex.nn.linear import Linear
from diffulex.nn.partition import Cut, Partition

FP32 = {"dtype": torch.float32, "device": "cpu"}
HIDDEN, WIDTH, ROWS = 64, 112, 5


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Loadable:
    """Layers of one rank as the loader sees a model."""

    def __init__(self, table: dict[str, Any], slices: dict[str, WeightSlice]) -> None:
        names = SimpleNamespace(embedding="embedding", head="head", ignored=())
        self.spec = SimpleNamespace(names=names, tie_word_embeddings=False)
        self._table, self._slices = table, slices

    def weight_table(self) -> dict[str, Any]:
        return self._table

    def weight_slices(self) -> dict[str, WeightSlice]:
        return self._slices

    def tie_embeddings(self) -> None:
        raise AssertionError


def load(directory: Path, layer: Linear, names: list[str]) -> None:
    """Fills the projections of a layer, or all of them from one tensor, from the files."""
    table, slices = {}, {}
    for index, name in enumerate(names):
        which = index if len(names) > 1 else None
        weight, bias = layer.whole() if which is None else layer.part(which)
        table[f"{name}.weight"] = weight
        if bias is not None:
            table[f"{name}.bias"] = bias
        slices.update(layer.slices(name, which))
    load_weights(Loadable(table, slices), directory)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8])
def test_shards_cover_a_size_in_units(num_ranks: int) -> None:
    for size in (112, 128, 640, 2112, 12288, 151936, 32001):
        parts = (
            [shard_range(size, Shard(rank, num_ranks)) for rank in range(num_ranks)]
            if (-(-size // 16) >= num_ranks)
            else []
        )
        for first, second in itertools.pairwise(parts):
            assert first.stop == second.start
        if parts:
            assert (parts[0].start, parts[-1].stop) == (0, size)
            assert all(part.start < part.stop and part.start % 16 == 0 for part in parts)


def test_shards_have_the_sizes_of_fast_products() -> None:
    def sizes(size: int, num_ranks: int) -> list[int]:
        parts = [shard_range(size, Shard(rank, num_ranks)) for rank in range(num_ranks)]
        return [part.stop - part.start for part in parts]

    assert set(sizes(151936, 4)) == {37952, 38016}
    assert sizes(2112, 8) == [256] * 7 + [320]
    assert sizes(640, 3) == [192, 192, 256]
    with pytest.raises(ValueError, match="expected at most 7 shards of 112, got 8"):
        shard_range(112, Shard(0, 8))


def test_heads_are_whole_and_shared_where_there_are_few() -> None:
    def heads(count: int, num_ranks: int) -> list[int]:
        cuts = [Partition(Cut.HEADS, Shard(rank, num_ranks), 8) for rank in range(num_ranks)]
        assert all(cut.columns(24) == slice(0, 24) for cut in cuts)
        parts = [cut.rows(count * 8) for cut in cuts]
        assert all((part.stop - part.start) % 8 == 0 for part in parts)
        return [part.start // 8 for part in parts]

    assert heads(4, 2) == [0, 2]
    assert heads(2, 4) == [0, 0, 1, 1]
    with pytest.raises(ValueError, match=r"a divisor or a multiple of 4 heads .* got 3"):
        heads(4, 3)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_feed_forward_of_all_ranks_adds_up(tmp_path: Path, num_ranks: int) -> None:
    stored = {
        "gate.weight": normal(WIDTH, HIDDEN) / 8,
        "up.weight": normal(WIDTH, HIDDEN, seed=1) / 8,
        "down.weight": normal(HIDDEN, WIDTH, seed=2) / 8,
    }
    save_file(stored, tmp_path / "model.safetensors")
    x, total, widths = normal(ROWS, HIDDEN, seed=3), torch.zeros(ROWS, HIDDEN), 0
    names = SimpleNamespace(gate="gate", up="up", down="down")
    for rank in range(num_ranks):
        mlp = GatedMLP(HIDDEN, WIDTH, **FP32, shard=Shard(rank, num_ranks))
        slices = mlp.weight_slices("", names)
        load_weights(Loadable(mlp.weight_table("", names, ()), slices), tmp_path)
        widths += mlp.down.in_features
        total += mlp(x.clone(), MLPScratch(x, mlp.down.in_features))
    gate, up, down = (stored[f"{name}.weight"] for name in ("gate", "up", "down"))
    expected = (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    assert widths == WIDTH
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_projections_of_attention_are_cut_by_heads(
    tmp_path: Path, num_ranks: int, is_fused: bool
) -> None:
    sizes = {"q": 32, "k": 16, "v": 16}  # 4 and 2 heads of 8
    stored = {}
    for seed, (name, size) in enumerate(sizes.items()):
        stored[f"{name}.weight"] = normal(size, HIDDEN, seed=seed)
        stored[f"{name}.bias"] = normal(size, seed=10 + seed)
    files = stored
    if is_fused:
        files = {
            f"qkv.{kind}": torch.cat([stored[f"{name}.{kind}"] for name in sizes])
            for kind in ("weight", "bias")
        }
    o = {"o.weight": normal(HIDDEN, 32, seed=5), "o.bias": normal(HIDDEN, seed=6)}
    save_file(files | o, tmp_path / "model.safetensors")
    names = SimpleNamespace(qkv="qkv" if is_fused else None, q="q", k="k", v="v", o="o")
    x, inner = normal(ROWS, HIDDEN, seed=7), normal(ROWS, 32, seed=8)
    total = torch.zeros(ROWS, HIDDEN)
    for rank in range(num_ranks):
        layer = BlockAttention(
            HIDDEN,
            4,
            2,
            8,
            eps=1e-6,
            qkv_bias=True,
            o_bias=True,
            qk_norm=False,
            **FP32,
            shard=Shard(rank, num_ranks),
        )
        table = layer.weight_table("", names)
        load_weights(Loadable(table, layer.weight_slices("", names)), tmp_path)
        assert (layer.num_q_heads, layer.num_kv_heads) == (4 // num_ranks, max(1, 2 // num_ranks))
        qkv = layer.qkv(x, torch.empty(ROWS, layer.qkv.num_rows))
        expected = []
        for name, size in sizes.items():
            part = Partition(Cut.HEADS, Shard(rank, num_ranks), 8).rows(size)
            expected.append(x @ stored[f"{name}.weight"][part].t() + stored[f"{name}.bias"][part])
        torch.testing.assert_close(qkv, torch.cat(expected, dim=1))
        own = inner[:, Partition(Cut.HEAD_COLUMNS, Shard(rank, num_ranks), 8).columns(32)]
        total += layer.o(own.contiguous(), torch.empty(ROWS, HIDDEN))
    torch.testing.assert_close(total, inner @ o["o.weight"].t() + o["o.bias"])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_vocabulary_is_cut_by_ids(tmp_path: Path, num_ranks: int) -> None:
    vocab, table = 130, normal(130, HIDDEN)
    save_file({"embedding": table, "head": table * 2}, tmp_path / "model.safetensors")
    ids, x = torch.tensor([0, 47, 48, 64, 129]), normal(ROWS, HIDDEN, seed=1)
    rows, logits = torch.zeros(len(ids), HIDDEN), []
    for rank in range(num_ranks):
        cut = Partition(Cut.VOCABULARY, Shard(rank, num_ranks))
        embedding = TokenEmbedding(vocab, HIDDEN, **FP32, partition=cut)
        head = OutputHead(vocab, HIDDEN, **FP32, partition=cut)
        table_of_rank = {"embedding": embedding.weight, "head": head.row_major()}
        slices = embedding.slices("embedding") | head.slices("head")
        load_weights(Loadable(table_of_rank, slices), tmp_path)
        rows += embedding(ids)
        logits.append(head(x))
    assert torch.equal(rows, table[ids])
    torch.testing.assert_close(torch.cat(logits, dim=1), x @ (table * 2).t())
    if num_ranks > 1:
        cut = Partition(Cut.VOCABULARY, Shard(0, num_ranks))
        other = TokenEmbedding(vocab, HIDDEN, **FP32, partition=cut)
        with pytest.raises(ValueError, match=r"OutputHead\.tie: expected an embedding of the ids"):
            head.tie(other)


def test_loader_checks_slices(tmp_path: Path) -> None:
    save_file({"o.weight": normal(HIDDEN, 32)}, tmp_path / "model.safetensors")
    layer = Linear(32, (HIDDEN,), **FP32, partition=Partition(Cut.COLUMNS, Shard(1, 2)))
    load(tmp_path, layer, ["o"])
    assert torch.equal(layer.row_major(), normal(HIDDEN, 32)[:, 16:])
    table = {"o.weight": layer.row_major()}

    def refused(part: WeightSlice, text: str) -> None:
        with pytest.raises(CheckpointError, match=text):
            load_weights(Loadable(table, {"o.weight": part}), tmp_path)

    whole = WeightSlice.whole((HIDDEN, 32))
    refused(
        whole, r"o\.weight: expected a slice of \[64, 32\] with the shape \[64, 16\] of the layer"
    )
    outside = WeightSlice((HIDDEN, 32), (slice(0, HIDDEN),), slice(20, 36))
    refused(outside, r"got rows 0:64 and columns 20:36")
    # The stored tensor is compared with the whole, so that a slice cannot hide a wrong shape.
    other = WeightSlice((HIDDEN, 48), (slice(0, HIDDEN),), slice(16, 32))
    refused(other, r"expected shape \[64, 48\], got \[64, 32\]")


def test_one_rank_has_everything() -> None:
    for cut in Cut:
        partition = Partition(cut, ONE_RANK, 8)
        assert (partition.rows(40), partition.columns(24)) == (slice(0, 40), slice(0, 24))
        assert not partition.has_partial_sums
