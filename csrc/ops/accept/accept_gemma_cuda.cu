// SPDX-License-Identifier: Apache-2.0
//
// accept_gemma: one CTA per canvas, one thread per position.
#include <cstdint>

#include "ops/accept/block.cuh"
#include "ops/accept/config.h"
#include "ops/accept/entropy_order.cuh"
#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/check_data.h"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::accept_gemma";

struct GemmaArgs {
  AcceptInputs inputs;         // without editable_start
  const int64_t* prev_argmax;  // [Nb, B]
  const int32_t* stable_run;   // [Nb]
  const int32_t* steps_left;   // [Nb]
  const int64_t* renoise_ids;  // [Nb, B]
  const int64_t* argmax_ids;   // [R]
  int64_t* argmax;             // [Nb, B]
  int64_t prev_argmax_stride;
  int64_t renoise_stride;
  int64_t argmax_ids_stride;
  int64_t argmax_stride;
  GemmaRules rules;
};

__global__ void __launch_bounds__(kMaxAcceptThreads, 1)
    gemma_kernel(const __grid_constant__ GemmaArgs args) {
  __shared__ EntropyShared shared;
  const AcceptInputs& inputs = args.inputs;
  const int64_t block = blockIdx.x;
  const auto index = static_cast<int32_t>(threadIdx.x);
  const int32_t count = valid_end(inputs, block);
  const AcceptPosition position = read_position(inputs, block, index);
  const bool has_row = position.is_editable && !position.is_missing;
  int64_t argmax = -1;
  float entropy = 0.0F;
  float probability = 0.0F;
  if (has_row) {
    argmax = args.argmax_ids[position.row * args.argmax_ids_stride];
    entropy = position.stats[kStatsEntropy];
    probability = position.stats[kStatsConfidence];
  }
  const bool is_bad = has_row && (argmax < 0 || position.id < 0);
  const bool is_skipped = __syncthreads_or(position.is_missing) != 0;
  const bool has_bad = __syncthreads_or(is_bad) != 0;
  const bool is_new =
      has_row && argmax != args.prev_argmax[block * args.prev_argmax_stride + index];
  const bool is_same_argmax = __syncthreads_or(is_new) == 0;
  const double total = order_entropies(entropy, count, args.rules.entropy_bound, shared);

  const CanvasVerdict verdict =
      judge_canvas(args.rules, count, total, args.stable_run[block], args.steps_left[block],
                   is_same_argmax, has_bad, is_skipped);
  int64_t next = -1;
  if (verdict.is_usable && position.is_editable) {
    if (verdict.is_converged) {
      next = argmax;
      probability = position.stats[kStatsMaxProb];
    } else {
      next = shared.is_accepted[index] != 0 ? position.id
                                            : args.renoise_ids[block * args.renoise_stride + index];
    }
  }
  const bool has_changed = __syncthreads_or(next >= 0 && next != position.token) != 0;
  if (index < inputs.block_size) {
    inputs.write_ids[block * inputs.write_ids_stride + index] = next;
    inputs.confidence[block * inputs.confidence_stride + index] = probability;
    args.argmax[block * args.argmax_stride + index] = argmax;
  }
  if (index == 0) {
    inputs.flags[block] = canvas_flags(verdict, has_changed, has_bad, is_skipped);
  }
}

/// The sort needs a power of two.
unsigned canvas_threads(int32_t block_size) {
  unsigned threads = 32;
  while (threads < static_cast<unsigned>(block_size)) {
    threads *= 2;
  }
  return threads;
}

}  // namespace

Status accept_gemma(const AcceptGemmaParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  GemmaArgs args{};
  args.inputs = accept_inputs(params);
  args.prev_argmax = params.prev_argmax.as<const int64_t>();
  args.prev_argmax_stride = params.prev_argmax.stride[0];
  args.stable_run = params.stable_run.as<const int32_t>();
  args.steps_left = params.steps_left.as<const int32_t>();
  args.renoise_ids = params.renoise_ids.as<const int64_t>();
  args.renoise_stride = params.renoise_ids.stride[0];
  args.argmax_ids = params.argmax_ids.as<const int64_t>();
  args.argmax_ids_stride = params.argmax_ids.stride[0];
  args.argmax = params.argmax.as<int64_t>();
  args.argmax_stride = params.argmax.stride[0];
  args.rules = gemma_rules(params);
  DIFFULEX_RETURN_IF_ERROR(
      check_range(kWhere, "row_index", params.row_index, -1, args.inputs.num_rows, context));
  gemma_kernel<<<static_cast<unsigned>(params.tokens.size[0]),
                 canvas_threads(args.inputs.block_size), 0, stream_of(context)>>>(args);
  return check_launch(kWhere);
}

Status prepare_accept_gemma(const ExecContext& /*context*/) {
  return touch_kernel(kWhere, gemma_kernel);
}

}  // namespace diffulex::cuda
