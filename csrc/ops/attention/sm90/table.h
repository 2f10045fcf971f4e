// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/ops/dtype.h"
#include "ops/attention/sm90/launch.h"

namespace diffulex::cuda::sm90 {

/// An instantiation and what it serves.
struct AttentionEntry final {
  DType dtype = DType::kBF16;
  int32_t head_dim = 0;
  int32_t rows_per_tile = 0;
  AttentionKernel kernel;
  bool is_coded = false;      // caches of codes
  bool writes_codes = false;  // writes e4m3 codes of the result
};

/// The instantiations, for range-based loops.
struct AttentionEntries final {
  const AttentionEntry* entries = nullptr;
  int32_t count = 0;

  [[nodiscard]] const AttentionEntry* begin() const { return entries; }
  [[nodiscard]] const AttentionEntry* end() const { return entries + count; }
};

/// Kernels of this build: none without the sm90 group, rows of bf16 with head dim 128 in the
/// minimal profile.
[[nodiscard]] AttentionEntries attention_entries();

}  // namespace diffulex::cuda::sm90
