// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/activation.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// Columns of a row, or depth of a product, that share one scale.
inline constexpr int64_t kQuantGroup = 128;
/// Rows and columns of one scale of a weight in blocks.
inline constexpr int64_t kQuantBlock = 128;
/// Columns per panel of the weights of the CPU, and depth per step of those of int8.
inline constexpr int64_t kQuantPanelColumns = 32;
inline constexpr int64_t kInt8PanelDepth = 4;
/// The stored nibble of a symmetric 4-bit weight whose value is 0.
inline constexpr int32_t kInt4Zero = 8;

/// How a weight is held in low precision.
enum class WeightScheme : int32_t { kFp8 = 0, kFp8Block = 1, kInt8 = 2, kInt4 = 3 };

/// Arguments of `diffulex::quantize_rows`. For a group G of a row and a = max |x| over G (NaN
/// ignored): code(x * (M / a)) and the scale a / M, where M is 448 or 127; codes 0 and scale 1
/// where a is 0 or M / a overflows; code(x) and scale 1 where a is infinite. Every operation is one
/// IEEE rounding. An e4m3 code is the nearest one, ties to even, saturated, NaN 0x7F; an int8 code
/// is clamp(rint(x), -127, 127), NaN 0.
struct QuantizeRowsParams {
  TensorRef x;      // [T, K] float, any row stride
  TensorRef out;    // [T, K] float8_e4m3fn or int8, any row stride
  TensorRef scale;  // [ceil(K / group), at least T] float32, any row stride; only T columns written
  int32_t group = static_cast<int32_t>(kQuantGroup);
};

[[nodiscard]] DIFFULEX_API Status quantize_rows(const QuantizeRowsParams& params,
                                                const ExecContext& context);

/// Arguments of `diffulex::quantize_weight`. 8-bit schemes: as quantize_rows with one scale a row
/// or block. kInt4: for each group, of the scales s = bf16(c max|w| / 7), c = 1, 0.95, 0.9, 0.85,
/// the first with the least sum of squares of w - q s, q = clamp(rint(w / s), -8, 7); stored as q
/// + 8.
struct QuantizeWeightParams {
  TensorRef w;      // [N, K] float
  TensorRef out;    // [N, K] float8_e4m3fn or int8; kInt4: [N, ceil(K / 2)] uint8, low nibble first
  TensorRef scale;  // kFp8, kInt8: [N] float32; kFp8Block: [ceil(N / 128), ceil(K / 128)] float32;
                    // kInt4: [K / group, N] bfloat16
  WeightScheme scheme = WeightScheme::kFp8;
  int32_t group = 0;  // kInt4: columns that share a scale, a divisor of K; 0: all of the row
};

[[nodiscard]] DIFFULEX_API Status quantize_weight(const QuantizeWeightParams& params,
                                                  const ExecContext& context);

/// Arguments of `diffulex::linear_scaled`. With blocks b of 128 of the depth and P_b the product of
/// the codes of a block: out = sum over ascending b of x_scale[b] * weight_scale * P_b, + bias, the
/// sums float32 by fused multiply-adds; with an activation act(gate) * up of those in float32,
/// where W holds the rows of gate, then those of up. Every P_b of int8 is exact, so that all
/// instruction sets, and the CPU and CUDA give the same bits without activation; so do both forms
/// of a weight, and for e4m3 all instruction sets. For e4m3 the products of a block are exact and
/// their sums float32; on compute capability 9.0, for bfloat16 results of aligned rows, those of
/// its tensor cores, and two halves of the blocks may be summed apart. With
/// ExecContext::weights_settled the weight is read before the launches in front have ended: none of
/// them may then write it.
struct LinearScaledParams {
  TensorRef x;        // [T, K] float8_e4m3fn or int8, any row stride
  TensorRef x_scale;  // [ceil(K / 128), at least T] float32, any row stride
  TensorRef weight;   // [N, K] of the type of x; on the CPU: or panels, uint8 [ceil(N / 32), K,
                      // 32, 1] of codes of e4m3, padded with 0, or [ceil(N / 32), ceil(K / 4), 32,
                      // 4] of int8 W + 128, padded with 128
  TensorRef weight_scale;  // [N] float32; e4m3 alone: or [ceil(N / 128), ceil(K / 128)]
  TensorRef bias;          // absent or [N] float32; absent with an activation
  TensorRef out;           // [T, N], or [T, N / 2] with an activation, float, any row stride,
                           // memory of its own
  std::optional<Activation> act;
};

[[nodiscard]] DIFFULEX_API Status linear_scaled(const LinearScaledParams& params,
                                                const ExecContext& context);

/// Extents of a tile of a weight of 4 bits: eight rows and 64 columns, 32 lanes of eight bytes.
/// Lane l has row l / 4. Its nibbles, the low one of the first byte first: of 32 columns, then of
/// the others, of each 16 those at 2 (l % 4) and eight behind, then those one after all these.
inline constexpr int64_t kNibbleTileRows = 8;
inline constexpr int64_t kNibbleTileDepth = 64;
inline constexpr int64_t kNibbleTileLanes = 32;
inline constexpr int64_t kNibbleLaneBytes = 8;

/// Arguments of `diffulex::linear_w4a16`: out = x W^T + bias with W = bf16((nibble - zero) *
/// scale), sums float32 over ascending depth, of tiles those of up to eight parts of it, the same
/// for all numbers of rows up to 128, and for more with ExecContext::batch_invariant; with an
/// activation act(gate) * up of those in float32, where W holds the rows of gate, then those of up.
/// A zero is 8 without `zeros`. With ExecContext::weights_settled tiles and scales are read before
/// the launches in front have ended: none of them may then write those.
struct LinearW4a16Params {
  TensorRef x;        // [T, K] float, any row stride
  TensorRef weight;   // [N, ceil(K / 2)] uint8, low nibble first; on the CPU: or the same bytes in
                      // panels [ceil(N / 32), ceil(K / 2), 32, 1]; on compute capability 9.0: or in
                      // tiles [N / 8, K / 64, 32, 8], N a multiple of 16, K of 128 and group a
                      // divisor of 128 from 32 on, x and out bfloat16
  TensorRef scales;   // [K / group, N] bfloat16 or float32
  TensorRef zeros;    // absent or [K / group, N] uint8; of tiles bfloat16, beside scales of float32
                      // and only there
  TensorRef bias;     // absent or [N] float32; absent with an activation
  TensorRef out;      // [T, N], or [T, N / 2] with an activation, float, any row stride, memory of
                      // its own
  int32_t group = 0;  // columns that share a scale, a divisor of K
  std::optional<Activation> act;  // on CUDA: of tiles alone
};

/// Whether a weight of 4 bits is in tiles.
[[nodiscard]] inline bool is_nibble_tiles(const TensorRef& weight) {
  return weight.rank == 4 && weight.size[3] == kNibbleLaneBytes;
}

[[nodiscard]] DIFFULEX_API Status linear_w4a16(const LinearW4a16Params& params,
                                               const ExecContext& context);

/// Arguments of `diffulex::dequantize_nibbles`: the W that linear_w4a16 multiplies, row by row.
struct DequantizeNibblesParams {
  TensorRef weight;  // [N, ceil(K / 2)] uint8, low nibble first; on CUDA: or tiles
  TensorRef scales;  // as in LinearW4a16Params
  TensorRef zeros;   // as in LinearW4a16Params
  TensorRef out;     // [N, K] bfloat16, any row stride
  int32_t group = 0;
};

[[nodiscard]] DIFFULEX_API Status dequantize_nibbles(const DequantizeNibblesParams& params,
                                                     const ExecContext& context);

}  // namespace diffulex
