// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "diffulex/core/options.h"
#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/sampling.h"

namespace diffulex {

/// How logits become tokens, with the meaning of TokenStatsParams, SampleFilteredParams and the
/// acceptance ops.
struct EdgeSampler {
  AcceptRule acceptance_rule = AcceptRule::kThreshold;
  ConfidenceKind confidence_type = ConfidenceKind::kMaxProb;
  ConfidenceSpace confidence_space = ConfidenceSpace::kProcessed;
  bool raw_confidence = false;  // compare the probability at temperature 1
  FilterOrder filter_order = FilterOrder::kTopPFirst;
  ExclusionMode exclusion = ExclusionMode::kExclude;
  std::vector<int64_t> forbidden_token_ids;  // never chosen, the mask token among them
  std::vector<int64_t> demote_token_ids;     // chosen last: they take all confidence from a row
  int64_t vocab_limit = -1;                  // ids at or past it are never chosen; -1 = none
  int32_t denoising_steps = 0;               // 0 = block size
  bool force_accept_last_step = false;
  float factor = 1.0F;
  float entropy_bound = 0.0F;
  float low_threshold = 0.0F;
  bool is_gated = false;  // the best position is forced only after a semi-complete block
};

/// What stands around a prompt that is given as text.
struct EdgePrompt {
  std::vector<int32_t> begin_token_ids;  // in front of text that has no template
  bool has_template = false;             // the model has a chat template
  std::string before;                    // its text before one user message; empty with `after`:
  std::string after;                     // a template that is not text around the message
};

/// All that a session must know beside its model.
struct EdgeOptions {
  EngineOptions engine;  // a session sets what concerns several requests itself
  EdgeSampler sampler;
  EdgePrompt prompt;       // for programs that have a tokenizer; a session takes ids
  SamplingParams request;  // defaults of a request: temperature and filters

  /// Reads `key = value` lines, as a bundle's session.conf has them: every key once, in any order;
  /// lists are numbers with spaces between them, texts stand in quotation marks with the escapes
  /// \n, \r, \" and \\; lines with # are comments. kInvalidArgument names the first line, or
  /// the key, that is wrong.
  [[nodiscard]] DIFFULEX_API static Result<EdgeOptions> parse(const std::string& text);
  /// Reads a file; kNotFound if it cannot be read.
  [[nodiscard]] DIFFULEX_API static Result<EdgeOptions> load(const std::string& path);
};

}  // namespace diffulex
