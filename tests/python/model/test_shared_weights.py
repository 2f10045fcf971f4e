# SPDX-License-Identifier: Apache-2.0
"""Models whose weights several ranks share: together they compute what one rank computes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex.checkpoint import memory
from diffulex.checkpoint.auto_model import detect, load_model, random_model
from diffulex.checkpoint.loader import load_weights, slices_of
from diffulex.checkpoint.tensor_files import find_tensors
from diffulex.checkpoint.tensor_reader import TensorReader
from diffulex.config.config import Config, read_model_facts
from diffulex.distributed.shard import ONE_RANK, ExpertShard, Shard, shard_range
from diffulex.engine import startup
from diffulex.errors import CheckpointError
from diffulex.nn.decoder import DecoderForDiffusionLM
from diffulex.registry import AutoModelForDiffusionLM
from fixtures.families import DENSE_FAMILIES, family_builder, family_config
from fixtures.moe_families import MOE_FAMILIES, moe_builder, moe_config, stack_experts
from fixtures.paged_batch import PagedRunner, Rows
from fixtures.thread_comm import ThreadComm, run_ranks

BLOCK = 4
NUM_TOKENS = 20


def tokens() -> list[int]:
    return torch.randint(0, 300, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()


def logits_of(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, V_t] logits of rows that see a cache, and [n, V_t] of a first forward."""
    runner = PagedRunner(model, BLOCK)
    sequence = runner.sequence(tokens())
    (first,) = runner.forward([Rows(sequence, 12, should_store=True)])
    (second,) = runner.forward([Rows(sequence, NUM_TOKENS, should_store=False)])
    return first, second


def assert_ranks_agree(family: str, directory: Path, num_ranks: int, **fields: Any) -> None:
    family_builder(family, config=family_config(family, **fields)).write(directory)
    name, spec, _ = detect(directory, family)
    whole = load_model(name, spec, directory, torch.float32, "cpu")
    expected = logits_of(whole)

    def work(comm: ThreadComm) -> tuple[torch.Tensor, ...]:
        model = DecoderForDiffusionLM(spec, torch.float32, "cpu", Shard(comm.rank, comm.size))
        load_weights(model, directory)
        model.comm = comm
        widths = [len(part) for part in parts]
        assert widths[comm.rank] == len(model.vocabulary)
        return tuple(comm.gather_columns(part, tuple(widths)) for part in logits_of(model))

    parts = [
        DecoderForDiffusionLM(spec, torch.float32, "meta", Shard(rank, num_ranks)).vocabulary
        for rank in range(num_ranks)
    ]
    assert [token for part in parts for token in part] == [*range(spec.vocab_size)]
    for result in run_ranks(num_ranks, work):
        for actual, other in zip(result, expected, strict=True):
            torch.testing.assert_close(actual, other, atol=1e-5, rtol=1e-5)


@pytest.mark.every(3)
@pytest.mark.parametrize("family", DENSE_FAMILIES)
@pytest.mark.parametrize("num_ranks", [2, 4])  # of two KV heads each of four ranks has a copy
def test_logits_of_a_family(tmp_path: Path, family: str, num_ranks: int) -> None:
    assert_ranks_agree(family, tmp_path, num_ranks)


@pytest.mark.parametrize(
    ("num_ranks", "fields"),
    [
        (2, {"tie_word_embeddings": True}),
        (4, {"tie_word_embeddings": True}),
        (8, {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 144}),
        (3, {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}),
        (2, {"attention_bias": True}),
    ],
)
def test_logits_of_shapes(tmp_path: Path, num_ranks: int, fields: dict[str, Any]) -> None:
    assert_ranks_agree("sdar", tmp_path, num_ranks, **fields)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_past_the_vocabulary_belong_to_the_last_rank(tmp_path: Path, num_ranks: int) -> None:
    assert_ranks_agree("llada", tmp_path, num_ranks, embedding_size=320, include_bias=True)


def test_a_rank_reads_its_part_of_a_tied_table_once(tmp_path: Path) -> None:
    family_builder("sdar", config=family_config("sdar", tie_word_embeddings=True)).write(tmp_path)
    _, spec, _ = detect(tmp_path, "sdar")
    model = DecoderForDiffusionLM(spec, torch.float32, "cpu", Shard(1, 2))
    load_weights(model, tmp_path)
    head = model.head.row_major()
    start = model.vocabulary.start
    assert head.data_ptr() == model.embedding.weight[start:].data_ptr()
    assert torch.equal(head, model.embedding.weight[start:])


# Routed experts.


def assert_experts_agree(
    directory: Path, shards: list[Shard], expected: list[torch.Tensor] | None = None
) -> None:
    name, spec, _ = detect(directory)
    if expected is None:
        expected = list(logits_of(load_model(name, spec, directory, torch.float32, "cpu")))

    def work(comm: ThreadComm) -> tuple[torch.Tensor, ...]:
        shard = shards[comm.rank]
        model: Any = load_model(name, spec, directory, torch.float32, "cpu", shard=shard)
        model.comm = comm
        logits = logits_of(model)
        if shard.size == 1:
            return logits
        widths = [part.stop - part.start for part in parts]
        return tuple(comm.gather_columns(part, tuple(widths)) for part in logits)

    parts = [shard_range(spec.vocab_size, shard) for shard in shards]
    results = run_ranks(len(shards), work)
    for result in results:
        for actual, other in zip(result, expected, strict=True):
            torch.testing.assert_close(actual, other, atol=1e-5, rtol=1e-5)
        for actual, first in zip(result, results[0], strict=True):
            assert torch.equal(actual, first)


def cut(size: int, mode: str) -> list[Shard]:
    return [Shard(rank, size, ExpertShard(rank, size, mode)) for rank in range(size)]


@pytest.mark.parametrize("mode", ["width", "expert"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_within_a_group(tmp_path: Path, family: str, mode: str) -> None:
    moe_builder(family, config=moe_config(family, moe_intermediate_size=48)).write(tmp_path)
    assert_experts_agree(tmp_path, cut(2, mode))


@pytest.mark.parametrize("layout", ["merged", "merged_weight", "gate_up"])
@pytest.mark.parametrize("mode", ["width", "expert"])
def test_stacked_experts(tmp_path: Path, layout: str, mode: str) -> None:
    config = moe_config("sdar_moe", moe_intermediate_size=40)
    moe_builder(
        "sdar_moe",
        config=config,
        edit=lambda tensors: stack_experts(tensors, config["num_experts"], layout),
    ).write(tmp_path)
    assert_experts_agree(tmp_path, cut(2, mode))


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_uneven_experts_of_ranks_that_share_nothing_else(tmp_path: Path, family: str) -> None:
    moe_builder(family, config=moe_config(family)).write(tmp_path)
    shards = [Shard(0, 1, ExpertShard(rank, 3, "expert")) for rank in range(3)]
    assert_experts_agree(tmp_path, shards)


def test_which_experts_a_rank_has() -> None:
    def numbers(size: int, is_interleaved: bool) -> list[list[int]]:
        every = [ExpertShard(rank, size, "expert") for rank in range(size)]
        return [list(one.experts(8, is_interleaved=is_interleaved)) for one in every]

    assert numbers(3, is_interleaved=False) == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert numbers(3, is_interleaved=True) == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert list(ExpertShard(1, 3, "width").experts(8, is_interleaved=True)) == [*range(8)]
    assert ExpertShard(1, 3, "width").width(512) == slice(128, 320)
    assert ExpertShard(1, 3, "expert").width(512) == slice(0, 512)


@pytest.mark.parametrize("mode", ["width", "expert"])
def test_slices_of_all_ranks_cover_the_checkpoint(tmp_path: Path, mode: str) -> None:
    moe_builder("llada2", config=moe_config("llada2", moe_intermediate_size=48)).write(tmp_path)
    _, spec, _ = detect(tmp_path)
    seen = {name: torch.zeros(stored.shape) for name, stored in find_tensors(tmp_path).items()}
    for shard in cut(2, mode):
        model = DecoderForDiffusionLM(spec, torch.float32, "meta", shard)
        for name, part in slices_of(model, model.weight_table_for(seen.keys())).items():
            for rows in part.rows:
                into = seen[name][rows]
                for columns in part.column_ranges or (slice(None),):
                    (into[:, columns] if into.dim() > 1 else into).add_(1)
    for name, count in seen.items():
        assert bool((count >= 1).all()), name
        if ".experts." in name:
            assert bool((count == 1).all()), name


def test_a_missing_expert_of_another_rank_is_found_out(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.7.up_proj.weight"
    moe_builder("sdar_moe", edit=lambda tensors: tensors.pop(name)).write(tmp_path)
    registered, spec, _ = detect(tmp_path)
    with pytest.raises(CheckpointError, match=f"missing tensors: {re.escape(name)}"):
        load_model(registered, spec, tmp_path, torch.float32, "cpu", shard=cut(2, "expert")[0])


def test_a_rank_reads_its_experts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moe_builder("sdar_moe").write(tmp_path)
    name, spec, _ = detect(tmp_path)
    read: list[int] = []
    pieces = TensorReader.pieces

    def counting(self: Any, stored: Any, *arguments: Any) -> Any:
        for rows, values in pieces(self, stored, *arguments):
            if values.shape[-1:] == (24,):  # down projections of experts
                read.append(values.numel())
            yield rows, values

    monkeypatch.setattr(TensorReader, "pieces", counting)
    sizes = []
    for shards in ([ONE_RANK], cut(2, "expert")):
        read.clear()
        load_model(name, spec, tmp_path, torch.float32, "cpu", shard=shards[0])
        sizes.append(sum(read))
    assert sizes[0] == 2 * sizes[1] > 0


@pytest.mark.parametrize("family", ["sdar", "sdar_moe"])
def test_a_rank_asks_for_the_memory_of_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    builder = family_builder if family in DENSE_FAMILIES else moe_builder
    builder(family).write(tmp_path)
    name, spec, _ = detect(tmp_path, family)
    experts = None if spec.moe is None else ExpertShard(1, 2, "expert")
    shard = Shard(1, 2, experts)
    at_hand = 0
    monkeypatch.setattr(memory, "available_bytes", lambda device: at_hand)

    def load(shard: Shard) -> Any:
        return load_model(name, spec, tmp_path, torch.float32, "cpu", shard=shard)

    with pytest.raises(CheckpointError, match=r"needs 0\.0 GiB, 0\.0 GiB available"):
        load(shard)
    at_hand = memory.model_bytes(spec, torch.float32)
    part, whole = load(shard), load(ONE_RANK)
    assert memory.built_bytes(whole) == at_hand
    at_hand = memory.built_bytes(part)
    assert at_hand < memory.built_bytes(whole)
    load(shard)
    random_model(name, spec, torch.float32, "cpu", shard=shard)
    with pytest.raises(CheckpointError, match=r"needs 0\.0 GiB, 0\.0 GiB available"):
        load(ONE_RANK)


def test_the_first_rank_asks_for_the_memory_of_all_on_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part alone would fit. The others, whose memory it has taken then, ask for their own."""
    family_builder("sdar").write(tmp_path)
    settings = {"device": "cpu", "dtype": "float32", "tensor_parallel_size": 2}
    facts = read_model_facts(str(tmp_path), settings)
    config = Config.resolve(str(tmp_path), facts, settings)
    at_hand = 1 << 40
    monkeypatch.setattr(memory, "available_bytes", lambda device: at_hand)

    def load(rank: int) -> Any:
        return startup.load_weights(config, facts.model_name, show_progress=False, rank=rank)

    part = memory.built_bytes(load(0))
    at_hand = 2 * part - 1
    with pytest.raises(CheckpointError, match=r"needs 0\.0 GiB for 2 ranks of this host, 0\.0 GiB"):
        load(0)
    load(1)
    at_hand = 2 * part
    load(0)
    at_hand = part
    # Processes of a cluster: the other one may be on another host.
    monkeypatch.setattr("diffulex.distributed.start._ranks", SimpleNamespace(shares_memory=False))
    load(0)


def test_a_model_is_built_once_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family_builder("sdar").write(tmp_path)
    name, spec, _ = detect(tmp_path, "sdar")
    model_class, devices = AutoModelForDiffusionLM.get(name), []

    def build(spec: Any, dtype: Any, device: Any) -> Any:
        devices.append(str(device))
        return model_class(spec, dtype, device)

    monkeypatch.setattr(AutoModelForDiffusionLM, "get", lambda name: build)
    load_model(name, spec, tmp_path, torch.float32, "cpu")
    random_model(name, spec, torch.float32, "cpu")
    assert devices == ["meta", "cpu"] * 2
