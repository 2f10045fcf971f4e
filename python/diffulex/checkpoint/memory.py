# SPDX-License-Identifier: Apache-2.0
"""Whether a model, and what it runs on, fits the memory of its device."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from diffulex.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from diffulex.config.types import ConfigTree
    from diffulex.families.spec import ModelSpec

_MEMORY_FILE = Path("/proc/meminfo")
_GIB = 1 << 30
#: Measured: 162 bytes a row and below 1 KB beside them.
_ROW_BYTES, _PAGE_BYTES = 192, 16
#: Parts of the messages with which torch reports that an allocation failed.
_ALLOCATION_TEXTS = ("allocate", "out of memory", "Storage size calculation overflowed")


def model_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Memory of the weights and of the rotary table of a whole model."""
    return spec.num_parameters * dtype.itemsize + 4 * spec.rotary_rows * spec.rotary_columns


def built_bytes(model: nn.Module) -> int:
    """Memory of the parameters and tables of a model as it was built, on whatever device; views of one
    another count once. Of several ranks that is the part of one."""
    storages = [each.untyped_storage() for each in (*model.parameters(), *model.buffers())]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def available_bytes(device: torch.device | str) -> int | None:
    """Memory that can be taken without harm; None where the system does not say."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = _MEMORY_FILE.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if ":" in line}
    if "MemAvailable" not in sizes:
        return None
    return sizes["MemAvailable"] + sizes.get("SwapFree", 0)


def at_most_available(wanted: int) -> int:
    """Bytes of host memory, at most those that can be taken without harm."""
    available = available_bytes("cpu")
    return wanted if available is None else min(wanted, available)


def check_memory(
    needed: int, device: torch.device | str, scheme: str = "", num_ranks: int = 1
) -> None:
    """Asks the CPU, whose system hands out memory it does not have and ends who uses it.

    A CUDA allocation fails by itself, and may succeed with more than the driver calls free: the
    allocator of torch keeps some.

    Args:
        needed: bytes of what is built on this device.
        device: for it.
        scheme: name of the low precision of its matrices; empty: they have none.
        num_ranks: processes of this host that each build as much, of which none has begun.

    Raises:
        CheckpointError: the model needs more memory than there is.
    """
    if torch.device(device).type != "cpu":
        return
    available = available_bytes(device)
    if available is not None and needed * num_ranks > available:
        raise _too_large(needed * num_ranks, available, scheme, num_ranks)


def request_bytes(config: ConfigTree) -> int:
    """Host memory that every running request may take, an upper estimate.

    Plans, sampler arrays and the buffers of a step have room for all of them.
    """
    return 256 + _ROW_BYTES * config.decode_rows + _PAGE_BYTES * config.pages_per_request


def check_num_reqs(config: ConfigTree) -> None:
    """Asks before the arrays of a step are made, which the system would hand out and then regret.

    Raises:
        ConfigError: `max_num_reqs` requests need more memory than there is.
    """
    each, wanted = request_bytes(config), config.scheduler.max_num_reqs
    places = dict.fromkeys(("cpu", config.model.device))
    found = [size for size in map(available_bytes, places) if size is not None]
    if found and each * wanted > min(found):
        raise ConfigError(
            f"max_num_reqs: expected at most {min(found) // each} ({each} bytes each,"
            f" {min(found) / _GIB:.1f} GiB available), got {wanted}"
        )


def check_num_pages(config: ConfigTree, page_bytes: int) -> None:
    """Asks before the pages of one rank are allocated, of whose memory nobody else may have known.

    Raises:
        ConfigError: there are more of them than there is memory for.
    """
    device, wanted = config.model.device, config.cache.num_pages
    available = available_bytes(device)
    if available is not None and device.startswith("cuda"):  # and what the allocator of torch keeps
        available += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if available is not None and wanted * page_bytes > available:
        raise ConfigError(
            f"num_pages: expected at most {available // page_bytes} ({page_bytes} bytes each,"
            f" {available / _GIB:.1f} GiB available on {device}), got {wanted}"
        )


@contextmanager
def reporting_memory(needed: int, device: torch.device | str, scheme: str = "") -> Iterator[None]:
    """A block that builds a model; a failed allocation becomes one clear error.

    Args:
        needed: bytes of what is built.
        device: for it.
        scheme: as for `check_memory`.

    Raises:
        CheckpointError: an allocation failed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        is_failure = isinstance(error, MemoryError)
        if not is_failure and not any(text in str(error) for text in _ALLOCATION_TEXTS):
            raise
        raise _too_large(needed, available_bytes(device), scheme) from error


def _too_large(
    needed: int, available: int | None, scheme: str, num_ranks: int = 1
) -> CheckpointError:
    at_hand = "an unknown amount is" if available is None else f"{available / _GIB:.1f} GiB"
    of_what = f" of weights ({scheme})" if scheme else ""
    of_whom = f" for {num_ranks} ranks of this host" if num_ranks > 1 else ""
    return CheckpointError(
        f"model: needs {needed / _GIB:.1f} GiB{of_what}{of_whom}, {at_hand} available"
    )
