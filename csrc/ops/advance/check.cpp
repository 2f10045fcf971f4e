// SPDX-License-Identifier: Apache-2.0
#include "ops/advance/check.h"

#include <string>
#include <vector>

#include "diffulex/core/arena.h"
#include "diffulex/core/decode_rules.h"
#include "ops/checks.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

constexpr const char* kOp = "advance_decode";

/// The memory of an arena with these arrays.
Status check_arena(const char* name, const TensorRef& arena,
                   const std::vector<ArenaField>& fields) {
  const ArgumentCheck argument(kOp, name, arena);
  DIFFULEX_RETURN_IF_ERROR(argument.dense({DType::kU8}, {kAnyExtent}));
  const auto needed = static_cast<int64_t>(Arena::arena_bytes(fields));
  if (arena.size[0] < needed) {
    return argument.error(StatusCode::kInvalidArgument,
                          "at least " + std::to_string(needed) + " bytes", shape_text(arena));
  }
  if (reinterpret_cast<uintptr_t>(arena.data) % alignof(DecodeRequest) != 0) {
    return argument.error(StatusCode::kInvalidArgument,
                          "memory aligned to " + std::to_string(alignof(DecodeRequest)) + " bytes",
                          "another address");
  }
  return {};
}

Status layout_error(const char* expected, const PlanLayout& layout) {
  return make_error(StatusCode::kInvalidArgument, "diffulex::", kOp, ": layout: expected ",
                    expected, ", got ", layout.describe());
}

/// The layout is that of one of the strategies, with room for what all requests run.
Status check_layout(const PlanLayout& layout) {
  const bool has_own_rules = layout.has_dual_cache || layout.has_canvas;
  if (layout.block_size < 1 || layout.page_size < 1 || layout.buffer_size < 1 ||
      layout.buffer_size > kMaxBufferBlocks) {
    return layout_error("pages, and blocks in flight up to the limit", layout);
  }
  if (layout.max_num_rows < int64_t{layout.max_num_reqs} * layout.decode_rows()) {
    return layout_error("a row for every position in flight", layout);
  }
  if (has_own_rules && (layout.merge_top_k > 0 || layout.has_saved_rows)) {
    return layout_error("neither merge descriptors nor saved rows with these rules", layout);
  }
  if (layout.has_canvas && (layout.has_dual_cache || layout.buffer_size != 1)) {
    return layout_error("one canvas for each request", layout);
  }
  return {};
}

}  // namespace

Status check_advance_decode(const AdvanceDecodeParams& params) {
  const Result<PlanLayout> parsed = PlanLayout::from_ints(params.layout);
  if (!parsed.ok()) {
    return make_error(parsed.status().code(), "diffulex::", kOp, ": ", parsed.status().message());
  }
  const PlanLayout& layout = parsed.value();
  DIFFULEX_RETURN_IF_ERROR(check_layout(layout));
  if (params.packs_rows && (layout.has_dual_cache || layout.has_canvas)) {
    return layout_error("block buffers alone with packs_rows", layout);
  }
  DIFFULEX_RETURN_IF_ERROR(check_arena("plan", params.plan, PlanArrays::fields(layout)));
  DIFFULEX_RETURN_IF_ERROR(check_arena("output", params.output, OutputArrays::fields(layout)));
  DIFFULEX_RETURN_IF_ERROR(check_arena("batch", params.batch, BatchArrays::fields(layout)));
  if (params.num_reqs < 0 || params.num_reqs > layout.max_num_reqs) {
    const std::string range = "0 to " + std::to_string(layout.max_num_reqs);
    return scalar_error(kOp, "num_reqs", range.c_str(), params.num_reqs);
  }
  return {};
}

AdvanceArgs make_advance_args(const AdvanceDecodeParams& params) {
  const PlanLayout layout = PlanLayout::from_ints(params.layout).value();
  const BatchArrays batch = BatchArrays::at(params.batch.data, BatchArrays::fields(layout));
  AdvanceArgs args{};
  args.plan = PlanArrays::at(params.plan.data, PlanArrays::fields(layout));
  args.output = OutputArrays::at(params.output.data, OutputArrays::fields(layout));
  args.requests = reinterpret_cast<DecodeRequest*>(batch.requests);
  args.windows = batch.windows;
  args.num_rows = batch.num_rows;
  args.num_logits_rows = batch.num_logits_rows;
  args.shifts = batch.shifts;
  args.merge_top_k = layout.merge_top_k;
  args.block_size = layout.block_size;
  args.buffer_size = layout.buffer_size;
  args.page_size = layout.page_size;
  args.max_pages_per_req = layout.max_pages_per_req;
  args.first_saved_row = layout.max_logits_rows();
  args.masked_rows_only = params.masked_rows_only;
  args.has_block_cache = params.has_block_cache;
  args.is_entry = params.is_entry;
  return args;
}

}  // namespace diffulex
