// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "diffulex/core/arena.h"
#include "diffulex/core/options.h"
#include "diffulex/core/plan_layout.h"
#include "diffulex/core/sampler_flags.h"
#include "diffulex/core/span.h"
#include "diffulex/export.h"

namespace diffulex {

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
  [[nodiscard]] int32_t max_num_blocks() const noexcept { return blocks_; }
  [[nodiscard]] int32_t block_size() const noexcept { return block_size_; }

  // Arrays of output_arrays.def at full capacity and flat; empty where the layout has none.
#define DIFFULEX_ARRAY(name, type, extent, width, use, cleared)                        \
  [[nodiscard]] Span<type> name() noexcept {                                           \
    return Span<type>(arrays_.name, capacity(arrays_.name, extent##_, width()));       \
  }                                                                                    \
  [[nodiscard]] Span<const type> name() const noexcept {                               \
    return Span<const type>(arrays_.name, capacity(arrays_.name, extent##_, width())); \
  }
#include "diffulex/core/output_arrays.def"
  /// K of the merge descriptors; 0 = none.
  [[nodiscard]] int32_t merge_top_k() const noexcept { return merge_top_k_; }

  /// Back to "nothing changed" for the first `num_blocks` blocks and all requests.
  void clear(int32_t num_blocks);

 private:
  SamplerOutput(const PlanLayout& layout, Arena arena);
  [[nodiscard]] static size_t capacity(const void* array, int32_t rows, int32_t width) noexcept {
    return array == nullptr ? 0 : static_cast<size_t>(int64_t{rows} * width);
  }
  // Entries of a row by its width in the list.
  [[nodiscard]] static int32_t scalar() noexcept { return 1; }
  [[nodiscard]] int32_t block() const noexcept { return block_size_; }
  [[nodiscard]] int32_t block_candidates() const noexcept { return block_size_ * merge_top_k_; }

  Arena arena_;
  OutputArrays arrays_;  // in arena_
  int32_t blocks_;       // Nb_max
  int32_t reqs_;         // R_max
  int32_t block_size_;
  int32_t merge_top_k_;
};

}  // namespace diffulex
