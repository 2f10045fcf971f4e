// SPDX-License-Identifier: Apache-2.0
//
// Device-side work list of block_attention (layout in kernels/common/attention_plan.h): one CTA
// counts the tiles and splits of every request and places them by descending work. R requests.
#include <cstdint>

#include "kernels/common/attention_config.h"
#include "kernels/common/attention_plan.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/portable/prepare.h"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 1024;

struct PlanArgs {
  const int32_t* cu_seqlens_q;  // [R + 1]
  const int32_t* context_lens;  // [R]
  const int32_t* valid_slices;  // [R]
  const int32_t* mask_kinds;    // [R]
  int32_t* plan;
  int64_t num_elems;
  int32_t num_reqs;
  int32_t rows_per_tile;
  int32_t tokens_per_tile;
  int32_t max_seqlen_q;
  int32_t sliding_window;
  int32_t num_splits;
  int32_t keys_per_split;
};

struct RequestWork {
  int32_t keys;  // keys one item reads; the sort key
  int32_t tiles;
  int32_t splits;
};

__device__ RequestWork request_work(const PlanArgs& args, int32_t request) {
  const int32_t start = max_i32(args.cu_seqlens_q[request], 0);
  const int32_t rows =
      min_i32(max_i32(args.cu_seqlens_q[request + 1] - start, 0), args.max_seqlen_q);
  const int32_t valid = num_valid_rows(start, start + rows, args.valid_slices[request]);
  const int32_t context = max_i32(args.context_lens[request], 0);
  const int32_t kind = args.mask_kinds[request];
  const int32_t keys = plan_keys(context, valid, kind, args.sliding_window);
  RequestWork work;
  work.tiles = ceil_div_i32(valid, args.tokens_per_tile);
  work.splits = request_splits(keys, args.num_splits, args.keys_per_split);
  work.keys = keys / work.splits;
  return work;
}

__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ PlanArgs args) {
  __shared__ int32_t shared_keys[kThreads];
  __shared__ int32_t shared_items[kThreads];
  __shared__ int32_t shared_offset[kThreads];
  const int thread = threadIdx.x;
  int32_t total = 0;
  for (int32_t base = 0; base < args.num_reqs; base += kThreads) {
    const int32_t request = base + thread;
    const bool is_real = request < args.num_reqs;
    const RequestWork mine = is_real ? request_work(args, request) : RequestWork{0, 0, 1};
    // Items before mine: those of requests with more work, or equal work and a lower index.
    int32_t offset = 0;
    total = 0;
    for (int32_t other_base = 0; other_base < args.num_reqs; other_base += kThreads) {
      __syncthreads();
      if (other_base + thread < args.num_reqs) {
        const RequestWork other = request_work(args, other_base + thread);
        shared_keys[thread] = other.keys;
        shared_items[thread] = other.tiles * other.splits;
      }
      __syncthreads();
      const int32_t count = min_i32(kThreads, args.num_reqs - other_base);
      for (int32_t i = 0; i < count; ++i) {
        const bool is_before =
            shared_keys[i] > mine.keys || (shared_keys[i] == mine.keys && other_base + i < request);
        offset += is_before ? shared_items[i] : 0;
        total += shared_items[i];
      }
    }
    shared_offset[thread] = offset;
    __syncthreads();
    const int32_t count = min_i32(kThreads, args.num_reqs - base);
    for (int32_t i = thread / 32; i < count; i += kThreads / 32) {
      const RequestWork work = request_work(args, base + i);
      for (int32_t item = thread % 32; item < work.tiles * work.splits; item += 32) {
        const int64_t elem =
            kPlanHeaderElems + (static_cast<int64_t>(shared_offset[i]) + item) * kPlanItemElems;
        if (elem + kPlanItemElems <= args.num_elems) {
          *reinterpret_cast<int4*>(args.plan + elem) =
              make_int4(base + i, item / work.splits, item % work.splits, work.splits);
        }
      }
    }
  }
  const int64_t used = kPlanHeaderElems + static_cast<int64_t>(total) * kPlanItemElems;
  for (int64_t elem = used + thread; elem < args.num_elems; elem += kThreads) {
    args.plan[elem] = -1;
  }
  if (thread == 0) {
    args.plan[0] = total;
    args.plan[1] = args.rows_per_tile;
    args.plan[2] = args.num_splits;
    args.plan[3] = 0;
  }
}

}  // namespace

Status attention_plan(const AttentionPlanParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::attention_plan";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  AttentionShape shape;
  shape.num_reqs = static_cast<int32_t>(params.context_lens.size[0]);
  shape.num_q_heads = params.num_q_heads;
  shape.num_kv_heads = params.num_kv_heads;
  shape.head_dim = params.head_dim;
  shape.max_seqlen_q = params.max_seqlen_q;
  shape.num_splits = params.num_splits;
  const AttentionConfig config = attention_config(shape, context.batch_invariant);
  PlanArgs args{};
  args.cu_seqlens_q = params.cu_seqlens_q.as<const int32_t>();
  args.context_lens = params.context_lens.as<const int32_t>();
  args.valid_slices = params.valid_slices.as<const int32_t>();
  args.mask_kinds = params.mask_kinds.as<const int32_t>();
  args.plan = params.plan.as<int32_t>();
  args.num_elems = params.plan.size[0];
  args.num_reqs = shape.num_reqs;
  args.rows_per_tile = config.rows_per_tile;
  args.tokens_per_tile = config.tokens_per_tile;
  args.max_seqlen_q = params.max_seqlen_q;
  args.sliding_window = params.sliding_window;
  args.keys_per_split = config.keys_per_split;
  // The op has no bound on the context, but the buffer was sized with one: its capacity gives the
  // split bound of the attention launch. A list made for another bound is ignored by that launch.
  const int64_t capacity = (args.num_elems - kPlanHeaderElems) / kPlanItemElems;
  const int64_t tiles = int64_t{args.num_reqs} * config.tiles_per_request;
  const int64_t fitting = tiles > 0 ? capacity / tiles : 1;
  const int32_t asked = params.num_splits == 0
                            ? kAttentionMaxSplits
                            : clamp_i32(params.num_splits, 1, kAttentionMaxSplits);
  args.num_splits = static_cast<int32_t>(fitting < 1 ? 1 : (fitting < asked ? fitting : asked));
  if (!is_aligned16(args.plan)) {
    return make_error(StatusCode::kInvalidArgument, kWhere,
                      ": plan: expected a 16-byte aligned buffer, got another address");
  }
  plan_kernel<<<1, kThreads, 0, stream_of(context)>>>(args);
  return check_launch(kWhere);
}

Status prepare_attention_plan() {
  return touch_kernel("diffulex::attention_plan", plan_kernel);
}

}  // namespace diffulex::cuda
