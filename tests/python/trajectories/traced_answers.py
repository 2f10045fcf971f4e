# SPDX-License-Identifier: Apache-2.0
"""Answers of one model per strategy, with their trajectories, and their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from diffulex import Diffulex, RequestOutput, SamplingParams
from diffulex.trace.files import trace_record, write_traces

ZOO = Path(__file__).resolve().parents[3] / "examples" / "zoo"
QUESTIONS = (
    "Max has 29 stones. Max wins 13 stones in a game. 25 of the stones get lost. 440 more stones are"
    " shared equally by 5 children with Max. What is the number of stones now?",
    "Ben has 8 coins. He loses 3 coins. How many coins does Ben have now?",
)
#: Strategy -> model and settings.
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "multi_bd": ("demo", {"buffer_size": 4}),
    "edit": (str(ZOO / "edit_llada2"), {}),
    "d2f": (str(ZOO / "d2f_llada"), {}),
    "d2f_shifted": (str(ZOO / "d2f_dream"), {}),
    "dmax": (str(ZOO / "dmax_llada2"), {}),
    "fast_dllm_v2": (str(ZOO / "fast_dllm_v2"), {}),
    "diffusion_gemma": (str(ZOO / "diffusion_gemma"), {}),
}


@dataclass
class Traced:
    """Answers of one strategy.

    Attributes:
        plain: without a trajectory.
        blocks: at level `blocks`.
        full: at level `full`.
        records: lines of the last.
        path: a file of them.
        mask_id: -1 for a canvas.
    """

    plain: list[RequestOutput]
    blocks: list[RequestOutput]
    full: list[RequestOutput]
    records: list[dict[str, Any]]
    path: Path
    mask_id: int


_KNOWN: dict[str, Traced] = {}


@pytest.fixture
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """What a strategy answered; parametrised indirectly, made once."""
    name: str = request.param
    if name not in _KNOWN:
        _KNOWN[name] = _trace(name, tmp_path_factory.mktemp("traces") / f"{name}.jsonl")
    return _KNOWN[name]


def _trace(name: str, path: Path) -> Traced:
    model, settings = STRATEGIES[name]
    if model != "demo" and not Path(model, "model.safetensors").is_file():
        pytest.skip(f"{model}: the models of the zoo are not in this tree")
    with Diffulex(model, device="cpu", max_num_reqs=2, **settings) as engine:
        outputs = []
        for level in ("none", "blocks", "full"):
            engine.flush_prefix_cache()  # a hit would save a forward
            params = SamplingParams(max_tokens=96, return_trajectory=level)
            answers = engine.generate(QUESTIONS, params, use_chat_template=True, summary=False)
            outputs.append(list(answers))
        records = [
            trace_record(output, engine.tokenizer, question=question, model=name)
            for output, question in zip(outputs[2], QUESTIONS, strict=True)
        ]
        mask_id = engine.config.model.mask_token_id
        is_canvas = engine.config.decoding.traits.has_canvas
    write_traces(path, records)
    return Traced(*outputs, records, path, -1 if is_canvas else mask_id)


every_strategy = pytest.mark.parametrize("traced", STRATEGIES, indirect=True)
