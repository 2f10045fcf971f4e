// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace diffulex {

/// Bits of SamplerOutput::flags, and of the flags that the acceptance rules give.
enum SamplerFlag : int32_t {
  kSamplerCommittable = 1,     // the content may be frozen
  kSamplerSameAsPrevious = 2,  // no position changed
  kSamplerAllConfident = 4,
  kSamplerProgressed = 8,   // an open position was filled
  kSamplerTimedOut = 16,    // the step bound of the block was reached: everything was filled
  kSamplerBadLogits = 32,   // a row without a finite candidate: the request fails
  kSamplerSkipped = 64,     // rows were missing: no commit
  kSamplerConverged = 128,  // the canvas is final
};

}  // namespace diffulex
