// SPDX-License-Identifier: Apache-2.0
//
// Hopper attention kernels of the full profile.
#include <array>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/attention/sm90/table.h"
#include "ops/kv/codes.cuh"

namespace diffulex::cuda::sm90 {

AttentionEntries attention_entries() {
  static const std::array<AttentionEntry, 21> entries = {{
      {DType::kBF16, 64, 64, attention_instance<__nv_bfloat16, 64, 64>()},
      {DType::kBF16, 64, 128, attention_instance<__nv_bfloat16, 64, 128>()},
      {DType::kBF16, 128, 64, attention_instance<__nv_bfloat16, 128, 64>()},
      {DType::kBF16, 128, 128, attention_instance<__nv_bfloat16, 128, 128>()},
      {DType::kBF16, 256, 64, attention_instance<__nv_bfloat16, 256, 64>()},
      {DType::kBF16, 256, 128, attention_instance<__nv_bfloat16, 256, 128>()},
      {DType::kBF16, 512, 64, attention_instance<__nv_bfloat16, 512, 64>()},
      {DType::kF16, 64, 64, attention_instance<__half, 64, 64>()},
      {DType::kF16, 64, 128, attention_instance<__half, 64, 128>()},
      {DType::kF16, 128, 64, attention_instance<__half, 128, 64>()},
      {DType::kF16, 128, 128, attention_instance<__half, 128, 128>()},
      {DType::kF16, 256, 64, attention_instance<__half, 256, 64>()},
      {DType::kF16, 256, 128, attention_instance<__half, 256, 128>()},
      {DType::kF16, 512, 64, attention_instance<__half, 512, 64>()},
      {DType::kBF16, 64, 64, attention_instance<__nv_bfloat16, 64, 64, KvCode>(), true},
      {DType::kBF16, 64, 128, attention_instance<__nv_bfloat16, 64, 128, KvCode>(), true},
      {DType::kBF16, 128, 64, attention_instance<__nv_bfloat16, 128, 64, KvCode>(), true},
      {DType::kBF16, 128, 128, attention_instance<__nv_bfloat16, 128, 128, KvCode>(), true},
      {DType::kBF16, 256, 64, attention_instance<__nv_bfloat16, 256, 64, KvCode>(), true},
      {DType::kBF16, 256, 128, attention_instance<__nv_bfloat16, 256, 128, KvCode>(), true},
      {DType::kBF16, 512, 64, attention_instance<__nv_bfloat16, 512, 64, KvCode>(), true},
  }};
  return AttentionEntries{entries.data(), static_cast<int32_t>(entries.size())};
}

}  // namespace diffulex::cuda::sm90
