# SPDX-License-Identifier: Apache-2.0
"""Models by their path before the packages were sorted; see `diffulex.families`."""
