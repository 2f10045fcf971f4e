// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/attention.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// Arguments of `diffulex::rotary_embedding` (in place).
struct RotaryParams {
  TensorRef positions;      // [T] int64 or int32
  TensorRef q;              // [T, heads * D] or [T, heads, D] float
  TensorRef k;              // same, KV heads
  TensorRef cos_sin_cache;  // [max_pos, rotary_dim] float32, cosines then sines
  int32_t head_dim = 0;
  bool neox = true;  // pairs (d, d + rotary_dim/2); otherwise (2d, 2d + 1)
};

/// Arguments of `diffulex::qk_norm_rope` and `diffulex::qk_norm_rope_store`. With
/// ExecContext::weights_settled `q_weight` and `k_weight` are read before the launches in front
/// have ended: none of them may then write these.
struct QkNormRopeParams {
  TensorRef qkv;            // [T, (Hq + 2 Hkv) D], or [T, (Hq + Hkv) D] with v_from_raw_k; in place
  TensorRef positions;      // [T] int64 or int32
  TensorRef cos_sin_cache;  // [max_pos, rotary_dim] float32
  TensorRef q_weight;       // [D] or absent = no norm
  TensorRef k_weight;       // [D] or absent = no norm
  TensorRef v_out;          // [T, Hkv, D], required with v_from_raw_k
  TensorRef k_cache;        // store variant only, as in StoreKvCacheParams
  TensorRef v_cache;
  TensorRef slot_mapping;  // [T] int32 or int64, store variant only
  TensorRef k_scale;       // as in StoreKvCacheParams
  TensorRef v_scale;
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  float eps = 1e-6F;
  float weight_offset = 0.0F;
  bool neox = true;
  bool norm_v = false;        // weightless RMSNorm of V
  bool v_from_raw_k = false;  // V is the norm of the raw K
  KvLayout kv_layout = KvLayout::kUnified;
};

[[nodiscard]] DIFFULEX_API Status rotary_embedding(const RotaryParams& params,
                                                   const ExecContext& context);
[[nodiscard]] DIFFULEX_API Status qk_norm_rope(const QkNormRopeParams& params,
                                               const ExecContext& context);
/// qk_norm_rope, then the finished K and V of rows with slot >= 0 go into the cache. With scales
/// these rows then hold the stored values in `qkv` and `v_out` too: a key is the same number in
/// flight and in the cache.
[[nodiscard]] DIFFULEX_API Status qk_norm_rope_store(const QkNormRopeParams& params,
                                                     const ExecContext& context);

}  // namespace diffulex
