// SPDX-License-Identifier: Apache-2.0

// dequantize_nibbles.

#include "ops/cpu_ops.h"
#include "ops/quant/codec.h"
#include "ops/shared/half.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

void dequantize_row(const DequantizeNibblesParams& params, int64_t row) {
  const auto* codes = params.weight.as<const uint8_t>() + row * params.weight.stride[0];
  auto* out = params.out.as<uint16_t>() + row * params.out.stride[0];
  for (int64_t k = 0; k < params.out.size[1]; ++k) {
    const int64_t group = k / params.group;
    const int64_t place = group * params.scales.stride[0] + row;
    const float scale = params.scales.dtype == DType::kF32
                            ? params.scales.as<const float>()[place]
                            : bf16_to_float(params.scales.as<const uint16_t>()[place]);
    const int32_t zero =
        params.zeros.present()
            ? params.zeros.as<const uint8_t>()[group * params.zeros.stride[0] + row]
            : kInt4Zero;
    const int32_t nibble = codes[k / 2] >> (k % 2 * 4) & 15;
    out[k] = float_to_bf16(static_cast<float>(nibble - zero) * scale);
  }
}

}  // namespace

Status dequantize_nibbles(const DequantizeNibblesParams& params, const ExecContext& context) {
  if (is_nibble_tiles(params.weight)) {
    return make_error(StatusCode::kUnsupported, "diffulex::dequantize_nibbles",
                      ": weight: expected row-major codes on the CPU, got tiles");
  }
  parallel_ranges(context, params.out.size[0], row_grain(params.out.size[1]),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) {
                      dequantize_row(params, row);
                    }
                  });
  return {};
}

}  // namespace diffulex::cpu
