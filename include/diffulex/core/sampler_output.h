// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "diffulex/core/arena.h"
#include "diffulex/core/options.h"
#include "diffulex/core/sampler_flags.h"
#include "diffulex/core/span.h"
#include "diffulex/export.h"

namespace diffulex {

/// Arrays of a sampler output, in arena order, at full capacity Nb_max = max_num_reqs * N and
/// R_max = max_num_reqs; K = token_merge_top_k. An array marked with a strategy has no capacity
/// under others.
enum class OutputArray : int32_t {
  kWriteIds = 0,      // [Nb_max, B] i64 new token, -1 = unchanged
  kConfidence,        // [Nb_max, B] f32 confidence of the proposal, 0 where there is none
  kMasksLeft,         // [Nb_max] i32 open positions after the writes
  kFlags,             // [Nb_max] i32 SamplerFlag bits
  kSameTokenRatio,    // [Nb_max] f32, 1 for samplers that never rewrite
  kPendingNextToken,  // [R_max] i64 fast_dllm_v2: by plan request, choice of the seed row, -1 none
  kMergeValid,        // [Nb_max, B] u8 dmax with K > 0: 1 = a descriptor follows
  kMergeTopkIds,      // [Nb_max, B, K] i64
  kMergeTopkProbs,    // [Nb_max, B, K] f32
  kMergeResidual,     // [Nb_max, B] f32
  kCanvasArgmax,      // [Nb_max, B] i64 diffusion_gemma: argmax canvas of the step
  kCount,
};

/// Decisions of the sampler for the ACTIVE blocks of a plan, in the order of the plan's blocks; one
/// arena, so that one copy brings it from a device. Starts as "nothing changed".
class DIFFULEX_API SamplerOutput final {
 public:
  /// Owns its arena.
  explicit SamplerOutput(const EngineOptions& options);
  /// Borrows `memory` under the conditions of StepPlan.
  SamplerOutput(const EngineOptions& options, void* memory, size_t bytes);

  /// Bytes of the arena.
  [[nodiscard]] static size_t arena_bytes(const EngineOptions& options);
  [[nodiscard]] const std::vector<ArenaField>& fields() const noexcept { return arena_.fields(); }
  [[nodiscard]] const void* data() const noexcept { return arena_.data(); }
  [[nodiscard]] int32_t max_num_blocks() const noexcept { return max_blocks_; }
  [[nodiscard]] int32_t block_size() const noexcept { return block_size_; }

  // Matrices are flat and block-major.
  [[nodiscard]] Span<int64_t> write_ids() noexcept { return all<int64_t>(OutputArray::kWriteIds); }
  [[nodiscard]] Span<const int64_t> write_ids() const noexcept {
    return all<int64_t>(OutputArray::kWriteIds);
  }
  [[nodiscard]] Span<float> confidence() noexcept { return all<float>(OutputArray::kConfidence); }
  [[nodiscard]] Span<const float> confidence() const noexcept {
    return all<float>(OutputArray::kConfidence);
  }
  [[nodiscard]] Span<int32_t> masks_left() noexcept {
    return all<int32_t>(OutputArray::kMasksLeft);
  }
  [[nodiscard]] Span<const int32_t> masks_left() const noexcept {
    return all<int32_t>(OutputArray::kMasksLeft);
  }
  [[nodiscard]] Span<int32_t> flags() noexcept { return all<int32_t>(OutputArray::kFlags); }
  [[nodiscard]] Span<const int32_t> flags() const noexcept {
    return all<int32_t>(OutputArray::kFlags);
  }
  [[nodiscard]] Span<float> same_token_ratio() noexcept {
    return all<float>(OutputArray::kSameTokenRatio);
  }
  [[nodiscard]] Span<const float> same_token_ratio() const noexcept {
    return all<float>(OutputArray::kSameTokenRatio);
  }

  [[nodiscard]] Span<int64_t> pending_next_token() noexcept {
    return all<int64_t>(OutputArray::kPendingNextToken);
  }
  [[nodiscard]] Span<const int64_t> pending_next_token() const noexcept {
    return all<int64_t>(OutputArray::kPendingNextToken);
  }
  [[nodiscard]] Span<uint8_t> merge_valid() noexcept {
    return all<uint8_t>(OutputArray::kMergeValid);
  }
  [[nodiscard]] Span<const uint8_t> merge_valid() const noexcept {
    return all<uint8_t>(OutputArray::kMergeValid);
  }
  [[nodiscard]] Span<int64_t> merge_topk_ids() noexcept {
    return all<int64_t>(OutputArray::kMergeTopkIds);
  }
  [[nodiscard]] Span<const int64_t> merge_topk_ids() const noexcept {
    return all<int64_t>(OutputArray::kMergeTopkIds);
  }
  [[nodiscard]] Span<float> merge_topk_probs() noexcept {
    return all<float>(OutputArray::kMergeTopkProbs);
  }
  [[nodiscard]] Span<const float> merge_topk_probs() const noexcept {
    return all<float>(OutputArray::kMergeTopkProbs);
  }
  [[nodiscard]] Span<float> merge_residual() noexcept {
    return all<float>(OutputArray::kMergeResidual);
  }
  [[nodiscard]] Span<const float> merge_residual() const noexcept {
    return all<float>(OutputArray::kMergeResidual);
  }
  [[nodiscard]] Span<int64_t> canvas_argmax() noexcept {
    return all<int64_t>(OutputArray::kCanvasArgmax);
  }
  [[nodiscard]] Span<const int64_t> canvas_argmax() const noexcept {
    return all<int64_t>(OutputArray::kCanvasArgmax);
  }
  /// K of the merge descriptors; 0 = none.
  [[nodiscard]] int32_t merge_top_k() const noexcept { return merge_top_k_; }

  /// Back to "nothing changed" for the first `num_blocks` blocks and all requests.
  void clear(int32_t num_blocks);

 private:
  SamplerOutput(const EngineOptions& options, Arena arena);
  [[nodiscard]] static std::vector<ArenaField> make_fields(const EngineOptions& options);

  template <typename T>
  [[nodiscard]] Span<T> all(OutputArray array) noexcept {
    const ArenaField& field = arena_.fields()[static_cast<size_t>(array)];
    return Span<T>(arena_.array<T>(static_cast<size_t>(array)),
                   static_cast<size_t>(field.rows * field.cols));
  }
  template <typename T>
  [[nodiscard]] Span<const T> all(OutputArray array) const noexcept {
    const ArenaField& field = arena_.fields()[static_cast<size_t>(array)];
    return Span<const T>(arena_.array<T>(static_cast<size_t>(array)),
                         static_cast<size_t>(field.rows * field.cols));
  }

  Arena arena_;
  int32_t max_blocks_;
  int32_t block_size_;
  int32_t merge_top_k_;
};

}  // namespace diffulex
