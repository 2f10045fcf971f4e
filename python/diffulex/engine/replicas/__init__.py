# SPDX-License-Identifier: Apache-2.0
"""Several engines in separate processes that serve as one."""
