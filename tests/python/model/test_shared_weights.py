# SPDX-License-Identifier: Apache-2.0
"""Models whose weights several ranks share: together they compute what one rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.checkpoint.loader import load_weights
from diffulex.distributed.shard import Shard
from diffulex.errors import ConfigError
from diffulex.nn.decoder import DecoderForDiffusionLM
from fixtures.families import DENSE_FAMILIES, family_builder, family_config
from fixtures.moe_families import moe_builder
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


def test_routed_experts_are_whole(tmp_path: Path) -> None:
    moe_builder("sdar_moe").write(tmp_path)
    _, spec, _ = detect(tmp_path, "sdar_moe")
    with pytest.raises(ConfigError, match=r"expected 1 for a model with routed experts, got 2"):
        DecoderForDiffusionLM(spec, torch.float32, "meta", Shard(0, 2))
