# SPDX-License-Identifier: Apache-2.0
"""Places, devices, threads and seeds of ranks: pure functions, and the errors that settings get."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from diffulex.config.config import Config
from diffulex.config.facts import read_facts
from diffulex.config.parallel import ParallelConfig
from diffulex.config.parse import Options
from diffulex.config.table import CONFIG_TABLE
from diffulex.distributed.layout import (
    Layout,
    Sizes,
    check_device_name,
    describe_ranks,
    layout_of,
    rank_devices,
    replica_devices,
    replica_environment,
    replica_settings,
    with_own_port,
)
from diffulex.distributed.seeds import derive_request_seed
from diffulex.distributed.shard import Shard
from diffulex.errors import ConfigError

ZOO = Path(__file__).resolve().parents[3] / "examples" / "zoo"
TWO = {"data_parallel_size": 2, "expert_parallel_size": 2}


def test_devices() -> None:
    two = Sizes(data=2)
    assert rank_devices(Sizes(data=3)) == (0, 1, 2)
    assert rank_devices(two, device_start=2, num_visible=4) == (2, 3)
    assert rank_devices(two, (3, 1), num_visible=4) == (3, 1)
    assert rank_devices(two, (3, 1, 0), num_visible=4) == (3, 1)
    assert rank_devices(two, (3, 1), device_start=7, num_visible=4) == (3, 1)
    assert rank_devices(Sizes(2, 2), (5, 4, 3, 2)) == (5, 4, 3, 2)
    assert replica_devices(Sizes(2, 2), (5, 4, 3, 2)) == [(5, 4), (3, 2)]
    assert replica_devices(two, (3, 1)) == [(3,), (1,)]


@pytest.mark.parametrize(
    ("sizes", "arguments", "text"),
    [
        ((2, 1), {"device_ids": [0, 0]}, "device_ids: expected distinct devices, got [0, 0]"),
        (
            (2, 1), {"device_ids": [0]},
            "device_ids: expected 2 devices for tensor_parallel_size 2, got [0]",
        ),
        (
            (2, 1), {"device_ids": [0, 5], "num_visible": 2},
            "device_ids: expected ids below 2 (the number of visible devices), got [0, 5]",
        ),
        (
            (2, 2), {"num_visible": 2},
            "device_ids: expected 4 devices for tensor_parallel_size 2 and data_parallel_size 2, got 2",
        ),
        (
            (1, 1, 4), {"num_visible": 2},
            "device_ids: expected 4 devices for expert_parallel_size 4, got 2",
        ),
    ],
)  # fmt: skip
def test_devices_of_ranks_that_share_weights(
    sizes: tuple[int, ...], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        rank_devices(Sizes(*sizes), **arguments)
    assert str(caught.value) == text


def test_a_device_of_several_ranks_has_no_number() -> None:
    check_device_name("cuda", Sizes(2))
    with pytest.raises(ConfigError) as caught:
        check_device_name("cuda:1", Sizes(2))
    expected = (
        "device: expected cuda with tensor_parallel_size 2 (device_ids chooses), got 'cuda:1'"
    )
    assert str(caught.value) == expected


def test_ranks_are_described() -> None:
    alone = describe_ranks(ParallelConfig(), "cuda:3")
    assert (alone["executor"], alone["layout"]) == ("local", "base")
    (row,) = alone["ranks"]
    assert row == {
        "rank": 0, "replica": 0, "device": "cuda:3", "tensor_group": [0], "expert_group": [0],
    }  # fmt: skip
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        data_parallel_size=2,
        expert_parallel_size=4,
        device_ids=(5, 4, 1, 0),
    )
    several = describe_ranks(parallel, "cuda:5")
    assert (several["executor"], several["layout"]) == ("mp", "global_ep")
    assert several["expert_parallel_size"] == 4
    assert [row["device"] for row in several["ranks"]] == ["cuda:5", "cuda:4", "cuda:1", "cuda:0"]
    assert [row["replica"] for row in several["ranks"]] == [0, 0, 1, 1]
    assert [row["tensor_group"] for row in several["ranks"]] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(row["expert_group"] == [0, 1, 2, 3] for row in several["ranks"])
    on_ray = dataclasses.replace(parallel, distributed_executor="ray")
    assert {row["device"] for row in describe_ranks(on_ray, "cuda:0")["ranks"]} == {None}
    assert {row["device"] for row in describe_ranks(on_ray, "cpu")["ranks"]} == {"cpu"}


def test_every_layout_up_to_16_ranks() -> None:
    """Groups of one kind divide the ranks, and a rank is in its own."""
    seen = set()
    for tensor, data, expert in itertools.product(range(1, 9), range(1, 17), range(1, 17)):
        sizes = Sizes(tensor, data, expert)
        legal = {1, tensor, tensor * data} if tensor * data > 1 else set(range(1, 17))
        if expert not in legal:
            with pytest.raises(ConfigError, match=r"^expert_parallel_size: expected 1, tensor_par"):
                layout_of(sizes)
            continue
        if sizes.world > 16:
            continue
        seen.add(layout_of(sizes))
        ranks = range(sizes.world)
        for groups, size in (
            ([sizes.tensor_group(rank) for rank in ranks], tensor),
            ([sizes.data_group(rank) for rank in ranks], data),
            ([sizes.expert_group(rank) for rank in ranks], expert),
        ):
            assert all(rank in group for rank, group in enumerate(groups))
            assert {len(group) for group in groups} == {size}
            assert sorted(itertools.chain(*set(groups))) == [*ranks]
    assert seen == set(Layout)


def test_groups_of_two_replicas_of_two_ranks() -> None:
    sizes = Sizes(2, 2)
    assert (sizes.world, sizes.shard(3)) == (4, Shard(1, 2))
    assert [sizes.tensor_group(rank) for rank in (0, 3)] == [(0, 1), (2, 3)]
    assert [sizes.data_group(rank) for rank in (0, 3)] == [(0, 2), (1, 3)]
    assert Sizes(2, 2, 2).expert_group(3) == (2, 3)
    assert Sizes(2, 2, 4).expert_group(3) == (0, 1, 2, 3)
    with pytest.raises(ConfigError) as caught:
        layout_of(Sizes(2, 2, 3))
    assert str(caught.value) == (
        "expert_parallel_size: expected 1, tensor_parallel_size (2) or tensor_parallel_size *"
        " data_parallel_size (4), got 3"
    )


# (settings, visible devices, error)
ILLEGAL = [
    (
        {"device_ids": [0, 0]}, 2,
        "device_ids: expected distinct devices, got [0, 0]",
    ),
    (
        {"device_ids": [0]}, 2,
        "device_ids: expected 2 devices for data_parallel_size 2, got [0]",
    ),
    (
        {"device_ids": [0, 5]}, 2,
        "device_ids: expected ids below 2 (the number of visible devices), got [0, 5]",
    ),
    ({}, 1, "device_ids: expected 2 devices for data_parallel_size 2, got 1"),
    ({"device_start": 1}, 2, "device_ids: expected 2 devices for data_parallel_size 2, got 1"),
    (
        {"device": "cuda:1"}, 2,
        "device: expected cuda with data_parallel_size 2 (device_ids chooses), got 'cuda:1'",
    ),
    ({"device": "cuda"}, 0, "device: no CUDA device is visible, got 'cuda'"),
    ({"device": "cpu", "device_ids": [1]}, 2, "device_ids: expected an empty list on cpu, got [1]"),
    (
        {"device": "cpu", "tensor_parallel_size": 2, "custom_all_reduce": "on"}, 2,
        "custom_all_reduce: expected auto or off on cpu, where ranks have no peer access, got on",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "num_devices", "text"), ILLEGAL)
def test_illegal_devices(settings: dict[str, Any], num_devices: int, text: str) -> None:
    options = Options.parse("demo", {"data_parallel_size": 2, **settings})
    facts = dataclasses.replace(read_facts(options), num_devices=num_devices)
    with pytest.raises(ConfigError) as caught:
        Config.of(options, facts)
    assert str(caught.value) == text


def test_every_replica_has_a_port() -> None:
    facts = read_facts(Options.parse("demo", {}))
    for port in (65534, 65535):
        options = Options.parse("demo", {"data_parallel_size": 2, "master_port": port})
        with pytest.raises(ConfigError) if port == 65535 else contextlib.nullcontext() as caught:
            Config.of(options, facts)
    assert (
        str(caught.value)
        == "master_port: expected at most 65534 for data_parallel_size 2, got 65535"
    )


@pytest.mark.parametrize("name", [k.name for k in CONFIG_TABLE.values() if k.section == "parallel"])
def test_a_checkpoint_says_nothing_of_its_ranks(name: str) -> None:
    key = CONFIG_TABLE[name]
    value = 2 if key.kind == "int" else key.default
    options = Options.parse("demo", {})
    facts = dataclasses.replace(read_facts(options), checkpoint_defaults={name: value})
    with pytest.raises(ConfigError) as caught:
        Config.of(options, facts)
    assert (
        str(caught.value)
        == f"generation_config.json: {name}: expected only decoding keys, got {value!r}"
    )


def test_settings_of_one_replica() -> None:
    given = {"data_parallel_size": 2, "device_ids": (3, 1), "device_start": 1, "max_num_reqs": 4}
    assert replica_settings(given, (3,)) == {"max_num_reqs": 4, "device_ids": (3,)}
    assert replica_settings({"master_port": 2333}, (), 2) == {"master_port": 2335}
    assert replica_settings({"master_port": 0}, (), 2) == {"master_port": 0}
    assert with_own_port({"master_port": 2333, "device_ids": (1,)}, 2) == {
        "master_port": 2335,
        "device_ids": (1,),
    }
    assert with_own_port({"device": "cpu"}, 2) == {"device": "cpu"}
    assert replica_settings({"data_parallel_policy": "prefix", "device": "cpu"}, ()) == {
        "device": "cpu"
    }


def test_a_replica_that_shares_experts_knows_of_all() -> None:
    given = {"tensor_parallel_size": 2, "data_parallel_size": 2, "expert_parallel_size": 4}
    placed = {**given, "device_ids": (4, 2, 1, 0)}
    others = {"data_parallel_policy": "prefix", "master_port": 2333}
    assert replica_settings({**placed, **others}, (1, 0), 1) == placed
    assert replica_settings(given, (2, 3)) == given
    options = Options.parse(str(ZOO / "edit_llada2"), {**placed, "tensor_parallel_size": 1} | TWO)
    facts = dataclasses.replace(read_facts(options), num_devices=5)
    config = Config.of(options, facts)
    assert [config.of_rank(rank).model.device for rank in range(2)] == ["cuda:4", "cuda:2"]
    assert (config.kernel.run_ahead, config.kernel.enforce_eager) == ("off", True)


def test_replicas_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)), raising=False)
    assert replica_environment(Sizes(data=2)) == {"OMP_NUM_THREADS": "3"}
    assert replica_environment(Sizes(2, 3)) == {"OMP_NUM_THREADS": "1"}
    assert replica_environment(Sizes(data=16)) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert replica_environment(Sizes(data=2)) == {}


def test_seeds_are_those_of_the_header() -> None:
    """Values of `derive_request_seed` in include/diffulex/core/philox.h."""
    assert derive_request_seed(0, 0) == 0x5193F37E1F015253
    assert derive_request_seed(7, 3) == 0xA499DA9EEBF9C1A2
    assert derive_request_seed(2**64 - 1, 2**40 + 5) == 0x56D903786888BACC


def test_a_module_of_the_user_that_is_missing(tmp_path: Path) -> None:
    from diffulex import Diffulex

    with pytest.raises(ConfigError, match=r"^worker_imports: .* got 'no_such_module': No module"):
        Diffulex("demo", device="cpu", worker_imports=["no_such_module"])
