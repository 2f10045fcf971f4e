# SPDX-License-Identifier: Apache-2.0
"""Programs in the shapes of published models, over random weights: what they weigh and what a step takes.

    python benchmarks/python/bench_edge_shape.py sdar-0.6b --quant 8da4w --output FILE

Writes a checkpoint, exports it, and times calls over a block in a process of its own, beside what
`diffulex edge estimate` says. `--layers` keeps the sizes of a large shape and fewer of its layers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from published_shapes import SHAPES, Shape
from safetensors.torch import save_file
from torch import Tensor

from diffulex.checkpoint.resolve import DEMO, resolve_model
from diffulex.families.spec import ModelSpec
from diffulex_edge.bundle import copy_checkpoint_files
from diffulex_edge.families import check_family
from diffulex_edge.measure import bench_bundle, estimate
from diffulex_edge.model import EdgeDecoder
from diffulex_edge.recipes import parse_recipe

#: How much of the weights one file holds.
_SHARD_BYTES = 1 << 30


def draw(spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Weights in bfloat16 by name.

    The head is the embedding table, as large as the layers' sum: every row's own id is then clearly the
    best, as a trained model's best ids are, and rounding does not decide between equals.
    """
    with torch.device("meta"):
        table = EdgeDecoder(spec, 1).weight_table()
    names, same = spec.names, (spec.names.embedding, spec.names.head)
    for index, (name, like) in enumerate(table.items()):
        if name == names.head and spec.tie_word_embeddings:
            continue
        generator = torch.Generator().manual_seed(0 if name in same else index + 1)
        weight = torch.randn(like.shape, generator=generator)
        if name not in same:
            weight = 1 + 0.1 * weight if weight.dim() == 1 else 0.02 * weight
        yield name, weight.to(torch.bfloat16)


def write_checkpoint(spec: ModelSpec, config: Mapping[str, Any], directory: Path) -> int:
    """Files that the export reads, the tokenizer that of the bundled model; the number of weights."""
    copy_checkpoint_files(resolve_model(DEMO), directory)
    (directory / "generation_config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    where: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    count, num_shards = 0, 0

    def write_shard() -> None:
        nonlocal num_shards
        num_shards += 1
        file = f"model-{num_shards:05}.safetensors"
        save_file(shard, directory / file)
        where.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, weight in draw(spec):
        shard[name] = weight
        count += weight.numel()
        if sum(item.nbytes for item in shard.values()) >= _SHARD_BYTES:
            write_shard()
    write_shard()
    index = json.dumps({"metadata": {}, "weight_map": where})
    (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return count


def export(shape: Shape, model: Path, output: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The export's report; in a process of its own, whose largest memory is that of the export."""
    command = [
        sys.executable,
        "-m",
        "diffulex_edge",
        "export",
        "--json",
        "--model-name",
        shape.model_name,
    ]
    command += ["--mask-token-id", str(shape.config["mask_token_id"])]
    command += ["--model", str(model), "-o", str(output), "--quant", options.quant]
    command += ["--max-model-len", str(options.max_model_len)]
    command += ["--max-rows", str(options.max_rows), "--max-logits", str(options.max_logits)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.returncode)
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One row of results."""
    shape = SHAPES[options.shape]
    if options.layers:
        name = "n_layers" if "n_layers" in shape.config else "num_hidden_layers"
        shape = shape.with_keys(**{name: min(options.layers, shape.config[name])})
    spec = shape.facts().spec
    check_family(spec)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        model, bundle = Path(name) / "model", Path(name) / options.shape
        model.mkdir()
        num_weights = write_checkpoint(spec, shape.config, model)
        report = export(shape, model, bundle, options)
        times = bench_bundle(bundle, options.threads, rows=options.rows, repeat=options.repeat)
    expected = estimate(
        spec,
        parse_recipe(options.quant),
        options.max_model_len,
        max_rows=options.max_rows,
        max_logits=options.max_logits,
    )
    return {
        **asdict(times),
        "quant": report["quant"],
        "layers": spec.num_layers,
        "weights": num_weights,
        "max_model_len": options.max_model_len,
        "max_rows": options.max_rows,
        "max_logits": options.max_logits,
        "export_seconds": round(report["compilation_time_sec"], 1),
        "export_peak_mb": round(report["peak_rss_mb"], 1),
        "delegates": report["num_delegates"],
        "equal_best_ids": report["agreement"]["argmax"],
        "estimated_file_mb": round(expected.file / 1e6, 2),
        "estimated_resident_mb": round(expected.resident / 1e6, 2),
        "file_to_estimate": round(1e6 * times.file_mb / expected.file, 3),
        "resident_to_estimate": round(1e6 * times.rss_mb / expected.resident, 3),
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
    }


def main() -> int:
    """Prints the row, and appends it to a file of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--quant", default="8da4w")
    parser.add_argument("--layers", type=int, help="at most so many of the shape's")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--max-logits", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="of a timed call")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--directory", type=Path, help="for the checkpoint and the program")
    parser.add_argument("--output", type=Path, help="JSON list to append to")
    options = parser.parse_args()
    row = measure(options)
    print(json.dumps(row, indent=1))
    if options.output is not None:
        is_new = not options.output.is_file()
        rows = [] if is_new else json.loads(options.output.read_text(encoding="utf-8"))
        text = json.dumps([*rows, row], indent=1)
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
