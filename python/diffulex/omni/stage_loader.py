# SPDX-License-Identifier: Apache-2.0
"""A transformer of which a rank keeps only some blocks: the others are never read.

They stay on the device `meta`, where tensors have a shape and no data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.checkpoint.tensor_files import read_index

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import torch

__all__ = ["Stage", "drop_foreign", "load_stage", "stage_of"]

_WEIGHTS = "diffusion_pytorch_model.safetensors"


class Stage(NamedTuple):
    """Which part of the blocks a rank keeps: `place`, from 0, of `total`."""

    place: int
    total: int


def stage_of(block: int, num_blocks: int, num_stages: int) -> int:
    """Which stage has a block: the last one whose first block is not after it."""
    return max(s for s in range(num_stages) if num_blocks * s // num_stages <= block)


def drop_foreign(module: Any, block_lists: Sequence[str], stage: Stage) -> None:
    """Frees the memory of the blocks that other stages have."""
    for _, block in _foreign(module, block_lists, stage):
        block.to("meta")


def load_stage(
    cls: Any, where: Path, dtype: torch.dtype, block_lists: Sequence[str], stage: Stage
) -> tuple[Any, dict[str, list[str]]]:
    """A transformer of diffusers with the tensors of its stage, as its `from_pretrained` makes them.

    Args:
        cls: class of the transformer.
        where: directory of its configuration and its safetensors files.
        dtype: of floating-point tensors; those that the class keeps in float32 stay.
        block_lists: attribute names of its lists of blocks.
        stage: which of them it has.

    Returns:
        The module, and `missing_keys` and `unexpected_keys` of all stages.

    Raises:
        CheckpointError: an index is none.
        OSError, ValueError, RuntimeError, SafetensorError: files are missing, broken or do not fit.
    """
    from accelerate import init_empty_weights  # noqa: PLC0415 (it imports torch)

    with init_empty_weights(include_buffers=False):
        module = cls.from_config(cls.load_config(where))
    foreign = tuple(f"{name}." for name, _ in _foreign(module, block_lists, stage))
    expected = set(module.state_dict())
    found: set[str] = set()
    for path in _weight_files(where):
        own, names = _read(path, expected, foreign, dtype, cls._keep_in_fp32_modules or ())
        module.load_state_dict(own, strict=False, assign=True)
        found |= names
    return module, {
        "missing_keys": sorted(expected - found),
        "unexpected_keys": sorted(found - expected),
    }


def _foreign(module: Any, block_lists: Sequence[str], stage: Stage) -> Iterator[tuple[str, Any]]:
    for name in block_lists:
        blocks = getattr(module, name)
        for number, block in enumerate(blocks):
            if stage_of(number, len(blocks), stage.total) != stage.place:
                yield f"{name}.{number}", block


def _weight_files(where: Path) -> list[Path]:
    index = where / f"{_WEIGHTS}.index.json"
    if not index.is_file():
        return [where / _WEIGHTS]
    return sorted(set(read_index(index).values()))


def _read(
    path: Path,
    expected: set[str],
    foreign: tuple[str, ...],
    dtype: torch.dtype,
    kept: Sequence[str],
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Tensors of this stage, and the names of all in the file."""
    import torch  # noqa: PLC0415
    from safetensors import safe_open  # noqa: PLC0415

    own = {}
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for name in sorted(names & expected):
            if name.startswith(foreign):
                continue
            tensor = file.get_tensor(name)
            if tensor.is_floating_point():
                stays = any(part in kept for part in name.split("."))
                tensor = tensor.to(torch.float32 if stays else dtype)
            own[name] = tensor
    return own, names
