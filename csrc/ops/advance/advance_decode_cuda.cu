// SPDX-License-Identifier: Apache-2.0
//
// advance_decode: one CTA per request around the row functions of row.h. State and
// window live in shared memory meanwhile, because lane 0 walks them position by position. Packed
// rows take two launches: the second one adds up what the first has counted.
#include <cstdint>

#include "ops/advance/canvas_row.h"
#include "ops/advance/check.h"
#include "ops/advance/dual_row.h"
#include "ops/advance/packed_row.h"
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
  /// Lanes of the team whose value is true; all of them call it.
  __device__ int32_t count(bool value) const { return __syncthreads_count(value ? 1 : 0); }
};

static_assert(sizeof(DecodeRequest) % sizeof(uint64_t) == 0);
constexpr int32_t kRequestWords = sizeof(DecodeRequest) / sizeof(uint64_t);

/// What a CTA keeps in shared memory beside the window and its writes.
struct CtaMemory {
  uint64_t request_words[kRequestWords];
  int32_t shift;
  int32_t marks[kNumMarks];
};

/// What these may take: a CTA has 48 KiB without asking the driver for more.
constexpr size_t kMaxScratchBytes = 48 * 1024 - sizeof(CtaMemory) - sizeof(PackedSums);

/// The request of this CTA in shared memory; `scratch_words` has room for window and writes.
__device__ RowScratch load_request(const AdvanceArgs& args, CtaMemory* memory,
                                   int32_t* scratch_words) {
  const auto r = static_cast<int32_t>(blockIdx.x);
  const int32_t len = window_len(args.block_size * args.buffer_size);
  const auto* stored_request = reinterpret_cast<const uint64_t*>(args.requests + r);
  const int32_t* stored_window = args.windows + int64_t{r} * len;
  const CtaTeam team;
  for (int32_t i = team.lane(); i < kRequestWords; i += kThreads) {
    memory->request_words[i] = stored_request[i];
  }
  for (int32_t i = team.lane(); i < len; i += kThreads) {
    scratch_words[i] = stored_window[i];
  }
  team.sync();
  return RowScratch{reinterpret_cast<DecodeRequest*>(memory->request_words), scratch_words,
                    scratch_words + len, &memory->shift, memory->marks};
}

/// Stores what the rules have changed; an entry changes nothing.
__device__ void store_request(const AdvanceArgs& args, const CtaMemory& memory,
                              const RowScratch& scratch) {
  if (args.is_entry) {
    return;
  }
  const auto r = static_cast<int32_t>(blockIdx.x);
  const int32_t len = window_len(args.block_size * args.buffer_size);
  auto* stored_request = reinterpret_cast<uint64_t*>(args.requests + r);
  int32_t* stored_window = args.windows + int64_t{r} * len;
  const CtaTeam team;
  team.sync();
  for (int32_t i = team.lane(); i < kRequestWords; i += kThreads) {
    stored_request[i] = memory.request_words[i];
  }
  for (int32_t i = team.lane(); i < len; i += kThreads) {
    stored_window[i] = scratch.window[i];
  }
}

template <typename Decode>
__global__ void __launch_bounds__(kThreads, 1) advance_kernel(AdvanceArgs args) {
  extern __shared__ int32_t scratch_words[];
  __shared__ CtaMemory memory;
  const RowScratch scratch = load_request(args, &memory, scratch_words);
  advance_row<Decode>(args, static_cast<int32_t>(blockIdx.x), scratch, CtaTeam{});
  store_request(args, memory, scratch);
}

__global__ void __launch_bounds__(kThreads, 1) count_packed_kernel(AdvanceArgs args) {
  extern __shared__ int32_t scratch_words[];
  __shared__ CtaMemory memory;
  const RowScratch scratch = load_request(args, &memory, scratch_words);
  count_packed_row(args, static_cast<int32_t>(blockIdx.x), scratch, CtaTeam{});
  store_request(args, memory, scratch);
}

/// Every CTA adds up the counts of all requests: a few hundred at most.
__device__ void add_counts(const AdvanceArgs& args, PackedSums* sums) {
  const auto r = static_cast<int32_t>(blockIdx.x);
  const auto num_reqs = static_cast<int32_t>(gridDim.x);
  const CtaTeam team;
  if (team.lane() == 0) {
    *sums = PackedSums{};
  }
  team.sync();
  for (int32_t other = team.lane(); other < num_reqs; other += kThreads) {
    const int32_t num_rows = args.num_rows[other];
    const int32_t num_logits_rows = args.num_logits_rows[other];
    atomicAdd(&sums->num_rows, num_rows);
    atomicAdd(&sums->num_logits_rows, num_logits_rows);
    if (other < r) {
      atomicAdd(&sums->rows_before, num_rows);
      atomicAdd(&sums->logits_rows_before, num_logits_rows);
    }
  }
  team.sync();
}

__global__ void __launch_bounds__(kThreads, 1) write_packed_kernel(AdvanceArgs args) {
  extern __shared__ int32_t scratch_words[];
  __shared__ CtaMemory memory;
  __shared__ PackedSums sums;
  const RowScratch scratch = load_request(args, &memory, scratch_words);
  add_counts(args, &sums);
  write_packed_row(args, static_cast<int32_t>(blockIdx.x), scratch, sums, CtaTeam{});
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
  if (params.packs_rows) {
    count_packed_kernel<<<num_reqs, kThreads, shared_bytes, stream_of(context)>>>(args);
    DIFFULEX_RETURN_IF_ERROR(check_launch(kWhere));
    write_packed_kernel<<<num_reqs, kThreads, shared_bytes, stream_of(context)>>>(args);
    return check_launch(kWhere);
  }
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
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, count_packed_kernel));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, write_packed_kernel));
  return touch_kernel(kWhere, advance_kernel<DualCacheDecode>);
}

}  // namespace diffulex::cuda
