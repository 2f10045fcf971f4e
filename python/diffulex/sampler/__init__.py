# SPDX-License-Identifier: Apache-2.0
"""Samplers by their path before the packages were sorted; see `diffulex.samplers`."""
