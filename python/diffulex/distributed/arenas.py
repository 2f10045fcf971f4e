# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of one host map together: it has no name, so nothing of it stays behind."""

from __future__ import annotations

import mmap
import os

import torch

__all__ = ["SharedArenas"]


class SharedArenas:
    """Equal arenas at the beginning of pages, zeroed when they are made.

    Args:
        num_bytes: of each.
        count: how many.
        handle: a file of `create`; it is closed here.
    """

    def __init__(self, num_bytes: int, count: int, handle: int) -> None:
        step = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(handle, step * count)
        finally:
            os.close(handle)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        #: uint8 [num_bytes] each; they keep the memory.
        self.tensors = [whole[step * index :][:num_bytes] for index in range(count)]

    def fill(self, index: int, content: memoryview) -> None:
        """Puts these bytes at the beginning of an arena."""
        self.tensors[index].numpy()[: len(content)] = content

    @staticmethod
    def create(num_bytes: int, count: int) -> int:
        """A file for arenas of this size; the number under which this process has it."""
        step = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        handle = os.memfd_create("diffulex-arenas")
        os.ftruncate(handle, step * count)
        return handle
