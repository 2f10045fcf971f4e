// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// Visibility rule of one request (low byte of `mask_kinds[r]`).
enum class MaskKind : int32_t {
  kCausal = 0,
  kBlockCausal = 1,
  kFull = 2,
  kPrefixFull = 3,
  kCacheOnly = 4,
};

/// Bit of `mask_kinds[r]`: cached keys in [prefix_len, padded_prefix_len) are invisible.
inline constexpr int32_t kMaskHoleBit = 0x100;

/// Bit of `mask_kinds[r]`: every row of the request has the sliding window of its first row.
inline constexpr int32_t kMaskAnchorBit = 0x200;

/// How K and V lie in the cache.
enum class KvLayout : int32_t { kUnified = 0, kDistinct = 1 };

/// Arguments of block-diffusion paged attention (schema and semantics of the op
/// `diffulex::block_attention`). T rows, R requests, Hq query heads, Hkv KV heads, head dim D.
/// `codes` get what quantize_rows makes of the rows [T, Hq D] of `out`, the same bits: kernels of
/// compute capability 9.0 write e4m3 ones for bfloat16 and D = 128, where they lie at multiples of
/// 8 bytes, over a cache of codes only in tiles of 64 rows; after the others, and on the CPU, that
/// op runs.
struct BlockAttentionParams {
  TensorRef q;             // [T, Hq, D] float
  TensorRef k;             // [T, Hkv, D] dtype of q; in-flight keys
  TensorRef v;             // [T, Hkv, D] dtype of q; in-flight values
  TensorRef k_cache;       // unified [num_pages, page_size, Hc, Dc]; distinct [num_pages, Hkv, D/x,
                           // page_size, x]
  TensorRef v_cache;       // unified as k_cache; distinct [num_pages, Hkv, D, page_size]
  TensorRef page_table;    // [R, max_pages] int32, negative = none
  TensorRef cu_seqlens_q;  // [R + 1] int32
  TensorRef context_lens;  // [R] int32, cached tokens readable
  TensorRef valid_slices;  // [R] int32, exclusive end of the real rows on the packed axis
  TensorRef mask_kinds;    // [R] int32, MaskKind | kMaskHoleBit | kMaskAnchorBit
  TensorRef prefix_lens;   // [R] int32 or absent (= 0)
  TensorRef padded_prefix_lens;  // [R] int32 or absent (= 0); where blocks of the mask start
  TensorRef q_starts;            // [R] int32 or absent (= context_lens)
  TensorRef k_scale;             // absent, or [num_pages, Hc, page_size] uint8 beside float8_e4m3fn
                                 // codes in unified caches: the exponent e of a head, as e + 127
  TensorRef v_scale;             // as k_scale
  TensorRef out;                 // [T, Hq, D] dtype of q, written in full
  TensorRef lse;                 // [T, Hq] float32 or absent, natural log
  TensorRef codes;  // absent, or [T, Hq D] float8_e4m3fn or int8; D a multiple of 128, and the
                    // heads of `out` side by side
  TensorRef codes_scale;        // with codes: [Hq D / 128, at least T] float32
  float scale = 1.0F;           // > 0, finite
  float softcap = 0.0F;         // 0 = off
  int32_t block_size = 1;       // B of the mask, >= 1
  int32_t sliding_window = 0;   // left window in tokens, 0 = off
  int32_t max_seqlen_q = 0;     // host bound on rows of one request
  int32_t max_context_len = 0;  // host bound on context_lens
  int32_t num_splits = 0;       // 0 = automatic, 1 = off, n = at most n
  KvLayout kv_layout = KvLayout::kUnified;
  bool codes_only = false;  // with codes: what `out` holds is not specified
};

/// Host shape facts from which scratch sizes follow.
struct AttentionShape {
  int32_t num_reqs = 0;
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t max_seqlen_q = 0;
  int32_t max_context_len = 0;
  int32_t num_splits = 0;
  int32_t sliding_window = 0;  // 0 = off; scratch for 0 is enough for every window
};

/// Softmax attention of packed query rows over cached and in-flight keys; rows that see no key,
/// rows past `valid_slices` and packed rows past the last request give 0 and lse -inf.
/// Masked keys and values are never read into the result, so they may hold NaN.
[[nodiscard]] DIFFULEX_API Status block_attention(const BlockAttentionParams& params,
                                                  const ExecContext& context);

/// How a launch divides the rows and keys of a request. Beside its other shapes nothing else of a
/// launch follows from max_context_len.
struct AttentionSplits {
  int32_t num_splits = 1;     // most parts of the keys of a request
  int32_t cluster_size = 1;   // CTAs that add the parts up; 1 = a second kernel does
  int32_t rows_per_tile = 0;  // packed rows (token * G + g) of a tile
};

/// What the kernels choose for `shape`: those of sm_90a for half types, or the portable ones.
[[nodiscard]] DIFFULEX_API AttentionSplits attention_splits(const AttentionShape& shape,
                                                            bool is_hopper);

/// Bytes of scratch block_attention needs on `device`; 0 when none.
[[nodiscard]] DIFFULEX_API size_t attention_workspace_bytes(const AttentionShape& shape,
                                                            Device device);

}  // namespace diffulex
