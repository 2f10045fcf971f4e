// SPDX-License-Identifier: Apache-2.0
#include "ops/quant/isa/int8_kernels.h"

namespace diffulex::cpu {

int32_t num_int8_kernels() {
  return 1;
}

const Int8Kernels& int8_kernels_at(int32_t /*index*/) {
  return int8_kernels_base();
}

const Int8Kernels& int8_kernels() {
  return int8_kernels_base();
}

}  // namespace diffulex::cpu
