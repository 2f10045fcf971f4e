// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/sampling.h"

namespace diffulex {

[[nodiscard]] Status check_sample_filtered(const SampleFilteredParams& params);
[[nodiscard]] Status check_entropy_bound_mask(const EntropyBoundMaskParams& params);

}  // namespace diffulex
