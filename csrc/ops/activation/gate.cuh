// SPDX-License-Identifier: Apache-2.0
#pragma once

// The gate nonlinearities of act_and_mul and of the expert products.

#include "diffulex/ops/activation.h"

namespace diffulex::cuda {

template <Activation kAct>
__device__ __forceinline__ float activate(float gate) {
  if constexpr (kAct == Activation::kSilu) {
    // To a few units in the last place of fp32; every caller rounds, and this is half the work.
    return __fdividef(gate, 1.0F + __expf(-gate));
  } else if constexpr (kAct == Activation::kGeluTanh) {
    constexpr float kSqrt2OverPi = 0.7978845608028654F;
    return 0.5F * gate * (1.0F + tanhf(kSqrt2OverPi * (gate + 0.044715F * gate * gate * gate)));
  } else {
    constexpr float kInvSqrt2 = 0.7071067811865476F;
    return 0.5F * gate * (1.0F + erff(gate * kInvSqrt2));
  }
}

/// As above where the choice is made at run time, once per element of a finished product.
__device__ __forceinline__ float activate(Activation act, float gate) {
  switch (act) {
    case Activation::kGeluTanh:
      return activate<Activation::kGeluTanh>(gate);
    case Activation::kGeluErf:
      return activate<Activation::kGeluErf>(gate);
    default:
      return activate<Activation::kSilu>(gate);
  }
}

}  // namespace diffulex::cuda
