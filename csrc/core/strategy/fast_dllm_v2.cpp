// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/strategy/strategies.h"
#include "core/strategy/strategy_base.h"
#include "diffulex/core/dual_cache_rules.h"
#include "diffulex/core/philox.h"

namespace diffulex {
namespace {

/// Dual-cache decoding: blocks of N sub-blocks, one of which is denoised at a time over the
/// provisional KV of the others. A request is prefilled up to the D-block that holds its first open
/// position; everything after that is decode steps of D or B rows.
class FastDllmV2 final : public Strategy {
 public:
  explicit FastDllmV2(const EngineOptions& options) : options_(options) {}

  void init_request(Request& request) const override;
  [[nodiscard]] StepNeed pages_needed(const Request& request,
                                      const StepQuery& query) const override;
  void begin_step(Request& request, const StepNeed& need) const override;
  void write_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                  int32_t req_idx) const override;
  void write_sampler_inputs(const Request& request, StepPlan& plan, int32_t req_idx) const override;
  [[nodiscard]] StepOutcome finish_step(Request& request, StepPlan& plan, int32_t req_idx,
                                        const SamplerOutput& output,
                                        Span<const BlockWrite> writes) const override;
  void on_preempt(Request& request) const override;
  [[nodiscard]] bool decodes_by_rules(const Request& request) const override {
    // The first row of a forward decides no open position: every row has one position at most.
    return options_.masked_rows_only && mask_fill_decodes_by_rules(options_, request);
  }
  [[nodiscard]] int32_t page_len_ahead(const Request& request) const override;
  [[nodiscard]] int32_t context_len_ahead(const Request& request) const override;
  void complete_decode_request(const Request& request, DecodeRequest& decode) const override {
    decode.dual_cache = request.dual_cache;
    decode.dual_step = decode_step(request);
  }

 private:
  /// The decode forward that comes next, or the one in flight: it does not change before its end.
  [[nodiscard]] DualCacheStep decode_step(const Request& request) const {
    return next_dual_step(request.buffer.rules(), request.buffer.state(), request.dual_cache,
                          request.buffer.token_data(), options_.fdv2_use_block_cache);
  }
  [[nodiscard]] static bool wants_seed(const Request& request) {
    return needs_seed(request.buffer.rules(), request.buffer.state(), request.buffer.token_data());
  }
  static void limit_prefix(Request& request);
  void write_sub_block(const Request& request, const DualCacheStep& step, StepPlan& plan,
                       int32_t req_idx) const;
  void write_sub_block_rows(const Request& request, const DualCacheStep& step, StepPlan& plan,
                            int32_t blk) const;
  static void finish_prefill(Request& request);
  [[nodiscard]] bool finish_decode(Request& request, const RequestOutput& result) const;
  [[nodiscard]] static bool seed_block(Request& request, int64_t token);

  EngineOptions options_;
};

/// The row that seeds the D-block must be run, hence the D-block that contains it.
void FastDllmV2::limit_prefix(Request& request) {
  const BlockRules& rules = request.buffer.rules();
  const int32_t base = buffer_start(rules, request.buffer.state());
  request.prefix_limit = wants_seed(request) ? base - dual_block_len(rules) : base;
}

void FastDllmV2::init_request(Request& request) const {
  init_request_limits(options_, request);
  request.buffer.init(request.prompt(), request.limit_end);
  init_dual_cache(request.buffer.rules(), request.buffer.state(), request.dual_cache,
                  request.prompt_len, request.limit_end);
  limit_prefix(request);
  // Every decode forward fills a mask or commits a D-block; rebuilt and prefilled ones are few.
  const int32_t end = options_.page_span(request.limit_end);
  const int32_t num_blocks = end / dual_block_len(request.buffer.rules());
  reserve_step_records(options_, request,
                       static_cast<size_t>(end - request.prompt_len + 2 * num_blocks + 8));
}

StepNeed FastDllmV2::pages_needed(const Request& request, const StepQuery& query) const {
  const BlockRules& rules = request.buffer.rules();
  const int32_t base = buffer_start(rules, request.buffer.state());
  if (query.context_len < base) {
    return cut_prefill_span(options_, {query.context_len, base, base, dual_block_len(rules)},
                            query.row_budget);
  }
  StepNeed need;
  need.num_rows = decode_step(request).num_rows;
  need.page_len = base + dual_block_len(rules);
  return need;
}

int32_t FastDllmV2::page_len_ahead(const Request& request) const {
  const BlockRules& rules = request.buffer.rules();
  const int32_t block_len = dual_block_len(rules);
  const int32_t end = buffer_start(rules, request.buffer.state()) + block_len;
  // After the last sub-block comes a commit, and the device then plans the next D-block at once.
  const bool is_last = decode_step(request).sub_idx == rules.buffer_size - 1;
  // page_span(limit_end) of the options, without its look-up of the strategy by name in every step.
  const int32_t num_blocks = (request.limit_end + block_len - 1) / block_len;
  return is_last ? std::min(end + block_len, num_blocks * block_len) : end;
}

int32_t FastDllmV2::context_len_ahead(const Request& request) const {
  const BlockRules& rules = request.buffer.rules();
  const int32_t base = buffer_start(rules, request.buffer.state());
  // What the other modes store is provisional. Whether a refinement reads it follows, or another
  // INIT, depends on the tokens of the step in flight.
  const bool is_commit = decode_step(request).mode == DualCacheMode::kFinalCommit;
  return is_commit || options_.fdv2_use_block_cache ? base + dual_block_len(rules) : base;
}

void FastDllmV2::begin_step(Request& request, const StepNeed& need) const {
  BufferState& state = request.buffer.state();
  // Its rows are never cut, not even past the end of the response.
  RequestStep& step = open_step(request, need);
  if (need.is_prefill) {
    step.row_mode = RowMode::kPrefillBlockCausal;
    step.store_end = step.first_pos + need.num_rows;
  } else {
    const DualCacheStep dual = decode_step(request);
    begin_dual_step(state, request.dual_cache, dual);
    step.has_sampling = dual.is_sampled;
    step.row_mode = dual.is_cache_only ? RowMode::kCacheOnly : RowMode::kDecodeBlockCausal;
    step.first_pos = dual.first_pos;
    step.store_end = dual.is_stored ? dual.first_pos + dual.num_rows : dual.first_pos;
  }
  mark_stored(request.buffer.rules(), state, step.first_pos, step.store_end);
}

void FastDllmV2::write_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                            int32_t req_idx) const {
  write_block_causal_rows(request, kv_cache, plan, req_idx);
  if (request.step.is_prefill) {
    return;
  }
  const DualCacheStep dual = decode_step(request);
  const auto r = static_cast<size_t>(req_idx);
  plan.context_lens()[r] = dual.context_len;
  if (!dual.is_rebuild) {
    return;
  }
  int64_t* ids = plan.input_ids().data() + plan.cu_seqlens_q()[r];
  for (int32_t i = 0; i < dual.num_rows; ++i) {
    ids[i] = dual_input_token(request.buffer.rules(), request.buffer.state(), request.dual_cache,
                              dual, request.buffer.token_data(), dual.first_pos + i);
  }
}

void FastDllmV2::write_sampler_inputs(const Request& request, StepPlan& plan,
                                      int32_t req_idx) const {
  const RequestStep& step = request.step;
  bool has_seed_row = step.is_final && wants_seed(request);
  if (!step.is_prefill) {
    const DualCacheStep dual = decode_step(request);
    has_seed_row = dual.mode == DualCacheMode::kFinalCommit;
    if (dual.is_sampled) {
      write_sub_block(request, dual, plan, req_idx);
    }
  }
  if (has_seed_row) {
    const auto r = static_cast<size_t>(req_idx);
    const int32_t last_row = plan.cu_seqlens_q()[r] + step.num_rows - 1;
    plan.seed_row()[r] = plan.find_or_append_logits_row(last_row, plan.num_logits_rows());
  }
}

void FastDllmV2::write_sub_block(const Request& request, const DualCacheStep& step, StepPlan& plan,
                                 int32_t req_idx) const {
  const BlockRules& rules = request.buffer.rules();
  const BufferState& state = request.buffer.state();
  const Block& block = state.blocks[step.sub_idx];
  const int32_t start = block_start(rules, state, block);
  const int32_t first_row = plan.cu_seqlens_q()[static_cast<size_t>(req_idx)];
  const int32_t row0 = first_row + start - step.first_pos;
  const int32_t blk = plan.append_block(req_idx, block.block_id, start, row0);
  const auto index = static_cast<size_t>(blk);
  if (row0 == first_row) {
    plan.blk_prev_row()[index] = kNoPrevRow;  // the shift never leaves the forward
  }
  plan.blk_editable_start()[index] = block.editable_start;
  plan.blk_force_top1()[index] = 1;  // no predecessor gate
  plan.blk_accept_threshold()[index] = request.accept_threshold;
  plan.blk_total_steps()[index] = block.total_steps;
  plan.blk_open_steps()[index] = block.open_steps;
  plan.blk_post_edit_steps()[index] = block.post_edit_steps;
  plan.blk_step()[index] = block.total_steps - 1;  // this forward is already counted
  write_sub_block_rows(request, step, plan, blk);
}

void FastDllmV2::write_sub_block_rows(const Request& request, const DualCacheStep& step,
                                      StepPlan& plan, int32_t blk) const {
  const int32_t block_size = options_.block_size;
  const auto offset = static_cast<size_t>(blk) * static_cast<size_t>(block_size);
  int64_t* blk_tokens = plan.blk_tokens().data() + offset;
  int32_t* row_index = plan.blk_row_index().data() + offset;
  const auto index = static_cast<size_t>(blk);
  const int32_t start = plan.blk_start()[index];
  const int32_t first_row = plan.blk_row0()[index] - (start - step.first_pos);
  const int32_t* tokens = request.buffer.token_data() + start;
  const int32_t editable_start = plan.blk_editable_start()[index];
  const bool is_sampled = request.params.is_sampled();
  const LogitsRowCursor cursor = plan.logits_cursor();
  int32_t count = 0;
  for (int32_t rel = 0; rel < block_size; ++rel) {
    blk_tokens[rel] = tokens[rel];
    row_index[rel] = -1;
    const bool is_open = rel >= editable_start && tokens[rel] == options_.mask_token_id;
    if (!is_open && options_.masked_rows_only) {
      continue;
    }
    cursor.rows[count] = first_row + dual_logits_row(step, start + rel);
    row_index[rel] = cursor.next_index + count;
    if (is_sampled) {
      cursor.inv_temperature[count] = 1.0F / request.params.temperature;
      cursor.uniforms[count] =
          philox_uniform(request.seed, start + rel, plan.blk_step()[index], RandomStream::kToken);
    }
    ++count;
  }
  plan.commit_logits_rows(count, is_sampled);
  if (request.params.is_filtered()) {
    plan.set_row_filter(count, {request.params.top_k, request.params.top_p, request.params.min_p});
  }
}

StepOutcome FastDllmV2::finish_step(Request& request, StepPlan& plan, int32_t req_idx,
                                    const SamplerOutput& output,
                                    Span<const BlockWrite> writes) const {
  const RequestStep step = request.step;
  const RequestOutput result{plan, req_idx, output, writes};
  const auto r = static_cast<size_t>(req_idx);
  request.last_writes.clear();
  bool has_failed = false;
  if (step.is_prefill) {
    finish_prefill(request);
  } else {
    has_failed = !finish_decode(request, result);
  }
  if (plan.seed_row()[r] >= 0) {
    has_failed = !seed_block(request, output.pending_next_token()[r]) || has_failed;
  }
  request.step.is_in_flight = false;
  BufferState& state = request.buffer.state();
  advance_settled(request.buffer.rules(), state, request.buffer.token_data());
  StepOutcome outcome;
  outcome.new_tokens = static_cast<int32_t>(request.last_writes.size());
  record_forward(options_, request, step.is_prefill, outcome.new_tokens);
  outcome.finish_reason =
      has_failed ? FinishReason::kError : check_stop(state, stop_limits(request));
  return outcome;
}

void FastDllmV2::finish_prefill(Request& request) {
  request.buffer.state().context_len = request.step.store_end;
  if (request.step.is_final) {
    request.resume_until = 0;
    request.needs_prompt_prefill = false;
  }
}

/// Applies a decode forward; false when it made no progress or its logits were bad.
bool FastDllmV2::finish_decode(Request& request, const RequestOutput& result) const {
  const BlockRules& rules = request.buffer.rules();
  BufferState& state = request.buffer.state();
  const DualCacheStep dual = decode_step(request);
  if (dual.mode == DualCacheMode::kFinalCommit) {
    finish_final_commit(rules, state, request.dual_cache);
    return true;
  }
  if (dual.mode == DualCacheMode::kFullBufferInit) {
    finish_full_buffer_init(rules, state, request.dual_cache, dual, request.buffer.token_data());
  }
  if (!dual.is_sampled) {
    return true;
  }
  ++state.blocks[dual.sub_idx].open_steps;
  apply_writes(request, result);
  const bool has_bad_logits = apply_verdicts(request, result);
  return !has_bad_logits && !result.writes.empty();
}

/// Seeds the D-block; false when the row had no finite candidate.
bool FastDllmV2::seed_block(Request& request, int64_t token) {
  if (token < 0) {
    return false;
  }
  BufferState& state = request.buffer.state();
  place_seed(request.buffer.rules(), state, static_cast<int32_t>(token),
             request.buffer.token_data());
  request.last_writes.push_back(TokenWrite{buffer_start(request.buffer.rules(), state), 0.0F});
  return true;
}

void FastDllmV2::on_preempt(Request& request) const {
  BufferState& state = request.buffer.state();
  if (request.step.is_in_flight && !request.step.is_prefill) {
    undo_dual_step(state, decode_step(request));
  }
  request.step = RequestStep{};
  request.resume_until =
      drop_dual_cache(request.buffer.rules(), state, request.dual_cache,
                      request.buffer.token_data(), options_.fdv2_use_block_cache);
  request.needs_prompt_prefill = false;
  limit_prefix(request);
}

}  // namespace

std::unique_ptr<Strategy> make_fast_dllm_v2(const EngineOptions& options) {
  return std::make_unique<FastDllmV2>(options);
}

}  // namespace diffulex
