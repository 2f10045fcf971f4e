# SPDX-License-Identifier: Apache-2.0
"""Decoding strategies: one file each, with its registrations and its configuration rules.

The state machines are C++.
"""
