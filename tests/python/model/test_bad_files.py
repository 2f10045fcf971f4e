# SPDX-License-Identifier: Apache-2.0
"""Malformed checkpoint files: one error that names the file and the key."""

from __future__ import annotations

import json
import time

import pytest
import torch

from diffulex.engine.tokenizer import Tokenizer
from diffulex.errors import CheckpointError, PromptError
from diffulex.model import memory
from diffulex.model.auto_model import detect, load_model
from fixtures.checkpoints import CheckpointBuilder, tiny_config


def load(directory):
    name, spec, _ = detect(directory)
    return load_model(name, spec, directory, torch.float32, "cpu")


def edit(path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("config.json", {"rope_parameters": {"rope_theta": [1]}}, "rope_parameters.rope_theta"),
        ("config.json", {"rope_theta": "big"}, "rope_theta: expected a positive number"),
        ("config.json", {"rms_norm_eps": 10**400}, "rms_norm_eps: expected a positive number"),
        ("config.json", {"hidden_size": 10**12}, "hidden_size: expected an integer of at most"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder: expected"),
        ("tokenizer.json", {"added_tokens": 7}, "added_tokens: expected a list, got 7"),
    ],
)
def test_values_of_the_wrong_kind(tmp_path, name, changes, message):
    CheckpointBuilder().write(tmp_path)
    edit(tmp_path / name, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        detect(tmp_path)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_deep_nesting(tmp_path, name):
    CheckpointBuilder().write(tmp_path)
    (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply") as caught:
        detect(tmp_path)
    assert name in str(caught.value)


def test_weights_that_are_a_directory(tmp_path):
    CheckpointBuilder().write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected a file, got a dir"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 60_000}, "num_hidden_layers: expected at most 25"),
        ({"hidden_size": 2_000_000_000}, r"expected shape \[300, 2000000000\], got \[300, 64\]"),
        ({"intermediate_size": 2_000_000_000}, "gate_proj.weight: expected shape"),
        ({"max_position_embeddings": 2_000_000_000}, r"needs \d+\.\d GiB, \d+\.\d GiB available"),
    ],
)
def test_sizes_beyond_the_files_are_answered_at_once(tmp_path, changes, message):
    CheckpointBuilder().write(tmp_path)
    edit(tmp_path / "config.json", **changes)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
    assert time.perf_counter() - start < 10


def test_failed_allocation(tmp_path, monkeypatch):
    CheckpointBuilder().write(tmp_path)
    _, spec, _ = detect(tmp_path)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 3 << 29)
    with (
        pytest.raises(CheckpointError, match=r"needs \d+\.\d GiB, 1\.5 GiB available"),
        memory.reporting_memory(spec, torch.float32, "cpu"),
    ):
        torch.empty(1 << 50)
    with (
        pytest.raises(RuntimeError, match="other"),
        memory.reporting_memory(spec, torch.float32, "cpu"),
    ):
        raise RuntimeError("other")


def test_template_that_raises(tmp_path, capfd):
    CheckpointBuilder(tiny_config()).write(tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    tokenizer.backend.chat_template = "{{ messages + 1 }}"
    with pytest.raises(PromptError, match="chat template: it rejected the messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    tokenizer.encode("x" * 5000)
    assert capfd.readouterr().err == ""
