// SPDX-License-Identifier: Apache-2.0

// clang-format off: the products decide what the tile means
#include "ops/quant/isa/int8_dot.h"
#include "ops/shared/cpu_isa/vector_math.h"
#include "ops/quant/isa/int8_tile.h"
// clang-format on

namespace diffulex::cpu {

const Int8Kernels& int8_kernels_dot() {
  static constexpr Int8Kernels kKernels{"dot", int8_tile, kInt8TileRows, sizeof(Int8X)};
  return kKernels;
}

}  // namespace diffulex::cpu
