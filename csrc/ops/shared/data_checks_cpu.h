// SPDX-License-Identifier: Apache-2.0
#pragma once

// Validation of index data before the first write; failures are kOutOfRange.

#include <cstdint>
#include <string>

#include "diffulex/core/status.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex::cpu {

/// `diffulex::<op>: <argument>[<index>]: expected <expected>, got <value>`.
[[nodiscard]] Status data_error(const char* op, const char* argument, int64_t index,
                                const std::string& expected, int64_t value);

/// A prefix sum: starts at 0, never decreases, ends at or before `limit`.
[[nodiscard]] Status check_offsets(const char* op, const char* argument, const TensorRef& offsets,
                                   int64_t limit);

/// Slots below `num_slots`; negative = none.
[[nodiscard]] Status check_slots(const char* op, const TensorRef& slot_mapping, int64_t num_slots);

/// Positions in [0, max_positions).
[[nodiscard]] Status check_positions(const char* op, const TensorRef& positions,
                                     int64_t max_positions);

/// One request's cached part against its row of the page table.
struct PageTableCheck {
  const char* op = nullptr;
  const TensorRef& page_table;
  int64_t request = 0;
  int64_t context_len = 0;
  int64_t num_pages = 0;
  int64_t page_size = 0;
};

/// context_len fits the page table and every page it needs is unmapped (negative) or exists.
[[nodiscard]] Status check_pages(const PageTableCheck& check);

}  // namespace diffulex::cpu
