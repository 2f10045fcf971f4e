# SPDX-License-Identifier: Apache-2.0
"""Answers of the engine over `HashModel`, which the session in C++ must repeat token for token.

python tests/python/edge/session_cases.py    # writes tests/data/edge/session_cases.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests/python"))

from diffulex import Diffulex, SamplingParams  # noqa: E402
from diffulex.config.config import Config, read_model_facts  # noqa: E402
from diffulex_edge.session_conf import session_conf  # noqa: E402
from edge.hash_model import HashModel  # noqa: E402

__all__ = ["CASES", "CASES_FILE", "run_case"]

CASES_FILE = ROOT / "tests/data/edge/session_cases.json"
_ZOO = ROOT / "examples/zoo"
_MAX_LEN = 160
#: Positions of the cache past the longest answer, for the rest of its last block.
_SPARE = 32
#: Engine settings that a bundle has: one request, its own cache.
_FIXED = {
    "device": "cpu",
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.9,
    "max_model_len": _MAX_LEN,
    "max_num_reqs": 1,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's settings and requests, which are answered in turn by one engine."""

    name: str
    model: str
    settings: dict[str, Any]
    requests: tuple[tuple[int, dict[str, Any]], ...]  # (prompt length, parameters)


_STOPS = tuple(range(100, 120))
_GREEDY = ((13, {"max_tokens": 60}), (32, {"max_tokens": 33, "stop_token_ids": _STOPS}))
_LONG = ((96, {"max_tokens": 64}), (1, {"max_tokens": 5}), (159, {"max_tokens": 40}))
_DRAWN = (
    (17, {"max_tokens": 40, "temperature": 0.7, "top_p": 0.9, "seed": 7}),
    (17, {"max_tokens": 40, "temperature": 0.9, "top_k": 5, "min_p": 0.01}),
    (8, {"max_tokens": 30, "temperature": 1.3, "top_p": 1.0, "top_k": 0}),
    (8, {"max_tokens": 30, "stop_token_ids": _STOPS}),
)
_STATIC = {"acceptance_rule": "static", "denoising_steps": 2, "force_accept_last_step": True}
_HIERARCHY = {
    "acceptance_rule": "hierarchy",
    "low_threshold": 0.3,
    "confidence_type": "neg_entropy",
}
CASES = (
    Case("sdar", "demo", {"buffer_size": 1}, (*_GREEDY, *_LONG)),
    Case("sdar_n4", "demo", {"buffer_size": 4}, (*_GREEDY, *_LONG)),
    Case("sdar_drawn", "demo", {"buffer_size": 2}, _DRAWN),
    Case("sdar_static", "demo", {"buffer_size": 1, **_STATIC}, _GREEDY),
    Case("sdar_hierarchy", "demo", {"buffer_size": 2, **_HIERARCHY}, (*_GREEDY, *_DRAWN)),
    Case("sdar_all_rows", "demo", {"demote_token_ids": (5, 6, 7, 8, 9)}, _GREEDY),
    Case("d2f", "d2f_llada", {}, (*_GREEDY, *_LONG)),
    Case("d2f_drawn", "d2f_llada", {"buffer_size": 2}, _DRAWN),
    Case("d2f_shifted", "dream", {"decoding_strategy": "d2f"}, (*_GREEDY, *_LONG)),
    Case("d2f_shifted_drawn", "dream", {"decoding_strategy": "d2f"}, _DRAWN),
    Case("shifted", "dream", {"decoding_strategy": "multi_bd", "buffer_size": 2}, _DRAWN + _GREEDY),
    Case("dual_cache", "fast_dllm_v2", {}, (*_GREEDY, *_LONG)),
    Case("dual_cache_drawn", "fast_dllm_v2", {}, _DRAWN),
    Case("dual_cache_off", "fast_dllm_v2", {"fdv2_use_block_cache": False}, (*_GREEDY, *_LONG)),
    Case("edit", "edit_llada2", {}, (*_GREEDY, *_LONG)),
    Case("edit_drawn", "edit_llada2", {"buffer_size": 2}, _DRAWN),
)


def run_case(case: Case) -> dict[str, Any]:
    """The case as the file has it: settings, prompts, answers."""
    with TemporaryDirectory() as directory:
        facts = read_model_facts(_checkpoint(case.model, Path(directory)), {})
        settings = {**_FIXED, **case.settings}
        config = Config.resolve(case.model, facts, settings)
        config = config.with_num_pages(config.pages_per_request)
        model = HashModel(config.model.spec, _MAX_LEN + _SPARE)
        requests = []
        with Diffulex.from_components(config, model, None) as engine:
            for index, (length, params) in enumerate(case.requests):
                prompt = [(7 * position + 13 * index) % 500 for position in range(length)]
                (answer,) = engine.generate([prompt], SamplingParams(**params))
                requests.append(
                    {
                        "prompt": prompt,
                        "params": {key: _plain(value) for key, value in params.items()},
                        "output": list(answer.token_ids),
                        "reason": answer.completion_reason,
                        "nfe": answer.metrics.nfe,
                    }
                )
        return {"name": case.name, "conf": session_conf(config), "requests": requests}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _checkpoint(model: str, directory: Path) -> str:
    """A directory of the zoo; `dream` is the Fast-dLLM v2 model under another architecture."""
    if model == "demo":
        return model
    if model != "dream":
        return str(_ZOO / model)
    for path in (_ZOO / "fast_dllm_v2").iterdir():
        if path.is_file() and path.name != "config.json":
            (directory / path.name).symlink_to(path)
    config = json.loads((_ZOO / "fast_dllm_v2/config.json").read_text())
    config.update(architectures=["DreamModel"], model_type="Dream")
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def main() -> int:
    """Writes all cases, one a line."""
    lines = [json.dumps(run_case(case), sort_keys=True) for case in CASES]
    CASES_FILE.parent.mkdir(parents=True, exist_ok=True)
    CASES_FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
