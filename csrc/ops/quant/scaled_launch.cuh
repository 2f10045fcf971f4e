// SPDX-License-Identifier: Apache-2.0
#pragma once

// Launches of the portable product of rows and a weight of 8 bits, for one kind of codes.

#include <cstdint>

#include "ops/quant/scaled_experts.h"
#include "ops/quant/scaled_tile.cuh"
#include "ops/shared/cuda/device_facts.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/shared_memory.cuh"

namespace diffulex::cuda {

/// Whether codes come in runs of 16 bytes.
inline bool is_wide_call(const ScaledArgs& args) {
  return args.depth % 16 == 0 && args.x_stride % 16 == 0 && args.weight_stride % 16 == 0 &&
         args.experts.weight_stride % 16 == 0 && is_aligned16(args.x) && is_aligned16(args.weight);
}

template <typename T, typename Sum, int kTiles, bool kIsWide, bool kIsDeep>
struct ScaledLaunch final {
  static constexpr int kStages = kIsDeep ? kScaledDeep<kTiles> : kScaledShallow;
  static constexpr size_t kBytes = size_t{kStages} * kScaledStageBytes<kTiles>;

  static Status prepare(const char* where, int32_t device_index) {
    return allow_shared_memory<scaled_kernel<T, Sum, kTiles, kIsWide, kStages>>(where, device_index,
                                                                                kBytes);
  }
  static Status run(const char* where, const ScaledArgs& args, unsigned grid, int64_t max_tiles,
                    const ExecContext& context) {
    DIFFULEX_RETURN_IF_ERROR(prepare(where, context.device_index));
    scaled_kernel<T, Sum, kTiles, kIsWide, kStages>
        <<<grid, kScaledCtaThreads<kTiles>, kBytes, stream_of(context)>>>(
            args, static_cast<int32_t>(max_tiles));
    return check_launch(where);
  }
};

template <typename T, typename Sum, int kTiles>
Status launch_tiles(const char* where, const ScaledArgs& args, int64_t max_tiles,
                    const ExecContext& context) {
  const int64_t columns = args.act < 0 ? kScaledWeightRows : kScaledWeightRows / 2;
  const auto grid = static_cast<unsigned>(max_tiles * ceil_div(args.width, columns));
  if (!is_wide_call(args)) {
    return ScaledLaunch<T, Sum, kTiles, false, false>::run(where, args, grid, max_tiles, context);
  }
  // Elsewhere more CTAs than two for each processor read enough at the same time.
  constexpr auto kDeepBytes = static_cast<int32_t>(
      kScaledDeepCtas * (ScaledLaunch<T, Sum, kTiles, true, true>::kBytes + kReservedSharedMemory));
  const bool is_deep = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                        context.device_index) >= kDeepBytes ||
                       grid <= 2U * static_cast<unsigned>(device_processors(context.device_index));
  return is_deep
             ? ScaledLaunch<T, Sum, kTiles, true, true>::run(where, args, grid, max_tiles, context)
             : ScaledLaunch<T, Sum, kTiles, true, false>::run(where, args, grid, max_tiles,
                                                              context);
}

template <typename T, typename Sum>
Status launch_height(const char* where, const ScaledArgs& args, int64_t height, int64_t max_tiles,
                     const ExecContext& context) {
  switch (height) {
    case kScaledShortRows:
      return launch_tiles<T, Sum, 1>(where, args, max_tiles, context);
    case kScaledMiddleRows:
      return launch_tiles<T, Sum, 2>(where, args, max_tiles, context);
    default:
      return launch_tiles<T, Sum, 4>(where, args, max_tiles, context);
  }
}

template <typename T, typename Sum, int kTiles>
Status prepare_tiles(const char* where, int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR(
      (ScaledLaunch<T, Sum, kTiles, true, true>::prepare(where, device_index)));
  DIFFULEX_RETURN_IF_ERROR(
      (ScaledLaunch<T, Sum, kTiles, true, false>::prepare(where, device_index)));
  return ScaledLaunch<T, Sum, kTiles, false, false>::prepare(where, device_index);
}

template <typename T, typename Sum>
Status prepare_scaled(const char* where, int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR((prepare_tiles<T, Sum, 1>(where, device_index)));
  DIFFULEX_RETURN_IF_ERROR((prepare_tiles<T, Sum, 2>(where, device_index)));
  return prepare_tiles<T, Sum, 4>(where, device_index);
}

/// As launch_scaled_tiles().
template <typename Sum>
Status launch_scaled(const char* where, const ScaledArgs& args, DType out, int64_t height,
                     int64_t max_tiles, const ExecContext& context) {
  return dispatch_dtype(where, out, [&](auto tag) {
    return launch_height<typename decltype(tag)::type, Sum>(where, args, height, max_tiles,
                                                            context);
  });
}

/// Sets the attributes of all kernels on the current device.
template <typename Sum>
Status prepare_scaled_kernels(int32_t device_index) {
  constexpr const char* kWhere = "diffulex::linear_scaled";
  return for_each_dtype(kWhere, [&](auto tag) {
    return prepare_scaled<typename decltype(tag)::type, Sum>(kWhere, device_index);
  });
}

}  // namespace diffulex::cuda
