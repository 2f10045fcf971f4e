// SPDX-License-Identifier: Apache-2.0
// diffulex-edge-run: answers prompts with an exported program, without Python and without torch.

#include <executorch/runtime/platform/platform.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <string>
#include <utility>

#include "arguments.h"
#include "diffulex/edge/session.h"
#include "diffulex/version.h"
#include "executorch_model.h"
#include "json_text.h"
#include "tokenizer.h"

namespace diffulex {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kFailed = 1;
constexpr int kUsage = 2;
constexpr int kInterrupted = 130;

volatile std::sig_atomic_t is_interrupted = 0;

void interrupt(int /*signal*/) {
  is_interrupted = 1;
}

/// The first interrupt ends the answer, or the wait for a prompt; a second one the program, at
/// once.
void catch_interrupt() {
  struct sigaction action{};
  action.sa_handler = interrupt;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int report(const Status& status) {
  std::fflush(stdout);
  std::fprintf(stderr, "diffulex-edge-run: %s\n", status.message().c_str());
  return static_cast<int32_t>(status.code()) < 16 ? kUsage : kFailed;
}

std::string joined(const std::vector<int32_t>& ids, const char* separator) {
  std::string text;
  for (const int32_t id : ids) {
    text += (text.empty() ? "" : separator) + std::to_string(id);
  }
  return text;
}

struct Totals {
  int64_t prompt_tokens = 0;
  int64_t tokens = 0;
  double seconds = 0.0;
  double first_token_seconds = 0.0;  // of the last request
};

/// Milliseconds since the start of the program; -1: not reached. Prompt and first token are those
/// of the first request.
struct Moments {
  double load_end = -1.0;
  double first_begin = -1.0;
  double prompt_end = -1.0;
  double first_token = -1.0;
  double last_end = -1.0;
};

/// Keeps the first moment that it is told.
void note(double& moment, double milliseconds) {
  moment = moment < 0.0 ? milliseconds : moment;
}

class Runner {
 public:
  explicit Runner(RunArguments arguments) : arguments_(std::move(arguments)) {}

  [[nodiscard]] Status open() {
    std::string directory = arguments_.bundle;
    std::string program = directory + "/model.pte";
    const size_t slash = directory.find_last_of('/');
    if (directory.size() > 4 && directory.compare(directory.size() - 4, 4, ".pte") == 0) {
      program = directory;
      directory = slash == std::string::npos ? "." : directory.substr(0, slash);
    }
    Result<EdgeOptions> options = EdgeOptions::load(directory + "/session.conf");
    DIFFULEX_RETURN_IF_ERROR(options.status());
    if (arguments_.buffer_size) {
      options.value().engine.buffer_size = *arguments_.buffer_size;
    }
    has_text_ = arguments_.prompt || (!arguments_.token_ids && !arguments_.reads_ids);
    if (has_text_) {
      Result<std::unique_ptr<EdgeTokenizer>> tokenizer =
          make_tokenizer(directory + "/tokenizer.json");
      DIFFULEX_RETURN_IF_ERROR(tokenizer.status());
      tokenizer_ = std::move(tokenizer).value();
    }
    around_ = options.value().prompt;
    if (arguments_.only_tokenizes) {
      return {};
    }
    Result<std::unique_ptr<EdgeModel>> model = load_executorch_model(program, arguments_.threads);
    DIFFULEX_RETURN_IF_ERROR(model.status());
    Result<std::unique_ptr<EdgeSession>> session =
        EdgeSession::create(options.value(), std::move(model).value());
    DIFFULEX_RETURN_IF_ERROR(session.status());
    session_ = std::move(session).value();
    moments_.load_end = since_start();
    return {};
  }

  [[nodiscard]] Status run() {
    if (arguments_.token_ids) {
      return answer(*arguments_.token_ids);
    }
    if (arguments_.prompt) {
      return answer_text(*arguments_.prompt);
    }
    std::string line;
    for (int64_t number = 1; is_interrupted == 0 && std::getline(std::cin, line); ++number) {
      // A line of ids for every line of text, so that both can be read side by side.
      if (!arguments_.only_tokenizes && line.find_first_not_of(" \t\r") == std::string::npos) {
        continue;
      }
      const Status status = answer_line(line);
      if (!status.ok()) {
        return make_error(status.code(), "line ", number, ": ", status.message());
      }
    }
    return {};
  }

  /// One line on standard error, with --json an object: its counts of tokens and its times up to
  /// the scaling factor have the names that ExecuTorch's own runner gives them.
  void print_stats() const {
    const EdgeStats& stats = session_->stats();
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const double peak_mb = static_cast<double>(usage.ru_maxrss) / 1024;
    const double forwards = stats.num_forwards > 0 ? static_cast<double>(stats.num_forwards) : 1;
    const double seconds = totals_.seconds > 0 ? totals_.seconds : 1;
    const auto tokens = static_cast<double>(totals_.tokens);
    if (arguments_.is_json) {
      std::fprintf(stderr,
                   "{\"prompt_tokens\": %lld, \"generated_tokens\": %lld, "
                   "\"model_load_start_ms\": 0, \"model_load_end_ms\": %.3f, "
                   "\"inference_start_ms\": %.3f, \"prompt_eval_end_ms\": %.3f, "
                   "\"first_token_ms\": %.3f, \"inference_end_ms\": %.3f, "
                   "\"aggregate_sampling_time_ms\": %.3f, \"SCALING_FACTOR_UNITS_PER_SECOND\": "
                   "1000, \"nfe\": %lld, \"model_calls\": %lld, \"tokens_per_second\": %.3f, "
                   "\"tokens_per_forward\": %.3f, \"threads\": %d, \"peak_rss_mb\": %.3f}\n",
                   static_cast<long long>(totals_.prompt_tokens),
                   static_cast<long long>(totals_.tokens), moments_.load_end, moments_.first_begin,
                   moments_.prompt_end, moments_.first_token, moments_.last_end,
                   1e3 * stats.sampling_seconds, static_cast<long long>(stats.num_forwards),
                   static_cast<long long>(stats.num_calls), tokens / seconds, tokens / forwards,
                   executorch_threads(), peak_mb);
      return;
    }
    std::fprintf(stderr,
                 "prompt %lld tokens, answer %lld tokens in %.3f s: %.1f tokens/s, %.2f tokens a "
                 "forward, %.2f ms a forward, sampling %.1f %%, first token %.1f ms, load %.1f ms, "
                 "%d threads, peak memory %.1f MB\n",
                 static_cast<long long>(totals_.prompt_tokens),
                 static_cast<long long>(totals_.tokens), totals_.seconds, tokens / seconds,
                 tokens / forwards, 1e3 * totals_.seconds / forwards,
                 100 * stats.sampling_seconds / seconds, 1e3 * totals_.first_token_seconds,
                 moments_.load_end, executorch_threads(), peak_mb);
  }

 private:
  /// Milliseconds.
  [[nodiscard]] double since_start() const { return 1e3 * seconds_since(start_); }

  [[nodiscard]] Status answer_line(const std::string& line) {
    if (has_text_) {
      return answer_text(line);
    }
    const Result<std::vector<int32_t>> ids = parse_ids(line);
    DIFFULEX_RETURN_IF_ERROR(ids.status());
    return answer(ids.value());
  }

  [[nodiscard]] Status answer_text(const std::string& text) {
    std::vector<int32_t> ids;
    std::string whole = text;
    if (arguments_.is_raw || !around_.has_template) {
      ids = around_.begin_token_ids;
    } else if (around_.before.empty() && around_.after.empty()) {
      return make_error(StatusCode::kUnsupported,
                        "prompt: expected a chat template that is text around the message, got "
                        "another one (use --raw or --ids)");
    } else {
      whole = around_.before + text + around_.after;
    }
    const Result<std::vector<int32_t>> encoded = tokenizer_->encode(whole);
    DIFFULEX_RETURN_IF_ERROR(encoded.status());
    ids.insert(ids.end(), encoded.value().begin(), encoded.value().end());
    if (arguments_.only_tokenizes) {
      std::puts(joined(ids, " ").c_str());
      return {};
    }
    return answer(ids);
  }

  [[nodiscard]] Status answer(const std::vector<int32_t>& prompt) {
    const EdgeOptions& options = session_->options();
    SamplingParams params = arguments_.params(options.request);
    if (!arguments_.max_tokens) {
      const auto room = options.engine.max_model_len - static_cast<int32_t>(prompt.size());
      params.max_tokens = std::max(1, std::min(params.max_tokens, room));
    }
    const Clock::time_point start = Clock::now();
    note(moments_.first_begin, since_start());
    bool is_first = true;
    const Result<RequestResult> result =
        session_->generate(prompt, params, [&](const EdgeStep& step) {
          note(moments_.prompt_end, since_start());
          if (!step.tokens.empty() && is_first) {
            totals_.first_token_seconds = seconds_since(start);
            note(moments_.first_token, since_start());
          }
          if (!arguments_.is_json && !step.tokens.empty()) {
            std::fputs(
                (is_first || has_text_ ? text_of(step.tokens) : " " + text_of(step.tokens)).c_str(),
                stdout);
            std::fflush(stdout);
          }
          is_first = is_first && step.tokens.empty();
          if (is_interrupted != 0) {
            session_->cancel();
          }
        });
    DIFFULEX_RETURN_IF_ERROR(result.status());
    const double seconds = seconds_since(start);
    totals_.prompt_tokens += static_cast<int64_t>(prompt.size());
    totals_.tokens += static_cast<int64_t>(result.value().output_ids.size());
    totals_.seconds += seconds;
    moments_.last_end = since_start();
    print_end(result.value(), seconds);
    return result.value().finish_reason == FinishReason::kError
               ? make_error(StatusCode::kInternal, "logits: expected finite numbers, got others")
               : Status();
  }

  void print_end(const RequestResult& result, double seconds) const {
    if (!arguments_.is_json) {
      std::puts("");
      return;
    }
    const std::string text =
        has_text_ ? "\"text\": " + json_string(text_of(result.output_ids)) + ", " : std::string();
    std::printf(
        "{%s\"token_ids\": [%s], \"prompt_tokens\": %d, \"finish_reason\": \"%s\", "
        "\"nfe\": %d, \"seconds\": %.6f}\n",
        text.c_str(), joined(result.output_ids, ", ").c_str(), result.prompt_len,
        to_string(result.finish_reason), result.nfe, seconds);
    std::fflush(stdout);
  }

  [[nodiscard]] std::string text_of(const std::vector<int32_t>& ids) const {
    if (!has_text_) {
      return joined(ids, " ");
    }
    std::string text;
    for (const int32_t id : ids) {
      text += tokenizer_->decode(id);
    }
    return text;
  }

  RunArguments arguments_;
  std::unique_ptr<EdgeTokenizer> tokenizer_;
  std::unique_ptr<EdgeSession> session_;
  EdgePrompt around_;
  bool has_text_ = false;
  const Clock::time_point start_ = Clock::now();
  Moments moments_;
  Totals totals_;
};

int run_program(const std::vector<std::string>& words) {
  Result<RunArguments> arguments = parse_arguments(words);
  if (!arguments.ok()) {
    return report(arguments.status());
  }
  if (arguments.value().has_help || arguments.value().has_version) {
    std::fputs(arguments.value().has_help ? usage().c_str()
                                          : "diffulex-edge-run " DIFFULEX_VERSION_STRING "\n",
               stdout);
    return 0;
  }
  const bool has_stats = arguments.value().has_stats;
  Runner runner(std::move(arguments).value());
  Status status = runner.open();
  if (!status.ok()) {
    return report(status);
  }
  catch_interrupt();
  status = runner.run();
  if (!status.ok()) {
    return report(status);
  }
  if (has_stats) {
    runner.print_stats();
  }
  return is_interrupted != 0 ? kInterrupted : 0;
}

}  // namespace
}  // namespace diffulex

int main(int argc, char** argv) {
  using executorch::runtime::PalImpl;
  // The runtime reports what it does on standard error; failures come back as values.
  executorch::runtime::register_pal(PalImpl::create([](auto...) {}, "diffulex-edge-run"));
  return diffulex::run_program(std::vector<std::string>(argv + 1, argv + argc));
}
