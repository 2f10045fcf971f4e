# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: sharding, completeness, ties, damage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffulex.checkpoint import tensor_reader
from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.checkpoint.tensor_files import find_tensors
from diffulex.errors import CheckpointError
from fixtures.checkpoints import CheckpointBuilder, Tensors, tiny_config, write_shards
from fixtures.quick import quick


def load(directory: Path, dtype: torch.dtype = torch.float32):
    name, spec, _ = detect(directory)
    return load_model(name, spec, directory, dtype, "cpu")


def assert_holds(model, tensors: Tensors) -> None:
    table = model.weight_table()
    for name, tensor in tensors.items():
        if name in table:
            assert torch.equal(table[name], tensor.to(table[name].dtype)), name


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_every_tensor_reaches_its_place(tmp_path, num_shards, bias):
    builder = CheckpointBuilder(tiny_config(attention_bias=bias), num_shards=num_shards)
    tensors = builder.write(tmp_path)
    model = load(tmp_path)
    assert model.weight_table().keys() == tensors.keys()
    assert_holds(model, tensors)


def test_projections_are_stacked_in_order(tmp_path):
    tensors = CheckpointBuilder().write(tmp_path)
    layer = load(tmp_path).layers[1]
    prefix = "model.layers.1."
    qkv = [tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    gate_up = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.attention.qkv.weight, torch.cat(qkv))
    assert torch.equal(layer.mlp.gate_up.weight, torch.cat(gate_up))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_conversion(tmp_path, stored, dtype):
    tensors = CheckpointBuilder(dtype=stored).write(tmp_path)
    model = load(tmp_path, dtype)
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    assert_holds(model, tensors)


def test_progress_shows_nothing_when_not_a_terminal(tmp_path, capfd):
    CheckpointBuilder().write(tmp_path)
    name, spec, _ = detect(tmp_path)
    load_model(name, spec, tmp_path, torch.float32, "cpu", progress=True)
    assert capfd.readouterr().err == ""


def test_single_file_may_have_another_name(tmp_path):
    tensors = CheckpointBuilder().write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    assert_holds(load(tmp_path), tensors)


def test_files_outside_the_index_are_not_read(tmp_path):
    tensors = CheckpointBuilder(num_shards=2).write(tmp_path)
    save_file({"unknown": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert_holds(load(tmp_path), tensors)


def test_tensor_in_two_shards_comes_from_the_indexed_one(tmp_path):
    tensors = CheckpointBuilder(num_shards=2).write(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name = "model.norm.weight"
    other = next(f for f in set(index["weight_map"].values()) if f != index["weight_map"][name])
    save_file({**load_file(tmp_path / other), name: torch.zeros(64)}, tmp_path / other)
    assert_holds(load(tmp_path), tensors)


def test_inverse_frequencies_are_ignored(tmp_path):
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)

    tensors = CheckpointBuilder(edit=add).write(tmp_path)
    assert_holds(load(tmp_path), tensors)


class TestTiedHead:
    config = tiny_config(tie_word_embeddings=True)

    @pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
    def test_one_matrix_serves_both(self, tmp_path, kept):
        def keep(tensors: Tensors) -> None:
            tensors[kept] = tensors.pop("model.embed_tokens.weight")

        tensors = CheckpointBuilder(self.config, edit=keep).write(tmp_path)
        model = load(tmp_path)
        assert model.head.weight is model.embedding.weight
        assert torch.equal(model.head.weight, tensors[kept])

    def test_equal_matrices_share_memory(self, tmp_path):
        def add(tensors: Tensors) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

        tensors = CheckpointBuilder(self.config, edit=add).write(tmp_path)
        model = load(tmp_path)
        assert model.head.weight is model.embedding.weight
        assert torch.equal(model.head.weight, tensors["lm_head.weight"])

    def test_different_matrices_are_not_tied(self, tmp_path, caplog):
        def add(tensors: Tensors) -> None:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

        tensors = CheckpointBuilder(self.config, edit=add).write(tmp_path)
        with caplog.at_level("WARNING", logger="diffulex"):
            model = load(tmp_path)
        assert_holds(model, tensors)
        assert not torch.equal(model.head.weight, model.embedding.weight)
        assert "not tied" in caplog.text

    def test_neither_matrix(self, tmp_path):
        def drop(tensors: Tensors) -> None:
            del tensors["model.embed_tokens.weight"]

        CheckpointBuilder(self.config, edit=drop).write(tmp_path)
        with pytest.raises(CheckpointError, match=r"missing tensors: model\.embed_tokens\.weight"):
            load(tmp_path)

    def test_untied_head_is_required(self, tmp_path):
        def drop(tensors: Tensors) -> None:
            del tensors["lm_head.weight"]

        CheckpointBuilder(edit=drop).write(tmp_path)
        with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight"):
            load(tmp_path)


BAD_TENSORS = {
    "missing": (
        lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
        r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight$",
    ),
    "extra": (
        lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(2)}),
        r"got model\.layers\.7\.mlp\.up_proj\.weight$",
    ),
    "bias_of_an_unbiased_model": (
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}),
        r"got model\.layers\.0\.self_attn\.q_proj\.bias$",
    ),
    "misshapen": (
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}),
        r"model\.norm\.weight: expected shape \[64\], got \[63\]",
    ),
    "transposed": (
        lambda tensors: tensors.update(
            {
                "model.layers.0.mlp.down_proj.weight": tensors[
                    "model.layers.0.mlp.down_proj.weight"
                ]
                .t()
                .contiguous()
            }
        ),
        r"down_proj\.weight: expected shape \[64, 112\], got \[112, 64\]",
    ),
    "quantised": (
        lambda tensors: tensors.update(
            {"model.norm.weight": torch.zeros(64, dtype=torch.float8_e4m3fn)}
        ),
        r"model\.norm\.weight: expected one of F64, .* got F8_E4M3",
    ),
}


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_are_named(tmp_path, case, num_shards):
    edit, message = BAD_TENSORS[case]
    CheckpointBuilder(edit=edit, num_shards=num_shards).write(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_many_missing_tensors_are_counted(tmp_path):
    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if "layers.0" in name]:
            del tensors[name]

    CheckpointBuilder(edit=drop).write(tmp_path)
    with pytest.raises(CheckpointError, match=r"and 5 more$"):
        load(tmp_path)


class TestDamagedFiles:
    def test_no_weights(self, tmp_path):
        CheckpointBuilder().write(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"expected model.safetensors or"):
            load(tmp_path)

    def test_two_candidates(self, tmp_path):
        CheckpointBuilder().write(tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
        save_file({"x": torch.zeros(1)}, tmp_path / "b.safetensors")
        with pytest.raises(CheckpointError, match=r"got a\.safetensors, b\.safetensors"):
            load(tmp_path)

    @pytest.mark.parametrize("size", [0, 4, 100, 5000])
    def test_truncated_weights(self, tmp_path, size):
        CheckpointBuilder().write(tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
            load(tmp_path)

    def test_missing_shard(self, tmp_path):
        CheckpointBuilder(num_shards=2).write(tmp_path)
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors"):
            load(tmp_path)

    def edit_index(self, directory: Path, edit) -> None:
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        edit(index["weight_map"])
        path.write_text(json.dumps(index))

    def test_listed_tensor_absent_from_its_file(self, tmp_path):
        CheckpointBuilder(num_shards=2).write(tmp_path)
        name = "model.norm.weight"

        def move(weight_map):
            weight_map[name] = next(f for f in set(weight_map.values()) if f != weight_map[name])

        self.edit_index(tmp_path, move)
        with pytest.raises(CheckpointError, match=r"expected tensor model\.norm\.weight"):
            load(tmp_path)

    def test_tensor_the_index_does_not_list(self, tmp_path):
        CheckpointBuilder(num_shards=2).write(tmp_path)
        self.edit_index(tmp_path, lambda weight_map: weight_map.pop("model.norm.weight"))
        with pytest.raises(CheckpointError, match=r"not listed in .*: model\.norm\.weight"):
            load(tmp_path)

    def test_index_may_not_leave_the_directory(self, tmp_path):
        tensors = CheckpointBuilder().write(tmp_path / "model")
        write_shards(tmp_path / "model", tensors, 2)
        self.edit_index(
            tmp_path / "model", lambda m: m.update({"lm_head.weight": "../other.safetensors"})
        )
        with pytest.raises(CheckpointError, match="expected a file name"):
            load(tmp_path / "model")

    @pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": 3}'])
    def test_malformed_index(self, tmp_path, text):
        CheckpointBuilder(num_shards=2).write(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"index.json"):
            load(tmp_path)


def test_nothing_is_copied_from_a_bad_checkpoint(tmp_path):
    from diffulex.checkpoint.loader import load_weights
    from diffulex.nn.decoder import DecoderForDiffusionLM

    def shrink(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = torch.zeros(63)

    CheckpointBuilder(edit=shrink).write(tmp_path)
    _, spec, _ = detect(tmp_path)
    model = DecoderForDiffusionLM(spec, torch.float32, "cpu")
    for parameter in model.parameters():
        parameter.fill_(3.0)
    with pytest.raises(CheckpointError):
        load_weights(model, tmp_path)
    assert all((parameter == 3.0).all() for parameter in model.parameters())


class TestPieces:
    """Files are read in pieces; no shard is ever in memory as a whole."""

    @pytest.fixture(params=[1, 100, 4096, 10_000])
    def piece_bytes(self, request, monkeypatch) -> int:
        monkeypatch.setattr(tensor_reader, "_PIECE_BYTES", request.param)
        return request.param

    @pytest.mark.parametrize(
        ("num_shards", "stored"),
        quick(
            [(n, d) for n in (1, 2) for d in (torch.float32, torch.bfloat16, torch.float64)],
            [(1, torch.float32), (2, torch.bfloat16)],
        ),
    )
    def test_every_value_arrives(self, tmp_path, piece_bytes, num_shards, stored):
        tensors = CheckpointBuilder(dtype=stored, num_shards=num_shards).write(tmp_path)
        model = load(tmp_path, torch.bfloat16)
        assert_holds(model, tensors)

    def test_equal_and_unequal_heads(self, tmp_path, piece_bytes):
        for last, is_tied in ((0.0, True), (1.0, False)):

            def add(tensors: Tensors, last: float = last) -> None:
                head = tensors["model.embed_tokens.weight"].clone()
                head[-1, -1] += last
                tensors["lm_head.weight"] = head

            config = tiny_config(tie_word_embeddings=True)
            CheckpointBuilder(config, edit=add).write(tmp_path)
            model = load(tmp_path)
            assert (model.head.weight is model.embedding.weight) == is_tied

    def test_scalars_and_rows_longer_than_a_piece(self, tmp_path, piece_bytes):
        tensors = {
            "scalar": torch.tensor(3.5),
            "rows": torch.randn(3, 2, 700),
            "empty": torch.zeros(0, 4),
        }
        save_file(tensors, tmp_path / "model.safetensors")
        reader = tensor_reader.TensorReader("cpu")
        for name, stored in find_tensors(tmp_path).items():
            parts = [(rows, values.clone()) for rows, values in reader.pieces(stored)]
            values = [part for _, part in parts]
            if name == "scalar":
                assert torch.equal(values[0], tensors[name])
            elif name == "rows":
                assert torch.equal(torch.cat(values), tensors[name])
                assert [rows.stop for rows, _ in parts][-1] == 3
            else:
                assert not parts

    def test_file_that_shrinks_while_it_is_read(self, tmp_path):
        CheckpointBuilder().write(tmp_path)
        stored = find_tensors(tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:3000])
        last = max(stored.values(), key=lambda tensor: tensor.offset)
        with pytest.raises(CheckpointError, match="ends early"):
            list(tensor_reader.TensorReader("cpu").pieces(last))


PEAK_SCRIPT = """
import json, resource, sys
from pathlib import Path
import torch
from diffulex.checkpoint.auto_model import detect, load_model
import diffulex.checkpoint.loader, diffulex.checkpoint.lora

def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()

directory = Path(sys.argv[1])
name, spec, _ = detect(directory)
torch.zeros(1000, dtype=torch.bfloat16).copy_(torch.ones(1000))
# The peak counts from the start of the process: fill up what imports took and gave back.
highest = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
ballast = b"1" * (max(0, highest() - resident()) + (4 << 20))
before = resident()
assert abs(highest() - before) < 2 << 20
model = load_model(name, spec, directory, torch.bfloat16, "cpu")
peak = highest()
held = sum(t.numel() * t.element_size() for t in model.parameters())
held += sum(t.numel() * t.element_size() for t in model.buffers())
print(json.dumps({"beside_the_model": peak - before - held}))
"""


@pytest.mark.slow
def test_peak_memory_of_loading(tmp_path):
    """Beside the model, loading takes less than 1.2 times the largest shard, counted by the system.

    The tensors are stored in float32 and converted; one of them is most of its shard.
    """
    config = tiny_config(hidden_size=256, vocab_size=120_000)
    CheckpointBuilder(config, num_shards=2, tokenizer=None).write(tmp_path)
    largest = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert largest > 80 << 20
    result = subprocess.run(
        [sys.executable, "-c", PEAK_SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    extra = json.loads(result.stdout)
    assert extra["beside_the_model"] > 1 << 20  # else nothing was measured
    assert extra["beside_the_model"] < 1.2 * largest
    # The bound of the reader itself: two pieces, and what the allocator keeps.
    assert extra["beside_the_model"] < (2 * 32 << 20) + (16 << 20)
