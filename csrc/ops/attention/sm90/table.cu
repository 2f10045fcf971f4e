// SPDX-License-Identifier: Apache-2.0
//
// Hopper attention kernels of the build profile.
#include <array>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/attention/sm90/table.h"
#include "ops/kv/codes.cuh"
#include "ops/quant/code_rows.cuh"

namespace diffulex::cuda::sm90 {
namespace {

template <typename T, int kDim, int kRows, typename Cached, typename Rows = NoCodeRows>
AttentionEntry entry_of() {
  return {std::is_same_v<T, __half> ? DType::kF16 : DType::kBF16,
          kDim,
          kRows,
          attention_instance<T, kDim, kRows, Cached, Rows>(),
          std::is_same_v<Cached, KvCode>,
          std::is_same_v<Rows, CodeRows>};
}

}  // namespace

AttentionEntries attention_entries() {
  static const std::array entries = {
#define DIFFULEX_INSTANCE(...) entry_of<__VA_ARGS__>(),
#include "ops/attention/sm90/instances.def"
  };
  return AttentionEntries{entries.data(), static_cast<int32_t>(entries.size())};
}

}  // namespace diffulex::cuda::sm90
