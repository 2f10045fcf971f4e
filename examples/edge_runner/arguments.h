// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "diffulex/core/options.h"
#include "diffulex/core/status.h"

namespace diffulex {

/// What the command line of diffulex-edge-run says.
struct RunArguments {
  std::string bundle;
  std::optional<std::string> prompt;
  std::optional<std::vector<int32_t>> token_ids;
  bool reads_ids = false;  // standard input: token ids, one prompt a line
  bool is_raw = false;
  bool only_tokenizes = false;
  bool is_json = false;
  bool has_stats = false;
  bool has_help = false;
  bool has_version = false;
  int32_t threads = 0;
  std::optional<int32_t> buffer_size;
  // Of requests; absent = the bundle's.
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<int32_t> top_k;
  std::optional<float> min_p;
  std::optional<float> accept_threshold;
  std::optional<int32_t> max_tokens;
  std::optional<int32_t> max_nfe;
  std::optional<uint64_t> seed;
  bool ignore_eos = false;

  /// The defaults with what was given.
  [[nodiscard]] SamplingParams params(SamplingParams defaults) const;
};

/// Text of --help.
[[nodiscard]] std::string usage();
/// Token ids with spaces or commas between them.
[[nodiscard]] Result<std::vector<int32_t>> parse_ids(const std::string& text);
/// kInvalidArgument names the first argument that is wrong.
[[nodiscard]] Result<RunArguments> parse_arguments(const std::vector<std::string>& words);

}  // namespace diffulex
