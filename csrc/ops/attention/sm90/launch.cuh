// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <type_traits>

#include "ops/attention/sm90/kernel.cuh"
#include "ops/attention/sm90/launch.h"
#include "ops/attention/sm90/maps.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"

namespace diffulex::cuda::sm90 {

inline constexpr const char* kAttentionWhere = "diffulex::block_attention";

/// Shared-memory limit of one kernel and multiprocessors of each device, set and read once.
template <typename Traits>
struct AttentionSetup final {
  static constexpr int32_t kMaxDevices = 64;

  struct Slot {
    std::once_flag once;
    cudaError_t error = cudaSuccess;
    int32_t num_sms = 0;
  };

  static Slot& slot(int32_t device_index) {
    static std::array<Slot, kMaxDevices> slots;
    Slot& result = slots[static_cast<size_t>(device_index)];
    std::call_once(result.once, [&] {
      result.error =
          cudaFuncSetAttribute(attention_kernel<Traits>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
      if (result.error == cudaSuccess) {  // loads the kernel
        cudaFuncAttributes attributes;
        result.error = cudaFuncGetAttributes(&attributes, reduce_kernel<Traits>);
      }
      if (result.error == cudaSuccess) {
        result.error =
            cudaDeviceGetAttribute(&result.num_sms, cudaDevAttrMultiProcessorCount, device_index);
      }
    });
    return result;
  }
};

template <typename Traits>
Status prepare_attention(int32_t device_index) {
  if (device_index < 0 || device_index >= AttentionSetup<Traits>::kMaxDevices) {
    return make_error(StatusCode::kUnsupported, kAttentionWhere,
                      ": device: expected an index below ", AttentionSetup<Traits>::kMaxDevices,
                      ", got ", device_index);
  }
  return cuda_status(kAttentionWhere, AttentionSetup<Traits>::slot(device_index).error);
}

/// CTAs of a launch. Where keys are split, all units lie along x and the clusters of a unit along
/// y; otherwise at most one CTA per multiprocessor takes turns.
inline dim3 attention_grid(const AttentionArgs& args, int64_t tiles, int32_t num_sms) {
  if (args.num_splits > 1) {
    return dim3(static_cast<unsigned>((tiles > 0 ? tiles : 1) * args.cluster_size),
                static_cast<unsigned>(ceil_div_i32(args.num_splits, args.cluster_size)));
  }
  const int64_t zero_units = int64_t{args.num_reqs + 1} * args.tiles_per_request;
  const int64_t units = tiles > zero_units ? tiles : zero_units;
  return dim3(static_cast<unsigned>(units < num_sms ? units : num_sms));
}

template <typename Traits>
Status launch_attention(const AttentionArgs& args, const CodeRows& code_rows, int32_t device_index,
                        void* stream) {
  DIFFULEX_RETURN_IF_ERROR(prepare_attention<Traits>(device_index));
  AttentionMaps maps;
  constexpr DType kDtype =
      std::is_same_v<typename Traits::Element, __half> ? DType::kF16 : DType::kBF16;
  constexpr CacheBox kCacheBox =
      Traits::kIsCoded ? CacheBox{DType::kF8E4M3, Traits::kCodeLineBytes, Traits::kPieceKeys}
                       : CacheBox{kDtype, 64, Traits::kTileKeys};
  DIFFULEX_RETURN_IF_ERROR(make_attention_maps(args, kDtype, Traits::kTileKeys, kCacheBox, &maps));
  const int64_t tiles = int64_t{args.num_reqs} * args.num_kv_heads * args.tiles_per_request;
  constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;
  if (tiles * args.num_splits > kMaxGrid) {
    return make_error(StatusCode::kUnsupported, kAttentionWhere, ": q: expected at most ", kMaxGrid,
                      " units of work, got ", tiles * args.num_splits);
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(args.cluster_size);
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = attention_grid(args, tiles, AttentionSetup<Traits>::slot(device_index).num_sms);
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = Traits::kSmemBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = args.cluster_size > 1 ? 2 : 1;
  typename Traits::Rows rows;
  if constexpr (Traits::kWritesCodes) {
    rows = code_rows;
  }
  DIFFULEX_RETURN_IF_ERROR(
      cuda_status(kAttentionWhere,
                  cudaLaunchKernelEx(&config, attention_kernel<Traits>,
                                     static_cast<const typename Traits::Args&>(args), maps, rows)));
  if (args.num_splits == 1 || args.cluster_size > 1 || tiles == 0) {
    return Status::ok_status();
  }
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(tiles), PartialSlot<Traits>::kItems);
  shape.block = dim3(Traits::kConsumerThreads);
  shape.stream = config.stream;
  return cuda_status(kAttentionWhere,
                     launch_dependent(reduce_kernel<Traits>, shape, true, args, rows));
}

template <typename T, int kDim, int kRows, typename Cached, typename Rows>
AttentionKernel attention_instance() {
  using Traits = AttentionTraits<T, kDim, kRows, Cached, Rows>;
  return AttentionKernel{&launch_attention<Traits>, &prepare_attention<Traits>};
}

}  // namespace diffulex::cuda::sm90
