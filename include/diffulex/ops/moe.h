// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/activation.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

// Symbols: T tokens, K chosen experts per token, H hidden size, I expert width, E experts of the
// model, L experts held here. Slot s = t K + k is one routed pair. A slot whose id is negative, or
// whose expert is mapped to a negative local id, contributes nothing and costs nothing; on CUDA an
// id outside the model or the map outside L is treated the same, on the CPU it is an error.

/// Largest number of local experts.
inline constexpr int32_t kMoeMaxLocalExperts = 4096;

/// Entries of the tile list of moe_permute: ceil(slots / tile) + min(L, slots).
[[nodiscard]] DIFFULEX_API int64_t moe_max_tiles(int64_t num_slots, int32_t num_local_experts,
                                                 int32_t tile);

/// Arguments of `diffulex::moe_permute`: slots grouped by local expert, in ascending slot order
/// inside an expert, and the work tiles of at most `tile` slots of one expert. With T = 0 the
/// offsets and counters are still written.
struct MoePermuteParams {
  TensorRef topk_ids;        // [T, K] int32, any row stride
  TensorRef expert_map;      // [E] int32, global id -> local id or -1; absent = identity, E = L
  TensorRef sorted_slots;    // [T K] int32; -1 from expert_offsets[L] on
  TensorRef expert_offsets;  // [L + 1] int32, prefix sums of the slot counts
  TensorRef tile_expert;     // [moe_max_tiles or more] int32; -1 past the last tile
  TensorRef tile_start;      // as tile_expert: first sorted position of the tile; -1 past the last
  TensorRef counters;        // [2 or more] int32: number of tiles, number of active slots
  int32_t num_local_experts = 0;
  int32_t tile = 0;
};

/// Sizes of one fused_moe call that decide its scratch.
struct MoeShape {
  int64_t num_tokens = 0;
  int32_t top_k = 0;
  int32_t num_local_experts = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  DType dtype = DType::kBF16;  // of x
  bool is_scaled = false;      // the experts are codes of 8 bits with scales
};

/// Scratch of fused_moe in bytes; 0 on the CPU.
[[nodiscard]] DIFFULEX_API size_t fused_moe_workspace_bytes(const MoeShape& shape, Device device);

/// Arguments of `diffulex::fused_moe`:
/// out[t] = addend[t] + sum over k of weight[t, k] w2[e] act_mul(w13[e] x[t]).
///
/// Products accumulate in float32, gate and up stay float32 through the activation, the activated
/// product is rounded to the dtype of x, slot outputs are kept unweighted in the dtype of x, and
/// the weighted sum runs in float32 in ascending k, then the addend, with one rounding at the end.
/// With weight_on_input (K must be 1) the weight multiplies x instead, applied to the float32 gate
/// and up sums.
///
/// With scales x is quantised as quantize_rows does, once a row, products are those of
/// linear_scaled, and the activated product is quantised from float32, a scale per slot and 128
/// columns. Of nibbles rows stay as they are: a weight is (nibble - 8) scale rounded to bfloat16.
struct FusedMoeParams {
  TensorRef x;             // [T, H] float, any row stride, of 16 bytes beside tiles
  TensorRef w13;           // [L, 2 I, H] dtype of x, gate rows first, last dimension contiguous;
                           // with scales float8_e4m3fn or int8, and w2 as well; or two nibbles
                           // in a byte, uint8 [L, 2 I, H / 2] and [L, H, I / 2], or tiles of
                           // those (quantize.h), H and I multiples of 128, for bfloat16
  TensorRef w2;            // [L, H, I] dtype of x, last dimension contiguous
  TensorRef topk_weights;  // [T, K] float32, any row stride
  TensorRef topk_ids;      // [T, K] int32, any row stride
  TensorRef expert_map;    // [E] int32, optional
  TensorRef w13_scale;     // CUDA only: [L, 2 I] float32; e4m3 alone: or [L, 2 ceil(I / 128),
                           // ceil(H / 128)], blocks of gate, then those of up; of nibbles
                           // [L, groups, 2 I] bfloat16 or float32, groups of equal width
  TensorRef w2_scale;      // with w13_scale: [L, H] or [L, ceil(H / 128), ceil(I / 128)]; of
                           // nibbles [L, groups, H]
  TensorRef addend;        // [T, H] dtype of x or float32, optional
  TensorRef out;           // [T, H] dtype of x, memory of its own
  Activation act = Activation::kSilu;
  bool weight_on_input = false;
};

/// Scratch of fused_experts_packed in bytes, 0 on the CPU; `num_rows` counts all rows of x.
[[nodiscard]] DIFFULEX_API size_t fused_experts_packed_workspace_bytes(int64_t num_rows,
                                                                       int32_t num_local_experts,
                                                                       int64_t intermediate_size,
                                                                       DType dtype, Device device);

/// Arguments of `diffulex::fused_experts_packed`: out[row] = row_weight w2[e] act_mul(w13[e]
/// x[row]) for rows that already lie grouped by expert.
struct FusedExpertsPackedParams {
  TensorRef x;               // [N, H], or [L, rows_per_expert, H] when that is not 0; float
  TensorRef w13;             // [L, 2 I, H] dtype of x
  TensorRef w2;              // [L, H, I] dtype of x
  TensorRef expert_offsets;  // [L + 1] int32 offsets, or [L] int32 counts of the batched form
  TensorRef row_weights;     // [N] or [L, rows_per_expert] float32, contiguous, optional
  TensorRef w13_scale;       // reserved, must be absent
  TensorRef w2_scale;        // reserved, must be absent
  TensorRef out;             // shape and dtype of x, memory of its own. Rows outside every expert
                             // are zeroed; in the batched form left untouched
  Activation act = Activation::kSilu;
  int32_t rows_per_expert = 0;  // 0 = contiguous form
};

/// Arguments of `diffulex::moe_combine`: the last step of fused_moe on its own.
struct MoeCombineParams {
  TensorRef slot_out;      // [T K, H] float; slots with a negative id are not read
  TensorRef topk_weights;  // [T, K] float32
  TensorRef topk_ids;      // [T, K] int32, negative = nothing
  TensorRef addend;        // [T, H] dtype of slot_out or float32, optional
  TensorRef out;           // [T, H] dtype of slot_out, memory of its own
};

[[nodiscard]] DIFFULEX_API Status moe_permute(const MoePermuteParams& params,
                                              const ExecContext& context);
[[nodiscard]] DIFFULEX_API Status fused_moe(const FusedMoeParams& params,
                                            const ExecContext& context);
[[nodiscard]] DIFFULEX_API Status fused_experts_packed(const FusedExpertsPackedParams& params,
                                                       const ExecContext& context);
[[nodiscard]] DIFFULEX_API Status moe_combine(const MoeCombineParams& params,
                                              const ExecContext& context);

}  // namespace diffulex
