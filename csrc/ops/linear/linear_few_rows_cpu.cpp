// SPDX-License-Identifier: Apache-2.0

// linear_few_rows: the twin of a CUDA kernel, for tests. Sums are float32 over ascending k.

#include <cmath>
#include <cstdint>

#include "ops/cpu_ops.h"
#include "ops/shared/half.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

float load(const TensorRef& tensor, int64_t row, int64_t column) {
  const uint16_t bits = tensor.as<const uint16_t>()[row * tensor.stride[0] + column];
  return tensor.dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

float activate(Activation act, float gate) {
  switch (act) {
    case Activation::kGeluTanh:
      return 0.5F * gate *
             (1.0F + std::tanh(0.7978845608028654F * (gate + 0.044715F * gate * gate * gate)));
    case Activation::kGeluErf:
      return 0.5F * gate * (1.0F + std::erf(gate * 0.7071067811865476F));
    default:
      return gate / (1.0F + std::exp(-gate));
  }
}

float load_at(const TensorRef& vector, int64_t index) {
  const uint16_t bits = vector.as<const uint16_t>()[index];
  return vector.dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

float dot(const LinearFewRowsParams& params, int64_t row, int64_t column) {
  const int64_t depth = params.x.size[1];
  float sum = 0.0F;
  for (int64_t k = 0; k < depth; ++k) {
    sum += load(params.x, row, k) * load(params.weight, column, k);
  }
  return sum;
}

void store(const TensorRef& tensor, int64_t row, int64_t column, float value) {
  tensor.as<uint16_t>()[row * tensor.stride[0] + column] =
      tensor.dtype == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
}

}  // namespace

Status linear_few_rows(const LinearFewRowsParams& params, const ExecContext& context) {
  const int64_t num_rows = params.x.size[0];
  const int64_t num_columns = params.out.size[1];
  parallel_ranges(context, num_columns, kFewRowsColumns, [&](int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; ++column) {
      for (int64_t row = 0; row < num_rows; ++row) {
        float value = dot(params, row, column);
        if (params.act.has_value()) {
          value = activate(*params.act, value) * dot(params, row, num_columns + column);
        } else if (params.bias.data != nullptr) {
          value += load_at(params.bias, column);
        }
        store(params.out, row, column, value);
      }
    }
  });
  return {};
}

}  // namespace diffulex::cpu
