// SPDX-License-Identifier: Apache-2.0
#pragma once

// The Hopper product of a weight of 4 bits in tiles.

#include "diffulex/core/status.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/quantize.h"

namespace diffulex::cuda {

/// linear_w4a16 of a weight in tiles, for any number of rows; an error on other devices than those
/// of compute capability 9.0, and where x or the scales are not aligned to 16 bytes.
[[nodiscard]] Status launch_nibble_tiles(const LinearW4a16Params& params,
                                         const ExecContext& context);

/// Loads its kernels and sets their attributes on the current device.
[[nodiscard]] Status prepare_nibble_tiles(int32_t device_index);

}  // namespace diffulex::cuda
