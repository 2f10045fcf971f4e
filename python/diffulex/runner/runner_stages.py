# SPDX-License-Identifier: Apache-2.0
"""Which methods of a rank's worker are stages of a step, and under which names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.profiling.scopes import Stage
from diffulex.samplers.base import RowSampler

if TYPE_CHECKING:
    from diffulex.runner.batch import StepBuffers
    from diffulex.runner.decode_graphs import DecodeGraphs
    from diffulex.runner.decode_loop import DecodeLoop
    from diffulex.runner.sampler_inputs import SamplerInputsBuilder
    from diffulex.strategies.traits import StrategyTraits

__all__ = ["stages_of"]

#: What the executor calls in a step.
_CALLS = ("execute", "start_loop", "run_ahead", "collect")


def stages_of(
    runner: Any,
    traits: StrategyTraits,
    graphs: DecodeGraphs,
    buffers: StepBuffers,
    inputs: SamplerInputsBuilder,
    sampler: Any,
    loop: DecodeLoop | None,
) -> list[Stage]:
    """The stages of a `ModelRunner` and of its parts."""
    area = traits.area
    own = {
        "_before_forward": "before_model_forward",
        "_model_forward": "model_forward",
        "_eager_prefill": "eager_prefill",
        "_eager_decode": "eager_decode",
        "_logits": "compute_logits",
        "_decide": "sampler",
    }
    graph = "cuda_graph_decode" if traits.has_dual_cache else "full_static_decode"
    stages = [
        *(Stage(runner, name, "model_runner.rank0", name) for name in _CALLS),
        *(Stage(runner, method, area, name) for method, name in own.items()),
        Stage(graphs, "replay", area, graph),
        Stage(buffers, "upload", area, "prepare.copy_inputs"),
        Stage(buffers, "download", area, "wait_for_output"),
        Stage(inputs, "inputs", area, "prepare_sample"),
    ]
    if isinstance(sampler, RowSampler):
        stages.append(Stage(sampler.rows, "run", "sampler", "sample_tokens"))
    if loop is not None:
        stages += loop.stages(area, graph)
    return stages
