# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.serving.engine_loop`."""

from diffulex.serving.engine_loop import *  # noqa: F403
from diffulex.serving.engine_loop import __all__ as __all__  # noqa: PLC0414
