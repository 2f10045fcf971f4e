// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>

#include "diffulex/core/block_rules.h"
#include "diffulex/core/strategy.h"

namespace diffulex {
namespace {

constexpr std::array<int32_t, 4> kBlockSizes = {4, 8, 16, 32};

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

[[nodiscard]] Status check_sizes(const EngineOptions& options) {
  DIFFULEX_RETURN_IF_ERROR(expect_supported_size("EngineOptions.block_size", options.block_size));
  if (options.buffer_size < 1 || options.buffer_size > kMaxBufferBlocks) {
    return make_error(StatusCode::kInvalidArgument, "EngineOptions.buffer_size: expected a value ",
                      "in [1, ", kMaxBufferBlocks, "], got ", options.buffer_size);
  }
  DIFFULEX_RETURN_IF_ERROR(expect_supported_size("EngineOptions.page_size", options.page_size));
  DIFFULEX_RETURN_IF_ERROR(expect_at_least("EngineOptions.num_pages", options.num_pages, 1));
  DIFFULEX_RETURN_IF_ERROR(expect_at_least("EngineOptions.max_num_reqs", options.max_num_reqs, 1));
  DIFFULEX_RETURN_IF_ERROR(
      expect_at_least("EngineOptions.max_model_len", options.max_model_len, 2));
  const int64_t max_int = std::numeric_limits<int32_t>::max();
  const int64_t num_rows = int64_t{options.max_num_reqs} * options.decode_rows();
  const int64_t num_slots = int64_t{options.num_pages} * options.page_size;
  const int64_t num_entries =
      int64_t{options.max_num_reqs} * ((int64_t{options.max_model_len} / options.page_size) + 1);
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

}  // namespace

Status SamplingParams::validate() const {
  if (!std::isfinite(temperature) || temperature < 0.0F) {
    return make_error(StatusCode::kInvalidArgument,
                      "SamplingParams.temperature: expected a finite ", "value >= 0, got ",
                      temperature);
  }
  DIFFULEX_RETURN_IF_ERROR(expect_at_least("SamplingParams.max_tokens", max_tokens, 1));
  DIFFULEX_RETURN_IF_ERROR(expect_at_least("SamplingParams.max_nfe", max_nfe, 0));
  DIFFULEX_RETURN_IF_ERROR(
      expect_at_least("SamplingParams.max_repetition_run", max_repetition_run, 0));
  DIFFULEX_RETURN_IF_ERROR(expect_stop_ids("SamplingParams.stop_token_ids", stop_token_ids));
  if (accept_threshold.has_value()) {
    return expect_unit_interval("SamplingParams.accept_threshold", *accept_threshold);
  }
  return {};
}

Status EngineOptions::validate() const {
  DIFFULEX_RETURN_IF_ERROR(check_strategy(strategy));
  DIFFULEX_RETURN_IF_ERROR(check_sizes(*this));
  DIFFULEX_RETURN_IF_ERROR(check_row_budget(*this));
  DIFFULEX_RETURN_IF_ERROR(check_token_ids(*this));
  DIFFULEX_RETURN_IF_ERROR(check_thresholds(thresholds));
  DIFFULEX_RETURN_IF_ERROR(
      expect_at_least("EngineOptions.auto_max_nfe_warmup_steps", auto_max_nfe_warmup_steps, 1));
  if (!std::isfinite(auto_max_nfe_tpf_floor) || auto_max_nfe_tpf_floor <= 0.0) {
    return make_error(StatusCode::kInvalidArgument,
                      "EngineOptions.auto_max_nfe_tpf_floor: ", "expected a finite value > 0, got ",
                      auto_max_nfe_tpf_floor);
  }
  return expect_at_least("EngineOptions.max_consecutive_prefill_batches",
                         max_consecutive_prefill_batches, 0);
}

}  // namespace diffulex
