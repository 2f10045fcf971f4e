// SPDX-License-Identifier: Apache-2.0
#include "ops/merge/soft_embedding_config.h"

#include "diffulex/ops/merge.h"

namespace diffulex {

size_t soft_embedding_workspace_bytes(int64_t num_rows, int64_t vocab_size, int64_t hidden_size,
                                      DType embedding_dtype, Device device) {
  if (device == Device::kCpu) {
    return 0;
  }
  return static_cast<size_t>(
      soft_embedding_plan(num_rows, vocab_size, hidden_size, embedding_dtype).bytes());
}

}  // namespace diffulex
