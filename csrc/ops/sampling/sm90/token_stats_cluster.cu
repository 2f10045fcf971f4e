// SPDX-License-Identifier: Apache-2.0
//
// token_stats in one launch: a cluster of CTAs shares a row, each warp turns chunks into records
// that it sends to the shared memory of the first CTA, which finishes the row. For a top-k every
// CTA gets the records, and sends the first one what may belong to it of the chunks it holds. How
// many CTAs share a row decides who computes a record, never what is in it.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/sampling/sm90/token_stats_cluster.h"
#include "ops/sampling/token_stats/chunks.cuh"
#include "ops/sampling/token_stats/finish.cuh"
#include "ops/sampling/token_stats/row.cuh"
#include "ops/sampling/token_stats_config.h"
#include "ops/shared/cuda/cluster.cuh"
#include "ops/shared/cuda/device_facts.h"
#include "ops/shared/cuda/hopper.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/shared_memory.cuh"

namespace diffulex::cuda::sm90 {
namespace {

constexpr const char* kWhere = "diffulex::token_stats";
constexpr int kStages = kStatsStages;
/// What a CTA may have.
constexpr size_t kMostSharedBytes = 227 << 10;
/// Chunks whose records fit the shared memory of a CTA: rows of up to 524,288 columns.
constexpr int64_t kMaxChunks = 256;
constexpr auto kColumns = static_cast<int32_t>(kStatsChunkColumns);

/// What follows the chunk buffers and the records in the shared memory.
struct alignas(16) ClusterShared final {
  uint64_t arrived;      // barrier: the records of the row are complete
  uint64_t collected;    // barrier of CTA 0: the list of the top-k is complete
  uint32_t best_so_far;  // of this CTA
};
/// What of a record is sent.
constexpr uint32_t kSentBytes = offsetof(ChunkRecord, reserved);

/// Bytes of the buffers of one chunk per warp.
template <typename T>
__host__ __device__ constexpr size_t stage_bytes(int num_warps) {
  return sizeof(T) * kStatsChunkColumns * static_cast<size_t>(num_warps);
}

/// Bytes of all chunk buffers, which come first: a sector of 32 bytes must not be cut in two. After
/// the sums, the first stage is scratch of the warps and the top-k state follows it.
template <typename T>
__host__ __device__ constexpr size_t buffer_bytes(int num_warps) {
  const size_t stages = stage_bytes<T>(num_warps) * kStages;
  const size_t finish = stage_bytes<T>(num_warps) + sizeof(FinishShared);
  return stages > finish ? stages : finish;
}

/// With a top-k by a cluster, whose CTAs look through the chunks that they hold, the state of the
/// top-k has its own place at the end.
template <typename T>
size_t shared_bytes(int64_t num_chunks, int num_warps, bool is_spread) {
  return buffer_bytes<T>(num_warps) + static_cast<size_t>(num_chunks) * sizeof(ChunkRecord) +
         sizeof(ClusterShared) + (is_spread ? sizeof(FinishShared) : 0);
}

/// Sends a record, held alike by all lanes, to the shared memory of the first CTAs of the cluster.
__device__ __forceinline__ void send_record(const ChunkRecord& record, ChunkRecord* place,
                                            uint64_t* arrived, int32_t num_targets) {
  static_assert(kSentBytes == 48, "three 16-byte stores");
  const uint32_t lane = threadIdx.x & 31;
  if (static_cast<int32_t>(lane) < num_targets) {
    const auto* words = reinterpret_cast<const float*>(&record);
    const uint32_t target = ptx::cluster_address(ptx::smem_address(place), lane);
    const uint32_t barrier = ptx::cluster_address(ptx::smem_address(arrived), lane);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const float part[4] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
      ptx::cluster_store4_async(target + 16 * i, part, barrier);
    }
  }
}

/// The list of CTA 0, for every CTA of the cluster.
class SpreadTopKList final {
 public:
  __device__ __forceinline__ SpreadTopKList(FinishShared& shared, uint64_t* collected)
      : count_(ptx::cluster_pointer(&shared.count, 0)),
        list_(ptx::cluster_address(ptx::smem_address(shared.list), 0)),
        barrier_(ptx::cluster_address(ptx::smem_address(collected), 0)) {}

  __device__ __forceinline__ void append(uint64_t entry) {
    const int32_t place = atomicAdd(count_, 1);
    if (place < kTopKListEntries) {
      ptx::cluster_store8_async(list_ + static_cast<uint32_t>(place) * 8, entry, barrier_);
      sent_bytes_ += 8;
    }
  }
  /// After the last entry of the warp.
  __device__ __forceinline__ void close() const {
    const uint32_t bytes = __reduce_add_sync(kFullWarp, sent_bytes_);
    if ((threadIdx.x & 31) == 0) {
      ptx::cluster_arrive_expect(barrier_, bytes);
    }
  }

 private:
  int32_t* count_;
  uint32_t list_;
  uint32_t barrier_;
  uint32_t sent_bytes_ = 0;  // of this lane
};

/// Warps of a CTA at most.
template <typename T>
inline constexpr int kMaxWarps = sizeof(T) == 4 ? 16 : 24;

template <typename T, bool kCapped>
__global__ void __launch_bounds__(32 * kMaxWarps<T>, 1)
    cluster_kernel(const __grid_constant__ TokenStatsArgs args, int32_t cluster_size) {
  extern __shared__ __align__(128) uint8_t buffers[];
  const auto num_chunks = static_cast<int32_t>(args.num_chunks);
  const auto num_warps = static_cast<int32_t>(blockDim.x >> 5);
  auto* records = reinterpret_cast<ChunkRecord*>(buffers + buffer_bytes<T>(num_warps));
  auto& shared = *reinterpret_cast<ClusterShared*>(records + num_chunks);
  const bool is_shared = cluster_size > 1;
  const bool is_spread = is_shared && args.top_k > 0;
  auto& finish = is_spread ? *reinterpret_cast<FinishShared*>(&shared + 1)
                           : *reinterpret_cast<FinishShared*>(buffers + stage_bytes<T>(num_warps));
  const uint32_t arrived = ptx::smem_address(&shared.arrived);
  if (threadIdx.x == 0) {
    shared.best_so_far = 0;
  }
  if (is_spread) {
    clear_top_k(finish);
  }
  if (is_shared) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(arrived, 1);
      ptx::mbarrier_init(ptx::smem_address(&shared.collected),
                         static_cast<uint32_t>(cluster_size * num_warps));
      ptx::mbarrier_init_fence();
      ptx::mbarrier_arrive_expect(arrived, static_cast<uint32_t>(num_chunks) * kSentBytes);
    }
    // A CTA must have begun before another sends to it; the wait comes after the first chunk.
    __syncwarp();
    if (is_spread) {
      ptx::cluster_arrive();
    } else {
      ptx::cluster_arrive_relaxed();
    }
  }
  const int64_t row = ptx::cluster_index();
  const auto rank = static_cast<int32_t>(ptx::cluster_rank());
  const auto warp = static_cast<int32_t>(threadIdx.x >> 5);
  __syncthreads();
  pdl_wait();
  const T* source = source_row<T>(args, row);
  if (source == nullptr) {  // for the whole cluster
    if (rank == 0 && threadIdx.x < 32) {
      write_empty(args, row, 0);
    }
    return;
  }
  const auto chunk_buffer = [&](int32_t round) {
    const int32_t stage = round % kStages;
    return LaneChunk<T>{reinterpret_cast<T*>(buffers) + (stage * num_warps + warp) * kColumns};
  };
  // From the end, where the slow chunks are (the tail, excluded ids), with the order of the warps
  // reversed in every round: the first warp, which gets the slowest chunk, gets the fewest.
  const int32_t slot = rank * num_warps + warp;
  const int32_t step = cluster_size * num_warps;
  const auto chunk_of = [&](int32_t round) {  // negative past the last one
    return num_chunks - 1 - round * step - (round % 2 == 0 ? slot : step - 1 - slot);
  };
  const auto start = [&](int32_t round) {
    const int32_t chunk = chunk_of(round);
    if (chunk >= 0) {
      start_chunk(args, source, chunk * kColumns, chunk_buffer(round));
    }
    ptx::cp_async_commit();
  };
  const RowInputs inputs = row_inputs(args, row);
#pragma unroll 1
  for (int32_t round = 0; round < kStages; ++round) {
    start(round);
  }
  RowTransform transform = row_transform(args, inputs);
  if constexpr (!kCapped) {
    transform.softcap = 0.0F;  // which the compiler now knows: code that does not run costs too
  }
  const Exclusion exclusion = row_exclusion(args, inputs, transform);
  bool has_waited = !is_shared;
  for (int32_t round = 0;; ++round) {
    const int32_t chunk = chunk_of(round);
    if (chunk < 0) {
      break;
    }
    ptx::cp_async_wait<kStages - 1>();
    const ChunkRecord record =
        chunk_record<T, kCapped>(args, transform, exclusion, source, chunk * kColumns,
                                 chunk_buffer(round), &shared.best_so_far);
    start(round + kStages);
    if (!is_shared) {
      if ((threadIdx.x & 31) == 0) {
        records[chunk] = record;
      }
      continue;
    }
    if (!has_waited) {
      ptx::cluster_wait();
      has_waited = true;
    }
    send_record(record, &records[chunk], &shared.arrived, is_spread ? cluster_size : 1);
  }
  if (!has_waited) {
    ptx::cluster_wait();
  }
  if (is_shared) {
    if (rank != 0 && !is_spread) {
      return;
    }
    ptx::mbarrier_wait_cluster(arrived, 0);
  }
  __syncthreads();  // the chunk buffers may be used again
  if (is_spread) {
    const uint32_t threshold = top_k_threshold(args, records);
    const float least = least_key(threshold);
    SpreadTopKList list(finish, &shared.collected);
    for (int32_t round = 0; chunk_of(round) >= 0; ++round) {
      const int32_t chunk = chunk_of(round);
      if (!reaches(records[chunk].best_key, least)) {
        continue;
      }
      if (chunk_of(kStages) >= 0) {  // the warp had more chunks than it holds
        start(round);
        ptx::cp_async_wait<0>();
      }
      append_chunk(args, exclusion, chunk * kColumns, least, chunk_buffer(round), list);
    }
    if (slot == 0 && threadIdx.x == 0) {
      append_penalised(args, source, transform, exclusion, threshold, list);
    }
    list.close();
    __syncwarp();                   // the barrier wants whole warps
    ptx::cluster_arrive_relaxed();  // CTA 0 stays until the others have done with its memory
    if (rank != 0) {
      return;
    }
    if (threadIdx.x == 0) {
      finish.threshold = threshold;
    }
  } else if (args.top_k > 0) {
    begin_top_k(args, records, finish);
  }
  pdl_launch_dependents();
  finish_row(args, source, transform, exclusion, row, records, finish, [&] {
    if (is_spread) {
      __syncwarp();
      ptx::cluster_wait();
      ptx::mbarrier_wait_cluster(ptx::smem_address(&shared.collected), 0);
    } else {
      collect_top_k(args, source, transform, exclusion, records, chunk_buffer(0), finish);
    }
  });
}

template <typename T, bool kCapped>
Status prepare_kernel(int32_t device_index) {
  return allow_shared_memory<cluster_kernel<T, kCapped>>(kWhere, device_index, kMostSharedBytes);
}

template <typename T, bool kCapped>
Status launch(const TokenStatsArgs& args, const ExecContext& context) {
  const StatsCluster shape =
      stats_cluster(args.num_rows, args.num_chunks, args.top_k > 0, kMaxWarps<T>, stage_bytes<T>(1),
                    device_processors(context.device_index));
  DIFFULEX_RETURN_IF_ERROR((prepare_kernel<T, kCapped>(context.device_index)));
  const auto cluster = static_cast<unsigned>(shape.ctas);
  const LaunchShape launch{
      static_cast<unsigned>(args.num_rows) * cluster, static_cast<unsigned>(32 * shape.warps),
      shared_bytes<T>(args.num_chunks, shape.warps, cluster > 1 && args.top_k > 0),
      stream_of(context), cluster};
  return cuda_status(kWhere,
                     launch_dependent(cluster_kernel<T, kCapped>, launch, true, args, shape.ctas));
}

}  // namespace

bool has_token_stats(int64_t num_chunks, const ExecContext& context) {
  return num_chunks <= kMaxChunks && is_hopper_device(context.device_index);
}

Status token_stats(const TokenStatsArgs& args, DType dtype, const ExecContext& context) {
  return dispatch_dtype(kWhere, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return args.softcap > 0.0F ? launch<T, true>(args, context) : launch<T, false>(args, context);
  });
}

Status prepare_token_stats() {
  int32_t device_index = 0;
  DIFFULEX_RETURN_IF_ERROR(cuda_status(kWhere, cudaGetDevice(&device_index)));
  if (!is_hopper_device(device_index)) {
    return Status::ok_status();
  }
  return for_each_dtype(kWhere, [&](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR((prepare_kernel<T, false>(device_index)));
    return prepare_kernel<T, true>(device_index);
  });
}

}  // namespace diffulex::cuda::sm90
