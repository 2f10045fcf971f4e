// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/cpu_isa/kernel_table.h"

namespace diffulex::cpu {

int32_t num_kernel_tables() {
  return 1;
}

const KernelTable& kernel_table_at(int32_t /*index*/) {
  return kernel_table_base();
}

const KernelTable& kernel_table() {
  return kernel_table_base();
}

}  // namespace diffulex::cpu
