# SPDX-License-Identifier: Apache-2.0
"""The documented path of before; what it names lives in `diffulex.serving.engine_loop`."""

from diffulex.serving.engine_loop import EngineLoop

__all__ = ["EngineLoop"]
