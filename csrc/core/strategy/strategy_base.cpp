// SPDX-License-Identifier: Apache-2.0
#include "core/strategy/strategy_base.h"

#include <algorithm>
#include <cmath>

#include "core/strategy/logits_rows.h"
#include "diffulex/core/decode_rules.h"

namespace diffulex {
namespace {

void add_stop_ids(BufferState& state, const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) {
    if (!is_stop_id(state, id)) {
      state.stop_ids[state.num_stop_ids++] = id;
    }
  }
}

/// Longest prefix hit of a request whose KV of [0, end) is to be had. With shifted logits the block
/// before `end` is run again where position `end` is predicted: only a forward makes its row.
[[nodiscard]] int32_t hit_limit(const EngineOptions& options, const Request& request, int32_t end) {
  const bool needs_row = options.logits_shift && end >= request.prompt_len;
  return needs_row ? std::max(end - options.block_size, 0) : end;
}

/// Appends the ACTIVE blocks of a forward that samples.
void append_active_blocks(const EngineOptions& options, const Request& request, StepPlan& plan,
                          int32_t req_idx) {
  const BlockRules& rules = request.buffer.rules();
  const BufferState& state = request.buffer.state();
  const bool has_edits = plan.layout().has_edits;
  const int32_t request_row0 = plan.cu_seqlens_q()[static_cast<size_t>(req_idx)];
  for (int32_t i = 0; i < state.num_valid; ++i) {
    const Block& block = state.blocks[i];
    if (block.status != BlockStatus::kActive) {
      continue;
    }
    const int32_t start = block_start(rules, state, block);
    const int32_t row0 = request_row0 + start - request.step.first_pos;
    const int32_t blk = plan.append_block(req_idx, block.block_id, start, row0);
    const auto index = static_cast<size_t>(blk);
    plan.blk_editable_start()[index] = block.editable_start;
    plan.blk_force_top1()[index] = force_top1(rules, state, i) ? 1 : 0;
    plan.blk_accept_threshold()[index] = request.accept_threshold;
    if (has_edits) {
      plan.blk_edit_threshold()[index] = request.edit_threshold;
      plan.blk_max_post_edit_steps()[index] = request.max_post_edit_steps;
      plan.blk_penalty()[index] = request.penalty;
    }
    plan.blk_total_steps()[index] = block.total_steps;
    plan.blk_open_steps()[index] = block.open_steps;
    plan.blk_post_edit_steps()[index] = block.post_edit_steps;
    plan.blk_step()[index] = block.total_steps - 1;  // this forward is already counted
    write_block_rows(options, request, block, plan, blk);
  }
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

void init_request_limits(const EngineOptions& options, Request& request) {
  request.limit_end = static_cast<int32_t>(std::min(
      int64_t{request.prompt_len} + request.params.max_tokens, int64_t{options.max_model_len}));
  BufferState& state = request.buffer.state();
  state.num_stop_ids = 0;
  if (!request.params.ignore_eos) {
    add_stop_ids(state, options.stop_token_ids);
    add_stop_ids(state, request.params.stop_token_ids);
  }
  request.needs_prompt_prefill = true;
  request.resume_until = 0;
}

void reserve_step_records(const EngineOptions& options, Request& request, size_t num_steps) {
  const int32_t num_blocks = (request.limit_end + options.block_size - 1) / options.block_size;
  const int32_t max_len = (num_blocks + options.buffer_size) * options.block_size;
  request.confidences.assign(static_cast<size_t>(max_len), 0.0F);
  request.new_tokens_per_step.reserve(num_steps);
  request.prefill_per_step.reserve(num_steps);
  request.last_writes.reserve(static_cast<size_t>(options.decode_rows()));
  request.page_table.pages.reserve(static_cast<size_t>(options.max_pages_per_req()));
}

StepNeed cut_prefill_span(const EngineOptions& options, const PrefillSpan& span,
                          int32_t row_budget) {
  StepNeed need;
  need.is_prefill = true;
  need.num_rows = span.end - span.begin;
  if (need.num_rows <= row_budget) {
    need.page_len = span.chunk_limit;
    return need;
  }
  need.is_final = false;
  const int32_t room = options.enable_chunked_prefill
                           ? std::max(row_budget, 0) / span.granularity * span.granularity
                           : 0;
  need.num_rows = std::min(room, span.chunk_limit - span.begin);
  need.page_len = span.begin + need.num_rows;
  return need;
}

void init_mask_fill_request(const EngineOptions& options, Request& request) {
  const int32_t prompt_len = request.prompt_len;
  init_request_limits(options, request);
  request.buffer.init(request.prompt(), request.limit_end,
                      Span<const int32_t>(request.params.template_token_ids));
  request.prefix_limit =
      hit_limit(options, request, prompt_len / options.block_size * options.block_size);

  // Everything a step appends to is reserved here, so that steps do not allocate. Every decode
  // forward fills a mask or stores a block; prefill and resume forwards are few.
  const int32_t num_blocks = (request.limit_end + options.block_size - 1) / options.block_size;
  const int32_t max_len = (num_blocks + options.buffer_size) * options.block_size;
  const auto num_steps =
      static_cast<size_t>(max_len - prompt_len) + static_cast<size_t>(2 * num_blocks) + 8;
  reserve_step_records(options, request, num_steps);
}

StepNeed mask_fill_need(const EngineOptions& options, const Request& request,
                        const StepQuery& query) {
  const BlockRules& rules = request.buffer.rules();
  const BufferState& state = request.buffer.state();
  if (request.needs_prompt_prefill) {
    // The first blocks run in the forward of the prompt, which does not see them. Where the cache
    // has the whole of it, nothing is left but a decode step.
    const int32_t prompt_end = buffer_start(rules, state);
    const int32_t end =
        valid_end(rules, state) + (can_activate(rules, state) ? rules.block_size : 0);
    if (state.num_valid > 0 || query.context_len < prompt_end) {
      return cut_prefill_span(options, {query.context_len, end, prompt_end, rules.block_size},
                              query.row_budget);
    }
  } else if (request.resume_until > query.context_len) {
    return cut_prefill_span(
        options, {query.context_len, request.resume_until, request.resume_until, rules.block_size},
        query.row_budget);
  }
  StepNeed need;
  need.num_rows = options.decode_rows();
  need.page_len = storable_end(rules, state);
  return need;
}

void begin_mask_fill_step(const EngineOptions& options, Request& request, const StepNeed& need) {
  const BlockRules& rules = request.buffer.rules();
  BufferState& state = request.buffer.state();
  RequestStep& step = open_step(request, need);
  if (!need.is_prefill || (request.needs_prompt_prefill && need.is_final)) {
    const BufferForward forward = enter_buffer(rules, state);
    if (forward.has_activated && !request.params.template_token_ids.empty()) {
      request.buffer.count_masks(state.num_valid - 1);
    }
    step.has_activated = forward.has_activated;
    step.has_sampling = forward.has_sampling;
    step.first_pos = forward.first_pos;
    step.num_valid_rows = forward.num_valid_rows;
    step.num_rows = need.is_prefill ? need.num_rows : forward.num_valid_rows;
    step.store_end = forward.store_end;
  } else {
    step.store_end = step.first_pos + need.num_rows;
    mark_stored(rules, state, step.first_pos, step.store_end);
  }
  step.row_mode = need.is_prefill ? RowMode::kPrefillBlockCausal : RowMode::kDecodeBlockCausal;
  if (options.logits_shift && step.store_end > step.first_pos) {
    step.saved_pos = step.store_end - 1;
  }
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
  if (!step.is_prefill) {
    // A device that runs ahead does not know yet how much of it is final, and kernels cut their
    // work by the bound: both loops take the same.
    plan.note_context_bound(request.stored_end);
  }
  plan.valid_slices()[r] = row0 + step.num_valid_rows;
  plan.row_mode()[r] = static_cast<int32_t>(step.row_mode);
  plan.mask_kinds()[r] = mask_kind(step.row_mode);
  plan.prefix_lens()[r] = 0;
  // The mask counts blocks from here.
  const bool starts_at_prompt = request.buffer.rules().starts_at_prompt;
  plan.padded_prefix_lens()[r] = starts_at_prompt ? request.prompt_len : 0;
}

void write_active_blocks(const EngineOptions& options, const Request& request, StepPlan& plan,
                         int32_t req_idx) {
  const int32_t first_index = plan.num_logits_rows();
  if (request.step.has_sampling) {
    append_active_blocks(options, request, plan, req_idx);
  }
  write_saved_row(request, plan, req_idx, first_index);
}

int32_t apply_writes(Request& request, const RequestOutput& result) {
  const BlockRules& rules = request.buffer.rules();
  BufferState& state = request.buffer.state();
  const Span<const float> confidence = result.output.confidence();
  const Span<const int32_t> blk_id = result.plan.blk_id();
  const int32_t first_id = state.blocks[0].block_id;
  request.last_writes.resize(result.writes.size());
  TokenWrite* entry = request.last_writes.data();
  int32_t num_filled = 0;
  for (const BlockWrite& write : result.writes) {
    const int32_t block_id = blk_id[static_cast<size_t>(write.blk)];
    const bool was_open = apply_write(rules, state, block_id - first_id, write.rel, write.token,
                                      request.buffer.token_data());
    num_filled += was_open ? 1 : 0;
    const int32_t position = state.origin + block_id * rules.block_size + write.rel;
    const float value = confidence[static_cast<size_t>(write.blk * rules.block_size + write.rel)];
    entry->position = position;
    entry->confidence = value;
    ++entry;
    request.confidences[static_cast<size_t>(position)] = value;
  }
  return num_filled;
}

bool apply_verdicts(Request& request, const RequestOutput& result) {
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
    const bool is_bad = apply_verdict(block, all_flags[index], same_token_ratio[index]);
    has_bad_logits = has_bad_logits || is_bad;
  }
  return has_bad_logits;
}

RequestStep& open_step(Request& request, const StepNeed& need) {
  request.status = need.is_prefill ? RequestStatus::kPrefilling : RequestStatus::kDecoding;
  if (!need.is_prefill) {
    request.needs_prompt_prefill = false;
    request.resume_until = 0;
  }
  RequestStep& step = request.step;
  step = RequestStep{};
  step.is_in_flight = true;
  step.is_prefill = need.is_prefill;
  step.is_final = need.is_final;
  step.first_pos = request.buffer.state().context_len;
  step.num_rows = need.num_rows;
  step.num_valid_rows = need.num_rows;
  return step;
}

void record_forward(const EngineOptions& options, Request& request, bool is_prefill,
                    int32_t new_tokens) {
  ++request.nfe;
  request.new_tokens = new_tokens;
  request.decided_tokens += new_tokens;
  request.new_tokens_per_step.push_back(new_tokens);
  request.prefill_per_step.push_back(is_prefill ? 1 : 0);
  update_auto_nfe(options, request);
}

StopLimits stop_limits(const Request& request) {
  return StopLimits{request.params.max_tokens, request.nfe, request.max_nfe,
                    request.params.max_repetition_run};
}

StepOutcome finish_mask_fill_step(const EngineOptions& options, Request& request,
                                  const RequestOutput& result) {
  const BlockRules& rules = request.buffer.rules();
  BufferState& state = request.buffer.state();
  const RequestStep step = request.step;
  int32_t new_tokens = 0;
  request.step.is_in_flight = false;
  request.last_writes.clear();
  bool has_bad_logits = false;
  if (step.has_sampling) {
    count_sampler_steps(rules, state);
    new_tokens = apply_writes(request, result);
    has_bad_logits = apply_verdicts(request, result);
  }
  if (step.is_prefill) {
    // Prompt blocks before the buffer have no entry: only C tells them apart.
    mark_cached(rules, state, std::min(step.store_end, buffer_start(rules, state)));
  }
  const Transitions transitions = close_buffer(rules, state, !step.is_prefill);
  settle_buffer(rules, state, step.has_sampling, request.buffer.token_data());
  request.carry_pos = step.saved_pos >= 0 ? step.saved_pos : request.carry_pos;
  request.stored_end = step.store_end;
  if (step.is_prefill && step.is_final) {
    request.resume_until = 0;
    request.needs_prompt_prefill = false;
  }
  record_forward(options, request, step.is_prefill, new_tokens);

  StepOutcome outcome;
  outcome.new_tokens = new_tokens;
  const bool has_failed = has_bad_logits || (!step.is_prefill && step.has_sampling &&
                                             is_stuck(rules, transitions, new_tokens));
  outcome.finish_reason = judge_step(state, stop_limits(request), has_failed);
  return outcome;
}

bool mask_fill_decodes_by_rules(const EngineOptions& options, const Request& request) {
  // A device keeps the tokens of the buffer alone, and those of a template reach past it.
  return request.params.template_token_ids.empty() &&
         (!options.auto_max_nfe || request.max_nfe > 0);
}

void preempt_mask_fill_request(const EngineOptions& options, Request& request) {
  const BlockRules& rules = request.buffer.rules();
  BufferState& state = request.buffer.state();
  if (request.step.is_in_flight && request.step.has_sampling) {
    undo_buffer_step(rules, state, request.step.has_activated);
  }
  request.step = RequestStep{};
  request.resume_until = drop_cached(rules, state);
  request.prefix_limit = hit_limit(options, request, request.resume_until);
  request.needs_prompt_prefill = false;
  request.carry_pos = -1;  // the saved row belongs to the slot
  request.stored_end = 0;
}

}  // namespace diffulex
