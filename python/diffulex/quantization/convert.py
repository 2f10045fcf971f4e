# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint in low precision, in the format of compressed-tensors.

Tensors are read in pieces and written in shards: neither the model nor a file lies in memory as a whole.
The directory appears when it is complete and has been read back.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from diffulex import ops
from diffulex.checkpoint.auto_model import detect
from diffulex.checkpoint.loader import (
    check_finite,
    check_headers,
    check_num_layers,
    find_stored,
    progress_bar,
    tied_weight_table,
)
from diffulex.checkpoint.tensor_files import (
    INDEX_FILE,
    SINGLE_FILE,
    find_tensors,
    is_ignored,
    is_weight_file,
)
from diffulex.checkpoint.tensor_reader import TensorReader
from diffulex.errors import CheckpointError, ConfigError
from diffulex.log import get_logger
from diffulex.ops import WeightScheme
from diffulex.quantization.layers import ModelQuantizer, StoredQuantizer
from diffulex.quantization.stored import QUANTIZATION_FILE, read_stored
from diffulex.registry import AutoModelForDiffusionLM

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from diffulex.checkpoint.tensor_files import StoredTensor
    from diffulex.families.spec import ModelSpec
    from diffulex.quantization.layers import Projections
    from diffulex.quantization.scheme import QuantizationPlan

__all__ = ["Written", "convert"]

logger = get_logger(__name__)

#: Bytes of a file, unless a single tensor is larger.
_SHARD_BYTES = 1 << 30
_CONFIG = "config.json"
#: Of compressed-tensors: its format, the weights, and the activations as other engines have them.
_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True, "num_bits": 8}
_FORMATS: dict[WeightScheme, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    WeightScheme.FP8: (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {**_TOKEN, "type": "float"},
    ),
    WeightScheme.FP8_BLOCK: (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        {**_TOKEN, "type": "float", "strategy": "group", "group_size": 128},
    ),
    WeightScheme.INT8: (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {**_TOKEN, "type": "int"},
    ),
    WeightScheme.INT4: ("pack-quantized", {"num_bits": 4, "type": "int"}, None),
}


class Written(NamedTuple):
    """What was written: matrices in low precision, and bytes of tensors before and after."""

    num_matrices: int
    old_bytes: int
    new_bytes: int


def convert(
    model_dir: Path, out: Path, plan: QuantizationPlan, model_name: str | None = None
) -> Written:
    """Writes the checkpoint in `model_dir` to the new directory `out`, quantised as `plan` says.

    An engine that loads `out` has the weights of one that quantises `model_dir` while loading on a CPU, bit
    for bit: beside int4 a head is of int8, on GPUs with faster products of e4m3 of those.

    Raises:
        ConfigError: the plan does not suit the model, or `out` is taken.
        CheckpointError: the checkpoint is damaged, in low precision already, or `out` cannot be written.
    """
    name, spec, info = detect(model_dir, model_name)
    if info.stored is not None:
        raise CheckpointError(
            f"quantize: expected a checkpoint in its dtype, got one in {info.stored.scheme}"
            f" ({info.stored.where})"
        )
    out = out.expanduser().absolute()
    _check_place(out)
    check_num_layers(spec, model_dir)
    model: Any = AutoModelForDiffusionLM.get(name)(spec, torch.bfloat16, "meta")
    check_headers(model, model_dir)
    chosen = ModelQuantizer(plan).stored_projections(model, tied_weight_table(model, model_dir))
    stored = {
        key: tensor
        for key, tensor in find_stored(model, model_dir).items()
        if not is_ignored(key, spec.names.ignored)
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        try:
            writer = _Writer(place)
            _write_tensors(writer, stored, chosen)
            written = writer.close()
            _write_rest(model_dir, place, _description(stored, chosen))
            _verify(name, spec, place, writer.sums)
            place.chmod(0o755)
            place.rename(out)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise CheckpointError(f"quantize: cannot write {out}: {reason}") from error
    return Written(writer.num_matrices, sum(map(_size, stored.values())), written)


def _check_place(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        kind = "one with files" if out.is_dir() else "a file"
        raise ConfigError(f"OUT: expected a new or empty directory, got {kind}: {out}")


def _size(tensor: StoredTensor) -> int:
    return tensor.num_bytes


@dataclass
class _Writer:
    """Collects tensors into files of about one size, with an index when there are several."""

    place: Path
    #: Of every tensor, by its name.
    sums: dict[str, int] = field(default_factory=dict)
    num_matrices: int = 0
    _shards: list[list[str]] = field(default_factory=list)
    _held: dict[str, torch.Tensor] = field(default_factory=dict)
    _num_bytes: int = 0
    _total: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.sums:
            raise CheckpointError(f"quantize: expected one tensor {name}, got another one")
        size = tensor.nbytes
        if self._held and self._num_bytes + size > _SHARD_BYTES:
            self._flush()
        self._held[name] = tensor.contiguous()
        self.sums[name] = _checksum(self._held[name])
        self._num_bytes += size
        self._total += size

    def _flush(self) -> None:
        path = self.place / f"{len(self._shards)}.safetensors"
        save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(0o644)
        self._shards.append(list(self._held))
        self._held, self._num_bytes = {}, 0

    def close(self) -> int:
        """Writes the rest; returns how many bytes of tensors there are."""
        self._flush()
        count, weight_map = len(self._shards), {}
        for number, names in enumerate(self._shards):
            file_name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            file_name = SINGLE_FILE if count == 1 else file_name
            (self.place / f"{number}.safetensors").rename(self.place / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            _write_json(self.place / INDEX_FILE, index)
        return self._total


def _checksum(tensor: torch.Tensor, start: int = 0) -> int:
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(octets.numpy().data, start)


def _write_tensors(
    writer: _Writer, stored: Mapping[str, StoredTensor], chosen: Mapping[str, Projections]
) -> None:
    reader = TensorReader("cpu")
    # In the order in which the bytes lie on disk.
    order = sorted(stored, key=lambda name: (stored[name].file, stored[name].offset))
    total = sum(map(_size, stored.values()))
    bar = progress_bar(total, "Quantising") if sys.stderr.isatty() else None
    for name in order:
        tensor = stored[name]
        if name not in chosen:
            pieces = [values.clone() for _, values in reader.pieces(tensor)]
            writer.add(name, torch.cat(pieces) if tensor.shape else pieces[0])
        else:
            for module, parts in _quantised(reader, name, tensor, chosen[name]):
                writer.num_matrices += 1
                for last, values in parts.items():
                    writer.add(f"{module}.{last}", values)
        if bar is not None:
            bar.update(_size(tensor))
    if bar is not None:
        bar.close()


def _quantised(
    reader: TensorReader, name: str, stored: StoredTensor, wanted: Projections
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Modules of a stored tensor, and the tensors of each."""
    if len(stored.shape) == 2:
        matrix = _Matrix(stored.shape, wanted)
        step = max(1, reader.rows_per_piece(stored) // ops.QUANT_GROUP) * ops.QUANT_GROUP
        for rows, values in reader.pieces(stored, step):
            check_finite(values, name, stored)
            matrix.write(rows.start, values)
        yield name.removesuffix(".weight"), matrix.tensors()
        return
    for rows, values in reader.pieces(stored, 1):
        check_finite(values, name, stored)
        start = 0
        for module, size in zip(modules_of(name, rows.start, wanted), wanted.sizes, strict=True):
            matrix = _Matrix((size, stored.shape[2]), wanted)
            matrix.write(0, values[0, start : start + size])
            start += size
            yield module, matrix.tensors()


def modules_of(name: str, expert: int, wanted: Projections) -> list[str]:
    """Modules of one expert of a stack, whose gate and up may be one tensor."""
    experts, _, last = name.removesuffix(".weight").rpartition(".")
    parts = [last] if len(wanted.sizes) == 1 else ["gate_proj", "up_proj"]
    return [f"{experts}.{expert}.{part}" for part in parts]


class _Matrix:
    """A projection [N, K] as it is written."""

    def __init__(self, shape: tuple[int, ...], wanted: Projections) -> None:
        self._shape, self._scheme, self._group = shape, wanted.scheme, wanted.group
        codes, scale = ops.weight_parts(shape[0], shape[1], self._scheme, self._group)
        self._codes = torch.empty(codes[0], dtype=codes[1])
        self._scale = torch.empty(scale[0], dtype=scale[1])

    def write(self, first: int, values: torch.Tensor) -> None:
        """Rows from `first` on, of blocks a multiple of 128."""
        if values.dtype == torch.float64:
            values = values.float()
        last = first + values.size(0)
        scale = self._scale[first:last]
        if self._scheme == WeightScheme.INT4:
            scale = self._scale[:, first:last]
        elif self._scheme == WeightScheme.FP8_BLOCK:
            scale = self._scale[first // ops.QUANT_GROUP : -(-last // ops.QUANT_GROUP)]
        codes = self._codes[first:last]
        ops.quantize_weight(values, self._scheme, group=self._group, out=codes, scale=scale)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By their last names."""
        if self._scheme != WeightScheme.INT4:
            is_block = self._scheme == WeightScheme.FP8_BLOCK
            scale = self._scale if is_block else self._scale[:, None]
            return {"weight": self._codes, "weight_scale": scale}
        rows, num_bytes = self._codes.shape
        words = torch.full((rows, -(-num_bytes // 4) * 4), 0x88, dtype=torch.uint8)
        words[:, :num_bytes] = self._codes
        return {
            "weight_packed": words.view(torch.int32),
            "weight_scale": self._scale.T.contiguous(),
            "weight_shape": torch.tensor(self._shape, dtype=torch.int64),
        }


def _description(
    stored: Mapping[str, StoredTensor], chosen: Mapping[str, Projections]
) -> dict[str, Any]:
    """`quantization_config`: the most common form for all linear layers, others by their names."""
    modules: dict[tuple[WeightScheme, int], list[str]] = {}
    for name, wanted in chosen.items():
        group = wanted.group if stored[name].shape[-1] != wanted.group else 0
        count = stored[name].shape[0] if len(stored[name].shape) == 3 else 0
        own = [m for e in range(count) for m in modules_of(name, e, wanted)]
        modules.setdefault((wanted.scheme, group), []).extend(own or [name.removesuffix(".weight")])
    ((common, _),) = Counter({key: len(found) for key, found in modules.items()}).most_common(1)
    groups = {}
    for number, (key, found) in enumerate(sorted(modules.items(), key=lambda i: i[0] != common)):
        stored_format, weights, activations = _FORMATS[key[0]]
        weights = {**weights, "symmetric": True, "dynamic": False}
        if key[0] == WeightScheme.INT4:
            weights["strategy"] = "group" if key[1] else "channel"
            weights["group_size"] = key[1] or None
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if key == common else found,
            "weights": weights,
            "input_activations": activations,
            "output_activations": None,
            "format": stored_format,
        }
    formats = {group["format"] for group in groups.values()}
    kept = [
        name.removesuffix(".weight")
        for name, tensor in stored.items()
        if name not in chosen and len(tensor.shape) > 1
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(kept),
        "kv_cache_scheme": None,
    }


def _write_rest(model_dir: Path, place: Path, description: dict[str, Any]) -> None:
    """The configuration with the description, and copies of all other files but weights."""
    for path in sorted(model_dir.iterdir()):
        own = path.name in (_CONFIG, INDEX_FILE, QUANTIZATION_FILE)
        if path.is_file() and not own and not is_weight_file(path) and path.name[0] != ".":
            shutil.copyfile(path, place / path.name)
    config = json.loads((model_dir / _CONFIG).read_text(encoding="utf-8"))
    _write_json(place / _CONFIG, {**config, "quantization_config": description})


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _verify(name: str, spec: ModelSpec, place: Path, sums: Mapping[str, int]) -> None:
    """Reads everything back, as the loader does.

    Raises:
        CheckpointError: something else is there than was written.
    """
    model: Any = AutoModelForDiffusionLM.get(name)(spec, torch.bfloat16, "meta")
    check_headers(model, place)
    quantization = read_stored(place)
    assert quantization is not None
    StoredQuantizer(quantization, place).saved_bytes(
        model, tied_weight_table(model, place), torch.bfloat16, "cpu"
    )
    found, reader = find_tensors(place), TensorReader("cpu")
    for key, expected in sums.items():
        total = 0
        for _, values in reader.pieces(found[key]):
            total = _checksum(values, total)
        if total != expected:
            raise CheckpointError(f"quantize: {key}: read back other bytes than were written")
