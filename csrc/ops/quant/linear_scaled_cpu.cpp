// SPDX-License-Identifier: Apache-2.0

// linear_scaled: int8 panels by integer tiles; row-major codes widened to float32, block by block,
// for the tiles of linear_packed, whose sums of int8 products are exact.

#include <cmath>
#include <cstring>
#include <vector>

#include "ops/cpu_ops.h"
#include "ops/quant/codec.h"
#include "ops/quant/isa/int8_kernels.h"
#include "ops/quant/product_cpu.h"

namespace diffulex::cpu {
namespace {

struct CopyOfX;
struct SumsOfRows;
struct PanelSums;
struct PanelScales;
struct WidePanel;
struct BlockSums;

static_assert(kInt8PanelWidth == kInt8PanelColumns && kInt8PanelColumns == kLinearPanelColumns);

int64_t blocks_of(int64_t depth) {
  return (depth + kQuantGroup - 1) / kQuantGroup;
}

/// Column scales of a panel, then its bias, 32 each and padded with 0.
const float* panel_scales(const LinearScaledParams& params, int64_t panel) {
  float* scales = thread_floats<PanelScales>(2 * kLinearPanelColumns);
  const int64_t first = panel * kLinearPanelColumns;
  const int64_t columns = std::min(kLinearPanelColumns, params.out.size[1] - first);
  std::memset(scales, 0, 2 * kLinearPanelColumns * sizeof(float));
  const auto bytes = static_cast<size_t>(columns) * sizeof(float);
  if (params.weight_scale.rank == 1) {
    std::memcpy(scales, params.weight_scale.as<const float>() + first, bytes);
  }
  if (params.bias.present()) {
    std::memcpy(scales + kLinearPanelColumns, params.bias.as<const float>() + first, bytes);
  }
  return scales;
}

/// A block of rows times int8 panels.
class Int8Rows final {
 public:
  Int8Rows(const LinearScaledParams& params, const Int8Kernels& kernels, int64_t first_row,
           int64_t rows)
      : params_(params),
        kernels_(kernels),
        first_row_(first_row),
        rows_(rows),
        depth_(params.x.size[1]),
        stride_((depth_ + kInt8PanelDepth - 1) / kInt8PanelDepth * kInt8PanelDepth) {
    // Codes of one or two bytes, in whole floats: a stride is a multiple of four of them.
    x_ = reinterpret_cast<char*>(thread_floats<CopyOfX>(rows * stride_ * kernels.x_bytes / 4));
    sums_ = reinterpret_cast<int32_t*>(thread_floats<SumsOfRows>(rows * blocks_of(depth_)));
    tile_rows_ = (rows - 1) / ((rows - 1) / kernels.tile_rows + 1) + 1;
    for (int64_t row = 0; row < rows; ++row) {
      copy_row(row);
    }
  }

  void multiply_panel(int64_t panel) const {
    const bool is_direct = params_.out.dtype == DType::kF32 &&
                           (panel + 1) * kLinearPanelColumns <= params_.out.size[1];
    float* sums = is_direct ? params_.out.as<float>() + first_row_ * params_.out.stride[0] +
                                  panel * kLinearPanelColumns
                            : thread_floats<PanelSums>(rows_ * kLinearPanelColumns);
    const float* scales = panel_scales(params_, panel);
    const int64_t num_blocks = blocks_of(depth_);
    Int8TileArgs args;
    args.x_stride = stride_;
    args.out_stride = is_direct ? params_.out.stride[0] : kLinearPanelColumns;
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t start = block * kQuantGroup;
      args.panel =
          params_.weight.as<const uint8_t>() + (panel * stride_ + start) * kLinearPanelColumns;
      args.steps = static_cast<int32_t>(std::min(kQuantGroup, stride_ - start) / kInt8PanelDepth);
      args.accumulate = block > 0;
      args.column_scale = block + 1 == num_blocks ? scales : nullptr;
      args.bias = scales + kLinearPanelColumns;
      for (int64_t row = 0; row < rows_; row += tile_rows_) {
        args.rows = static_cast<int32_t>(std::min(tile_rows_, rows_ - row));
        args.x = x_ + (row * stride_ + start) * kernels_.x_bytes;
        args.row_sums = sums_ + block * rows_ + row;
        args.x_scale = params_.x_scale.as<const float>() + block * params_.x_scale.stride[0] +
                       first_row_ + row;
        args.out = sums + row * args.out_stride;
        kernels_.tile(args);
      }
    }
    if (!is_direct) {
      store_panel(sums, params_.out, first_row_, rows_, panel);
    }
  }

 private:
  void copy_row(int64_t row) const {
    const int8_t* source = params_.x.as<const int8_t>() + (first_row_ + row) * params_.x.stride[0];
    for (int64_t start = 0, block = 0; start < depth_; start += kQuantGroup, ++block) {
      int32_t sum = 0;
      for (int64_t k = start; k < std::min(depth_, start + kQuantGroup); ++k) {
        sum += source[k];
      }
      sums_[block * rows_ + row] = sum;
    }
    char* copy = x_ + row * stride_ * kernels_.x_bytes;
    std::memset(copy + depth_ * kernels_.x_bytes, 0,
                static_cast<size_t>((stride_ - depth_) * kernels_.x_bytes));
    if (kernels_.x_bytes == 1) {
      std::memcpy(copy, source, static_cast<size_t>(depth_));
      return;
    }
    auto* wide = reinterpret_cast<int16_t*>(copy);
    for (int64_t k = 0; k < depth_; ++k) {
      wide[k] = source[k];
    }
  }

  const LinearScaledParams& params_;
  const Int8Kernels& kernels_;
  int64_t first_row_;
  int64_t rows_;
  int64_t depth_;
  int64_t stride_;  // of a copied row, in elements
  int64_t tile_rows_ = 1;
  char* x_ = nullptr;
  int32_t* sums_ = nullptr;
};

/// A block of rows times row-major codes.
class CodeRows final {
 public:
  CodeRows(const LinearScaledParams& params, int64_t first_row, int64_t rows)
      : params_(params),
        first_row_(first_row),
        rows_(rows),
        depth_(params.x.size[1]),
        x_(thread_floats<CopyOfX>(rows * blocks_of(depth_) * kLinearRowStride)),
        kernels_(kernel_table()) {
    for (int64_t block = 0; block < blocks_of(depth_); ++block) {
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t offset = (first_row + row) * params.x.stride[0] + block * kQuantGroup;
        for (int64_t k = 0; k < block_depth(block); ++k) {
          x_at(block, row)[k] = value_of(params.x, offset + k);
        }
      }
    }
  }

  void multiply_panel(int64_t panel) const {
    const int64_t first = panel * kLinearPanelColumns;
    const int64_t columns = std::min(kLinearPanelColumns, params_.out.size[1] - first);
    const float* scales = panel_scales(params_, panel);
    const bool has_blocks = params_.weight_scale.rank == 2;
    float* sums = thread_floats<PanelSums>(rows_ * kLinearPanelColumns);
    std::memset(sums, 0, static_cast<size_t>(rows_ * kLinearPanelColumns) * sizeof(float));
    for (int64_t block = 0; block < blocks_of(depth_); ++block) {
      const float* products = multiply_block(panel, block, columns);
      const float* x_scale =
          params_.x_scale.as<const float>() + block * params_.x_scale.stride[0] + first_row_;
      for (int64_t row = 0; row < rows_; ++row) {
        for (int64_t c = 0; c < columns; ++c) {
          const float factor =
              has_blocks ? x_scale[row] * block_scale(first + c, block) : x_scale[row];
          float& sum = sums[row * kLinearPanelColumns + c];
          sum = std::fma(factor, products[row * kLinearPanelColumns + c], sum);
        }
      }
    }
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t c = 0; c < columns; ++c) {
        float& sum = sums[row * kLinearPanelColumns + c];
        sum = std::fma(sum, has_blocks ? 1.0F : scales[c], scales[kLinearPanelColumns + c]);
      }
    }
    store_panel(sums, params_.out, first_row_, rows_, panel);
  }

 private:
  static float value_of(const TensorRef& codes, int64_t offset) {
    return codes.dtype == DType::kI8 ? static_cast<float>(codes.as<const int8_t>()[offset])
                                     : e4m3_to_float(codes.as<const uint8_t>()[offset]);
  }
  [[nodiscard]] int64_t block_depth(int64_t block) const {
    return std::min(kQuantGroup, depth_ - block * kQuantGroup);
  }
  [[nodiscard]] float* x_at(int64_t block, int64_t row) const {
    return x_ + (block * rows_ + row) * kLinearRowStride;
  }
  [[nodiscard]] float block_scale(int64_t column, int64_t block) const {
    const int64_t row = column / kQuantBlock * params_.weight_scale.stride[0];
    return params_.weight_scale.as<const float>()[row + block];
  }

  /// The products of the codes of one block, [rows, 32].
  const float* multiply_block(int64_t panel, int64_t block, int64_t columns) const {
    const int64_t depth = block_depth(block);
    float* wide = thread_floats<WidePanel>(kQuantGroup * kLinearPanelColumns);
    std::memset(wide, 0, static_cast<size_t>(depth * kLinearPanelColumns) * sizeof(float));
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t offset =
          (panel * kLinearPanelColumns + c) * params_.weight.stride[0] + block * kQuantGroup;
      for (int64_t k = 0; k < depth; ++k) {
        wide[k * kLinearPanelColumns + c] = value_of(params_.weight, offset + k);
      }
    }
    float* products = thread_floats<BlockSums>(rows_ * kLinearPanelColumns);
    LinearTileArgs args;
    args.depth = static_cast<int32_t>(depth);
    args.panel = wide;
    args.out_stride = kLinearPanelColumns;
    for (int64_t row = 0; row < rows_; row += kernels_.linear_tile_rows) {
      args.rows = static_cast<int32_t>(std::min<int64_t>(kernels_.linear_tile_rows, rows_ - row));
      args.x = x_at(block, row);
      args.out = products + row * kLinearPanelColumns;
      kernels_.linear_tile(args);
    }
    return products;
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
    if (params.weight.dtype == DType::kU8) {
      run(Int8Rows(params, int8_kernels(), first_row, num_rows));
    } else {
      run(CodeRows(params, first_row, num_rows));
    }
  });
}

}  // namespace

Status linear_scaled(const LinearScaledParams& params, const ExecContext& context) {
  if (!params.act.has_value()) {
    multiply(params, context);
    return {};
  }
  const int64_t num_rows = params.x.size[0];
  const int64_t width = params.out.size[1];
  std::vector<float> gate_up(static_cast<size_t>(num_rows * 2 * width));
  LinearScaledParams whole = params;
  whole.out.data = gate_up.data();
  whole.out.dtype = DType::kF32;
  whole.out.size[1] = 2 * width;
  whole.out.stride[0] = 2 * width;
  multiply(whole, context);
  parallel_ranges(context, num_rows, row_grain(width), [&](int64_t begin, int64_t end) {
    float* gate = gate_up.data() + begin * 2 * width;
    for (int64_t row = begin; row < end; ++row, gate += 2 * width) {
      // In place: a result takes the place of its gate.
      kernel_table().act_row(ActRowArgs{gate, gate + width, gate, width, DType::kF32, *params.act});
      kernel_table().store(gate, params.out.dtype,
                           element_at(params.out, row * params.out.stride[0]), width);
    }
  });
  return {};
}

}  // namespace diffulex::cpu
