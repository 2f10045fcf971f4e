// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/step_plan.h"

#include <algorithm>
#include <atomic>
#include <sstream>
#include <utility>

namespace diffulex {
namespace {

// MaskKind of ops/attention.h, which core may not include.
constexpr int32_t kCausalMask = 0;
constexpr int32_t kBlockCausalMask = 1;
constexpr int32_t kFullMask = 2;
constexpr int32_t kPrefixFullMask = 3;
constexpr int32_t kCacheOnlyMask = 4;

/// Uniform of a row that is not sampled.
constexpr double kGreedyUniform = 0.5;

[[nodiscard]] uint64_t next_identity() noexcept {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

int32_t mask_kind(RowMode mode) noexcept {
  switch (mode) {
    case RowMode::kPrefillBlockCausal:
    case RowMode::kDecodeBlockCausal:
      return kBlockCausalMask;
    case RowMode::kCacheOnly:
      return kCacheOnlyMask;
    case RowMode::kPrefillPrefixFull:
      return kPrefixFullMask;
    case RowMode::kCausal:
      return kCausalMask;
    case RowMode::kCanvas:
      return kFullMask;
  }
  return kBlockCausalMask;
}

size_t StepPlan::arena_bytes(const EngineOptions& options) {
  return Arena::arena_bytes(PlanArrays::fields(PlanLayout::of(options)));
}

StepPlan::StepPlan(const EngineOptions& options)
    : StepPlan(options, Arena(PlanArrays::fields(PlanLayout::of(options)))) {}

StepPlan::StepPlan(const EngineOptions& options, void* memory, size_t bytes)
    : StepPlan(options, Arena(PlanArrays::fields(PlanLayout::of(options)), memory, bytes)) {}

StepPlan::StepPlan(const EngineOptions& options, Arena arena)
    : arena_(std::move(arena)),
      arrays_(PlanArrays::at(arena_.data(), arena_.fields())),
      layout_(PlanLayout::of(options)),
      identity_(next_identity()),
      first_block_(static_cast<size_t>(options.max_num_reqs) + 1, 0),
      page_rows_(static_cast<size_t>(options.max_num_reqs)) {
  const int64_t entries = int64_t{layout_.max_num_reqs} * layout_.max_pages_per_req;
  std::fill_n(arrays_.page_tables, entries, -1);
  pad_token_id_ = options.mask_token_id;
  // The arena is zeroed, which is what inverse temperatures of greedy rows are.
  std::fill_n(arrays_.row_uniforms, max_logits_rows(), kGreedyUniform);
  std::fill_n(arrays_.row_top_p, max_logits_rows(), 1.0F);
  if (arrays_.logits_source != nullptr) {
    std::fill_n(arrays_.logits_source, max_logits_rows(), -1);
  }
}

size_t StepPlan::used_bytes() const noexcept {
  const size_t offset = arena_.fields().back().offset;
  return offset +
         static_cast<size_t>(int64_t{num_reqs_} * layout_.max_pages_per_req) * sizeof(int32_t);
}

bool StepPlan::any_penalised() const noexcept {
  const float* penalties = arrays_.blk_penalty;
  return penalties != nullptr && std::any_of(penalties, penalties + num_blocks_,
                                             [](float penalty) { return penalty > 0.0F; });
}

void StepPlan::reset(PlanKind kind, int64_t step_id) {
  kind_ = kind;
  step_id_ = step_id;
  num_rows_ = 0;
  num_reqs_ = 0;
  num_padded_ = 0;
  num_decode_reqs_ = 0;
  num_blocks_ = 0;
  num_logits_rows_ = 0;
  num_sampled_rows_ = 0;
  num_filtered_rows_ = 0;
  num_saved_source_rows_ = 0;
  need_kv_cache_store_ = false;
  context_bound_ = 0;
  first_block_[0] = 0;
  arrays_.cu_seqlens_q[0] = 0;
  seal();
}

int32_t StepPlan::append_request(int64_t req_id, int32_t request_slot, int32_t num_rows) {
  DIFFULEX_CHECK(num_reqs_ < layout_.max_num_reqs && num_rows_ + num_rows <= layout_.max_num_rows,
                 "StepPlan::append_request: expected at most ", layout_.max_num_reqs,
                 " requests and ", layout_.max_num_rows, " rows, got ", num_reqs_ + 1, " and ",
                 num_rows_ + num_rows);
  DIFFULEX_CHECK(num_rows >= 0, "StepPlan::append_request: expected a row count >= 0, got ",
                 num_rows);
  const int32_t req_idx = num_reqs_++;
  num_rows_ += num_rows;
  arrays_.cu_seqlens_q[num_reqs_] = num_rows_;
  arrays_.req_ids[req_idx] = req_id;
  arrays_.request_slots[req_idx] = request_slot;
  arrays_.last_row_index[req_idx] = -1;
  if (layout_.has_dual_cache) {
    arrays_.seed_row[req_idx] = -1;
  }
  first_block_[static_cast<size_t>(num_reqs_)] = num_blocks_;
  return req_idx;
}

int32_t StepPlan::append_block(int32_t req_idx, int32_t block_id, int32_t start, int32_t row0) {
  DIFFULEX_CHECK(num_blocks_ < layout_.max_num_blocks(),
                 "StepPlan::append_block: expected at most ", layout_.max_num_blocks(),
                 " blocks, got ", num_blocks_ + 1);
  DIFFULEX_CHECK(req_idx >= 0 && req_idx == num_reqs_ - 1,
                 "StepPlan::append_block: expected a block of the last request ", num_reqs_ - 1,
                 ", got ", req_idx);
  const int32_t first_row = arrays_.cu_seqlens_q[req_idx];
  DIFFULEX_CHECK(row0 >= first_row && row0 + layout_.block_size <= num_rows_,
                 "StepPlan::append_block: expected ", layout_.block_size, " rows in [", first_row,
                 ", ", num_rows_, "), got rows from ", row0);
  const int32_t index = num_blocks_++;
  arrays_.blk_req[index] = req_idx;
  arrays_.blk_id[index] = block_id;
  arrays_.blk_start[index] = start;
  arrays_.blk_row0[index] = row0;
  int32_t prev_row = row0 > first_row ? row0 - 1 : kSavedRow;
  prev_row = start == 0 ? kNoPrevRow : prev_row;
  arrays_.blk_prev_row[index] = prev_row;
  arrays_.blk_request_slot[index] = arrays_.request_slots[req_idx];
  arrays_.blk_valid_len[index] = layout_.block_size;
  first_block_[static_cast<size_t>(req_idx) + 1] = num_blocks_;
  return index;
}

LogitsRowCursor StepPlan::logits_cursor() {
  DIFFULEX_CHECK(num_logits_rows_ + layout_.block_size <= max_logits_rows(),
                 "StepPlan::logits_cursor: expected room for ", layout_.block_size, " of ",
                 max_logits_rows(), " logits rows, got ", num_logits_rows_, " taken");
  return LogitsRowCursor{arrays_.logits_rows + num_logits_rows_,
                         arrays_.row_inv_temperature + num_logits_rows_,
                         arrays_.row_uniforms + num_logits_rows_, num_logits_rows_};
}

void StepPlan::commit_logits_rows(int32_t count, bool is_sampled) {
  DIFFULEX_CHECK(count >= 0 && num_logits_rows_ + count <= max_logits_rows(),
                 "StepPlan::commit_logits_rows: expected at most ", max_logits_rows(),
                 " logits rows, got ", num_logits_rows_, " and ", count);
  const int32_t begin = num_logits_rows_;
  num_logits_rows_ += count;
  if (is_sampled) {
    num_sampled_rows_ += count;
    sampled_end_ = std::max(sampled_end_, num_logits_rows_);
  } else {
    // Entries that no sampled row ever took still hold the values of greedy rows; the same goes for
    // the filters and sources below.
    const int32_t stale = std::min(num_logits_rows_, sampled_end_) - begin;
    if (stale > 0) {
      std::fill_n(arrays_.row_inv_temperature + begin, stale, 0.0F);
      std::fill_n(arrays_.row_uniforms + begin, stale, kGreedyUniform);
    }
  }
  const int32_t filtered = std::min(num_logits_rows_, filtered_end_) - begin;
  if (filtered > 0) {
    std::fill_n(arrays_.row_top_k + begin, filtered, 0);
    std::fill_n(arrays_.row_top_p + begin, filtered, 1.0F);
    std::fill_n(arrays_.row_min_p + begin, filtered, 0.0F);
  }
  const int32_t sourced = std::min(num_logits_rows_, sourced_end_) - begin;
  if (sourced > 0) {
    std::fill_n(arrays_.logits_source + begin, sourced, -1);
  }
}

void StepPlan::set_row_filter(int32_t count, const RowFilter& filter) {
  DIFFULEX_CHECK(count >= 0 && count <= num_logits_rows_,
                 "StepPlan::set_row_filter: expected at most ", num_logits_rows_, " rows, got ",
                 count);
  const int32_t begin = num_logits_rows_ - count;
  std::fill_n(arrays_.row_top_k + begin, count, filter.top_k);
  std::fill_n(arrays_.row_top_p + begin, count, filter.top_p);
  std::fill_n(arrays_.row_min_p + begin, count, filter.min_p);
  num_filtered_rows_ += count;
  filtered_end_ = std::max(filtered_end_, num_logits_rows_);
}

void StepPlan::set_logits_source(int32_t index, int32_t request_slot) {
  DIFFULEX_CHECK(layout_.has_saved_rows && index >= 0 && index < num_logits_rows_ &&
                     request_slot >= 0 && request_slot < layout_.max_num_reqs,
                 "StepPlan::set_logits_source: expected a plan with saved rows, a row below ",
                 num_logits_rows_, " and a slot below ", layout_.max_num_reqs, ", got ", index,
                 " and ", request_slot);
  arrays_.logits_source[index] = request_slot;
  ++num_saved_source_rows_;
  sourced_end_ = std::max(sourced_end_, index + 1);
}

int32_t StepPlan::find_or_append_logits_row(int32_t row, int32_t first_index) {
  DIFFULEX_CHECK(row >= 0 && row < num_rows_,
                 "StepPlan::find_or_append_logits_row: expected a row below ", num_rows_, ", got ",
                 row);
  int32_t* rows = arrays_.logits_rows;
  for (int32_t index = first_index; index < num_logits_rows_; ++index) {
    const bool is_own = !layout_.has_saved_rows || arrays_.logits_source[index] < 0;
    if (rows[index] == row && is_own) {
      return index;
    }
  }
  const int32_t index = num_logits_rows_;
  DIFFULEX_CHECK(index < max_logits_rows(),
                 "StepPlan::find_or_append_logits_row: expected fewer than ", max_logits_rows(),
                 " logits rows, got ", index);
  rows[index] = row;
  commit_logits_rows(1, false);
  return index;
}

void StepPlan::set_page_table(int32_t req_idx, uint64_t epoch, Span<const int32_t> pages) {
  DIFFULEX_CHECK(req_idx >= 0 && req_idx < num_reqs_,
                 "StepPlan::set_page_table: expected a request in [0, ", num_reqs_, "), got ",
                 req_idx);
  const int64_t req_id = arrays_.req_ids[req_idx];
  PageRow& known = page_rows_[static_cast<size_t>(req_idx)];
  int32_t* row = arrays_.page_tables + int64_t{req_idx} * layout_.max_pages_per_req;
  const auto count = static_cast<int32_t>(pages.size());
  DIFFULEX_CHECK(count <= layout_.max_pages_per_req, "StepPlan::set_page_table: expected at most ",
                 layout_.max_pages_per_req, " pages, got ", count);
  // Within an epoch a table only grows, so steady state costs nothing per page already written.
  const bool is_same_owner = known.req_id == req_id && known.epoch == epoch && known.len <= count;
  for (int32_t i = is_same_owner ? known.len : 0; i < count; ++i) {
    row[i] = pages[static_cast<size_t>(i)];
  }
  for (int32_t i = count; i < known.len; ++i) {
    row[i] = -1;
  }
  known = PageRow{req_id, epoch, count};
}

void StepPlan::seal() {
  const int32_t* cu_q = arrays_.cu_seqlens_q;
  std::copy_n(cu_q, num_reqs_ + 1, arrays_.cu_seqlens_k);
  max_seqlen_q_ = 0;
  max_seqlen_k_ = 0;
  max_context_len_ = context_bound_;
  bool is_uniform = kind_ == PlanKind::kDecode && num_reqs_ > 0;
  for (int32_t r = 0; r < num_reqs_; ++r) {
    const int32_t q_len = cu_q[r + 1] - cu_q[r];
    is_uniform = is_uniform && q_len == cu_q[1];
    max_seqlen_q_ = std::max(max_seqlen_q_, q_len);
    max_seqlen_k_ = std::max(max_seqlen_k_, q_len);  // every fresh row is a fresh key
    max_context_len_ = std::max(max_context_len_, arrays_.context_lens[r]);
  }
  uniform_q_len_ = is_uniform ? cu_q[1] : 0;
}

Status StepPlan::pad(int32_t num_reqs, int32_t num_rows) {
  if (kind_ != PlanKind::kDecode || num_reqs_ == 0) {
    return make_error(StatusCode::kInvalidArgument, "StepPlan::pad: expected a decode plan, got ",
                      "kind ", to_string(kind_), " of ", num_reqs_, " requests");
  }
  if (num_reqs < num_reqs_ || num_reqs > layout_.max_num_reqs || num_rows < num_rows_ ||
      num_rows > layout_.max_num_rows) {
    return make_error(StatusCode::kInvalidArgument, "StepPlan::pad: expected a count in [",
                      num_reqs_, ", ", layout_.max_num_reqs, "] and rows in [", num_rows_, ", ",
                      layout_.max_num_rows, "], got ", num_reqs, " and ", num_rows);
  }
  while (num_reqs_ < num_reqs) {
    const int32_t r = append_request(-1, -1, 0);
    ++num_padded_;
    arrays_.cu_seqlens_k[r + 1] = num_rows_;
    arrays_.context_lens[r] = 0;
    arrays_.valid_slices[r] = num_rows_;
    arrays_.row_mode[r] = static_cast<int32_t>(RowMode::kDecodeBlockCausal);
    arrays_.mask_kinds[r] = kBlockCausalMask;
    arrays_.prefix_lens[r] = 0;
    arrays_.padded_prefix_lens[r] = 0;
    set_page_table(r, 0, {});
  }
  fill_padded_rows(num_rows_, num_rows - num_rows_);
  num_rows_ = num_rows;
  return {};
}

void StepPlan::fill_padded_rows(int32_t row0, int32_t count) {
  std::fill_n(arrays_.input_ids + row0, count, 0);
  std::fill_n(arrays_.positions + row0, count, 0);
  std::fill_n(arrays_.slot_mapping + row0, count, -1);
  if (layout_.merge_top_k > 0) {
    clear_merge_rows(row0, count);
  }
  if (layout_.has_canvas) {
    std::fill_n(arrays_.row_pass_kind + row0, count, uint8_t{0});
    std::fill_n(arrays_.row_self_cond + row0, count, -1);
  }
}

void StepPlan::clear_merge_rows(int32_t row0, int32_t count) {
  const int64_t top_k = layout_.merge_top_k;
  std::fill_n(arrays_.merge_mask + row0, count, uint8_t{0});
  std::fill_n(arrays_.merge_topk_ids + row0 * top_k, count * top_k, int64_t{pad_token_id_});
  std::fill_n(arrays_.merge_topk_probs + row0 * top_k, count * top_k, 0.0F);
  std::fill_n(arrays_.merge_residual + row0, count, 0.0F);
}

}  // namespace diffulex
