// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/exec_context.h"
#include "ops/quant/scaled_tile.h"

namespace diffulex::cuda {

/// Rows of x of a tile.
inline constexpr int64_t kScaledShortRows = 16;
inline constexpr int64_t kScaledMiddleRows = 32;
inline constexpr int64_t kScaledTallRows = 64;

/// A product of e4m3 codes, or of int8 codes, over at most `max_tiles` tiles of `height` rows.
/// Where there are experts they are the work tiles of moe_permute, and `args.experts` says whose
/// rows they are.
[[nodiscard]] Status launch_scaled_e4m3(const char* where, const ScaledArgs& args, DType out,
                                        int64_t height, int64_t max_tiles,
                                        const ExecContext& context);
[[nodiscard]] Status launch_scaled_int8(const char* where, const ScaledArgs& args, DType out,
                                        int64_t height, int64_t max_tiles,
                                        const ExecContext& context);

/// The one for `codes`.
[[nodiscard]] inline Status launch_scaled_tiles(const char* where, const ScaledArgs& args,
                                                DType codes, DType out, int64_t height,
                                                int64_t max_tiles, const ExecContext& context) {
  return codes == DType::kI8 ? launch_scaled_int8(where, args, out, height, max_tiles, context)
                             : launch_scaled_e4m3(where, args, out, height, max_tiles, context);
}

/// Sets the attributes of their kernels on the current device.
[[nodiscard]] Status prepare_scaled_e4m3(int32_t device_index);
[[nodiscard]] Status prepare_scaled_int8(int32_t device_index);

}  // namespace diffulex::cuda
