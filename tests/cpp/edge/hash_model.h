// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include "diffulex/edge/model.h"

namespace diffulex::test {

/// The model of tests/python/edge/hash_model.py: two layers of hashes, so that every logit depends
/// on what each visible row saw when it was run. Its logits are exact.
class HashModel final : public EdgeModel {
 public:
  explicit HashModel(const EdgeLimits& limits)
      : limits_(limits),
        first_(static_cast<size_t>(limits.max_model_len) + 32),
        second_(first_.size()) {}

  [[nodiscard]] EdgeLimits limits() const override { return limits_; }

  [[nodiscard]] Result<const float*> run(const EdgeCall& call) override {
    ++num_calls;
    check(call);
    if (on_run) {
      const Status status = on_run(num_calls);
      if (!status.ok()) {
        return status;
      }
    }
    const size_t rows = call.tokens.size();
    std::vector<uint64_t> own(rows);
    for (size_t i = 0; i < rows; ++i) {
      own[i] = mixed((static_cast<uint64_t>(call.tokens[i]) << 32) +
                     static_cast<uint64_t>(call.positions[i]));
      first_[static_cast<size_t>(call.positions[i])] = own[i];
    }
    for (size_t i = 0; i < rows; ++i) {
      own[i] = mixed(own[i] + sum(first_, call.visible_end[i]));
    }
    for (size_t i = 0; i < rows; ++i) {
      second_[static_cast<size_t>(call.positions[i])] = own[i];
    }
    logits_.clear();
    for (const int64_t row : call.logits_rows) {
      const auto i = static_cast<size_t>(row);
      append_logits(mixed(own[i] ^ sum(second_, call.visible_end[i])));
    }
    return logits_.data();
  }

  std::function<Status(int32_t)> on_run;  // sees the number of the call; its failure is the call's
  int32_t num_calls = 0;

 private:
  static uint64_t mixed(uint64_t word) {  // splitmix64
    word += 0x9E3779B97F4A7C15U;
    word = (word ^ (word >> 30U)) * 0xBF58476D1CE4E5B9U;
    word = (word ^ (word >> 27U)) * 0x94D049BB133111EBU;
    return word ^ (word >> 31U);
  }

  static uint64_t sum(const std::vector<uint64_t>& rows, int64_t end) {
    uint64_t total = 0;
    for (size_t i = 0; i < static_cast<size_t>(end); ++i) {
      total += rows[i];
    }
    return total;
  }

  void append_logits(uint64_t own) {
    for (uint64_t column = 0; column < static_cast<uint64_t>(limits_.vocab_size); ++column) {
      const uint64_t word = mixed(own + column * 0x2545F4914F6CDD1DU);
      int32_t zeros = 32;
      for (uint64_t upper = word >> 32U; upper > 0; upper >>= 1U) {
        --zeros;
      }
      logits_.push_back(2.5F * static_cast<float>(zeros) + static_cast<float>(word & 7U) / 8.0F);
    }
  }

  /// What a program relies on.
  void check(const EdgeCall& call) const {
    const size_t rows = call.tokens.size();
    const bool fits = rows >= 1 && rows <= static_cast<size_t>(limits_.max_rows) &&
                      call.logits_rows.size() >= 1 &&
                      call.logits_rows.size() <= static_cast<size_t>(limits_.max_logits);
    if (!fits || call.positions.size() != rows || call.visible_end.size() != rows) {
      throw std::logic_error("HashModel: a call of another shape");
    }
    for (size_t i = 0; i < rows; ++i) {
      if (call.tokens[i] < 0 || call.tokens[i] >= limits_.vocab_size || call.positions[i] < 0 ||
          call.positions[i] >= static_cast<int64_t>(first_.size()) || call.visible_end[i] < 1 ||
          call.visible_end[i] > static_cast<int64_t>(first_.size())) {
        throw std::logic_error("HashModel: a value out of range");
      }
    }
    if (std::any_of(call.logits_rows.begin(), call.logits_rows.end(),
                    [rows](int64_t row) { return row < 0 || row >= static_cast<int64_t>(rows); })) {
      throw std::logic_error("HashModel: a logits row out of range");
    }
  }

  EdgeLimits limits_;
  std::vector<uint64_t> first_;
  std::vector<uint64_t> second_;
  std::vector<float> logits_;
};

}  // namespace diffulex::test
