// SPDX-License-Identifier: Apache-2.0
//
// advance_decode: one CTA per request around the row function of row.h. State and
// window live in shared memory meanwhile, because lane 0 walks them position by position.
#include <cstdint>

#include "ops/advance/canvas_row.h"
#include "ops/advance/check.h"
#include "ops/advance/dual_row.h"
#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/launch.cuh"

namespace diffulex::cuda {
namespace {

constexpr int32_t kThreads = 128;

struct CtaTeam {
  __device__ int32_t lane() const { return static_cast<int32_t>(threadIdx.x); }
  __device__ int32_t size() const { return kThreads; }
  __device__ void sync() const { __syncthreads(); }
};

static_assert(sizeof(DecodeRequest) % sizeof(uint64_t) == 0);
constexpr int32_t kRequestWords = sizeof(DecodeRequest) / sizeof(uint64_t);
/// What a window and its writes may take: a CTA has 48 KiB without asking the driver for more, and
/// keeps the request, the shift and the marks there too.
constexpr size_t kMaxScratchBytes =
    48 * 1024 - sizeof(DecodeRequest) - (1 + kNumMarks) * sizeof(int32_t);

template <typename Decode>
__global__ void __launch_bounds__(kThreads, 1) advance_kernel(AdvanceArgs args) {
  extern __shared__ int32_t scratch_words[];
  __shared__ uint64_t request_words[kRequestWords];
  __shared__ int32_t shift;
  __shared__ int32_t marks[kNumMarks];
  const int32_t r = static_cast<int32_t>(blockIdx.x);
  const int32_t num_rows = args.block_size * args.buffer_size;
  const CtaTeam team;
  int32_t* window = scratch_words;
  auto* stored_request = reinterpret_cast<uint64_t*>(args.requests + r);
  int32_t* stored_window = args.windows + int64_t{r} * window_len(num_rows);
  for (int32_t i = team.lane(); i < kRequestWords; i += kThreads) {
    request_words[i] = stored_request[i];
  }
  for (int32_t i = team.lane(); i < window_len(num_rows); i += kThreads) {
    window[i] = stored_window[i];
  }
  __syncthreads();
  const RowScratch scratch{reinterpret_cast<DecodeRequest*>(request_words), window,
                           window + window_len(num_rows), &shift, marks};
  advance_row<Decode>(args, r, scratch, team);
  if (args.is_entry) {
    return;
  }
  team.sync();
  for (int32_t i = team.lane(); i < kRequestWords; i += kThreads) {
    stored_request[i] = request_words[i];
  }
  for (int32_t i = team.lane(); i < window_len(num_rows); i += kThreads) {
    stored_window[i] = window[i];
  }
}

}  // namespace

Status advance_decode(const AdvanceDecodeParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::advance_decode";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  const AdvanceArgs args = make_advance_args(params);
  const int32_t num_rows = args.block_size * args.buffer_size;
  const size_t shared_bytes =
      static_cast<size_t>(window_len(num_rows) + num_rows) * sizeof(int32_t);
  if (shared_bytes > kMaxScratchBytes) {
    constexpr size_t kMaxRows =
        (kMaxScratchBytes - window_len(0) * sizeof(int32_t)) / (2 * sizeof(int32_t));
    return make_error(StatusCode::kUnsupported, kWhere, ": layout: expected at most ", kMaxRows,
                      " positions in flight per request on cuda, got ", num_rows);
  }
  const auto num_reqs = static_cast<unsigned>(params.num_reqs);
  auto kernel = advance_kernel<BufferDecode>;
  if (args.plan.seed_row != nullptr) {
    kernel = advance_kernel<DualCacheDecode>;
  } else if (args.plan.blk_prev_argmax != nullptr) {
    kernel = advance_kernel<CanvasDecode>;
  }
  kernel<<<num_reqs, kThreads, shared_bytes, stream_of(context)>>>(args);
  return check_launch(kWhere);
}

Status prepare_advance_decode(const ExecContext& /*context*/) {
  constexpr const char* kWhere = "diffulex::advance_decode";
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, advance_kernel<BufferDecode>));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, advance_kernel<CanvasDecode>));
  return touch_kernel(kWhere, advance_kernel<DualCacheDecode>);
}

}  // namespace diffulex::cuda
