# SPDX-License-Identifier: Apache-2.0
"""Draws a run of a model as an SVG: one line per forward, one cell per token.

    python examples/python/draw_denoising.py --output docs/denoising.svg

Grey cells are masks, orange ones were decided by that forward, blue ones earlier; the outline of a
block tells whether it is being denoised (solid) or waits to be cached (dashed). The text of the
finished answer stands below.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

from diffulex import Diffulex, SamplingParams
from diffulex.engine.output import BlockSnapshot, DenoiseSnapshot, RequestOutput

CELL = 17
ROW = 20
LEFT = 74
TOP = 66
COLOURS = {"mask": "#e3e6ea", "new": "#f28e2b", "old": "#4e79a7", "final": "#a8c4e0"}


def cell(x: float, y: float, colour: str) -> str:
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{CELL - 2}" height="{ROW - 5}" rx="3" fill="{colour}"/>'


def draw_block(block: BlockSnapshot, snapshot: DenoiseSnapshot, last: int, y: float) -> list[str]:
    """Cells of one buffer block from the end of the prompt to position `last`, and its outline."""
    parts = []
    columns = []
    for offset, token in enumerate(block.token_ids):
        position = block.start + offset
        if not snapshot.prompt_len <= position < last:
            continue
        column = position - snapshot.prompt_len
        columns.append(column)
        state = "mask" if token == snapshot.mask_token_id else "old"
        if offset in block.newly_written:
            state = "new"
        parts.append(cell(LEFT + column * CELL, y, COLOURS[state]))
    if columns:
        dash = ' stroke-dasharray="4 3"' if block.status == "TO_CACHE" else ""
        width = len(columns) * CELL
        parts.append(
            f'<rect x="{LEFT + columns[0] * CELL - 1.5:.1f}" y="{y - 2:.0f}" width="{width:.0f}" '
            f'height="{ROW - 1}" rx="4" fill="none" stroke="#333"{dash}/>'
        )
    return parts


def draw(prompt: str, snapshots: list[DenoiseSnapshot], output: RequestOutput) -> str:
    """The whole picture as SVG text."""
    prompt_len = len(output.prompt_token_ids)
    last = prompt_len + len(output.token_ids)
    parts = []
    for index, snapshot in enumerate(snapshots):
        y = TOP + index * ROW
        parts.append(f'<text x="8" y="{y + 12}" class="label">step {index + 1}</text>')
        first = snapshot.blocks[0].start if snapshot.blocks else last
        num_final = min(first, last) - prompt_len
        parts += [cell(LEFT + i * CELL, y, COLOURS["final"]) for i in range(num_final)]
        for block in snapshot.blocks:
            parts += draw_block(block, snapshot, last, y)
    bottom = TOP + len(snapshots) * ROW + 18
    answer = output.text.strip().splitlines()
    parts.extend(
        f'<text x="8" y="{bottom + number * 18}" class="answer">{escape(line)}</text>'
        for number, line in enumerate(answer)
    )
    legend = [("mask", "masked"), ("new", "decided by this forward"), ("old", "decided earlier")]
    legend.append(("final", "in the KV cache"))
    x = 8.0
    for state, label in legend:
        parts.append(cell(x, 32, COLOURS[state]))
        parts.append(f'<text x="{x + CELL + 2:.0f}" y="44" class="label">{label}</text>')
        x += CELL + 12 + 6.6 * len(label)
    width = max(LEFT + len(output.token_ids) * CELL + 12, 720)
    height = bottom + len(answer) * 18 + 6
    tpf = len(output.token_ids) / output.metrics.nfe
    title = f"{len(output.token_ids)} tokens in {output.metrics.nfe} forwards ({tpf:.1f} a forward)"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="DejaVu Sans Mono, monospace">',
            "<style>.label{font-size:11px;fill:#555}.answer{font-size:13px;fill:#111}"
            ".title{font-size:13px;fill:#111}</style>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<text x="8" y="20" class="title">{escape(prompt[:60])}… {title}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--buffer-size", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path("docs/denoising.svg"))
    arguments = parser.parse_args()
    snapshots: list[DenoiseSnapshot] = []
    with Diffulex(arguments.model, buffer_size=arguments.buffer_size) as engine:
        prompt_ids = engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": arguments.prompt}]
        )
        for event in engine.stream(prompt_ids, SamplingParams(max_tokens=128), mode="denoise"):
            if event.snapshot is not None:
                snapshots.append(event.snapshot)
            if event.output is not None:
                output = event.output
    arguments.output.write_text(draw(arguments.prompt, snapshots, output), encoding="utf-8")
    print(f"{arguments.output}: {len(snapshots)} forwards, {len(output.token_ids)} tokens")


if __name__ == "__main__":
    main()
