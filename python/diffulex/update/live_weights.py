# SPDX-License-Identifier: Apache-2.0
"""The weights of a model that is in use, and how others get into their place.

Values are written where the old ones lie, so that CUDA graphs, which keep addresses, stay valid. What
is derived from weights (the layout of products on the CPU, folded scales) is made again. Everything is
checked before the first value is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from diffulex.checkpoint.auto_model import adaptable_projections
from diffulex.checkpoint.loader import slices_of, weight_table_of
from diffulex.checkpoint.lora import MergePlan, read_adapter
from diffulex.checkpoint.tensor_files import listed
from diffulex.errors import CheckpointError, ConfigError
from diffulex.nn.linear import pack_weights
from diffulex.quantization.layers import sinks_of
from diffulex.update.sources import FileSource, TensorSource

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from diffulex.checkpoint.slices import WeightSlice
    from diffulex.config.config import Config
    from diffulex.quantization.layers import Sink
    from diffulex.update.sources import WeightSource

__all__ = ["LiveWeights"]


class LiveWeights:
    """Changes the weights of one rank's model between two steps.

    Args:
        config: of the engine.
        model: as it was loaded.
    """

    def __init__(self, config: Config, model: Any) -> None:
        self._config = config
        self._model = model
        self._device = torch.device(config.model.device)
        #: Base values of the tensors that the loaded adapter changed, on the CPU; None: no adapter.
        self._base: dict[str, torch.Tensor] | None = None
        #: What ended a change after its first write, so that some weights are old and some new. None:
        #: the last change was whole.
        self.failure: str | None = None

    @torch.inference_mode()
    def update(self, new: Mapping[str, torch.Tensor] | Path, begin: Callable[[], None]) -> int:
        """Replaces weights by given tensors, or all by those of a directory; returns how many.

        `begin` is called when everything is checked, before the first weight is written.

        Raises:
            CheckpointError: names, shapes, types or values do not suit the model. Nothing is changed.
            ConfigError: the weights of this engine cannot be replaced.
        """
        self._check_open("update_weights")
        if self._base is not None:
            raise ConfigError("update_weights: expected no adapter, got one (unload_lora first)")
        source: WeightSource
        if isinstance(new, Mapping):
            source = TensorSource(self._model, new)
        else:
            source = FileSource(self._model, new, self._device)
        if not source.shapes:
            raise CheckpointError("update_weights: expected at least one tensor, got none")
        with self._change("update_weights", begin) as write:
            table = weight_table_of(self._model, source.shapes)
            slices, sinks = slices_of(self._model, table), sinks_of(self._model, table)
            is_whole = source.is_complete or self.failure is not None
            _check(table, slices, source, is_whole=is_whole)
            coded = [name for name in source.shapes if name in sinks and source.is_coded(name)]
            if coded:
                raise CheckpointError(
                    "update_weights: expected weights in their dtype for an engine in low precision,"
                    f" got codes of {listed(coded)}"
                )
            write()
            for name in source.shapes:
                if name in sinks:
                    _quantize(sinks[name], name, source)
                else:
                    _write(table[name], slices[name], name, source)
        return len(source.shapes)

    @torch.inference_mode()
    def load_adapter(self, directory: Path, begin: Callable[[], None]) -> int:
        """Adds the products of an adapter to the weights, in place of those of the adapter before.

        `begin` is called as by `update`.

        Returns:
            How many matrices it changes.

        Raises:
            CheckpointError: the adapter is damaged or does not suit the model. Nothing is changed.
            ConfigError: the weights of this engine cannot be changed, or have an adapter from its start.
        """
        self._check_open("load_lora")
        scheme = self._config.model.quantization
        if scheme not in ("auto", "none"):
            raise ConfigError(
                f"load_lora: expected quantization none, got {scheme} (the base of an adapter cannot be"
                " brought back from low precision)"
            )
        if self._config.model.use_lora:
            raise ConfigError(
                "load_lora: expected an engine that started without use_lora, got one with"
            )
        if self.failure is not None and self._base is None:
            raise ConfigError(f"load_lora: expected whole weights, got a mixture ({self.failure})")
        plan = MergePlan(
            read_adapter(directory),
            adaptable_projections(self._model, self._config.model.model_name),
        )
        with self._change("load_lora", begin) as write:
            table = weight_table_of(self._model, {})
            slices = slices_of(self._model, table)
            cut = [name for name in plan.tensors if slices[name].local_shape != slices[name].shape]
            if cut:
                raise ConfigError(f"load_lora: expected whole weights, got parts of {listed(cut)}")
            old = self._base or {}
            base = {
                name: old[name] if name in old else table[name].to("cpu", copy=True)
                for name in plan.tensors
            }
            write()
            # From here on these are what `unload_adapter` has to bring back.
            self._base = {**old, **base}
            _restore(table, old)
            for name, values in base.items():
                rows = slice(0, values.size(0))
                table[name].copy_(plan.apply(name, rows, values))
            self._base = base
        return len(plan.tensors)

    @torch.inference_mode()
    def unload_adapter(self, begin: Callable[[], None]) -> int:
        """Brings the weights back that the adapter changed, bit for bit; returns how many.

        `begin` is called as by `update`.

        Raises:
            ConfigError: there is no adapter that `load_adapter` loaded.
        """
        if self._base is None:
            raise ConfigError("unload_lora: expected an adapter of load_lora, got none")
        num = len(self._base)
        with self._change("unload_lora", begin) as write:
            write()
            _restore(weight_table_of(self._model, {}), self._base)
        self._base = None
        return num

    @contextlib.contextmanager
    def _change(self, where: str, begin: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """A block that looks at the weights, then calls what it yields, then writes them."""
        has_begun = False

        def write() -> None:
            nonlocal has_begun
            begin()
            has_begun = True

        self._await_device()
        try:
            try:
                yield write
            finally:
                self._derive()
        except BaseException as error:
            if has_begun:
                self.failure = f"{where}: {' '.join(str(error).split()) or type(error).__name__}"
            raise
        self.failure = None

    def _check_open(self, where: str) -> None:
        model, config = self._model, self._config.model
        if not hasattr(model, "weight_table"):
            raise ConfigError(
                f"{where}: expected a model with a weight_table, got {type(model).__name__}"
            )
        if config.use_lora and config.pre_merge_lora:
            raise ConfigError(
                f"{where}: expected weights without a merged adapter, got one (lora_path)"
            )

    def _await_device(self) -> None:
        """No kernel reads or writes a weight afterwards."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _derive(self) -> None:
        """Makes again what depends on the weights."""
        pack_weights(self._model)
        finish = getattr(self._model, "finish_loading", None)
        if finish is not None:
            finish()
        # Kernels read weights ahead of the launches in front of them.
        self._await_device()


def _check(
    table: Mapping[str, torch.Tensor],
    slices: Mapping[str, WeightSlice],
    source: WeightSource,
    *,
    is_whole: bool,
) -> None:
    unknown = [name for name in source.shapes if name not in table]
    if unknown:
        raise CheckpointError(
            f"update_weights: expected only tensors of the model, got {listed(unknown)}"
        )
    for name, shape in source.shapes.items():
        expected = slices[name].shape
        if shape != expected:
            raise CheckpointError(
                f"update_weights: {name}: expected shape {list(expected)}, got {list(shape)}"
            )
        source.check(name, table[name].dtype)
    _check_shared(table, source)
    if is_whole:
        filled = {_place(table[name]) for name in source.shapes}
        missing = [name for name, target in table.items() if _place(target) not in filled]
        if missing:
            raise CheckpointError(f"update_weights: missing tensors: {listed(missing)}")


def _check_shared(table: Mapping[str, torch.Tensor], source: WeightSource) -> None:
    """A tied head and its embedding lie in one place and need one value."""
    names: dict[tuple[int, ...], str] = {}
    for name in source.shapes:
        first = names.setdefault(_place(table[name]), name)
        if first != name and not source.has_equal(first, name):
            raise CheckpointError(
                f"update_weights: {first}, {name}: expected equal values (the model ties them),"
                " got different ones"
            )


def _restore(table: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor]) -> None:
    for name, values in base.items():
        table[name].copy_(values)


def _place(target: torch.Tensor) -> tuple[int, ...]:
    """Where a weight is; one in low precision has the place of its stand-in."""
    if target.is_meta:
        base = target if target._base is None else target._base
        return id(base), target.storage_offset(), *target.shape
    return target.data_ptr(), *target.shape


def _quantize(sink: Sink, name: str, source: WeightSource) -> None:
    """Quantises a new weight in place of the old one."""
    whole = slice(0, source.shapes[name][0])
    multiple = sink.row_multiple if len(source.shapes[name]) == 2 else 1
    for rows, values in source.pieces(name, whole, multiple):
        sink.write(rows, values)


def _write(target: torch.Tensor, part: WeightSlice, name: str, source: WeightSource) -> None:
    start = 0
    for wanted in part.rows:
        for rows, values in source.pieces(name, wanted):
            stop = start + rows.stop - rows.start
            into = target[start:stop] if target.dim() else target
            into.copy_(part.cut(values))
            start = stop
