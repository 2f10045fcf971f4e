# SPDX-License-Identifier: Apache-2.0
"""Settings of several devices and processes: a section of `diffulex.config.table`."""

from __future__ import annotations

from dataclasses import dataclass

from diffulex.config.key import ANY as _ANY
from diffulex.config.key import IDS as _IDS
from diffulex.config.key import NAME as _NAME
from diffulex.config.key import Range as _Range
from diffulex.config.key import above as _above
from diffulex.config.key import at_least as _at_least
from diffulex.config.key import between as _between
from diffulex.config.key import key as _key
from diffulex.config.key import one_of as _one_of
from diffulex.distributed.layout import MAX_PORT
from diffulex.distributed.router import POLICIES

__all__ = ["ParallelConfig"]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Devices and processes."""

    tensor_parallel_size: int = _key(
        "int",
        1,
        _between(1, 8),
        "Processes that share the weights of one engine, with a device each.",
    )
    data_parallel_size: int = _key(
        "int", 1, _between(1, 1024), "Replicas of the engine, each in a process of its own."
    )
    data_parallel_policy: str = _key(
        "str",
        "prefix",
        _one_of(*POLICIES),
        "Which replica gets a request: the one with the least work left, cached prefixes counted"
        " (`prefix`) or not (`least_loaded`), or the next.",
    )
    expert_parallel_size: int = _key(
        "int",
        1,
        _between(1, 32768),
        "Processes among which whole routed experts are spread: tensor_parallel_size, or with that 1 those"
        " that share nothing else, or data_parallel_size: replicas that share the experts.",
    )
    moe_parallel_mode: str = _key(
        "str",
        "auto",
        _one_of("auto", "width", "expert"),
        "What each of several ranks has of the routed experts: a part of the width of all, or some whole"
        " ones; `auto`: the width, where every part of it is a multiple of 64,"
        " of 128 where experts are in low precision.",
    )
    moe_dispatcher_backend: str = _key(
        "str",
        "standard",
        _one_of("standard", "allgather", "naive", "deepep"),
        "How rows reach experts that replicas share: every replica gets all of them (`allgather`, which"
        " `standard` becomes there), or those that need one of its experts (`naive`); deepep is an error.",
    )
    device_start: int = _key("int", 0, _at_least(0), "First CUDA device.")
    device_ids: tuple[int, ...] = _key("ids", (), _IDS, "CUDA devices; empty: all visible.")
    distributed_executor: str = _key(
        "str",
        "auto",
        _one_of("auto", "mp", "ray"),
        "Where the processes of replicas and ranks are: on this host (`auto`, `mp`), or where a Ray"
        " cluster has room for them (`ray`).",
    )
    ray_address: str = _key(
        "str", "auto", _NAME, "The Ray cluster: `auto`, `local` to start one, or its address."
    )
    ray_placement_timeout: int = _key(
        "int", 120, _above(0), "Seconds in which the Ray cluster must have room for all ranks."
    )
    master_addr: str = _key(
        "str",
        "localhost",
        _NAME,
        "Address of the first rank for the others of its engine; `localhost`: the one they know already.",
    )
    master_port: int = _key(
        "int",
        0,
        _between(0, MAX_PORT),
        "Port there, of replica i this one + i; 0: any free one.",
    )
    distributed_timeout_seconds: int = _key(
        "int", 600, _above(0), "Longest time in which a process that is started loads its weights."
    )
    collective_timeout_seconds: int = _key(
        "int", 60, _at_least(0), "Longest wait of a rank for the others within a step; 0: no limit."
    )
    distributed_backend: str = _key(
        "str",
        "auto",
        _one_of("auto", "nccl", "gloo"),
        "What large exchanges of ranks on CUDA devices take; auto: nccl. On CPU it is gloo.",
    )
    custom_all_reduce: str = _key(
        "str",
        "auto",
        _one_of("auto", "on", "off"),
        "Small exchanges of ranks on CUDA devices through each other's memory; on: an error without.",
    )
    check_ranks: bool = _key(
        "bool",
        False,
        _ANY,
        "Compares what the ranks have decided after every step, in some also their hidden states.",
    )
    worker_imports: tuple[str, ...] = _key(
        "strs",
        (),
        _Range(
            "importable names", lambda v: all(p.isidentifier() for i in v for p in i.split("."))
        ),
        "Modules that every process imports first: those that register models, samplers or strategies.",
    )

    @property
    def is_of_cluster(self) -> bool:
        """A cluster starts the processes of the engine, which is not in this one."""
        return self.distributed_executor == "ray"
