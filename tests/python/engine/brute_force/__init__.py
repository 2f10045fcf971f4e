# SPDX-License-Identifier: Apache-2.0
"""Block-diffusion decoding of one request, straight from the rules.

No pages, no batch, no engine: a step recomputes the sequence with transformers and a mask built
here, or runs over keys and values that it keeps itself. Shares no code with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from brute_force.block_run import BlockRun
from brute_force.draws import philox4x32
from brute_force.dual_cache import DualCacheRun
from brute_force.editing import DmaxRun, EditRun
from brute_force.network import Network
from brute_force.proposals import Proposal, propose
from brute_force.request_run import RequestRun
from brute_force.rules import accepted_positions
from brute_force.settings import Outcome, RequestSettings, Settings

__all__ = [
    "BruteForceDecoder",
    "Network",
    "Outcome",
    "Proposal",
    "RequestSettings",
    "Settings",
    "accepted_positions",
    "philox4x32",
    "propose",
]

_RUNS: dict[str, type[RequestRun]] = {
    "multi_bd": BlockRun,
    "d2f": BlockRun,
    "edit": EditRun,
    "dmax": DmaxRun,
    "fast_dllm_v2": DualCacheRun,
}


class BruteForceDecoder:
    """Decodes one request with nothing but the rules."""

    def __init__(self, network: Network, settings: Settings) -> None:
        self.network = network
        self.settings = settings

    def decode(self, prompt: Sequence[int], request: RequestSettings) -> Outcome:
        """Runs the request alone to its end."""
        run = _RUNS[self.settings.strategy](self.network, self.settings, list(prompt), request)  # type: ignore[call-arg, arg-type]
        return run.outcome()
