# SPDX-License-Identifier: Apache-2.0
"""What a trainer does to an engine between two steps: pause it, give it other weights, go on."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from diffulex.checkpoint.auto_model import detect
from diffulex.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from diffulex.config.config import Config
    from diffulex.distributed.executor import Executor
    from diffulex.engine.step_loop import StepLoop

__all__ = ["LiveControls"]

#: Of a description: which of two equal matrices is stored may change, the token ids are the engine's.
_FREE_FIELDS = frozenset({"tie_word_embeddings", "mask_token_id", "eos_token_ids"})


class LiveControls:
    """Part of `Diffulex`; see docs/rl.md."""

    config: Config
    _executor: Executor
    _loop: StepLoop

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called and `resume` was not."""
        return self._loop.is_paused

    def pause(self, *, wait: bool = True) -> None:
        """Lets no further step begin. Requests keep their place, and new ones wait; from any thread.

        `generate`, `chat` and `stream` that are under way in another thread wait for `resume`; `step`,
        and calls of these that begin meanwhile, are RuntimeError. Idempotent.

        Args:
            wait: for the end of a step that another thread runs.
        """
        self._loop.pause(wait=wait)

    def resume(self) -> None:
        """Lets steps run again; idempotent."""
        self._loop.resume()

    @property
    def has_broken_weights(self) -> bool:
        """Whether a change of the weights failed midway; then neither steps nor `score` run."""
        return self._loop.weights_failure is not None

    def update_weights(
        self,
        new: str | PathLike[str] | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    ) -> int:
        """Replaces weights between two steps, paused or not; returns how many tensors.

        Unfinished requests keep their tokens and go on with the new weights. Their keys and values are
        computed again, and cached prefixes are dropped. Graphs stay valid: values are written in place.

        After any other error the values may be half written (memory ran out, a file changed meanwhile, a
        second Ctrl-C). Then steps and `score` are RuntimeError until a call with all weights succeeds.

        Args:
            new: tensors of any floating dtype and device under the names and with the shapes they have
                in checkpoints of the model, as many as changed; or a directory with a whole checkpoint.

        Raises:
            CheckpointError: a name, shape, type or value does not suit the model, or a directory lacks
                a tensor. Nothing is changed.
            ConfigError: the engine has an adapter in its weights, or a model that has no weights.
            RuntimeError: a step is running.
        """
        source: Mapping[str, torch.Tensor] | Path
        if isinstance(new, Mapping):
            source = new
        elif isinstance(new, (str, PathLike)):
            source = _directory("update_weights", new)
            self._check_description(source)
        else:
            source = _named(new)
        with self._loop.new_weights() as begin:
            return self._executor.update_weights(source, begin)

    def load_lora(self, path: str | PathLike[str]) -> int:
        """Merges a LoRA adapter into the weights between two steps, in place of the one before.

        Requests and caches are treated as in `update_weights`, and so is an error midway; `unload_lora`
        mends it.

        Args:
            path: directory of the adapter in the layout of peft.

        Returns:
            How many matrices it changes.

        Raises:
            CheckpointError: the adapter is damaged or does not suit the model. Nothing is changed.
            ConfigError: the engine was started with an adapter, or its model takes none.
            RuntimeError: a step is running.
        """
        directory = _directory("load_lora", path)
        with self._loop.new_weights() as begin:
            return self._executor.load_adapter(directory, begin)

    def unload_lora(self) -> int:
        """Takes the adapter of `load_lora` out again: the weights are the former ones, bit for bit.

        Returns:
            How many matrices it had changed.

        Raises:
            ConfigError: there is none.
            RuntimeError: a step is running.
        """
        with self._loop.new_weights() as begin:
            return self._executor.unload_adapter(begin)

    def _check_description(self, directory: Path) -> None:
        """Compares a config.json beside new weights, if there is one, with the engine's model."""
        if not (directory / "config.json").is_file():
            return
        model = self.config.model
        has_mask = not self.config.decoding.traits.has_canvas
        mask_token_id = model.mask_token_id if has_mask else None
        _, spec, _ = detect(directory, model.model_name, mask_token_id=mask_token_id)
        fields = getattr(type(spec), "__dataclass_fields__", {}).keys() - _FREE_FIELDS
        for name in sorted(fields):
            expected, got = getattr(model.spec, name, None), getattr(spec, name)
            if expected != got:
                raise CheckpointError(
                    f"update_weights: config.json: expected {name} {expected!r} of the engine's model,"
                    f" got {got!r}"
                )


def _directory(where: str, path: str | PathLike[str]) -> Path:
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise CheckpointError(f"{where}: expected a directory, got {str(path)!r}")
    return directory


def _named(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        if name in tensors:
            raise CheckpointError(f"update_weights: {name}: expected one tensor, got two")
        tensors[name] = tensor
    return tensors
