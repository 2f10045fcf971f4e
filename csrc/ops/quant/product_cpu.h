// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the products with weights in low precision share: float32 results of one panel of columns,
// and how they reach the result.

#include <algorithm>
#include <cstdint>

#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {

/// Multiply-adds a thread should get at least.
inline constexpr int64_t kQuantParallelMacs = 1 << 18;
/// Rows of x at a time: bounds the copies of them.
inline constexpr int64_t kQuantRowBlock = 192;

/// Calls body(first_row, rows) for blocks of about equal height.
template <typename Body>
void for_row_blocks(int64_t num_rows, const Body& body) {
  const int64_t num_blocks = (num_rows + kQuantRowBlock - 1) / kQuantRowBlock;
  const int64_t block_rows = (num_rows + num_blocks - 1) / num_blocks;
  for (int64_t row = 0; row < num_rows; row += block_rows) {
    body(row, std::min(block_rows, num_rows - row));
  }
}

/// Calls body(panel) for the panels of `columns` columns, by as many threads as are worth it.
template <typename Body>
void for_panels(const ExecContext& context, int64_t columns, int64_t rows, int64_t depth,
                const Body& body) {
  const int64_t num_panels = (columns + kLinearPanelColumns - 1) / kLinearPanelColumns;
  const int64_t grain =
      std::max<int64_t>(1, kQuantParallelMacs / (rows * depth * kLinearPanelColumns));
  parallel_ranges(context, num_panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      body(panel);
    }
  });
}

/// Copies `sums` [rows, 32] to the columns of `panel` of out [T, N], rounding to its type.
inline void store_panel(const float* sums, const TensorRef& out, int64_t first_row, int64_t rows,
                        int64_t panel) {
  const int64_t column = panel * kLinearPanelColumns;
  const int64_t columns = std::min(kLinearPanelColumns, out.size[1] - column);
  for (int64_t row = 0; row < rows; ++row) {
    kernel_table().store(sums + row * kLinearPanelColumns, out.dtype,
                         element_at(out, (first_row + row) * out.stride[0] + column), columns);
  }
}

}  // namespace diffulex::cpu
