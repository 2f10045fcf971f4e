// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "diffulex/core/block_buffer.h"
#include "diffulex/core/canvas_rules.h"
#include "diffulex/core/dual_cache_rules.h"
#include "diffulex/core/kv_cache_manager.h"
#include "diffulex/core/options.h"
#include "diffulex/core/span.h"
#include "diffulex/core/status_enums.h"
#include "diffulex/export.h"

namespace diffulex {

/// A token written by the last completed step.
struct TokenWrite {
  int32_t position = 0;     // absolute
  float confidence = 0.0F;  // of the sampler, 0 where it reported none
};

/// Token-merge descriptors of a request by absolute position, K entries each: the input embedding
/// of a position with a descriptor is a mixture of K token embeddings and the mask's. Empty unless
/// the strategy merges.
struct MergeDescriptors {
  std::vector<uint8_t> is_valid;  // [len] 0 = the plain embedding
  std::vector<int32_t> ids;       // [len * K]
  std::vector<float> probs;       // [len * K]
  std::vector<float> residual;    // [len]

  [[nodiscard]] bool empty() const noexcept { return is_valid.empty(); }
};

/// What a request does in the forward in flight; set by Strategy::begin_step.
struct RequestStep {
  bool is_in_flight = false;  // between begin_step and finish_step or on_preempt
  bool is_prefill = false;
  bool is_final = false;       // the last forward of its prefill span
  bool has_sampling = false;   // ACTIVE blocks are run and sampled
  bool has_activated = false;  // begin_step opened a block
  int32_t saved_pos = -1;      // position whose logits row the forward saves for the slot
  RowMode row_mode = RowMode::kPrefillBlockCausal;
  int32_t first_pos = 0;  // position of the first row
  int32_t num_rows = 0;
  int32_t num_valid_rows = 0;  // leading rows that are real
  int32_t store_end = 0;       // rows of positions [first_pos, store_end) are stored
};

/// One request: its tokens, blocks, pages and counters. Created by the embedder, owned by the
/// scheduler from add_request on; a strategy changes it through the hooks of Strategy only.
class DIFFULEX_API Request final {
 public:
  /// Holds a copy of the prompt. Validation happens in Scheduler::add_request.
  Request(Span<const int32_t> token_ids, SamplingParams params, const EngineOptions& options);

  /// Tokens up to the end of the buffer (mask ids at open positions); the prompt before init.
  [[nodiscard]] Span<const int32_t> tokens() const noexcept;
  [[nodiscard]] Span<const int32_t> prompt() const noexcept { return prompt_ids; }
  [[nodiscard]] int32_t context_len() const noexcept { return buffer.state().context_len; }
  [[nodiscard]] int32_t settled_end() const noexcept { return buffer.state().settled_end; }
  /// Final output so far: [P, settled_end), cut before a stop id.
  [[nodiscard]] Span<const int32_t> output() const noexcept;

  // Fields are written by the scheduler and the strategy; embedders read.
  int64_t req_id = -1;  // set by add_request, ascending
  RequestStatus status = RequestStatus::kWaiting;
  FinishReason finish_reason = FinishReason::kNone;
  bool is_auto_nfe_cap = false;  // max_nfe was derived (auto_max_nfe), not asked for
  int32_t request_slot = -1;     // in [0, max_num_reqs) while running, else -1
  int32_t prompt_len = 0;        // P
  int32_t limit_end = 0;         // L
  SamplingParams params;
  uint64_t seed = 0;              // effective seed
  float accept_threshold = 0.0F;  // effective thresholds; the others are in buffer.rules()
  float edit_threshold = 0.0F;
  int32_t max_post_edit_steps = 0;
  float penalty = 0.0F;
  std::vector<int32_t> prompt_ids;
  BlockBuffer buffer;
  PageTable page_table;
  int32_t prefix_limit = 0;           // longest prefix hit allowed at the next admission
  int32_t share_limit = kNoPosition;  // KV of positions from here on is never shared
  int32_t carry_pos = -1;             // position whose logits row is saved for the slot, -1 = none
  int32_t stored_end = 0;             // end of what the last forward stored, final or not
  int32_t num_cached_tokens = 0;      // prefix hit of the last admission
  int32_t resume_until = 0;           // > 0 while KV lost by preemption is rebuilt
  bool needs_prompt_prefill = true;   // the first prefill span is not finished
  int32_t max_nfe = 0;                // effective cap, 0 = none
  int32_t nfe = 0;                    // forwards so far
  DualCacheState dual_cache;          // fast_dllm_v2
  CanvasState canvas;                 // diffusion_gemma
  std::vector<int64_t> prev_argmax;   // diffusion_gemma: argmax canvas of the step before
  MergeDescriptors merge;             // dmax: what the sampler last said about unsettled tokens
  int32_t new_tokens = 0;             // masks filled in the last step
  int32_t decided_tokens = 0;         // masks filled in all steps
  int32_t num_preemptions = 0;
  RequestStep step;
  std::vector<int32_t> new_tokens_per_step;  // one entry per forward
  std::vector<uint8_t> prefill_per_step;     // 1 = that forward was a prefill or resume
  std::vector<TokenWrite> last_writes;       // of the last completed step
  std::vector<float> confidences;            // by position: confidence of the write, 0 elsewhere

  // Scheduler bookkeeping.
  bool is_abort_requested = false;
  bool is_in_plan = false;
  int64_t blocked_until_step = -1;  // no new prefix lookup before this step, unless pages free up
  int32_t blocked_free_pages = 0;   // free pages when admission last failed
  Request* next_waiting = nullptr;  // not owned; links of the waiting queue
  Request* prev_waiting = nullptr;  // not owned
};

/// Final record of a request.
struct RequestResult {
  int64_t req_id = -1;
  FinishReason finish_reason = FinishReason::kNone;
  bool is_auto_nfe_cap = false;
  std::vector<int32_t> output_ids;  // [P, end), stop id excluded
  int32_t prompt_len = 0;
  int32_t num_cached_tokens = 0;
  int32_t nfe = 0;
  int32_t num_preemptions = 0;
  int32_t decided_tokens = 0;
  std::vector<int32_t> new_tokens_per_step;
  std::vector<uint8_t> prefill_per_step;  // 1 = prefill or resume forward
};

/// One valid buffer block of a snapshot.
struct BlockSnapshot {
  int32_t block_id = 0;
  int32_t start = 0;  // absolute position
  BlockStatus status = BlockStatus::kDummy;
  std::vector<int32_t> tokens;         // [B], masks included
  std::vector<float> confidences;      // [B], of the write; 0 for masks and prompt
  std::vector<int32_t> newly_written;  // relative positions written by the last step
};

/// Denoising state of a request after its last step.
struct RequestSnapshot {
  int64_t req_id = -1;
  RequestStatus status = RequestStatus::kWaiting;
  FinishReason finish_reason = FinishReason::kNone;
  int32_t nfe = 0;
  int32_t context_len = 0;
  std::vector<int32_t> output_ids;  // settled so far
  std::vector<BlockSnapshot> blocks;
};

/// Copies the final record of `request`.
[[nodiscard]] DIFFULEX_API RequestResult make_result(const Request& request);
/// Copies the valid buffer blocks of `request`.
[[nodiscard]] DIFFULEX_API RequestSnapshot make_snapshot(const Request& request);

}  // namespace diffulex
