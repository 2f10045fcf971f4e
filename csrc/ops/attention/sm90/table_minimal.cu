// SPDX-License-Identifier: Apache-2.0
//
// Hopper attention kernels of the minimal profile.
#include <array>

#include <cuda_bf16.h>

#include "ops/attention/sm90/table.h"
#include "ops/kv/codes.cuh"

namespace diffulex::cuda::sm90 {

AttentionEntries attention_entries() {
  static const std::array<AttentionEntry, 4> entries = {{
      {DType::kBF16, 128, 64, attention_instance<__nv_bfloat16, 128, 64>()},
      {DType::kBF16, 128, 128, attention_instance<__nv_bfloat16, 128, 128>()},
      {DType::kBF16, 128, 64, attention_instance<__nv_bfloat16, 128, 64, KvCode>(), true},
      {DType::kBF16, 128, 128, attention_instance<__nv_bfloat16, 128, 128, KvCode>(), true},
  }};
  return AttentionEntries{entries.data(), static_cast<int32_t>(entries.size())};
}

}  // namespace diffulex::cuda::sm90
