# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a checkpoint: which tensors there are, and where their bytes lie."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from diffulex.errors import CheckpointError
from diffulex.families.spec.reader import read_json_object

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    import torch

    from diffulex.checkpoint.tensor_reader import TensorReader

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_IGNORED = ("*.rotary_emb.inv_freq",)
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.npz", "*.h5")
_LFS_POINTER = b"version https://git-lfs."
#: What safetensors accepts.
_LONGEST_HEADER = 100_000_000
_LONGEST_NAME = 255
_MAX_LISTED = 6


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what its header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    #: Where the values start in the file.
    offset: int
    #: What they take there.
    num_bytes: int


class CodedTensor(StoredTensor):
    """A tensor whose values several stored ones make together."""

    __slots__ = ()

    @property
    def rows_per_piece(self) -> int:
        """Rows that are read at once."""
        raise NotImplementedError

    def pieces(
        self, reader: TensorReader, num_rows: int | None, wanted: slice | None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """As `TensorReader.pieces`, with values in float32."""
        raise NotImplementedError


def _check_file(path: Path) -> None:
    """Compares a header with itself and with the length of its file."""
    if not path.is_file():
        raise CheckpointError(f"checkpoint: {path}: expected a file, got {_kind(path)}")
    try:
        # The library says "no such file" of a file that it may not read.
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
        with safe_open(path, framework="pt", device="cpu"):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"checkpoint: cannot read {path}: {reason}") from error
    except SafetensorError as error:
        reason = _damage(path, start) or str(error)
        raise CheckpointError(f"checkpoint: cannot read {path}: {reason}") from error


def _kind(path: Path) -> str:
    return "a directory" if path.is_dir() else "a pipe, socket or device"


def _damage(path: Path, start: bytes) -> str | None:
    """What usually makes a file of weights unreadable, if it is that."""
    if start == _LFS_POINTER:
        return "it is a git-lfs pointer, not the weights: fetch them with `git lfs pull`"
    size, header_size = path.stat().st_size, int.from_bytes(start[:8], "little")
    if start[:1] == b"<":
        return "it is a page of a web site, not the weights: download it again"
    if size < 8 or header_size > _LONGEST_HEADER:
        return _cut(size, 8) if size < 8 else None
    if header_size > size - 8:
        return _cut(size, 8 + header_size)
    with path.open("rb") as file:
        file.seek(8)
        try:
            header = json.loads(file.read(header_size))
            ends = [e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return None
    needed = 8 + header_size + max((end for end in ends if isinstance(end, int)), default=0)
    return _cut(size, needed) if needed > size else None


def _cut(size: int, needed: int) -> str:
    return (
        f"it has {size} bytes and should have at least {needed}: the download or copy was cut short,"
        " fetch it again"
    )


def is_weight_file(path: Path) -> bool:
    """Whether a file has weights, in a format that is read or another."""
    return any(fnmatch(path.name, pattern) for pattern in ("*.safetensors", *_OTHER_WEIGHTS))


def other_weights(model_dir: Path, prefix: str = "") -> str:
    """Weights in formats that are not read, and what to do about them; empty without any."""
    found = [
        path.name
        for pattern in _OTHER_WEIGHTS
        for path in model_dir.glob(prefix + pattern)
        if prefix or not path.name.startswith("adapter_")
    ]
    return f"{listed(found)}: convert the weights to safetensors" if found else ""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Facts of every tensor in one file.

    Raises:
        CheckpointError: the file cannot be read or its header does not fit it.
    """
    _check_file(path)
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
    start = 8 + header_size
    if not header.keys() - {"__metadata__"}:
        raise CheckpointError(f"checkpoint: {path}: expected tensors, got a file without any")
    return {
        name: StoredTensor(
            path,
            tuple(entry["shape"]),
            entry["dtype"],
            start + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def listed(names: Iterable[str]) -> str:
    """Names in order, the first few of many."""
    items = sorted(names)
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more


def is_ignored(name: str, further: tuple[str, ...] = ()) -> bool:
    """Whether every model does without a tensor of this name, or the patterns `further` say so."""
    return any(fnmatch(name, pattern) for pattern in (*_IGNORED, *further))


def read_index(path: Path) -> dict[str, Path]:
    """Tensor name -> shard beside it, from an index file.

    Raises:
        CheckpointError: it is no index, or names files elsewhere.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"checkpoint: {path}: weight_map: expected names, got {weight_map!r}")
    shards: dict[str, Path] = {}
    for name, file_name in weight_map.items():
        # A checkpoint must not name files outside its own directory.
        if not isinstance(file_name, str) or "/" in file_name or "\\" in file_name:
            raise CheckpointError(
                f"checkpoint: {path}: {name}: expected a file name, got {file_name!r}"
            )
        if not 1 <= len(os.fsencode(file_name)) <= _LONGEST_NAME or "\0" in file_name:
            raise CheckpointError(
                f"checkpoint: {path}: {name}: expected a file name of 1 to {_LONGEST_NAME} bytes,"
                f" got {file_name[:20]!r}..."
            )
        shards[name] = path.parent / file_name
    return shards


def _single_file(model_dir: Path) -> Path:
    default = model_dir / SINGLE_FILE
    if default.is_file():
        return default
    if default.exists():
        raise CheckpointError(f"checkpoint: {default}: expected a file, got {_kind(default)}")
    others = [
        path
        for path in model_dir.glob("*.safetensors")
        if path.is_file() and not path.name.startswith("adapter_")
    ]
    if len(others) != 1:
        found = listed(p.name for p in others) or other_weights(model_dir) or "none"
        raise CheckpointError(
            f"checkpoint: {model_dir}: expected {SINGLE_FILE} or {INDEX_FILE}, got {found}"
        )
    return others[0]


def stored_names(model_dir: Path) -> Collection[str]:
    """Names of the checkpoint's tensors, from the index alone where there is one.

    Empty when the directory has no weights, which loading reports.
    """
    if (model_dir / INDEX_FILE).is_file():
        return read_index(model_dir / INDEX_FILE).keys()
    if not any(model_dir.glob("*.safetensors")):
        return ()
    return read_header(_single_file(model_dir)).keys()


def find_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """Header facts of every tensor the checkpoint consists of.

    With an index, exactly its files are read and its assignment decides; a shard tensor that the
    index does not list is an error. Without, the one weight file is read.

    Raises:
        CheckpointError: a file is missing or damaged, or a listed tensor is not in its file.
    """
    if not (model_dir / INDEX_FILE).is_file():
        return read_header(_single_file(model_dir))
    shards = read_index(model_dir / INDEX_FILE)
    headers: dict[Path, dict[str, StoredTensor]] = {}
    for shard in sorted(set(shards.values())):
        if not shard.is_file():
            raise CheckpointError(
                f"checkpoint: {shard}: expected a file listed in {INDEX_FILE}, got none"
            )
        headers[shard] = read_header(shard)
    for name, shard in shards.items():
        if name not in headers[shard]:
            raise CheckpointError(f"checkpoint: {shard}: expected tensor {name}, got no such name")
    unlisted = {name for header in headers.values() for name in header} - shards.keys()
    unlisted = {name for name in unlisted if not is_ignored(name)}
    if unlisted:
        raise CheckpointError(
            f"checkpoint: {model_dir}: tensors not listed in {INDEX_FILE}: {listed(unlisted)}"
        )
    return {name: headers[shard][name] for name, shard in shards.items()}
