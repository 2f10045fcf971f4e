# SPDX-License-Identifier: Apache-2.0
"""Options: their table, how they are parsed and resolved, and the resolved tree."""
