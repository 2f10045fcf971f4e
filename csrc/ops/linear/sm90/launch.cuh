// SPDX-License-Identifier: Apache-2.0
#pragma once

// Calls of the products for few rows: what all have in their arguments, tensor maps, the launch.

#include <algorithm>
#include <cstdint>

#include <cuda.h>
#include <cuda_runtime.h>

#include "diffulex/core/status.h"
#include "diffulex/ops/dtype.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"
#include "ops/linear/config.h"
#include "ops/linear/sm90/args.cuh"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/shared_memory.cuh"
#include "ops/shared/cuda/tensor_map.h"

namespace diffulex::cuda::sm90 {

/// Shared memory of a CTA, alone on its processor.
inline constexpr int32_t kRingSmemLimit = 227 * 1024;

/// W [rows, K] in boxes of `line` columns and runs of eight rows: neighbouring runs, or a gate and
/// an up run, lie side by side in a tile.
inline TensorMapShape weight_shape(const TensorRef& weight, bool has_gate, int32_t line,
                                   int32_t tile_rows) {
  const int64_t rows = weight.size[0];
  const int64_t row = weight.stride[0];
  TensorMapShape shape;
  shape.rank = 4;
  shape.data = weight.data;
  const int64_t sizes[] = {weight.size[1], 8, 2, rows / 16};
  const int64_t strides[] = {1, row, has_gate ? rows / 2 * row : 8 * row,
                             has_gate ? 8 * row : 16 * row};
  const int32_t boxes[] = {line, 8, 2, tile_rows / 16};
  std::copy_n(sizes, 4, shape.size);
  std::copy_n(strides, 4, shape.stride);
  std::copy_n(boxes, 4, shape.box);
  return shape;
}

/// x [rows, K] in boxes of `line` columns.
inline TensorMapShape row_shape(const TensorRef& x, int32_t line, int32_t box_rows) {
  TensorMapShape shape;
  shape.rank = 2;
  shape.data = x.data;
  shape.size[0] = x.size[1];
  shape.size[1] = x.size[0];
  shape.stride[0] = 1;
  shape.stride[1] = x.stride[0];
  shape.box[0] = line;
  shape.box[1] = box_rows;
  return shape;
}

/// Sets what follows from the operands and the plan alone.
template <typename Params>
void set_call(const Params& params, const LinearPlan& plan, LinearArgs* args) {
  args->out = params.out.data;
  args->bias = params.bias.data;
  args->out_stride = params.out.stride[0];
  args->num_rows = static_cast<int32_t>(params.x.size[0]);
  args->num_columns = static_cast<int32_t>(params.out.size[1]);
  args->tile_rows = plan.tile_rows;
  args->num_tiles = plan.num_tiles;
  args->splits = plan.splits;
  args->lines = plan.lines;
  args->stages = plan.stages;
  args->paced_stages = plan.paced_stages;
  args->stage_bytes = plan.stage_bytes;
  args->partial_bytes = plan.partial_bytes;
  args->warps = plan.tile_rows / 16;
  args->act = params.act.has_value() ? static_cast<int32_t>(*params.act) : -1;
}

/// Multiprocessors of the device.
inline Status count_processors(const char* where, int32_t device_index, int* processors) {
  return cuda_status(
      where, cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device_index));
}

/// What the copies of a call read, the warpgroups of a CTA that multiply it, and its other threads.
struct RingCall final {
  TensorMapShape weight;
  DType weight_dtype;
  TensorMapShape rows;
  DType row_dtype;
  int64_t warpgroups;
  int64_t copying_threads = 32;
};

/// Lets a kernel of the ring use the shared memory of a processor.
template <auto kKernel>
Status prepare_ring(const char* where, int32_t device_index) {
  return allow_shared_memory<kKernel>(where, device_index, kRingSmemLimit);
}

/// Launches a kernel of the ring.
template <auto kKernel, typename Args>
Status launch_ring(const char* where, const RingCall& call, const Args& args,
                   const LinearPlan& plan, const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(prepare_ring<kKernel>(where, context.device_index));
  CUtensorMap weight_map;
  CUtensorMap row_map;
  DIFFULEX_RETURN_IF_ERROR(encode_tensor_map(where, call.weight, call.weight_dtype, &weight_map));
  DIFFULEX_RETURN_IF_ERROR(encode_tensor_map(where, call.rows, call.row_dtype, &row_map));
  LaunchShape shape;
  shape.cluster = static_cast<unsigned>(plan.splits);
  shape.grid = dim3(static_cast<unsigned>(plan.num_clusters) * shape.cluster);
  shape.block = dim3(static_cast<unsigned>(call.warpgroups * 128 + call.copying_threads));
  shape.smem_bytes = static_cast<size_t>(plan.smem_bytes);
  shape.stream = stream_of(context);
  return cuda_status(
      where, launch_dependent(kKernel, shape, context.weights_settled, weight_map, row_map, args));
}

}  // namespace diffulex::cuda::sm90
