// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "diffulex/core/options.h"

namespace diffulex::test {

/// Room for four requests of at most 64 tokens, in blocks and pages of four.
inline EngineOptions scheduler_options() {
  EngineOptions options;
  options.block_size = 4;
  options.buffer_size = 2;
  options.page_size = 4;
  options.num_pages = 64;
  options.max_num_reqs = 4;
  options.max_model_len = 64;
  options.max_num_batched_tokens = 256;
  options.vocab_size = 50;
  options.stop_token_ids = {1};
  return options;
}

/// A prompt without stop ids; those of other `first` begin otherwise.
inline std::vector<int32_t> prompt_of(int32_t len, int32_t first = 2) {
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < len; ++i) {
    prompt.push_back(2 + (first + i * 7) % 47);
  }
  return prompt;
}

/// For an answer of exactly so many tokens.
inline SamplingParams fixed_len(int32_t max_tokens) {
  SamplingParams params;
  params.max_tokens = max_tokens;
  params.ignore_eos = true;
  return params;
}

}  // namespace diffulex::test
