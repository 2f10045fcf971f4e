// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/attention.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// Arguments of `diffulex::store_kv_cache`. N rows; slot = page_id * page_size + offset.
struct StoreKvCacheParams {
  TensorRef k;        // [N, Hkv, D] float, heads and dims contiguous
  TensorRef v;        // [N, Hkv, D] dtype of k
  TensorRef k_cache;  // as in BlockAttentionParams; converts from k's dtype
  TensorRef v_cache;
  TensorRef slot_mapping;  // [N] int32 or int64, negative = skip the row
  TensorRef k_scale;       // as in BlockAttentionParams, written
  TensorRef v_scale;
  KvLayout kv_layout = KvLayout::kUnified;
};

/// Arguments of `diffulex::load_kv_cache`: per request the cached part, then the in-flight part.
struct LoadKvCacheParams {
  TensorRef k_cache;
  TensorRef v_cache;
  TensorRef k_new;         // [T, Hkv, D] float
  TensorRef v_new;         // [T, Hkv, D]
  TensorRef page_table;    // [R, max_pages] int32
  TensorRef context_lens;  // [R] int32
  TensorRef cu_seqlens_q;  // [R + 1] int32
  TensorRef cu_seqlens_k;  // [R + 1] int32, difference = context + rows
  TensorRef k_scale;       // as in BlockAttentionParams
  TensorRef v_scale;
  TensorRef k_out;  // [N_out, Hkv, D] dtype of k_new, written in full
  TensorRef v_out;
  KvLayout kv_layout = KvLayout::kUnified;
};

/// Arguments of `diffulex::copy_kv_pages`; the caches are [num_pages, ...] in either layout.
struct CopyKvPagesParams {
  TensorRef k_cache;
  TensorRef v_cache;
  TensorRef src_dst;  // [n, 2] int32; pairs with a negative id are skipped; sets are disjoint
  TensorRef k_scale;  // [num_pages, ...] uint8 or absent, copied along with the codes
  TensorRef v_scale;
};

/// Writes K and V rows with a non-negative slot into their page slots; others stay untouched.
[[nodiscard]] DIFFULEX_API Status store_kv_cache(const StoreKvCacheParams& params,
                                                 const ExecContext& context);

/// Gathers cached and in-flight K/V into contiguous tensors; unmapped pages and rows past
/// cu_seqlens_k[R] give zeros.
[[nodiscard]] DIFFULEX_API Status load_kv_cache(const LoadKvCacheParams& params,
                                                const ExecContext& context);

/// Copies whole pages inside the cache.
[[nodiscard]] DIFFULEX_API Status copy_kv_pages(const CopyKvPagesParams& params,
                                                const ExecContext& context);

}  // namespace diffulex
