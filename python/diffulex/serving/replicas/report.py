# SPDX-License-Identifier: Apache-2.0
"""What several replicas report together: numbers with a label each, and a row each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.serving.frontend_state import ServerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from diffulex.serving.replicas.frontend import ReplicaFrontend

__all__ = ["merged_stats", "replica_rows", "router_stats"]


def _labelled(index: int, value: Any) -> Iterable[dict[str, Any]]:
    """A number, or samples with labels, as samples of one replica."""
    if isinstance(value, (int, float)):
        return [{"labels": {"replica": str(index)}, "value": value}]
    return [
        {**item, "labels": {**(item.get("labels") or {}), "replica": str(index)}} for item in value
    ]


def merged_stats(
    parts: Sequence[Mapping[str, Any]], further: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Stats of backends in the form of one: every number has the label `replica`.

    Args:
        parts: stats of each replica.
        further: gauges and counters to add.
    """
    merged: dict[str, Any] = {"gauges": {}, "counters": {}, "histograms": {}}
    for index, stats in enumerate(parts):
        for group, names in merged.items():
            for name, value in (stats.get(group) or {}).items():
                names.setdefault(name, []).extend(_labelled(index, value))
    for group, values in further.items():
        merged[group].update(values)
    merged["last_gen_throughput"] = sum(
        float(stats.get("last_gen_throughput") or 0.0) for stats in parts
    )
    return merged


def _by_replica(values: Iterable[float]) -> list[dict[str, Any]]:
    return [item for index, value in enumerate(values) for item in _labelled(index, value)]


def router_stats(frontend: ReplicaFrontend) -> dict[str, dict[str, Any]]:
    """Gauges and counters of the router, of restarts and of retries."""
    router, count = frontend.router, len(frontend.managers)
    states = [*(state.value for state in ServerState)]
    tensor, expert = (
        str(frontend.info.get(f"{name}_parallel_size", 1)) for name in ("tensor", "expert")
    )
    sizes = {"tp": tensor, "dp": str(count), "ep": expert}
    sent = _by_replica(router.num_sent(index) for index in range(count))
    for item in sent:
        item["labels"]["policy"] = router.policy
    return {
        "gauges": {
            "replica_state": [
                {"labels": {"replica": str(i), "state": state}, "value": float(found == state)}
                for i, found in enumerate(map(frontend.replica_state, range(count)))
                for state in states
            ],
            "parallel_info": [{"labels": sizes, "value": 1.0}],
        },
        "counters": {
            "replica_restarts_total": _by_replica(_restarts(frontend)),
            "router_requests_total": sent,
            "router_hit_tokens_total": _by_replica(map(router.num_hit_tokens, range(count))),
            "requests_retried_total": frontend.num_retried,
            "requests_lost_total": frontend.num_lost,
        },
    }


def _restarts(frontend: ReplicaFrontend) -> list[int]:
    if frontend.group is None:
        return [0] * len(frontend.managers)
    return [supervisor.num_restarts for supervisor in frontend.group.supervisors]


def replica_rows(frontend: ReplicaFrontend) -> list[dict[str, Any]]:
    """One map for each replica: state, load, pages, cache hits, restarts, devices."""
    rows = []
    for index, manager in enumerate(frontend.managers):
        gauges, counters = (manager.stats.get(group) or {} for group in ("gauges", "counters"))
        queries = counters.get("prefix_cache_queries_total", 0)
        hits = counters.get("prefix_cache_hits_total", 0)
        rows.append(
            {
                "replica": index,
                "state": frontend.replica_state(index),
                "in_flight": manager.num_inflight,
                "queued": gauges.get("requests_waiting", 0),
                "pages": gauges.get("kv_pages", 0),
                "pages_free": gauges.get("kv_pages_free", 0),
                "prefix_hit_rate": hits / queries if queries else None,
                "restarts": _restarts(frontend)[index],
                "devices": manager.info.get("devices", []),
            }
        )
    return rows
