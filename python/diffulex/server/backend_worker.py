# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.serving.backend_worker`."""

from diffulex.serving.backend_worker import *  # noqa: F403
from diffulex.serving.backend_worker import __all__ as __all__  # noqa: PLC0414
