// SPDX-License-Identifier: Apache-2.0
//
// Builds without an architecture of compute capability 9.0: no Hopper kernels.
#include "ops/attention/sm90/table.h"

namespace diffulex::cuda::sm90 {

AttentionEntries attention_entries() {
  return AttentionEntries{};
}

}  // namespace diffulex::cuda::sm90
