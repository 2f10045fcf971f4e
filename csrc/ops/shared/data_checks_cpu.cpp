// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/data_checks_cpu.h"

#include "ops/shared/parallel.h"

namespace diffulex::cpu {

Status data_error(const char* op, const char* argument, int64_t index, const std::string& expected,
                  int64_t value) {
  return make_error(StatusCode::kOutOfRange, "diffulex::", op, ": ", argument, "[", index,
                    "]: expected ", expected, ", got ", value);
}

Status check_offsets(const char* op, const char* argument, const TensorRef& offsets,
                     int64_t limit) {
  int64_t previous = index_at(offsets, 0);
  if (previous != 0) {
    return data_error(op, argument, 0, "0", previous);
  }
  for (int64_t i = 1; i < offsets.size[0]; ++i) {
    const int64_t value = index_at(offsets, i);
    if (value < previous) {
      return data_error(op, argument, i, "a non-decreasing value >= " + std::to_string(previous),
                        value);
    }
    previous = value;
  }
  if (previous > limit) {
    return data_error(op, argument, offsets.size[0] - 1, "at most " + std::to_string(limit),
                      previous);
  }
  return {};
}

Status check_slots(const char* op, const TensorRef& slot_mapping, int64_t num_slots) {
  for (int64_t row = 0; row < slot_mapping.size[0]; ++row) {
    const int64_t slot = index_at(slot_mapping, row);
    if (slot >= num_slots) {
      return data_error(op, "slot_mapping", row, "a slot below " + std::to_string(num_slots), slot);
    }
  }
  return {};
}

Status check_positions(const char* op, const TensorRef& positions, int64_t max_positions) {
  for (int64_t row = 0; row < positions.size[0]; ++row) {
    const int64_t position = index_at(positions, row);
    if (position < 0 || position >= max_positions) {
      return data_error(op, "positions", row,
                        "a position in [0, " + std::to_string(max_positions) + ")", position);
    }
  }
  return {};
}

Status check_pages(const PageTableCheck& check) {
  const int64_t capacity = check.page_table.size[1] * check.page_size;
  if (check.context_len < 0 || check.context_len > capacity) {
    return data_error(check.op, "context_lens", check.request,
                      "0 to the page table's " + std::to_string(capacity) + " tokens",
                      check.context_len);
  }
  const int32_t* pages = check.page_table.as<const int32_t>();
  const int64_t used = (check.context_len + check.page_size - 1) / check.page_size;
  for (int64_t i = 0; i < used; ++i) {
    const int64_t page_id =
        pages[check.request * check.page_table.stride[0] + i * check.page_table.stride[1]];
    if (page_id >= check.num_pages) {
      return make_error(StatusCode::kOutOfRange, "diffulex::", check.op, ": page_table[",
                        check.request, "][", i, "]: expected a page id below ", check.num_pages,
                        ", got ", page_id);
    }
  }
  return {};
}

}  // namespace diffulex::cpu
