# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.server.http.api_server`."""

from diffulex.server.http.api_server import *  # noqa: F403
from diffulex.server.http.api_server import __all__ as __all__  # noqa: PLC0414
