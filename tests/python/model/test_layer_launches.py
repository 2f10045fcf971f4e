# SPDX-License-Identifier: Apache-2.0
"""Number of kernels that a dense decoder layer launches besides its matrix products."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from diffulex.checkpoint.auto_model import detect, load_model
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.paged_batch import PagedRunner, Rows

#: Parts of the names of matrix product kernels, of the library's and of ours.
PRODUCTS = ("gemm", "gemv", "cutlass", "nvjet", "splitk", "cublas", "linear")
MOST_LAUNCHES = 8


def launches(directory, num_layers: int) -> list[str]:
    """Names of the kernels of one decode forward of a model with that many layers, products aside."""
    config = tiny_config(
        num_hidden_layers=num_layers, max_window_layers=num_layers, head_dim=128, hidden_size=256
    )
    CheckpointBuilder(config, dtype=torch.bfloat16).write(directory)
    name, spec, _ = detect(directory)
    model = load_model(name, spec, directory, torch.bfloat16, "cuda")
    runner = PagedRunner(model, spec.block_size, device="cuda", dtype=torch.bfloat16)
    sequence = runner.sequence(list(range(48)))
    runner.forward([Rows(sequence, 32, True)])
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        runner.forward([Rows(sequence, 48, False)])
        torch.cuda.synchronize()
    names = [x.name for x in trace.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    return [x for x in names if not any(part in x.lower() for part in PRODUCTS)]


@pytest.mark.cuda
def test_dense_layer_has_few_launches(tmp_path):
    few, many = launches(tmp_path / "one", 1), launches(tmp_path / "three", 3)
    assert few, "the profiler saw no kernel"
    per_layer = (len(many) - len(few)) / 2
    # Two norms, rotary with store and attention at least; the activation may be a product's.
    assert 4 <= per_layer <= MOST_LAUNCHES, many
