# SPDX-License-Identifier: Apache-2.0
"""Several engines in processes of their own that serve as one."""
