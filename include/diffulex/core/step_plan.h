// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
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
/// whose logits are needed, B block size, K token_merge_top_k, P_max page-table width. An array
/// marked with a strategy or an option has no capacity under others.
enum class PlanArray : int32_t {
  kInputIds = 0,        // [T] i64 token ids, masks at open and dummy rows
  kPositions,           // [T] i64 absolute positions, 0 at dummy rows
  kSlotMapping,         // [T] i32 KV slot, -1 = do not store
  kCuSeqlensQ,          // [R + 1] i32 row offsets
  kCuSeqlensK,          // [R + 1] i32 fresh keys, equal to kCuSeqlensQ
  kContextLens,         // [R] i32 cached positions visible to the request
  kValidSlices,         // [R] i32 row one past the last real row of the request
  kRowMode,             // [R] i32 RowMode
  kMaskKinds,           // [R] i32 kernel mask kind of the row mode
  kPrefixLens,          // [R] i32 P in PREFILL_PREFIX_FULL, else 0
  kPaddedPrefixLens,    // [R] i32 P rounded up to B in PREFILL_PREFIX_FULL, else 0
  kLastRowIndex,        // [R] i32 index into kLogitsRows of the row whose logits are saved for the
                        // request slot (logits_shift), -1 = none
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
  kBlkPostEditSteps,    // [Nb] i32 earlier sampler steps that began without an open position
  kLogitsSource,        // [n] i32 logits_shift: request slot whose saved logits row stands for this
                        // entry, -1 = the row of kLogitsRows
  kRowTopK,             // [n] i32 <= 0 = off
  kRowTopP,             // [n] f32 >= 1 = off
  kRowMinP,             // [n] f32 0 = off
  kBlkRequestSlot,      // [Nb] i32
  kBlkStep,             // [Nb] i32 earlier sampler steps of the block: the step of its draws
  kBlkEditThreshold,    // [Nb] f32 multi_bd with is_editing
  kSeedRow,             // [R] i32 fast_dllm_v2: index into kLogitsRows of the row whose greedy
                        // choice is the request's pending next token, -1 = none
  kMergeMask,           // [T] u8 dmax with K > 0: 1 = the row has a merge descriptor
  kMergeTopkIds,        // [T, K] i64 mask ids without a descriptor
  kMergeTopkProbs,      // [T, K] f32
  kMergeResidual,       // [T] f32
  kRowPassKind,         // [T] u8 diffusion_gemma: 0 encoder, 1 decoder
  kRowSelfCond,         // [T] i32 diffusion_gemma: row of the signal buffer, -1 = zero signal
  kBlkPrevArgmax,       // [Nb, B] i64 diffusion_gemma: argmax canvas of the step before
  kBlkStableRun,        // [Nb] i32 diffusion_gemma: equal canvases in a row, -1 = none before
  kBlkStepsLeft,        // [Nb] i32 diffusion_gemma: steps left, this one included
  kBlkRenoise,          // [Nb, B] i64 diffusion_gemma: random ids for rejected positions
  kPageTables,          // [R, P_max] i32 page ids, -1 beyond those owned; always the last array
  kCount,
};

/// Kernel mask kind (MaskKind of ops/attention.h) of the rows of a mode.
[[nodiscard]] DIFFULEX_API int32_t mask_kind(RowMode mode) noexcept;

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
  int32_t att_block_size = 0;
  int32_t merge_top_k = 0;
  bool has_saved_rows = false;      // logits_shift
  bool has_edit_threshold = false;  // multi_bd with is_editing
  bool has_dual_cache = false;      // fast_dllm_v2
  bool has_canvas = false;          // diffusion_gemma

  [[nodiscard]] static PlanLayout of(const EngineOptions& options);
  /// Capacity of the block arrays.
  [[nodiscard]] int32_t max_num_blocks() const noexcept { return max_num_reqs * buffer_size; }
  /// Capacity of the logits-row arrays: every position of every block, and the saved rows.
  [[nodiscard]] int32_t max_logits_rows() const noexcept {
    return max_num_blocks() * block_size + (has_saved_rows ? max_num_reqs : 0);
  }
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
  [[nodiscard]] int32_t num_blocks() const noexcept { return num_blocks_; }       // Nb
  [[nodiscard]] int32_t num_logits_rows() const noexcept { return num_logits_rows_; }  // n
  [[nodiscard]] int32_t num_sampled_rows() const noexcept { return num_sampled_rows_; }
  [[nodiscard]] bool any_sampled() const noexcept { return num_sampled_rows_ > 0; }
  /// Sampled rows of requests with a filter.
  [[nodiscard]] int32_t num_filtered_rows() const noexcept { return num_filtered_rows_; }
  /// Entries of kLogitsSource that name a request slot.
  [[nodiscard]] int32_t num_saved_source_rows() const noexcept { return num_saved_source_rows_; }
  /// Capacity of the logits-row arrays.
  [[nodiscard]] int32_t max_logits_rows() const noexcept { return layout_.max_logits_rows(); }
  /// Index after the logits rows under which the sampler keeps the record of the row saved for
  /// `request_slot`. Greedy requests refer to it in kBlkRowIndex; it persists over steps.
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
  [[nodiscard]] Span<int32_t> logits_source() noexcept {
    return optional<int32_t>(PlanArray::kLogitsSource, num_logits_rows_);
  }
  [[nodiscard]] Span<int32_t> row_top_k() noexcept { return logits<int32_t>(PlanArray::kRowTopK); }
  [[nodiscard]] Span<float> row_top_p() noexcept { return logits<float>(PlanArray::kRowTopP); }
  [[nodiscard]] Span<float> row_min_p() noexcept { return logits<float>(PlanArray::kRowMinP); }
  [[nodiscard]] Span<int32_t> blk_request_slot() noexcept {
    return blocks<int32_t>(PlanArray::kBlkRequestSlot);
  }
  [[nodiscard]] Span<int32_t> blk_step() noexcept { return blocks<int32_t>(PlanArray::kBlkStep); }
  [[nodiscard]] Span<float> blk_edit_threshold() noexcept {
    return optional<float>(PlanArray::kBlkEditThreshold, num_blocks_);
  }
  [[nodiscard]] Span<int32_t> seed_row() noexcept {
    return optional<int32_t>(PlanArray::kSeedRow, num_reqs_);
  }
  [[nodiscard]] Span<uint8_t> merge_mask() noexcept {
    return optional<uint8_t>(PlanArray::kMergeMask, num_rows_);
  }
  [[nodiscard]] Span<int64_t> merge_topk_ids() noexcept {  // flat, row-major
    return optional<int64_t>(PlanArray::kMergeTopkIds, num_rows_, layout_.merge_top_k);
  }
  [[nodiscard]] Span<float> merge_topk_probs() noexcept {  // flat, row-major
    return optional<float>(PlanArray::kMergeTopkProbs, num_rows_, layout_.merge_top_k);
  }
  [[nodiscard]] Span<float> merge_residual() noexcept {
    return optional<float>(PlanArray::kMergeResidual, num_rows_);
  }
  [[nodiscard]] Span<uint8_t> row_pass_kind() noexcept {
    return optional<uint8_t>(PlanArray::kRowPassKind, num_rows_);
  }
  [[nodiscard]] Span<int32_t> row_self_cond() noexcept {
    return optional<int32_t>(PlanArray::kRowSelfCond, num_rows_);
  }
  [[nodiscard]] Span<int64_t> blk_prev_argmax() noexcept {  // flat, block-major
    return optional<int64_t>(PlanArray::kBlkPrevArgmax, num_blocks_, layout_.block_size);
  }
  [[nodiscard]] Span<int32_t> blk_stable_run() noexcept {
    return optional<int32_t>(PlanArray::kBlkStableRun, num_blocks_);
  }
  [[nodiscard]] Span<int32_t> blk_steps_left() noexcept {
    return optional<int32_t>(PlanArray::kBlkStepsLeft, num_blocks_);
  }
  [[nodiscard]] Span<int64_t> blk_renoise() noexcept {  // flat, block-major
    return optional<int64_t>(PlanArray::kBlkRenoise, num_blocks_, layout_.block_size);
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

  [[nodiscard]] static std::vector<ArenaField> make_fields(const EngineOptions& options);
  template <typename T>
  [[nodiscard]] T* ptr(PlanArray array) noexcept {
    return static_cast<T*>(bases_[static_cast<size_t>(array)]);
  }
  [[nodiscard]] bool has(PlanArray array) const noexcept {
    return arena_.fields()[static_cast<size_t>(array)].rows > 0;
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
  /// `count` rows of an array that other strategies do not have.
  template <typename T>
  [[nodiscard]] Span<T> optional(PlanArray array, int32_t count, int32_t cols = 1) noexcept {
    return Span<T>(ptr<T>(array), has(array) ? static_cast<size_t>(int64_t{count} * cols) : 0);
  }
  void fill_padded_rows(int32_t row0, int32_t count);

  Arena arena_;
  std::array<void*, static_cast<size_t>(PlanArray::kCount)> bases_;  // of the arrays in arena_
  PlanLayout layout_;
  uint64_t identity_;
  PlanKind kind_ = PlanKind::kIdle;
  int32_t num_rows_ = 0;
  int32_t num_reqs_ = 0;
  int32_t num_padded_ = 0;
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
