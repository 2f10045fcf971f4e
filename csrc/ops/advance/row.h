// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/decode_rules.h"
#include "diffulex/core/philox.h"
#include "diffulex/core/plan_layout.h"

// One request of advance_decode, for host and device. A team of lanes shares the work: lane 0 runs
// the rules, all lanes fill the arrays. On the host a team is one lane.

namespace diffulex {

/// Arrays and numbers of advance_decode.
struct AdvanceArgs {
  PlanArrays plan;
  OutputArrays output;  // read only
  DecodeRequest* requests;
  int32_t* windows;
  int32_t* num_rows;         // [R] as below with packed rows
  int32_t* num_logits_rows;  // [R]
  int32_t* shifts;           // [R]
  int32_t merge_top_k;       // K
  int32_t block_size;        // B
  int32_t buffer_size;       // N
  int32_t page_size;
  int32_t max_pages_per_req;
  int32_t first_saved_row;  // record saved for slot 0
  bool masked_rows_only;
  bool has_block_cache;
  bool is_entry;

  /// Whether the row of a position predicts the next one.
  [[nodiscard]] DIFFULEX_HOST_DEVICE bool is_shifted() const noexcept {
    return plan.logits_source != nullptr;
  }
};

/// What a team works on: the request and copies of what lane 0 reads position by position.
struct RowScratch {
  DecodeRequest* request;
  int32_t* window;  // [window_len(Q)]
  int32_t* writes;  // [Q] token to write, -1 = none, kBadWrite = not a token; with packed rows the
                    // ranks of PackedRows afterwards
  int32_t* shift;   // [1] positions the buffer slid over
  int32_t* marks;   // [kNumMarks] set by any lane before the rules run
};

/// What lanes find out while they gather the sampler's answer.
enum RowMark : int32_t { kOtherArgmax = 0, kIllegalId = 1, kNumMarks = 2 };

/// A write that check_write refuses whatever the block: the host ends the step with an error.
inline constexpr int32_t kBadWrite = -2;

/// Applies the sampler's writes to buffer block `index`; returns false if one is illegal.
DIFFULEX_HOST_DEVICE inline bool write_block(const DecodeRequest& request, BufferState& state,
                                             int32_t index, const int32_t* writes,
                                             const TokenWindow& tokens, int32_t* num_filled) {
  const BlockRules& rules = request.rules;
  const int32_t start = block_start(rules, state, state.blocks[index]);
  for (int32_t rel = 0; rel < rules.block_size; ++rel) {
    const int32_t token = writes[rel];
    if (token == -1) {
      continue;
    }
    const int32_t current = tokens[start + rel];
    if (check_write(rules, state.blocks[index], rel, current, token) != WriteCheck::kOk) {
      return false;
    }
    if (!rules.is_editing || token != current) {  // else it repeats what stands there
      *num_filled += apply_write(rules, state, index, rel, token, tokens) ? 1 : 0;
    }
  }
  return true;
}

/// Applies what the sampler decided for the request of row `r`; returns how far the buffer slid.
/// settle_request follows, once the window has slid as well. What became final is found here: the
/// window still holds the blocks that the step froze and stored.
DIFFULEX_HOST_DEVICE inline int32_t finish_request(const AdvanceArgs& args, int32_t r,
                                                   const RowScratch& scratch) {
  DecodeRequest& request = *scratch.request;
  const BlockRules& rules = request.rules;
  BufferState& state = request.state;
  const TokenWindow tokens{scratch.window, buffer_start(rules, state) - 1};
  int32_t num_filled = 0;
  bool has_failed = false;
  if (request.forward.has_sampling) {
    count_sampler_steps(rules, state);
    for (int32_t i = 0; i < state.num_valid; ++i) {
      if (state.blocks[i].status != BlockStatus::kActive) {
        continue;
      }
      const int32_t* writes = scratch.writes + i * rules.block_size;
      has_failed = !write_block(request, state, i, writes, tokens, &num_filled) || has_failed;
    }
    for (int32_t i = 0; i < state.num_valid; ++i) {
      if (state.blocks[i].status == BlockStatus::kActive) {
        const int32_t blk = r * rules.buffer_size + i;
        has_failed = apply_verdict(state.blocks[i], args.output.flags[blk],
                                   args.output.same_token_ratio[blk]) ||
                     has_failed;
      }
    }
  }
  const Transitions transitions = close_buffer(rules, state, true);
  settle_buffer(rules, state, request.forward.has_sampling, tokens);
  const int32_t saved_pos = last_stored_pos(request.forward);
  request.carry_pos = args.is_shifted() && saved_pos >= 0 ? saved_pos : request.carry_pos;
  has_failed =
      has_failed || (request.forward.has_sampling && is_stuck(rules, transitions, num_filled));
  ++request.limits.nfe;
  request.finish_reason = has_failed ? FinishReason::kError : FinishReason::kNone;
  return transitions.num_stored * rules.block_size;
}

/// Ends or goes on: stop conditions, then the forward that follows.
DIFFULEX_HOST_DEVICE inline void settle_request(const RowScratch& scratch) {
  DecodeRequest& request = *scratch.request;
  BufferState& state = request.state;
  request.finish_reason =
      judge_step(state, request.limits, request.finish_reason == FinishReason::kError);
  request.is_running = request.finish_reason == FinishReason::kNone;
  if (request.is_running) {
    request.forward = enter_buffer(request.rules, state);
  }
}

/// Slides the window by `shift` positions; what enters is open.
template <typename Team>
DIFFULEX_HOST_DEVICE inline void slide_window(const RowScratch& scratch, int32_t len, int32_t shift,
                                              const Team& team) {
  for (int32_t first = 0; first < len && shift > 0; first += team.size()) {
    const int32_t i = first + team.lane();
    const int32_t token =
        i + shift < len ? scratch.window[i + shift] : scratch.request->rules.mask_token_id;
    team.sync();
    if (i < len) {
      scratch.window[i] = token;
    }
  }
  team.sync();
}

/// Whether the next forward samples position `rel` of `block`, which holds `token`.
DIFFULEX_HOST_DEVICE inline bool is_row_wanted(const AdvanceArgs& args, const BlockRules& rules,
                                               const Block& block, int32_t rel, int32_t token) {
  const bool wants_all = !args.masked_rows_only || rules.is_editing;
  if (wants_all && !rules.is_editing && !args.is_shifted()) {
    return true;
  }
  return rel >= block.editable_start && (wants_all || token == rules.mask_token_id);
}

/// Place of `position` of request r in the cache.
DIFFULEX_HOST_DEVICE inline int32_t cache_slot(const AdvanceArgs& args, int32_t r,
                                               int32_t position) {
  const int32_t page =
      args.plan.page_tables[int64_t{r} * args.max_pages_per_req + position / args.page_size];
  // Without a page the host is not running ahead: it will plan the step itself.
  return page >= 0 ? page * args.page_size + position % args.page_size : -1;
}

/// Rows of the next forward that are those of positions of `request`.
DIFFULEX_HOST_DEVICE inline int32_t num_valid_rows(const DecodeRequest& request) {
  return request.is_running ? request.forward.num_valid_rows : 0;
}

/// Where the rows of a request are that has all Q of them: its logits rows are the rows themselves.
struct WholeRows {
  static constexpr bool kIsPacked = false;

  int32_t first;  // r Q

  [[nodiscard]] DIFFULEX_HOST_DEVICE int32_t row(int32_t i) const { return first + i; }
  /// The entry of the logits rows for row i.
  [[nodiscard]] DIFFULEX_HOST_DEVICE int32_t entry(int32_t i) const { return first + i; }
  /// What that entry has.
  [[nodiscard]] DIFFULEX_HOST_DEVICE int32_t source(int32_t i, bool is_read) const {
    return is_read ? first + i : -1;
  }
};

DIFFULEX_HOST_DEVICE inline WholeRows whole_rows(const AdvanceArgs& args, int32_t r) {
  return WholeRows{r * args.block_size * args.buffer_size};
}

/// Where they are if every request has its valid rows alone, and void rows follow those of all. Of
/// the Q entries for logits those that something reads come first, in the same way.
struct PackedRows {
  static constexpr bool kIsPacked = true;

  int32_t first;             // of its valid rows
  int32_t num_valid;         // of them
  int32_t first_void;        // of its void rows
  int32_t first_entry;       // of its entries that are read
  int32_t first_void_entry;  // of the others
  const int32_t* ranks;      // [Q] for each row, how many such are before: read x, others -1 - x

  [[nodiscard]] DIFFULEX_HOST_DEVICE int32_t row(int32_t i) const {
    return i < num_valid ? first + i : first_void + i - num_valid;
  }
  [[nodiscard]] DIFFULEX_HOST_DEVICE int32_t entry(int32_t i) const {
    return ranks[i] >= 0 ? first_entry + ranks[i] : first_void_entry - 1 - ranks[i];
  }
  /// The head takes these rows: an entry without one of its own has another's.
  [[nodiscard]] DIFFULEX_HOST_DEVICE int32_t source(int32_t i, bool is_read) const {
    const int32_t own = i < num_valid ? first + i : first;
    return is_read ? own : 0;
  }
};

/// The arrays of a forward at row i of the request at `places`.
template <typename Places>
DIFFULEX_HOST_DEVICE inline void write_row(const AdvanceArgs& args, int32_t r, int32_t i,
                                           const RowScratch& scratch, const Places& places) {
  const DecodeRequest& request = *scratch.request;
  const BufferForward& forward = request.forward;
  const int64_t row = places.row(i);
  const bool is_valid = request.is_running && i < forward.num_valid_rows;
  const int32_t position = forward.first_pos + i;
  args.plan.input_ids[row] = request.is_running ? request.rules.mask_token_id : 0;
  args.plan.positions[row] = is_valid ? position : 0;
  if (is_valid) {
    args.plan.input_ids[row] = scratch.window[1 + i];
  }
  args.plan.slot_mapping[row] =
      is_valid && position < forward.store_end ? cache_slot(args, r, position) : -1;
}

/// Row of the request whose logits its slot keeps for a later step, -1 = none.
DIFFULEX_HOST_DEVICE inline int32_t saved_row(const AdvanceArgs& args,
                                              const DecodeRequest& request) {
  const int32_t position =
      args.is_shifted() && request.is_running ? last_stored_pos(request.forward) : -1;
  return position < 0 ? -1 : position - request.forward.first_pos;
}

/// What `row` draws with; it decides `position`, which lies in `block`.
DIFFULEX_HOST_DEVICE inline void write_draw(const AdvanceArgs& args, int64_t row,
                                            const DecodeRequest& request, const Block& block,
                                            int32_t position, bool is_drawn) {
  args.plan.row_inv_temperature[row] = is_drawn ? request.inv_temperature : 0.0F;
  args.plan.row_uniforms[row] =
      is_drawn ? philox_uniform(request.seed, position, block.total_steps - 1, RandomStream::kToken)
               : 0.5;
  args.plan.row_top_k[row] = is_drawn ? request.top_k : 0;
  args.plan.row_top_p[row] = is_drawn ? request.top_p : 1.0F;
  args.plan.row_min_p[row] = is_drawn ? request.min_p : 0.0F;
}

/// What the next forward samples at a position of the buffer.
struct SampledPosition {
  int32_t source;    // row of the request that predicts it; Q - 1 where none of the buffer does
  bool is_carried;   // the row of a step before predicts it
  bool is_wanted;    // it is sampled
  bool is_drawn;     // by a draw
  bool is_recorded;  // and by the record that the slot has
  bool is_read;      // something reads the logits of `source`
};

/// Position i of the buffer of the request in `scratch`.
DIFFULEX_HOST_DEVICE inline SampledPosition sampled_position(const AdvanceArgs& args, int32_t i,
                                                             const RowScratch& scratch) {
  const DecodeRequest& request = *scratch.request;
  const Block& block = request.state.blocks[i / args.block_size];
  const bool is_sampled_block =
      request.is_running && request.forward.has_sampling && block.status == BlockStatus::kActive;
  SampledPosition result{};
  result.is_carried = args.is_shifted() && i == 0;
  result.is_wanted =
      is_sampled_block &&
      is_row_wanted(args, request.rules, block, i % args.block_size, scratch.window[1 + i]) &&
      (!result.is_carried || request.carry_pos == request.forward.first_pos - 1);
  result.is_drawn = result.is_wanted && request.inv_temperature > 0.0F;
  result.is_recorded = result.is_carried && !result.is_drawn;
  // Positions and rows correspond one to one here.
  result.source = args.is_shifted() ? i - 1 : i;
  if (result.is_carried) {
    result.source = args.block_size * args.buffer_size - 1;
  }
  result.is_read =
      (result.is_wanted && !result.is_recorded) || result.source == saved_row(args, request);
  return result;
}

/// The arrays of the sampler at position i of the buffer of request r.
template <typename Places>
DIFFULEX_HOST_DEVICE inline void write_sampler_row(const AdvanceArgs& args, int32_t r, int32_t i,
                                                   const RowScratch& scratch,
                                                   const Places& places) {
  const DecodeRequest& request = *scratch.request;
  const SampledPosition sampled = sampled_position(args, i, scratch);
  const int32_t place = r * args.block_size * args.buffer_size + i;
  const int32_t entry = places.entry(sampled.source);
  args.plan.blk_tokens[place] = scratch.window[1 + i];
  args.plan.blk_row_index[place] = -1;
  if (sampled.is_wanted) {
    args.plan.blk_row_index[place] =
        sampled.is_recorded ? args.first_saved_row + request.request_slot : entry;
  }
  args.plan.logits_rows[entry] = places.source(sampled.source, sampled.is_read);
  if (args.is_shifted()) {
    args.plan.logits_source[entry] =
        sampled.is_carried && sampled.is_drawn ? request.request_slot : -1;
  }
  write_draw(args, entry, request, request.state.blocks[i / args.block_size],
             request.forward.first_pos + i, sampled.is_drawn);
}

/// The merge descriptor of row i of request r: what the sampler said about the position in the step
/// before, while its block may still change. `from` is the position's place in that step.
template <typename Places>
DIFFULEX_HOST_DEVICE inline void write_merge_row(const AdvanceArgs& args, int32_t r, int32_t i,
                                                 const RowScratch& scratch, const Places& places) {
  const DecodeRequest& request = *scratch.request;
  const int32_t num_rows = args.block_size * args.buffer_size;
  const int32_t shift = *scratch.shift;
  const int64_t row = places.row(i);
  const int64_t from = int64_t{r} * num_rows + i + shift;
  const int64_t top_k = args.merge_top_k;
  const bool is_known = request.is_running && i < request.forward.num_valid_rows &&
                        i + shift < num_rows && args.output.merge_valid[from] != 0 &&
                        request.state.blocks[i / args.block_size].status == BlockStatus::kActive;
  args.plan.merge_mask[row] = is_known ? 1 : 0;
  args.plan.merge_residual[row] = is_known ? args.output.merge_residual[from] : 0.0F;
  for (int64_t k = 0; k < top_k; ++k) {
    args.plan.merge_topk_ids[row * top_k + k] =
        is_known ? args.output.merge_topk_ids[from * top_k + k] : request.rules.mask_token_id;
    args.plan.merge_topk_probs[row * top_k + k] =
        is_known ? args.output.merge_topk_probs[from * top_k + k] : 0.0F;
  }
}

/// The arrays of the sampler for buffer block i of request r.
DIFFULEX_HOST_DEVICE inline void write_sampler_block(const AdvanceArgs& args, int32_t r, int32_t i,
                                                     const DecodeRequest& request, bool is_sampled,
                                                     bool has_gate) {
  const Block& block = request.state.blocks[i];
  const int32_t blk = r * args.buffer_size + i;
  args.plan.blk_valid_len[blk] = is_sampled ? args.block_size : 0;
  args.plan.blk_editable_start[blk] = is_sampled ? block.editable_start : 0;
  args.plan.blk_force_top1[blk] = is_sampled && has_gate ? 1 : 0;
  args.plan.blk_accept_threshold[blk] = request.accept_threshold;
  if (args.plan.blk_edit_threshold != nullptr) {
    args.plan.blk_edit_threshold[blk] = request.edit_threshold;
    args.plan.blk_max_post_edit_steps[blk] = request.max_post_edit_steps;
    args.plan.blk_penalty[blk] = request.penalty;
  }
  args.plan.blk_open_steps[blk] = is_sampled ? block.open_steps : 0;
  args.plan.blk_total_steps[blk] = is_sampled ? block.total_steps : 1;
  args.plan.blk_post_edit_steps[blk] = is_sampled ? block.post_edit_steps : 0;
}

/// Takes over the sampler's write to position i of the buffer.
DIFFULEX_HOST_DEVICE inline void gather_write(const AdvanceArgs& args, int32_t r, int32_t i,
                                              const RowScratch& scratch) {
  const int64_t token = args.output.write_ids[int64_t{r} * args.block_size * args.buffer_size + i];
  scratch.writes[i] = token >= -1 && token <= 0x7fffffff ? static_cast<int32_t>(token) : kBadWrite;
}

/// Strategies that decode in a block buffer (decode_rules.h).
struct BufferDecode {
  /// Takes over the sampler's answer for position i.
  DIFFULEX_HOST_DEVICE static void gather(const AdvanceArgs& args, int32_t r, int32_t i,
                                          const RowScratch& scratch) {
    gather_write(args, r, i, scratch);
  }
  /// Applies the sampler's answer; returns how far the buffer slid.
  DIFFULEX_HOST_DEVICE static int32_t finish(const AdvanceArgs& args, int32_t r,
                                             const RowScratch& scratch) {
    return finish_request(args, r, scratch);
  }
  /// Ends the request or enters its next forward, once the window has slid as well.
  DIFFULEX_HOST_DEVICE static void settle(const AdvanceArgs& /*args*/, int32_t /*r*/,
                                          const RowScratch& scratch) {
    settle_request(scratch);
  }
  /// The arrays at row and position i of the buffer.
  DIFFULEX_HOST_DEVICE static void write(const AdvanceArgs& args, int32_t r, int32_t i,
                                         const RowScratch& scratch) {
    write_at(args, r, i, scratch, whole_rows(args, r));
  }
  /// The same for rows at `places`.
  template <typename Places>
  DIFFULEX_HOST_DEVICE static void write_at(const AdvanceArgs& args, int32_t r, int32_t i,
                                            const RowScratch& scratch, const Places& places) {
    write_row(args, r, i, scratch, places);
    write_sampler_row(args, r, i, scratch, places);
    // The descriptors of an entry come from the host, those of packed void rows excepted.
    const bool is_uploaded =
        args.is_entry && (!Places::kIsPacked || i < num_valid_rows(*scratch.request));
    if (args.output.merge_valid != nullptr && !is_uploaded) {
      write_merge_row(args, r, i, scratch, places);
    }
  }
  /// The arrays of buffer block i.
  DIFFULEX_HOST_DEVICE static void write_block(const AdvanceArgs& args, int32_t r, int32_t i,
                                               const DecodeRequest& request) {
    const bool is_sampled = request.is_running && request.forward.has_sampling &&
                            request.state.blocks[i].status == BlockStatus::kActive;
    write_sampler_block(args, r, i, request, is_sampled,
                        force_top1(request.rules, request.state, i));
  }
  /// The arrays with one entry per request.
  DIFFULEX_HOST_DEVICE static void write_request(const AdvanceArgs& args, int32_t r,
                                                 const DecodeRequest& request) {
    write_request_at(args, r, request, whole_rows(args, r));
  }
  /// The same for rows at `places`.
  template <typename Places>
  DIFFULEX_HOST_DEVICE static void write_request_at(const AdvanceArgs& args, int32_t r,
                                                    const DecodeRequest& request,
                                                    const Places& places) {
    args.plan.context_lens[r] = request.is_running ? request.state.context_len : 0;
    args.plan.valid_slices[r] = places.first + num_valid_rows(request);
    if (args.is_shifted()) {
      const int32_t saved = saved_row(args, request);
      args.plan.last_row_index[r] = saved < 0 ? -1 : places.entry(saved);
    }
  }
};

/// Ends the step in flight of request r, whose state and window `scratch` holds, by the rules of
/// `Decode`, and enters its next forward; at an entry it is in flight already.
template <typename Decode, typename Team>
DIFFULEX_HOST_DEVICE inline void apply_rules(const AdvanceArgs& args, int32_t r,
                                             const RowScratch& scratch, const Team& team) {
  const int32_t num_rows = args.block_size * args.buffer_size;
  if (team.lane() == 0) {
    *scratch.shift = 0;
    scratch.marks[kOtherArgmax] = 0;
    scratch.marks[kIllegalId] = 0;
  }
  team.sync();
  const bool ends_step = !args.is_entry && scratch.request->is_running;
  if (ends_step) {
    for (int32_t i = team.lane(); i < num_rows; i += team.size()) {
      Decode::gather(args, r, i, scratch);
    }
  }
  team.sync();
  if (ends_step && team.lane() == 0) {
    *scratch.shift = Decode::finish(args, r, scratch);
  }
  team.sync();
  slide_window(scratch, window_len(num_rows), *scratch.shift, team);
  if (ends_step && team.lane() == 0) {
    Decode::settle(args, r, scratch);
  }
  team.sync();
}

/// Advances request r, whose state and window `scratch` holds, by the rules of `Decode`.
template <typename Decode, typename Team>
DIFFULEX_HOST_DEVICE inline void advance_row(const AdvanceArgs& args, int32_t r,
                                             const RowScratch& scratch, const Team& team) {
  const DecodeRequest& request = *scratch.request;
  apply_rules<Decode>(args, r, scratch, team);
  for (int32_t i = team.lane(); i < args.block_size * args.buffer_size; i += team.size()) {
    Decode::write(args, r, i, scratch);
  }
  for (int32_t i = team.lane(); i < args.buffer_size; i += team.size()) {
    Decode::write_block(args, r, i, request);
  }
  if (team.lane() == 0) {
    Decode::write_request(args, r, request);
  }
}

}  // namespace diffulex
