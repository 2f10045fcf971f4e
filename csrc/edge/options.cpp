// SPDX-License-Identifier: Apache-2.0
#include "diffulex/edge/options.h"

#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <type_traits>

#include "diffulex/edge/read_number.h"

namespace diffulex {
namespace {

/// Every key with the field it sets; enumerations with their last value.
template <typename Visitor>
void visit_fields(EdgeOptions& options, Visitor&& visit) {
  EngineOptions& engine = options.engine;
  visit("strategy", engine.strategy);
  visit("block_size", engine.block_size);
  visit("buffer_size", engine.buffer_size);
  visit("page_size", engine.page_size);
  visit("max_num_batched_tokens", engine.max_num_batched_tokens);
  visit("max_model_len", engine.max_model_len);
  visit("mask_token_id", engine.mask_token_id);
  visit("vocab_size", engine.vocab_size);
  visit("stop_token_ids", engine.stop_token_ids);
  visit("add_block_threshold", engine.thresholds.add_block);
  visit("semi_complete_threshold", engine.thresholds.semi_complete);
  visit("accept_threshold", engine.thresholds.accept);
  visit("edit_threshold", engine.thresholds.edit);
  visit("token_stability_threshold", engine.thresholds.token_stability);
  visit("enable_chunked_prefill", engine.enable_chunked_prefill);
  visit("auto_max_nfe", engine.auto_max_nfe);
  visit("auto_max_nfe_warmup_steps", engine.auto_max_nfe_warmup_steps);
  visit("auto_max_nfe_tpf_floor", engine.auto_max_nfe_tpf_floor);
  visit("seed", engine.seed);
  visit("masked_rows_only", engine.masked_rows_only);
  visit("is_editing", engine.is_editing);
  visit("logits_shift", engine.logits_shift);
  visit("d2f_block_grid", engine.d2f_block_grid);
  visit("fdv2_use_block_cache", engine.fdv2_use_block_cache);
  EdgeSampler& sampler = options.sampler;
  visit("acceptance_rule", sampler.acceptance_rule, AcceptRule::kHierarchy);
  visit("confidence_type", sampler.confidence_type, ConfidenceKind::kNegEntropy);
  visit("confidence_space", sampler.confidence_space, ConfidenceSpace::kTempered);
  visit("raw_confidence", sampler.raw_confidence);
  visit("filter_order", sampler.filter_order, FilterOrder::kTopKFirst);
  visit("exclusion", sampler.exclusion, ExclusionMode::kOff);
  visit("forbidden_token_ids", sampler.forbidden_token_ids);
  visit("demote_token_ids", sampler.demote_token_ids);
  visit("vocab_limit", sampler.vocab_limit);
  visit("denoising_steps", sampler.denoising_steps);
  visit("force_accept_last_step", sampler.force_accept_last_step);
  visit("factor", sampler.factor);
  visit("entropy_bound", sampler.entropy_bound);
  visit("low_threshold", sampler.low_threshold);
  visit("is_gated", sampler.is_gated);
  visit("max_post_edit_steps", engine.max_post_edit_steps);
  visit("begin_token_ids", options.prompt.begin_token_ids);
  visit("has_template", options.prompt.has_template);
  visit("template_before", options.prompt.before);
  visit("template_after", options.prompt.after);
  visit("temperature", options.request.temperature);
  visit("top_p", options.request.top_p);
  visit("top_k", options.request.top_k);
  visit("min_p", options.request.min_p);
}

bool read_text(const std::string& quoted, std::string& value) {
  value.clear();
  const size_t last = quoted.size() - 1;
  if (quoted.size() < 2 || quoted[0] != '"' || quoted[last] != '"') {
    return false;
  }
  for (size_t i = 1; i < last; ++i) {
    if (quoted[i] != '\\') {
      value += quoted[i];
      continue;
    }
    const char escaped = quoted[++i];
    if (i == last || std::strchr("nr\"\\", escaped) == nullptr) {
      return false;
    }
    value += escaped == 'n' ? '\n' : escaped == 'r' ? '\r' : escaped;
  }
  return true;
}

/// Reads a value; returns what it has to look like if it does not.
template <typename T>
std::string read_value(const std::string& text, std::vector<T>& field) {
  std::istringstream words(text);
  field.clear();
  for (std::string word; words >> word;) {
    if (!read_number(word, field.emplace_back())) {
      return "integers";
    }
  }
  return "";
}

template <typename T, typename... Last>
std::string read_value(const std::string& text, T& field, Last... last) {
  if constexpr (std::is_same_v<T, std::string>) {
    return read_text(text, field) ? "" : "a text in quotation marks";
  } else if constexpr (std::is_enum_v<T>) {
    int64_t number = 0;
    const bool is_number = read_number(text, number);
    field = static_cast<T>(number);
    return is_number && number >= 0 && ((field <= last) && ...)
               ? ""
               : "an integer in [0, " + (std::to_string(static_cast<int64_t>(last)) + ...) + "]";
  } else if constexpr (std::is_same_v<T, bool>) {
    field = text == "1";
    return text == "0" || text == "1" ? "" : "0 or 1";
  } else {
    const char* expected = std::is_integral_v<T> ? "an integer" : "a number";
    return read_number(text, field) ? "" : expected;
  }
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  return begin == std::string::npos
             ? ""
             : text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

Result<std::map<std::string, std::string>> read_lines(const std::string& text) {
  std::map<std::string, std::string> values;
  std::istringstream lines(text);
  std::string line;
  for (int32_t number = 1; std::getline(lines, line); ++number) {
    line = trimmed(line);
    if (line.empty() || line[0] == '#') {
      continue;
    }
    const size_t sign = line.find('=');
    const std::string key = trimmed(line.substr(0, sign));
    if (sign == std::string::npos || key.empty()) {
      return make_error(StatusCode::kInvalidArgument,
                        "session options: expected key = value, got \"", line, "\" in line ",
                        number);
    }
    if (!values.emplace(key, trimmed(line.substr(sign + 1))).second) {
      return make_error(StatusCode::kInvalidArgument, "session options: expected ", key,
                        " once, got it again in line ", number);
    }
  }
  return values;
}

}  // namespace

Result<EdgeOptions> EdgeOptions::parse(const std::string& text) {
  Result<std::map<std::string, std::string>> read = read_lines(text);
  DIFFULEX_RETURN_IF_ERROR(read.status());
  std::map<std::string, std::string>& values = read.value();
  EdgeOptions options;
  Status status;
  visit_fields(options, [&](const char* key, auto& field, auto... last) {
    const auto found = values.find(key);
    const bool is_there = found != values.end();
    // No value is a word without quotation marks.
    const std::string expected = read_value(is_there ? found->second : "none", field, last...);
    if (status.ok() && !expected.empty()) {
      status = make_error(StatusCode::kInvalidArgument, "session options: expected ", expected,
                          " as ", key, ", got ", is_there ? "\"" + found->second + "\"" : "none");
    }
    if (is_there) {
      values.erase(found);
    }
  });
  DIFFULEX_RETURN_IF_ERROR(status);
  if (!values.empty()) {
    return make_error(StatusCode::kInvalidArgument, "session options: expected known keys, got ",
                      values.begin()->first);
  }
  return options;
}

Result<EdgeOptions> EdgeOptions::load(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) {
    return make_error(StatusCode::kNotFound, path, ": expected a readable file, got none");
  }
  return parse(text.str());
}

}  // namespace diffulex
