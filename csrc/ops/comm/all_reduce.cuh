// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sums over ranks through each other's memory, one row per CTA at a time.
//
// Epoch e writes to place e % 3 of the buffers. While it waits, a rank clears place (e - 1) % 3,
// which it has read: a peer writes there in epoch e + 2, after it got what this rank sends in e +
// 1, which follows the clearing. All bookkeeping is in device memory, so that launches may be
// captured.
//
// No rank waits for a CTA that cannot run: CTA b waits only for the CTAs b of the other ranks, and
// begins when CTAs of lower numbers, for which the same holds, have left room for it.

#include <algorithm>
#include <type_traits>

#include "ops/comm/all_reduce.h"

namespace diffulex::cuda {

/// The part of a buffer that this sum uses, on any rank.
__device__ __forceinline__ char* epoch_of(const AllReduceArgs& args, int rank, uint64_t epoch) {
  return args.buffers[rank] + static_cast<int64_t>(epoch % kNumEpochs) * args.epoch_bytes;
}

/// Among the others, as rank `owner` counts them.
__device__ __forceinline__ int64_t place_of(int rank, int owner) {
  return rank < owner ? rank : rank - 1;
}

/// Makes the place of the previous sum ready for the one after the next.
__device__ __forceinline__ void clear_previous(const AllReduceArgs& args, uint64_t epoch) {
  const uint64_t place = (epoch + kNumEpochs - 1) % kNumEpochs;
  const int64_t used = state_word(args.state, CollectiveState::kUsed)[place];
  auto* vecs = reinterpret_cast<uint4*>(epoch_of(args, args.rank, place));
  const uint4 blank{kUnwritten, kUnwritten, kUnwritten, kUnwritten};
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < used / static_cast<int64_t>(sizeof(uint4)); i += step) {
    vecs[i] = blank;
  }
}

/// Advances the state to the next sum, once every CTA has read it.
__device__ __forceinline__ void advance_epoch(const AllReduceArgs& args, uint64_t epoch) {
  if (threadIdx.x == 0 && take_ticket(state_word(args.state, CollectiveState::kTicket), epoch)) {
    state_word(args.state, CollectiveState::kUsed)[epoch % kNumEpochs] = args.used_bytes;
    *state_word(args.state, CollectiveState::kEpoch) = static_cast<int64_t>(epoch + 1);
  }
}

/// The pieces of one row that a thread has.
template <typename T, int kWarps, int kHeld>
struct HeldRow final {
  using End = RowEnd<T, kWarps, kHeld>;
  Piece<T> pieces[kHeld];

  /// Reads a row of x.
  __device__ __forceinline__ void load(const AllReduceArgs& args, int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * args.output.width;
#pragma unroll
    for (int piece = 0; piece < kHeld; ++piece) {
      if (End::column(piece) < args.output.width) {
        pieces[piece].load(x + End::column(piece));
        pieces[piece].make_sendable();
      }
    }
  }

  /// Sends it to a row of another rank.
  __device__ __forceinline__ void send(const AllReduceArgs& args, char* target) const {
#pragma unroll
    for (int piece = 0; piece < kHeld; ++piece) {
      if (End::column(piece) < args.output.width) {
        pieces[piece].send(reinterpret_cast<T*>(target) + End::column(piece));
      }
    }
  }
};

/// values <- the sum of the parts of a row in rank order; those of others lie `stride` bytes apart,
/// from `places` on.
template <typename T, int kWarps, int kHeld, int kMaxWorld>
__device__ __forceinline__ void receive_parts(const AllReduceArgs& args, const char* places,
                                              int64_t stride, const HeldRow<T, kWarps, kHeld>& own,
                                              float (&values)[kHeld][kElems], Patience* patience) {
  using End = RowEnd<T, kWarps, kHeld>;
  // With two ranks all pieces are looked for before the first is waited for.
  constexpr int kBatch = kMaxWorld == 2 && End::kHoldsRow ? kHeld : 1;
#pragma unroll
  for (int base = 0; base < kHeld; base += kBatch) {
    Piece<T> parts[kBatch][kMaxWorld];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t column = End::column(base + i);
#pragma unroll
      for (int peer = 0; peer < kMaxWorld; ++peer) {
        if (column >= args.output.width || peer >= args.world) {
          continue;
        }
        const char* place = places + place_of(peer, args.rank) * stride + column * sizeof(T);
        if (peer == args.rank) {
          parts[i][peer] = own.pieces[base + i];
        } else {
          parts[i][peer].look(place);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t column = End::column(base + i);
#pragma unroll
      for (int peer = 0; peer < kMaxWorld; ++peer) {
        if (column >= args.output.width || peer >= args.world) {
          continue;
        }
        if (peer != args.rank) {
          const char* place = places + place_of(peer, args.rank) * stride + column * sizeof(T);
          parts[i][peer].await(place, peer, patience);
        }
        parts[i][peer].add_to(peer == 0, values[base + i]);
      }
      if (column < args.output.width) {
        make_sum_sendable(values[base + i]);
      }
    }
  }
}

template <typename T, int kWarps, int kHeld, int kMaxWorld>
__global__ void __launch_bounds__(32 * kWarps)
    one_shot_kernel(const __grid_constant__ AllReduceArgs args) {
  using End = RowEnd<T, kWarps, kHeld>;
  __shared__ float scratch[kWarps];
  __shared__ uint64_t shared_epoch;
  const int64_t row_bytes = args.output.width * static_cast<int64_t>(sizeof(T));
  const int64_t part_bytes = args.num_rows * row_bytes;
  End end(args.output);
  pdl_launch_dependents();
  pdl_wait();
  int64_t row = blockIdx.x;
  HeldRow<T, kWarps, kHeld> own;
  own.load(args, row);
  const uint64_t epoch = read_epoch(state_word(args.state, CollectiveState::kEpoch), &shared_epoch);
  Patience patience(args.state, epoch);
  const auto send = [&](int64_t which, const auto& held) {
    for (int peer = 0; peer < args.world; ++peer) {
      if (peer != args.rank) {
        held.send(args, epoch_of(args, peer, epoch) + place_of(args.rank, peer) * part_bytes +
                            which * row_bytes);
      }
    }
  };
  send(row, own);
  end.begin(row);
  clear_previous(args, epoch);
  advance_epoch(args, epoch);
  const char* places = epoch_of(args, args.rank, epoch);
  while (row < args.num_rows) {
    const int64_t next = row + gridDim.x;
    HeldRow<T, kWarps, End::kHoldsRow ? kHeld : 1> ahead;
    if constexpr (End::kHoldsRow) {
      // The next row is on its way while this one is waited for.
      if (next < args.num_rows) {
        ahead.load(args, next);
        send(next, ahead);
      }
    }
    float values[kHeld][kElems];
    receive_parts<T, kWarps, kHeld, kMaxWorld>(args, places + row * row_bytes, part_bytes, own,
                                               values, &patience);
    end.finish(row, values, scratch);
    if (next < args.num_rows) {
      __syncthreads();  // the scratch is used again
      end.begin(next);
      if constexpr (End::kHoldsRow) {
        own = ahead;
      } else {
        own.load(args, next);
        send(next, own);
      }
    }
    row = next;
  }
}

/// Sends the rows of a CTA that other ranks own to these.
template <typename T, int kWarps, int kHeld>
__device__ __forceinline__ void send_to_owners(const AllReduceArgs& args, uint64_t epoch) {
  const int64_t row_bytes = args.output.width * static_cast<int64_t>(sizeof(T));
  for (int64_t row = blockIdx.x; row < args.num_rows; row += gridDim.x) {
    const auto owner = static_cast<int>(row / args.owned_rows);
    if (owner != args.rank) {
      HeldRow<T, kWarps, kHeld> held;
      held.load(args, row);
      held.send(args, epoch_of(args, owner, epoch) +
                          (place_of(args.rank, owner) * args.owned_rows + row % args.owned_rows) *
                              row_bytes);
    }
  }
}

/// Sends the sums of a row to all others from `place` of an epoch on, or waits for those of its
/// owner.
template <typename T, int kWarps, int kHeld>
__device__ __forceinline__ void pass_sums(const AllReduceArgs& args, uint64_t epoch, int owner,
                                          int64_t place, float (&values)[kHeld][kElems],
                                          Patience* patience) {
  using End = RowEnd<T, kWarps, kHeld>;
#pragma unroll
  for (int piece = 0; piece < kHeld; ++piece) {
    if (End::column(piece) >= args.output.width) {
      continue;
    }
    const int64_t at = place + End::column(piece) * static_cast<int64_t>(sizeof(float));
    Piece<float> sum;
    if (owner == args.rank) {
      memcpy(sum.vecs, values[piece], sizeof(sum.vecs));
      for (int peer = 0; peer < args.world; ++peer) {
        if (peer != args.rank) {
          sum.send(epoch_of(args, peer, epoch) + at);
        }
      }
    } else {
      const char* source = epoch_of(args, args.rank, epoch) + at;
      sum.look(source);
      sum.await(source, owner, patience);
      sum.add_to(true, values[piece]);
    }
  }
}

/// A row's owner gets the parts, sums them and sends the sum; every rank ends the row.
template <typename T, int kWarps, int kHeld>
__global__ void __launch_bounds__(32 * kWarps)
    two_shot_kernel(const __grid_constant__ AllReduceArgs args) {
  using End = RowEnd<T, kWarps, kHeld>;
  __shared__ float scratch[kWarps];
  __shared__ uint64_t shared_epoch;
  const int64_t row_bytes = args.output.width * static_cast<int64_t>(sizeof(T));
  const int64_t sum_bytes = args.output.width * static_cast<int64_t>(sizeof(float));
  const int64_t part_bytes = args.owned_rows * row_bytes;
  End end(args.output);
  pdl_launch_dependents();
  pdl_wait();
  const uint64_t epoch = read_epoch(state_word(args.state, CollectiveState::kEpoch), &shared_epoch);
  Patience patience(args.state, epoch);
  send_to_owners<T, kWarps, kHeld>(args, epoch);  // all, before the first sum is waited for
  clear_previous(args, epoch);
  advance_epoch(args, epoch);
  const char* own_epoch = epoch_of(args, args.rank, epoch);
  // Own rows first: others wait for them.
  for (int turn = 0; turn < 2; ++turn) {
    for (int64_t row = blockIdx.x; row < args.num_rows; row += gridDim.x) {
      const auto owner = static_cast<int>(row / args.owned_rows);
      if ((owner == args.rank) != (turn == 0)) {
        continue;
      }
      end.begin(row);
      float values[kHeld][kElems];
      if (turn == 0) {
        HeldRow<T, kWarps, kHeld> own;
        own.load(args, row);
        receive_parts<T, kWarps, kHeld, kMaxRanks>(args,
                                                   own_epoch + row % args.owned_rows * row_bytes,
                                                   part_bytes, own, values, &patience);
      }
      pass_sums<T, kWarps, kHeld>(
          args, epoch, owner, (args.world - 1) * part_bytes + row * sum_bytes, values, &patience);
      end.finish(row, values, scratch);
      __syncthreads();  // the scratch is used again
    }
  }
}

template <typename T, int kWarps, int kHeld>
auto all_reduce_kernel(int32_t world, bool is_two_shot) {
  using Kernel = void (*)(AllReduceArgs);
  return is_two_shot  ? Kernel{two_shot_kernel<T, kWarps, kHeld>}
         : world == 2 ? Kernel{one_shot_kernel<T, kWarps, kHeld, 2>}
                      : Kernel{one_shot_kernel<T, kWarps, kHeld, kMaxRanks>};
}

template <typename T>
cudaError_t launch_all_reduce(const AllReduceArgs& args, int32_t max_ctas,
                              const ExecContext& context) {
  int processors = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, context.device_index);
  if (error != cudaSuccess) {
    return error;
  }
  return dispatch_width(args.output.width, [&](auto warps, auto held) {
    constexpr int kWarps = decltype(warps)::value;
    constexpr int kRowsPerProcessor = 16 / kWarps;  // where the device holds as many warps
    const int64_t most = max_ctas > 0 ? max_ctas : processors * kRowsPerProcessor;
    const auto blocks = static_cast<unsigned>(std::min(args.num_rows, most));
    return launch_dependent(
        all_reduce_kernel<T, kWarps, decltype(held)::value>(args.world, args.is_two_shot),
        LaunchShape{blocks, 32 * kWarps, 0, stream_of(context)}, can_read_ahead(context), args);
  });
}

template <typename T>
Status touch_all_reduce() {
  constexpr const char* kWhere = "diffulex::all_reduce";
  for (const int32_t width : {1024, 4096, 16384}) {
    for (const int variant : {0, 1, 2}) {
      const cudaError_t error = dispatch_width(width, [&](auto warps, auto held) {
        cudaFuncAttributes attributes;
        return cudaFuncGetAttributes(
            &attributes, all_reduce_kernel<T, decltype(warps)::value, decltype(held)::value>(
                             variant == 0 ? 2 : kMaxRanks, variant == 2));
      });
      DIFFULEX_RETURN_IF_ERROR(cuda_status(kWhere, error));
    }
  }
  return Status::ok_status();
}

}  // namespace diffulex::cuda
