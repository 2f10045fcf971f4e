// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "diffulex/core/arena.h"
#include "diffulex/core/options.h"
#include "diffulex/core/span.h"
#include "diffulex/core/status.h"
#include "diffulex/export.h"

// Layout of the arenas of a step: plan, sampler output and decode batch. Their arrays are the rows
// of plan_arrays.def, output_arrays.def and batch_arrays.def.

namespace diffulex {

/// All that the offsets, capacities and strides of the arenas of a step depend on. A scheduler and
/// a plan go together exactly if theirs are equal.
struct DIFFULEX_API PlanLayout {
  int32_t block_size = 0;
  int32_t buffer_size = 0;
  int32_t page_size = 0;
  int32_t max_pages_per_req = 0;
  int32_t max_num_reqs = 0;
  int32_t max_num_rows = 0;
  int32_t att_block_size = 0;
  int32_t merge_top_k = 0;
  bool has_saved_rows = false;  // logits_shift
  bool has_edits = false;       // is_editing, where it may be left out
  bool has_dual_cache = false;  // fast_dllm_v2
  bool has_canvas = false;      // diffusion_gemma

  /// Integers of to_ints().
  static constexpr size_t kNumInts = 13;

  [[nodiscard]] static PlanLayout of(const EngineOptions& options);
  /// The layout that `ints` hold; kInvalidArgument, starting with "layout: ", unless they come from
  /// to_ints() of a library with the same lists of arrays.
  [[nodiscard]] static Result<PlanLayout> from_ints(Span<const int64_t> ints);
  /// arena_version() and the fields, for calls that pass numbers only.
  [[nodiscard]] std::array<int64_t, kNumInts> to_ints() const noexcept;

  /// Rows of one request in its largest decode step: B * N.
  [[nodiscard]] int32_t decode_rows() const noexcept { return block_size * buffer_size; }
  /// Capacity of the block arrays.
  [[nodiscard]] int32_t max_num_blocks() const noexcept { return max_num_reqs * buffer_size; }
  /// Capacity of the logits-row arrays: every position of every block, and the saved rows.
  [[nodiscard]] int32_t max_logits_rows() const noexcept {
    return max_num_blocks() * block_size + (has_saved_rows ? max_num_reqs : 0);
  }
  /// Every field with its name, for messages.
  [[nodiscard]] std::string describe() const;
  [[nodiscard]] bool operator==(const PlanLayout& other) const noexcept;
};

/// Changes with every row of the lists of arrays and with the fields of what they hold.
[[nodiscard]] DIFFULEX_API int64_t arena_version() noexcept;

/// The arrays of a step plan; null where a layout has no use for one.
struct DIFFULEX_API PlanArrays {
#define DIFFULEX_ARRAY(name, type, ...) type* name = nullptr;
#include "diffulex/core/plan_arrays.def"

  /// Places of the arrays, in the order of the list.
  [[nodiscard]] static std::vector<ArenaField> fields(const PlanLayout& layout);
  /// The arrays of an arena at `base` with those places.
  [[nodiscard]] static PlanArrays at(void* base, const std::vector<ArenaField>& fields);
};

/// The arrays of a sampler output, as above.
struct DIFFULEX_API OutputArrays {
#define DIFFULEX_ARRAY(name, type, ...) type* name = nullptr;
#include "diffulex/core/output_arrays.def"

  [[nodiscard]] static std::vector<ArenaField> fields(const PlanLayout& layout);
  [[nodiscard]] static OutputArrays at(void* base, const std::vector<ArenaField>& fields);
};

/// The arrays of a decode batch, as above.
struct DIFFULEX_API BatchArrays {
#define DIFFULEX_ARRAY(name, type, ...) type* name = nullptr;
#include "diffulex/core/batch_arrays.def"

  [[nodiscard]] static std::vector<ArenaField> fields(const PlanLayout& layout);
  [[nodiscard]] static BatchArrays at(void* base, const std::vector<ArenaField>& fields);
};

}  // namespace diffulex
