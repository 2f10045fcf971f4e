// SPDX-License-Identifier: Apache-2.0

// clang-format off: the vector type decides what the later headers mean
#include "kernels/cpu/isa/vector_base.h"
#include "kernels/cpu/isa/vector_math.h"
#include "kernels/cpu/isa/matmul_kernels.h"
#include "kernels/cpu/isa/linear_kernels.h"
#include "kernels/cpu/isa/moe_kernels.h"
#include "kernels/cpu/isa/row_kernels.h"
#include "kernels/cpu/isa/stats_kernels.h"
#include "kernels/cpu/isa/make_table.h"
// clang-format on

namespace diffulex::cpu {

const KernelTable& kernel_table_base() {
  static constexpr KernelTable kTable = make_table("base");
  return kTable;
}

}  // namespace diffulex::cpu
