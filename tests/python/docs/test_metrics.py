# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md and the dashboard of deploy/grafana name what a server exposes, and only that."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from fixtures.live_server import LiveServer, running_server

ROOT = Path(__file__).resolve().parents[3]
LIST = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text("utf-8"))


def documented(text: str) -> dict[str, tuple[str, set[str]]]:
    """name -> (type, labels), of the tables of a text."""
    return {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in re.findall(
            r"^\| `(diffulex_\w+)` \| (\w+) \|([^|]*)\|", text, re.MULTILINE
        )
    }


_TEXT, _IMAGES = re.split(
    r"^## Servers of images and videos$", LIST, maxsplit=1, flags=re.MULTILINE
)
DOCUMENTED = documented(_TEXT)


def post(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"{server.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        answer.read()


@pytest.fixture(scope="module")
def families() -> Iterator[dict[str, Metric]]:
    """Metrics by documented name, of a server that did some work and reported it."""
    body = {"prompt": "Tom has 3 apples.", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    with running_server("--device", "cpu") as server:
        post(server, "generate", body)
        post(server, "generate", {**body, "stream": True})
        slow = {"max_tokens": 440, "decoding": {"accept_threshold": 1.0}, "stream": True}
        start_abandoned(server, {**body, **slow})
        deadline = time.monotonic() + 120
        while True:
            found = scrape(server)
            # The engine's own numbers come with the next heartbeat.
            if total(found, "diffulex_forward_steps_total") >= 2 and total(
                found, "diffulex_request_aborted_total"
            ):
                break
            assert time.monotonic() < deadline, sorted(found)
            time.sleep(0.2)
        yield found


def start_abandoned(server: LiveServer, body: dict[str, Any]) -> None:
    """A request whose client leaves in the middle of the answer."""
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer = urllib.request.urlopen(request)
    answer.readline()
    answer.close()


def scrape(server: LiveServer) -> dict[str, Metric]:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        name = family.name if family.name.endswith(suffix) else family.name + suffix
        if not name.endswith("_created"):
            found[name] = family
    return found


def total(families: dict[str, Metric], name: str, suffix: str = "") -> float:
    """Sum over the labels; 0 where the metric is missing."""
    family = families.get(name)
    if family is None:
        return 0.0
    wanted = (name, family.name + suffix)
    return float(sum(sample.value for sample in family.samples if sample.name in wanted))


def kind_of(name: str, family: Metric) -> str:
    """The documented type; the text format itself has no infos."""
    return "info" if name.endswith("_info") else family.type


def test_list_is_the_servers(families: dict[str, Metric]) -> None:
    assert DOCUMENTED.keys() == families.keys()


def test_list_of_images_is_what_their_servers_count() -> None:
    from diffulex.omni.images_metrics import ImagesMetrics

    metrics = ImagesMetrics(MagicMock(num_waiting=3))
    metrics.failed(400)
    found = {}
    for family in metrics.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = family.type, labels
    assert documented(_IMAGES) == found


def test_types_are_the_servers(families: dict[str, Metric]) -> None:
    documented = {name: kind for name, (kind, _) in DOCUMENTED.items()}
    assert documented == {name: kind_of(name, family) for name, family in families.items()}


def test_labels_are_the_servers(families: dict[str, Metric]) -> None:
    for name, family in families.items():
        assert family.samples, name
        for sample in family.samples:
            labels = set(sample.labels) - {"le"}
            assert labels == DOCUMENTED[name][1] | {"model_name"}, sample


def test_work_was_counted(families: dict[str, Metric]) -> None:
    assert total(families, "diffulex_generation_tokens_total") == 48
    assert total(families, "diffulex_request_finished_total") == 2
    assert total(families, "diffulex_request_aborted_total") == 1
    assert total(families, "diffulex_nfe_per_request", "_count") == 2
    assert total(families, "diffulex_time_to_first_snapshot_seconds", "_count") >= 1
    assert total(families, "diffulex_backend_up") == 1
    assert total(families, "diffulex_forward_steps_total") >= 2


def expressions(node: Any) -> Iterator[str]:
    """All queries of a dashboard."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "query", "definition") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for item in node:
            yield from expressions(item)


#: name -> labels of what only a server of several replicas has.
OF_REPLICAS = {
    f"diffulex_{name}": set(re.findall(r"`(\w+)`", labels))
    for name, labels in re.findall(
        r"^\| `(\w+)` \| (?:gauge|counter) \|([^|]*)\|",
        (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
}
_EVERY = [text for text in expressions(DASHBOARD) if "diffulex_" in text]
REPLICA_QUERIES = [text for text in _EVERY if any(name in text for name in OF_REPLICAS)]
QUERIES = [text for text in _EVERY if text not in REPLICA_QUERIES]


def test_dashboard_shows_the_replicas() -> None:
    shown = set()
    for query in REPLICA_QUERIES:
        (name,) = re.findall(r"diffulex_\w+", query)
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert {part.strip() for part in group.split(",")} <= OF_REPLICAS[name]
        shown.add(name)
    assert shown == OF_REPLICAS.keys() - {"diffulex_parallel_info"}


@pytest.mark.parametrize("query", QUERIES)
def test_dashboard_queries_existing_samples(query: str, families: dict[str, Metric]) -> None:
    """Names of samples, not of families: a histogram is queried by its buckets, sum or count."""
    samples = {sample.name for family in families.values() for sample in family.samples}
    names = re.findall(r"diffulex_\w+", query)
    assert names
    for name in names:
        assert name in samples, name
    labels = re.findall(r"by \(([^)]*)\)", query)
    for label in (part.strip() for group in labels for part in group.split(",")):
        families_of = [family for family in families.values()
                       for sample in family.samples if sample.name in names
                       and label in sample.labels]  # fmt: skip
        assert families_of, label
    assert query.count("(") == query.count(")")


def test_dashboard_shows_every_metric() -> None:
    text = " ".join(QUERIES)
    missing = {name for name in DOCUMENTED if name not in text}
    # The distribution of a request's forwards is shown, and what is served is no curve.
    assert missing <= {"diffulex_engine_info"}


def test_dashboard_is_laid_out() -> None:
    """Panels have ids of their own, titles, queries and a place that no other has."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["targets"]
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs)
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    assert {item["name"] for item in DASHBOARD["templating"]["list"]} == {"datasource", "model"}


def test_names_follow_the_rules_of_prometheus(families):
    """What `promtool check metrics` looks at: suffixes that belong to a type, base units, help."""
    wrong_units = ("milliseconds", "ms", "minutes", "hours", "kilobytes", "megabytes", "percent")
    for name, family in families.items():
        assert family.documentation, name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
        if family.type != "counter":
            assert not name.endswith("_total"), name
        assert not name.endswith(("_count", "_sum", "_bucket")), name
        assert not set(name.split("_")) & set(wrong_units), name
        assert family.type not in name.split("_"), name
