# SPDX-License-Identifier: Apache-2.0
"""Decoding strategies: one file each, registrations only; the state machines are C++."""
