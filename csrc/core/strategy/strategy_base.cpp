// SPDX-License-Identifier: Apache-2.0
#include "core/strategy/strategy_base.h"

#include <algorithm>
#include <cmath>

#include "diffulex/core/philox.h"

namespace diffulex {
namespace {

/// MaskKind::kBlockCausal of kernels/attention.h, which core may not include.
constexpr int32_t kBlockCausalMask = 1;

void add_stop_ids(BufferState& state, const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) {
    if (!is_stop_id(state, id)) {
      state.stop_ids[state.num_stop_ids++] = id;
    }
  }
}

/// A span [begin, end) of rows cut to the budget: whole, or the longest chunk that ends at a block
/// boundary at or before `chunk_limit`, or nothing.
[[nodiscard]] StepNeed cut_span(const EngineOptions& options, int32_t begin, int32_t end,
                                int32_t chunk_limit, int32_t row_budget) {
  StepNeed need;
  need.is_prefill = true;
  need.num_rows = end - begin;
  if (need.num_rows <= row_budget) {
    need.page_len = chunk_limit;
    return need;
  }
  need.is_final = false;
  const int32_t block_size = options.block_size;
  const int32_t room =
      options.enable_chunked_prefill ? std::max(row_budget, 0) / block_size * block_size : 0;
  need.num_rows = std::min(room, chunk_limit - begin);
  need.page_len = begin + need.num_rows;
  return need;
}

/// Tokens and logits rows of plan block `blk`.
void write_block_rows(const EngineOptions& options, const Request& request, const Block& block,
                      StepPlan& plan, int32_t blk) {
  const int32_t block_size = options.block_size;
  const int32_t start = block.block_id * block_size;
  const int32_t row0 = plan.blk_row0()[static_cast<size_t>(blk)];
  const auto offset = static_cast<size_t>(blk) * static_cast<size_t>(block_size);
  int64_t* blk_tokens = plan.blk_tokens().data() + offset;
  int32_t* row_index = plan.blk_row_index().data() + offset;
  const int32_t* tokens = request.buffer.token_data() + start;
  const LogitsRowCursor cursor = plan.logits_cursor();
  const int32_t mask_id = options.mask_token_id;
  for (int32_t rel = 0; rel < block_size; ++rel) {
    blk_tokens[rel] = tokens[rel];
  }
  std::fill_n(row_index, block_size, -1);
  // num_masks ends the scan early; all rows are wanted when rows are not restricted to masks.
  const bool wants_all = !options.masked_rows_only;
  const int32_t wanted = wants_all ? block_size : block.num_masks;
  int32_t count = 0;
  for (int32_t rel = wants_all ? 0 : block.editable_start; count < wanted; ++rel) {
    if (wants_all || tokens[rel] == mask_id) {
      cursor.rows[count] = row0 + rel;
      row_index[rel] = cursor.next_index + count;
      ++count;
    }
  }
  const bool is_greedy = request.params.temperature < kGreedyTemperature;
  if (!is_greedy) {
    std::fill_n(cursor.inv_temperature, count, 1.0F / request.params.temperature);
    // The number of earlier sampler steps of the block: this forward is already counted.
    const int32_t draw_step = block.total_steps - 1;
    for (int32_t i = 0; i < count; ++i) {
      cursor.uniforms[i] = philox_uniform(request.seed, start + cursor.rows[i] - row0, draw_step,
                                          RandomStream::kToken);
    }
  }
  plan.commit_logits_rows(count, !is_greedy);
}

void apply_writes(Request& request, const RequestOutput& result) {
  const BlockRules& rules = request.buffer.rules();
  BufferState& state = request.buffer.state();
  const Span<const float> confidence = result.output.confidence();
  const Span<const int32_t> blk_id = result.plan.blk_id();
  const int32_t first_id = state.blocks[0].block_id;
  request.last_writes.resize(result.writes.size());
  TokenWrite* entry = request.last_writes.data();
  for (const BlockWrite& write : result.writes) {
    const int32_t block_id = blk_id[static_cast<size_t>(write.blk)];
    apply_write(rules, state, block_id - first_id, write.rel, write.token,
                request.buffer.token_data());
    const int32_t position = block_id * rules.block_size + write.rel;
    const float value = confidence[static_cast<size_t>(write.blk * rules.block_size + write.rel)];
    entry->position = position;
    entry->confidence = value;
    ++entry;
    request.confidences[static_cast<size_t>(position)] = value;
  }
}

/// Takes over the verdicts; returns whether any row had no finite candidate.
[[nodiscard]] bool apply_verdicts(Request& request, const RequestOutput& result) {
  bool has_bad_logits = false;
  BufferState& state = request.buffer.state();
  const Span<const int32_t> blk_id = result.plan.blk_id();
  const Span<const int32_t> all_flags = result.output.flags();
  const Span<const float> same_token_ratio = result.output.same_token_ratio();
  const int32_t first_id = state.blocks[0].block_id;
  const int32_t end = result.plan.first_block(result.req_idx + 1);
  for (int32_t blk = result.plan.first_block(result.req_idx); blk < end; ++blk) {
    const auto index = static_cast<size_t>(blk);
    Block& block = state.blocks[blk_id[index] - first_id];
    const int32_t flags = all_flags[index];
    block.commit_ready = (flags & kSamplerCommittable) != 0;
    block.same_as_previous = (flags & kSamplerSameAsPrevious) != 0;
    block.all_confident = (flags & kSamplerAllConfident) != 0;
    block.same_token_ratio = same_token_ratio[index];
    has_bad_logits = has_bad_logits || (flags & kSamplerBadLogits) != 0;
  }
  return has_bad_logits;
}

/// Derives a forward cap once, from the throughput of the first steps.
void update_auto_nfe(const EngineOptions& options, Request& request) {
  if (!options.auto_max_nfe || request.max_nfe > 0 ||
      request.nfe < options.auto_max_nfe_warmup_steps) {
    return;
  }
  const double tokens_per_forward =
      std::max(static_cast<double>(request.decided_tokens) / static_cast<double>(request.nfe),
               options.auto_max_nfe_tpf_floor);
  const double cap = std::ceil(static_cast<double>(request.params.max_tokens) / tokens_per_forward);
  request.max_nfe = std::max(request.nfe, static_cast<int32_t>(cap));
  request.is_auto_nfe_cap = true;
}

}  // namespace

void init_mask_fill_request(const EngineOptions& options, Request& request) {
  const int32_t prompt_len = request.prompt_len;
  request.limit_end = static_cast<int32_t>(
      std::min(int64_t{prompt_len} + request.params.max_tokens, int64_t{options.max_model_len}));
  BufferState& state = request.buffer.state();
  state.num_stop_ids = 0;
  if (!request.params.ignore_eos) {
    add_stop_ids(state, options.stop_token_ids);
    add_stop_ids(state, request.params.stop_token_ids);
  }
  request.buffer.init(request.prompt(), request.limit_end);
  request.prefix_limit = prompt_len / options.block_size * options.block_size;
  request.needs_prompt_prefill = true;
  request.resume_until = 0;

  // Everything a step appends to is reserved here, so that steps do not allocate. Every decode
  // forward fills a mask or stores a block; prefill and resume forwards are few.
  const int32_t num_blocks = (request.limit_end + options.block_size - 1) / options.block_size;
  const int32_t max_len = (num_blocks + options.buffer_size) * options.block_size;
  const auto num_steps =
      static_cast<size_t>(max_len - prompt_len) + static_cast<size_t>(2 * num_blocks) + 8;
  request.confidences.assign(static_cast<size_t>(max_len), 0.0F);
  request.new_tokens_per_step.reserve(num_steps);
  request.prefill_per_step.reserve(num_steps);
  request.last_writes.reserve(static_cast<size_t>(options.decode_rows()));
  request.page_table.pages.reserve(static_cast<size_t>(options.max_pages_per_req()));
}

StepNeed mask_fill_need(const EngineOptions& options, const Request& request,
                        const StepQuery& query) {
  const BlockRules& rules = request.buffer.rules();
  const BufferState& state = request.buffer.state();
  if (request.needs_prompt_prefill) {
    // An aligned prompt has no valid block yet and opens none before its KV is stored.
    const bool activates = state.num_valid > 0 && can_activate(rules, state);
    const int32_t end = valid_end(rules, state) + (activates ? rules.block_size : 0);
    if (end > query.context_len) {
      return cut_span(options, query.context_len, end, buffer_start(rules, state),
                      query.row_budget);
    }
  } else if (request.resume_until > query.context_len) {
    return cut_span(options, query.context_len, request.resume_until, request.resume_until,
                    query.row_budget);
  }
  StepNeed need;
  need.num_rows = options.decode_rows();
  need.page_len = frozen_end(rules, state);
  return need;
}

void begin_mask_fill_step(Request& request, const StepNeed& need) {
  const BlockRules& rules = request.buffer.rules();
  BufferState& state = request.buffer.state();
  RequestStep& step = request.step;
  step = RequestStep{};
  step.is_in_flight = true;
  step.is_prefill = need.is_prefill;
  step.is_final = need.is_final;
  step.num_rows = need.num_rows;
  request.status = need.is_prefill ? RequestStatus::kPrefilling : RequestStatus::kDecoding;
  if (!need.is_prefill) {
    request.needs_prompt_prefill = false;
    request.resume_until = 0;
  }
  const bool runs_buffer = !need.is_prefill || (request.needs_prompt_prefill && need.is_final);
  step.has_activated = runs_buffer && begin_buffer_step(rules, state);
  step.first_pos = state.context_len;
  if (runs_buffer) {
    step.num_valid_rows = valid_end(rules, state) - step.first_pos;
    step.store_end = frozen_end(rules, state);
    step.has_sampling = step.store_end < valid_end(rules, state);
  } else {
    step.num_valid_rows = need.num_rows;
    step.store_end = step.first_pos + need.num_rows;
  }
  step.row_mode = need.is_prefill ? RowMode::kPrefillBlockCausal : RowMode::kDecodeBlockCausal;
  mark_stored(rules, state, step.first_pos, step.store_end);
}

void write_block_causal_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                             int32_t req_idx) {
  const RequestStep& step = request.step;
  const auto r = static_cast<size_t>(req_idx);
  const int32_t row0 = plan.cu_seqlens_q()[r];
  int64_t* ids = plan.input_ids().data() + row0;
  int64_t* positions = plan.positions().data() + row0;
  int32_t* slots = plan.slot_mapping().data() + row0;
  const int32_t* tokens = request.buffer.token_data() + step.first_pos;
  for (int32_t i = 0; i < step.num_valid_rows; ++i) {
    ids[i] = tokens[i];
    positions[i] = step.first_pos + i;
  }
  const int32_t num_dummy = step.num_rows - step.num_valid_rows;
  // Position 0 keeps dummy rows inside the rotary table whatever the length limit is.
  std::fill_n(ids + step.num_valid_rows, num_dummy, int64_t{request.buffer.rules().mask_token_id});
  std::fill_n(positions + step.num_valid_rows, num_dummy, int64_t{0});
  const int32_t num_stored = step.store_end - step.first_pos;
#ifndef NDEBUG
  for (int32_t position = step.first_pos; position < step.store_end; ++position) {
    DIFFULEX_CHECK(kv_cache.is_writable(request.page_table, position),
                   "write_block_causal_rows: expected a private page at position ", position,
                   " of request ", request.req_id);
  }
#endif
  kv_cache.write_slots(request.page_table, step.first_pos, step.store_end, slots);
  if (num_stored > 0) {
    plan.note_kv_store();
  }
  std::fill_n(slots + num_stored, step.num_rows - num_stored, -1);

  plan.context_lens()[r] = request.context_len();
  plan.valid_slices()[r] = row0 + step.num_valid_rows;
  plan.row_mode()[r] = static_cast<int32_t>(step.row_mode);
  plan.mask_kinds()[r] = kBlockCausalMask;
  plan.prefix_lens()[r] = 0;
  plan.padded_prefix_lens()[r] = 0;
}

void write_active_blocks(const EngineOptions& options, const Request& request, StepPlan& plan,
                         int32_t req_idx) {
  if (!request.step.has_sampling) {
    return;
  }
  const BlockRules& rules = request.buffer.rules();
  const BufferState& state = request.buffer.state();
  const int32_t request_row0 = plan.cu_seqlens_q()[static_cast<size_t>(req_idx)];
  for (int32_t i = 0; i < state.num_valid; ++i) {
    const Block& block = state.blocks[i];
    if (block.status != BlockStatus::kActive) {
      continue;
    }
    const int32_t row0 = request_row0 + block.block_id * rules.block_size - request.step.first_pos;
    const int32_t blk = plan.append_block(req_idx, block.block_id, row0);
    const auto index = static_cast<size_t>(blk);
    plan.blk_editable_start()[index] = block.editable_start;
    plan.blk_force_top1()[index] = force_top1(rules, state, i) ? 1 : 0;
    plan.blk_accept_threshold()[index] = request.accept_threshold;
    plan.blk_total_steps()[index] = block.total_steps;
    plan.blk_open_steps()[index] = block.open_steps;
    plan.blk_post_edit_steps()[index] = block.post_edit_steps;
    write_block_rows(options, request, block, plan, blk);
  }
}

StepOutcome finish_mask_fill_step(const EngineOptions& options, Request& request,
                                  const RequestOutput& result) {
  const BlockRules& rules = request.buffer.rules();
  BufferState& state = request.buffer.state();
  const RequestStep step = request.step;
  const auto new_tokens = static_cast<int32_t>(result.writes.size());
  request.step.is_in_flight = false;
  ++request.nfe;
  request.last_writes.clear();
  bool has_bad_logits = false;
  if (step.has_sampling) {
    count_open_steps(rules, state);
    apply_writes(request, result);
    has_bad_logits = apply_verdicts(request, result);
  }
  if (step.is_prefill) {
    // Prompt blocks before the buffer have no entry of their own: C alone tells them apart.
    mark_cached(rules, state, std::min(step.store_end, buffer_start(rules, state)));
  }
  const Transitions transitions = scan_transitions(rules, state);
  count_held(state, !step.is_prefill, transitions.num_stored);
  advance_settled(rules, state, request.buffer.token_data());
  if (step.is_prefill && step.is_final) {
    request.resume_until = 0;
    request.needs_prompt_prefill = false;
  }
  request.new_tokens = new_tokens;
  request.decided_tokens += new_tokens;
  request.new_tokens_per_step.push_back(new_tokens);
  request.prefill_per_step.push_back(step.is_prefill ? 1 : 0);
  update_auto_nfe(options, request);

  StepOutcome outcome;
  outcome.new_tokens = new_tokens;
  const bool is_stuck = !step.is_prefill && step.has_sampling && new_tokens == 0 &&
                        transitions.num_frozen + transitions.num_stored == 0;
  const StopLimits limits{request.params.max_tokens, request.nfe, request.max_nfe,
                          request.params.max_repetition_run};
  outcome.finish_reason =
      has_bad_logits || is_stuck ? FinishReason::kError : check_stop(state, limits);
  return outcome;
}

void preempt_mask_fill_request(Request& request) {
  const BlockRules& rules = request.buffer.rules();
  BufferState& state = request.buffer.state();
  if (request.step.is_in_flight && request.step.has_sampling) {
    undo_buffer_step(rules, state, request.step.has_activated);
  }
  request.step = RequestStep{};
  request.resume_until = drop_cached(rules, state);
  request.prefix_limit = request.resume_until;
  request.needs_prompt_prefill = false;
}

}  // namespace diffulex
