// SPDX-License-Identifier: Apache-2.0
#include "ops/quant/isa/int8_kernels.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

namespace diffulex::cpu {
namespace {

/// FEAT_DotProd, where the system tells.
bool has_dot() {
#if defined(__APPLE__)
  int32_t found = 0;
  size_t size = sizeof(found);
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, nullptr, 0) == 0 && found != 0;
#elif defined(__linux__)
  constexpr unsigned long kAsimdDp = 1UL << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kAsimdDp) != 0;
#else
  return false;
#endif
}

}  // namespace

int32_t num_int8_kernels() {
  static const int32_t kNum = has_dot() ? 2 : 1;
  return kNum;
}

const Int8Kernels& int8_kernels_at(int32_t index) {
  return index == 0 ? int8_kernels_base() : int8_kernels_dot();
}

const Int8Kernels& int8_kernels() {
  return int8_kernels_at(num_int8_kernels() - 1);
}

}  // namespace diffulex::cpu
