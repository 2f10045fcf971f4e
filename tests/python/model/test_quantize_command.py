# SPDX-License-Identifier: Apache-2.0
"""`diffulex quantize`: what it writes is what quantising while loading makes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from diffulex import Diffulex, SamplingParams
from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.checkpoint.resolve import demo_dir
from diffulex.errors import CheckpointError, ConfigError
from diffulex.quantization import convert as module
from diffulex.quantization.convert import convert
from diffulex.quantization.experts import QuantizedExperts
from diffulex.quantization.layers import ModelQuantizer, StoredQuantizer
from diffulex.quantization.scheme import SCHEMES, QuantizationPlan
from diffulex.quantization.weights import QuantizedWeight
from diffulex.tools.cli import main
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.gemma import GemmaOracle
from fixtures.moe_families import moe_builder, moe_config, stack_experts
from fixtures.quantized import FORMATS, read_tensors

if TYPE_CHECKING:
    from pathlib import Path

FP32 = torch.float32
PLAN = QuantizationPlan("int8")


def load(directory: Path, plan: QuantizationPlan | None) -> Any:
    """Quantised while loading, or without a plan as it is stored."""
    name, spec, info = detect(directory)
    quantizer = StoredQuantizer(info.stored, directory) if plan is None else ModelQuantizer(plan)
    return load_model(name, spec, directory, FP32, "cpu", quantizer=quantizer)


def held(model: Any) -> dict[str, list[QuantizedWeight]]:
    found: dict[str, list[QuantizedWeight]] = {}
    for name, layer in model.named_modules():
        weight = getattr(layer, "format", getattr(layer, "matrices", None))
        if isinstance(weight, QuantizedExperts):
            found[name] = [*weight.w13, *weight.w2]
        elif isinstance(weight, QuantizedWeight):
            found[name] = [weight]
    return found


def assert_same_weights(first: Any, second: Any) -> int:
    """Codes and scales bit for bit, and everything else; how many matrices there are."""
    one, two = held(first), held(second)
    assert one.keys() == two.keys() != set()
    count = 0
    for name, weights in one.items():
        for a, b in zip(weights, two[name], strict=True):
            count += 1
            assert (a.scheme, len(a._parts)) == (b.scheme, len(b._parts)), name
            for p, q in zip(a._parts, b._parts, strict=True):
                assert torch.equal(p.codes.view(torch.uint8), q.codes.view(torch.uint8)), name
                assert torch.equal(p.scale, q.scale), name
                assert p.scale.dtype == q.scale.dtype
    values = dict(second.named_parameters())
    for name, parameter in first.named_parameters():
        assert parameter.is_meta or torch.equal(parameter, values[name]), name
    return count


def write_model(directory: Path, family: str) -> None:
    if family == "sdar":
        CheckpointBuilder(tiny_config(intermediate_size=200), dtype=torch.bfloat16).write(directory)
    elif family == "diffusion_gemma":
        GemmaOracle(seed=3, moe_intermediate_size=40).write(directory)
    else:
        name, _, layout = family.partition("/")
        config = moe_config(name, moe_intermediate_size=144, hidden_size=64)
        count = config["num_experts"]
        edit = (lambda tensors: stack_experts(tensors, count, layout)) if layout else None
        moe_builder(name, config=config, edit=edit).write(directory)


MODELS = ("sdar", "sdar_moe", "llada2/gate_up", "llada2/merged", "diffusion_gemma")


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("family", "scheme"),
    [("sdar", scheme) for scheme in SCHEMES]
    + [(family, scheme) for family in MODELS[1:] for scheme in ("fp8_block", "int4")],
)
def test_what_is_written_is_what_loading_makes(tmp_path, family: str, scheme: str) -> None:
    """Blocks that end inside of 128 rows, rows without a whole group, and stacked experts included."""
    write_model(tmp_path / "model", family)
    plan = QuantizationPlan(scheme)
    written = convert(tmp_path / "model", tmp_path / "out", plan)
    online, stored = load(tmp_path / "model", plan), load(tmp_path / "out", None)
    count = assert_same_weights(online, stored)
    assert written.num_matrices >= count
    assert written.new_bytes < written.old_bytes
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_heads_and_patterns(tmp_path) -> None:
    """An int8 head beside int4, which makes two groups, and modules in their dtype."""
    write_model(tmp_path / "model", "sdar")
    plan = QuantizationPlan("int4", 32, ("model.layers.0.*", "*.o_proj"), quantize_head=True)
    convert(tmp_path / "model", tmp_path / "out", plan)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    formats = {group["format"] for group in config["config_groups"].values()}
    assert formats == {"pack-quantized", "int-quantized"}
    assert "model.layers.0.mlp.up_proj" in config["ignore"]
    online, stored = load(tmp_path / "model", plan), load(tmp_path / "out", None)
    assert assert_same_weights(online, stored) == 4
    assert "head" in held(stored)


def test_files_of_about_one_size(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", "sdar")
    monkeypatch.setattr(module, "_SHARD_BYTES", 20_000)
    convert(tmp_path / "model", tmp_path / "out", PLAN)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert assert_same_weights(load(tmp_path / "model", PLAN), load(tmp_path / "out", None))


def test_other_files_come_along(tmp_path) -> None:
    builder = CheckpointBuilder(num_shards=2, generation_config={"temperature": 0.5})
    builder.write(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"a pickle")
    convert(tmp_path / "model", tmp_path / "out", PLAN)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "pytorch_model.bin" not in names
    assert not any("of-00002" in name or "index" in name for name in names)
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json"):
        copied = (tmp_path / "out" / name).read_bytes()
        assert copied == (tmp_path / "model" / name).read_bytes()
    old = json.loads((tmp_path / "model" / "config.json").read_text())
    new = json.loads((tmp_path / "out" / "config.json").read_text())
    assert new.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert new == old


def test_the_directory_appears_whole_or_not_at_all(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "model", "sdar")
    seen = []

    def interrupt(*arguments: Any) -> None:
        seen.append([path.name for path in tmp_path.iterdir()])
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "model", tmp_path / "out", PLAN)
    assert any(name.startswith(".out.") for name in seen[0])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_was_written_is_read_back(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", "sdar")
    save = module.save_file

    def damage(tensors: dict[str, torch.Tensor], path: Path, **further: Any) -> None:
        save(tensors, path, **further)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    monkeypatch.setattr(module, "save_file", damage)
    with pytest.raises(CheckpointError, match="read back other bytes than were written"):
        convert(tmp_path / "model", tmp_path / "out", PLAN)
    assert not (tmp_path / "out").exists()


def test_disks_that_are_full(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", "sdar")

    def refuse(*arguments: Any, **further: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", refuse)
    with pytest.raises(CheckpointError, match=r"cannot write .*out: No space left on device"):
        convert(tmp_path / "model", tmp_path / "out", PLAN)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_places_that_are_taken(tmp_path) -> None:
    write_model(tmp_path / "model", "sdar")
    with pytest.raises(ConfigError, match="OUT: expected a new or empty directory, got one with"):
        convert(tmp_path / "model", tmp_path / "model", PLAN)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="OUT: expected a new or empty directory, got a file"):
        convert(tmp_path / "model", tmp_path / "file", PLAN)
    (tmp_path / "out").mkdir()
    convert(tmp_path / "model", tmp_path / "out", PLAN)


def test_a_checkpoint_in_low_precision_is_not_quantised_again(tmp_path) -> None:
    CheckpointBuilder(tiny_config(intermediate_size=160)).write(tmp_path / "model")
    FORMATS["awq"].write(tmp_path / "model")
    message = r"quantize: expected a checkpoint in its dtype, got one in int4 \(config\.json"
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "model", tmp_path / "out", PLAN)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_of_the_command_are_those_of_the_key(tmp_path, capsys, scheme: str) -> None:
    """From the command line to the answers of the bundled model."""
    out = str(tmp_path / "out")
    assert main(["quantize", "demo", out, "--quantization", scheme]) == 0
    assert f"matrices in {scheme}" in capsys.readouterr().out
    prompt = "Mia has 16 stones. Mia buys 128 more stones. How many stones does Mia have now?"
    params, answers = SamplingParams(temperature=0.0, max_tokens=32), []
    for settings in ({"quantization": scheme}, {"model": out}):
        with Diffulex(**{"model": "demo", "device": "cpu", **settings}) as engine:
            assert engine.config.model.quantization == scheme
            answers.append(engine.generate([prompt], params, summary=False)[0].token_ids)
    assert list(answers[0]) == list(answers[1])
    assert len(answers[0]) > 4


def test_a_family_keeps_what_a_scheme_does_not_suit(tmp_path, caplog) -> None:
    """Unless patterns are given, also none; what was stored otherwise is read."""
    model = tmp_path / "model"
    write_model(model, "diffusion_gemma")
    cases: list[tuple[str, list[str], tuple[str, ...]]] = [
        ("kept", [], ("*.self_attn.*",)),
        ("all", ["--ignore"], ()),
        ("others", ["--ignore", "*.mlp.*"], ("*.mlp.*",)),
    ]
    for name, flags, ignore in cases:
        out = tmp_path / name
        caplog.clear()
        assert main(["quantize", str(model), str(out), "--quantization", "int4", *flags]) == 0
        warned = [text for text in caplog.messages if "is not accepted for diffusion_gemma" in text]
        assert len(warned) == (name != "kept")
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        kept = any(".self_attn." in module for module in config["ignore"])
        assert kept == (name == "kept")
        caplog.clear()
        plan = QuantizationPlan("int4", ignore=ignore)
        assert_same_weights(load(model, plan), load(out, None))
        text = "quantization: int4 of *.self_attn.* is not accepted for diffusion_gemma (docs/quan"
        assert sum(line.startswith(text) for line in caplog.messages) == 2 * (name != "kept")


ERRORS = [
    (["--quantization", "int8", "--quantization-group-size", "64"], "expected int4 with it, got int8"),
    (["--quantization", "int8", "--ignore", "*.nothing"], "which matches none"),
    (["--quantization", "fp4"], "fp4"),
    ([], "--quantization"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "text"), ERRORS)
def test_errors_are_one_line(tmp_path, capsys, flags: list[str], text: str) -> None:
    assert main(["quantize", str(demo_dir()), str(tmp_path / "out"), *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert text in lines[0]
    assert not (tmp_path / "out").exists()


def test_bytes_on_disk_are_those_of_the_scheme(tmp_path) -> None:
    write_model(tmp_path / "model", "sdar")
    convert(tmp_path / "model", tmp_path / "out", QuantizationPlan("int4", 32))
    tensors = read_tensors(tmp_path / "out")
    name = "model.layers.0.mlp.gate_proj"
    assert tensors[f"{name}.weight_packed"].shape == (200, 8)
    assert tensors[f"{name}.weight_scale"].shape == (200, 2)
    assert tensors[f"{name}.weight_shape"].tolist() == [200, 64]
