# SPDX-License-Identifier: Apache-2.0
"""Merged input embeddings against fp64 references written from the sampler specification."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from diffulex import ops
from diffulex.ops.token_merge import MergeKind
from tolerance import assert_accurate, to_numpy

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
WIDTHS = pytest.mark.parametrize("width", [1, 7, 64, 130, 2816])
KINDS = pytest.mark.parametrize(
    ("kind", "renormalize"),
    [
        (MergeKind.DMAX_TOPK, False),
        (MergeKind.DMAX_TOPK, True),
        (MergeKind.ITER_SMOOTH_TOPK, False),
    ],
)


@dataclass
class Case:
    """One call; `terms` are the (id, probability) pairs that count, per row."""

    hidden: torch.Tensor
    embedding: torch.Tensor
    mask: torch.Tensor
    ids: torch.Tensor
    probs: torch.Tensor
    residual: torch.Tensor
    mask_id: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.hidden, self.embedding, self.mask, self.ids, self.probs, self.residual)

    def expected(self, kind: int, renormalize: bool, weight: float) -> np.ndarray:
        """The formulas of the specification, in fp64, from the stored inputs."""
        hidden, table = to_numpy(self.hidden), to_numpy(self.embedding)
        out = hidden.copy()
        for row in range(hidden.shape[0]):
            if not self.mask[row]:
                continue
            terms = list(zip(self.ids[row].tolist(), self.probs[row].tolist(), strict=True))
            if kind == MergeKind.DMAX_TOPK:
                terms.append((self.mask_id, float(self.residual[row])))
            terms = [(token, p) for token, p in terms if token >= 0 and p != 0.0]
            mix = sum((p * table[token] for token, p in terms), np.zeros(hidden.shape[1]))
            if kind == MergeKind.ITER_SMOOTH_TOPK:
                out[row] = hidden[row] + weight * mix
                continue
            if renormalize:
                target = sum(p * np.linalg.norm(table[token]) for token, p in terms)
                mix = mix * (target / (np.linalg.norm(mix) + 1e-6))
            out[row] = mix
        return out


def make(
    dtype: torch.dtype, device: str, width: int, top_k: int = 3, rows: int = 9, vocab: int = 50
) -> Case:
    generator = torch.Generator().manual_seed(width * 31 + top_k)
    table = torch.randn(vocab, width, generator=generator)
    ids = torch.randint(0, vocab, (rows, top_k), generator=generator)
    probs = torch.rand(rows, top_k, generator=generator) / top_k
    ids[2, 0] = -1  # no id
    probs[4, -1] = 0.0  # padding of a short list
    mask = torch.rand(rows, generator=generator) < 0.7
    mask[:5] = True
    return Case(
        torch.randn(rows, width, generator=generator).to(dtype).to(device),
        table.to(dtype).to(device),
        mask.to(torch.uint8).to(device),
        ids.to(device),
        probs.to(device),
        (1 - probs.sum(1)).clamp(min=0).to(device),
        vocab - 1,
    )


def plain(case: Case, kind: int, renormalize: bool, weight: float) -> torch.Tensor:
    """The same math in the dtype of the table."""
    table = case.embedding
    out = case.hidden.clone()
    for row in case.mask.nonzero().flatten().tolist():
        keep = case.ids[row] >= 0
        ids, probs = case.ids[row][keep], case.probs[row][keep].to(table.dtype)
        if kind == MergeKind.DMAX_TOPK:
            ids = torch.cat([ids, torch.tensor([case.mask_id], device=ids.device)])
            probs = torch.cat([probs, case.residual[row : row + 1].to(table.dtype)])
        vectors = table[ids]
        mix = (probs[:, None] * vectors).sum(0)
        if kind == MergeKind.ITER_SMOOTH_TOPK:
            out[row] = case.hidden[row] + weight * mix
        else:
            target = (probs * vectors.norm(dim=1)).sum()
            out[row] = mix * (target / (mix.norm() + 1e-6)) if renormalize else mix
    return out


@pytest.mark.every(7)
@DTYPES
@WIDTHS
@KINDS
@pytest.mark.parametrize("top_k", [1, 4, 16])
def test_matches_the_formula(
    device: str, dtype: torch.dtype, width: int, kind: int, renormalize: bool, top_k: int
) -> None:
    case = make(dtype, device, width, top_k)
    expected = case.expected(kind, renormalize, 0.75)
    base = plain(case, kind, renormalize, 0.75)
    before = case.hidden.clone()
    numbers = {"mask_token_id": case.mask_id, "merge_kind": kind, "weight": 0.75}
    ops.token_merge_embed(*case.tensors, renormalize=renormalize, **numbers)
    assert_accurate(case.hidden, expected, base)
    untouched = case.mask == 0
    assert torch.equal(case.hidden[untouched], before[untouched])


def test_rounds_once(device: str) -> None:
    case = make(torch.bfloat16, device, 512, 4, rows=64)
    expected = case.expected(MergeKind.DMAX_TOPK, True, 1.0)
    ops.token_merge_embed(*case.tensors, mask_token_id=case.mask_id, renormalize=True)
    merged = case.mask.bool().cpu().numpy()
    error = np.abs(to_numpy(case.hidden) - expected)[merged]
    half_ulp = np.abs(expected)[merged] * torch.finfo(torch.bfloat16).eps / 2
    assert (error <= half_ulp * (1 + 1e-3) + 1e-6).all()


# Worked by hand: hidden 2, E[1] = (3, 4), E[2] = (1, 0), E[7] = (4, -3), mask token 7.
VECTORS = [
    ([1], [0.92], 0.08, False, (3.08, 3.44)),
    ([1], [0.92], 0.08, True, (3.335240, 3.725072)),
    ([2], [0.60], 0.40, False, (2.2, -1.2)),
    ([2], [0.60], 0.40, True, (2.282528, -1.245015)),
    ([2, 1], [0.6, 0.1], 0.3, False, (2.1, -0.5)),
    ([2, 1], [0.6, 0.1], 0.3, True, (2.529295, -0.602213)),
]


def small_table(device: str) -> torch.Tensor:
    table = torch.full((8, 2), torch.nan, device=device)
    table[1] = torch.tensor([3.0, 4.0])
    table[2] = torch.tensor([1.0, 0.0])
    table[7] = torch.tensor([4.0, -3.0])
    return table


@pytest.mark.parametrize(("ids", "probs", "residual", "renormalize", "expected"), VECTORS)
def test_worked_vectors(
    device: str,
    ids: list[int],
    probs: list[float],
    residual: float,
    renormalize: bool,
    expected: tuple[float, float],
) -> None:
    hidden = torch.full((1, 2), torch.nan, device=device)
    ops.token_merge_embed(
        hidden,
        small_table(device),
        torch.ones(1, dtype=torch.uint8, device=device),
        torch.tensor([ids], device=device),
        torch.tensor([probs], device=device),
        torch.tensor([residual], device=device),
        mask_token_id=7,
        renormalize=renormalize,
    )
    assert hidden[0].tolist() == pytest.approx(expected, abs=2e-6)


def test_worked_vector_of_iterative_smoothing(device: str) -> None:
    hidden = torch.tensor([[1.0, 0.0]], device=device)  # E[2]
    ops.token_merge_embed(
        hidden,
        small_table(device),
        torch.ones(1, dtype=torch.uint8, device=device),
        torch.tensor([[2]], device=device),
        torch.tensor([[0.6]], device=device),
        torch.tensor([0.4], device=device),
        mask_token_id=7,
        merge_kind=MergeKind.ITER_SMOOTH_TOPK,
        weight=1.0,
    )
    assert hidden[0].tolist() == pytest.approx((1.6, 0.0), abs=1e-6)


def test_a_zero_mix_stays_zero(device: str) -> None:
    # The norm of the sum is 0: the epsilon keeps the quotient finite.
    table = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], device=device)
    hidden = torch.full((1, 2), torch.nan, device=device)
    ops.token_merge_embed(
        hidden,
        table,
        torch.ones(1, dtype=torch.uint8, device=device),
        torch.tensor([[0]], device=device),
        torch.tensor([[0.5]], device=device),
        torch.tensor([0.5], device=device),
        mask_token_id=1,
        renormalize=True,
    )
    assert hidden.tolist() == [[0.0, 0.0]]


@KINDS
def test_nothing_else_is_read(device: str, kind: int, renormalize: bool) -> None:
    clean = make(torch.float32, device, 64)
    poisoned = make(torch.float32, device, 64)
    used = {poisoned.mask_id} if kind == MergeKind.DMAX_TOPK else set()
    for row in range(poisoned.hidden.shape[0]):
        if poisoned.mask[row]:
            pairs = zip(poisoned.ids[row].tolist(), poisoned.probs[row].tolist(), strict=True)
            used |= {token for token, p in pairs if token >= 0 and p != 0.0}
            if kind == MergeKind.DMAX_TOPK:
                poisoned.hidden[row] = torch.nan
        else:
            # Values of a row without descriptor do not matter; ids stay legal for checking builds.
            poisoned.probs[row] = torch.nan
            poisoned.residual[row] = torch.nan
    for token in set(range(poisoned.embedding.shape[0])) - used:
        poisoned.embedding[token] = torch.nan
    for case in (clean, poisoned):
        ops.token_merge_embed(
            *case.tensors, mask_token_id=case.mask_id, merge_kind=kind, renormalize=renormalize
        )
    assert torch.equal(clean.hidden, poisoned.hidden)


def test_all_false_reads_nothing(device: str) -> None:
    case = make(torch.bfloat16, device, 64)
    case.mask.zero_()
    case.embedding.fill_(torch.nan)
    before = case.hidden.clone()
    ops.token_merge_embed(*case.tensors, mask_token_id=case.mask_id, renormalize=True)
    assert torch.equal(case.hidden, before)


@DTYPES
def test_views_and_unaligned_rows(device: str, dtype: torch.dtype) -> None:
    case = make(dtype, device, 64)
    expected = make(dtype, device, 64)
    wide = torch.full((9, 131), torch.nan, dtype=dtype, device=device)
    table = torch.full((50, 77), torch.nan, dtype=dtype, device=device)
    wide[:, 3:67] = case.hidden
    table[:, 1:65] = case.embedding
    numbers = {"mask_token_id": case.mask_id, "renormalize": True}
    ops.token_merge_embed(wide[:, 3:67], table[:, 1:65], *case.tensors[2:], **numbers)
    ops.token_merge_embed(*expected.tensors, **numbers)
    torch.testing.assert_close(wide[:, 3:67], expected.hidden)
    assert wide[:, :3].isnan().all()
    assert wide[:, 67:].isnan().all()


def test_bool_flags(device: str) -> None:
    first, second = (make(torch.float32, device, 16) for _ in range(2))
    second.mask = second.mask.bool()
    for case in (first, second):
        ops.token_merge_embed(*case.tensors, mask_token_id=case.mask_id)
    assert torch.equal(first.hidden, second.hidden)


def test_repeats_bit_for_bit(device: str) -> None:
    results = []
    for _ in range(20):
        case = make(torch.bfloat16, device, 2816, 8)
        ops.token_merge_embed(*case.tensors, mask_token_id=case.mask_id, renormalize=True)
        results.append(case.hidden)
    assert all(torch.equal(results[0], result) for result in results)


@DTYPES
@KINDS
@pytest.mark.parametrize("cuts", [[0, 50], [0, 20, 50], [0, 7, 11, 49, 50]])
def test_shards_give_the_whole(
    device: str, dtype: torch.dtype, kind: int, renormalize: bool, cuts: list[int]
) -> None:
    case = make(dtype, device, 130, 4)
    expected = case.expected(kind, renormalize, 0.5)
    base = plain(case, kind, renormalize, 0.5)
    total = torch.zeros(9, 131, device=device)
    for start, stop in itertools.pairwise(cuts):
        part = torch.full((9, 131), torch.nan, device=device)
        ops.token_merge_partial(
            case.embedding[start:stop],
            case.mask,
            case.ids,
            case.probs,
            case.residual,
            mask_token_id=case.mask_id,
            merge_kind=kind,
            vocab_start=start,
            out=part,
        )
        assert (part[case.mask == 0] == 0).all()
        total += part
    ops.token_merge_finalize(
        total, case.mask, case.hidden, merge_kind=kind, renormalize=renormalize, weight=0.5
    )
    assert_accurate(case.hidden, expected, base)


def test_partial_holds_sums_and_norms(device: str) -> None:
    case = make(torch.float32, device, 33, 2)
    part = ops.token_merge_partial(*case.tensors[1:], mask_token_id=case.mask_id)
    table = to_numpy(case.embedding)
    for row in case.mask.nonzero().flatten().tolist():
        ids, probs = [*case.ids[row].tolist(), case.mask_id], [*case.probs[row].tolist()]
        probs.append(float(case.residual[row]))
        norms = sum(
            p * np.linalg.norm(table[token]) for token, p in zip(ids, probs) if token >= 0 and p
        )
        assert math.isclose(float(part[row, -1]), norms, rel_tol=1e-5)


def test_id_beyond_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(torch.float32, "cpu", 16)
    case.ids[3, 1] = 50
    with pytest.raises(
        RuntimeError,
        match=r"^diffulex::token_merge_embed: topk_ids\[10\]: expected an id below 50, got 50$",
    ):
        ops.token_merge_embed(*case.tensors, mask_token_id=case.mask_id)
    # No row was touched before the check.
    assert torch.equal(case.hidden, make(torch.float32, "cpu", 16).hidden)


@pytest.mark.cuda
def test_id_beyond_the_table_is_skipped_on_cuda() -> None:
    case, other = make(torch.float32, "cuda", 16), make(torch.float32, "cuda", 16)
    case.ids[3, 1] = 50
    other.ids[3, 1] = -1
    for item in (case, other):
        ops.token_merge_embed(*item.tensors, mask_token_id=item.mask_id, renormalize=True)
    assert torch.equal(case.hidden, other.hidden)


@pytest.mark.cuda
def test_wide_rows_are_an_error_on_cuda() -> None:
    case = make(torch.float32, "cuda", 32769)
    with pytest.raises(RuntimeError, match="hidden: expected at most 32768 columns on cuda"):
        ops.token_merge_embed(*case.tensors, mask_token_id=case.mask_id)
