// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/cpu_isa/kernel_table.h"

namespace diffulex::cpu {
namespace {

bool has_v3() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
         __builtin_cpu_supports("f16c") != 0 && __builtin_cpu_supports("bmi") != 0 &&
         __builtin_cpu_supports("bmi2") != 0 && __builtin_cpu_supports("lzcnt") != 0 &&
         __builtin_cpu_supports("movbe") != 0;
}

bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") != 0 &&
         __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512cd") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
}

int32_t count_tables() {
  __builtin_cpu_init();
  return has_v4() ? 3 : (has_v3() ? 2 : 1);
}

}  // namespace

int32_t num_kernel_tables() {
  static const int32_t kCount = count_tables();
  return kCount;
}

const KernelTable& kernel_table_at(int32_t index) {
  switch (index) {
    case 1:
      return kernel_table_v3();
    case 2:
      return kernel_table_v4();
    default:
      return kernel_table_base();
  }
}

const KernelTable& kernel_table() {
  static const KernelTable& kBest = kernel_table_at(num_kernel_tables() - 1);
  return kBest;
}

}  // namespace diffulex::cpu
