// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// Inlined always: an out-of-line copy could be shared between variants by the linker.
#define DIFFULEX_ISA_INLINE [[gnu::always_inline]] inline

namespace diffulex::cpu {
namespace {

/// Vector types of `kLanes` 32-bit lanes (and as many of 16 and of 8 bits).
template <int32_t kLanes>
struct VectorOf {
  using Floats __attribute__((vector_size(kLanes * 4))) = float;
  using Ints __attribute__((vector_size(kLanes * 4))) = int32_t;
  using Words __attribute__((vector_size(kLanes * 4))) = uint32_t;
  using Halves __attribute__((vector_size(kLanes * 2))) = uint16_t;
  using Bytes __attribute__((vector_size(kLanes))) = uint8_t;
};

}  // namespace
}  // namespace diffulex::cpu
