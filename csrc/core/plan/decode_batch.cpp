// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/decode_batch.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "diffulex/core/status.h"

namespace diffulex {

static_assert(std::is_trivially_copyable_v<DecodeRequest>);

namespace {

[[nodiscard]] std::vector<ArenaField> fields_of(const EngineOptions& options) {
  return BatchArrays::fields(PlanLayout::of(options));
}

}  // namespace

size_t DecodeBatch::arena_bytes(const EngineOptions& options) {
  return Arena::arena_bytes(fields_of(options));
}

DecodeBatch::DecodeBatch(const EngineOptions& options)
    : DecodeBatch(PlanLayout::of(options), Arena(fields_of(options))) {}

DecodeBatch::DecodeBatch(const EngineOptions& options, void* memory, size_t bytes)
    : DecodeBatch(PlanLayout::of(options), Arena(fields_of(options), memory, bytes)) {}

DecodeBatch::DecodeBatch(const PlanLayout& layout, Arena arena)
    : arena_(std::move(arena)),
      arrays_(BatchArrays::at(arena_.data(), arena_.fields())),
      capacity_(layout.max_num_reqs),
      window_len_(window_len(layout.decode_rows())),
      max_pages_per_req_(layout.max_pages_per_req),
      num_pages_(static_cast<size_t>(layout.max_num_reqs), 0) {
  const int64_t entries = int64_t{capacity_} * max_pages_per_req_;
  std::fill_n(arrays_.page_tables, entries, -1);
  size_ = capacity_;
  reset();
}

void DecodeBatch::reset() {
  const DecodeRequest idle;
  for (int32_t row = 0; row < size_; ++row) {
    std::memcpy(arrays_.requests + row * sizeof(DecodeRequest), &idle, sizeof(DecodeRequest));
    int32_t& known = num_pages_[static_cast<size_t>(row)];
    std::fill_n(arrays_.page_tables + int64_t{row} * max_pages_per_req_, known, -1);
    known = 0;
  }
  size_ = 0;
  any_drawn_ = false;
  any_filtered_ = false;
  any_penalised_ = false;
}

void DecodeBatch::append(const DecodeRequest& request, const int32_t* tokens, int32_t begin,
                         Span<const int64_t> prev_argmax) {
  DIFFULEX_CHECK(size_ < capacity_, "DecodeBatch::append: expected at most ", capacity_,
                 " requests, got ", size_ + 1);
  const int64_t row = size_++;
  any_drawn_ = any_drawn_ || request.inv_temperature > 0.0F;
  any_filtered_ =
      any_filtered_ || request.top_k > 0 || request.top_p < 1.0F || request.min_p > 0.0F;
  any_penalised_ = any_penalised_ || request.penalty > 0.0F;
  std::memcpy(arrays_.requests + row * sizeof(DecodeRequest), &request, sizeof(DecodeRequest));
  int32_t* window = arrays_.windows + row * window_len_;
  window[0] = begin > 0 ? tokens[begin - 1] : 0;
  std::copy_n(tokens + begin, window_len_ - 2, window + 1);
  window[window_len_ - 1] = request.rules.mask_token_id;
  std::copy_n(prev_argmax.data(), prev_argmax.size(),
              arrays_.prev_argmax + row * static_cast<int64_t>(prev_argmax.size()));
}

bool DecodeBatch::set_pages(int32_t row, Span<const int32_t> pages) {
  DIFFULEX_CHECK(
      row >= 0 && row < size_ && static_cast<int32_t>(pages.size()) <= max_pages_per_req_,
      "DecodeBatch::set_pages: expected a request below ", size_, " with at most ",
      max_pages_per_req_, " pages, got request ", row, " with ", pages.size());
  int32_t& known = num_pages_[static_cast<size_t>(row)];
  const auto count = static_cast<int32_t>(pages.size());
  int32_t* entries = arrays_.page_tables + int64_t{row} * max_pages_per_req_;
  const bool has_grown = known < count;
  for (; known < count; ++known) {
    entries[known] = pages[static_cast<size_t>(known)];
  }
  return has_grown;
}

}  // namespace diffulex
