// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "diffulex/core/arena.h"
#include "diffulex/core/decode_rules.h"
#include "diffulex/core/options.h"
#include "diffulex/core/plan_layout.h"
#include "diffulex/core/span.h"
#include "diffulex/export.h"

namespace diffulex {

/// What a device needs to go on decoding by itself after a plan: the requests of that plan, their
/// tokens and their pages, in the arrays of batch_arrays.def. Offsets follow from EngineOptions
/// alone. Filled by Scheduler::start_run_ahead; its page tables grow with Scheduler::reserve_ahead.
class DIFFULEX_API DecodeBatch final {
 public:
  /// Owns its arena.
  explicit DecodeBatch(const EngineOptions& options);
  /// Borrows `memory` under the conditions of StepPlan.
  DecodeBatch(const EngineOptions& options, void* memory, size_t bytes);

  /// Bytes of the arena.
  [[nodiscard]] static size_t arena_bytes(const EngineOptions& options);
  [[nodiscard]] const std::vector<ArenaField>& fields() const noexcept { return arena_.fields(); }
  [[nodiscard]] const void* data() const noexcept { return arena_.data(); }

  /// Requests put in since reset().
  [[nodiscard]] int32_t size() const noexcept { return size_; }
  [[nodiscard]] int32_t capacity() const noexcept { return capacity_; }
  /// Whether a request draws its tokens, and whether one narrows its draws.
  [[nodiscard]] bool any_drawn() const noexcept { return any_drawn_; }
  [[nodiscard]] bool any_filtered() const noexcept { return any_filtered_; }
  [[nodiscard]] bool any_penalised() const noexcept { return any_penalised_; }

  /// Empties the batch: every place holds a request that does not run.
  void reset();
  /// Appends a request with its token store, whose buffer starts at position `begin`, and the
  /// argmax canvas of the step before, empty without a canvas. Precondition: size() < capacity().
  void append(const DecodeRequest& request, const int32_t* tokens, int32_t begin,
              Span<const int64_t> prev_argmax);
  /// Replaces the pages of request `row`, which only grow; returns whether there are more.
  [[nodiscard]] bool set_pages(int32_t row, Span<const int32_t> pages);

 private:
  DecodeBatch(const PlanLayout& layout, Arena arena);

  Arena arena_;
  BatchArrays arrays_;  // in arena_
  int32_t capacity_;
  int32_t window_len_;
  int32_t max_pages_per_req_;
  int32_t size_ = 0;
  bool any_drawn_ = false;
  bool any_filtered_ = false;
  bool any_penalised_ = false;
  std::vector<int32_t> num_pages_;  // [R] entries written
};

}  // namespace diffulex
