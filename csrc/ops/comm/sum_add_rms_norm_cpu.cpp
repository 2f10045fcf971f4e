// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "ops/cpu_ops.h"
#include "ops/shared/half.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

struct SumTag;

/// Two halves of -0: no part of a sum over ranks contains it.
constexpr uint32_t kUnwritten = 0x80008000U;

float as_sent(float value) {
  const uint32_t bits = float_bits(value);
  return bits_float(bits == kUnwritten ? bits + 1 : bits);
}

/// Element `index` of a part, as other ranks would get it.
float part_value(const TensorRef& parts, int64_t index) {
  if (parts.dtype == DType::kF32) {
    return as_sent(parts.as<const float>()[index]);
  }
  const uint16_t bits = parts.as<const uint16_t>()[index];
  const uint16_t sent = bits == (kUnwritten & 0xFFFFU) ? uint16_t{0} : bits;
  return parts.dtype == DType::kBF16 ? bf16_to_float(sent) : f16_to_float(sent);
}

float value_at(const TensorRef& tensor, int64_t index) {
  switch (tensor.dtype) {
    case DType::kBF16:
      return bf16_to_float(tensor.as<const uint16_t>()[index]);
    case DType::kF16:
      return f16_to_float(tensor.as<const uint16_t>()[index]);
    default:
      return tensor.as<const float>()[index];
  }
}

void round_to(const TensorRef& tensor, int64_t index, float value) {
  switch (tensor.dtype) {
    case DType::kBF16:
      tensor.as<uint16_t>()[index] = float_to_bf16(value);
      return;
    case DType::kF16:
      tensor.as<uint16_t>()[index] = float_to_f16(value);
      return;
    default:
      tensor.as<float>()[index] = value;
  }
}

void sum_row(const SumAddRmsNormParams& params, int64_t row, float* sums) {
  const int64_t num_ranks = params.parts.size[0];
  const int64_t num_rows = params.parts.size[1];
  const int64_t width = params.parts.size[2];
  double squares = 0.0;
  for (int64_t column = 0; column < width; ++column) {
    float sum = part_value(params.parts, row * width + column);
    for (int64_t rank = 1; rank < num_ranks; ++rank) {
      sum += part_value(params.parts, (rank * num_rows + row) * width + column);
    }
    sums[column] = as_sent(sum) + value_at(params.residual, row * width + column);
    squares += static_cast<double>(sums[column]) * static_cast<double>(sums[column]);
  }
  const float mean = static_cast<float>(squares / static_cast<double>(width));
  const float scale = 1.0F / std::sqrt(mean + params.eps);
  for (int64_t column = 0; column < width; ++column) {
    round_to(params.residual, row * width + column, sums[column]);
    const float weight =
        params.weight.present() ? value_at(params.weight, column) + params.weight_offset : 1.0F;
    round_to(params.out, row * width + column, sums[column] * scale * weight);
  }
}

}  // namespace

Status sum_add_rms_norm(const SumAddRmsNormParams& params, const ExecContext& context) {
  const int64_t width = params.parts.size[2];
  parallel_ranges(context, params.parts.size[1], row_grain(width), [&](int64_t begin, int64_t end) {
    float* sums = thread_floats<SumTag>(width);
    for (int64_t row = begin; row < end; ++row) {
      sum_row(params, row, sums);
    }
  });
  return {};
}

}  // namespace diffulex::cpu
