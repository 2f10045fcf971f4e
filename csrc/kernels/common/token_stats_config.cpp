// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/token_stats_config.h"

#include "diffulex/kernels/sampling.h"

namespace diffulex {

size_t token_stats_workspace_bytes(int64_t num_rows, int64_t vocab_size, int32_t top_k,
                                   Device device) {
  if (device == Device::kCpu || num_rows <= 0 || vocab_size <= 0) {
    return 0;
  }
  // Per chunk one record and its own top-k list of (value, column).
  constexpr int64_t kListEntryBytes = 8;
  const int64_t per_chunk = kStatsRecordBytes + kListEntryBytes * (top_k > 0 ? top_k : 0);
  return static_cast<size_t>(num_rows * stats_chunks(vocab_size) * per_chunk);
}

}  // namespace diffulex
