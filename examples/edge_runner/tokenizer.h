// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "diffulex/core/status.h"

namespace diffulex {

/// A tokenizer.json, read by the library that this build was given; see make_tokenizer.
class EdgeTokenizer {
 public:
  EdgeTokenizer() = default;
  EdgeTokenizer(const EdgeTokenizer&) = delete;
  EdgeTokenizer& operator=(const EdgeTokenizer&) = delete;
  virtual ~EdgeTokenizer() = default;

  /// Ids of the text alone, nothing in front of it.
  [[nodiscard]] virtual Result<std::vector<int32_t>> encode(const std::string& text) const = 0;
  /// The bytes of one id; a character may take several of them.
  [[nodiscard]] virtual std::string decode(int32_t token_id) const = 0;
};

/// Whether this build has a library for it.
[[nodiscard]] bool has_tokenizer_library();
/// kUnsupported in a build without the library, kInvalidArgument for a file it cannot read.
[[nodiscard]] Result<std::unique_ptr<EdgeTokenizer>> make_tokenizer(const std::string& path);

}  // namespace diffulex
