# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors checkpoints into a model, completely or not at all.

Every check runs on the file headers before the first weight is copied.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from diffulex.errors import CheckpointError
from diffulex.logging import get_logger
from diffulex.model.config.reader import read_json_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from diffulex.model.config import ModelSpec

logger = get_logger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_IGNORED = ("*.rotary_emb.inv_freq",)
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_MAX_LISTED = 6


class LoadableModel(Protocol):
    """What a model offers to the loader."""

    spec: ModelSpec

    def weight_table(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> destination with the expected shape."""

    def tie_embeddings(self) -> None:
        """Lets the head share the embedding table."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what its header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint: cannot read {path}: {error}") from error


def _read_header(path: Path) -> dict[str, StoredTensor]:
    with _open(path) as file:
        return {
            name: StoredTensor(path, tuple(part.get_shape()), part.get_dtype())
            for name in file.keys()  # noqa: SIM118 (the handle is not a mapping)
            for part in (file.get_slice(name),)
        }


def _listed(names: Iterable[str]) -> str:
    items = sorted(names)
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more


def _is_ignored(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _IGNORED)


def _read_index(model_dir: Path) -> dict[str, Path]:
    """Tensor name -> shard, from the index file."""
    path = model_dir / INDEX_FILE
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
        shards[name] = model_dir / file_name
    return shards


def _single_file(model_dir: Path) -> Path:
    default = model_dir / SINGLE_FILE
    if default.is_file():
        return default
    if default.exists():
        raise CheckpointError(f"checkpoint: {default}: expected a file, got a directory")
    others = [
        path
        for path in model_dir.glob("*.safetensors")
        if path.is_file() and not path.name.startswith("adapter_")
    ]
    if len(others) != 1:
        found = _listed(p.name for p in others) or "none"
        raise CheckpointError(
            f"checkpoint: {model_dir}: expected {SINGLE_FILE} or {INDEX_FILE}, got {found}"
        )
    return others[0]


def find_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """Header facts of every tensor the checkpoint consists of.

    With an index, exactly its files are read and its assignment decides; a shard tensor that the
    index does not list is an error. Without, the one weight file is read.

    Raises:
        CheckpointError: a file is missing or damaged, or a listed tensor is not in its file.
    """
    if not (model_dir / INDEX_FILE).is_file():
        return _read_header(_single_file(model_dir))
    shards = _read_index(model_dir)
    headers: dict[Path, dict[str, StoredTensor]] = {}
    for shard in sorted(set(shards.values())):
        if not shard.is_file():
            raise CheckpointError(f"checkpoint: {shard}: expected a file listed in {INDEX_FILE}")
        headers[shard] = _read_header(shard)
    for name, shard in shards.items():
        if name not in headers[shard]:
            raise CheckpointError(f"checkpoint: {shard}: expected tensor {name}, got no such name")
    unlisted = {name for header in headers.values() for name in header} - shards.keys()
    unlisted = {name for name in unlisted if not _is_ignored(name)}
    if unlisted:
        raise CheckpointError(
            f"checkpoint: {model_dir}: tensors not listed in {INDEX_FILE}: {_listed(unlisted)}"
        )
    return {name: headers[shard][name] for name, shard in shards.items()}


def _check(table: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> None:
    unknown = {name for name in stored if name not in table and not _is_ignored(name)}
    if unknown:
        raise CheckpointError(
            f"checkpoint: expected only tensors of the model, got {_listed(unknown)}"
        )
    missing = table.keys() - stored.keys()
    if missing:
        raise CheckpointError(f"checkpoint: missing tensors: {_listed(missing)}")
    for name, target in table.items():
        found = stored[name]
        if found.shape != tuple(target.shape):
            raise CheckpointError(
                f"checkpoint: {name}: expected shape {list(target.shape)}, got {list(found.shape)}"
            )
        if found.dtype not in _FLOAT_DTYPES:
            raise CheckpointError(
                f"checkpoint: {name}: expected one of {', '.join(_FLOAT_DTYPES)}, got {found.dtype} "
                "(quantised checkpoints are not supported)"
            )


def _is_tied(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether one matrix serves as embedding and head (transformers 5 rule)."""
    if not spec.tie_word_embeddings:
        return False
    if EMBEDDING not in stored or HEAD not in stored:
        return True
    with _open(stored[EMBEDDING].file) as first, _open(stored[HEAD].file) as second:
        is_equal = torch.equal(first.get_tensor(EMBEDDING), second.get_tensor(HEAD))
    if not is_equal:
        logger.warning(
            "config.json ties the head to the embedding, but the checkpoint stores different "
            "values for them; both are loaded and not tied"
        )
    return is_equal


def check_headers(model: LoadableModel, model_dir: Path) -> None:
    """Compares a model, which may be on the meta device, with the file headers.

    Raises:
        CheckpointError: missing, unknown or misshapen tensors, or damaged files.
    """
    stored = find_tensors(model_dir)
    table = model.weight_table()
    if model.spec.tie_word_embeddings:
        # One of the two may be absent; which one serves is decided when the values are read.
        if HEAD not in stored:
            table.pop(HEAD, None)
        elif EMBEDDING not in stored:
            table.pop(EMBEDDING, None)
    _check(table, stored)


def check_num_layers(spec: ModelSpec, model_dir: Path) -> None:
    """Keeps a number of layers that cannot be right from being built.

    Raises:
        CheckpointError: there are more layers than tensors.
    """
    num_tensors = len(find_tensors(model_dir))
    if spec.num_layers > num_tensors:
        raise CheckpointError(
            f"config.json: num_hidden_layers: expected at most {num_tensors}, the number of"
            f" tensors in the checkpoint, got {spec.num_layers}"
        )


def load_weights(model: LoadableModel, model_dir: Path, *, progress: bool = False) -> None:
    """Copies the checkpoint in `model_dir` into `model`, converting to its dtype and device.

    Args:
        model: destination; its weights are written in full.
        model_dir: directory with safetensors files.
        progress: show a bar on standard error if that is a terminal and loading takes long.

    Raises:
        CheckpointError: missing, unknown or misshapen tensors, or damaged files. Nothing has been
            copied then.
    """
    stored = find_tensors(model_dir)
    table = model.weight_table()
    is_tied = _is_tied(model.spec, stored)
    if is_tied:
        name = HEAD if HEAD in stored and EMBEDDING not in stored else EMBEDDING
        target = table[EMBEDDING]
        table = {key: table[key] for key in table if key not in (EMBEDDING, HEAD)}
        table[name] = target
        stored = {
            key: stored[key] for key in stored if key in table or key not in (EMBEDDING, HEAD)
        }
    _check(table, stored)
    if is_tied:
        model.tie_embeddings()
    _copy(table, stored, progress=progress)


def _copy(
    table: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor], *, progress: bool
) -> None:
    by_file: dict[Path, list[str]] = {}
    for name in table:
        by_file.setdefault(stored[name].file, []).append(name)
    total = sum(target.numel() * target.element_size() for target in table.values())
    bar = _progress_bar(total) if progress and sys.stderr.isatty() else None
    for path, names in by_file.items():
        with _open(path) as file:
            for name in names:
                table[name].copy_(file.get_tensor(name))
                if bar is not None:
                    bar.update(table[name].numel() * table[name].element_size())
    if bar is not None:
        bar.close()


def _progress_bar(total: int) -> Any:
    from tqdm import tqdm  # noqa: PLC0415 (only a long load needs it)

    # The delay keeps the bar away from loads that finish before anyone wonders.
    return tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, delay=2.0)
