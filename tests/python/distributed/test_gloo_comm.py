# SPDX-License-Identifier: Apache-2.0
"""The exchange through gloo: how long ranks wait for each other, to connect and in an exchange."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch

from diffulex.distributed.cuda_comm import CudaRowComm
from diffulex.distributed.gloo_comm import GlooComm
from diffulex.distributed.layout import LOOPBACK
from diffulex.distributed.store import PeerError, make_store
from fixtures.processes import PATIENCE_S, until

_SHORT_S = 0.001


def test_a_rank_that_is_late_to_connect_has_the_time_to_connect() -> None:
    """Which is not that of an exchange."""
    store = make_store(2)
    where, before = (LOOPBACK, store.port), store.num_keys()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(GlooComm, 0, 2, where, PATIENCE_S, _SHORT_S)
        until(lambda: store.num_keys() > before or first.done())
        assert not wait([first], 500 * _SHORT_S).done
        second = GlooComm(1, 2, where, PATIENCE_S, PATIENCE_S)
        comm = first.result(PATIENCE_S)
    with pytest.raises(PeerError, match=r"^rank 0 waited 0.001 s for rank 1 in all-reduce"):
        comm.all_reduce_(torch.ones(1))
    for each in (comm, second):
        each.close()


@pytest.mark.parametrize("backend", ["gloo", "nccl", None])
def test_a_rank_that_does_not_connect_is_named(backend: str | None) -> None:
    make: Any = GlooComm
    if backend is not None:

        def make(*arguments: Any) -> CudaRowComm:
            return CudaRowComm(*arguments, backend=backend)

    store = make_store(3)
    store.set("rank 2", "")
    text = r"^rank 0 waited 0.05 s for rank 1 to connect \(distributed_timeout_seconds\)$"
    with pytest.raises(PeerError, match=text):
        make(0, 3, store, 0.05, PATIENCE_S)
