# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors checkpoints into a model, completely or not at all.

Every check runs on the file headers before the first weight is copied.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

import torch

from diffulex.checkpoint.join_matrices import join_matrices
from diffulex.checkpoint.slices import WeightSlice
from diffulex.checkpoint.tensor_files import StoredTensor, find_tensors, is_ignored, listed
from diffulex.checkpoint.tensor_reader import TENSOR_DTYPES, TensorReader, is_loadable
from diffulex.errors import CheckpointError
from diffulex.log import get_logger
from diffulex.quantization.stored import read_stored

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from diffulex.checkpoint.lora import MergePlan
    from diffulex.families.spec import ModelSpec

logger = get_logger(__name__)


class LoadableModel(Protocol):
    """What a model offers to the loader.

    A model whose checkpoints name one tensor in several ways has `canonical_name(stored_name)`.

    A model whose checkpoints come in several layouts has `weight_table_for(stored_names)` as well,
    which is asked in place of `weight_table`.

    A model whose layers have parts of the stored tensors has `weight_slices()`: name -> `WeightSlice`.

    A model that prepares something from its loaded weights has `finish_loading()`.
    """

    spec: ModelSpec

    def weight_table(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> destination with the expected shape."""

    def tie_embeddings(self) -> None:
        """Lets the head share the embedding table."""


class WeightSink(Protocol):
    """What takes the rows of a tensor in place of the memory in the weight table."""

    @property
    def row_multiple(self) -> int:
        """Rows that are written at once are as many as this, a multiple, or the last ones."""

    def write(self, rows: slice, values: torch.Tensor) -> None:
        """Writes rows of the tensor."""

    def write_part(self, part: WeightSlice, first: int, values: torch.Tensor, kept: slice) -> None:
        """Takes what a part has of whole rows of the tensor, quantised as those of the whole one are.

        Args:
            first: its row from which on they are written.
            values: rows; of a matrix they begin at a multiple of `row_multiple`.
            kept: which of them the part has.
        """

    def take(self, stored: StoredTensor, reader: TensorReader, part: WeightSlice) -> bool:
        """Takes a part of a tensor in low precision as it is stored; False, with nothing read, for
        another.

        Raises:
            CheckpointError: codes cannot be cut so.
        """


def weight_table_of(model: LoadableModel, stored: Mapping[str, object]) -> dict[str, Any]:
    """Checkpoint name -> memory to fill, for a checkpoint that holds the names `stored`."""
    table_for = getattr(model, "weight_table_for", None)
    table: dict[str, Any] = model.weight_table() if table_for is None else table_for(stored.keys())
    return table


def find_stored(model: LoadableModel, model_dir: Path) -> dict[str, StoredTensor]:
    """The checkpoint's tensors under the names of the model's weight table."""
    stored = join_matrices(find_tensors(model_dir), read_stored(model_dir))
    canonical_name = getattr(model, "canonical_name", None)
    if canonical_name is None:
        return stored
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        canonical = canonical_name(name)
        if canonical in renamed:
            raise CheckpointError(
                f"checkpoint: {canonical}: expected one tensor, got another one stored as {name}"
            )
        renamed[canonical] = tensor
    return renamed


def tied_weight_table(model: LoadableModel, model_dir: Path) -> dict[str, Any]:
    """The weight table, after the head was tied if it is in this checkpoint: who changes the layers
    before they are filled must find the head as it will be."""
    stored = find_stored(model, model_dir)
    if _is_tied(model.spec, stored):
        model.tie_embeddings()
    return weight_table_of(model, stored)


def slices_of(model: LoadableModel, table: Mapping[str, torch.Tensor]) -> dict[str, WeightSlice]:
    """What goes into each tensor of the table; all of the stored one unless the model says less."""
    weight_slices = getattr(model, "weight_slices", None)
    cut: Mapping[str, WeightSlice] = {} if weight_slices is None else weight_slices()
    return {
        name: cut[name] if name in cut else WeightSlice.whole(target.shape)
        for name, target in table.items()
    }


def _check_slice(name: str, target: torch.Tensor, part: WeightSlice) -> None:
    if part.local_shape != tuple(target.shape) or not part.is_within:
        raise CheckpointError(
            f"checkpoint: {name}: expected a slice of {list(part.shape)} with the shape"
            f" {list(target.shape)} of the layer, got rows {_ranges(part.rows)} and columns"
            f" {_ranges(part.column_ranges)}"
        )


def _ranges(parts: Sequence[slice]) -> str:
    return ", ".join(f"{part.start}:{part.stop}" for part in parts) or "none"


def _check(
    table: Mapping[str, torch.Tensor],
    slices: Mapping[str, WeightSlice],
    stored: Mapping[str, StoredTensor],
    ignored: tuple[str, ...],
) -> None:
    unknown = {name for name in stored if name not in table and not is_ignored(name, ignored)}
    if unknown:
        raise CheckpointError(
            f"checkpoint: expected only tensors of the model, got {listed(unknown)}"
        )
    missing = table.keys() - stored.keys()
    if missing:
        raise CheckpointError(f"checkpoint: missing tensors: {listed(missing)}")
    for name, target in table.items():
        found, part = stored[name], slices[name]
        _check_slice(name, target, part)
        if found.shape != part.shape:
            raise CheckpointError(
                f"checkpoint: {name}: expected shape {list(part.shape)}, got {list(found.shape)}"
            )
        if not is_loadable(found):
            raise CheckpointError(
                f"checkpoint: {name}: expected one of {', '.join(TENSOR_DTYPES)}, got {found.dtype} "
                "(in low precision only as config.json says)"
            )


def _is_tied(spec: ModelSpec, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether one matrix serves as embedding and head (transformers 5 rule)."""
    embedding, head = spec.names.embedding, spec.names.head
    if not spec.tie_word_embeddings:
        return False
    if embedding not in stored or head not in stored:
        return True
    is_equal = are_equal(stored[embedding], stored[head])
    if not is_equal:
        logger.warning(
            "config.json ties the head to the embedding, but the checkpoint stores different "
            "values for them; both are loaded and not tied"
        )
    return is_equal


def are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two stored tensors have one shape and the same values."""
    # Types that cannot be loaded are reported by the check of all tensors.
    if first.shape != second.shape or not {first.dtype, second.dtype} <= TENSOR_DTYPES.keys():
        return False
    # Pieces of both are as long: they have rows of one shape, if not always of one dtype.
    rows_of_first, rows_of_second = TensorReader("cpu"), TensorReader("cpu")
    num_rows = min(rows_of_first.rows_per_piece(first), rows_of_second.rows_per_piece(second))
    pairs = zip(
        rows_of_first.pieces(first, num_rows), rows_of_second.pieces(second, num_rows), strict=True
    )
    return all(torch.equal(a, b.to(a.dtype)) for (_, a), (_, b) in pairs)


def check_headers(model: LoadableModel, model_dir: Path) -> None:
    """Compares a model, which may be on the meta device, with the file headers.

    Raises:
        CheckpointError: missing, unknown or misshapen tensors, or damaged files.
    """
    stored = find_stored(model, model_dir)
    table = weight_table_of(model, stored)
    names = model.spec.names
    if model.spec.tie_word_embeddings:
        # One of the two may be absent; which one serves is decided when the values are read.
        if names.head not in stored:
            table.pop(names.head, None)
        elif names.embedding not in stored:
            table.pop(names.embedding, None)
    _check(table, slices_of(model, table), stored, names.ignored)


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


def load_weights(
    model: LoadableModel,
    model_dir: Path,
    *,
    progress: bool = False,
    merge: MergePlan | None = None,
    sinks: Mapping[str, WeightSink] | None = None,
    on_piece: Callable[[], None] = lambda: None,
) -> None:
    """Copies the checkpoint in `model_dir` into `model`, converting to its dtype and device.

    Files are read in pieces: beside the model itself no more than two pieces are in host memory.

    Args:
        model: destination; its weights are written in full.
        model_dir: directory with safetensors files.
        progress: show a bar on standard error if that is a terminal and loading takes long.
        merge: low-rank products to add to the weights before they are rounded.
        sinks: name -> what takes the values instead of the tensor in the weight table.
        on_piece: as for `TensorReader`.

    Raises:
        CheckpointError: missing, unknown or misshapen tensors, or damaged files. Nothing has been
            copied then.
    """
    stored = find_stored(model, model_dir)
    table = weight_table_of(model, stored)
    names = model.spec.names
    slices = slices_of(model, table)
    is_tied = _is_tied(model.spec, stored)
    if is_tied:
        pair = (names.embedding, names.head)
        name = names.head if names.embedding not in stored and names.head in stored else pair[0]
        target, part = table[names.embedding], slices[names.embedding]
        table = {key: table[key] for key in table if key not in pair}
        table[name], slices[name] = target, part
        stored = {key: stored[key] for key in stored if key in table or key not in pair}
    _check(table, slices, stored, names.ignored)
    if is_tied:
        model.tie_embeddings()
    reader = TensorReader(next((target.device for target in table.values()), "cpu"), on_piece)
    _copy(reader, table, slices, stored, progress=progress, merge=merge, sinks=sinks or {})
    finish = getattr(model, "finish_loading", None)
    if finish is not None:
        finish()


def _copy(
    reader: TensorReader,
    table: Mapping[str, torch.Tensor],
    slices: Mapping[str, WeightSlice],
    stored: Mapping[str, StoredTensor],
    *,
    progress: bool,
    merge: MergePlan | None,
    sinks: Mapping[str, WeightSink],
) -> None:
    # In the order in which the bytes lie on disk.
    order = sorted(table, key=lambda name: (stored[name].file, stored[name].offset))
    total = sum(target.numel() * target.element_size() for target in table.values())
    bar = progress_bar(total, "Loading weights") if progress and sys.stderr.isatty() else None
    for name in order:
        target, wanted_part, sink = table[name], slices[name], sinks.get(name)
        if sink is not None and sink.take(stored[name], reader, wanted_part):
            if bar is not None:
                bar.update(target.numel() * target.element_size())
            continue
        copy_values(name, stored[name], reader, target, wanted_part, sink, merge)
        if bar is not None:
            bar.update(target.numel() * target.element_size())
    if bar is not None:
        bar.close()


def copy_values(
    name: str,
    stored: StoredTensor,
    reader: TensorReader,
    target: torch.Tensor,
    wanted: WeightSlice,
    sink: WeightSink | None,
    merge: MergePlan | None = None,
) -> None:
    """Reads the part `wanted` of a tensor into `target`, or into a sink where there is one, whose target
    may be on the meta device.

    Raises:
        CheckpointError: a value is not finite.
    """
    num_rows, start, unit = None, 0, 1
    if sink is not None and target.dim() == 2:
        unit = sink.row_multiple
        num_rows = max(1, reader.rows_per_piece(stored) // unit) * unit
    size = wanted.shape[0] if wanted.shape else 1
    is_whole = unit == 1 or wanted.row_ranges == (slice(0, size),)
    for part in wanted.row_ranges:
        # Rows that share a scale are read together.
        span = slice(part.start // unit * unit, min(-(-part.stop // unit) * unit, size))
        for rows, values in reader.pieces(stored, num_rows, span):
            check_finite(values, name, stored)
            merged = values if merge is None else merge.apply(name, rows, values)
            kept = slice(max(0, part.start - rows.start), min(rows.stop, part.stop) - rows.start)
            stop = start + kept.stop - kept.start
            if sink is None:
                (target[start:stop] if target.dim() else target).copy_(wanted.cut(merged))
            elif is_whole and wanted.has_whole_rows:
                sink.write(slice(start, stop), merged)
            else:
                sink.write_part(wanted, start, merged, kept)
            start = stop


def check_finite(values: torch.Tensor, name: str, stored: StoredTensor) -> None:
    """Refuses NaN and infinite weights, whose answers would be refused later without a name.

    Raises:
        CheckpointError: a value is not finite.
    """
    # One pass over the values decides, unless their sum overflows.
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    if values.sum(dtype=dtype).isfinite() or values.isfinite().all():
        return
    raise CheckpointError(
        f"checkpoint: {stored.file}: {name}: expected finite values, got NaN or infinite ones"
    )


def progress_bar(total: int, what: str) -> Any:
    """Counts the bytes of something long."""
    from tqdm import tqdm  # noqa: PLC0415 (only a long load needs it)

    # The delay keeps the bar away from loads that finish before anyone wonders.
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, delay=2.0)
