// SPDX-License-Identifier: Apache-2.0
#include "core/strategy/merge_descriptors.h"

#include <algorithm>

namespace diffulex {

void init_merge(MergeDescriptors& merge, int32_t num_positions, int32_t top_k) {
  const auto count = static_cast<size_t>(num_positions);
  merge.is_valid.assign(count, 0);
  merge.ids.assign(count * static_cast<size_t>(top_k), 0);
  merge.probs.assign(count * static_cast<size_t>(top_k), 0.0F);
  merge.residual.assign(count, 0.0F);
}

void write_merge_rows(const Request& request, StepPlan& plan, int32_t req_idx) {
  const RequestStep& step = request.step;
  const MergeDescriptors& merge = request.merge;
  const auto row0 = static_cast<size_t>(plan.cu_seqlens_q()[static_cast<size_t>(req_idx)]);
  const auto top_k = static_cast<size_t>(plan.merge_top_k());
  plan.clear_merge_rows(static_cast<int32_t>(row0), step.num_rows);
  for (size_t i = 0; i < static_cast<size_t>(step.num_valid_rows); ++i) {
    const size_t position = static_cast<size_t>(step.first_pos) + i;
    if (merge.is_valid[position] == 0) {
      continue;
    }
    plan.merge_mask()[row0 + i] = 1;
    plan.merge_residual()[row0 + i] = merge.residual[position];
    for (size_t k = 0; k < top_k; ++k) {
      plan.merge_topk_ids()[(row0 + i) * top_k + k] = merge.ids[position * top_k + k];
      plan.merge_topk_probs()[(row0 + i) * top_k + k] = merge.probs[position * top_k + k];
    }
  }
}

void apply_merge(Request& request, const RequestOutput& result) {
  MergeDescriptors& merge = request.merge;
  const SamplerOutput& output = result.output;
  const auto width = static_cast<size_t>(output.block_size());
  const auto top_k = static_cast<size_t>(output.merge_top_k());
  const int32_t end = result.plan.first_block(result.req_idx + 1);
  for (int32_t blk = result.plan.first_block(result.req_idx); blk < end; ++blk) {
    const auto index = static_cast<size_t>(blk);
    const auto start = static_cast<size_t>(result.plan.blk_start()[index]);
    for (size_t rel = 0; rel < width; ++rel) {
      const size_t from = index * width + rel;
      const size_t to = start + rel;
      merge.is_valid[to] = output.merge_valid()[from];
      merge.residual[to] = output.merge_residual()[from];
      for (size_t k = 0; k < top_k; ++k) {
        merge.ids[to * top_k + k] = static_cast<int32_t>(output.merge_topk_ids()[from * top_k + k]);
        merge.probs[to * top_k + k] = output.merge_topk_probs()[from * top_k + k];
      }
    }
  }
}

void drop_merge(MergeDescriptors& merge, int32_t begin, int32_t end) {
  if (begin < end) {
    std::fill(merge.is_valid.begin() + begin, merge.is_valid.begin() + end, uint8_t{0});
  }
}

}  // namespace diffulex
