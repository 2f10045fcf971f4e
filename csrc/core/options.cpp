// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "diffulex/core/block_rules.h"
#include "diffulex/core/canvas_rules.h"
#include "diffulex/core/strategy.h"

namespace diffulex {
namespace {

constexpr std::array<int32_t, 4> kBlockSizes = {4, 8, 16, 32};
constexpr std::array<int32_t, 3> kCanvasPageSizes = {64, 128, 256};

template <typename T>
[[nodiscard]] Status expect_at_least(const char* where, T value, T least) {
  if (value >= least) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument, where, ": expected >= ", least, ", got ", value);
}

[[nodiscard]] Status expect_unit_interval(const char* where, float value) {
  if (value >= 0.0F && value <= 1.0F) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument, where, ": expected a value in [0, 1], got ",
                    value);
}

[[nodiscard]] Status expect_override(const char* where, const std::optional<float>& value) {
  return value.has_value() ? expect_unit_interval(where, *value) : Status();
}

[[nodiscard]] Status expect_supported_size(const char* where, int32_t value) {
  if (std::find(kBlockSizes.begin(), kBlockSizes.end(), value) != kBlockSizes.end()) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument, where, ": expected one of 4, 8, 16, 32, got ",
                    value);
}

[[nodiscard]] Status expect_stop_ids(const char* where, const std::vector<int32_t>& ids) {
  if (ids.size() > static_cast<size_t>(kMaxStopIds)) {
    return make_error(StatusCode::kInvalidArgument, where, ": expected at most ", kMaxStopIds,
                      " ids, got ", ids.size());
  }
  for (const int32_t id : ids) {
    if (id < 0) {
      return make_error(StatusCode::kInvalidArgument, where, ": expected ids >= 0, got ", id);
    }
  }
  return {};
}

[[nodiscard]] Status expect_penalty(const char* where, float value) {
  if (std::isfinite(value) && value >= 0.0F) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument, where, ": expected a finite value >= 0, got ",
                    value);
}

[[nodiscard]] Status expect_template(const SamplingParams& params) {
  const std::vector<int32_t>& ids = params.template_token_ids;
  if (ids.size() > static_cast<size_t>(params.max_tokens)) {
    return make_error(StatusCode::kInvalidArgument, "SamplingParams.template_token_ids: expected ",
                      "at most max_tokens ", params.max_tokens, " positions, got ", ids.size());
  }
  const auto wrong = std::find_if(ids.begin(), ids.end(), [](int32_t id) { return id < -1; });
  if (wrong != ids.end()) {
    return make_error(StatusCode::kInvalidArgument, "SamplingParams.template_token_ids: expected ",
                      "ids >= 0 or -1, got ", *wrong);
  }
  return {};
}

[[nodiscard]] Status check_thresholds(const Thresholds& thresholds) {
  DIFFULEX_RETURN_IF_ERROR(
      expect_unit_interval("EngineOptions.thresholds.add_block", thresholds.add_block));
  DIFFULEX_RETURN_IF_ERROR(
      expect_unit_interval("EngineOptions.thresholds.semi_complete", thresholds.semi_complete));
  DIFFULEX_RETURN_IF_ERROR(
      expect_unit_interval("EngineOptions.thresholds.accept", thresholds.accept));
  DIFFULEX_RETURN_IF_ERROR(expect_unit_interval("EngineOptions.thresholds.edit", thresholds.edit));
  DIFFULEX_RETURN_IF_ERROR(
      expect_unit_interval("EngineOptions.thresholds.remask", thresholds.remask));
  return expect_unit_interval("EngineOptions.thresholds.token_stability",
                              thresholds.token_stability);
}

[[nodiscard]] Status check_strategy(const std::string& name) {
  const std::vector<std::string>& names = strategy_names();
  if (std::find(names.begin(), names.end(), name) != names.end()) {
    return {};
  }
  std::string known;
  for (const std::string& candidate : names) {
    known += (known.empty() ? "" : ", ") + candidate;
  }
  return make_error(StatusCode::kUnsupported, "EngineOptions.strategy: expected one of ", known,
                    ", got \"", name, "\"");
}

[[nodiscard]] Status check_token_ids(const EngineOptions& options) {
  DIFFULEX_RETURN_IF_ERROR(expect_at_least("EngineOptions.vocab_size", options.vocab_size, 0));
  DIFFULEX_RETURN_IF_ERROR(
      expect_at_least("EngineOptions.mask_token_id", options.mask_token_id, 0));
  if (options.vocab_size > 0 && options.mask_token_id >= options.vocab_size) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions.mask_token_id: expected < ",
                      "vocab_size ", options.vocab_size, ", got ", options.mask_token_id);
  }
  DIFFULEX_RETURN_IF_ERROR(expect_stop_ids("EngineOptions.stop_token_ids", options.stop_token_ids));
  const auto& stops = options.stop_token_ids;
  if (std::find(stops.begin(), stops.end(), options.mask_token_id) != stops.end()) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions.stop_token_ids: expected no ",
                      "mask token, got ", options.mask_token_id);
  }
  return {};
}

[[nodiscard]] Status check_canvas_sizes(const EngineOptions& options) {
  if (options.block_size < 1 || options.block_size > kMaxCanvasLen) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions.block_size: expected a canvas ",
                      "length in [1, ", kMaxCanvasLen, "] with diffusion_gemma, got ",
                      options.block_size);
  }
  if (options.vocab_size < 1) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions.vocab_size: expected the ids a ",
                      "canvas is drawn from (>= 1) with diffusion_gemma, got ", options.vocab_size);
  }
  if (options.buffer_size != 1) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions.buffer_size: expected 1 with ",
                      "diffusion_gemma, got ", options.buffer_size);
  }
  if (std::find(kCanvasPageSizes.begin(), kCanvasPageSizes.end(), options.page_size) !=
          kCanvasPageSizes.end() ||
      std::find(kBlockSizes.begin(), kBlockSizes.end(), options.page_size) != kBlockSizes.end()) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument, "EngineOptions.page_size: expected one of 4, 8, ",
                    "16, 32, 64, 128, 256 with diffusion_gemma, got ", options.page_size);
}

[[nodiscard]] Status check_block_sizes(const EngineOptions& options) {
  if (options.has_canvas()) {
    return check_canvas_sizes(options);
  }
  DIFFULEX_RETURN_IF_ERROR(expect_supported_size("EngineOptions.block_size", options.block_size));
  if (options.buffer_size < 1 || options.buffer_size > kMaxBufferBlocks) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions.buffer_size: expected a value ",
                      "in [1, ", kMaxBufferBlocks, "], got ", options.buffer_size);
  }
  if (options.has_dual_cache() && options.buffer_size < 2) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions.buffer_size: expected N >= 2 ",
                      "sub-blocks with fast_dllm_v2, got ", options.buffer_size);
  }
  return expect_supported_size("EngineOptions.page_size", options.page_size);
}

[[nodiscard]] Status check_sizes(const EngineOptions& options) {
  DIFFULEX_RETURN_IF_ERROR(check_block_sizes(options));
  DIFFULEX_RETURN_IF_ERROR(expect_at_least("EngineOptions.num_pages", options.num_pages, 1));
  DIFFULEX_RETURN_IF_ERROR(expect_at_least("EngineOptions.max_num_reqs", options.max_num_reqs, 1));
  DIFFULEX_RETURN_IF_ERROR(
      expect_at_least("EngineOptions.max_model_len", options.max_model_len, 2));
  const int64_t max_int = std::numeric_limits<int32_t>::max();
  const int64_t num_rows = int64_t{options.max_num_reqs} * options.decode_rows();
  const int64_t num_slots = int64_t{options.num_pages} * options.page_size;
  const int64_t page_span = int64_t{options.max_model_len} + options.decode_rows();
  const int64_t num_entries = int64_t{options.max_num_reqs} * (page_span / options.page_size + 1);
  if (num_rows > max_int || num_slots > max_int || num_entries > max_int ||
      int64_t{options.max_model_len} + num_rows > max_int) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions: expected rows, slots and page ",
                      "entries below 2^31, got ", num_rows, ", ", num_slots, " and ", num_entries);
  }
  return {};
}

[[nodiscard]] Status check_row_budget(const EngineOptions& options) {
  const int32_t block_size = options.block_size;
  int32_t least = options.decode_rows();
  if (!options.enable_chunked_prefill) {
    const int32_t padded = (options.max_model_len + block_size - 1) / block_size * block_size;
    least = std::max(least, padded + block_size);
  }
  if (options.max_num_batched_tokens >= least) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument, "EngineOptions.max_num_batched_tokens: expected ",
                    ">= ", least,
                    options.enable_chunked_prefill
                        ? " (block_size * buffer_size)"
                        : " (max_model_len rounded up to block_size, plus block_size, and "
                          "block_size * buffer_size; or enable_chunked_prefill)",
                    ", got ", options.max_num_batched_tokens);
}

/// A variant of the strategies with `trait`: refuses it elsewhere.
[[nodiscard]] Status expect_variant(const char* field, bool is_set, const EngineOptions& options,
                                    StrategyTrait trait) {
  if (!is_set || options.has(trait)) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument, "EngineOptions.", field, ": expected strategy ",
                    strategies_with(trait), ", got ", options.strategy);
}

[[nodiscard]] Status check_variants(const EngineOptions& options) {
  DIFFULEX_RETURN_IF_ERROR(expect_variant("is_editing", options.is_editing, options, kMayEdit));
  DIFFULEX_RETURN_IF_ERROR(
      expect_variant("logits_shift", options.logits_shift, options, kShiftsLogits));
  DIFFULEX_RETURN_IF_ERROR(
      expect_variant("token_merge_top_k", options.token_merge_top_k != 0, options, kMergesTokens));
  DIFFULEX_RETURN_IF_ERROR(expect_variant(
      "dmax_store_soft_embeddings", options.dmax_store_soft_embeddings, options, kMergesTokens));
  DIFFULEX_RETURN_IF_ERROR(
      expect_variant("d2f_block_grid", options.d2f_block_grid, options, kSeesWholePrompt));
  if (options.token_merge_top_k < 0 || options.token_merge_top_k > kMaxMergeTopK) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions.token_merge_top_k: expected a ",
                      "value in [0, ", kMaxMergeTopK, "], the most that the kernels merge, got ",
                      options.token_merge_top_k);
  }
  if (options.is_editing && options.logits_shift) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions.logits_shift: expected no ",
                      "shift together with is_editing, got both");
  }
  if (options.enable_chunked_prefill && options.has(kSeesWholePrompt)) {
    return make_error(StatusCode::kInvalidArgument,
                      "EngineOptions.enable_chunked_prefill: ", "expected false with ",
                      options.strategy, ", whose prompt rows see the whole prompt, got true");
  }
  DIFFULEX_RETURN_IF_ERROR(
      expect_at_least("EngineOptions.max_denoising_steps", options.max_denoising_steps, 1));
  DIFFULEX_RETURN_IF_ERROR(
      expect_at_least("EngineOptions.stability_threshold", options.stability_threshold, 0));
  if (!(options.t_min >= 0.0F && options.t_min <= options.t_max && options.t_max > 0.0F &&
        std::isfinite(options.t_max))) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions.t_min, t_max: expected ",
                      "0 <= t_min <= t_max and t_max > 0, got ", options.t_min, " and ",
                      options.t_max);
  }
  return {};
}

}  // namespace

Status SamplingParams::validate() const {
  if (!std::isfinite(temperature) || temperature < 0.0F) {
    return make_error(StatusCode::kInvalidArgument,
                      "SamplingParams.temperature: expected a finite ", "value >= 0, got ",
                      temperature);
  }
  if (!std::isfinite(top_p) || top_p < 0.0F) {
    return make_error(StatusCode::kInvalidArgument, "SamplingParams.top_p: expected a finite ",
                      "value >= 0, got ", top_p);
  }
  DIFFULEX_RETURN_IF_ERROR(expect_unit_interval("SamplingParams.min_p", min_p));
  DIFFULEX_RETURN_IF_ERROR(expect_at_least("SamplingParams.max_tokens", max_tokens, 1));
  DIFFULEX_RETURN_IF_ERROR(expect_at_least("SamplingParams.max_nfe", max_nfe, 0));
  DIFFULEX_RETURN_IF_ERROR(
      expect_at_least("SamplingParams.max_repetition_run", max_repetition_run, 0));
  DIFFULEX_RETURN_IF_ERROR(expect_stop_ids("SamplingParams.stop_token_ids", stop_token_ids));
  DIFFULEX_RETURN_IF_ERROR(expect_template(*this));
  DIFFULEX_RETURN_IF_ERROR(expect_override("SamplingParams.accept_threshold", accept_threshold));
  DIFFULEX_RETURN_IF_ERROR(expect_override("SamplingParams.edit_threshold", edit_threshold));
  DIFFULEX_RETURN_IF_ERROR(
      expect_override("SamplingParams.add_block_threshold", add_block_threshold));
  DIFFULEX_RETURN_IF_ERROR(
      expect_override("SamplingParams.semi_complete_threshold", semi_complete_threshold));
  DIFFULEX_RETURN_IF_ERROR(
      expect_override("SamplingParams.token_stability_threshold", token_stability_threshold));
  DIFFULEX_RETURN_IF_ERROR(
      expect_at_least("SamplingParams.max_post_edit_steps", max_post_edit_steps.value_or(0), 0));
  return expect_penalty("SamplingParams.penalty_lambda", penalty_lambda.value_or(0.0F));
}

Status EngineOptions::validate() const {
  DIFFULEX_RETURN_IF_ERROR(check_strategy(strategy));
  DIFFULEX_RETURN_IF_ERROR(check_sizes(*this));
  DIFFULEX_RETURN_IF_ERROR(check_row_budget(*this));
  DIFFULEX_RETURN_IF_ERROR(check_token_ids(*this));
  DIFFULEX_RETURN_IF_ERROR(check_thresholds(thresholds));
  DIFFULEX_RETURN_IF_ERROR(check_variants(*this));
  DIFFULEX_RETURN_IF_ERROR(
      expect_at_least("EngineOptions.max_post_edit_steps", max_post_edit_steps, 0));
  DIFFULEX_RETURN_IF_ERROR(expect_penalty("EngineOptions.penalty_lambda", penalty_lambda));
  DIFFULEX_RETURN_IF_ERROR(
      expect_at_least("EngineOptions.auto_max_nfe_warmup_steps", auto_max_nfe_warmup_steps, 1));
  if (!std::isfinite(auto_max_nfe_tpf_floor) || auto_max_nfe_tpf_floor <= 0.0) {
    return make_error(StatusCode::kInvalidArgument,
                      "EngineOptions.auto_max_nfe_tpf_floor: ", "expected a finite value > 0, got ",
                      auto_max_nfe_tpf_floor);
  }
  DIFFULEX_RETURN_IF_ERROR(expect_at_least("EngineOptions.max_consecutive_prefill_batches",
                                           max_consecutive_prefill_batches, 0));
  if (mixed_step_rows < 0 || mixed_step_rows > max_num_batched_tokens) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions.mixed_step_rows: expected 0 to ",
                      "max_num_batched_tokens ", max_num_batched_tokens, ", got ", mixed_step_rows);
  }
  return {};
}

}  // namespace diffulex
