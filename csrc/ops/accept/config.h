// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace diffulex {

/// Probability of the argmax from which a position of accept_dmax counts as confident; a constant
/// of the sampler, independent of the threshold.
inline constexpr float kDmaxConfident = 0.9F;

}  // namespace diffulex
