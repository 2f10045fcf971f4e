# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints in low precision: one line that names the tensor, before memory is taken."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffulex.checkpoint import memory
from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.quantization.layers import StoredQuantizer
from diffulex.quantization.stored import read_stored
from diffulex.tools.cli import main
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.moe_families import moe_builder, moe_config, stack_experts
from fixtures.quantized import EXPERT_FORMATS, FORMATS, error_of, read_tensors

if TYPE_CHECKING:
    from pathlib import Path

ALL = {**FORMATS, **EXPERT_FORMATS}
DENSE = tiny_config(num_hidden_layers=1, intermediate_size=160)
#: The smallest matrix of the models here is larger, all that belongs to it is smaller.
WEIGHT_BYTES = 2048


class _Memory(TorchDispatchMode):
    """Notes the largest tensor with values that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            if isinstance(item, torch.Tensor) and not item.is_meta:
                self.largest = max(self.largest, item.nbytes)
        return result


def write(directory: Path, name: str) -> None:
    if name in FORMATS:
        CheckpointBuilder(DENSE).write(directory)
    else:
        config = moe_config("llada2", moe_intermediate_size=48, hidden_size=64)
        num = config["num_experts"]
        edit = (lambda tensors: stack_experts(tensors, num, "merged")) if name == "f5" else None
        moe_builder("llada2", config=config, edit=edit).write(directory)
    ALL[name].write(directory)


def load(directory: Path, as_stored: bool) -> None:
    name, spec, info = detect(directory)
    quantizer = None
    if as_stored and info.stored is not None:
        quantizer = StoredQuantizer(info.stored, directory)
    load_model(name, spec, directory, torch.float32, "cpu", quantizer=quantizer)


def module_of(name: str) -> str:
    """What an error about a part of a matrix names at least."""
    module, _, last = name.rpartition(".")
    return name.removesuffix("_scale") if last.startswith(("gate_", "up_", "down_")) else module


def damage(
    rng: np.random.Generator, tensors: dict[str, torch.Tensor], path: Path
) -> tuple[str, str]:
    """One damage that no reader may take for a checkpoint; its kind, and what was damaged."""
    parts = ("weight_scale", "weight_scale_inv", "scales", "qzeros", "qweight", "weight_packed")
    coded = [
        name
        for name in tensors
        if name.endswith((*(f".{part}" for part in parts), "_proj_scale"))
        or tensors[name].dtype in (torch.float8_e4m3fn, torch.int8)
    ]
    name = coded[rng.integers(len(coded))]
    kind = str(rng.choice(["missing", "dtype", "shape", "cut", "extra", "nan"]))
    tensor = tensors[name]
    if kind == "nan" and not tensor.is_floating_point():
        kind = "cut"
    if kind == "missing":
        del tensors[name]
    elif kind == "dtype":  # beside a legal shape
        others = [torch.uint8, torch.int16, torch.float64, torch.bool]
        tensors[name] = tensor.float().to(others[rng.integers(len(others))])
    elif kind == "shape":
        flat = tensor.flatten()
        tensors[name] = torch.cat([flat, flat[:1]]).reshape(-1, 1, 1)
    elif kind == "extra":
        tensors[f"{name}.more"] = torch.zeros(3)
    elif kind == "nan" and tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).flatten()[0] = 0x7F
    elif kind == "nan":
        tensor.flatten()[0] = float("nan")
    save_file(tensors, path)
    if kind == "cut":
        content = path.read_bytes()
        path.write_bytes(content[: rng.integers(1, len(content))])
        return kind, path.name
    return kind, f"{name}.more" if kind == "extra" else module_of(name)


@pytest.mark.slow
def test_two_hundred_damaged_checkpoints(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives one line that names what is damaged, whichever way it is read.

    All but values that are no numbers stand in the headers, so that no memory is asked for.
    """
    asked: list[object] = []
    monkeypatch.setattr(memory, "check_memory", lambda *arguments: asked.append(arguments))
    rng = np.random.default_rng(20)
    names, kinds = list(ALL), set()
    for name in names:
        write(tmp_path / name, name)
    originals = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in names}
    for number in range(200):
        directory = tmp_path / names[number % len(names)]
        path = directory / "model.safetensors"
        path.write_bytes(originals[directory.name])
        kind, named = damage(rng, read_tensors(directory), path)
        where = f"{directory.name}: {kind} {named}"
        asked.clear()
        with _Memory() as taken:
            message = error_of(load, directory, bool(number % 3))
        assert message, f"{where}: nothing was found"
        assert named in message, f"{where}: {message}"
        assert "\n" not in message, where
        if kind != "nan":
            assert not asked, where
            assert taken.largest < WEIGHT_BYTES, where
        kinds.add((kind, directory.name in FORMATS))
    assert len(kinds) == 12


def test_memory_is_taken_for_what_is_whole(tmp_path) -> None:
    """Or else the bound of the test above would hold for anything."""
    write(tmp_path, "ct_int8")
    with _Memory() as taken:
        load(tmp_path, True)
    assert taken.largest > WEIGHT_BYTES


def _damaged_json(rng: np.random.Generator, value: Any) -> Any:
    """The configuration with one value of another kind."""
    strange = [None, -1, 3.5, "?", [], {}, [1], {"a": 1}, True, [[128]], "re:["]
    if isinstance(value, dict) and value:
        key = list(value)[rng.integers(len(value))]
        return {**value, key: _damaged_json(rng, value[key])}
    return strange[rng.integers(len(strange))]


def test_damaged_configurations(tmp_path) -> None:
    """A description with a value of another kind is read or refused in one line, in each of its places."""
    rng = np.random.default_rng(21)
    refused: dict[str, int] = dict.fromkeys(ALL, 0)
    for number in range(540):
        name = list(ALL)[number % len(ALL)]
        stored = ALL[name]
        config = {stored.key: stored.config} if stored.key else stored.config
        config, file = (_damaged_json(rng, item) if item else {} for item in (config, stored.file))
        for path, content in (("config.json", config), ("hf_quant_config.json", file)):
            (tmp_path / path).write_text(json.dumps(content))
        message = error_of(read_stored, tmp_path)
        refused[name] += bool(message)
        assert "\n" not in message
    assert all(refused.values()), refused


@pytest.mark.slow
def test_commands_say_it_in_one_line(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """`quantize` of a plain checkpoint, and a server of one in low precision."""
    name = "model.layers.0.mlp.down_proj.weight"
    CheckpointBuilder(DENSE).write(tmp_path / "plain")
    write(tmp_path / "coded", "ct_int8")
    for directory in (tmp_path / "plain", tmp_path / "coded"):
        tensors = read_tensors(directory)
        tensors[name] = tensors[name][:7].clone()
        save_file(tensors, directory / "model.safetensors")
    out = tmp_path / "out"
    assert main(["quantize", str(tmp_path / "plain"), str(out), "--quantization", "fp8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name}: expected shape [64, 160], got [7, 160]" in line
    assert not out.exists()
    command = [sys.executable, "-m", "diffulex", "serve", str(tmp_path / "coded"), "--port", "0"]
    served = subprocess.run(
        [*command, "--device", "cpu"], capture_output=True, text=True, check=False, timeout=240
    )
    assert served.returncode == 1, served.stderr
    lines = [line for line in served.stderr.splitlines() if "error" in line.lower()]
    assert len(lines) == 1, served.stderr
    assert (
        "model.layers.0.mlp.down_proj.weight_scale: expected shape [7, 1], [7] or [1]" in lines[0]
    )
    assert "Traceback" not in served.stderr
