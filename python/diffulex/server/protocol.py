# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.wire.protocol`."""

from diffulex.wire.protocol import *  # noqa: F403
from diffulex.wire.protocol import __all__ as __all__  # noqa: PLC0414
