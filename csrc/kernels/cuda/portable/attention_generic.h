// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"

namespace diffulex::cuda {

struct AttentionArgs;

/// Rows and keys of a tile of the generic kernel, and the largest head dim it takes.
inline constexpr int32_t kGenericTile = 32;
inline constexpr int32_t kGenericMaxDim = 512;

/// The generic kernel for one element type; explicit instantiations in attention_generic_*.cu.
/// `prepare_generic` must have succeeded once on the current device before a launch.
template <typename T>
Status launch_generic(const AttentionArgs& args, void* stream);
template <typename T>
Status prepare_generic();

}  // namespace diffulex::cuda
