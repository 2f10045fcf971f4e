// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "core/strategy/mask_fill.h"
#include "core/strategy/strategies.h"

namespace diffulex {

/// Several blocks in flight under block-causal visibility; buffer_size 1 is single-block decoding.
/// The shared life cycle without a deviation; the rules say whether the sampler may edit.
std::unique_ptr<Strategy> make_multi_bd(const EngineOptions& options) {
  return std::make_unique<MaskFillStrategy>(options);
}

}  // namespace diffulex
