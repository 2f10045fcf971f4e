# SPDX-License-Identifier: Apache-2.0
"""Former import path of `diffulex.serving.zmq_queue`."""

from diffulex.serving.zmq_queue import *  # noqa: F403
from diffulex.serving.zmq_queue import __all__ as __all__  # noqa: PLC0414
