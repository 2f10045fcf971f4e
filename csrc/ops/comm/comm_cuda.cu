// SPDX-License-Identifier: Apache-2.0
//
// Launches of the exchanges between ranks, and their twin in one memory.
#include <algorithm>
#include <type_traits>

#include "ops/comm/all_reduce.h"
#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/row_layout.cuh"

namespace diffulex::cuda {
namespace {

Status check_aligned(const char* where, const TensorRef& tensor, const char* name) {
  if (!tensor.present() || is_aligned16(tensor.data)) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument, where, ": ", name,
                    ": expected memory aligned to 16 bytes, got an odd address");
}

/// What becomes of the sums of an op.
template <typename Params>
RowOutput row_output(const Params& params, const TensorRef& out) {
  RowOutput output{};
  output.residual = params.residual.present() ? params.residual.data : nullptr;
  output.weight = params.weight.present() ? params.weight.data : nullptr;
  output.out = out.data;
  output.width = static_cast<int32_t>(out.last());
  output.eps = params.eps;
  output.weight_offset = params.weight_offset;
  output.is_weight_float = params.weight.dtype == DType::kF32;
  return output;
}

Status run_all_reduce(const char* where, const AllReduceParams& params,
                      const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(where));
  DIFFULEX_RETURN_IF_ERROR(check_aligned(where, params.x, "x"));
  DIFFULEX_RETURN_IF_ERROR(check_aligned(where, params.residual, "residual"));
  DIFFULEX_RETURN_IF_ERROR(check_aligned(where, params.weight, "weight"));
  AllReduceArgs args{};
  args.output = row_output(params, params.x);
  args.x = params.x.data;
  args.world = static_cast<int32_t>(params.peers.size());
  for (int32_t peer = 0; peer < args.world; ++peer) {
    args.buffers[peer] = reinterpret_cast<char*>(params.peers[static_cast<size_t>(peer)]);
  }
  args.state = params.state.as<int64_t>();
  args.num_rows = num_rows(params.x);
  args.owned_rows = owned_rows(args.num_rows, args.world);
  args.epoch_bytes = params.epoch_bytes;
  args.used_bytes = collective_bytes(params.algorithm, args.world, args.num_rows, params.x.last(),
                                     dtype_bytes(params.x.dtype));
  args.rank = params.rank;
  args.is_two_shot = params.algorithm == CollectiveAlgorithm::kTwoShot;
  return dispatch_dtype(where, params.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return cuda_status(where, launch_all_reduce<T>(args, params.max_ctas, context));
  });
}

struct GatherArgs {
  const uint32_t* part;      // [num_words]
  uint32_t* out;             // [world, num_words]
  char* buffers[kMaxRanks];  // of the ranks, where gathers begin
  int64_t* state;
  int64_t num_words;
  int32_t world;
  int32_t rank;
};

constexpr int kGatherThreads = 256;
constexpr int64_t kMaxRecordWords = kMaxRecordBytes / static_cast<int64_t>(sizeof(uint32_t));

/// Every word travels with the number of its exchange, in one store: it has arrived when that is
/// there. The buffers alternate: a peer is at most one exchange ahead of what this rank reads.
__global__ void __launch_bounds__(kGatherThreads)
    gather_records_kernel(const __grid_constant__ GatherArgs args) {
  __shared__ uint64_t shared_epoch;
  pdl_launch_dependents();
  pdl_wait();
  const uint64_t epoch =
      read_epoch(state_word(args.state, CollectiveState::kGatherEpoch), &shared_epoch);
  Patience patience(args.state, epoch);
  const auto number = static_cast<uint32_t>(epoch + 1);
  const auto place = [&](int rank, int source, int64_t word) {
    const int64_t buffer = static_cast<int64_t>(epoch % kNumGathers) * args.world + source;
    return args.buffers[rank] +
           (buffer * kMaxRecordWords + word) * static_cast<int64_t>(sizeof(uint64_t));
  };
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGatherThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGatherThreads;
  for (int64_t word = first; word < args.num_words; word += step) {
    const uint32_t value = args.part[word];
    args.out[args.rank * args.num_words + word] = value;
    for (int peer = 0; peer < args.world; ++peer) {
      if (peer != args.rank) {
        store_peer(place(peer, args.rank, word), static_cast<uint64_t>(number) << 32 | value);
      }
    }
  }
  if (threadIdx.x == 0 &&
      take_ticket(state_word(args.state, CollectiveState::kGatherTicket), epoch)) {
    *state_word(args.state, CollectiveState::kGatherEpoch) = static_cast<int64_t>(epoch + 1);
  }
  for (int64_t word = first; word < args.num_words; word += step) {
    for (int peer = 0; peer < args.world; ++peer) {
      if (peer == args.rank) {
        continue;
      }
      const char* source = place(args.rank, peer, word);
      uint64_t got = load_peer_word(source);
      while (got >> 32 != number && patience.lasts(peer)) {
        got = load_peer_word(source);
      }
      args.out[peer * args.num_words + word] = static_cast<uint32_t>(got);
    }
  }
}

/// The twin: parts [world, T, H] in one memory.
template <typename T, int kWarps, int kHeld>
__global__ void __launch_bounds__(32 * kWarps)
    sum_kernel(const __grid_constant__ RowOutput output, const T* parts, int64_t num_rows,
               int32_t world) {
  using End = RowEnd<T, kWarps, kHeld>;
  __shared__ float scratch[kWarps];
  const int64_t row = blockIdx.x;
  End end(output);
  end.begin(row);
  float values[kHeld][kElems];
#pragma unroll
  for (int piece = 0; piece < kHeld; ++piece) {
    const int32_t column = End::column(piece);
    if (column < output.width) {
      for (int peer = 0; peer < world; ++peer) {
        Piece<T> part;
        part.load(parts + (peer * num_rows + row) * output.width + column);
        part.make_sendable();
        part.add_to(peer == 0, values[piece]);
      }
      make_sum_sendable(values[piece]);
    }
  }
  end.finish(row, values, scratch);
}

template <typename T, int kWarps, int kHeld>
Status touch_sum(const char* where) {
  return touch_kernel(where, sum_kernel<T, kWarps, kHeld>);
}

}  // namespace

Status all_reduce(const AllReduceParams& params, const ExecContext& context) {
  return run_all_reduce("diffulex::all_reduce", params, context);
}

Status all_reduce_add_rms_norm(const AllReduceParams& params, const ExecContext& context) {
  return run_all_reduce("diffulex::all_reduce_add_rms_norm", params, context);
}

Status gather_records(const GatherRecordsParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::gather_records";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  GatherArgs args{};
  args.part = params.part.as<const uint32_t>();
  args.out = params.out.as<uint32_t>();
  args.world = static_cast<int32_t>(params.peers.size());
  for (int32_t peer = 0; peer < args.world; ++peer) {
    args.buffers[peer] = reinterpret_cast<char*>(params.peers[static_cast<size_t>(peer)]) +
                         kNumEpochs * params.epoch_bytes;
  }
  args.state = params.state.as<int64_t>();
  args.num_words = params.part.numel();
  args.rank = params.rank;
  const auto blocks = static_cast<unsigned>(ceil_div(args.num_words, kGatherThreads));
  return cuda_status(kWhere,
                     launch_dependent(gather_records_kernel,
                                      LaunchShape{blocks, kGatherThreads, 0, stream_of(context)},
                                      can_read_ahead(context), args));
}

Status sum_add_rms_norm(const SumAddRmsNormParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::sum_add_rms_norm";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  DIFFULEX_RETURN_IF_ERROR(check_aligned(kWhere, params.parts, "parts"));
  DIFFULEX_RETURN_IF_ERROR(check_aligned(kWhere, params.residual, "residual"));
  DIFFULEX_RETURN_IF_ERROR(check_aligned(kWhere, params.out, "out"));
  DIFFULEX_RETURN_IF_ERROR(check_aligned(kWhere, params.weight, "weight"));
  const RowOutput output = row_output(params, params.out);
  const int64_t rows = params.parts.size[1];
  const auto world = static_cast<int32_t>(params.parts.size[0]);
  return dispatch_dtype(kWhere, params.parts.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const cudaError_t error = dispatch_width(output.width, [&](auto warps, auto held) {
      constexpr int kWarps = decltype(warps)::value;
      sum_kernel<T, kWarps, decltype(held)::value>
          <<<static_cast<unsigned>(rows), 32 * kWarps, 0, stream_of(context)>>>(
              output, params.parts.as<const T>(), rows, world);
      return cudaGetLastError();
    });
    return cuda_status(kWhere, error);
  });
}

Status prepare_comm(const ExecContext& /*context*/) {
  constexpr const char* kWhere = "diffulex::all_reduce";
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, gather_records_kernel));
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR((touch_sum<T, 1, 4>(kWhere)));
    DIFFULEX_RETURN_IF_ERROR((touch_sum<T, 8, 2>(kWhere)));
    DIFFULEX_RETURN_IF_ERROR((touch_sum<T, 16, 4>(kWhere)));
    return touch_all_reduce<T>();
  });
}

}  // namespace diffulex::cuda
