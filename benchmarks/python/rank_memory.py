# SPDX-License-Identifier: Apache-2.0
"""What the ranks of published models hold, by their number: weights, and tokens that fit beside them.

    python benchmarks/python/rank_memory.py

Every part is built without memory, by the classes that load it, in bfloat16. No GPU is needed.
"""

from __future__ import annotations

import argparse
import sys

import torch
from published_shapes import REFERENCE_SHAPES, SHAPES
from step_timing import markdown_table

from diffulex.checkpoint.memory import built_bytes
from diffulex.distributed.layout import Sizes
from diffulex.distributed.legality import legal_heads, shard_of
from diffulex.nn.kv_cache import KVCache
from diffulex.registry import AutoModelForDiffusionLM

_RANKS = (1, 2, 4, 8)


def rows(budget: int) -> list[dict[str, object]]:
    """One for each model: of the rank that holds most, for every number of ranks.

    Args:
        budget: bytes of a device for weights and cache.
    """
    return [_row(name, budget) for name in (*REFERENCE_SHAPES, "llada2-flash")]


def _row(name: str, budget: int) -> dict[str, object]:
    spec, row = SHAPES[name].facts().spec, dict[str, object](model=name)
    make = AutoModelForDiffusionLM.get(SHAPES[name].family)
    for count in _RANKS:
        if count not in legal_heads(spec):
            row[_title(count)] = "no whole heads"
            continue
        shards = [shard_of(spec, Sizes(count), "auto", rank) for rank in range(count)]
        weights = max(built_bytes(make(spec, torch.bfloat16, "meta", shard=s)) for s in shards)
        each = KVCache.page_bytes(spec.per_rank(count).kv_layers, 1, torch.bfloat16)
        tokens = (budget - weights) / each / 1e6
        fits = f"{tokens:.2f} M" if tokens > 0 else "does not fit"
        row[_title(count)] = f"{weights / 1e9:.1f} GB, {fits}"
    return row


def _title(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--mib", type=int, default=143771, help="memory of a device (H200)")
    parser.add_argument("--share", type=float, default=0.9, help="as gpu_memory_utilization")
    options = parser.parse_args(argv)
    print(
        markdown_table(
            ["model", *map(_title, _RANKS)], rows(int((options.mib << 20) * options.share))
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
