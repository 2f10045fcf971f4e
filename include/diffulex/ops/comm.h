// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// Most ranks of a group.
inline constexpr int32_t kMaxRanks = 8;
/// Elements of the state of a rank, int64: see CollectiveState.
inline constexpr int64_t kCollectiveStateWords = 16;
/// Most bytes that a rank hands to one gather_records.
inline constexpr int64_t kMaxRecordBytes = 64 << 10;

/// How a sum over ranks is formed.
enum class CollectiveAlgorithm : int32_t {
  kOneShot = 0,  // every rank sends its part to every other one, and each sums
  kTwoShot = 1,  // every row has an owner, who gets the parts and sends the sum
  kLibrary = 2,  // not by a kernel of this library
};

/// The algorithm for `num_bytes` of each of `world` ranks on one host. The same on every rank.
[[nodiscard]] DIFFULEX_API CollectiveAlgorithm collective_plan(int32_t world, int64_t num_bytes);
/// Bytes of one epoch in the buffer of a rank: enough for whatever collective_plan gives to a
/// kernel.
[[nodiscard]] DIFFULEX_API int64_t collective_epoch_bytes(int32_t world);
/// Bytes behind the epochs in the buffer of a rank, which gather_records uses.
[[nodiscard]] DIFFULEX_API int64_t collective_gather_bytes(int32_t world);

/// Words of the device array `state`, which belongs to one rank of one group. Zero at first but for
/// the two that its owner sets; the kernels do the rest.
enum class CollectiveState : int32_t {
  kEpoch = 0,          // sums so far
  kUsed = 1,           // 3 words: bytes that the last sum of each place has used
  kControl = 4,        // address of 4 int64 in host memory, see CollectiveControl; set by the owner
  kTimeout = 5,        // longest wait for another rank in ns, 0 = no limit; set by the owner
  kGatherEpoch = 6,    // gathers so far
  kTicket = 8,         // 4 words
  kGatherTicket = 12,  // 4 words
};

/// Words of the host memory that kernels look at while they wait, and write when one gives up.
enum class CollectiveControl : int32_t {
  kAbort = 0,   // not zero: waiting kernels leave, and what they return is void
  kStatus = 1,  // 1: a wait has timed out
  kPeer = 2,    // the rank that was waited for
  kEpoch = 3,   // and in which exchange
};

/// Sums x over the ranks, in fp32 and rank order. A 16-bit -0 counts as +0. Every rank makes the
/// same calls in the same order, on one stream, with the same shapes, dtypes and algorithms.
/// all_reduce:             x <- round(sum).
/// all_reduce_add_rms_norm: residual <- round(sum + residual); x <- norm of the unrounded sum.
struct AllReduceParams {
  TensorRef x;                 // [..., H] float, dense, H a multiple of 8 up to 16384
  TensorRef residual;          // like x, the same on all ranks; absent for all_reduce
  TensorRef weight;            // [H] dtype of x or float32; absent = 1
  TensorRef state;             // [kCollectiveStateWords] int64
  std::vector<int64_t> peers;  // [world] addresses of the buffers, of peer_alloc and peer_open
  int32_t rank = 0;            // whose own buffer is peers[rank]
  int64_t epoch_bytes = 0;     // of each of three epochs: collective_epoch_bytes
  CollectiveAlgorithm algorithm = CollectiveAlgorithm::kOneShot;
  int32_t max_ctas = 0;  // 0: what the device holds; ranks that share a device need a limit
  float eps = 1e-6F;     // >= 0
  float weight_offset = 0.0F;
};

/// out[q] <- part of rank q, for every rank q.
struct GatherRecordsParams {
  TensorRef part;              // [R, W] int32, dense, at most kMaxRecordBytes
  TensorRef out;               // [world, R, W] int32, dense
  TensorRef state;             // [kCollectiveStateWords] int64
  std::vector<int64_t> peers;  // the rest as in AllReduceParams
  int32_t rank = 0;
  int64_t epoch_bytes = 0;
};

/// What all_reduce_add_rms_norm returns, of parts in one memory: residual <- round(sum + residual),
/// out <- norm of the unrounded sum.
struct SumAddRmsNormParams {
  TensorRef parts;     // [P, T, H] float, dense, P up to kMaxRanks, H as above
  TensorRef residual;  // [T, H] dtype of parts
  TensorRef weight;    // [H] dtype of parts or float32; absent = 1
  TensorRef out;       // [T, H] dtype of parts
  float eps = 1e-6F;   // >= 0
  float weight_offset = 0.0F;
};

[[nodiscard]] DIFFULEX_API Status all_reduce(const AllReduceParams& params,
                                             const ExecContext& context);
[[nodiscard]] DIFFULEX_API Status all_reduce_add_rms_norm(const AllReduceParams& params,
                                                          const ExecContext& context);
[[nodiscard]] DIFFULEX_API Status gather_records(const GatherRecordsParams& params,
                                                 const ExecContext& context);
[[nodiscard]] DIFFULEX_API Status sum_add_rms_norm(const SumAddRmsNormParams& params,
                                                   const ExecContext& context);

/// A handle that another process of this host opens.
struct PeerHandle {
  unsigned char bytes[64] = {};
};

/// Device memory that other processes can open: three epochs, then the memory of gather_records.
[[nodiscard]] DIFFULEX_API Status peer_alloc(int32_t device, int64_t epoch_bytes,
                                             int64_t gather_bytes, void** memory);
[[nodiscard]] DIFFULEX_API Status peer_free(int32_t device, void* memory);
/// The handle of memory of peer_alloc.
[[nodiscard]] DIFFULEX_API Status peer_export(int32_t device, void* memory, PeerHandle* handle);
/// The memory of another process, as `device` of this one addresses it.
[[nodiscard]] DIFFULEX_API Status peer_open(int32_t device, const PeerHandle& handle,
                                            void** memory);
[[nodiscard]] DIFFULEX_API Status peer_close(int32_t device, void* memory);
}  // namespace diffulex
