# SPDX-License-Identifier: Apache-2.0
"""Sections of the kernel benchmark: cases, timing, peers and the report."""
