# SPDX-License-Identifier: Apache-2.0
"""Layers by their path before the packages were sorted; see `diffulex.nn`."""
