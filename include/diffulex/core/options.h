// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "diffulex/core/status.h"
#include "diffulex/export.h"

namespace diffulex {

/// Decoding thresholds, each in [0, 1].
struct Thresholds {
  float add_block = 0.1F;        // progress of the last valid block that opens the next one
  float semi_complete = 0.9F;    // predecessor progress that grants the forced acceptance
  float accept = 0.9F;           // confidence that accepts a masked position
  float edit = 0.0F;             // confidence that overwrites a token (editing samplers)
  float remask = 0.4F;           // read by no sampler; kept for configuration files
  float token_stability = 0.0F;  // least same_token_ratio of the last block to open the next one
};

/// Temperatures below this are greedy.
inline constexpr float kGreedyTemperature = 1e-5F;

/// Per-request parameters.
struct SamplingParams {
  float temperature = 0.0F;               // >= 0; below kGreedyTemperature = greedy
  int32_t max_tokens = 512;               // >= 1, generated tokens
  int32_t max_nfe = 0;                    // cap on forwards; 0 = none
  int32_t max_repetition_run = 0;         // trailing equal tokens that end the request; 0 = none
  bool ignore_eos = false;                // stop ids do not end the request
  std::vector<int32_t> stop_token_ids;    // in addition to those of the engine
  std::optional<uint64_t> seed;           // absent: from the engine seed and the request id
  std::optional<float> accept_threshold;  // overrides Thresholds::accept for this request

  /// First violated range as kInvalidArgument.
  [[nodiscard]] DIFFULEX_API Status validate() const;
};

/// Configuration of the core. Immutable once a scheduler was built from it.
struct EngineOptions {
  std::string strategy = "multi_bd";      // one of strategy_names()
  int32_t block_size = 32;                // B, one of 4, 8, 16, 32
  int32_t buffer_size = 1;                // N, blocks in flight, 1..kMaxBufferBlocks
  int32_t page_size = 32;                 // tokens per KV page, one of 4, 8, 16, 32
  int32_t num_pages = 0;                  // pages in the pool, >= 1
  int32_t max_num_reqs = 128;             // running requests and requests per batch
  int32_t max_num_batched_tokens = 4096;  // rows of one forward
  int32_t max_model_len = 2048;           // prompt plus generated tokens
  int32_t mask_token_id = 0;
  int32_t vocab_size = 0;               // ids >= this are refused; 0 = unchecked
  std::vector<int32_t> stop_token_ids;  // ids that end any request
  Thresholds thresholds;
  bool enable_prefix_caching = true;
  bool enable_chunked_prefill = false;
  bool decode_headroom = true;                  // keep pages free at admission
  bool auto_max_nfe = false;                    // derive a forward cap from early throughput
  int32_t auto_max_nfe_warmup_steps = 8;        // > 0
  double auto_max_nfe_tpf_floor = 1.0;          // > 0
  int32_t max_consecutive_prefill_batches = 0;  // 0 = unlimited
  uint64_t cache_salt = 0;                      // separates prefix caches of different KV contents
  uint64_t seed = 0;                            // engine seed
  bool masked_rows_only = true;                 // logits rows only for open positions

  /// Rows of one request in a decode step: B * N.
  [[nodiscard]] int32_t decode_rows() const noexcept { return block_size * buffer_size; }
  /// Pages that cover positions [0, len).
  [[nodiscard]] int32_t num_pages_for(int32_t len) const noexcept {
    return (len + page_size - 1) / page_size;
  }
  /// Page-table width: pages of max_model_len positions.
  [[nodiscard]] int32_t max_pages_per_req() const noexcept { return num_pages_for(max_model_len); }

  /// First violated rule as kInvalidArgument, or kUnsupported for an unknown strategy.
  [[nodiscard]] DIFFULEX_API Status validate() const;
};

}  // namespace diffulex
