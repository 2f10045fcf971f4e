// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the products with weights in low precision share: float32 results of one panel of columns,
// and how they reach the result.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

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

/// Bytes [first, first + count) of the rows of `panel` of a weight with `row_bytes` a row, as
/// panels [bytes / kStep, 32, kStep] have them: those of panels, or rows [N, bytes] put together
/// and padded. int8, whose steps are 4, has its highest bit flipped.
template <int64_t kStep>
const uint8_t* panel_bytes(const TensorRef& weight, int64_t row_bytes, int64_t panel, int64_t first,
                           int64_t count) {
  struct Panel;
  constexpr uint8_t kFlipped = kStep == 4 ? 0x80 : 0;
  if (weight.rank == 4) {
    return weight.as<const uint8_t>() +
           (panel * weight.size[1] * kStep + first) * kLinearPanelColumns;
  }
  // A whole number of floats, as a panel has 32 rows.
  auto* bytes = reinterpret_cast<uint8_t*>(thread_floats<Panel>(count * kLinearPanelColumns / 4));
  std::memset(bytes, kFlipped, static_cast<size_t>(count * kLinearPanelColumns));
  const int64_t row = panel * kLinearPanelColumns;
  for (int64_t c = 0; c < std::min(kLinearPanelColumns, weight.size[0] - row); ++c) {
    const uint8_t* source = weight.as<const uint8_t>() + (row + c) * weight.stride[0] + first;
    for (int64_t i = 0; i < std::min(count, row_bytes - first); ++i) {
      bytes[(i / kStep * kLinearPanelColumns + c) * kStep + i % kStep] = source[i] ^ kFlipped;
    }
  }
  return bytes;
}

/// Calls body(row, rows) for tiles of about equal height: a nearly empty last one costs much.
template <typename Body>
void for_row_tiles(int64_t num_rows, int64_t tile_rows, const Body& body) {
  const int64_t height = (num_rows - 1) / ((num_rows - 1) / tile_rows + 1) + 1;
  for (int64_t row = 0; row < num_rows; row += height) {
    body(row, std::min(height, num_rows - row));
  }
}

/// Copies `sums` [rows, 32] to the columns of `panel` of out [T, N], rounding to its type.
inline void store_panel(const float* sums, const TensorRef& out, int64_t first_row, int64_t rows,
                        int64_t panel) {
  const int64_t column = panel * kLinearPanelColumns;
  const int64_t columns = std::min(kLinearPanelColumns, out.size[1] - column);
  for (int64_t row = 0; row < rows; ++row) {
    const float* source = sums + row * kLinearPanelColumns;
    char* target = element_at(out, (first_row + row) * out.stride[0] + column);
    if (out.dtype == DType::kF32) {
      std::memcpy(target, source, static_cast<size_t>(columns) * sizeof(float));
    } else {
      kernel_table().store(source, out.dtype, target, columns);
    }
  }
}

/// act(gate) * up in float32, one rounding, of the product that `multiply` makes of `params` with
/// an `out` of float32 for both.
template <typename Params, typename Multiply>
void multiply_gated(const Params& params, Activation act, const ExecContext& context,
                    const Multiply& multiply) {
  const int64_t num_rows = params.x.size[0];
  const int64_t width = params.out.size[1];
  std::vector<float> gate_up(static_cast<size_t>(num_rows * 2 * width));
  Params whole = params;
  whole.out.data = gate_up.data();
  whole.out.dtype = DType::kF32;
  whole.out.size[1] = 2 * width;
  whole.out.stride[0] = 2 * width;
  multiply(whole);
  parallel_ranges(context, num_rows, row_grain(width), [&](int64_t begin, int64_t end) {
    float* gate = gate_up.data() + begin * 2 * width;
    for (int64_t row = begin; row < end; ++row, gate += 2 * width) {
      // In place: a result takes the place of its gate.
      kernel_table().act_row(ActRowArgs{gate, gate + width, gate, width, DType::kF32, act});
      kernel_table().store(gate, params.out.dtype,
                           element_at(params.out, row * params.out.stride[0]), width);
    }
  });
}

}  // namespace diffulex::cpu
