// SPDX-License-Identifier: Apache-2.0
#pragma once

// The table of the including variant. Include after vector_*.h, vector_math.h and *_kernels.h.

namespace diffulex::cpu {
namespace {

constexpr KernelTable make_table(const char* name) {
  return KernelTable{
      name,         load,        store,         pack_keys,  attend,    linear_tile, kLinearTileRows,
      dot_rows,     add_scaled,  scale_values,  norm_row,   rope_head, act_row,     stats_chunk,
      stats_values, exp_shifted, find_at_least, largest_of, to_codes,  widen_e4m3,  widen_nibbles,
      promote};
}

}  // namespace
}  // namespace diffulex::cpu
