// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/decode_batch.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "diffulex/core/status.h"

namespace diffulex {

static_assert(std::is_trivially_copyable_v<DecodeRequest>);

std::vector<ArenaField> DecodeBatch::make_fields(const EngineOptions& options) {
  const int64_t reqs = options.max_num_reqs;
  const auto matrix = [reqs](const char* name, ArenaDtype dtype, int64_t cols) {
    return ArenaField{name, dtype, 0, reqs, cols, true, 0};
  };
  std::vector<ArenaField> fields = {
      matrix("requests", ArenaDtype::kUint8, static_cast<int64_t>(sizeof(DecodeRequest))),
      matrix("windows", ArenaDtype::kInt32, int64_t{options.decode_rows()} + 2),
      matrix("page_tables", ArenaDtype::kInt32, options.max_pages_per_req()),
      ArenaField{"prev_argmax", ArenaDtype::kInt64, 0, options.has_canvas() ? reqs : 0,
                 options.block_size, true, 0},
  };
  Arena::layout(fields);
  return fields;
}

size_t DecodeBatch::arena_bytes(const EngineOptions& options) {
  return Arena::arena_bytes(make_fields(options));
}

DecodeBatch::DecodeBatch(const EngineOptions& options)
    : DecodeBatch(options, Arena(make_fields(options))) {}

DecodeBatch::DecodeBatch(const EngineOptions& options, void* memory, size_t bytes)
    : DecodeBatch(options, Arena(make_fields(options), memory, bytes)) {}

DecodeBatch::DecodeBatch(const EngineOptions& options, Arena arena)
    : arena_(std::move(arena)),
      capacity_(options.max_num_reqs),
      window_len_(options.decode_rows() + 2),
      max_pages_per_req_(options.max_pages_per_req()),
      num_pages_(static_cast<size_t>(options.max_num_reqs), 0) {
  const int64_t entries = int64_t{capacity_} * max_pages_per_req_;
  std::fill_n(ptr<int32_t>(BatchArray::kPageTables), entries, -1);
  size_ = capacity_;
  reset();
}

void DecodeBatch::reset() {
  const DecodeRequest idle;
  for (int32_t row = 0; row < size_; ++row) {
    std::memcpy(ptr<unsigned char>(BatchArray::kRequests) + row * sizeof(DecodeRequest), &idle,
                sizeof(DecodeRequest));
    int32_t& known = num_pages_[static_cast<size_t>(row)];
    std::fill_n(ptr<int32_t>(BatchArray::kPageTables) + int64_t{row} * max_pages_per_req_, known,
                -1);
    known = 0;
  }
  size_ = 0;
  any_drawn_ = false;
  any_filtered_ = false;
}

void DecodeBatch::append(const DecodeRequest& request, const int32_t* tokens, int32_t begin,
                         Span<const int64_t> prev_argmax) {
  DIFFULEX_CHECK(size_ < capacity_, "DecodeBatch::append: expected at most ", capacity_,
                 " requests, got ", size_ + 1);
  const int64_t row = size_++;
  any_drawn_ = any_drawn_ || request.inv_temperature > 0.0F;
  any_filtered_ =
      any_filtered_ || request.top_k > 0 || request.top_p < 1.0F || request.min_p > 0.0F;
  std::memcpy(ptr<unsigned char>(BatchArray::kRequests) + row * sizeof(DecodeRequest), &request,
              sizeof(DecodeRequest));
  int32_t* window = ptr<int32_t>(BatchArray::kWindows) + row * window_len_;
  window[0] = begin > 0 ? tokens[begin - 1] : 0;
  std::copy_n(tokens + begin, window_len_ - 2, window + 1);
  window[window_len_ - 1] = request.rules.mask_token_id;
  std::copy_n(
      prev_argmax.data(), prev_argmax.size(),
      ptr<int64_t>(BatchArray::kPrevArgmax) + row * static_cast<int64_t>(prev_argmax.size()));
}

bool DecodeBatch::set_pages(int32_t row, Span<const int32_t> pages) {
  DIFFULEX_CHECK(
      row >= 0 && row < size_ && static_cast<int32_t>(pages.size()) <= max_pages_per_req_,
      "DecodeBatch::set_pages: expected a request below ", size_, " with at most ",
      max_pages_per_req_, " pages, got request ", row, " with ", pages.size());
  int32_t& known = num_pages_[static_cast<size_t>(row)];
  const auto count = static_cast<int32_t>(pages.size());
  int32_t* entries = ptr<int32_t>(BatchArray::kPageTables) + int64_t{row} * max_pages_per_req_;
  const bool has_grown = known < count;
  for (; known < count; ++known) {
    entries[known] = pages[static_cast<size_t>(known)];
  }
  return has_grown;
}

}  // namespace diffulex
