# SPDX-License-Identifier: Apache-2.0
"""Records of rows whose columns several ranks have, against those of whole rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex.config.config import Config
from diffulex.config.types import ModelFacts
from diffulex.distributed.comm import LOCAL
from diffulex.distributed.records import SharedHead
from diffulex.families.spec import ModelSpec
from diffulex.samplers.inputs import CarryArrays, RowFilters, SamplerInputs
from diffulex.samplers.row_stage import RowPenalties, RowRecords, RowStage
from fixtures.thread_comm import ThreadComm, run_ranks

VOCAB, MASK, ROWS, TOP_K = 600, 7, 9, 4
#: Uneven, cut where two of the rows have ties.
WIDTHS = ((256, 344), (192, 192, 216), (144, 144, 144, 168))


def stage_of(**settings: Any) -> RowStage:
    spec = ModelSpec(
        "sdar", VOCAB, 8, 8, 1, 1, 1, 8, 64, 1e-6, 1e4, 8, block_size=4, mask_token_id=MASK
    )
    facts = ModelFacts("sdar", Path("/x"), spec, {}, tokenizer_vocab_size=VOCAB - 3)
    options = {name: settings.pop(name) for name in ("top_k", "softcap") if name in settings}
    values = {"device": "cpu", "block_size": 4, "page_size": 4, "max_model_len": 32, **settings}
    return RowStage(Config.resolve("x", facts, values), **options)


def logits() -> torch.Tensor:
    """Rows with a peak, with ties over all ranks, with the likeliest id forbidden, and none finite."""
    rows = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    rows[0, 400] = 20
    rows[1, [3, 200, 300, 599 - 4]] = 15
    rows[2, MASK] = 30
    rows[3, 598] = 30  # past the ids of the tokenizer
    rows[4] = 0
    rows[5] = torch.nan
    rows[6, :300] = -torch.inf
    return rows


def inputs_of(values: torch.Tensor, **parts: Any) -> SamplerInputs:
    """Only what concerns rows; the blocks are not looked at."""
    names = ("inv_temperature", "uniforms", "tokens", "row_index", "editable_start", "valid_len")
    names += ("gate", "accept_threshold", "open_steps", "total_steps", "write_ids", "confidence")
    names += ("masks_left", "flags")
    return SamplerInputs(logits=values, **(dict.fromkeys(names) | parts))  # type: ignore[arg-type]


def columns_of(rows: torch.Tensor, rank: int, widths: tuple[int, ...]) -> torch.Tensor:
    return rows.split(widths, dim=1)[rank].contiguous()


def copied(records: RowRecords) -> RowRecords:
    return RowRecords(*(None if part is None else part.clone() for part in records))


def shared(widths: tuple[int, ...], steps: list[Any], keeps: bool = False, **settings: Any) -> Any:
    """Records of the last of some steps (inputs, penalties), on every rank."""

    def work(comm: ThreadComm) -> RowRecords:
        stage = stage_of(**settings)
        stage.share(SharedHead(comm, widths))
        if keeps:
            stage.keep_rows(16, 4)
        for inputs, penalties in steps:
            own = replace(inputs, logits=columns_of(inputs.logits, comm.rank, widths))
            records = stage.run(own, penalties)
        return copied(records)

    return run_ranks(len(widths), work)


def whole(steps: list[Any], keeps: bool = False, **settings: Any) -> RowRecords:
    stage = stage_of(**settings)
    if keeps:
        stage.keep_rows(16, 4)
    for inputs, penalties in steps:
        records = stage.run(inputs, penalties)
    return copied(records)


def assert_same(actual: RowRecords, expected: RowRecords, *, atol: float) -> None:
    assert torch.equal(actual.ids, expected.ids)
    torch.testing.assert_close(actual.stats, expected.stats, atol=atol, rtol=atol, equal_nan=True)
    if expected.topk_ids is None:
        assert actual.topk_ids is None
        return
    assert torch.equal(actual.topk_ids, expected.topk_ids)
    torch.testing.assert_close(actual.topk_probs, expected.topk_probs, atol=atol, rtol=atol)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": TOP_K},
        {"softcap": 5.0},
        {"mask_suppression": "renormalize"},
        {"suppress_token_ids": [400, 3], "demote_token_ids": [200]},
    ],
)
def test_merged_records(widths: tuple[int, ...], settings: dict[str, Any]) -> None:
    steps = [(inputs_of(logits()), None)]
    expected = whole(steps, **settings)
    assert expected.ids.tolist().count(-1) == 1
    results = shared(widths, steps, **settings)
    for actual in results:
        assert_same(actual, expected, atol=4e-6)
        assert torch.equal(actual.stats, results[0].stats)


def test_rows_that_nothing_reads_have_no_record() -> None:
    rows = torch.arange(ROWS, dtype=torch.int32)
    is_read = rows % 3 != 1
    expected = whole([(inputs_of(logits()), None)], top_k=TOP_K)
    steps = [(inputs_of(logits(), rows=torch.where(is_read, rows, -1)), None)]
    for actual in (whole(steps, top_k=TOP_K), *shared(WIDTHS[2], steps, top_k=TOP_K)):
        assert actual.ids[~is_read].eq(-1).all()
        parts = (None if part is None else part[is_read] for part in actual)
        wanted = (None if part is None else part[is_read] for part in expected)
        assert_same(RowRecords(*parts), RowRecords(*wanted), atol=4e-6)


def test_penalties_name_ids_of_the_whole_vocabulary() -> None:
    penalties = RowPenalties(
        torch.tensor([400, 3, -1, -1, 599, -1, 300, 5, 6]), torch.full((ROWS,), 30.0)
    )
    steps = [(inputs_of(logits()), penalties)]
    expected = whole(steps)
    assert expected.ids[0] != 400
    for actual in shared(WIDTHS[1], steps):
        assert_same(actual, expected, atol=4e-6)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_draws_are_those_of_whole_rows(top_p: float) -> None:
    rows = logits()
    draws = torch.rand(ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    filters = RowFilters(
        torch.zeros(ROWS, dtype=torch.int32), torch.full((ROWS,), top_p), torch.zeros(ROWS)
    )
    inputs = inputs_of(
        rows,
        inv_temperature=torch.tensor([0.5, 0.0] * 4 + [1.0]),
        uniforms=draws,
        filters=filters if top_p < 1 else None,
    )
    expected = whole([(inputs, None)])
    for actual in shared(WIDTHS[1], [(inputs, None)]):
        assert_same(actual, expected, atol=0.0)


@pytest.mark.parametrize("is_sampled", [False, True])
def test_saved_rows(is_sampled: bool) -> None:
    """The record of a slot comes from an earlier step; a request that draws needs its logits."""

    def carry(source: list[int], last: list[int]) -> CarryArrays:
        return CarryArrays(
            last_row_index=torch.tensor(last, dtype=torch.int32),
            request_slots=torch.tensor([2], dtype=torch.int32),
            logits_source=torch.tensor(source, dtype=torch.int32),
            num_saved_sources=sum(slot >= 0 for slot in source),
            has_sampled_requests=is_sampled,
        )

    rows = logits()
    steps = [
        (inputs_of(rows, carry=carry([-1] * ROWS, [1])), None),
        (inputs_of(rows.flip(0), carry=carry([2] + [-1] * (ROWS - 1), [-1])), None),
    ]
    expected = whole(steps, keeps=True)
    assert expected.ids[16 + 2] == 3
    for actual in shared(WIDTHS[0], steps, keeps=True):
        assert torch.equal(actual.ids[[*range(ROWS), 18]], expected.ids[[*range(ROWS), 18]])
        atol = 0.0 if is_sampled else 4e-6
        for part in (slice(0, ROWS), slice(18, 19)):
            torch.testing.assert_close(
                actual.stats[part], expected.stats[part], atol=atol, rtol=atol, equal_nan=True
            )


def test_one_rank_is_not_shared() -> None:
    assert SharedHead.of(SimpleNamespace()) is None
    assert SharedHead.of(SimpleNamespace(comm=LOCAL)) is None


def test_rows_of_the_first_rank_are_those_of_all() -> None:
    widths = WIDTHS[0]

    def work(comm: ThreadComm) -> Any:
        head = SharedHead(comm, widths)
        own = columns_of(logits(), comm.rank, widths)
        assert not head.is_whole(own)
        rows = head.whole_rows(own)
        if comm.rank == 0:
            rows[:, 5] = -30000.0
        head.send_first(rows)
        return rows

    expected = logits()
    expected[:, 5] = -30000.0
    for rows in run_ranks(len(widths), work):
        torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)
