# SPDX-License-Identifier: Apache-2.0
#
# Sources of diffulex_edge (exported as diffulex::edge): core and kernels only, no torch, no ExecuTorch.
# Paths are relative to the repository root, one per line, sorted.

set(DIFFULEX_EDGE_SOURCES
  csrc/edge/options.cpp
  csrc/edge/row_stage.cpp
  csrc/edge/session.cpp
)
