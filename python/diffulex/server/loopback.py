# SPDX-License-Identifier: Apache-2.0
"""Which names and addresses are those of this machine alone."""

from __future__ import annotations

import ipaddress

__all__ = ["LOCALHOST", "is_loopback"]

LOCALHOST = "localhost"


def is_loopback(name: str) -> bool:
    """Whether a host name or an address, IPv6 also in brackets, cannot be reached from elsewhere."""
    if name == LOCALHOST or name.endswith("." + LOCALHOST):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
