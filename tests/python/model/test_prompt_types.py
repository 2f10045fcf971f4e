# SPDX-License-Identifier: Apache-2.0
"""Arguments of the wrong type, and the forms that are accepted."""

from __future__ import annotations

import re

import pytest
import torch

from diffulex import ConfigError, Diffulex, PromptError, SamplingParams
from fixtures.checkpoints import CheckpointBuilder


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("types")
    CheckpointBuilder().write(directory)
    with Diffulex(str(directory), device="cpu", dtype=torch.bfloat16) as engine:
        yield engine


def test_dtype_of_torch(engine):
    assert engine.config.model.dtype == "bfloat16"


def test_a_list_of_messages_is_one_chat(engine):
    params = SamplingParams(max_tokens=4)
    messages = [{"role": "user", "content": "a"}]
    (output,) = engine.generate(messages, params, summary=False)
    assert output.prompt_token_ids == tuple(engine.tokenizer.apply_chat_template(messages))
    assert len(engine.generate([messages, messages], params, summary=False)) == 2


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {"role": "user", "content": "a"}])
def test_prompts_of_another_type(engine, prompts):
    with pytest.raises(PromptError, match="prompts: expected a text, token ids, chat messages"):
        engine.generate(prompts)


@pytest.mark.parametrize("params", [{"max_tokens": 4}, 5, "abc", [1], [None]])
def test_parameters_of_another_type(engine, params):
    with pytest.raises(ValueError, match="sampling_params: expected SamplingParams or a list"):
        engine.generate("a", params)


@pytest.mark.parametrize("stops", [5, "12", None])
def test_stop_ids_of_another_type(stops):
    with pytest.raises(ValueError, match="stop_token_ids: expected a list of token ids"):
        SamplingParams(stop_token_ids=stops)


@pytest.mark.parametrize("model", [None, 5])
def test_model_of_another_type(model):
    with pytest.raises(ConfigError, match=re.escape("model: expected 'demo', a directory")):
        Diffulex(model)
