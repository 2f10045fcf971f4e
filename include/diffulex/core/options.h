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
  float temperature = 0.0F;        // >= 0; below kGreedyTemperature = greedy
  float top_p = 1.0F;              // >= 0; >= 1 = off. The filters act on sampled requests only
  int32_t top_k = 0;               // <= 0 = off
  float min_p = 0.0F;              // in [0, 1]; 0 = off
  int32_t max_tokens = 512;        // >= 1, generated tokens
  int32_t max_nfe = 0;             // cap on forwards; 0 = none
  int32_t max_repetition_run = 0;  // trailing equal tokens that end the request; 0 = none
  bool ignore_eos = false;         // stop ids do not end the request
  std::vector<int32_t> stop_token_ids;  // in addition to those of the engine
  std::optional<uint64_t> seed;  // absent: the engine seed if greedy, else from it and the id
  // Present: override the field of Thresholds for this request.
  std::optional<float> accept_threshold;
  std::optional<float> edit_threshold;
  std::optional<float> add_block_threshold;
  std::optional<float> semi_complete_threshold;
  std::optional<float> token_stability_threshold;

  /// Whether tokens are drawn at random.
  [[nodiscard]] bool is_sampled() const noexcept { return temperature >= kGreedyTemperature; }
  /// Whether a filter narrows the draws.
  [[nodiscard]] bool is_filtered() const noexcept {
    return is_sampled() && (top_p < 1.0F || top_k > 0 || min_p > 0.0F);
  }
  /// First violated range as kInvalidArgument.
  [[nodiscard]] DIFFULEX_API Status validate() const;
};

/// Largest token_merge_top_k: what the kernels take, kMergeMaxTopK of ops/merge.h. The
/// core includes no kernel header, so the number stands here a second time.
inline constexpr int32_t kMaxMergeTopK = 16;

/// Configuration of the core. Immutable once a scheduler was built from it.
struct EngineOptions {
  std::string strategy = "multi_bd";      // one of strategy_names()
  int32_t block_size = 32;                // B, one of 4, 8, 16, 32; a canvas: 1..1024
  int32_t buffer_size = 1;                // N, blocks in flight, 1..kMaxBufferBlocks
  int32_t page_size = 32;                 // tokens per KV page, one of 4, 8, 16, 32; a canvas: also
                                          // 64, 128, 256
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

  // Variants of the strategies.
  bool is_editing = false;        // multi_bd: the sampler may rewrite tokens; dmax always does
  bool logits_shift = false;      // multi_bd, d2f: the row of position p predicts position p + 1
  int32_t token_merge_top_k = 0;  // dmax: entries of a merge descriptor; 0 = no merging
  bool dmax_store_soft_embeddings = false;  // dmax: descriptors act on the stored KV as well
  bool d2f_block_grid = false;        // d2f: blocks at multiples of B, not from the prompt's end
  bool fdv2_use_block_cache = true;   // fast_dllm_v2: sub-block steps read the block's own cache
  bool group_decode_by_rows = false;  // every request of a decode batch has the same row count
  int32_t max_denoising_steps = 48;   // diffusion_gemma: forwards per canvas, >= 1
  int32_t stability_threshold = 1;    // diffusion_gemma: equal canvases in a row to converge, >= 0
  float t_min = 0.4F;                 // diffusion_gemma: temperature after the last step
  float t_max = 0.8F;                 // diffusion_gemma: temperature of the first step

  /// Whether the strategy may rewrite tokens of an ACTIVE block.
  [[nodiscard]] bool rewrites_tokens() const noexcept { return is_editing || strategy == "dmax"; }
  /// Whether the first block starts where the prompt ends, which is then stored as a whole.
  [[nodiscard]] bool starts_at_prompt() const noexcept {
    return strategy == "d2f" && !d2f_block_grid;
  }
  /// Whether the KV of a forward that rewrites none of a block's tokens is the block's final KV:
  /// mixed embeddings are not what is stored.
  [[nodiscard]] bool stores_settled() const noexcept {
    return rewrites_tokens() && token_merge_top_k == 0;
  }
  /// Whether blocks are canvases: no mask token, blocks right after the prompt.
  [[nodiscard]] bool has_canvas() const noexcept { return strategy == "diffusion_gemma"; }
  /// Whether decoding runs over blocks of N sub-blocks with a separate block cache.
  [[nodiscard]] bool has_dual_cache() const noexcept { return strategy == "fast_dllm_v2"; }
  /// Whether KV may be shared between requests: not where the KV of a prompt position depends on
  /// the whole prompt.
  [[nodiscard]] bool shares_prefixes() const noexcept {
    return enable_prefix_caching && strategy != "d2f";
  }

  /// Rows of one request in its largest decode step: B * N.
  [[nodiscard]] int32_t decode_rows() const noexcept { return block_size * buffer_size; }
  /// Block size of the visibility rule: B, or D = B * N with a dual cache.
  [[nodiscard]] int32_t att_block_size() const noexcept {
    return has_dual_cache() ? decode_rows() : block_size;
  }
  /// Positions a response that ends at `limit_end` may need pages for.
  [[nodiscard]] int32_t page_span(int32_t limit_end) const noexcept {
    const int32_t unit = has_dual_cache() ? decode_rows() : 1;
    return (limit_end + unit - 1) / unit * unit;
  }
  /// Pages that cover positions [0, len).
  [[nodiscard]] int32_t num_pages_for(int32_t len) const noexcept {
    return (len + page_size - 1) / page_size;
  }
  /// Page-table width: pages of the longest response.
  [[nodiscard]] int32_t max_pages_per_req() const noexcept {
    return num_pages_for(page_span(max_model_len));
  }

  /// First violated rule as kInvalidArgument, or kUnsupported for an unknown strategy.
  [[nodiscard]] DIFFULEX_API Status validate() const;
};

}  // namespace diffulex
