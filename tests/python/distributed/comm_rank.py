# SPDX-License-Identifier: Apache-2.0
"""One rank of a group on GPUs: makes exchanges of all kinds and checks what it gets.

    python comm_rank.py RANK SIZE PORT DEVICE BACKEND CUSTOM

Prints by what small tensors went: `peers` or `library`. Ends with status 1 and a text if a result is wrong.
"""

from __future__ import annotations

import sys

import torch

from diffulex import ops
from diffulex.distributed.cuda_comm import CudaComm, CudaRowComm
from diffulex.distributed.layout import LOOPBACK
from diffulex.distributed.store import join_store, part_of_store
from diffulex.nn.norm import RMSNorm
from diffulex.ops.comm import CollectiveAlgorithm, collective_plan

#: (rows, width) of which some are beyond what kernels of this library sum.
SHAPES = [(1, 64), (32, 4096), (5, 1028), (3, 20_000), (2500, 4096), (0, 64), (129, 2816)]
SHAPES += [(300, 4096), (1500, 4096)]
DTYPES = (torch.bfloat16, torch.float32)


#: What a sum of two of them keeps, and what becomes NaN.
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1.0)


def is_one_shot(comm: CudaComm, num_bytes: int) -> bool:
    """Whether every rank adds up all parts of so many bytes in the order of the ranks, in float32."""
    if comm.no_capture_reason is not None or num_bytes == 0:
        return False
    return collective_plan(comm.size, num_bytes) == CollectiveAlgorithm.ONE_SHOT


def in_rank_order(parts: torch.Tensor) -> torch.Tensor:
    want = parts[0].float()
    for part in parts[1:]:
        want = want + part.float()
    return want.to(parts.dtype)


def parts_of(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(size, *shape, generator=generator).to(dtype).cuda()


def check_sums(comm: CudaComm, shape: tuple[int, int], dtype: torch.dtype) -> None:
    parts = parts_of(comm.size, shape, dtype)
    x = parts[comm.rank].clone()
    comm.all_reduce_(x)
    torch.testing.assert_close(x, parts.double().sum(0).to(dtype), rtol=2e-2, atol=2e-2)
    is_exact = is_one_shot(comm, x.nbytes)
    assert not is_exact or torch.equal(x, in_rank_order(parts))
    if shape[1] > 16_384:
        return
    norm = RMSNorm(shape[1], eps=1e-6, dtype=dtype, device="cuda")
    norm.weight.fill_(1.5)
    x, residual = parts[comm.rank].clone(), parts[0].clone()
    comm.add_norm_(norm, x, residual)
    want_residual = parts[0].clone()
    if shape[1] % 8 == 0:
        want = ops.sum_add_rms_norm(parts, want_residual, norm.weight, norm.eps)
        torch.testing.assert_close(residual, want_residual, rtol=2e-2, atol=4e-2)
        torch.testing.assert_close(x, want, rtol=2e-2, atol=4e-2)
        assert not is_exact or (torch.equal(x, want) and torch.equal(residual, want_residual))


def check_special_values(comm: CudaComm, dtype: torch.dtype) -> None:
    """Every pair of them, repeated to a megabyte. Zeros lose their sign: in the memory of peers -0 says
    that nothing was written yet."""
    values = torch.tensor(SPECIAL, dtype=dtype, device="cuda")
    pairs = torch.cartesian_prod(*[values] * 2).repeat(1 << 13, 1)
    parts = torch.stack([pairs[:, rank % 2] for rank in range(comm.size)]).view(comm.size, -1, 64)
    x, want = parts[comm.rank].clone(), in_rank_order(parts)
    comm.all_reduce_(x)
    assert torch.equal(x.isnan(), want.isnan())
    known = ~want.isnan()
    assert torch.equal(x[known], want[known])


def check_gathers(comm: CudaComm) -> None:
    for rows in (1, 32, 5000):
        generator = torch.Generator().manual_seed(rows)
        parts = torch.randint(-(2**31), 2**31 - 1, (comm.size, rows, 10), generator=generator)
        parts = parts.to(torch.int32).cuda()
        out = torch.zeros_like(parts)
        comm.gather_records(parts[comm.rank], out)
        assert torch.equal(out, parts), rows
    widths = tuple(64 + 16 * rank for rank in range(comm.size))
    parts_by_rank = [parts_of(1, (7, width), torch.bfloat16)[0] for width in widths]
    got = comm.gather_columns(parts_by_rank[comm.rank], widths)
    assert torch.equal(got, torch.cat(parts_by_rank, dim=1))
    on_host = torch.zeros(comm.size, 1, 1, dtype=torch.int32)
    comm.gather_records(torch.tensor([[comm.rank + 5]], dtype=torch.int32), on_host)
    assert on_host.flatten().tolist() == [5 + rank for rank in range(comm.size)]


def check_rows(comm: CudaRowComm) -> None:
    """Rows of different numbers, and none at all, by both exchanges."""
    for dtype in (*DTYPES, torch.uint8, torch.int64):
        for most in (0, 1, 37):
            counts = [most * (rank + 1) % 41 for rank in range(comm.size)]
            parts = [torch.full((count, 6), rank + 1) for rank, count in enumerate(counts)]
            own = parts[comm.rank].to("cuda", dtype)
            got = comm.send_rows(own.repeat(comm.size, 1), [len(own)] * comm.size, counts)
            assert torch.equal(got.cpu(), torch.cat(parts).to(dtype)), (dtype, counts)
            out = torch.zeros(comm.size, most, 6, dtype=dtype, device="cuda")
            comm.gather_rows(torch.full((most, 6), comm.rank + 1).to("cuda", dtype), out)
            assert out[..., :1].flatten().tolist() == [
                rank + 1 for rank in range(comm.size) for _ in range(most)
            ]
    only = [int(rank == comm.size - 1) * 3 for rank in range(comm.size)]  # to the last one alone
    received = [3] * comm.size if comm.rank == comm.size - 1 else [0] * comm.size
    assert comm.send_rows(torch.ones(3, 4, device="cuda"), only, received).size(0) == sum(received)


def check_graph(comm: CudaComm) -> None:
    parts = parts_of(comm.size, (32, 4096), torch.bfloat16)
    x = torch.zeros_like(parts[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(parts[comm.rank])
        comm.all_reduce_(x)
    want = in_rank_order(parts)
    for turn in range(50):
        if turn % 5 == 0:
            check_sums(comm, (9, 64), torch.bfloat16)
        graph.replay()
        assert torch.equal(x, want), turn


def main(arguments: list[str]) -> None:
    rank, size, port, device = map(int, arguments[:4])
    backend, custom = arguments[4:]
    torch.cuda.set_device(device)
    where = torch.device("cuda", device)
    store = LOOPBACK, port
    comm = CudaComm(
        rank, size, store, where, 120.0, 60.0, backend=backend, custom_all_reduce=custom
    )
    print("peers" if comm.no_capture_reason is None else "library", flush=True)
    for shape in SHAPES:
        for dtype in DTYPES:
            check_sums(comm, shape, dtype)
    for dtype in DTYPES:
        check_special_values(comm, dtype)
    check_gathers(comm)
    if comm.no_capture_reason is None:
        check_graph(comm)
    if backend == "gloo" or torch.cuda.device_count() >= size:  # else NCCL refuses
        part = part_of_store(join_store(store, size, 120.0), "rows")
        rows = CudaRowComm(rank, size, part, 60.0, 60.0, backend=backend)
        check_rows(rows)
        torch.cuda.synchronize()
        rows.close()
    torch.cuda.synchronize()
    comm.check()
    comm.close()


if __name__ == "__main__":
    main(sys.argv[1:])
