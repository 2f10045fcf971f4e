// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of weights of 8 bits by kernel family.

#include "diffulex/core/status.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/quantize.h"

namespace diffulex::cuda {

/// Whether this library holds the Hopper product of e4m3 codes, and the device and the call fit it:
/// bfloat16 results, rows of codes and of scales aligned to 16 bytes, rows of W a multiple of 16.
[[nodiscard]] bool has_wgmma_product(const LinearScaledParams& params, int32_t device_index);

/// That product, for any number of rows.
[[nodiscard]] Status launch_wgmma_product(const LinearScaledParams& params,
                                          const ExecContext& context);

/// Loads its kernels and sets their attributes on the current device.
[[nodiscard]] Status prepare_wgmma_product(int32_t device_index);

}  // namespace diffulex::cuda
