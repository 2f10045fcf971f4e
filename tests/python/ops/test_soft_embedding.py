# SPDX-License-Identifier: Apache-2.0
"""Expected embeddings against fp64 references written from the kernel and sampler specifications."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import sampling_vectors
from diffulex import ops
from tolerance import assert_accurate, to_numpy

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
#: A score of 40 carries an error of 40 * 2^-24 into its exponential, times the normaliser of 3 and
#: table entries of up to 4.
SLACK = 6e-5
LSE = int(ops.StatsColumn.LOGSUMEXP)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator) * scale


def expected(
    logits: torch.Tensor,
    table: torch.Tensor,
    inv_temperature: torch.Tensor | None,
    softcap: float,
    limit: int | None = None,
) -> np.ndarray:
    """softmax(softcap(l) / T) . E in fp64."""
    scores = to_numpy(logits)
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    if inv_temperature is not None:
        scores = scores * to_numpy(inv_temperature)[:, None]
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return weights[:, :limit] @ to_numpy(table)[:limit]


def stats_of(
    logits: torch.Tensor, inv_temperature: torch.Tensor | None, softcap: float
) -> torch.Tensor:
    uniforms = None
    if inv_temperature is not None:
        uniforms = torch.full((logits.shape[0],), 0.5, dtype=torch.float64, device=logits.device)
    return ops.token_stats(
        logits, inv_temperature=inv_temperature, uniforms=uniforms, softcap=softcap
    ).stats


def plain(
    logits: torch.Tensor, table: torch.Tensor, inv: torch.Tensor | None, softcap: float
) -> torch.Tensor:
    """The same with torch, probabilities rounded to the dtype of the table."""
    scores = logits.float()
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if inv is not None:
        scores = scores * inv[:, None]
    return scores.softmax(1).to(table.dtype).float() @ table.float()


@DTYPES
@pytest.mark.parametrize(
    ("rows", "vocab", "hidden"),
    [(1, 8, 2), (3, 100, 33), (17, 2049, 64), (130, 300, 136), (200, 5000, 40)],
)
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_matches_softmax_times_table(
    device: str, dtype: torch.dtype, rows: int, vocab: int, hidden: int, softcap: float
) -> None:
    logits = normal(rows, vocab, scale=6.0).to(device)
    table = normal(vocab, hidden, seed=1).to(dtype).to(device)
    inv = torch.linspace(1.25, 2.5, rows, device=device)
    stats = stats_of(logits, inv, softcap)
    out = torch.full((rows, hidden), torch.nan, device=device)
    ops.soft_embedding(
        logits, stats[:, LSE], table, inv_temperature=inv, normalizer=3.0, softcap=softcap, out=out
    )
    want = 3.0 * expected(logits, table, inv, softcap)
    base = 3.0 * plain(logits, table, inv, softcap)
    assert_accurate(out, want, base, slack=SLACK)


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16, torch.float16])
@DTYPES
def test_logits_have_a_dtype_of_their_own(
    device: str, logits_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    logits = normal(5, 700, scale=4.0).to(logits_dtype).to(device)
    table = normal(700, 48).to(dtype).to(device)
    out = ops.soft_embedding(logits, stats_of(logits, None, 30.0)[:, LSE], table, softcap=30.0)
    want = expected(logits, table, None, 30.0)
    assert_accurate(out, want, plain(logits, table, None, 30.0), slack=SLACK)


def test_worked_vector(device: str) -> None:
    # Worked by hand: R0 at T = .8, W[v] = (.2 v, .2 v + .1), normaliser sqrt(2).
    logits = sampling_vectors.logits(device)
    table = torch.tensor([(0.2 * v, 0.2 * v + 0.1) for v in range(8)], device=device)
    inv = torch.full((4,), 1 / 0.8, device=device)
    lse = stats_of(logits, inv, 0.0)[:, LSE]
    out = ops.soft_embedding(logits, lse, table, inv_temperature=inv)
    assert out[0].tolist() == pytest.approx((0.212698, 0.312698), abs=1e-6)
    out = ops.soft_embedding(logits, lse, table, inv_temperature=inv, normalizer=math.sqrt(2))
    assert out[0].tolist() == pytest.approx((0.300800, 0.442221), abs=1e-6)


def test_softcap_vector(device: str) -> None:
    # Worked by hand: a raw logit of 60 counts as 30 tanh 2 = 28.920827.
    logits = torch.tensor([[60.0, 28.0]], device=device)
    table = torch.tensor([[1.0], [0.0]], device=device)
    scores = [28.920827, 30 * math.tanh(28 / 30)]
    lse = math.log(sum(math.exp(s - 28) for s in scores)) + 28
    out = ops.soft_embedding(logits, torch.tensor([lse], device=device), table, softcap=30.0)
    assert float(out) == pytest.approx(math.exp(scores[0] - lse), abs=1e-5)


def test_rows_that_are_not_valid_are_zero(device: str) -> None:
    logits = normal(6, 90).to(device)
    table = normal(90, 16).to(device)
    lse = torch.logsumexp(logits, 1)
    whole = ops.soft_embedding(logits, lse, table)
    valid = torch.tensor([1, 0, 1, 0, 0, 1], dtype=torch.uint8, device=device)
    logits[valid == 0] = torch.nan
    lse[valid == 0] = torch.nan
    for flags in (valid, valid.bool()):
        out = torch.full((6, 16), torch.nan, device=device)
        ops.soft_embedding(logits, lse, table, row_valid=flags, out=out)
        assert torch.equal(out[valid == 1], whole[valid == 1])
        assert (out[valid == 0] == 0).all()
    out = ops.soft_embedding(logits, lse, table, row_valid=torch.zeros_like(valid))
    assert (out == 0).all()


def test_bad_logits_have_no_probability(device: str) -> None:
    logits = normal(2, 40).to(device)
    table = normal(40, 8).to(device)
    keep = torch.ones(40, dtype=torch.bool)
    keep[[3, 17]] = False
    clean = logits[:, keep]
    logits[:, 3] = torch.nan
    logits[:, 17] = -torch.inf
    lse = torch.logsumexp(clean, 1)
    out = ops.soft_embedding(logits, lse, table, softcap=0.0)
    assert_accurate(
        out, expected(clean, table[keep], None, 0.0), plain(clean, table[keep], None, 0)
    )
    # The only finite candidate of a row with +inf is that one.
    logits[0, 5] = torch.inf
    inv = torch.full((2,), 2.0, device=device)
    stats = stats_of(logits, inv, 0.0)
    out = ops.soft_embedding(logits, stats[:, LSE], table, inv_temperature=inv)
    torch.testing.assert_close(out[0], table[5])


def test_greedy_rows_count_as_temperature_one(device: str) -> None:
    logits = normal(3, 50).to(device)
    table = normal(50, 8).to(device)
    lse = torch.logsumexp(logits, 1)
    zero = torch.zeros(3, device=device)
    out = ops.soft_embedding(logits, lse, table, inv_temperature=zero)
    assert torch.equal(out, ops.soft_embedding(logits, lse, table))


@pytest.mark.parametrize("limit", [0, 1, 63, 90])
def test_vocab_limit(device: str, limit: int) -> None:
    logits = normal(3, 90).to(device)
    table = normal(90, 8).to(device)
    table[limit:] = 1e6  # not NaN: probabilities of 0 are multiplied
    lse = torch.logsumexp(logits, 1)
    out = ops.soft_embedding(logits, lse, table, vocab_limit=limit)
    want = expected(logits, table, None, 0.0, limit)
    np.testing.assert_allclose(to_numpy(out), want, rtol=1e-4, atol=1e-5)


@DTYPES
def test_vocabulary_shards_add_up(device: str, dtype: torch.dtype) -> None:
    logits = normal(7, 500, scale=3.0).to(device)
    table = normal(500, 40).to(dtype).to(device)
    lse = torch.logsumexp(logits[:, :480], 1)
    whole = ops.soft_embedding(logits, lse, table, vocab_limit=480)
    total = torch.zeros_like(whole)
    for start, stop in ((0, 100), (100, 470), (470, 500)):
        total += ops.soft_embedding(
            logits[:, start:stop], lse, table[start:stop], vocab_limit=480, vocab_start=start
        )
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)


@DTYPES
def test_views(device: str, dtype: torch.dtype) -> None:
    logits = normal(5, 300).to(device)
    table = normal(300, 64).to(dtype).to(device)
    lse = torch.logsumexp(logits, 1)
    want = ops.soft_embedding(logits, lse, table)
    wide_logits = torch.full((5, 333), torch.nan, device=device)
    wide_logits[:, 7:307] = logits
    wide_table = torch.full((300, 67), torch.nan, dtype=dtype, device=device)
    wide_table[:, 3:67] = table
    wide_out = torch.full((5, 70), torch.nan, device=device)
    ops.soft_embedding(wide_logits[:, 7:307], lse, wide_table[:, 3:67], out=wide_out[:, 2:66])
    torch.testing.assert_close(wide_out[:, 2:66], want, rtol=1e-5, atol=1e-5)
    assert wide_out[:, :2].isnan().all()
    assert wide_out[:, 66:].isnan().all()


def test_rows_do_not_depend_on_each_other(device: str) -> None:
    logits = normal(70, 3000, scale=3.0).to(device)
    table = normal(3000, 72).to(device)
    lse = torch.logsumexp(logits, 1)
    whole = ops.soft_embedding(logits, lse, table)
    for _ in range(5):
        assert torch.equal(ops.soft_embedding(logits, lse, table), whole)
    if device == "cpu":  # on CUDA the number of splits follows the number of rows
        assert torch.equal(ops.soft_embedding(logits[11:12], lse[11:12], table)[0], whole[11])


@DTYPES
@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 77, 2048, 5000])
def test_probabilities(
    device: str, dtype: torch.dtype, logits_dtype: torch.dtype, vocab: int
) -> None:
    """Of all columns, and of a part of them within others, which stay; the last two ids do not exist, and
    neither do those of the last row."""
    logits = normal(5, vocab, scale=4.0).to(logits_dtype).to(device)
    inv = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0], device=device)
    stats = stats_of(logits, inv, 30.0)[:, LSE]
    valid = torch.tensor([1, 1, 1, 1, 0], dtype=torch.uint8, device=device)
    scores = 30.0 * np.tanh(to_numpy(logits) / 30.0)
    scores *= np.where(to_numpy(inv) == 0, 1.0, to_numpy(inv))[:, None]
    want = np.exp(scores - to_numpy(stats)[:, None])
    want[:, max(vocab - 2, 0) :] = 0
    want[4] = 0
    step = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
    for start, offset in ((0, 0), (vocab // 3, 3), (vocab // 64 * 32, 8)):
        whole = torch.full((5, vocab - start + 16), torch.nan, dtype=dtype, device=device)
        out = whole[:, offset : offset + vocab - start]
        ops.soft_probabilities(
            logits[:, start:],
            stats,
            inv_temperature=inv,
            row_valid=valid,
            out=out,
            softcap=30.0,
            vocab_limit=7 + max(vocab - 2, 0),
            vocab_start=7 + start,
        )
        error = np.abs(to_numpy(out) - want[:, start:])
        assert (error <= step * want[:, start:] + 2.0**-24 + 4e-5 * want[:, start:]).all()
        assert whole[:, :offset].isnan().all()
        assert whole[:, offset + vocab - start :].isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_of_the_library_and_our_own(dtype: torch.dtype) -> None:
    """They differ by the order of their sums; invalid rows are zeros of both, and more scratch than is
    needed changes no bit."""
    logits = (normal(130, 140_001) * 3).cuda()  # several chunks
    table = normal(140_001, 136).to(dtype).cuda()
    lse = torch.logsumexp(logits, 1)
    valid = torch.arange(130, device="cuda") % 5 != 0
    kwargs: dict[str, Any] = {"row_valid": valid, "normalizer": -2.0}
    library = ops.soft_embedding(logits, lse, table, **kwargs)
    workspace = torch.full((10**8,), 255, dtype=torch.uint8, device="cuda")
    again = ops.soft_embedding(logits, lse, table, workspace=workspace, **kwargs)
    assert torch.equal(again, library)
    with ops.batch_invariant():
        own = ops.soft_embedding(logits, lse, table, **kwargs)
    torch.testing.assert_close(library, own, rtol=1e-4, atol=1e-4)
    assert (library[::5] == 0).all()


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"normalizer": math.nan}, "normalizer: expected a finite number"),
        ({"embedding": torch.zeros(80, 8).bfloat16()}, "embedding: expected shape"),
        ({"embedding": torch.zeros(70, 8).bfloat16()}, "embedding: expected shape"),
        ({"out": torch.zeros(3, 8).bfloat16()}, "out: expected dtype float32"),
        ({"out": torch.zeros(4, 8)}, "out: expected shape"),
        ({"lse": torch.zeros(4)}, "lse: expected shape"),
    ],
    ids=lambda bad: next(iter(bad)) if isinstance(bad, dict) else None,
)
def test_arguments_are_refused_by_name(device: str, bad: dict[str, Any], text: str) -> None:
    """Whichever product would take them."""
    good = {"logits": torch.zeros(3, 77), "lse": torch.zeros(3)}
    arguments: dict[str, Any] = {**good, "embedding": torch.zeros(77, 8).bfloat16(), **bad}
    placed = {
        name: each.to(device) if isinstance(each, torch.Tensor) else each
        for name, each in arguments.items()
    }
    with pytest.raises(RuntimeError, match=text):
        ops.soft_embedding(**placed)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_several_chunks_and_dirty_scratch(dtype: torch.dtype) -> None:
    # 300 rows x 70,000 columns do not fit one chunk of 32 MiB in any dtype.
    rows, vocab, hidden = 300, 70_000, 136
    logits = (normal(rows, vocab) * 4).cuda()
    table = normal(vocab, hidden).to(dtype).cuda()
    lse = torch.logsumexp(logits, 1)
    name = str(dtype).removeprefix("torch.")
    needed = ops.soft_embedding_workspace_bytes(rows, vocab, hidden, name)
    workspace = torch.full((needed,), 255, dtype=torch.uint8, device="cuda")
    out = ops.soft_embedding(logits, lse, table, workspace=workspace)
    want = logits.double().softmax(1) @ table.double()
    rounded = logits.softmax(1).to(dtype).double() @ table.double()
    error = (out - want).abs().max()
    assert error <= 2 * (rounded - want).abs().max() + 1e-4


@pytest.mark.cuda
def test_small_workspace_names_the_needed_bytes() -> None:
    logits, table = torch.zeros(4, 5000, device="cuda"), torch.zeros(5000, 64, device="cuda")
    needed = ops.soft_embedding_workspace_bytes(4, 5000, 64, "float32")
    workspace = torch.zeros(256, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match=f"workspace: expected at least {needed} bytes, got 256"):
        ops.soft_embedding(logits, torch.zeros(4, device="cuda"), table, workspace=workspace)


def test_no_scratch_on_the_cpu() -> None:
    assert ops.soft_embedding_workspace_bytes(256, 262144, 2816, "bfloat16", "cpu") == 0
    assert ops.soft_embedding_workspace_bytes(256, 262144, 2816, "bfloat16", "cuda") > 0
    with pytest.raises(ValueError, match="dtype: expected float32, float16 or bfloat16, got int8"):
        ops.soft_embedding_workspace_bytes(1, 1, 1, "int8")
