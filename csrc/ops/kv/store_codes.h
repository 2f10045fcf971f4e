// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "diffulex/core/status.h"
#include "diffulex/ops/dtype.h"
#include "diffulex/ops/exec_context.h"
#include "ops/kv/cache_view.cuh"
#include "ops/kv/codes.cuh"

namespace diffulex::cuda {

/// K and V rows for caches of codes. N rows, Hkv heads of D values.
struct StoreCodesArgs final {
  void* rows[2];  // k, v: [N, Hkv, D], dims contiguous
  int64_t row_stride[2];
  int64_t head_stride[2];
  CacheView cache[2];
  KvScales scales[2];
  const void* slots;  // [N] int32 or int64; rows of a slot outside the pages are left alone
  bool is_slot_int64;
  bool has_write_back;  // rows that are stored take the stored values
  int64_t num_rows;
  int32_t num_heads;
  int32_t head_dim;
};

/// Stores rows of `dtype`, on the stream of the context and its device.
[[nodiscard]] Status store_codes(const char* where, const StoreCodesArgs& args, DType dtype,
                                 const ExecContext& context);

[[nodiscard]] Status prepare_store_codes(const char* where);

}  // namespace diffulex::cuda
