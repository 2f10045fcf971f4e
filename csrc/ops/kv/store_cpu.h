// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/kv/pages_cpu.h"

namespace diffulex::cpu {

/// K or V of one token: heads * head_dim contiguous values.
struct KvRow {
  const char* data = nullptr;  // owner: the caller
  DType dtype = DType::kF32;
  int64_t heads = 0;
  int64_t head_dim = 0;
  char* write_back = nullptr;  // takes the stored values of codes in `dtype`; may be `data`
};

/// One head of one slot.
struct SlotHead {
  int64_t page_id = 0;
  int64_t offset = 0;
  int64_t head = 0;
};

/// Writes the first head of `row` into one head of a slot, converting to the cache's dtype or to
/// codes, whose values `write_back` takes.
void store_head(const KvPages& pages, const KvRow& row, const SlotHead& target);

/// Writes one row into a slot, converting to the cache's dtype.
void store_row(const KvPages& pages, const KvRow& row, int64_t page_id, int64_t offset);

}  // namespace diffulex::cpu
