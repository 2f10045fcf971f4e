// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/attention_plan.h"

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/common/attention_checks.h"
#include "kernels/common/attention_config.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/data_checks.h"
#include "kernels/cpu/parallel.h"

namespace diffulex::cpu {
namespace {

constexpr const char* kOp = "attention_plan";

struct WeightedItem {
  PlanItem item;
  int32_t keys = 0;  // of one split
};

Status validate(const AttentionPlanParams& params) {
  DIFFULEX_RETURN_IF_ERROR(check_offsets(kOp, "cu_seqlens_q", params.cu_seqlens_q, INT32_MAX));
  for (int64_t index = 0; index < params.context_lens.size[0]; ++index) {
    const int64_t context_len = index_at(params.context_lens, index);
    if (context_len < 0) {
      return data_error(kOp, "context_lens", index, "a value >= 0", context_len);
    }
    const int64_t rows =
        index_at(params.cu_seqlens_q, index + 1) - index_at(params.cu_seqlens_q, index);
    if (rows > params.max_seqlen_q) {
      return data_error(kOp, "cu_seqlens_q", index,
                        "at most max_seqlen_q " + std::to_string(params.max_seqlen_q) + " rows",
                        rows);
    }
  }
  return {};
}

/// The split bound the buffer was sized for, at most the one asked for.
int32_t split_bound(const AttentionPlanParams& params, int32_t tiles_per_request) {
  const int64_t tiles = params.context_lens.size[0] * tiles_per_request;
  if (tiles == 0) {
    return 1;
  }
  const int64_t fitting = (params.plan.size[0] - kPlanHeaderElems) / kPlanItemElems / tiles;
  const int64_t asked = params.num_splits == 0 ? kAttentionMaxSplits : params.num_splits;
  return static_cast<int32_t>(
      std::clamp<int64_t>(std::min(fitting, asked), 1, kAttentionMaxSplits));
}

}  // namespace

Status attention_plan(const AttentionPlanParams& params, const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(validate(params));
  const AttentionConfig config = attention_config(attention_shape(params), context.batch_invariant);
  const int32_t max_splits = split_bound(params, config.tiles_per_request);
  thread_local std::vector<WeightedItem> items;
  items.clear();
  for (int32_t request = 0; request < params.context_lens.size[0]; ++request) {
    const auto begin = static_cast<int32_t>(index_at(params.cu_seqlens_q, request));
    const auto end = static_cast<int32_t>(index_at(params.cu_seqlens_q, request + 1));
    const int32_t num_valid =
        num_valid_rows(begin, end, static_cast<int32_t>(index_at(params.valid_slices, request)));
    const int32_t keys = plan_keys(
        static_cast<int32_t>(index_at(params.context_lens, request)), num_valid,
        static_cast<int32_t>(index_at(params.mask_kinds, request)), params.sliding_window);
    const int32_t splits = request_splits(keys, max_splits, config.keys_per_split);
    for (int32_t tile = 0; tile * config.tokens_per_tile < num_valid; ++tile) {
      for (int32_t split = 0; split < splits; ++split) {
        items.push_back({PlanItem{request, tile, split, splits}, keys / splits});
      }
    }
  }
  std::stable_sort(items.begin(), items.end(),
                   [](const WeightedItem& a, const WeightedItem& b) { return a.keys > b.keys; });
  int32_t* plan = params.plan.as<int32_t>();
  std::fill_n(plan, params.plan.size[0], -1);
  const int32_t header[kPlanHeaderElems] = {static_cast<int32_t>(items.size()),
                                            config.rows_per_tile, max_splits, 0};
  std::copy_n(header, kPlanHeaderElems, plan);
  int32_t* next = plan + kPlanHeaderElems;
  for (const WeightedItem& weighted : items) {
    const PlanItem& item = weighted.item;
    for (const int32_t value : {item.request, item.tile, item.split, item.splits}) {
      *next++ = value;
    }
  }
  return {};
}

}  // namespace diffulex::cpu
