// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "diffulex/core/plan_layout.h"
#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// Arguments of `diffulex::advance_decode`: what the host scheduler does between two decode steps,
/// by the same rules (core/decode_rules.h), for R requests of N blocks of B positions each.
///
///   is_entry    the requests are in flight already; only the arrays of that step are written
///   otherwise   ends the step in flight with the sampler's decisions, begins the next one and
///               writes its arrays. A request that ends becomes dummy rows.
///
/// Request r owns rows [r Q, (r + 1) Q) with Q = B N, and blocks [r N, (r + 1) N): block r N + i is
/// buffer block i, with valid_len 0 unless it is ACTIVE and run. Logits rows are the rows
/// themselves.
///
/// With packs_rows request r owns its valid rows alone, one request after another: cu_seqlens_q
/// says which, and num_rows of the batch how many. The void rows of all requests follow, up to R Q
/// of both. Logits rows are packed in the same way: num_logits_rows of a request, which something
/// reads, then entries of row 0. Blocks stay where they are. That is for block buffers alone; merge
/// descriptors of an entry stand at the packed rows already.
///
/// The arrays are those of core/plan_arrays.def and output_arrays.def. Of the plan all are written
/// that the next forward and its sampling read, but for page_tables (pages of everything that may
/// be stored, read) and blk_prev_argmax (read too); merge descriptors unless is_entry. Of the
/// batch, requests and windows are read and written.
///
/// With saved rows (logits_shift) the row of a position predicts the next one. The first position
/// of a forward is predicted by the record saved for the request slot, or, where the request draws,
/// by its saved logits: the last row of the request, which predicts no position of the buffer,
/// takes them.
///
/// With a dual cache the rules are those of core/dual_cache_rules.h. Every request still has Q
/// rows: those of its forward, then dummy rows. With a canvas they are those of
/// core/canvas_rules.h, and N = 1.
struct AdvanceDecodeParams {
  TensorRef plan;                // [bytes] uint8, in and out: arena of a StepPlan
  TensorRef output;              // [bytes] uint8: arena of a SamplerOutput; read unless is_entry
  TensorRef batch;               // [bytes] uint8, in and out: arena of a DecodeBatch
  std::vector<int64_t> layout;   // PlanLayout::to_ints() of the three
  int32_t num_reqs = 0;          // R, at most max_num_reqs of the layout
  bool masked_rows_only = true;  // sample open positions only, unless the rules edit
  bool has_block_cache = true;   // with a dual cache: a sub-block is refined over cached keys alone
  bool is_entry = false;
  bool packs_rows = false;  // requests own their valid rows alone
};

/// Ends a decode step and prepares the next one where the sampler's decisions are.
[[nodiscard]] DIFFULEX_API Status advance_decode(const AdvanceDecodeParams& params,
                                                 const ExecContext& context);

}  // namespace diffulex
