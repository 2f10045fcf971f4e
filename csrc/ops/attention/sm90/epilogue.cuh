// SPDX-License-Identifier: Apache-2.0
#pragma once

// Results of a warpgroup: final rows, or fp32 partials of a split in the workspace, which the last
// cluster of a unit or a second kernel adds up. Partials travel through L2: the multiprocessor-to-
// multiprocessor path of a cluster has a fraction of its bandwidth.

#include <cstdint>

#include "ops/attention/args.cuh"
#include "ops/attention/sm90/mainloop.cuh"
#include "ops/quant/code_rows.cuh"
#include "ops/shared/cuda/cluster.cuh"
#include "ops/shared/cuda/mbarrier.cuh"

namespace diffulex::cuda::sm90 {

/// First of the two rows of a thread inside the row tile; the other is 8 below.
template <typename Traits>
__device__ __forceinline__ int thread_row(int group, unsigned thread) {
  return group % Traits::kRowGroups * 64 + (thread >> 5) % 4 * 16 + (thread & 31) / 4;
}

/// That of this thread.
template <typename Traits>
__device__ __forceinline__ int thread_row(int group) {
  return thread_row<Traits>(group, threadIdx.x);
}

/// Transposes a 4x4 matrix of words spread over four neighbouring lanes.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
  const bool is_odd = (threadIdx.x & 1) != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(kFullWarp, is_odd ? words[i] : words[i + 1], 1);
    (is_odd ? words[i] : words[i + 1]) = got;
  }
  const bool is_high = (threadIdx.x & 2) != 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(kFullWarp, is_high ? words[i] : words[i + 2], 2);
    (is_high ? words[i] : words[i + 2]) = got;
  }
}

/// Writes the pieces that this lane has of a row, or nothing where it is not real, and the codes of
/// the row: kLanes neighbouring lanes have all of its head. `target` is the first piece, `column`
/// its column in the row of all heads.
template <typename Traits, int kLanes, int kHeld>
__device__ __forceinline__ void store_with_codes(
    const AttentionArgs& args, const typename Traits::Rows& rows, int64_t row, int64_t column,
    bool is_real, typename Traits::Element* target,
    const CodeSource<typename Traits::Element> (&held)[kHeld]) {
  using Piece = CodeSource<typename Traits::Element>;
  if (is_real && args.out != nullptr) {
#pragma unroll
    for (int piece = 0; piece < kHeld; ++piece) {
      *reinterpret_cast<Piece*>(target + piece * kLanes * kCodePiece) = held[piece];
    }
  }
  write_group<E4m3Code, kLanes>(rows, row, static_cast<int32_t>(column), is_real, held);
}

/// The values that words hold.
template <typename T>
__device__ __forceinline__ CodeSource<T> piece_of(const uint32_t (&words)[4]) {
  const uint4 piece = make_uint4(words[0], words[1], words[2], words[3]);
  return *reinterpret_cast<const CodeSource<T>*>(&piece);
}

/// Writes out, codes and lse of the rows of this thread, 16 bytes a lane. A row without keys has a
/// sum of exactly 0, one with a visible NaN has a NaN.
template <typename Traits>
__device__ __forceinline__ void store_final(const AttentionArgs& args, const TileSetup& setup,
                                            int group, const Accumulators<Traits>& result,
                                            const typename Traits::Rows& rows) {
  using T = typename Traits::Element;
  const int part = group / Traits::kRowGroups;
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread_row<Traits>(group) + half * 8;
    const int32_t token = args.by_group.divide(row);
    const bool is_real = token < setup.num_tokens;
    const int64_t head = setup.work.kv_head * args.group + row - token * args.group;
    const int64_t packed = setup.first_token + token;
    const float sum = result.softmax.sum[half];
    const float inverse = sum != 0.0F ? 1.0F / sum : 0.0F;
    T* target = static_cast<T*>(args.out) + packed * args.out_stride[0] +
                head * args.out_stride[1] + part * Traits::kValueDims + lane * 8;
    [[maybe_unused]] CodeSource<T> held[Traits::kValueDims / 32];
#pragma unroll
    for (int first = 0; first < Traits::kValueDims / 8; first += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = pack_pair<T>(result.values[first + i][2 * half] * inverse,
                                result.values[first + i][2 * half + 1] * inverse);
      }
      transpose_quad(words);
      if constexpr (Traits::kWritesCodes) {
        held[first / 4] = piece_of<T>(words);
      } else if (is_real) {
        *reinterpret_cast<uint4*>(target + first * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    if constexpr (Traits::kWritesCodes) {
      store_with_codes<Traits, 4>(args, rows, packed, head * Traits::kHeadDim + lane * 8, is_real,
                                  target, held);
    }
    if (args.lse != nullptr && part == 0 && lane == 0 && is_real) {
      args.lse[packed * args.lse_stride[0] + head * args.lse_stride[1]] =
          // Fused in every kernel, so that all have the same bits.
          sum != 0.0F ? fmaf(result.softmax.maximum[half], result.softmax.factor, log2f(sum)) * kLn2
                      : -INFINITY;
    }
  }
}

/// Where the partial of a split lies: a slot per (request, row tile, KV head, split) of M x D
/// floats and M statistics. Values lie in the order of the threads that hold them, 16 bytes a lane:
/// item i is row half i % 2 of the column groups 4 * (i / 2) ... + 3.
template <typename Traits>
struct PartialSlot final {
  static constexpr int kItems = Traits::kValueDims / 16;
  static constexpr int kFloats = Traits::kTileRows * Traits::kHeadDim;

  float4* values;  // [item][2][consumer thread]
  float2* stats;   // [row]: maximum (base 2), sum

  __device__ __forceinline__ static PartialSlot of(const AttentionArgs& args,
                                                   const AttentionWork& work, int32_t split) {
    const int64_t index = (unit_index(args, work) * args.num_splits) + split;
    return PartialSlot{reinterpret_cast<float4*>(args.partial_out + index * kFloats),
                       args.partial_stats + index * Traits::kTileRows};
  }
  __device__ __forceinline__ static int64_t unit_index(const AttentionArgs& args,
                                                       const AttentionWork& work) {
    return (int64_t{work.request} * args.tiles_per_request + work.tile) * args.num_kv_heads +
           work.kv_head;
  }
  /// Slots of later splits follow at this distance.
  static constexpr int kValueStride = kFloats / 4;
};

/// Writes the unnormalised rows of one split. `thread` counts the consumer threads.
template <typename Traits>
__device__ __forceinline__ void store_partial(const AttentionArgs& args, const TileSetup& setup,
                                              int group, const Accumulators<Traits>& result) {
  using Slot = PartialSlot<Traits>;
  const int thread = static_cast<int>(threadIdx.x) - 128;
  const Slot slot = Slot::of(args, setup.work, setup.work.split);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread_row<Traits>(group) + half * 8;
    if (args.by_group.divide(row) >= setup.num_tokens) {
      continue;
    }
    if (group < Traits::kRowGroups && (threadIdx.x & 3) == 0) {
      slot.stats[row] = make_float2(result.softmax.maximum[half] * result.softmax.factor,
                                    result.softmax.sum[half]);
    }
#pragma unroll
    for (int first = 0; first < Traits::kValueDims / 8; first += 2) {
      const int item = first / 4 * 2 + half;
      slot.values[(item * 2 + first % 4 / 2) * Traits::kConsumerThreads + thread] =
          make_float4(result.values[first][2 * half], result.values[first][2 * half + 1],
                      result.values[first + 1][2 * half], result.values[first + 1][2 * half + 1]);
    }
  }
}

/// A unit whose splits are added up.
struct SplitUnit final {
  AttentionWork work;
  int32_t splits;
  int32_t first_token;  // packed row of the tile's first token
  int32_t num_tokens;
};

/// The largest of `maximum` and the statistics of a row from split `first` on.
__device__ __forceinline__ float row_maximum(const float2* stats, int64_t stride, int32_t first,
                                             int32_t splits, float maximum) {
#pragma unroll 8
  for (int32_t split = first; split < splits; ++split) {
    maximum = fmaxf(maximum, __ldcg(stats + split * stride).x);
  }
  return maximum;
}

/// What a thread adds up: items from `item` on, as the thread `holder` held them.
struct ReducePlace final {
  int item;
  int holder;
};

/// Codes need all items of a row in neighbouring lanes: kShare calls that have one of kShare items
/// each divide the threads that held them instead.
template <int kShare>
__device__ __forceinline__ ReducePlace reduce_place(int first_item, int thread) {
  constexpr int kLanes = 4 * kShare;  // of a row
  const int share = first_item / 2 % kShare;
  return {first_item + 2 * (thread % kLanes / 4 - share),
          thread / 32 * 32 + share * (32 / kShare) + thread % 32 / kLanes * 4 + thread % 4};
}

/// Adds up kMine items of a unit, `stride` (even, unless kMine is 1) apart, in split order, and
/// writes out, codes and lse. The order of the sums depends on the splits alone. Reads past L1,
/// which may hold lines older than what another multiprocessor wrote. `thread` counts the consumer
/// threads.
template <typename Traits, int kMine>
__device__ __forceinline__ void reduce_items(const AttentionArgs& args, const SplitUnit& unit,
                                             int first_item, int stride, int thread,
                                             const typename Traits::Rows& rows) {
  using T = typename Traits::Element;
  using Slot = PartialSlot<Traits>;
  constexpr int kBatch = 8 / kMine;  // splits whose loads are in flight at a time
  const int group = thread / 128;
  const int part = group / Traits::kRowGroups;
  constexpr int kShare = Traits::kWritesCodes ? 4 / kMine : 1;
  unsigned held_by = threadIdx.x;
  if constexpr (kShare > 1) {
    const ReducePlace place = reduce_place<kShare>(first_item, thread);
    first_item = place.item;
    thread = place.holder;
    held_by = static_cast<unsigned>(thread);
    stride = 2 * kShare;
  }
  const int row = thread_row<Traits>(group, held_by) + first_item % 2 * 8;
  const int32_t token = args.by_group.divide(row);
  const bool is_real = token < unit.num_tokens;
  float total[kMine][8] = {};
  float sum = 0.0F;
  float maximum = -INFINITY;
  if (is_real) {
    const Slot slot = Slot::of(args, unit.work, 0);
    const float2* stats = slot.stats + row;
    const float4* values = slot.values + first_item * 2 * Traits::kConsumerThreads + thread;
    float2 stat[kBatch];
    float4 value[kBatch][kMine][2];
    const auto load = [&](int32_t base) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        stat[i] = make_float2(-INFINITY, 0.0F);
        if (base + i < unit.splits) {
          stat[i] = __ldcg(stats + (base + i) * Traits::kTileRows);
          const float4* source = values + int64_t{base + i} * Slot::kValueStride;
#pragma unroll
          for (int mine = 0; mine < kMine; ++mine) {
            const int offset = mine * stride * 2 * Traits::kConsumerThreads;
            value[i][mine][0] = __ldcg(source + offset);
            value[i][mine][1] = __ldcg(source + offset + Traits::kConsumerThreads);
          }
        }
      }
    };
    load(0);
    maximum = row_maximum(stats, Traits::kTileRows, kBatch, unit.splits, maximum);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      maximum = fmaxf(maximum, stat[i].x);
    }
#pragma unroll 1
    for (int32_t base = 0; base < unit.splits; base += kBatch) {
      if (base > 0) {
        load(base);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        // The values of a split without keys may be of an earlier call. Its sum is exactly 0; that
        // of one with a visible NaN is NaN, which must reach the result.
        if (stat[i].y != 0.0F) {
          const float weight = ptx::exp2_approx(stat[i].x - maximum);
          sum = fmaf(stat[i].y, weight, sum);
#pragma unroll
          for (int mine = 0; mine < kMine; ++mine) {
#pragma unroll
            for (int piece = 0; piece < 2; ++piece) {
              const float4& found = value[i][mine][piece];
              total[mine][4 * piece] = fmaf(found.x, weight, total[mine][4 * piece]);
              total[mine][4 * piece + 1] = fmaf(found.y, weight, total[mine][4 * piece + 1]);
              total[mine][4 * piece + 2] = fmaf(found.z, weight, total[mine][4 * piece + 2]);
              total[mine][4 * piece + 3] = fmaf(found.w, weight, total[mine][4 * piece + 3]);
            }
          }
        }
      }
    }
  }
  const float inverse = sum != 0.0F ? 1.0F / sum : 0.0F;
  const int lane = threadIdx.x & 3;
  const int64_t head = unit.work.kv_head * args.group + row - token * args.group;
  const int64_t packed = unit.first_token + token;
  T* const target = static_cast<T*>(args.out) + packed * args.out_stride[0] +
                    head * args.out_stride[1] + part * Traits::kValueDims + lane * 8;
  [[maybe_unused]] CodeSource<T> held[kMine];
#pragma unroll
  for (int mine = 0; mine < kMine; ++mine) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = pack_pair<T>(total[mine][2 * i] * inverse, total[mine][2 * i + 1] * inverse);
    }
    transpose_quad(words);
    if constexpr (Traits::kWritesCodes) {
      held[mine] = piece_of<T>(words);
    } else if (is_real) {
      const int column = (first_item + mine * stride) / 2 * 32;
      *reinterpret_cast<uint4*>(target + column) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  if constexpr (Traits::kWritesCodes) {
    const int column = first_item / 2 * 32;
    store_with_codes<Traits, 4 * kShare>(args, rows, packed,
                                         head * Traits::kHeadDim + column + lane * 8, is_real,
                                         target + column, held);
  }
  if (args.lse != nullptr && part == 0 && lane == 0 && first_item < 2 && is_real) {
    args.lse[packed * args.lse_stride[0] + head * args.lse_stride[1]] =
        sum != 0.0F ? (maximum + log2f(sum)) * kLn2 : -INFINITY;
  }
}

/// Adds up the splits of a unit, every CTA of the cluster its share of the items.
template <typename Traits>
__device__ __forceinline__ void reduce_unit(const AttentionArgs& args, const TileSetup& setup,
                                            int thread, const typename Traits::Rows& rows) {
  constexpr int kItems = PartialSlot<Traits>::kItems;
  const SplitUnit unit{setup.work, setup.view.splits, setup.first_token, setup.num_tokens};
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int cluster = args.cluster_size;
  if (cluster == 2) {
#pragma unroll 1
    for (int item = rank; item < kItems; item += 8) {
      reduce_items<Traits, (kItems > 4 ? 4 : 2)>(args, unit, item, 2, thread, rows);
    }
  } else if (cluster == 4 && kItems > 4) {
#pragma unroll 1
    for (int item = rank; item < kItems; item += 8) {
      reduce_items<Traits, 2>(args, unit, item, 4, thread, rows);
    }
  } else {
#pragma unroll 1
    for (int item = rank; item < kItems; item += cluster) {
      reduce_items<Traits, 1>(args, unit, item, 0, thread, rows);
    }
  }
}

/// Counts an arrival at `counter` and tells whether it was the last of `expected`. The workspace
/// comes with any content: a counter counts only while its upper bits are the tag of this launch, a
/// random number whose lowest byte is 0, and the last arrival clears it for the next replay. Called
/// by one thread; what its CTA saw before is seen by who arrives later.
__device__ __forceinline__ bool arrive_last(uint64_t* counter, uint64_t tag, int32_t expected) {
  using Word = unsigned long long;
  Word* const word = reinterpret_cast<Word*>(counter);
  __threadfence();
  Word seen = __ldcg(word);
  Word arrived;
  while (true) {
    arrived = (seen ^ tag) < 256 ? (seen & 255) + 1 : 1;
    const Word found = atomicCAS(word, seen, tag | arrived);
    if (found == seen) {
      break;
    }
    seen = found;
  }
  if (arrived != static_cast<Word>(expected)) {
    return false;
  }
  __threadfence();
  *word = 0;
  return true;
}

}  // namespace diffulex::cuda::sm90
