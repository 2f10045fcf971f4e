// SPDX-License-Identifier: Apache-2.0
#include "arguments.h"

#include <algorithm>
#include <functional>

#include "diffulex/edge/read_number.h"

namespace diffulex {
namespace {

constexpr const char* kUsage =
    R"(usage: diffulex-edge-run BUNDLE [--prompt TEXT | --ids IDS] [flags]

Answers prompts with a program that `diffulex edge export` wrote. BUNDLE is its directory. Without
--prompt and --ids every line of standard input that is not blank is a prompt.

  --prompt TEXT          the prompt, in the chat template of the model
  --raw                  continue text as it is, without the template
  --ids IDS              the prompt as token ids, with commas or spaces between them; the answer is
                         ids as well. -: one prompt of ids a line of standard input
  --tokenize             print the ids of prompts, a line each, that --ids takes; do not answer.
                         A blank line of standard input is a prompt as well
  --max-tokens N         most generated tokens [512, or what fits]
  --max-nfe N            forwards of a request [no limit]
  --temperature X        0 is greedy [the bundle's]
  --top-p X, --top-k N, --min-p X
                         filters of draws [the bundle's]
  --accept-threshold X   confidence that accepts a token [the bundle's]
  --seed N               of the draws [from the bundle's and the number of the request]
  --ignore-eos           do not stop at stop ids
  --buffer-size N        blocks in flight [the bundle's]
  --threads N            [physical cores]
  --json                 one JSON object an answer
  --stats                speed and memory on standard error; an object with --json
  --help, --version

Exit status: 0, 1 failed, 2 bad arguments or files, 130 interrupted.
)";

struct Flag {
  const char* name;
  const char* expectation;  // null: takes no value
  std::function<bool(const std::string&)> set;
};

template <typename T>
std::function<bool(const std::string&)> number(std::optional<T>& field) {
  return [&field](const std::string& text) { return read_number(text, field.emplace()); };
}

std::function<bool(const std::string&)> truth(bool& field) {
  return [&field](const std::string&) { return field = true; };
}

std::vector<Flag> flags_of(RunArguments& arguments) {
  const auto set_ids = [&arguments](const std::string& text) {
    arguments.reads_ids = text == "-";
    if (arguments.reads_ids) {
      return true;
    }
    Result<std::vector<int32_t>> ids = parse_ids(text);
    if (ids.ok()) {
      arguments.token_ids = ids.value();
    }
    return ids.ok();
  };
  const auto set_prompt = [&arguments](const std::string& text) {
    arguments.prompt = text;
    return true;
  };
  const auto set_seed = [&arguments](const std::string& text) {
    int64_t negative = 0;
    const bool is_negative = read_number(text, negative) && negative < 0;
    uint64_t& seed = arguments.seed.emplace(static_cast<uint64_t>(negative));
    return is_negative || read_number(text, seed);
  };
  const auto set_threads = [&arguments](const std::string& text) {
    return read_number(text, arguments.threads) && arguments.threads > 0;
  };
  return {
      {"--prompt", "a text", set_prompt},
      {"--ids", "token ids, or -", set_ids},
      {"--raw", nullptr, truth(arguments.is_raw)},
      {"--tokenize", nullptr, truth(arguments.only_tokenizes)},
      {"--max-tokens", "an integer", number(arguments.max_tokens)},
      {"--max-nfe", "an integer", number(arguments.max_nfe)},
      {"--temperature", "a number", number(arguments.temperature)},
      {"--top-p", "a number", number(arguments.top_p)},
      {"--top-k", "an integer", number(arguments.top_k)},
      {"--min-p", "a number", number(arguments.min_p)},
      {"--accept-threshold", "a number", number(arguments.accept_threshold)},
      {"--seed", "an integer", set_seed},
      {"--ignore-eos", nullptr, truth(arguments.ignore_eos)},
      {"--buffer-size", "an integer", number(arguments.buffer_size)},
      {"--threads", "an integer >= 1", set_threads},
      {"--json", nullptr, truth(arguments.is_json)},
      {"--stats", nullptr, truth(arguments.has_stats)},
      {"--help", nullptr, truth(arguments.has_help)},
      {"-h", nullptr, truth(arguments.has_help)},
      {"--version", nullptr, truth(arguments.has_version)},
  };
}

Status check(const RunArguments& arguments) {
  if (arguments.has_help || arguments.has_version) {
    return {};
  }
  if (arguments.bundle.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "BUNDLE: expected a directory of diffulex edge export, got none");
  }
  if (arguments.prompt && (arguments.token_ids || arguments.reads_ids)) {
    return make_error(StatusCode::kInvalidArgument, "--prompt: expected a text or --ids, got both");
  }
  if (arguments.only_tokenizes &&
      (arguments.token_ids || arguments.reads_ids || arguments.is_json || arguments.has_stats)) {
    return make_error(StatusCode::kInvalidArgument,
                      "--tokenize: expected texts, got it with --ids, --json or --stats");
  }
  return {};
}

}  // namespace

SamplingParams RunArguments::params(SamplingParams defaults) const {
  defaults.temperature = temperature.value_or(defaults.temperature);
  defaults.top_p = top_p.value_or(defaults.top_p);
  defaults.top_k = top_k.value_or(defaults.top_k);
  defaults.min_p = min_p.value_or(defaults.min_p);
  defaults.max_tokens = max_tokens.value_or(defaults.max_tokens);
  defaults.max_nfe = max_nfe.value_or(defaults.max_nfe);
  defaults.ignore_eos = ignore_eos;
  defaults.seed = seed;
  defaults.accept_threshold = accept_threshold;
  return defaults;
}

std::string usage() {
  return kUsage;
}

Result<std::vector<int32_t>> parse_ids(const std::string& text) {
  std::vector<int32_t> ids;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find_first_of(", \t\r", begin), text.size());
    if (end > begin && !read_number(text.substr(begin, end - begin), ids.emplace_back())) {
      return make_error(StatusCode::kInvalidArgument, "token ids: expected integers, got \"",
                        text.substr(begin, end - begin), "\"");
    }
    begin = end + 1;
  }
  return ids;
}

Result<RunArguments> parse_arguments(const std::vector<std::string>& words) {
  RunArguments arguments;
  const std::vector<Flag> flags = flags_of(arguments);
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word.empty() || word[0] != '-') {
      if (!arguments.bundle.empty()) {
        return make_error(StatusCode::kInvalidArgument,
                          "arguments: expected one bundle, got another one: ", word);
      }
      arguments.bundle = word;
      continue;
    }
    const size_t sign = word.find('=');
    const std::string name = word.substr(0, sign);
    const Flag* flag = nullptr;
    for (const Flag& known : flags) {
      flag = name == known.name ? &known : flag;
    }
    if (flag == nullptr) {
      return make_error(StatusCode::kInvalidArgument, "arguments: expected a known flag, got ",
                        word, " (see --help)");
    }
    const bool takes_value = flag->expectation != nullptr;
    const bool has_value = sign != std::string::npos || (takes_value && i + 1 < words.size());
    if (takes_value != has_value) {
      return make_error(StatusCode::kInvalidArgument, name, ": expected ",
                        takes_value ? flag->expectation : "no value", ", got ",
                        takes_value ? "none" : word.substr(sign + 1));
    }
    const std::string value = sign != std::string::npos ? word.substr(sign + 1)
                              : takes_value             ? words[++i]
                                                        : std::string();
    if (!flag->set(value)) {
      return make_error(StatusCode::kInvalidArgument, name, ": expected ", flag->expectation,
                        ", got \"", value, "\"");
    }
  }
  DIFFULEX_RETURN_IF_ERROR(check(arguments));
  return arguments;
}

}  // namespace diffulex
