// SPDX-License-Identifier: Apache-2.0
#include <cpuid.h>

#include <array>

#include "ops/quant/isa/int8_kernels.h"
#include "ops/shared/cpu_isa/kernel_table.h"

namespace diffulex::cpu {
namespace {

struct Variants {
  std::array<const Int8Kernels* (*)(), 5> at = {};
  int32_t count = 0;
};

/// Products of bytes: bit 11 of ecx of leaf 7 with 512 bits, bit 4 of eax of its subleaf 1 with
/// 256.
bool has_vnni(bool is_wide) {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid_count(7, is_wide ? 0U : 1U, &eax, &ebx, &ecx, &edx) == 0) {
    return false;
  }
  return is_wide ? (ecx >> 11 & 1U) != 0 : (eax >> 4 & 1U) != 0;
}

template <const Int8Kernels& (*kVariant)()>
const Int8Kernels* variant() {
  return &kVariant();
}

Variants find_variants() {
  // The tables of this machine are base, v3 and v4, as far as it has them.
  const int32_t num_tables = num_kernel_tables();
  Variants found;
  const auto add = [&found](const Int8Kernels* (*kernels)(), bool is_there) {
    if (is_there) {
      found.at[static_cast<size_t>(found.count++)] = kernels;
    }
  };
  add(variant<int8_kernels_base>, true);
  add(variant<int8_kernels_v3>, num_tables > 1);
  add(variant<int8_kernels_v3n>, num_tables > 1 && has_vnni(false));
  add(variant<int8_kernels_v4>, num_tables > 2);
  add(variant<int8_kernels_v4n>, num_tables > 2 && has_vnni(true));
  return found;
}

const Variants& variants() {
  static const Variants kFound = find_variants();
  return kFound;
}

}  // namespace

int32_t num_int8_kernels() {
  return variants().count;
}

const Int8Kernels& int8_kernels_at(int32_t index) {
  return *variants().at[static_cast<size_t>(index)]();
}

const Int8Kernels& int8_kernels() {
  static const Int8Kernels& kBest = int8_kernels_at(num_int8_kernels() - 1);
  return kBest;
}

}  // namespace diffulex::cpu
