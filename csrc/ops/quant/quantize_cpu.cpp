// SPDX-License-Identifier: Apache-2.0

// quantize_rows and quantize_weight.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/cpu_ops.h"
#include "ops/quant/codec.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

struct SourceRow;
struct SourceBlock;

float max_code(DType dtype) {
  return dtype == DType::kI8 ? kInt8Max : kE4m3Max;
}

void write_codes(const CodeArgs& args, char* out) {
  if (args.factor == 0.0F) {
    std::memset(out, 0, static_cast<size_t>(args.count));
  } else {
    kernel_table().to_codes(args, reinterpret_cast<uint8_t*>(out));
  }
}

void load_row(const TensorRef& matrix, int64_t row, float* values) {
  const int64_t depth = matrix.size[1];
  kernel_table().load(
      GatherArgs{element_at(matrix, row * matrix.stride[0]), matrix.dtype, depth, depth, depth},
      values);
}

/// Where the values of a row are, as float32.
const float* row_floats(const TensorRef& matrix, int64_t row) {
  if (matrix.dtype == DType::kF32) {
    return matrix.as<const float>() + row * matrix.stride[0];
  }
  float* values = thread_floats<SourceRow>(matrix.size[1]);
  load_row(matrix, row, values);
  return values;
}

/// One scale a row.
void quantize_channels(const QuantizeWeightParams& params, int64_t row) {
  const int64_t depth = params.w.size[1];
  const float* values = row_floats(params.w, row);
  const CodeScale code =
      code_scale(kernel_table().largest_of(values, depth), max_code(params.out.dtype));
  params.scale.as<float>()[row * params.scale.stride[0]] = code.scale;
  write_codes(CodeArgs{values, depth, code.factor, params.out.dtype},
              element_at(params.out, row * params.out.stride[0]));
}

/// One row of blocks.
void quantize_blocks(const QuantizeWeightParams& params, int64_t block_row) {
  const int64_t depth = params.w.size[1];
  const int64_t first = block_row * kQuantBlock;
  const int64_t rows = std::min(kQuantBlock, params.w.size[0] - first);
  float* values = thread_floats<SourceBlock>(rows * depth);
  for (int64_t row = 0; row < rows; ++row) {
    load_row(params.w, first + row, values + row * depth);
  }
  for (int64_t column = 0, block = 0; column < depth; column += kQuantBlock, ++block) {
    const int64_t count = std::min(kQuantBlock, depth - column);
    float largest = 0.0F;
    for (int64_t row = 0; row < rows; ++row) {
      largest = std::max(largest, kernel_table().largest_of(values + row * depth + column, count));
    }
    const CodeScale code = code_scale(largest, kE4m3Max);
    params.scale.as<float>()[block_row * params.scale.stride[0] + block] = code.scale;
    for (int64_t row = 0; row < rows; ++row) {
      write_codes(CodeArgs{values + row * depth + column, count, code.factor, DType::kF8E4M3},
                  element_at(params.out, (first + row) * params.out.stride[0] + column));
    }
  }
}

/// clamp(rint(value), -8, 7); NaN 0.
int32_t nibble_of(float value) {
  if (!(value == value)) {
    return 0;
  }
  return static_cast<int32_t>(std::nearbyint(std::min(std::max(value, -8.0F), 7.0F)));
}

float squared_error(const float* values, int64_t count, float scale) {
  float sum = 0.0F;
  for (int64_t i = 0; i < count; ++i) {
    const float error = values[i] - static_cast<float>(nibble_of(values[i] / scale)) * scale;
    const float square = error * error;
    sum += square;
  }
  return sum;
}

/// The scale of a group as bfloat16 bits; 0 where all nibbles are those of 0.
uint16_t int4_scale(const float* values, int64_t count) {
  constexpr float kFactors[] = {1.0F, 0.95F, 0.9F, 0.85F};
  const float largest = kernel_table().largest_of(values, count);
  if (!std::isfinite(largest)) {
    return float_to_bf16(1.0F);
  }
  uint16_t best = 0;
  float least = 0.0F;
  for (const float factor : kFactors) {
    const uint16_t bits = float_to_bf16(factor * largest / 7.0F);
    if (bf16_to_float(bits) == 0.0F) {
      return 0;
    }
    const float error = squared_error(values, count, bf16_to_float(bits));
    if (best == 0 || error < least) {
      best = bits;
      least = error;
    }
  }
  return best;
}

void quantize_nibbles(const QuantizeWeightParams& params, int64_t row) {
  const int64_t depth = params.w.size[1];
  const int64_t group = params.group == 0 ? depth : params.group;
  const float* values = row_floats(params.w, row);
  auto* out = params.out.as<uint8_t>() + row * params.out.stride[0];
  std::memset(out, kInt4Zero * 0x11, static_cast<size_t>(params.out.size[1]));
  for (int64_t start = 0, index = 0; start < depth; start += group, ++index) {
    const uint16_t bits = int4_scale(values + start, group);
    const float scale = bf16_to_float(bits);
    params.scale.as<uint16_t>()[index * params.scale.stride[0] + row] =
        bits == 0 ? float_to_bf16(1.0F) : bits;
    for (int64_t k = start; bits != 0 && k < start + group; ++k) {
      const auto nibble = static_cast<uint32_t>(nibble_of(values[k] / scale) + kInt4Zero);
      const uint32_t shift = k % 2 == 0 ? 0U : 4U;
      out[k / 2] = static_cast<uint8_t>((out[k / 2] & (0xF0U >> shift)) | (nibble << shift));
    }
  }
}

}  // namespace

Status quantize_rows(const QuantizeRowsParams& params, const ExecContext& context) {
  const int64_t depth = params.x.size[1];
  const float limit = max_code(params.out.dtype);
  parallel_ranges(context, params.x.size[0], row_grain(depth), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* values = row_floats(params.x, row);
      char* out = element_at(params.out, row * params.out.stride[0]);
      for (int64_t start = 0, index = 0; start < depth; start += params.group, ++index) {
        const int64_t count = std::min<int64_t>(params.group, depth - start);
        const CodeScale code = code_scale(kernel_table().largest_of(values + start, count), limit);
        params.scale.as<float>()[index * params.scale.stride[0] + row] = code.scale;
        write_codes(CodeArgs{values + start, count, code.factor, params.out.dtype}, out + start);
      }
    }
  });
  return {};
}

Status quantize_weight(const QuantizeWeightParams& params, const ExecContext& context) {
  const bool is_block = params.scheme == WeightScheme::kFp8Block;
  const int64_t rows = params.w.size[0];
  const int64_t items = is_block ? (rows + kQuantBlock - 1) / kQuantBlock : rows;
  const int64_t item_elements = params.w.size[1] * (is_block ? kQuantBlock : 1);
  parallel_ranges(context, items, row_grain(item_elements), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      if (is_block) {
        quantize_blocks(params, item);
      } else if (params.scheme == WeightScheme::kInt4) {
        quantize_nibbles(params, item);
      } else {
        quantize_channels(params, item);
      }
    }
  });
  return {};
}

}  // namespace diffulex::cpu
