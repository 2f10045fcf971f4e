# SPDX-License-Identifier: Apache-2.0
"""Attention over tokens of several ranks, which are threads here, beside attention over all tokens."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from diffulex.omni import ring_attention  # noqa: E402
from diffulex.omni.attention import seam  # noqa: E402
from diffulex.omni.attention.kernels import TorchSdpa  # noqa: E402
from diffulex.omni.config_table import KernelConfig  # noqa: E402
from diffulex.omni.grid import Grid  # noqa: E402
from diffulex.omni.ring_attention import SequenceAttention, attend_with_lse  # noqa: E402

WAIT_S = 120
SDPA = TorchSdpa(KernelConfig())


class Threads:
    """What attention uses of torch.distributed; a group is the list of its ranks."""

    isend, irecv = "isend", "irecv"

    def __init__(self, world):
        self.boxes = {(a, b): SimpleQueue() for a in range(world) for b in range(world)}
        self.own = threading.local()
        self.gathers = Counter()

    def _exchange(self, parts, group):
        rank = self.own.rank
        for peer, part in zip(group, parts, strict=True):
            self.boxes[rank, peer].put(part.clone())
        return [self.boxes[peer, rank].get(timeout=WAIT_S) for peer in group]

    def all_gather(self, found, own, group):
        self.gathers[self.own.rank] += 1
        for target, got in zip(found, self._exchange([own] * len(group), group), strict=True):
            target.copy_(got)

    def all_to_all_single(self, got, sent, into, out, group):
        parts = self._exchange(sent.split(out), group)
        assert [part.numel() for part in parts] == into
        got.copy_(torch.cat(parts))

    def P2POp(self, kind, tensor, peer, _group):  # noqa: N802 (a name of torch)
        return kind, tensor, peer

    def batch_isend_irecv(self, operations):
        rank = self.own.rank
        for kind, tensor, peer in operations:
            if kind == self.isend:
                self.boxes[rank, peer].put(tensor.clone())
        return [
            SimpleNamespace(wait=lambda t=t, p=p: t.copy_(self.boxes[p, rank].get(timeout=WAIT_S)))
            for kind, t, p in operations
            if kind == self.irecv
        ]


class Groups:
    """Of one rank of a grid."""

    def __init__(self, grid, rank):
        self.coords = grid.coords(rank)
        self._of = {
            name: next(ranks for ranks in grid.group_ranks(name) if rank in ranks)
            for name in ("ulysses", "ring", "sp")
        }

    def ranks(self, name):
        return self._of[name]

    group = ranks


@pytest.fixture
def on_ranks(monkeypatch):
    """Calls a function with the attention of every rank and its number; gives results and counts."""

    def run(sizes, work):
        grid = Grid(sizes)
        world = grid.size("world")
        threads = Threads(world)
        monkeypatch.setattr(ring_attention, "dist", threads)

        def on_rank(rank):
            threads.own.rank = rank
            return work(SequenceAttention(Groups(grid, rank), SDPA), rank)

        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(on_rank, range(world))), threads.gathers

    return run


def draw(tokens, heads=3, batch=2, dtype=torch.float32, width=8):
    own = torch.Generator().manual_seed(tokens)  # ranks are threads, and draw at one time
    return [torch.randn(batch, tokens, heads, width, dtype=dtype, generator=own) for _ in range(3)]


def pieces(items, lengths, rank):
    return [item.split(lengths, 1)[rank] for item in items]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["none", "some", "a rank", "a row"])
@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ({"ulysses": 2}, [5, 4]),
        ({"ring": 3}, [4, 3, 1]),
        ({"ulysses": 3}, [1, 1, 6]),
        ({"ulysses": 2, "ring": 2}, [3, 2, 4, 1]),
    ],
)
def test_ranks_attend_as_one_does(on_ranks, sizes, lengths, mask, dtype):
    items = draw(sum(lengths), dtype=dtype)
    visible = torch.ones(2, sum(lengths), dtype=torch.bool)
    if mask == "some":
        visible[1, ::3] = False
    elif mask == "a rank":
        visible[:, : lengths[0]] = False
    elif mask == "a row":
        visible[0] = False
    given = None if mask == "none" else visible

    def attend(attention, rank):
        own = None if given is None else given.split(lengths, 1)[rank]
        return attention(*pieces(items, lengths, rank), own, None)

    got = torch.cat(on_ranks(sizes, attend)[0], 1).double()
    # In double precision, from the definition.
    q, k, v = (item.double().transpose(1, 2) for item in items)
    scores = (q @ k.transpose(-1, -2)) * 8**-0.5
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    expected = (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)
    rows = slice(1, None) if mask == "a row" and "ring" not in sizes else slice(None)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert torch.allclose(got[rows], expected[rows], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [12, 16, 64, 128, 264])
def test_attention_gives_its_sum_of_exponentials(device, width, dtype, is_masked):
    """Of every width of a head, as some kernels take a few alone."""
    items = [item.to(device) for item in draw(40, dtype=dtype, width=width)]
    mask = None
    if is_masked:
        mask = torch.ones(2, 40, dtype=torch.bool, device=device)
        mask[1, ::3] = False
    out, lse = attend_with_lse(*items, mask, None)
    q, k, v = (item.double().transpose(1, 2) for item in items)
    scores = (q @ k.transpose(-1, -2)) * width**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for got, expected in ((out, scores.softmax(-1) @ v), (lse, scores.logsumexp(-1))):
        assert torch.allclose(got.double(), expected.transpose(1, 2), atol=tolerance, rtol=0)


def test_the_sum_of_exponentials_joins_halves():
    query, key, value = draw(6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :3] = False
    whole, lse = attend_with_lse(query, key, value, mask, None)
    halves = [
        attend_with_lse(query, key[:, part], value[:, part], mask[:, part], None)
        for part in (slice(3), slice(3, 6))
    ]
    assert torch.equal(halves[0][0][0], torch.zeros(6, 3, 8))
    assert torch.equal(halves[0][1][0], torch.full((6, 3), -torch.inf))
    assert torch.allclose(torch.logaddexp(halves[0][1], halves[1][1]), lse)
    joined = sum(out * (part - lse).exp()[..., None] for out, part in halves)
    assert torch.allclose(joined, whole, atol=1e-6)


@pytest.mark.parametrize("sizes", [{"ulysses": 2}, {"ring": 2}])
def test_lengths_are_exchanged_once_a_forward(on_ranks, sizes):
    def attend(attention, rank):
        outs = []
        for lengths in ([3, 2], [3, 4]):  # the first rank cannot tell them apart
            attention.begin()
            items = draw(sum(lengths))
            outs += [attention(*pieces(items, lengths, rank), None, None) for _ in range(3)]
        return outs

    found, gathers = on_ranks(sizes, attend)
    assert gathers == {0: 2, 1: 2}
    for number, tokens in ((2, 5), (5, 7)):
        got = torch.cat([outs[number] for outs in found], 1)
        assert torch.allclose(got, SDPA(*draw(tokens), None, scale=None), atol=1e-6)


def test_every_forward_of_a_transformer_forgets_lengths():
    transformer = torch.nn.Identity()
    loaded = SimpleNamespace(
        attention=None,
        pipeline=SimpleNamespace(transformer=transformer, transformer_2=None),
        spec=SimpleNamespace(transformers=("transformer", "transformer_2")),
    )
    made = seam.make_seam(loaded, Groups(Grid({"ulysses": 2}), 0))
    made._shared._ulysses.known[3] = [3, 2]
    transformer(torch.zeros(1))
    assert made._shared._ulysses.known == {}
