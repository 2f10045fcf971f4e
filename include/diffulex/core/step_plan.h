// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "diffulex/core/arena.h"
#include "diffulex/core/options.h"
#include "diffulex/core/plan_layout.h"
#include "diffulex/core/span.h"
#include "diffulex/core/status.h"
#include "diffulex/core/status_enums.h"
#include "diffulex/export.h"

namespace diffulex {

/// Kernel mask kind (MaskKind of ops/attention.h) of the rows of a mode.
[[nodiscard]] DIFFULEX_API int32_t mask_kind(RowMode mode) noexcept;

/// Values of blk_prev_row that are not rows.
inline constexpr int32_t kSavedRow = -1;   // the position before the block is cached, not run
inline constexpr int32_t kNoPrevRow = -2;  // the block starts at position 0

/// Unfilled tail of the logits-row arrays of a plan.
struct LogitsRowCursor {
  int32_t* rows = nullptr;           // row of T
  float* inv_temperature = nullptr;  // sampled rows only
  double* uniforms = nullptr;        // sampled rows only, in (0, 1)
  int32_t next_index = 0;            // index of the first entry
};

/// Filters of the sampled rows of a request; the defaults are off.
struct RowFilter {
  int32_t top_k = 0;
  float top_p = 1.0F;
  float min_p = 0.0F;
};

/// Everything one forward and its sampling need, in one arena with offsets that follow from
/// EngineOptions alone: a device mirror of the arena has static addresses, and one copy of
/// used_bytes() moves a step. Filled by Scheduler::schedule; valid until complete_step.
class DIFFULEX_API StepPlan final {
 public:
  /// Owns its arena.
  explicit StepPlan(const EngineOptions& options);
  /// Borrows `memory`: at least arena_bytes(options), aligned to kArenaAlignment, outlives the
  /// plan.
  StepPlan(const EngineOptions& options, void* memory, size_t bytes);

  /// Bytes of the arena.
  [[nodiscard]] static size_t arena_bytes(const EngineOptions& options);
  /// Arrays with dtype, offset and capacity.
  [[nodiscard]] const std::vector<ArenaField>& fields() const noexcept { return arena_.fields(); }
  [[nodiscard]] const void* data() const noexcept { return arena_.data(); }
  /// Bytes from the start of the arena that a step must copy.
  [[nodiscard]] size_t used_bytes() const noexcept;

  // Scalars.
  [[nodiscard]] PlanKind kind() const noexcept { return kind_; }
  [[nodiscard]] int32_t num_rows() const noexcept { return num_rows_; }           // T
  [[nodiscard]] int32_t num_reqs() const noexcept { return num_reqs_; }           // R
  [[nodiscard]] int32_t num_padded_reqs() const noexcept { return num_padded_; }  // of R, dummies
  /// Requests at the front of the plan that decode; those that follow run rows of their prompts.
  [[nodiscard]] int32_t num_decode_reqs() const noexcept { return num_decode_reqs_; }
  [[nodiscard]] int32_t num_request_ends() const noexcept { return num_reqs_ + 1; }
  [[nodiscard]] int32_t num_blocks() const noexcept { return num_blocks_; }            // Nb
  [[nodiscard]] int32_t num_logits_rows() const noexcept { return num_logits_rows_; }  // n
  [[nodiscard]] int32_t num_sampled_rows() const noexcept { return num_sampled_rows_; }
  [[nodiscard]] bool any_sampled() const noexcept { return num_sampled_rows_ > 0; }
  /// Sampled rows of requests with a filter.
  [[nodiscard]] int32_t num_filtered_rows() const noexcept { return num_filtered_rows_; }
  /// Whether a block has a penalty.
  [[nodiscard]] bool any_penalised() const noexcept;
  /// Entries of logits_source that name a request slot.
  [[nodiscard]] int32_t num_saved_source_rows() const noexcept { return num_saved_source_rows_; }
  /// Capacity of the logits-row arrays.
  [[nodiscard]] int32_t max_logits_rows() const noexcept { return layout_.max_logits_rows(); }
  /// Index after the logits rows under which the sampler keeps the record of the row saved for
  /// `request_slot`. Greedy requests refer to it in blk_row_index; it persists over steps.
  [[nodiscard]] int32_t saved_row(int32_t request_slot) const noexcept {
    return max_logits_rows() + request_slot;
  }
  [[nodiscard]] int32_t max_seqlen_q() const noexcept { return max_seqlen_q_; }
  [[nodiscard]] int32_t max_seqlen_k() const noexcept { return max_seqlen_k_; }  // fresh keys
  /// Bound on context_lens.
  [[nodiscard]] int32_t max_context_len() const noexcept { return max_context_len_; }
  [[nodiscard]] bool need_kv_cache_store() const noexcept { return need_kv_cache_store_; }
  /// Ascending over all plans of a scheduler.
  [[nodiscard]] int64_t step_id() const noexcept { return step_id_; }
  /// Rows per request if this is a decode plan in which all have the same number, else 0.
  [[nodiscard]] int32_t uniform_q_len() const noexcept { return uniform_q_len_; }
  [[nodiscard]] int32_t block_size() const noexcept { return layout_.block_size; }
  [[nodiscard]] int32_t buffer_size() const noexcept { return layout_.buffer_size; }
  /// Block size of the visibility rule.
  [[nodiscard]] int32_t att_block_size() const noexcept { return layout_.att_block_size; }
  /// K of the merge descriptors; 0 = none.
  [[nodiscard]] int32_t merge_top_k() const noexcept { return layout_.merge_top_k; }
  [[nodiscard]] int32_t page_size() const noexcept { return layout_.page_size; }
  [[nodiscard]] int32_t max_pages_per_req() const noexcept { return layout_.max_pages_per_req; }
  [[nodiscard]] int32_t max_num_reqs() const noexcept { return layout_.max_num_reqs; }
  [[nodiscard]] int32_t max_num_rows() const noexcept { return layout_.max_num_rows; }
  [[nodiscard]] const PlanLayout& layout() const noexcept { return layout_; }
  /// Unique among all plans of the process, unlike an address, which a later plan may get again.
  [[nodiscard]] uint64_t identity() const noexcept { return identity_; }

  // Arrays of plan_arrays.def, trimmed to the used length and flat; empty where the layout has
  // none.
#define DIFFULEX_ARRAY(name, type, extent, width, use)                                       \
  [[nodiscard]] Span<type> name() noexcept {                                                 \
    const bool is_used = arrays_.name != nullptr;                                            \
    return Span<type>(arrays_.name,                                                          \
                      is_used ? static_cast<size_t>(int64_t{num_##extent()} * width()) : 0); \
  }
#include "diffulex/core/plan_arrays.def"

  /// Appends dummy requests without rows to a decode plan until it has `num_reqs`, and rows that no
  /// request owns until it has `num_rows` (a graph bucket). Fails with kInvalidArgument when the
  /// plan is no decode plan, or a number is below that of the plan or above the capacity.
  [[nodiscard]] Status pad(int32_t num_reqs, int32_t num_rows);

  // For strategies and the scheduler, in this order per step.

  /// Empties the plan.
  void reset(PlanKind kind, int64_t step_id);
  /// All requests so far decode, those that follow run rows of their prompts.
  void set_decode_end() noexcept { num_decode_reqs_ = num_reqs_; }
  /// Says what the plan is, where that is known only once it has requests.
  void set_kind(PlanKind kind) noexcept { kind_ = kind; }
  /// Appends a request with `num_rows` rows; returns its index r. The caller fills the rows.
  int32_t append_request(int64_t req_id, int32_t request_slot, int32_t num_rows);
  /// Appends an ACTIVE block of the request appended last, `req_idx`, that starts at position
  /// `start` and whose rows start at row0; returns its index. The caller fills its arrays.
  int32_t append_block(int32_t req_idx, int32_t block_id, int32_t start, int32_t row0);
  /// Where the next logits rows go. The caller fills up to block_size() entries of each array per
  /// appended block, then calls commit_logits_rows.
  [[nodiscard]] LogitsRowCursor logits_cursor();
  /// Appends the `count` rows filled after logits_cursor(), whose temperatures and uniforms the
  /// caller filled too (is_sampled) or left to the plan (greedy rows).
  void commit_logits_rows(int32_t count, bool is_sampled);
  /// Sets the filter of the `count` logits rows committed last, which are sampled.
  void set_row_filter(int32_t count, const RowFilter& filter);
  /// Lets logits row `index` read the logits saved for `request_slot`.
  void set_logits_source(int32_t index, int32_t request_slot);
  /// Empties the merge descriptors of rows [row0, row0 + count). Precondition: merge_top_k() > 0.
  void clear_merge_rows(int32_t row0, int32_t count);
  /// Appends row `row` for the saved or seed record of a request unless the plan has it among the
  /// logits rows from `first_index` on; returns its index.
  int32_t find_or_append_logits_row(int32_t row, int32_t first_index);
  /// Writes row `req_idx` of the page tables; entries known from the same owner are not rewritten.
  void set_page_table(int32_t req_idx, uint64_t epoch, Span<const int32_t> pages);
  /// Records that a row of the plan has a slot.
  void note_kv_store() noexcept { need_kv_cache_store_ = true; }
  /// Raises max_context_len to `len` at least.
  void note_context_bound(int32_t len) noexcept {
    context_bound_ = len > context_bound_ ? len : context_bound_;
  }
  /// Recomputes the scalars after the last request was filled.
  void seal();
  /// First block of request `req_idx` in the block arrays, one past the last at req_idx + 1.
  [[nodiscard]] int32_t first_block(int32_t req_idx) const {
    return first_block_[static_cast<size_t>(req_idx)];
  }

 private:
  struct PageRow {
    int64_t req_id = -1;
    uint64_t epoch = 0;
    int32_t len = 0;  // entries that may differ from -1
  };
  StepPlan(const EngineOptions& options, Arena arena);
  // Entries of a row by its width in the list.
  [[nodiscard]] static int32_t scalar() noexcept { return 1; }
  [[nodiscard]] int32_t block() const noexcept { return layout_.block_size; }
  [[nodiscard]] int32_t candidates() const noexcept { return layout_.merge_top_k; }
  [[nodiscard]] int32_t pages() const noexcept { return layout_.max_pages_per_req; }
  void fill_padded_rows(int32_t row0, int32_t count);

  Arena arena_;
  PlanArrays arrays_;  // in arena_
  PlanLayout layout_;
  uint64_t identity_;
  PlanKind kind_ = PlanKind::kIdle;
  int32_t num_rows_ = 0;
  int32_t num_reqs_ = 0;
  int32_t num_padded_ = 0;
  int32_t num_decode_reqs_ = 0;
  int32_t num_blocks_ = 0;
  int32_t num_logits_rows_ = 0;
  int32_t num_sampled_rows_ = 0;
  int32_t num_filtered_rows_ = 0;
  int32_t num_saved_source_rows_ = 0;
  int32_t max_seqlen_q_ = 0;
  int32_t max_seqlen_k_ = 0;
  int32_t max_context_len_ = 0;
  int32_t context_bound_ = 0;
  int32_t uniform_q_len_ = 0;
  bool need_kv_cache_store_ = false;
  int64_t step_id_ = 0;
  // Logits-row entries from here on hold the defaults: of greedy rows, of rows without a filter, of
  // rows that read their own logits.
  int32_t sampled_end_ = 0;
  int32_t filtered_end_ = 0;
  int32_t sourced_end_ = 0;
  int32_t pad_token_id_ = 0;          // id in merge entries of rows without a descriptor
  std::vector<int32_t> first_block_;  // [max_reqs + 1]
  std::vector<PageRow> page_rows_;    // [max_reqs] what the arena's page-table rows hold
};

}  // namespace diffulex
