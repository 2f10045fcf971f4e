# SPDX-License-Identifier: Apache-2.0
"""The older name of `diffulex.bench`; ``python -m diffulex_bench.main`` evaluates."""

from diffulex.bench import *  # noqa: F403 (the same names)
