# SPDX-License-Identifier: Apache-2.0
"""``diffulex bench serve``: flags, the run, and what is written."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import dataclasses
import datetime
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.bench.serve.dataset import DATASETS, BenchRequest, DatasetSettings, make_requests
from diffulex.bench.serve.errors import EndpointError, RequestError
from diffulex.bench.serve.frames import APIS
from diffulex.bench.serve.http_stream import Endpoint, HttpClient
from diffulex.bench.serve.load import LoadPlan, LoadRun, RequestSettings, Sender, run_load, warm_up
from diffulex.bench.serve.report import ReportSettings, ServeReport, pareto_table, summarize
from diffulex.config.flags import count, integer, number, numbers, positive_integer, share
from diffulex.env import get_text
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.flags import Parser

__all__ = [
    "ServeBenchmark",
    "add_serve_flags",
    "run_benchmark",
    "run_serve_command",
    "served_model",
]

_DEFAULT_URL = "http://127.0.0.1:8000"
_SWEEPABLE = ("max-concurrency", "request-rate")
#: Columns of the sweep's CSV file, besides the swept value.
_CSV_COLUMNS = (
    "completed", "failed", "duration", "request_throughput", "request_goodput",
    "output_throughput", "tps_per_user", "mean_ttft_ms", "mean_itl_ms", "mean_tpot_ms",
    "mean_e2el_ms", "tpf", "chunks_per_request",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServeBenchmark:
    """One measurement of one endpoint."""

    base_url: str = _DEFAULT_URL
    api_key: str | None = None
    tokenizer: str | None = None
    num_warmup: int = 4
    request: RequestSettings = field(default_factory=RequestSettings)
    dataset: DatasetSettings = field(default_factory=DatasetSettings)
    plan: LoadPlan = field(default_factory=LoadPlan)
    report: ReportSettings = field(default_factory=ReportSettings)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def describe(self, model: str | None) -> dict[str, Any]:
        """Settings as they stand in the result; the key is left out."""
        plan = self.plan
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "base_url": Endpoint.parse(self.base_url).url,
            "api": self.request.api,
            "model_id": model,
            "tokenizer_id": self.tokenizer,
            "dataset": self.dataset.name,
            "dataset_path": None if self.dataset.path is None else str(self.dataset.path),
            "num_prompts": self.dataset.num_prompts,
            "num_warmup": self.num_warmup,
            "seed": self.dataset.seed,
            # JSON has no infinity.
            "request_rate": "inf" if math.isinf(plan.request_rate) else plan.request_rate,
            "burstiness": "inf" if math.isinf(plan.burstiness) else plan.burstiness,
            "extra_body": dict(self.request.extra_body),
            "goodput_limits_ms": dict(self.report.goodput or {}),
            "metadata": dict(self.metadata),
        }


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """A run and its summary."""

    report: ServeReport
    run: LoadRun


def run_benchmark(benchmark: ServeBenchmark) -> BenchmarkResult:
    """Measures once.

    Raises:
        ConfigError: unusable settings; nothing was sent then.
        EndpointError: the server is down, refuses the warm-up, or answered no request.
    """
    endpoint = Endpoint.parse(benchmark.base_url, benchmark.api_key)
    tokenizer = _load_tokenizer(benchmark.tokenizer)
    requests = make_requests(benchmark.dataset, benchmark.request.api, tokenizer)
    model, run = asyncio.run(_measure(benchmark, endpoint, requests, tokenizer))
    figures = summarize(run, benchmark.report)
    if not figures["completed"]:
        first = next(record for record in run.records if not record.is_ok)
        raise EndpointError(
            f"bench serve: expected answers, got {figures['failed']} failures; the first: {first.error}"
        )
    report = ServeReport(benchmark.describe(model), figures, benchmark.report.percentiles)
    return BenchmarkResult(report, run)


async def _measure(
    benchmark: ServeBenchmark,
    endpoint: Endpoint,
    requests: Sequence[BenchRequest],
    tokenizer: Tokenizer | None,
) -> tuple[str | None, LoadRun]:
    client = HttpClient(endpoint)
    try:
        settings = benchmark.request
        if settings.api != "generate" and settings.model is None:
            settings = dataclasses.replace(settings, model=await served_model(client))

        def count_tokens(text: str) -> int:
            assert tokenizer is not None
            return len(tokenizer.encode(text, add_special_tokens=False))

        sender = Sender(client, settings, None if tokenizer is None else count_tokens)
        if benchmark.num_warmup:
            first = [requests[i % len(requests)] for i in range(benchmark.num_warmup)]
            await warm_up(sender, first, benchmark.plan.max_concurrency or benchmark.num_warmup)
        return settings.model, await run_load(sender, requests, benchmark.plan)
    finally:
        await client.close()


async def served_model(client: HttpClient) -> str:
    """The first model the server lists; EndpointError where it lists none."""
    try:
        async with client.request("GET", "/v1/models") as response:
            content = await response.read()
    except RequestError as failure:
        raise EndpointError(f"bench serve: {failure}") from failure
    if response.status != 200:
        text = content.decode("utf-8", "replace").strip()[:200]
        raise EndpointError(
            f"bench serve: {client.endpoint.url}/v1/models: expected status 200, "
            f"got {response.status}: {text}; --model names the model without asking"
        )
    try:
        return str(json.loads(content)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise EndpointError(
            f"bench serve: {client.endpoint.url}/v1/models: expected a list of models, "
            f"got {content[:200]!r}"
        ) from error


def _load_tokenizer(name: str | None) -> Tokenizer | None:
    if name is None:
        return None
    from diffulex.checkpoint.resolve import resolve_model  # noqa: PLC0415 (the same)
    from diffulex.checkpoint.tokenizer import Tokenizer  # noqa: PLC0415 (slow, and only on request)

    return Tokenizer.from_dir(resolve_model(name))


# Command line.


#: Flags in the short help.
_COMMON = (
    "log_level", "config", "base_url", "api", "model", "api_key", "dataset", "dataset_path",
    "num_prompts", "input_len", "output_len", "tokenizer", "temperature", "seed", "request_rate",
    "max_concurrency", "warmup", "sweep", "goodput", "json", "save_result", "result_dir",
)  # fmt: skip


def add_serve_flags(parser: Parser) -> None:
    """Adds every flag of the command."""
    _add_endpoint_flags(parser.add_argument_group("endpoint"))
    _add_request_flags(parser.add_argument_group("requests"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_result_flags(parser.add_argument_group("result"))
    parser.shorten_help(_COMMON)


def _add_endpoint_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url", default=_DEFAULT_URL, help=f"with or without /v1 [{_DEFAULT_URL}]"
    )
    group.add_argument("--api", choices=APIS, default="chat", help="route [chat]")
    group.add_argument("--model", help="model of the requests [the first the server lists]")
    group.add_argument("--api-key", help="[environment variable OPENAI_API_KEY, if set]")
    group.add_argument("--timeout", type=_positive, default=600.0, help="seconds per request [600]")
    group.add_argument(
        "--max-retries",
        type=count,
        default=0,
        help="tries after 429 or 503 [0: they are failures]",
    )


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset",
        metavar="NAME",
        default=DATASETS[0],
        help=f"{', '.join(DATASETS[1:])}, or task:NAME of `diffulex bench tasks` [{DATASETS[0]}]",
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="of jsonl and sharegpt; of a task, in place of its items",
    )
    group.add_argument("--num-prompts", type=positive_integer, default=200, help="requests [200]")
    group.add_argument(
        "--input-len", type=positive_integer, default=256, help="random: tokens [256]"
    )
    group.add_argument("--output-len", type=positive_integer, default=128, help="max_tokens [128]")
    group.add_argument(
        "--range-ratio", type=share, default=0.0, help="random: lengths vary by this share [0]"
    )
    group.add_argument(
        "--token-range", type=_pair, metavar="LOW,HIGH", help="random: ids to draw from"
    )
    group.add_argument(
        "--tokenizer", metavar="DIR", help="directory or demo; counts tokens, makes texts"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="ask for exactly --output-len tokens"
    )
    group.add_argument(
        "--temperature", type=_temperature, default=0.0, help="number or default [0]"
    )
    group.add_argument(
        "--stream-mode", choices=("block_append", "denoise", "both"), help="diffulex only"
    )
    group.add_argument(
        "--chunk-usage",
        action="store_true",
        help="ask for usage in every chunk: exact tokens per chunk",
    )
    group.add_argument(
        "--extra-body",
        type=_object,
        default={},
        metavar="JSON",
        help="more fields; null removes one",
    )
    group.add_argument("--seed", type=integer, default=0, help="of data and arrivals [0]")


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate", type=_rate, default=math.inf, help="arrivals per second [inf]"
    )
    group.add_argument(
        "--burstiness",
        type=_rate,
        default=1.0,
        help="1 Poisson, less is burstier, inf constant [1]",
    )
    group.add_argument(
        "--max-concurrency", type=positive_integer, help="requests in flight [no limit]"
    )
    group.add_argument("--warmup", type=count, default=4, help="requests that do not count [4]")
    group.add_argument(
        "--sweep",
        type=_sweep,
        metavar="NAME=V[,V]",
        help=f"one run per value of {' or '.join(_SWEEPABLE)}",
    )


def _add_result_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentiles", type=numbers, default=(50.0, 90.0, 95.0, 99.0), help="[50,90,95,99]"
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        type=_level,
        default=[],
        metavar="NAME:MS",
        help="ttft, tpot, e2el limits",
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")
    group.add_argument("--save-result", action="store_true", help="write JSON and records as files")
    group.add_argument("--result-dir", type=Path, default=Path(), help="where [current directory]")
    group.add_argument(
        "--metadata",
        nargs="+",
        type=_pair_of_texts,
        default=[],
        metavar="KEY=VALUE",
        help="kept in the JSON",
    )


def run_serve_command(options: argparse.Namespace) -> int:
    """Runs the command; 1 when a request failed."""
    if options.save_result:
        try:
            options.result_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"result_dir: cannot make {options.result_dir}: {error.strerror}"
            ) from error
    benchmark = _benchmark(options)
    runs = [benchmark] if options.sweep is None else _swept(benchmark, *options.sweep)
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    stem = options.result_dir / f"bench_serve_{stamp}"
    results: list[BenchmarkResult] = []
    try:
        for index, run in enumerate(runs):
            result = run_benchmark(run)
            results.append(result)
            if options.save_result:
                _save(stem.with_name(f"{stem.name}_{index}") if len(runs) > 1 else stem, result)
            if not options.json:
                print(result.report.to_text(), end="\n\n", flush=True)
    finally:
        # What was measured before the endpoint died or the user interrupted counts.
        if results:
            _finish(options, stem, [result.report for result in results])
    return 1 if any(result.report.figures["failed"] for result in results) else 0


def _finish(options: argparse.Namespace, stem: Path, reports: Sequence[ServeReport]) -> None:
    """Writes what is about all runs: JSON, or the table and the CSV file of a sweep."""
    if options.save_result and options.sweep is not None:
        _save_csv(stem.with_suffix(".csv"), options.sweep[0], reports)
    if options.json:
        shown = [report.as_dict() for report in reports]
        print(json.dumps(shown[0] if options.sweep is None else shown, indent=1))
    elif options.sweep is not None:
        print(pareto_table(options.sweep[0], reports))


def _benchmark(options: argparse.Namespace) -> ServeBenchmark:
    return ServeBenchmark(
        base_url=options.base_url,
        api_key=options.api_key or get_text("OPENAI_API_KEY") or None,
        tokenizer=options.tokenizer,
        num_warmup=options.warmup,
        request=RequestSettings(
            api=options.api,
            model=options.model,
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
            stream_mode=options.stream_mode,
            counts_chunks=options.chunk_usage,
            extra_body=options.extra_body,
            timeout_s=options.timeout,
            max_retries=options.max_retries,
        ),
        dataset=DatasetSettings(
            name=options.dataset,
            path=options.dataset_path,
            num_prompts=options.num_prompts,
            seed=options.seed,
            input_len=options.input_len,
            output_len=options.output_len,
            range_ratio=options.range_ratio,
            token_range=options.token_range,
        ),
        plan=LoadPlan(
            options.request_rate, options.burstiness, options.max_concurrency, options.seed
        ),
        report=ReportSettings(
            percentiles=options.percentiles,
            goodput=dict(options.goodput),
            max_concurrency=options.max_concurrency,
            is_retokenized=options.tokenizer is not None,
        ),
        metadata=dict(options.metadata),
    )


def _swept(benchmark: ServeBenchmark, name: str, values: Sequence[float]) -> list[ServeBenchmark]:
    runs = []
    for value in values:
        if name == "request_rate":
            plan = dataclasses.replace(benchmark.plan, request_rate=value)
            runs.append(dataclasses.replace(benchmark, plan=plan))
            continue
        plan = dataclasses.replace(benchmark.plan, max_concurrency=int(value))
        report = dataclasses.replace(benchmark.report, max_concurrency=int(value))
        runs.append(dataclasses.replace(benchmark, plan=plan, report=report))
    return runs


def _save(stem: Path, result: BenchmarkResult) -> None:
    """Writes a JSON and a records file."""
    content = json.dumps(result.report.as_dict(), indent=1) + "\n"
    with _writing(stem.parent):
        stem.with_suffix(".json").write_text(content, encoding="utf-8")
        with stem.with_suffix(".records.jsonl").open("w", encoding="utf-8") as file:
            for record in result.run.records:
                file.write(json.dumps(record.as_dict(), ensure_ascii=False) + "\n")
    print(f"wrote {stem}.json and {stem}.records.jsonl", file=sys.stderr)


def _save_csv(path: Path, swept: str, reports: Sequence[ServeReport]) -> None:
    with _writing(path.parent), path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([swept, *_CSV_COLUMNS])
        for report in reports:
            content = report.as_dict()
            writer.writerow([content[name] for name in (swept, *_CSV_COLUMNS)])
    print(f"wrote {path}", file=sys.stderr)


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"result_dir: cannot write {directory}: {error.strerror}") from error


# Argument types.


def _positive(text: str) -> float:
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _rate(text: str) -> float:
    value = number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0 or inf, got {text!r}")
    return value


def _temperature(text: str) -> float | None:
    return None if text == "default" else number(text)


def _pair(text: str) -> tuple[int, int]:
    low, _, high = text.partition(",")
    return integer(low), integer(high)


def _pair_of_texts(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not key or not sign:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, value


def _level(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    return name, _positive(limit)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def _sweep(text: str) -> tuple[str, tuple[float, ...]]:
    name, _, values = text.partition("=")
    if name not in _SWEEPABLE:
        known = " or ".join(_SWEEPABLE)
        raise argparse.ArgumentTypeError(f"expected {known} and values, got {text!r}")
    parts = [part for part in values.split(",") if part]
    if not parts:
        raise argparse.ArgumentTypeError(f"expected values after {name}=, got {text!r}")
    if name == "max-concurrency":
        return "max_concurrency", tuple(float(positive_integer(part)) for part in parts)
    return "request_rate", tuple(_rate(part) for part in parts)
