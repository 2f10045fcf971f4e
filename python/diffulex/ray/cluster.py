# SPDX-License-Identifier: Apache-2.0
"""The Ray cluster: how this process joins it, and where it has room for the ranks of a replica."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray._private.state import available_resources_per_node, total_resources_per_node
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from diffulex.errors import ConfigError
from diffulex.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex.distributed.layout import Sizes

__all__ = ["bundle_of", "join_cluster", "place_replicas", "remove_place"]

logger = get_logger(__name__)

_ANSWER_S = 5.0
_POLL_S = 0.05


class _Node(NamedTuple):
    """What a node has."""

    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def join_cluster(address: str) -> None:
    """Makes this process a driver of the cluster, unless it is in one already.

    Args:
        address: `auto` for the cluster of this host, `local` to start one here, or that of a head.

    Raises:
        ConfigError: there is no such cluster.
    """
    if ray.is_initialized():
        return
    try:
        _check_answers(address)
        ray.init(address=address, log_to_driver=True, logging_level="warning")
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"ray_address: expected a running Ray cluster (ray start --head), got {address!r}:"
            f" {reason[:200]}"
        ) from error


def _check_answers(address: str) -> None:
    """OSError if nobody listens at a host and port: Ray would try for minutes."""
    if "://" in address:
        raise ValueError("a client of a cluster (ray://) cannot be connected to, only a cluster")
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()


def _nodes() -> list[_Node]:
    total, free = total_resources_per_node(), available_resources_per_node()
    return [
        _Node(
            node["NodeManagerAddress"], total.get(node["NodeID"], {}), free.get(node["NodeID"], {})
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def bundle_of(device: str) -> dict[str, float]:
    """The resources of one rank.

    Args:
        device: that was asked for; `auto` means a GPU where the cluster has any.
    """
    has_gpus = device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    return {"CPU": 1.0, "GPU": 1.0} if has_gpus or device == "cuda" else {"CPU": 1.0}


def _fits(bundles: Sequence[Mapping[str, float]], node: _Node) -> bool:
    names = {name for bundle in bundles for name in bundle}
    return all(
        sum(bundle.get(name, 0) for bundle in bundles) <= node.total.get(name, 0) for name in names
    )


def place_replicas(sizes: Sizes, bundle: Mapping[str, float], timeout_s: float) -> list[Any]:
    """A placement group for each replica, with one bundle for each of its ranks.

    The ranks of a replica are on one node, unless none is large enough.

    Raises:
        ConfigError: the cluster has no room for them within this time; none is kept.
    """
    bundles = [dict(bundle) for _ in range(sizes.tensor)]
    is_packed = any(_fits(bundles, node) for node in _nodes())
    if not is_packed and sizes.tensor > 1 and "GPU" in bundle:
        raise ConfigError(
            f"distributed_executor: expected a node with {sizes.tensor} GPUs for the ranks of a replica,"
            " got none: ranks on GPUs are on one node so far"
        )
    if not is_packed and sizes.tensor > 1:
        text = "no node has room for %d ranks: those of a replica are spread over several"
        logger.warning(text, sizes.tensor)
    strategy = "STRICT_PACK" if is_packed or sizes.tensor == 1 else "PACK"
    groups: list[PlacementGroup] = []
    end = time.monotonic() + timeout_s
    try:
        for _ in range(sizes.data):
            groups.append(placement_group(bundles, strategy=strategy))  # noqa: PERF401 (removed below)
        for index, group in enumerate(groups):
            while not _is_placed(group):  # `wait` of a group takes whole seconds
                if time.monotonic() >= end:
                    raise ConfigError(_no_room(index, bundles, timeout_s))
                time.sleep(_POLL_S)
    except BaseException:
        for group in groups:
            remove_place(group)
        raise
    return groups


def _is_placed(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")


def remove_place(group: Any) -> None:
    """Gives back the resources of a placement group, and ends what runs there. Idempotent."""
    with contextlib.suppress(Exception):  # the cluster may be gone, and with it the group
        remove_placement_group(group)


def _no_room(index: int, bundles: Sequence[Mapping[str, float]], timeout_s: float) -> str:
    """Why a replica has no place."""
    wanted = " ".join(f"{name} {count:g}" for name, count in bundles[0].items())
    nodes = [f"{_free(node)} on {node.address}" for node in _nodes()]
    return (
        f"distributed_executor: expected room for {len(bundles)} x {wanted} for replica {index} in"
        f" the Ray cluster within {timeout_s:g} s (ray_placement_timeout), got"
        f" {'; '.join(nodes) or 'no node'}"
    )


def _free(node: _Node) -> str:
    """What a node has left; Ray leaves out what is zero."""
    names = [name for name in ("CPU", "GPU") if node.total.get(name)]
    shown = (f"{name} {node.free.get(name, 0):g} of {node.total[name]:g} free" for name in names)
    return ", ".join(shown) or "nothing"
