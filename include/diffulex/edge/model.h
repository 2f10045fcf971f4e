// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/span.h"
#include "diffulex/core/status.h"
#include "diffulex/export.h"

namespace diffulex {

/// Cache rows of a program after max_model_len: its last block may be whole.
constexpr int32_t kEdgeSpareRows = 32;

/// What a model takes and gives. Symbols: S rows of a call, n logits rows, V vocabulary.
struct EdgeLimits {
  int32_t vocab_size = 0;     // V
  int32_t max_rows = 0;       // largest S
  int32_t max_logits = 0;     // largest n
  int32_t max_model_len = 0;  // prompt plus answer; the cache has kEdgeSpareRows more
};

/// One forward. Row i goes to cache row positions[i] before the rows attend, and sees the cache
/// rows [0, visible_end[i]).
struct EdgeCall {
  Span<const int64_t> tokens;       // [S]
  Span<const int64_t> positions;    // [S] ascending
  Span<const int64_t> visible_end;  // [S]
  Span<const int64_t> logits_rows;  // [n] rows of the call, n >= 1
};

/// A language model with a cache of one array of rows; not thread-safe.
class DIFFULEX_API EdgeModel {
 public:
  EdgeModel() = default;
  EdgeModel(const EdgeModel&) = delete;
  EdgeModel& operator=(const EdgeModel&) = delete;
  virtual ~EdgeModel() = default;

  [[nodiscard]] virtual EdgeLimits limits() const = 0;
  /// Runs the model and gives the logits [n, V] of the asked rows, valid until the next call. What
  /// a failed call wrote to the cache does not count.
  [[nodiscard]] virtual Result<const float*> run(const EdgeCall& call) = 0;
};

}  // namespace diffulex
