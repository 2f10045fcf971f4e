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

[[nodiscard]] ArenaField vector_field(const char* name, ArenaDtype dtype, int64_t rows) {
  return ArenaField{name, dtype, 0, rows, 1, false, 0};
}

[[nodiscard]] ArenaField matrix_field(const char* name, ArenaDtype dtype, int64_t rows,
                                      int64_t cols) {
  return ArenaField{name, dtype, 0, rows, cols, true, 0};
}

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

PlanLayout PlanLayout::of(const EngineOptions& options) {
  PlanLayout layout;
  layout.block_size = options.block_size;
  layout.buffer_size = options.buffer_size;
  layout.page_size = options.page_size;
  layout.max_pages_per_req = options.max_pages_per_req();
  layout.max_num_reqs = options.max_num_reqs;
  layout.max_num_rows =
      std::max(options.max_num_batched_tokens, options.max_num_reqs * options.decode_rows());
  layout.att_block_size = options.att_block_size();
  layout.merge_top_k = options.token_merge_top_k;
  layout.has_saved_rows = options.logits_shift;
  layout.has_edit_threshold = options.is_editing && options.strategy == "multi_bd";
  layout.has_dual_cache = options.has_dual_cache();
  layout.has_canvas = options.has_canvas();
  return layout;
}

std::string PlanLayout::describe() const {
  std::ostringstream text;
  text << "block_size " << block_size << ", buffer_size " << buffer_size << ", page_size "
       << page_size << ", max_pages_per_req " << max_pages_per_req << ", max_num_reqs "
       << max_num_reqs << ", max_num_rows " << max_num_rows << ", att_block_size " << att_block_size
       << ", merge_top_k " << merge_top_k << (has_saved_rows ? ", saved rows" : "")
       << (has_edit_threshold ? ", edit thresholds" : "") << (has_dual_cache ? ", dual cache" : "")
       << (has_canvas ? ", canvas" : "");
  return text.str();
}

bool PlanLayout::operator==(const PlanLayout& other) const noexcept {
  return block_size == other.block_size && buffer_size == other.buffer_size &&
         page_size == other.page_size && max_pages_per_req == other.max_pages_per_req &&
         max_num_reqs == other.max_num_reqs && max_num_rows == other.max_num_rows &&
         att_block_size == other.att_block_size && merge_top_k == other.merge_top_k &&
         has_saved_rows == other.has_saved_rows && has_edit_threshold == other.has_edit_threshold &&
         has_dual_cache == other.has_dual_cache && has_canvas == other.has_canvas;
}

std::vector<ArenaField> StepPlan::make_fields(const EngineOptions& options) {
  const PlanLayout layout = PlanLayout::of(options);
  const int64_t rows = layout.max_num_rows;
  const int64_t reqs = layout.max_num_reqs;
  const int64_t blocks = layout.max_num_blocks();
  const int64_t width = layout.block_size;
  const int64_t logits = layout.max_logits_rows();
  const int64_t saved = layout.has_saved_rows ? logits : 0;
  const int64_t edited = layout.has_edit_threshold ? blocks : 0;
  const int64_t seeded = layout.has_dual_cache ? reqs : 0;
  const int64_t merged = layout.merge_top_k > 0 ? rows : 0;
  const int64_t passes = layout.has_canvas ? rows : 0;
  const int64_t canvases = layout.has_canvas ? blocks : 0;
  std::vector<ArenaField> fields = {
      vector_field("input_ids", ArenaDtype::kInt64, rows),
      vector_field("positions", ArenaDtype::kInt64, rows),
      vector_field("slot_mapping", ArenaDtype::kInt32, rows),
      vector_field("cu_seqlens_q", ArenaDtype::kInt32, reqs + 1),
      vector_field("cu_seqlens_k", ArenaDtype::kInt32, reqs + 1),
      vector_field("context_lens", ArenaDtype::kInt32, reqs),
      vector_field("valid_slices", ArenaDtype::kInt32, reqs),
      vector_field("row_mode", ArenaDtype::kInt32, reqs),
      vector_field("mask_kinds", ArenaDtype::kInt32, reqs),
      vector_field("prefix_lens", ArenaDtype::kInt32, reqs),
      vector_field("padded_prefix_lens", ArenaDtype::kInt32, reqs),
      vector_field("last_row_index", ArenaDtype::kInt32, reqs),
      vector_field("req_ids", ArenaDtype::kInt64, reqs),
      vector_field("request_slots", ArenaDtype::kInt32, reqs),
      vector_field("logits_rows", ArenaDtype::kInt32, logits),
      vector_field("row_inv_temperature", ArenaDtype::kFloat32, logits),
      vector_field("row_uniforms", ArenaDtype::kFloat64, logits),
      vector_field("blk_req", ArenaDtype::kInt32, blocks),
      vector_field("blk_id", ArenaDtype::kInt32, blocks),
      vector_field("blk_start", ArenaDtype::kInt32, blocks),
      vector_field("blk_row0", ArenaDtype::kInt32, blocks),
      vector_field("blk_prev_row", ArenaDtype::kInt32, blocks),
      matrix_field("blk_tokens", ArenaDtype::kInt64, blocks, width),
      matrix_field("blk_row_index", ArenaDtype::kInt32, blocks, width),
      vector_field("blk_editable_start", ArenaDtype::kInt32, blocks),
      vector_field("blk_valid_len", ArenaDtype::kInt32, blocks),
      vector_field("blk_force_top1", ArenaDtype::kUint8, blocks),
      vector_field("blk_accept_threshold", ArenaDtype::kFloat32, blocks),
      vector_field("blk_total_steps", ArenaDtype::kInt32, blocks),
      vector_field("blk_open_steps", ArenaDtype::kInt32, blocks),
      vector_field("blk_post_edit_steps", ArenaDtype::kInt32, blocks),
      vector_field("logits_source", ArenaDtype::kInt32, saved),
      vector_field("row_top_k", ArenaDtype::kInt32, logits),
      vector_field("row_top_p", ArenaDtype::kFloat32, logits),
      vector_field("row_min_p", ArenaDtype::kFloat32, logits),
      vector_field("blk_request_slot", ArenaDtype::kInt32, blocks),
      vector_field("blk_step", ArenaDtype::kInt32, blocks),
      vector_field("blk_edit_threshold", ArenaDtype::kFloat32, edited),
      vector_field("seed_row", ArenaDtype::kInt32, seeded),
      vector_field("merge_mask", ArenaDtype::kUint8, merged),
      matrix_field("merge_topk_ids", ArenaDtype::kInt64, merged, layout.merge_top_k),
      matrix_field("merge_topk_probs", ArenaDtype::kFloat32, merged, layout.merge_top_k),
      vector_field("merge_residual", ArenaDtype::kFloat32, merged),
      vector_field("row_pass_kind", ArenaDtype::kUint8, passes),
      vector_field("row_self_cond", ArenaDtype::kInt32, passes),
      matrix_field("blk_prev_argmax", ArenaDtype::kInt64, canvases, width),
      vector_field("blk_stable_run", ArenaDtype::kInt32, canvases),
      vector_field("blk_steps_left", ArenaDtype::kInt32, canvases),
      matrix_field("blk_renoise", ArenaDtype::kInt64, canvases, width),
      matrix_field("page_tables", ArenaDtype::kInt32, reqs, layout.max_pages_per_req),
  };
  Arena::layout(fields);
  return fields;
}

size_t StepPlan::arena_bytes(const EngineOptions& options) {
  return Arena::arena_bytes(make_fields(options));
}

StepPlan::StepPlan(const EngineOptions& options) : StepPlan(options, Arena(make_fields(options))) {}

StepPlan::StepPlan(const EngineOptions& options, void* memory, size_t bytes)
    : StepPlan(options, Arena(make_fields(options), memory, bytes)) {}

StepPlan::StepPlan(const EngineOptions& options, Arena arena)
    : arena_(std::move(arena)),
      layout_(PlanLayout::of(options)),
      identity_(next_identity()),
      first_block_(static_cast<size_t>(options.max_num_reqs) + 1, 0),
      page_rows_(static_cast<size_t>(options.max_num_reqs)) {
  for (size_t i = 0; i < bases_.size(); ++i) {
    bases_[i] = arena_.array<unsigned char>(i);
  }
  const int64_t entries = int64_t{layout_.max_num_reqs} * layout_.max_pages_per_req;
  std::fill_n(ptr<int32_t>(PlanArray::kPageTables), entries, -1);
  pad_token_id_ = options.mask_token_id;
  // The arena is zeroed, which is what inverse temperatures of greedy rows are.
  std::fill_n(ptr<double>(PlanArray::kRowUniforms), max_logits_rows(), kGreedyUniform);
  std::fill_n(ptr<float>(PlanArray::kRowTopP), max_logits_rows(), 1.0F);
  if (has(PlanArray::kLogitsSource)) {
    std::fill_n(ptr<int32_t>(PlanArray::kLogitsSource), max_logits_rows(), -1);
  }
}

size_t StepPlan::used_bytes() const noexcept {
  const size_t offset = arena_.fields()[static_cast<size_t>(PlanArray::kPageTables)].offset;
  return offset +
         static_cast<size_t>(int64_t{num_reqs_} * layout_.max_pages_per_req) * sizeof(int32_t);
}

Span<int32_t> StepPlan::cu_seqlens_q() noexcept {
  return Span<int32_t>(ptr<int32_t>(PlanArray::kCuSeqlensQ), static_cast<size_t>(num_reqs_) + 1);
}

Span<int32_t> StepPlan::cu_seqlens_k() noexcept {
  return Span<int32_t>(ptr<int32_t>(PlanArray::kCuSeqlensK), static_cast<size_t>(num_reqs_) + 1);
}

Span<int64_t> StepPlan::req_ids() noexcept {
  return Span<int64_t>(ptr<int64_t>(PlanArray::kReqIds), static_cast<size_t>(num_reqs_));
}

Span<int64_t> StepPlan::blk_tokens() noexcept {
  return Span<int64_t>(ptr<int64_t>(PlanArray::kBlkTokens),
                       static_cast<size_t>(num_blocks_ * layout_.block_size));
}

Span<int32_t> StepPlan::blk_row_index() noexcept {
  return Span<int32_t>(ptr<int32_t>(PlanArray::kBlkRowIndex),
                       static_cast<size_t>(num_blocks_ * layout_.block_size));
}

Span<int32_t> StepPlan::page_tables() noexcept {
  return Span<int32_t>(ptr<int32_t>(PlanArray::kPageTables),
                       static_cast<size_t>(int64_t{num_reqs_} * layout_.max_pages_per_req));
}

void StepPlan::reset(PlanKind kind, int64_t step_id) {
  kind_ = kind;
  step_id_ = step_id;
  num_rows_ = 0;
  num_reqs_ = 0;
  num_padded_ = 0;
  num_blocks_ = 0;
  num_logits_rows_ = 0;
  num_sampled_rows_ = 0;
  num_filtered_rows_ = 0;
  num_saved_source_rows_ = 0;
  need_kv_cache_store_ = false;
  context_bound_ = 0;
  first_block_[0] = 0;
  ptr<int32_t>(PlanArray::kCuSeqlensQ)[0] = 0;
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
  ptr<int32_t>(PlanArray::kCuSeqlensQ)[num_reqs_] = num_rows_;
  ptr<int64_t>(PlanArray::kReqIds)[req_idx] = req_id;
  ptr<int32_t>(PlanArray::kRequestSlots)[req_idx] = request_slot;
  ptr<int32_t>(PlanArray::kLastRowIndex)[req_idx] = -1;
  if (layout_.has_dual_cache) {
    ptr<int32_t>(PlanArray::kSeedRow)[req_idx] = -1;
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
  const int32_t first_row = ptr<int32_t>(PlanArray::kCuSeqlensQ)[req_idx];
  DIFFULEX_CHECK(row0 >= first_row && row0 + layout_.block_size <= num_rows_,
                 "StepPlan::append_block: expected ", layout_.block_size, " rows in [", first_row,
                 ", ", num_rows_, "), got rows from ", row0);
  const int32_t index = num_blocks_++;
  ptr<int32_t>(PlanArray::kBlkReq)[index] = req_idx;
  ptr<int32_t>(PlanArray::kBlkId)[index] = block_id;
  ptr<int32_t>(PlanArray::kBlkStart)[index] = start;
  ptr<int32_t>(PlanArray::kBlkRow0)[index] = row0;
  int32_t prev_row = row0 > first_row ? row0 - 1 : kSavedRow;
  prev_row = start == 0 ? kNoPrevRow : prev_row;
  ptr<int32_t>(PlanArray::kBlkPrevRow)[index] = prev_row;
  ptr<int32_t>(PlanArray::kBlkRequestSlot)[index] = ptr<int32_t>(PlanArray::kRequestSlots)[req_idx];
  ptr<int32_t>(PlanArray::kBlkValidLen)[index] = layout_.block_size;
  first_block_[static_cast<size_t>(req_idx) + 1] = num_blocks_;
  return index;
}

LogitsRowCursor StepPlan::logits_cursor() {
  DIFFULEX_CHECK(num_logits_rows_ + layout_.block_size <= max_logits_rows(),
                 "StepPlan::logits_cursor: expected room for ", layout_.block_size, " of ",
                 max_logits_rows(), " logits rows, got ", num_logits_rows_, " taken");
  return LogitsRowCursor{ptr<int32_t>(PlanArray::kLogitsRows) + num_logits_rows_,
                         ptr<float>(PlanArray::kRowInvTemperature) + num_logits_rows_,
                         ptr<double>(PlanArray::kRowUniforms) + num_logits_rows_, num_logits_rows_};
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
      std::fill_n(ptr<float>(PlanArray::kRowInvTemperature) + begin, stale, 0.0F);
      std::fill_n(ptr<double>(PlanArray::kRowUniforms) + begin, stale, kGreedyUniform);
    }
  }
  const int32_t filtered = std::min(num_logits_rows_, filtered_end_) - begin;
  if (filtered > 0) {
    std::fill_n(ptr<int32_t>(PlanArray::kRowTopK) + begin, filtered, 0);
    std::fill_n(ptr<float>(PlanArray::kRowTopP) + begin, filtered, 1.0F);
    std::fill_n(ptr<float>(PlanArray::kRowMinP) + begin, filtered, 0.0F);
  }
  const int32_t sourced = std::min(num_logits_rows_, sourced_end_) - begin;
  if (sourced > 0) {
    std::fill_n(ptr<int32_t>(PlanArray::kLogitsSource) + begin, sourced, -1);
  }
}

void StepPlan::set_row_filter(int32_t count, const RowFilter& filter) {
  DIFFULEX_CHECK(count >= 0 && count <= num_logits_rows_,
                 "StepPlan::set_row_filter: expected at most ", num_logits_rows_, " rows, got ",
                 count);
  const int32_t begin = num_logits_rows_ - count;
  std::fill_n(ptr<int32_t>(PlanArray::kRowTopK) + begin, count, filter.top_k);
  std::fill_n(ptr<float>(PlanArray::kRowTopP) + begin, count, filter.top_p);
  std::fill_n(ptr<float>(PlanArray::kRowMinP) + begin, count, filter.min_p);
  num_filtered_rows_ += count;
  filtered_end_ = std::max(filtered_end_, num_logits_rows_);
}

void StepPlan::set_logits_source(int32_t index, int32_t request_slot) {
  DIFFULEX_CHECK(layout_.has_saved_rows && index >= 0 && index < num_logits_rows_ &&
                     request_slot >= 0 && request_slot < layout_.max_num_reqs,
                 "StepPlan::set_logits_source: expected a plan with saved rows, a row below ",
                 num_logits_rows_, " and a slot below ", layout_.max_num_reqs, ", got ", index,
                 " and ", request_slot);
  ptr<int32_t>(PlanArray::kLogitsSource)[index] = request_slot;
  ++num_saved_source_rows_;
  sourced_end_ = std::max(sourced_end_, index + 1);
}

int32_t StepPlan::find_or_append_logits_row(int32_t row, int32_t first_index) {
  DIFFULEX_CHECK(row >= 0 && row < num_rows_,
                 "StepPlan::find_or_append_logits_row: expected a row below ", num_rows_, ", got ",
                 row);
  int32_t* rows = ptr<int32_t>(PlanArray::kLogitsRows);
  for (int32_t index = first_index; index < num_logits_rows_; ++index) {
    const bool is_own =
        !layout_.has_saved_rows || ptr<int32_t>(PlanArray::kLogitsSource)[index] < 0;
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
  const int64_t req_id = ptr<int64_t>(PlanArray::kReqIds)[req_idx];
  PageRow& known = page_rows_[static_cast<size_t>(req_idx)];
  int32_t* row =
      ptr<int32_t>(PlanArray::kPageTables) + int64_t{req_idx} * layout_.max_pages_per_req;
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
  const int32_t* cu_q = ptr<int32_t>(PlanArray::kCuSeqlensQ);
  std::copy_n(cu_q, num_reqs_ + 1, ptr<int32_t>(PlanArray::kCuSeqlensK));
  max_seqlen_q_ = 0;
  max_seqlen_k_ = 0;
  max_context_len_ = context_bound_;
  bool is_uniform = kind_ == PlanKind::kDecode && num_reqs_ > 0;
  for (int32_t r = 0; r < num_reqs_; ++r) {
    const int32_t q_len = cu_q[r + 1] - cu_q[r];
    is_uniform = is_uniform && q_len == cu_q[1];
    max_seqlen_q_ = std::max(max_seqlen_q_, q_len);
    max_seqlen_k_ = std::max(max_seqlen_k_, q_len);  // every fresh row is a fresh key
    max_context_len_ = std::max(max_context_len_, ptr<int32_t>(PlanArray::kContextLens)[r]);
  }
  uniform_q_len_ = is_uniform ? cu_q[1] : 0;
}

Status StepPlan::pad_requests(int32_t num_reqs) {
  if (kind_ != PlanKind::kDecode || uniform_q_len_ == 0) {
    return make_error(StatusCode::kInvalidArgument, "StepPlan::pad_requests: expected a decode ",
                      "plan with equal row counts, got kind ", to_string(kind_));
  }
  if (num_reqs < num_reqs_ || num_reqs > layout_.max_num_reqs) {
    return make_error(StatusCode::kInvalidArgument, "StepPlan::pad_requests: expected a count in [",
                      num_reqs_, ", ", layout_.max_num_reqs, "], got ", num_reqs);
  }
  const int32_t q_len = uniform_q_len_;
  while (num_reqs_ < num_reqs) {
    const int32_t row0 = num_rows_;
    const int32_t r = append_request(-1, -1, q_len);
    ++num_padded_;
    std::fill_n(ptr<int64_t>(PlanArray::kInputIds) + row0, q_len, 0);
    std::fill_n(ptr<int64_t>(PlanArray::kPositions) + row0, q_len, 0);
    std::fill_n(ptr<int32_t>(PlanArray::kSlotMapping) + row0, q_len, -1);
    ptr<int32_t>(PlanArray::kCuSeqlensK)[r + 1] = num_rows_;
    ptr<int32_t>(PlanArray::kContextLens)[r] = 0;
    ptr<int32_t>(PlanArray::kValidSlices)[r] = row0;
    ptr<int32_t>(PlanArray::kRowMode)[r] = static_cast<int32_t>(RowMode::kDecodeBlockCausal);
    ptr<int32_t>(PlanArray::kMaskKinds)[r] = kBlockCausalMask;
    ptr<int32_t>(PlanArray::kPrefixLens)[r] = 0;
    ptr<int32_t>(PlanArray::kPaddedPrefixLens)[r] = 0;
    set_page_table(r, 0, {});
    fill_padded_rows(row0, q_len);
  }
  return {};
}

void StepPlan::fill_padded_rows(int32_t row0, int32_t count) {
  if (layout_.merge_top_k > 0) {
    clear_merge_rows(row0, count);
  }
  if (layout_.has_canvas) {
    std::fill_n(ptr<uint8_t>(PlanArray::kRowPassKind) + row0, count, uint8_t{0});
    std::fill_n(ptr<int32_t>(PlanArray::kRowSelfCond) + row0, count, -1);
  }
}

void StepPlan::clear_merge_rows(int32_t row0, int32_t count) {
  const int64_t top_k = layout_.merge_top_k;
  std::fill_n(ptr<uint8_t>(PlanArray::kMergeMask) + row0, count, uint8_t{0});
  std::fill_n(ptr<int64_t>(PlanArray::kMergeTopkIds) + row0 * top_k, count * top_k,
              int64_t{pad_token_id_});
  std::fill_n(ptr<float>(PlanArray::kMergeTopkProbs) + row0 * top_k, count * top_k, 0.0F);
  std::fill_n(ptr<float>(PlanArray::kMergeResidual) + row0, count, 0.0F);
}

}  // namespace diffulex
