// SPDX-License-Identifier: Apache-2.0

// clang-format off: the vector type decides what the later headers mean
#include "ops/shared/cpu_isa/vector_v3.h"
#include "ops/shared/cpu_isa/vector_math.h"
#include "ops/shared/cpu_isa/matmul_kernels.h"
#include "ops/shared/cpu_isa/linear_kernels.h"
#include "ops/shared/cpu_isa/code_kernels.h"
#include "ops/shared/cpu_isa/moe_kernels.h"
#include "ops/shared/cpu_isa/row_kernels.h"
#include "ops/shared/cpu_isa/stats_kernels.h"
#include "ops/shared/cpu_isa/make_table.h"
// clang-format on

namespace diffulex::cpu {

const KernelTable& kernel_table_v3() {
  static constexpr KernelTable kTable = make_table("v3");
  return kTable;
}

}  // namespace diffulex::cpu
