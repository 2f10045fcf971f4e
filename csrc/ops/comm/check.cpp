// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "ops/checks.h"
#include "ops/comm/config.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

constexpr int64_t kWidthUnit = 8;
constexpr int64_t kMaxWidth = 16384;

Status check_rows(const ArgumentCheck& check, const TensorRef& tensor) {
  DIFFULEX_RETURN_IF_ERROR(check.activation());
  DIFFULEX_RETURN_IF_ERROR(check.contiguous_from(0));
  const int64_t width = tensor.last();
  if (width < kWidthUnit || width > kMaxWidth || width % kWidthUnit != 0) {
    return check.error(StatusCode::kInvalidArgument,
                       "a last dimension that is a multiple of 8 up to 16384", shape_text(tensor));
  }
  return {};
}

Status check_weight(const char* op, const TensorRef& weight, const TensorRef& x) {
  if (!weight.present()) {
    return {};
  }
  const ArgumentCheck check(op, "weight", weight);
  return x.dtype == DType::kF32 ? check.matches({DType::kF32}, {x.last()})
                                : check.matches({x.dtype, DType::kF32}, {x.last()});
}

Status check_eps(const char* op, float eps) {
  return eps >= 0.0F ? Status() : scalar_error(op, "eps", "a value >= 0", eps);
}

Status check_group(const char* op, const TensorRef& state, const std::vector<int64_t>& peers,
                   int32_t rank) {
  const ArgumentCheck state_check(op, "state", state);
  DIFFULEX_RETURN_IF_ERROR(state_check.dense({DType::kI64}, {kCollectiveStateWords}));
  const auto world = static_cast<int64_t>(peers.size());
  if (world < 2 || world > kMaxRanks) {
    return scalar_error(op, "peers", "2 to 8 addresses", world);
  }
  if (std::any_of(peers.begin(), peers.end(), [](int64_t peer) { return peer % 16 != 0; }) ||
      std::find(peers.begin(), peers.end(), 0) != peers.end()) {
    return scalar_error(op, "peers", "addresses of peer_alloc or peer_open", "another one");
  }
  if (rank < 0 || rank >= world) {
    return scalar_error(op, "rank", "a place in peers", rank);
  }
  return {};
}

Status check_sum(const char* op, const AllReduceParams& params) {
  DIFFULEX_RETURN_IF_ERROR(check_rows(ArgumentCheck(op, "x", params.x), params.x));
  DIFFULEX_RETURN_IF_ERROR(check_group(op, params.state, params.peers, params.rank));
  if (params.algorithm != CollectiveAlgorithm::kOneShot &&
      params.algorithm != CollectiveAlgorithm::kTwoShot) {
    return scalar_error(op, "algorithm", "0 (one-shot) or 1 (two-shot)",
                        static_cast<int32_t>(params.algorithm));
  }
  const int64_t width = params.x.last();
  const int64_t need =
      collective_bytes(params.algorithm, static_cast<int32_t>(params.peers.size()),
                       params.x.numel() / width, width, dtype_bytes(params.x.dtype));
  if (params.epoch_bytes < need || params.epoch_bytes % 16 != 0) {
    return scalar_error(op, "epoch_bytes",
                        ("a multiple of 16, at least " + std::to_string(need)).c_str(),
                        params.epoch_bytes);
  }
  return params.max_ctas >= 0 ? Status()
                              : scalar_error(op, "max_ctas", "a value >= 0", params.max_ctas);
}

}  // namespace

Status check_all_reduce(const AllReduceParams& params) {
  return check_sum("all_reduce", params);
}

Status check_all_reduce_add_rms_norm(const AllReduceParams& params) {
  constexpr const char* kOp = "all_reduce_add_rms_norm";
  DIFFULEX_RETURN_IF_ERROR(check_sum(kOp, params));
  const ArgumentCheck check(kOp, "residual", params.residual);
  DIFFULEX_RETURN_IF_ERROR(check.dtype({params.x.dtype}));
  DIFFULEX_RETURN_IF_ERROR(check.same_shape("x", params.x));
  DIFFULEX_RETURN_IF_ERROR(check.contiguous_from(0));
  if (params.x.numel() > 0 && params.residual.data == params.x.data) {
    return check.error(StatusCode::kInvalidArgument, "memory of its own", "the memory of x");
  }
  DIFFULEX_RETURN_IF_ERROR(check_weight(kOp, params.weight, params.x));
  return check_eps(kOp, params.eps);
}

Status check_gather_records(const GatherRecordsParams& params) {
  constexpr const char* kOp = "gather_records";
  const ArgumentCheck part(kOp, "part", params.part);
  DIFFULEX_RETURN_IF_ERROR(part.dense({DType::kI32}, {kAnyExtent, kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(check_group(kOp, params.state, params.peers, params.rank));
  if (params.part.numel() * dtype_bytes(DType::kI32) > kMaxRecordBytes) {
    return part.error(StatusCode::kInvalidArgument, "at most 65536 bytes", shape_text(params.part));
  }
  if (params.epoch_bytes < 0 || params.epoch_bytes % 16 != 0) {
    return scalar_error(kOp, "epoch_bytes", "a multiple of 16", params.epoch_bytes);
  }
  return ArgumentCheck(kOp, "out", params.out)
      .dense({DType::kI32},
             {static_cast<int64_t>(params.peers.size()), params.part.size[0], params.part.size[1]});
}

Status check_sum_add_rms_norm(const SumAddRmsNormParams& params) {
  constexpr const char* kOp = "sum_add_rms_norm";
  const ArgumentCheck parts(kOp, "parts", params.parts);
  DIFFULEX_RETURN_IF_ERROR(check_rows(parts, params.parts));
  if (params.parts.rank != 3 || params.parts.size[0] < 1 || params.parts.size[0] > kMaxRanks) {
    return parts.error(StatusCode::kInvalidArgument, "[1 to 8, T, H]", shape_text(params.parts));
  }
  const int64_t num_rows = params.parts.size[1];
  const int64_t width = params.parts.size[2];
  const ArgumentCheck residual(kOp, "residual", params.residual);
  DIFFULEX_RETURN_IF_ERROR(residual.dense({params.parts.dtype}, {num_rows, width}));
  const ArgumentCheck out(kOp, "out", params.out);
  DIFFULEX_RETURN_IF_ERROR(out.dense({params.parts.dtype}, {num_rows, width}));
  if (params.out.numel() > 0 && params.residual.data == params.out.data) {
    return residual.error(StatusCode::kInvalidArgument, "memory of its own", "the memory of out");
  }
  DIFFULEX_RETURN_IF_ERROR(check_weight(kOp, params.weight, params.parts));
  return check_eps(kOp, params.eps);
}

}  // namespace diffulex
