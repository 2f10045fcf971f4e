// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs one AttentionCase on the CPU and on the device.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/device_mirror.h"
#include "diffulex/ops/attention.h"
#include "ops/attention_case.h"

namespace diffulex::test {

[[nodiscard]] inline AttentionShape shape_of(const BlockAttentionParams& params) {
  AttentionShape shape;
  shape.num_reqs = static_cast<int32_t>(params.page_table.size[0]);
  shape.num_q_heads = static_cast<int32_t>(params.q.size[1]);
  shape.num_kv_heads = static_cast<int32_t>(params.k.size[1]);
  shape.head_dim = static_cast<int32_t>(params.q.size[2]);
  shape.max_seqlen_q = params.max_seqlen_q;
  shape.max_context_len = params.max_context_len;
  shape.num_splits = params.num_splits;
  return shape;
}

/// The same parameters over device memory.
[[nodiscard]] inline BlockAttentionParams upload(const BlockAttentionParams& host,
                                                 DeviceMirror* mirror) {
  BlockAttentionParams device = host;
  for (TensorRef BlockAttentionParams::* member :
       {&BlockAttentionParams::q, &BlockAttentionParams::k, &BlockAttentionParams::v,
        &BlockAttentionParams::k_cache, &BlockAttentionParams::v_cache,
        &BlockAttentionParams::page_table, &BlockAttentionParams::cu_seqlens_q,
        &BlockAttentionParams::context_lens, &BlockAttentionParams::valid_slices,
        &BlockAttentionParams::mask_kinds, &BlockAttentionParams::prefix_lens,
        &BlockAttentionParams::padded_prefix_lens, &BlockAttentionParams::q_starts,
        &BlockAttentionParams::out, &BlockAttentionParams::lse, &BlockAttentionParams::codes,
        &BlockAttentionParams::codes_scale}) {
    device.*member = mirror->upload(host.*member);
  }
  return device;
}

/// Outputs of one run.
struct AttentionOutputs {
  std::vector<uint8_t> out;
  std::vector<float> lse;

  [[nodiscard]] bool equals(const AttentionOutputs& other) const {
    return out == other.out && lse.size() == other.lse.size() &&
           std::memcmp(lse.data(), other.lse.data(), lse.size() * sizeof(float)) == 0;
  }
};

struct RunOptions {
  int32_t num_splits = 0;
  bool batch_invariant = false;
  int64_t shift = 0;
  int32_t shared_memory_limit = 0;
};

/// Runs on the device and leaves the results in the case's own outputs too.
inline void run_on_device(AttentionCase* problem, const RunOptions& options,
                          AttentionOutputs* outputs) {
  problem->clear_outputs();
  BlockAttentionParams host = problem->params();
  host.num_splits = options.num_splits;
  DeviceMirror mirror(options.shift);
  BlockAttentionParams device = upload(host, &mirror);
  const AttentionShape shape = shape_of(host);
  DeviceContext context(attention_workspace_bytes(shape, Device::kCuda));
  context.get().batch_invariant = options.batch_invariant;
  context.get().shared_memory_limit = options.shared_memory_limit;
  const Status status = block_attention(device, context.get());
  ASSERT_TRUE(status.ok()) << status.message();
  mirror.download();
  outputs->out = problem->out().bytes();
  outputs->lse = problem->lse();
}

inline void run_on_cpu(AttentionCase* problem) {
  problem->clear_outputs();
  BlockAttentionParams params = problem->params();
  const Status status = block_attention(params, ExecContext());
  ASSERT_TRUE(status.ok()) << status.message();
}

/// Largest |device - cpu| over its tolerance.
[[nodiscard]] inline double worst_difference(const AttentionCase& problem, const TestTensor& want,
                                             const std::vector<float>& want_lse, DType dtype) {
  const double floor = dtype == DType::kBF16 ? 2e-2 : 3e-3;
  const double relative = dtype == DType::kBF16 ? 1.0 / 128 : 1.0 / 1024;
  double worst = 0.0;
  for (int64_t i = 0; i < want.elements(); ++i) {
    const double difference = std::abs(problem.out().get_offset(i) - want.get_offset(i));
    const double tolerance = floor + relative * std::abs(want.get_offset(i));
    worst = std::isfinite(difference) ? std::max(worst, difference / tolerance) : kInf;
  }
  for (size_t i = 0; i < want_lse.size(); ++i) {
    if (std::isinf(want_lse[i])) {
      worst = problem.lse()[i] == want_lse[i] ? worst : kInf;
      continue;
    }
    const double difference = std::abs(problem.lse()[i] - want_lse[i]);
    worst = std::isfinite(difference)
                ? std::max(worst, difference / (1e-3 * (1.0 + std::abs(want_lse[i]) / 16)))
                : kInf;
  }
  return worst;
}

/// Request whose rows fit the engine's preconditions, of any kind.
[[nodiscard]] inline CaseRequest random_request(std::mt19937_64* random, int64_t block_size,
                                                int64_t page_size, int64_t max_context) {
  CaseRequest request;
  request.kind = uniform(random, 0, 4);
  request.num_rows = pick(random, {0, 1, block_size, 2 * block_size, uniform(random, 1, 80)});
  request.num_valid =
      uniform(random, 0, 3) == 0 ? uniform(random, 0, request.num_rows) : request.num_rows;
  request.context = pick(
      random, {0, uniform(random, 0, page_size), 3 * page_size, uniform(random, 0, max_context)});
  if (request.kind == 1 || request.kind == 3) {
    request.context = request.context / block_size * block_size;
  }
  request.start = request.context;
  if (request.kind == 4) {
    request.start = std::max<int64_t>(0, request.context - request.num_rows);
  }
  request.prefix = uniform(random, 0, request.context + request.num_valid);
  request.padded_prefix =
      request.prefix + uniform(random, 0, request.context + request.num_valid - request.prefix);
  request.hole = uniform(random, 0, 3) == 0;
  request.anchored = uniform(random, 0, 3) == 0;
  return request;
}

}  // namespace diffulex::test
