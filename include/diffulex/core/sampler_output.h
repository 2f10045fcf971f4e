// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "diffulex/core/arena.h"
#include "diffulex/core/options.h"
#include "diffulex/core/span.h"
#include "diffulex/export.h"

namespace diffulex {

/// Bits of SamplerOutput::flags; the values are those of AcceptFlag in kernels/sampling.h.
enum SamplerFlag : int32_t {
  kSamplerCommittable = 1,     // the content may be frozen
  kSamplerSameAsPrevious = 2,  // no position changed
  kSamplerAllConfident = 4,
  kSamplerProgressed = 8,  // an open position was filled
  kSamplerBadLogits = 32,  // a row without a finite candidate: the request fails
  kSamplerSkipped = 64,    // rows were missing: no commit
};

/// Arrays of a sampler output, in arena order, at full capacity Nb_max = max_num_reqs * N.
enum class OutputArray : int32_t {
  kWriteIds = 0,    // [Nb_max, B] i64 new token, -1 = unchanged
  kConfidence,      // [Nb_max, B] f32 confidence of the proposal, 0 where there is none
  kMasksLeft,       // [Nb_max] i32 open positions after the writes
  kFlags,           // [Nb_max] i32 SamplerFlag bits
  kSameTokenRatio,  // [Nb_max] f32, 1 for samplers that never rewrite
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
  [[nodiscard]] Span<int64_t> write_ids() noexcept;
  [[nodiscard]] Span<const int64_t> write_ids() const noexcept;
  [[nodiscard]] Span<float> confidence() noexcept;
  [[nodiscard]] Span<const float> confidence() const noexcept;
  [[nodiscard]] Span<int32_t> masks_left() noexcept;
  [[nodiscard]] Span<const int32_t> masks_left() const noexcept;
  [[nodiscard]] Span<int32_t> flags() noexcept;
  [[nodiscard]] Span<const int32_t> flags() const noexcept;
  [[nodiscard]] Span<float> same_token_ratio() noexcept;
  [[nodiscard]] Span<const float> same_token_ratio() const noexcept;

  /// Back to "nothing changed" for the first `num_blocks` blocks.
  void clear(int32_t num_blocks);

 private:
  SamplerOutput(const EngineOptions& options, Arena arena);
  [[nodiscard]] static std::vector<ArenaField> make_fields(const EngineOptions& options);

  Arena arena_;
  int32_t max_blocks_;
  int32_t block_size_;
};

}  // namespace diffulex
