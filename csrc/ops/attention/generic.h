// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"

namespace diffulex::cuda {

struct AttentionArgs;

/// Largest head dim that the generic kernel takes.
inline constexpr int32_t kGenericMaxDim = 512;

/// The generic kernel for rows of T and cached elements of type Cached, which is T or KvCode;
/// explicit instantiations in generic_*.cu. With KvCode the arguments are CodedAttentionArgs.
/// Tiles have args.rows_per_tile rows and as many keys: kGenericTile or kSmallGenericTile. The
/// device is the current one.
template <typename T, typename Cached = T>
Status launch_generic(const AttentionArgs& args, int32_t device_index, void* stream);
/// Loads every kernel and sets its limit, for captures to come.
template <typename T, typename Cached = T>
Status prepare_generic(int32_t device_index);

}  // namespace diffulex::cuda
