// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/strategy/strategies.h"
#include "core/strategy/strategy_base.h"
#include "diffulex/core/canvas_rules.h"
#include "diffulex/core/philox.h"

namespace diffulex {
namespace {

constexpr uint8_t kEncoderPass = 0;
constexpr uint8_t kDecoderPass = 1;
constexpr int32_t kZeroSignal = -1;

[[nodiscard]] CanvasRules make_canvas_rules(const EngineOptions& options) {
  CanvasRules rules;
  rules.max_denoising_steps = options.max_denoising_steps;
  rules.max_model_len = options.max_model_len;
  rules.vocab_size = options.vocab_size;
  rules.t_min = options.t_min;
  rules.t_max = options.t_max;
  return rules;
}

/// The canvas state machine. Prompt and lost KV are prefilled causally; every other forward,
/// denoising or encoding, is a decode step of exactly B rows.
class DiffusionGemma final : public Strategy {
 public:
  explicit DiffusionGemma(const EngineOptions& options)
      : options_(options), canvas_rules_(make_canvas_rules(options)) {}

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
    return mask_fill_decodes_by_rules(options_, request);
  }
  [[nodiscard]] int32_t page_len_ahead(const Request& request) const override;
  void complete_decode_request(const Request& request, DecodeRequest& decode) const override;

 private:
  /// End of the span that a prefill forward must encode: the prompt, or what a preemption took.
  [[nodiscard]] static int32_t rebuild_end(const Request& request) {
    return request.resume_until > 0 ? request.resume_until : request.prompt_len;
  }
  [[nodiscard]] int32_t valid_len(const Request& request) const {
    const BlockRules& rules = request.buffer.rules();
    return canvas_valid_len(rules, canvas_rules_, buffer_start(rules, request.buffer.state()));
  }
  void open_next_canvas(Request& request) const {
    open_canvas(request.buffer.rules(), canvas_rules_, request.buffer.state(), request.canvas,
                request.seed, request.buffer.token_data());
  }
  void write_canvas_rows(const Request& request, StepPlan& plan, int32_t blk) const;
  [[nodiscard]] int32_t finish_denoise(Request& request, const RequestOutput& result) const;
  static void apply_canvas(Request& request, const RequestOutput& result, int32_t count);

  EngineOptions options_;
  CanvasRules canvas_rules_;
};

void DiffusionGemma::init_request(Request& request) const {
  init_request_limits(options_, request);
  request.buffer.init(request.prompt(), request.limit_end);
  init_canvas(request.buffer.rules(), request.buffer.state(), request.canvas, request.prompt_len,
              request.limit_end);
  request.prefix_limit = request.prompt_len;
  request.prev_argmax.assign(static_cast<size_t>(options_.block_size), -1);
  const int32_t num_canvases =
      (request.limit_end - request.prompt_len + options_.block_size - 1) / options_.block_size;
  reserve_step_records(
      options_, request,
      static_cast<size_t>(num_canvases) * static_cast<size_t>(options_.max_denoising_steps + 1) +
          8);
}

StepNeed DiffusionGemma::pages_needed(const Request& request, const StepQuery& query) const {
  const BlockRules& rules = request.buffer.rules();
  const BufferState& state = request.buffer.state();
  const int32_t end = rebuild_end(request);
  const CanvasPhase phase = next_canvas_phase(rules, state, query.context_len, end);
  if (phase == CanvasPhase::kEncodePrompt) {
    return cut_prefill_span(options_, {query.context_len, end, end, 1}, query.row_budget);
  }
  StepNeed need;
  need.num_rows = rules.block_size;
  need.page_len =
      phase == CanvasPhase::kEncodeCanvas ? frozen_end(rules, state) : query.context_len;
  return need;
}

int32_t DiffusionGemma::page_len_ahead(const Request& request) const {
  const BlockRules& rules = request.buffer.rules();
  const int32_t end = buffer_start(rules, request.buffer.state()) + rules.block_size;
  // Behind the encoding of this canvas the next may take a single step. One with the last output
  // position is never encoded.
  const bool is_encoding = !request.step.has_sampling;
  return std::min(is_encoding ? end + rules.block_size : end, request.limit_end);
}

void DiffusionGemma::complete_decode_request(const Request& request, DecodeRequest& decode) const {
  decode.canvas_rules = canvas_rules_;
  decode.canvas = request.canvas;
  // Every row draws, at the temperature of the schedule and without filters.
  decode.inv_temperature = 1.0F;
  decode.top_p = 1.0F;
  decode.min_p = 0.0F;
  decode.top_k = 0;
}

void DiffusionGemma::begin_step(Request& request, const StepNeed& need) const {
  const BlockRules& rules = request.buffer.rules();
  BufferState& state = request.buffer.state();
  const CanvasPhase phase =
      next_canvas_phase(rules, state, state.context_len, rebuild_end(request));
  RequestStep& step = open_step(request, need);
  if (phase == CanvasPhase::kDenoise) {
    if (state.num_valid == 0) {
      open_next_canvas(request);  // everything before it came from the prefix cache
    }
    ++state.blocks[0].total_steps;
    step.row_mode = RowMode::kCanvas;
    step.has_sampling = true;
    step.num_valid_rows = valid_len(request);
    step.store_end = step.first_pos;
  } else {
    step.row_mode = RowMode::kCausal;
    step.store_end = step.first_pos + step.num_rows;
  }
  mark_stored(rules, state, step.first_pos, step.store_end);
}

void DiffusionGemma::write_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                                int32_t req_idx) const {
  write_block_causal_rows(request, kv_cache, plan, req_idx);
  const RequestStep& step = request.step;
  const int32_t row0 = plan.cu_seqlens_q()[static_cast<size_t>(req_idx)];
  uint8_t* pass_kind = plan.row_pass_kind().data() + row0;
  int32_t* self_cond = plan.row_self_cond().data() + row0;
  const bool is_decoder = step.row_mode == RowMode::kCanvas;
  std::fill_n(pass_kind, step.num_rows, is_decoder ? kDecoderPass : kEncoderPass);
  std::fill_n(self_cond, step.num_rows, kZeroSignal);
  if (is_decoder && request.canvas.denoise_step > 0) {
    for (int32_t rel = 0; rel < step.num_valid_rows; ++rel) {
      self_cond[rel] = request.request_slot * options_.block_size + rel;
    }
  }
}

void DiffusionGemma::write_sampler_inputs(const Request& request, StepPlan& plan,
                                          int32_t req_idx) const {
  if (!request.step.has_sampling) {
    return;
  }
  const BufferState& state = request.buffer.state();
  const Block& block = state.blocks[0];
  const int32_t row0 = plan.cu_seqlens_q()[static_cast<size_t>(req_idx)];
  const int32_t blk = plan.append_block(req_idx, block.block_id, request.step.first_pos, row0);
  const auto index = static_cast<size_t>(blk);
  plan.blk_prev_row()[index] = kNoPrevRow;
  plan.blk_editable_start()[index] = 0;
  plan.blk_valid_len()[index] = request.step.num_valid_rows;
  plan.blk_force_top1()[index] = 0;
  plan.blk_accept_threshold()[index] = request.accept_threshold;
  plan.blk_total_steps()[index] = block.total_steps;
  plan.blk_open_steps()[index] = block.open_steps;
  plan.blk_post_edit_steps()[index] = block.post_edit_steps;
  plan.blk_step()[index] = request.canvas.denoise_step;
  plan.blk_stable_run()[index] = request.canvas.stable_run;
  plan.blk_steps_left()[index] = canvas_steps_left(canvas_rules_, request.canvas);
  write_canvas_rows(request, plan, blk);
}

void DiffusionGemma::write_canvas_rows(const Request& request, StepPlan& plan, int32_t blk) const {
  const auto index = static_cast<size_t>(blk);
  const auto width = static_cast<size_t>(options_.block_size);
  const auto num_valid = static_cast<size_t>(request.step.num_valid_rows);
  const int32_t start = request.step.first_pos;
  const int32_t draw_step = request.canvas.denoise_step;
  int64_t* blk_tokens = plan.blk_tokens().data() + index * width;
  int32_t* row_index = plan.blk_row_index().data() + index * width;
  int64_t* renoise = plan.blk_renoise().data() + index * width;
  const LogitsRowCursor cursor = plan.logits_cursor();
  const float temperature = canvas_temperature(canvas_rules_, plan.blk_steps_left()[index]);
  std::copy_n(request.prev_argmax.begin(), width, plan.blk_prev_argmax().begin() + index * width);
  for (size_t rel = 0; rel < num_valid; ++rel) {
    const int32_t position = start + static_cast<int32_t>(rel);
    blk_tokens[rel] = request.buffer.token_data()[position];
    row_index[rel] = cursor.next_index + static_cast<int32_t>(rel);
    renoise[rel] = random_token_id(request.seed, position, draw_step, RandomStream::kRenoise,
                                   canvas_rules_.vocab_size);
    cursor.rows[rel] = plan.blk_row0()[index] + static_cast<int32_t>(rel);
    cursor.inv_temperature[rel] = 1.0F / temperature;
    cursor.uniforms[rel] = philox_uniform(request.seed, position, draw_step, RandomStream::kToken);
  }
  std::fill(blk_tokens + num_valid, blk_tokens + width, int64_t{options_.mask_token_id});
  std::fill(row_index + num_valid, row_index + width, -1);
  std::fill(renoise + num_valid, renoise + width, int64_t{0});
  plan.commit_logits_rows(request.step.num_valid_rows, true);
}

StepOutcome DiffusionGemma::finish_step(Request& request, StepPlan& plan, int32_t req_idx,
                                        const SamplerOutput& output,
                                        Span<const BlockWrite> writes) const {
  const BlockRules& rules = request.buffer.rules();
  BufferState& state = request.buffer.state();
  const RequestStep step = request.step;
  const RequestOutput result{plan, req_idx, output, writes};
  request.step.is_in_flight = false;
  request.last_writes.clear();
  StepOutcome outcome;
  bool has_bad_logits = false;
  if (step.has_sampling) {
    has_bad_logits = apply_verdicts(request, result);
    outcome.new_tokens = has_bad_logits ? 0 : finish_denoise(request, result);
  } else {
    mark_canvas_cached(rules, state, step.store_end);
    if (step.is_prefill && step.is_final) {
      request.resume_until = 0;
      request.needs_prompt_prefill = false;
    }
  }
  record_forward(options_, request, step.is_prefill, outcome.new_tokens);
  outcome.finish_reason =
      has_bad_logits ? FinishReason::kError : check_stop(state, stop_limits(request));
  const bool is_encoded = !step.has_sampling && step.is_final && state.num_valid == 0;
  if (is_encoded && outcome.finish_reason == FinishReason::kNone) {
    open_next_canvas(request);
  }
  return outcome;
}

/// Takes over the next canvas, or commits the argmax canvas. Returns the committed output tokens.
int32_t DiffusionGemma::finish_denoise(Request& request, const RequestOutput& result) const {
  const BlockRules& rules = request.buffer.rules();
  BufferState& state = request.buffer.state();
  const auto blk = static_cast<size_t>(result.plan.first_block(result.req_idx));
  const bool is_converged = (result.output.flags()[blk] & kSamplerConverged) != 0;
  const bool is_last = canvas_steps_left(canvas_rules_, request.canvas) == 1;
  const int32_t count = request.step.num_valid_rows;
  const int64_t* argmax =
      result.output.canvas_argmax().data() + blk * static_cast<size_t>(rules.block_size);
  apply_canvas(request, result, count);
  note_argmax_canvas(request.canvas, argmax, count, request.prev_argmax.data());
  if (!is_converged && !is_last) {
    return 0;
  }
  if (!is_converged) {
    int32_t* tokens = request.buffer.token_data() + buffer_start(rules, state);
    std::transform(argmax, argmax + count, tokens,
                   [](int64_t id) { return static_cast<int32_t>(id); });
  }
  return commit_canvas(rules, state, request.buffer.token_data());
}

/// Writes the ids that changed, and the confidence of every position.
void DiffusionGemma::apply_canvas(Request& request, const RequestOutput& result, int32_t count) {
  const BlockRules& rules = request.buffer.rules();
  const int32_t start = buffer_start(rules, request.buffer.state());
  const auto blk = static_cast<size_t>(result.plan.first_block(result.req_idx));
  const float* confidence =
      result.output.confidence().data() + blk * static_cast<size_t>(rules.block_size);
  std::copy_n(confidence, count, request.confidences.begin() + start);
  for (const BlockWrite& write : result.writes) {
    request.buffer.token_data()[start + write.rel] = write.token;
    request.last_writes.push_back(TokenWrite{start + write.rel, confidence[write.rel]});
  }
}

void DiffusionGemma::on_preempt(Request& request) const {
  BufferState& state = request.buffer.state();
  request.step = RequestStep{};
  close_canvas(state, request.canvas);
  std::fill(request.prev_argmax.begin(), request.prev_argmax.end(), -1);
  state.blocks[0].stored_this_step = false;
  state.context_len = 0;
  request.resume_until = frozen_end(request.buffer.rules(), state);
  request.prefix_limit = request.resume_until;
  request.needs_prompt_prefill = false;
}

}  // namespace

std::unique_ptr<Strategy> make_diffusion_gemma(const EngineOptions& options) {
  return std::make_unique<DiffusionGemma>(options);
}

}  // namespace diffulex
