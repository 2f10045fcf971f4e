# SPDX-License-Identifier: Apache-2.0
"""Times the exchanges of ranks on one host beside those of NCCL and torch's symmetric memory.

    python benchmarks/python/bench_all_reduce.py --world 2 --rows 4,32,128,256,1024 --hidden 2048,4096

Every figure is the sum over ranks, the addition to the residual and the norm, in bf16, as a decode step
has it, inside a CUDA graph of many calls over buffers that take turns. It is the slowest rank's: median
and 99th percentile over replays, in microseconds per call. `gather` is the exchange of records of 40 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diffulex import ops
from diffulex.distributed.cuda_comm import CudaComm
from diffulex.distributed.layout import LOOPBACK
from diffulex.distributed.store import make_store
from diffulex.nn.norm import RMSNorm
from diffulex.ops.settled import settled_weights

_CALLS, _REPLAYS, _BUFFERS = 200, 30, 8
_RECORD_WORDS = 10
_PEERS = ("nccl", "symm")


def microseconds(call: Callable[[int], object]) -> torch.Tensor:
    """Per call of a captured sequence, one entry per replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(_BUFFERS):
            call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream), settled_weights():
        for index in range(_CALLS):
            call(index % _BUFFERS)
    times = []
    with torch.cuda.stream(stream):
        for _ in range(3 + _REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / _CALLS)
    return torch.tensor(times[3:], device="cuda")


def slowest(times: torch.Tensor) -> dict[str, float]:
    """Median and 99th percentile over replays of the slowest rank of each."""
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    values = times.cpu()
    return {
        "median_us": round(float(values.median()), 2),
        "p99_us": round(float(values.quantile(0.99)), 2),
    }


class Rank:
    """What one process measures.

    Args:
        comm: with the others.
        width: H.
        rows: T.
    """

    def __init__(self, comm: CudaComm, rows: int, width: int) -> None:
        self.comm = comm
        self.norm = RMSNorm(width, eps=1e-6, dtype=torch.bfloat16, device="cuda")
        self.norm.weight.fill_(1.0)
        self.x = torch.randn(_BUFFERS, rows, width, device="cuda").bfloat16()
        self.residual = torch.randn(_BUFFERS, rows, width, device="cuda").bfloat16()

    def ours(self, index: int) -> None:
        """One op over peer memory, or what the size asks for."""
        self.comm.add_norm_(self.norm, self.x[index], self.residual[index])

    def nccl(self, index: int) -> None:
        """NCCL, then the norm."""
        dist.all_reduce(self.x[index])
        self.norm.add_norm_(self.x[index], self.residual[index])

    def symm(self, name: str) -> Callable[[int], None]:
        """A sum of torch's symmetric memory, then the norm."""
        import torch.distributed._symmetric_memory as symmetric  # noqa: PLC0415 (a peer only)

        group = dist.group.WORLD
        assert group is not None
        buffer = symmetric.empty(self.x[0].shape, dtype=torch.bfloat16, device="cuda")
        symmetric.rendezvous(buffer, group.group_name)
        op: Any = getattr(torch.ops.symm_mem, name)

        def call(index: int) -> None:
            buffer.copy_(self.x[index])
            out = op(buffer, "sum", group.group_name)
            ops.add_rms_norm(out, self.residual[index], self.norm.weight, self.norm.eps)

        return call


def measure_shape(comm: CudaComm, rows: int, width: int, peers: list[str]) -> dict[str, Any]:
    """One line of the table."""
    rank = Rank(comm, rows, width)
    line: dict[str, Any] = {"rows": rows, "hidden": width, "bytes": rows * width * 2}
    line["ours"] = slowest(microseconds(rank.ours))
    if "nccl" in peers:
        line["nccl"] = slowest(microseconds(rank.nccl))
    if "symm" in peers:
        for name in ("one_shot_all_reduce", "two_shot_all_reduce_"):
            line[name] = slowest(microseconds(rank.symm(name)))
    return line


def measure_gather(comm: CudaComm, rows: int, peers: list[str]) -> dict[str, Any]:
    """One line of the table of gathers."""
    part = torch.ones(rows, _RECORD_WORDS, dtype=torch.int32, device="cuda")
    out = torch.zeros(comm.size, rows, _RECORD_WORDS, dtype=torch.int32, device="cuda")
    line: dict[str, Any] = {"rows": rows, "bytes": part.nbytes}
    line["ours"] = slowest(microseconds(lambda _: comm.gather_records(part, out)))
    if "nccl" in peers:
        line["nccl"] = slowest(microseconds(lambda _: dist.all_gather_into_tensor(out, part)))
    return line


def run_rank(arguments: argparse.Namespace) -> None:
    """The process of one rank."""
    rank, world = arguments.rank, arguments.world
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    comm = CudaComm(
        rank, world, (LOOPBACK, arguments.port), device, 120.0, 60.0, custom_all_reduce="on"
    )
    store = dist.TCPStore(LOOPBACK, arguments.port, world, is_master=False)
    dist.init_process_group(
        "nccl", store=dist.PrefixStore("bench", store), rank=rank, world_size=world
    )
    lines = [
        measure_shape(comm, rows, width, arguments.peers)
        for width in arguments.hidden
        for rows in arguments.rows
    ]
    gathers = [measure_gather(comm, rows, arguments.peers) for rows in (4, 32, 256)]
    if rank == 0:
        print(json.dumps({"sums": lines, "gathers": gathers}), flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # graphs with NCCL inside may hang its shut-down


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Starts the ranks; what the first one has measured."""
    store = make_store(arguments.world)
    command = [sys.executable, __file__, *sys.argv[1:], "--port", str(store.port), "--rank"]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE if rank == 0 else None)
        for rank in range(arguments.world)
    ]
    try:
        text = ranks[0].communicate(timeout=arguments.timeout)[0]
    finally:
        for rank in ranks:
            rank.kill()
    if not text:
        raise SystemExit("bench_all_reduce: expected figures from rank 0, got none")
    figures: dict[str, Any] = json.loads(text.splitlines()[-1])
    return figures


def describe() -> dict[str, Any]:
    """Where this runs."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
    }


def print_table(figures: dict[str, Any]) -> None:
    """Medians, one line per shape."""
    for kind in ("sums", "gathers"):
        for line in figures[kind]:
            shape = "x".join(str(line[key]) for key in ("rows", "hidden") if key in line)
            values = (f"{k} {v['median_us']}" for k, v in line.items() if isinstance(v, dict))
            print(f"{kind[:-1]:7} {shape:10} {line['bytes']:>9} B  {'  '.join(values)}")


def integers(text: str) -> list[int]:
    """Of a comma-separated list."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2, help="ranks, one GPU each")
    parser.add_argument("--rows", type=integers, default=[4, 32, 128, 256, 1024])
    parser.add_argument("--hidden", type=integers, default=[2048, 4096])
    parser.add_argument(
        "--peers", type=lambda text: text.split(","), default=list(_PEERS), help=", ".join(_PEERS)
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for all of it")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    if torch.cuda.device_count() < arguments.world:
        parser.error(
            f"--world: expected at most {torch.cuda.device_count()} (the GPUs there are), got"
            f" {arguments.world}"
        )
    figures = describe() | run_all(arguments)
    print_table(figures)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
