# SPDX-License-Identifier: Apache-2.0
"""Draws a run of a model as an SVG: one line per forward, one cell per token.

    python examples/python/draw_denoising.py --output docs/denoising.svg

Grey cells are masks, orange ones were decided by that forward, blue ones earlier; the outline of a
block tells whether it is being denoised (solid) or waits to be cached (dashed).
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

from diffulex import Diffulex, SamplingParams
from diffulex.engine.output import BlockSnapshot, DenoiseSnapshot, RequestOutput

CELL = 27
ROW = 22
LEFT = 78
TOP = 66
COLOURS = {"mask": "#e3e6ea", "new": "#f5b26b", "old": "#8fb3d9", "final": "#d3e3f2"}


def cell(x: float, y: float, state: str, text: str = "") -> str:
    """One token: a coloured box with its text."""
    shown = escape(text.replace("\n", "\u21b5").replace(" ", "\u00a0"))
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{CELL - 2}" height="{ROW - 5}" rx="3" '
        f'fill="{COLOURS[state]}"/><text x="{x + CELL / 2 - 1:.0f}" y="{y + 12:.0f}" '
        f'class="token">{shown}</text>'
    )


def draw_block(
    block: BlockSnapshot, snapshot: DenoiseSnapshot, words: dict[int, str], y: float
) -> list[str]:
    """Cells of the positions of one buffer block that belong to the answer, and its outline."""
    parts = []
    columns = []
    for offset, token in enumerate(block.token_ids):
        position = block.start + offset
        if position not in words:
            continue
        column = position - snapshot.prompt_len
        columns.append(column)
        state = "mask" if token == snapshot.mask_token_id else "old"
        if offset in block.newly_written:
            state = "new"
        text = "" if state == "mask" else words[position]
        parts.append(cell(LEFT + column * CELL, y, state, text))
    if columns:
        dash = ' stroke-dasharray="4 3"' if block.status == "TO_CACHE" else ""
        width = len(columns) * CELL
        parts.append(
            f'<rect x="{LEFT + columns[0] * CELL - 1.5:.1f}" y="{y - 2:.0f}" width="{width:.0f}" '
            f'height="{ROW - 1}" rx="4" fill="none" stroke="#333"{dash}/>'
        )
    return parts


def draw(
    engine: Diffulex, prompt: str, snapshots: list[DenoiseSnapshot], output: RequestOutput
) -> str:
    """The whole picture as SVG text."""
    prompt_len = len(output.prompt_token_ids)
    words = {
        prompt_len + index: engine.tokenizer.decode([token])
        for index, token in enumerate(output.token_ids)
    }
    last = prompt_len + len(output.token_ids)
    parts = []
    for index, snapshot in enumerate(snapshots):
        y = TOP + index * ROW
        parts.append(f'<text x="8" y="{y + 12}" class="label">forward {index + 1}</text>')
        first = snapshot.blocks[0].start if snapshot.blocks else last
        for position in range(prompt_len, min(first, last)):
            x = LEFT + (position - prompt_len) * CELL
            parts += [cell(x, y, "final", words[position])]
        for block in snapshot.blocks:
            parts += draw_block(block, snapshot, words, y)
    legend = {
        "mask": "masked",
        "new": "decided by this forward",
        "old": "decided earlier",
        "final": "in the KV cache",
    }
    x = 8.0
    for state, label in legend.items():
        parts.append(cell(x, 32, state))
        parts.append(f'<text x="{x + CELL + 2:.0f}" y="44" class="label">{label}</text>')
        x += CELL + 16 + 6.7 * len(label)
    width = max(LEFT + len(output.token_ids) * CELL + 12, 720)
    height = TOP + len(snapshots) * ROW + 8
    rate = len(output.token_ids) / output.metrics.nfe
    title = f"{len(output.token_ids)} tokens in {output.metrics.nfe} forwards ({rate:.1f} each)"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="DejaVu Sans Mono, monospace">',
            f"<title>{escape(prompt)}</title>",
            "<style>.label{font-size:11px;fill:#555}.title{font-size:13px;fill:#111}"
            ".token{font-size:11px;fill:#111;text-anchor:middle}</style>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<text x="8" y="20" class="title">{title}</text>',
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
        picture = draw(engine, arguments.prompt, snapshots, output)
    arguments.output.write_text(picture, encoding="utf-8")
    print(f"{arguments.output}: {len(snapshots)} forwards, {len(output.token_ids)} tokens")


if __name__ == "__main__":
    main()
