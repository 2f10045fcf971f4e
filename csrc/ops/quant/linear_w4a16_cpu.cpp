// SPDX-License-Identifier: Apache-2.0

// linear_w4a16: a block of the depth of a panel is dequantised to float32 for the tiles of
// linear_packed.

#include "ops/cpu_ops.h"
#include "ops/quant/product_cpu.h"
#include "ops/shared/half.h"

namespace diffulex::cpu {
namespace {

struct CopyOfX;
struct PanelSums;
struct WidePanel;

/// A block of rows of the product, its x as float32 [depth block, row, kLinearRowStride].
class NibbleRows final {
 public:
  NibbleRows(const LinearW4a16Params& params, int64_t first_row, int64_t rows)
      : params_(params),
        first_row_(first_row),
        rows_(rows),
        depth_(params.x.size[1]),
        x_(thread_floats<CopyOfX>(rows * num_blocks() * kLinearRowStride)),
        kernels_(kernel_table()) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t block = 0; block < num_blocks(); ++block) {
        const int64_t count = block_depth(block);
        const int64_t offset = (first_row + row) * params.x.stride[0] + block * kLinearDepthBlock;
        kernels_.load(GatherArgs{element_at(params.x, offset), params.x.dtype, count, count, count},
                      x_at(block, row));
      }
    }
  }

  void multiply_panel(int64_t panel) const {
    const int64_t first = panel * kLinearPanelColumns;
    const int64_t columns = std::min(kLinearPanelColumns, params_.out.size[1] - first);
    float* sums = thread_floats<PanelSums>(rows_ * kLinearPanelColumns);
    float* wide = thread_floats<WidePanel>(kLinearDepthBlock * kLinearPanelColumns);
    LinearTileArgs args;
    args.panel = wide;
    args.out_stride = kLinearPanelColumns;
    for (int64_t block = 0; block < num_blocks(); ++block) {
      args.depth = static_cast<int32_t>(block_depth(block));
      args.accumulate = block > 0;
      widen(panel, block * kLinearDepthBlock, args.depth, wide);
      for_row_tiles(rows_, kernels_.linear_tile_rows, [&](int64_t row, int64_t rows) {
        args.rows = static_cast<int32_t>(rows);
        args.x = x_at(block, row);
        args.out = sums + row * kLinearPanelColumns;
        kernels_.linear_tile(args);
      });
    }
    if (params_.bias.present()) {
      const float* bias = params_.bias.as<const float>() + first;
      for (int64_t row = 0; row < rows_; ++row) {
        for (int64_t c = 0; c < columns; ++c) {
          sums[row * kLinearPanelColumns + c] += bias[c];
        }
      }
    }
    store_panel(sums, params_.out, first_row_, rows_, panel);
  }

 private:
  [[nodiscard]] int64_t num_blocks() const {
    return (depth_ + kLinearDepthBlock - 1) / kLinearDepthBlock;
  }
  [[nodiscard]] int64_t block_depth(int64_t block) const {
    return std::min<int64_t>(kLinearDepthBlock, depth_ - block * kLinearDepthBlock);
  }
  [[nodiscard]] float* x_at(int64_t block, int64_t row) const {
    return x_ + (block * rows_ + row) * kLinearRowStride;
  }

  /// Rows [start, start + count) of the panel as float32 [count, 32].
  void widen(int64_t panel, int64_t start, int64_t count, float* wide) const {
    const int64_t first = panel * kLinearPanelColumns;
    const int64_t columns = std::min(kLinearPanelColumns, params_.out.size[1] - first);
    float scales[kLinearPanelColumns] = {};
    float zeros[kLinearPanelColumns] = {};
    NibbleArgs args;
    // A block begins with a byte.
    args.codes =
        panel_bytes<1>(params_.weight, (depth_ + 1) / 2, panel, start / 2, (count + 1) / 2);
    args.scale = scales;
    args.zero = zeros;
    for (int64_t k = start; k < start + count; k = start + args.last) {
      const int64_t group = k / params_.group;
      const int64_t at = group * params_.scales.stride[0] + first;
      const int64_t zeros_at = group * params_.zeros.stride[0] + first;
      for (int64_t c = 0; c < columns; ++c) {
        const float scale = params_.scales.dtype == DType::kF32
                                ? params_.scales.as<const float>()[at + c]
                                : bf16_to_float(params_.scales.as<const uint16_t>()[at + c]);
        scales[c] = scale == scale ? scale : bits_float(0x7FC00000U);
        const int32_t zero =
            params_.zeros.present() ? params_.zeros.as<const uint8_t>()[zeros_at + c] : kInt4Zero;
        zeros[c] = static_cast<float>(zero);
      }
      args.first = static_cast<int32_t>(k - start);
      args.last = static_cast<int32_t>(std::min(count, (group + 1) * params_.group - start));
      args.out = wide + args.first * kLinearPanelColumns;
      kernels_.widen_nibbles(args);
    }
  }

  const LinearW4a16Params& params_;
  int64_t first_row_;
  int64_t rows_;
  int64_t depth_;
  float* x_;
  const KernelTable& kernels_;
};

void multiply(const LinearW4a16Params& params, const ExecContext& context) {
  for_row_blocks(params.x.size[0], [&](int64_t first_row, int64_t num_rows) {
    const NibbleRows rows(params, first_row, num_rows);
    for_panels(context, params.out.size[1], num_rows, params.x.size[1],
               [&rows](int64_t panel) { rows.multiply_panel(panel); });
  });
}

}  // namespace

Status linear_w4a16(const LinearW4a16Params& params, const ExecContext& context) {
  if (is_nibble_tiles(params.weight)) {
    return make_error(StatusCode::kUnsupported, "diffulex::linear_w4a16",
                      ": weight: expected row-major codes or panels on the CPU, got tiles");
  }
  if (!params.act.has_value()) {
    multiply(params, context);
    return {};
  }
  multiply_gated(params, *params.act, context,
                 [&context](const LinearW4a16Params& whole) { multiply(whole, context); });
  return {};
}

}  // namespace diffulex::cpu
