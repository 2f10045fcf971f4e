// SPDX-License-Identifier: Apache-2.0

// linear_scaled: int8 by integer tiles; e4m3 widened to float32, block by block, for the tiles of
// linear_packed. Rows of codes are put together to panels as they are needed.

#include <cstring>

#include "ops/cpu_ops.h"
#include "ops/quant/isa/int8_kernels.h"
#include "ops/quant/product_cpu.h"

namespace diffulex::cpu {
namespace {

struct CopyOfX;
struct StartsOfRows;
struct PanelSums;
struct PanelScales;
struct WidePanel;
struct BlockSums;

static_assert(kInt8PanelWidth == kQuantPanelColumns && kQuantPanelColumns == kLinearPanelColumns);
static_assert(kInt8RowStride == kQuantGroup);

int64_t blocks_of(int64_t depth) {
  return (depth + kQuantGroup - 1) / kQuantGroup;
}

/// Column scales of a panel, 1 where blocks have them, then its bias, 32 each and padded with 0.
const float* panel_scales(const LinearScaledParams& params, int64_t panel) {
  float* scales = thread_floats<PanelScales>(2 * kLinearPanelColumns);
  const int64_t first = panel * kLinearPanelColumns;
  const int64_t columns = std::min(kLinearPanelColumns, params.out.size[1] - first);
  std::fill_n(scales, kLinearPanelColumns, params.weight_scale.rank == 1 ? 0.0F : 1.0F);
  std::fill_n(scales + kLinearPanelColumns, kLinearPanelColumns, 0.0F);
  const auto bytes = static_cast<size_t>(columns) * sizeof(float);
  if (params.weight_scale.rank == 1) {
    std::memcpy(scales, params.weight_scale.as<const float>() + first, bytes);
  }
  if (params.bias.present()) {
    std::memcpy(scales + kLinearPanelColumns, params.bias.as<const float>() + first, bytes);
  }
  return scales;
}

/// A block of rows times int8. The copy of x has the rows of a block of the depth one after the
/// other, and the sums of a panel theirs: rows that are a power of two apart would share a few
/// lines of the cache.
class Int8Rows final {
 public:
  Int8Rows(const LinearScaledParams& params, const ExecContext& context, const Int8Kernels& kernels,
           int64_t first_row, int64_t rows)
      : params_(params),
        kernels_(kernels),
        first_row_(first_row),
        rows_(rows),
        depth_(params.x.size[1]) {
    const int64_t num_blocks = blocks_of(depth_);
    // Codes of one or two bytes, in whole floats: a block has a multiple of four of them.
    x_ = reinterpret_cast<char*>(
        thread_floats<CopyOfX>(num_blocks * rows * kQuantGroup * kernels.x_bytes / 4));
    starts_ = reinterpret_cast<int32_t*>(thread_floats<StartsOfRows>(num_blocks * rows));
    parallel_ranges(context, rows, row_grain(depth_), [&](int64_t begin, int64_t end) {
      for (int64_t block = 0; block < num_blocks; ++block) {
        for (int64_t row = begin; row < end; ++row) {
          copy_row(block, row);
        }
      }
    });
  }

  void multiply_panel(int64_t panel) const {
    const TensorRef& out = params_.out;
    const int64_t column = panel * kLinearPanelColumns;
    const bool is_direct = out.dtype == DType::kF32 && column + kLinearPanelColumns <= out.size[1];
    float* sums = thread_floats<PanelSums>(rows_ * kLinearPanelColumns);
    float* result = is_direct ? out.as<float>() + first_row_ * out.stride[0] + column : sums;
    const float* scales = panel_scales(params_, panel);
    const int64_t num_blocks = blocks_of(depth_);
    Int8TileArgs args;
    args.bias = scales + kLinearPanelColumns;
    args.result_stride = is_direct ? out.stride[0] : kLinearPanelColumns;
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t start = block * kQuantGroup;
      const int64_t steps = (block_depth(block) + kInt8PanelDepth - 1) / kInt8PanelDepth;
      args.panel = panel_bytes<kInt8PanelDepth>(params_.weight, depth_, panel, start,
                                                steps * kInt8PanelDepth);
      args.steps = static_cast<int32_t>(steps);
      args.accumulate = block > 0;
      args.column_scale = block + 1 == num_blocks ? scales : nullptr;
      for_row_tiles(rows_, kernels_.tile_rows, [&](int64_t row, int64_t rows) {
        args.rows = static_cast<int32_t>(rows);
        args.x = x_at(block, row);
        args.row_starts = starts_ + block * rows_ + row;
        args.x_scale = params_.x_scale.as<const float>() + block * params_.x_scale.stride[0] +
                       first_row_ + row;
        args.out = sums + row * kLinearPanelColumns;
        args.result = result + row * args.result_stride;
        kernels_.tile(args);
      });
    }
    if (!is_direct) {
      store_panel(sums, out, first_row_, rows_, panel);
    }
  }

 private:
  [[nodiscard]] int64_t block_depth(int64_t block) const {
    return std::min(kQuantGroup, depth_ - block * kQuantGroup);
  }
  [[nodiscard]] char* x_at(int64_t block, int64_t row) const {
    return x_ + (block * rows_ + row) * kQuantGroup * kernels_.x_bytes;
  }

  void copy_row(int64_t block, int64_t row) const {
    const int8_t* source = params_.x.as<const int8_t>() + (first_row_ + row) * params_.x.stride[0] +
                           block * kQuantGroup;
    const int64_t depth = block_depth(block);
    int32_t sum = 0;
    for (int64_t k = 0; k < depth; ++k) {
      sum += source[k];
    }
    starts_[block * rows_ + row] = -128 * sum;
    char* copy = x_at(block, row);
    std::memset(copy + depth * kernels_.x_bytes, 0,
                static_cast<size_t>((kQuantGroup - depth) * kernels_.x_bytes));
    if (kernels_.x_bytes == 1) {
      std::memcpy(copy, source, static_cast<size_t>(depth));
      return;
    }
    auto* wide = reinterpret_cast<int16_t*>(copy);
    for (int64_t k = 0; k < depth; ++k) {
      wide[k] = source[k];
    }
  }

  const LinearScaledParams& params_;
  const Int8Kernels& kernels_;
  int64_t first_row_;
  int64_t rows_;
  int64_t depth_;
  char* x_ = nullptr;
  int32_t* starts_ = nullptr;
};

/// A block of rows times codes of e4m3, which are widened to float32.
class FloatRows final {
 public:
  FloatRows(const LinearScaledParams& params, int64_t first_row, int64_t rows)
      : params_(params),
        first_row_(first_row),
        rows_(rows),
        depth_(params.x.size[1]),
        x_(thread_floats<CopyOfX>(rows * blocks_of(depth_) * kLinearRowStride)),
        kernels_(kernel_table()) {
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* codes = params.x.as<const uint8_t>() + (first_row + row) * params.x.stride[0];
      for (int64_t block = 0; block < blocks_of(depth_); ++block) {
        kernels_.widen_e4m3(codes + block * kQuantGroup, x_at(block, row), block_depth(block));
      }
    }
  }

  void multiply_panel(int64_t panel) const {
    float* sums = thread_floats<PanelSums>(rows_ * kLinearPanelColumns);
    float* products = thread_floats<BlockSums>(kernels_.linear_tile_rows * kLinearPanelColumns);
    float* wide = thread_floats<WidePanel>(kQuantGroup * kLinearPanelColumns);
    const float* scales = panel_scales(params_, panel);
    const int64_t num_blocks = blocks_of(depth_);
    for (int64_t block = 0; block < num_blocks; ++block) {
      LinearTileArgs tile;
      tile.depth = static_cast<int32_t>(block_depth(block));
      tile.panel = wide;
      tile.out = products;
      tile.out_stride = kLinearPanelColumns;
      PromoteArgs sum;
      sum.products = products;
      sum.column_scale = block + 1 == num_blocks ? scales : nullptr;
      sum.bias = scales + kLinearPanelColumns;
      sum.factor = block_scale(panel, block);
      sum.accumulate = block > 0;
      kernels_.widen_e4m3(
          panel_bytes<1>(params_.weight, depth_, panel, block * kQuantGroup, tile.depth), wide,
          tile.depth * kLinearPanelColumns);
      for_row_tiles(rows_, kernels_.linear_tile_rows, [&](int64_t row, int64_t rows) {
        tile.rows = sum.rows = static_cast<int32_t>(rows);
        tile.x = x_at(block, row);
        kernels_.linear_tile(tile);
        sum.row_scale = params_.x_scale.as<const float>() + block * params_.x_scale.stride[0] +
                        first_row_ + row;
        sum.sums = sums + row * kLinearPanelColumns;
        kernels_.promote(sum);
      });
    }
    store_panel(sums, params_.out, first_row_, rows_, panel);
  }

 private:
  [[nodiscard]] int64_t block_depth(int64_t block) const {
    return std::min(kQuantGroup, depth_ - block * kQuantGroup);
  }
  [[nodiscard]] float* x_at(int64_t block, int64_t row) const {
    return x_ + (block * rows_ + row) * kLinearRowStride;
  }
  /// Of all columns of a panel, as panels do not cross blocks.
  [[nodiscard]] float block_scale(int64_t panel, int64_t block) const {
    const TensorRef& scale = params_.weight_scale;
    const int64_t row = panel * kLinearPanelColumns / kQuantBlock;
    return scale.rank == 1 ? 1.0F : scale.as<const float>()[row * scale.stride[0] + block];
  }

  const LinearScaledParams& params_;
  int64_t first_row_;
  int64_t rows_;
  int64_t depth_;
  float* x_;
  const KernelTable& kernels_;
};

void multiply(const LinearScaledParams& params, const ExecContext& context) {
  for_row_blocks(params.x.size[0], [&](int64_t first_row, int64_t num_rows) {
    const auto run = [&](const auto& rows) {
      for_panels(context, params.out.size[1], num_rows, params.x.size[1],
                 [&rows](int64_t panel) { rows.multiply_panel(panel); });
    };
    if (params.x.dtype == DType::kI8) {
      run(Int8Rows(params, context, int8_kernels(), first_row, num_rows));
    } else {
      run(FloatRows(params, first_row, num_rows));
    }
  });
}

}  // namespace

Status linear_scaled(const LinearScaledParams& params, const ExecContext& context) {
  if (!params.act.has_value()) {
    multiply(params, context);
    return {};
  }
  multiply_gated(params, *params.act, context,
                 [&context](const LinearScaledParams& whole) { multiply(whole, context); });
  return {};
}

}  // namespace diffulex::cpu
