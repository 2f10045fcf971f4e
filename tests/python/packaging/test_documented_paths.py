# SPDX-License-Identifier: Apache-2.0
"""Import paths that were documented before the packages were sorted keep working."""

from __future__ import annotations

import importlib

import pytest

#: Module as documented, module of today, and the names that plug-ins import.
PATHS = [
    ("diffulex.engine.model_runner", "diffulex.runner.model_runner", "ModelRunner"),
    ("diffulex.layers.attention", "diffulex.nn.attention", "BlockAttention"),
    ("diffulex.layers.feed_forward", "diffulex.nn.feed_forward", "FeedForward"),
    ("diffulex.model.auto_model", "diffulex.checkpoint.auto_model", "detect load_model"),
    ("diffulex.model.config", "diffulex.families.spec", "ModelSpec"),
    (
        "diffulex.model.config.decoder",
        "diffulex.families.spec.decoder",
        "FamilyTokens read_decoder_spec",
    ),
    ("diffulex.model.config.moe", "diffulex.families.spec.moe", "MoeSpec"),
    ("diffulex.model.config.names", "diffulex.families.spec.names", "TensorNames"),
    ("diffulex.model.config.reader", "diffulex.families.spec.reader", "ConfigReader"),
    ("diffulex.model.decoder", "diffulex.nn.decoder", "DecoderForDiffusionLM build_feed_forward"),
    ("diffulex.sampler.base", "diffulex.samplers.base", "MaskFillSampler SamplerInputs"),
    ("diffulex.server.engine_loop", "diffulex.serving.engine_loop", "EngineLoop"),
]


@pytest.mark.parametrize(("documented", "today", "names"), PATHS, ids=[row[0] for row in PATHS])
def test_path_names_the_same_objects(documented: str, today: str, names: str) -> None:
    for name in names.split():
        assert getattr(importlib.import_module(documented), name) is getattr(
            importlib.import_module(today), name
        )
