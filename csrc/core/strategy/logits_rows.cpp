// SPDX-License-Identifier: Apache-2.0
#include "core/strategy/logits_rows.h"

#include <algorithm>

#include "diffulex/core/philox.h"

namespace diffulex {
namespace {

/// Temperatures, draws and filters of the `count` rows filled after `cursor`. `offset` is the
/// position that row 0 of the plan would predict.
void commit_rows(const Request& request, const Block& block, StepPlan& plan,
                 const LogitsRowCursor& cursor, int32_t count, int32_t offset) {
  const SamplingParams& params = request.params;
  if (!params.is_sampled()) {
    plan.commit_logits_rows(count, false);
    return;
  }
  std::fill_n(cursor.inv_temperature, count, 1.0F / params.temperature);
  // The number of earlier sampler steps of the block: this forward is already counted.
  const int32_t draw_step = block.total_steps - 1;
  for (int32_t i = 0; i < count; ++i) {
    cursor.uniforms[i] =
        philox_uniform(request.seed, offset + cursor.rows[i], draw_step, RandomStream::kToken);
  }
  plan.commit_logits_rows(count, true);
  if (params.is_filtered()) {
    plan.set_row_filter(count, {params.top_k, params.top_p, params.min_p});
  }
}

/// Rows of the positions of a block in an unshifted family.
void write_own_rows(const EngineOptions& options, const Request& request, const Block& block,
                    StepPlan& plan, int32_t blk) {
  const int32_t block_size = options.block_size;
  const auto index = static_cast<size_t>(blk);
  const int32_t row0 = plan.blk_row0()[index];
  const int32_t start = plan.blk_start()[index];
  int32_t* row_index = plan.blk_row_index().data() + index * static_cast<size_t>(block_size);
  const int32_t* tokens = request.buffer.token_data() + start;
  const LogitsRowCursor cursor = plan.logits_cursor();
  const int32_t mask_id = options.mask_token_id;
  const bool is_editing = request.buffer.rules().is_editing;
  const bool wants_all = is_editing || !options.masked_rows_only;
  const int32_t first = is_editing || options.masked_rows_only ? block.editable_start : 0;
  // num_masks ends the scan early; all rows are wanted when rows are not restricted to masks.
  const int32_t wanted = wants_all ? block_size - first : block.num_masks;
  int32_t count = 0;
  for (int32_t rel = first; count < wanted; ++rel) {
    if (wants_all || tokens[rel] == mask_id) {
      cursor.rows[count] = row0 + rel;
      row_index[rel] = cursor.next_index + count;
      ++count;
    }
  }
  commit_rows(request, block, plan, cursor, count, start - row0);
}

/// Rows of the positions before those of a block. The first position of the first block may need
/// the saved row.
void write_previous_rows(const EngineOptions& options, const Request& request, const Block& block,
                         StepPlan& plan, int32_t blk) {
  const int32_t block_size = options.block_size;
  const auto index = static_cast<size_t>(blk);
  const int32_t row0 = plan.blk_row0()[index];
  const int32_t start = plan.blk_start()[index];
  const bool has_previous_row = plan.blk_prev_row()[index] >= 0;
  int32_t* row_index = plan.blk_row_index().data() + index * static_cast<size_t>(block_size);
  const int32_t* tokens = request.buffer.token_data() + start;
  const int32_t mask_id = options.mask_token_id;
  int32_t rel = block.editable_start;
  int32_t left = options.masked_rows_only ? block.num_masks : block_size - rel;
  if (rel == 0 && !has_previous_row) {
    const bool is_open = tokens[0] == mask_id;
    const bool is_carried = request.carry_pos == start - 1;
    DIFFULEX_CHECK(is_carried || !is_open, "write_previous_rows: expected the saved row of ",
                   "position ", start - 1, " of request ", request.req_id, ", got that of ",
                   request.carry_pos);
    if (is_carried && (is_open || !options.masked_rows_only)) {
      if (request.params.is_sampled()) {
        const LogitsRowCursor cursor = plan.logits_cursor();
        cursor.rows[0] = row0;  // stands in: the logits come from the slot
        row_index[0] = cursor.next_index;
        commit_rows(request, block, plan, cursor, 1, start - row0);
        plan.set_logits_source(cursor.next_index, request.request_slot);
      } else {
        row_index[0] = plan.saved_row(request.request_slot);
      }
    }
    rel = 1;
    left -= is_open || !options.masked_rows_only ? 1 : 0;
  }
  const LogitsRowCursor cursor = plan.logits_cursor();
  int32_t count = 0;
  for (; count < left; ++rel) {
    if (!options.masked_rows_only || tokens[rel] == mask_id) {
      cursor.rows[count] = row0 + rel - 1;
      row_index[rel] = cursor.next_index + count;
      ++count;
    }
  }
  commit_rows(request, block, plan, cursor, count, start - row0 + 1);
}

}  // namespace

void write_block_rows(const EngineOptions& options, const Request& request, const Block& block,
                      StepPlan& plan, int32_t blk) {
  const int32_t block_size = options.block_size;
  const auto index = static_cast<size_t>(blk);
  const int32_t* tokens = request.buffer.token_data() + plan.blk_start()[index];
  const size_t offset = index * static_cast<size_t>(block_size);
  int64_t* blk_tokens = plan.blk_tokens().data() + offset;
  for (int32_t rel = 0; rel < block_size; ++rel) {
    blk_tokens[rel] = tokens[rel];
  }
  std::fill_n(plan.blk_row_index().data() + offset, block_size, -1);
  if (options.logits_shift) {
    write_previous_rows(options, request, block, plan, blk);
  } else {
    write_own_rows(options, request, block, plan, blk);
  }
}

void write_saved_row(const Request& request, StepPlan& plan, int32_t req_idx, int32_t first_index) {
  const RequestStep& step = request.step;
  if (step.saved_pos < 0) {
    return;
  }
  const auto r = static_cast<size_t>(req_idx);
  const int32_t row = plan.cu_seqlens_q()[r] + step.saved_pos - step.first_pos;
  plan.last_row_index()[r] = plan.find_or_append_logits_row(row, first_index);
}

}  // namespace diffulex
