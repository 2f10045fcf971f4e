// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "diffulex/core/arena.h"
#include "diffulex/core/options.h"
#include "diffulex/core/span.h"
#include "diffulex/core/status.h"
#include "diffulex/core/status_enums.h"
#include "diffulex/export.h"

namespace diffulex {

/// Arrays of a plan, in arena order. T rows, R requests, Nb ACTIVE blocks that are run, n rows
/// whose logits are needed, B block size, P_max page-table width.
enum class PlanArray : int32_t {
  kInputIds = 0,        // [T] i64 token ids, masks at open and dummy rows
  kPositions,           // [T] i64 absolute positions, 0 at dummy rows
  kSlotMapping,         // [T] i32 KV slot, -1 = do not store
  kCuSeqlensQ,          // [R + 1] i32 row offsets
  kCuSeqlensK,          // [R + 1] i32 fresh keys, equal to kCuSeqlensQ
  kContextLens,         // [R] i32 cached positions visible to the request
  kValidSlices,         // [R] i32 row one past the last real row of the request
  kRowMode,             // [R] i32 RowMode
  kMaskKinds,           // [R] i32 kernel mask kind
  kPrefixLens,          // [R] i32 P in PREFILL_PREFIX_FULL, else 0
  kPaddedPrefixLens,    // [R] i32 P rounded up to B in PREFILL_PREFIX_FULL, else 0
  kLastRowIndex,        // [R] i32 row whose logits must be saved (shifted logits), -1 = none
  kReqIds,              // [R] i64
  kRequestSlots,        // [R] i32
  kLogitsRows,          // [n] i32 rows of T whose logits the sampler needs
  kRowInvTemperature,   // [n] f32, 0 = greedy
  kRowUniforms,         // [n] f64 in (0, 1), 0.5 for greedy rows
  kBlkReq,              // [Nb] i32 request index in the plan
  kBlkId,               // [Nb] i32 block id
  kBlkStart,            // [Nb] i32 absolute position of relative position 0
  kBlkRow0,             // [Nb] i32 row of relative position 0
  kBlkPrevRow,          // [Nb] i32 row of the position before the block; kSavedRow, kNoPrevRow
  kBlkTokens,           // [Nb, B] i64 current tokens
  kBlkRowIndex,         // [Nb, B] i32 index into kLogitsRows, -1 = none
  kBlkEditableStart,    // [Nb] i32
  kBlkValidLen,         // [Nb] i32, B
  kBlkForceTop1,        // [Nb] u8 gate: one open position must be accepted
  kBlkAcceptThreshold,  // [Nb] f32
  kBlkTotalSteps,       // [Nb] i32 forwards spent ACTIVE, this one included
  kBlkOpenSteps,        // [Nb] i32 earlier sampler steps with an open gate
  kBlkPostEditSteps,    // [Nb] i32
  kPageTables,          // [R, P_max] i32 page ids, -1 beyond those owned; always the last array
  kCount,
};

/// Values of PlanArray::kBlkPrevRow that are not rows.
inline constexpr int32_t kSavedRow = -1;   // the position before the block is cached, not run
inline constexpr int32_t kNoPrevRow = -2;  // the block starts at position 0

/// All that the offsets, capacities and strides of a plan depend on. A scheduler and a plan go
/// together exactly if theirs are equal.
struct DIFFULEX_API PlanLayout {
  int32_t block_size = 0;
  int32_t buffer_size = 0;
  int32_t page_size = 0;
  int32_t max_pages_per_req = 0;
  int32_t max_num_reqs = 0;
  int32_t max_num_rows = 0;

  [[nodiscard]] static PlanLayout of(const EngineOptions& options);
  /// Capacity of the block arrays.
  [[nodiscard]] int32_t max_num_blocks() const noexcept { return max_num_reqs * buffer_size; }
  /// Every field with its name, for messages.
  [[nodiscard]] std::string describe() const;
  [[nodiscard]] bool operator==(const PlanLayout& other) const noexcept;
};

/// Unfilled tail of the logits-row arrays of a plan.
struct LogitsRowCursor {
  int32_t* rows = nullptr;           // row of T
  float* inv_temperature = nullptr;  // sampled rows only
  double* uniforms = nullptr;        // sampled rows only, in (0, 1)
  int32_t next_index = 0;            // index of the first entry
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
  [[nodiscard]] int32_t num_blocks() const noexcept { return num_blocks_; }       // Nb
  [[nodiscard]] int32_t num_logits_rows() const noexcept { return num_logits_rows_; }  // n
  [[nodiscard]] int32_t num_sampled_rows() const noexcept { return num_sampled_rows_; }
  [[nodiscard]] bool any_sampled() const noexcept { return num_sampled_rows_ > 0; }
  [[nodiscard]] int32_t max_seqlen_q() const noexcept { return max_seqlen_q_; }
  [[nodiscard]] int32_t max_seqlen_k() const noexcept { return max_seqlen_k_; }  // fresh keys
  [[nodiscard]] int32_t max_context_len() const noexcept { return max_context_len_; }
  [[nodiscard]] bool need_kv_cache_store() const noexcept { return need_kv_cache_store_; }
  /// Ascending over all plans of a scheduler.
  [[nodiscard]] int64_t step_id() const noexcept { return step_id_; }
  /// Rows per request if this is a decode plan in which all have the same number, else 0.
  [[nodiscard]] int32_t uniform_q_len() const noexcept { return uniform_q_len_; }
  [[nodiscard]] int32_t block_size() const noexcept { return layout_.block_size; }
  [[nodiscard]] int32_t buffer_size() const noexcept { return layout_.buffer_size; }
  /// Block size of the visibility rule; the block size in every strategy there is.
  [[nodiscard]] int32_t att_block_size() const noexcept { return layout_.block_size; }
  [[nodiscard]] int32_t page_size() const noexcept { return layout_.page_size; }
  [[nodiscard]] int32_t max_pages_per_req() const noexcept { return layout_.max_pages_per_req; }
  [[nodiscard]] int32_t max_num_reqs() const noexcept { return layout_.max_num_reqs; }
  [[nodiscard]] int32_t max_num_rows() const noexcept { return layout_.max_num_rows; }
  [[nodiscard]] const PlanLayout& layout() const noexcept { return layout_; }
  /// Unique among all plans of the process, unlike an address, which a later plan may get again.
  [[nodiscard]] uint64_t identity() const noexcept { return identity_; }

  // Arrays, trimmed to the used length; the shapes are those of PlanArray.
  [[nodiscard]] Span<int64_t> input_ids() noexcept {
    return rows_of<int64_t>(PlanArray::kInputIds);
  }
  [[nodiscard]] Span<int64_t> positions() noexcept {
    return rows_of<int64_t>(PlanArray::kPositions);
  }
  [[nodiscard]] Span<int32_t> slot_mapping() noexcept {
    return rows_of<int32_t>(PlanArray::kSlotMapping);
  }
  [[nodiscard]] Span<int32_t> cu_seqlens_q() noexcept;
  [[nodiscard]] Span<int32_t> cu_seqlens_k() noexcept;
  [[nodiscard]] Span<int32_t> context_lens() noexcept { return reqs(PlanArray::kContextLens); }
  [[nodiscard]] Span<int32_t> valid_slices() noexcept { return reqs(PlanArray::kValidSlices); }
  [[nodiscard]] Span<int32_t> row_mode() noexcept { return reqs(PlanArray::kRowMode); }
  [[nodiscard]] Span<int32_t> mask_kinds() noexcept { return reqs(PlanArray::kMaskKinds); }
  [[nodiscard]] Span<int32_t> prefix_lens() noexcept { return reqs(PlanArray::kPrefixLens); }
  [[nodiscard]] Span<int32_t> padded_prefix_lens() noexcept {
    return reqs(PlanArray::kPaddedPrefixLens);
  }
  [[nodiscard]] Span<int32_t> last_row_index() noexcept { return reqs(PlanArray::kLastRowIndex); }
  [[nodiscard]] Span<int64_t> req_ids() noexcept;
  [[nodiscard]] Span<int32_t> request_slots() noexcept { return reqs(PlanArray::kRequestSlots); }
  [[nodiscard]] Span<int32_t> logits_rows() noexcept {
    return logits<int32_t>(PlanArray::kLogitsRows);
  }
  [[nodiscard]] Span<float> row_inv_temperature() noexcept {
    return logits<float>(PlanArray::kRowInvTemperature);
  }
  [[nodiscard]] Span<double> row_uniforms() noexcept {
    return logits<double>(PlanArray::kRowUniforms);
  }
  [[nodiscard]] Span<int32_t> blk_req() noexcept { return blocks<int32_t>(PlanArray::kBlkReq); }
  [[nodiscard]] Span<int32_t> blk_id() noexcept { return blocks<int32_t>(PlanArray::kBlkId); }
  [[nodiscard]] Span<int32_t> blk_start() noexcept { return blocks<int32_t>(PlanArray::kBlkStart); }
  [[nodiscard]] Span<int32_t> blk_row0() noexcept { return blocks<int32_t>(PlanArray::kBlkRow0); }
  [[nodiscard]] Span<int32_t> blk_prev_row() noexcept {
    return blocks<int32_t>(PlanArray::kBlkPrevRow);
  }
  [[nodiscard]] Span<int64_t> blk_tokens() noexcept;     // flat, block-major
  [[nodiscard]] Span<int32_t> blk_row_index() noexcept;  // flat, block-major
  [[nodiscard]] Span<int32_t> blk_editable_start() noexcept {
    return blocks<int32_t>(PlanArray::kBlkEditableStart);
  }
  [[nodiscard]] Span<int32_t> blk_valid_len() noexcept {
    return blocks<int32_t>(PlanArray::kBlkValidLen);
  }
  [[nodiscard]] Span<uint8_t> blk_force_top1() noexcept {
    return blocks<uint8_t>(PlanArray::kBlkForceTop1);
  }
  [[nodiscard]] Span<float> blk_accept_threshold() noexcept {
    return blocks<float>(PlanArray::kBlkAcceptThreshold);
  }
  [[nodiscard]] Span<int32_t> blk_total_steps() noexcept {
    return blocks<int32_t>(PlanArray::kBlkTotalSteps);
  }
  [[nodiscard]] Span<int32_t> blk_open_steps() noexcept {
    return blocks<int32_t>(PlanArray::kBlkOpenSteps);
  }
  [[nodiscard]] Span<int32_t> blk_post_edit_steps() noexcept {
    return blocks<int32_t>(PlanArray::kBlkPostEditSteps);
  }
  [[nodiscard]] Span<int32_t> page_tables() noexcept;  // flat [R, max_pages_per_req()]

  /// Appends dummy requests to a decode plan until it has `num_reqs` (a graph bucket):
  /// uniform_q_len rows each, none of them real. Fails with kInvalidArgument when the plan is not a
  /// uniform decode plan, or num_reqs is below num_reqs() or above the capacity.
  [[nodiscard]] Status pad_requests(int32_t num_reqs);

  // For strategies and the scheduler, in this order per step.

  /// Empties the plan.
  void reset(PlanKind kind, int64_t step_id);
  /// Appends a request with `num_rows` rows; returns its index r. The caller fills the rows.
  int32_t append_request(int64_t req_id, int32_t request_slot, int32_t num_rows);
  /// Appends an ACTIVE block of the request appended last, `req_idx`, whose rows start at row0;
  /// returns its index. The caller fills its arrays.
  int32_t append_block(int32_t req_idx, int32_t block_id, int32_t row0);
  /// Where the next logits rows go. The caller fills up to block_size() entries of each array per
  /// appended block, then calls commit_logits_rows.
  [[nodiscard]] LogitsRowCursor logits_cursor();
  /// Appends the `count` rows filled behind logits_cursor(), whose temperatures and uniforms the
  /// caller filled too (is_sampled) or left to the plan (greedy rows).
  void commit_logits_rows(int32_t count, bool is_sampled);
  /// Writes row `req_idx` of the page tables; entries known from the same owner are not rewritten.
  void set_page_table(int32_t req_idx, uint64_t epoch, Span<const int32_t> pages);
  /// Records that a row of the plan has a slot.
  void note_kv_store() noexcept { need_kv_cache_store_ = true; }
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

  [[nodiscard]] static std::vector<ArenaField> make_fields(const EngineOptions& options);
  [[nodiscard]] int32_t max_logits_rows() const noexcept {
    return layout_.max_num_blocks() * layout_.block_size;
  }
  template <typename T>
  [[nodiscard]] T* ptr(PlanArray array) noexcept {
    return arena_.array<T>(static_cast<size_t>(array));
  }
  template <typename T>
  [[nodiscard]] Span<T> rows_of(PlanArray array) noexcept {
    return Span<T>(ptr<T>(array), static_cast<size_t>(num_rows_));
  }
  [[nodiscard]] Span<int32_t> reqs(PlanArray array) noexcept {
    return Span<int32_t>(ptr<int32_t>(array), static_cast<size_t>(num_reqs_));
  }
  template <typename T>
  [[nodiscard]] Span<T> logits(PlanArray array) noexcept {
    return Span<T>(ptr<T>(array), static_cast<size_t>(num_logits_rows_));
  }
  template <typename T>
  [[nodiscard]] Span<T> blocks(PlanArray array) noexcept {
    return Span<T>(ptr<T>(array), static_cast<size_t>(num_blocks_));
  }

  Arena arena_;
  PlanLayout layout_;
  uint64_t identity_;
  PlanKind kind_ = PlanKind::kIdle;
  int32_t num_rows_ = 0;
  int32_t num_reqs_ = 0;
  int32_t num_padded_ = 0;
  int32_t num_blocks_ = 0;
  int32_t num_logits_rows_ = 0;
  int32_t num_sampled_rows_ = 0;
  int32_t max_seqlen_q_ = 0;
  int32_t max_seqlen_k_ = 0;
  int32_t max_context_len_ = 0;
  int32_t uniform_q_len_ = 0;
  bool need_kv_cache_store_ = false;
  int64_t step_id_ = 0;
  int32_t sampled_end_ = 0;  // logits-row entries from here on hold the values of greedy rows
  std::vector<int32_t> first_block_;  // [max_reqs + 1]
  std::vector<PageRow> page_rows_;    // [max_reqs] what the arena's page-table rows hold
};

}  // namespace diffulex
