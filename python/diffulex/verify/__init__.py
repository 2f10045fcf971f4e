# SPDX-License-Identifier: Apache-2.0
"""Whether this engine computes what a checkpoint means: `diffulex verify MODEL`."""
