# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.serving.frontend`."""

from diffulex.serving.frontend import *  # noqa: F403
from diffulex.serving.frontend import __all__ as __all__  # noqa: PLC0414
