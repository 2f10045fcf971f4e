// SPDX-License-Identifier: Apache-2.0

// clang-format off: the products decide what the tile means
#include "ops/quant/isa/int8_v4.h"
#include "ops/shared/cpu_isa/vector_math.h"
#include "ops/quant/isa/int8_tile.h"
// clang-format on

namespace diffulex::cpu {

const Int8Kernels& int8_kernels_v4() {
  static constexpr Int8Kernels kKernels{"v4", int8_tile, kInt8TileRows, sizeof(Int8X)};
  return kKernels;
}

}  // namespace diffulex::cpu
