// SPDX-License-Identifier: Apache-2.0

// linear_packed. Rows are taken in blocks whose copy of x fits the caches; a thread walks the
// panels of its range, and within a panel the depth in blocks that stay in its caches while every
// row tile passes over them. The partial sums of a depth block go through memory unrounded (they
// are float32 in registers as well), so that blocking does not change a bit.

#include <algorithm>
#include <cstring>

#include "ops/cpu_ops.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

// Bounds the copy of x: 9 MiB at K = 12,288.
constexpr int64_t kMaxRowBlock = 192;
// Multiply-adds a thread should get at least: some microseconds, more than it takes to wake it.
constexpr int64_t kParallelMacs = 1 << 18;
// Row tiles up to which each widens bfloat16 itself: they read half the bytes and prefetch them.
constexpr int64_t kMaxWideningTiles = 3;

struct RowCopy;
struct WidenedPanel;
struct LastPanelOut;

/// One block of rows of the product, its x copied to [depth block, row, kLinearRowStride].
class RowBlock final {
 public:
  RowBlock(const LinearPackedParams& params, int64_t first_row, int64_t rows)
      : params_(params),
        first_row_(first_row),
        rows_(rows),
        depth_(params.x.size[1]),
        x_(thread_floats<RowCopy>(rows * num_depth_blocks() * kLinearRowStride)),
        kernels_(kernel_table()) {
    const int64_t tile = kernels_.linear_tile_rows;
    const int64_t num_tiles = (rows + tile - 1) / tile;
    // Tiles of equal height: a nearly empty last one would cost almost as much as a full one.
    tile_rows_ = (rows + num_tiles - 1) / num_tiles;
  }

  void copy_rows(const ExecContext& context) const {
    parallel_ranges(context, rows_, row_grain(depth_), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* source =
            params_.x.as<const float>() + (first_row_ + row) * params_.x.stride[0];
        for (int64_t block = 0; block < num_depth_blocks(); ++block) {
          std::memcpy(x_at(block, row), source + block * kLinearDepthBlock,
                      static_cast<size_t>(block_depth(block)) * sizeof(float));
        }
      }
    });
  }

  void multiply(const ExecContext& context) const {
    const int64_t panel_macs = rows_ * depth_ * kLinearPanelColumns;
    const int64_t grain = std::max<int64_t>(1, kParallelMacs / panel_macs);
    parallel_ranges(context, params_.packed_weight.size[0], grain, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        multiply_panel(panel);
      }
    });
  }

 private:
  [[nodiscard]] int64_t num_depth_blocks() const {
    return (depth_ + kLinearDepthBlock - 1) / kLinearDepthBlock;
  }
  [[nodiscard]] int64_t block_depth(int64_t block) const {
    return std::min<int64_t>(kLinearDepthBlock, depth_ - block * kLinearDepthBlock);
  }
  [[nodiscard]] float* x_at(int64_t block, int64_t row) const {
    return x_ + (block * rows_ + row) * kLinearRowStride;
  }

  void multiply_panel(int64_t panel) const {
    const int64_t first_column = panel * kLinearPanelColumns;
    const int64_t columns =
        std::min<int64_t>(kLinearPanelColumns, params_.out_features - first_column);
    float* out = params_.out.as<float>() + first_row_ * params_.out.stride[0] + first_column;
    if (columns == kLinearPanelColumns) {
      multiply_panel_into(panel, out, params_.out.stride[0]);
      return;
    }
    float* whole = thread_floats<LastPanelOut>(rows_ * kLinearPanelColumns);
    multiply_panel_into(panel, whole, kLinearPanelColumns);
    for (int64_t row = 0; row < rows_; ++row) {
      std::memcpy(out + row * params_.out.stride[0], whole + row * kLinearPanelColumns,
                  static_cast<size_t>(columns) * sizeof(float));
    }
  }

  void multiply_panel_into(int64_t panel, float* out, int64_t out_stride) const {
    const TensorRef& weight = params_.packed_weight;
    for (int64_t block = 0; block < num_depth_blocks(); ++block) {
      LinearTileArgs args;
      args.depth = static_cast<int32_t>(block_depth(block));
      args.panel =
          element_at(weight, (panel * depth_ + block * kLinearDepthBlock) * kLinearPanelColumns);
      args.is_bf16 = weight.dtype == DType::kBF16;
      args.out_stride = out_stride;
      args.accumulate = block > 0;
      if (args.is_bf16 && rows_ > kMaxWideningTiles * tile_rows_) {
        // Many tiles read these values: widen them once.
        const int64_t count = args.depth * kLinearPanelColumns;
        float* widened = thread_floats<WidenedPanel>(kLinearDepthBlock * kLinearPanelColumns);
        kernels_.load(GatherArgs{args.panel, DType::kBF16, count, count, count}, widened);
        args.panel = widened;
        args.is_bf16 = false;
      }
      for (int64_t row = 0; row < rows_; row += tile_rows_) {
        args.rows = static_cast<int32_t>(std::min(tile_rows_, rows_ - row));
        args.x = x_at(block, row);
        args.out = out + row * out_stride;
        kernels_.linear_tile(args);
      }
    }
  }

  const LinearPackedParams& params_;
  int64_t first_row_;
  int64_t rows_;
  int64_t depth_;
  float* x_;
  const KernelTable& kernels_;
  int64_t tile_rows_ = 1;
};

}  // namespace

Status linear_packed(const LinearPackedParams& params, const ExecContext& context) {
  const int64_t rows = params.x.size[0];
  const int64_t num_blocks = (rows + kMaxRowBlock - 1) / kMaxRowBlock;
  const int64_t block_rows = (rows + num_blocks - 1) / num_blocks;
  for (int64_t row = 0; row < rows; row += block_rows) {
    const RowBlock block(params, row, std::min(block_rows, rows - row));
    block.copy_rows(context);
    block.multiply(context);
  }
  return {};
}

}  // namespace diffulex::cpu
