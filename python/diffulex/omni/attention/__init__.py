# SPDX-License-Identifier: Apache-2.0
"""What computes attention: the kernels of PyTorch, of other packages, or a window of tiles."""
