// SPDX-License-Identifier: Apache-2.0
//
// Stores K and V rows as codes with a scale byte per slot and head.
#include "ops/kv/store_codes.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

/// One warp per (row, head, tensor).
template <typename T>
__global__ void __launch_bounds__(kThreads)
    store_codes_kernel(const __grid_constant__ StoreCodesArgs args) {
  const int lane = threadIdx.x & 31;
  const int side = blockIdx.y;
  const CacheView& cache = args.cache[side];
  pdl_launch_dependents();
  pdl_wait();
  const int64_t count = args.num_rows * args.num_heads;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
       index < count; index += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t row = index / args.num_heads;
    const int32_t head = static_cast<int32_t>(index - row * args.num_heads);
    const int64_t slot = load_index(args.slots, args.is_slot_int64, row);
    if (slot < 0 || slot / cache.page_size >= cache.num_pages) {
      continue;
    }
    const int64_t page = slot / cache.page_size;
    const int64_t token = slot % cache.page_size;
    T* values = static_cast<T*>(args.rows[side]) + row * args.row_stride[side] +
                head * args.head_stride[side];
    float largest = 0.0F;
    bool has_nan = false;
    for (int32_t dim = lane; dim < args.head_dim; dim += 32) {
      const float value = to_float(values[dim]);
      has_nan = has_nan || value != value;
      largest = fmaxf(largest, fabsf(value));
    }
    const uint8_t scale = warp_kv_scale(largest, has_nan);
    uint8_t* codes = static_cast<uint8_t*>(cache.data) + cache.offset(page, token, head, 0);
    for (int32_t dim = lane; dim < args.head_dim; dim += 32) {
      const uint8_t code = scaled_kv_code(to_float(values[dim]), scale);
      codes[dim] = code;
      if (args.has_write_back) {
        values[dim] = from_float<T>(kv_value(code, scale));
      }
    }
    if (lane == 0) {
      *args.scales[side].at(page, token, head) = scale;
    }
  }
}

}  // namespace

Status store_codes(const char* where, const StoreCodesArgs& args, DType dtype,
                   const ExecContext& context) {
  const int64_t blocks = ceil_div(args.num_rows * args.num_heads, kWarps);
  const dim3 grid(static_cast<unsigned>(blocks < 65536 ? blocks : 65536), 2);
  return dispatch_dtype(where, dtype, [&](auto tag) {
    return cuda_status(where, launch_dependent(store_codes_kernel<typename decltype(tag)::type>,
                                               LaunchShape{grid, kThreads, 0, stream_of(context)},
                                               can_launch_dependent(context.device_index), args));
  });
}

Status prepare_store_codes(const char* where) {
  return for_each_dtype(where, [&](auto tag) {
    return touch_kernel(where, store_codes_kernel<typename decltype(tag)::type>);
  });
}

}  // namespace diffulex::cuda
