// SPDX-License-Identifier: Apache-2.0
// A session over a model of the embedder's: here one that counts on from the last token of the
// prompt. A real one calls an exported program or a phone's accelerator; see docs/edge_embed.md.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "diffulex/edge/session.h"

namespace {

using diffulex::EdgeCall;
using diffulex::EdgeLimits;
using diffulex::EdgeModel;
using diffulex::EdgeOptions;
using diffulex::EdgeSession;
using diffulex::EdgeStep;
using diffulex::Result;

constexpr int32_t kVocab = 32;
constexpr int32_t kMask = 31;
constexpr int32_t kEnd = 30;
constexpr int32_t kMaxLen = 64;

/// The cache of a model is an array of rows by position; this one's rows are the tokens.
class CountingModel final : public EdgeModel {
 public:
  EdgeLimits limits() const override {
    return {kVocab, /*max_rows=*/16, /*max_logits=*/16, kMaxLen};
  }

  Result<const float*> run(const EdgeCall& call) override {
    for (size_t i = 0; i < call.tokens.size(); ++i) {
      cache_[static_cast<size_t>(call.positions[i])] = call.tokens[i];
    }
    logits_.assign(call.logits_rows.size() * kVocab, 0.0F);
    for (size_t i = 0; i < call.logits_rows.size(); ++i) {
      const auto row = static_cast<size_t>(call.logits_rows[i]);
      logits_[i * kVocab +
              static_cast<size_t>(predict(call.positions[row], call.visible_end[row]))] = 20.0F;
    }
    return logits_.data();
  }

 private:
  /// What comes at a position: one more for each step from the last known token that the row sees.
  int64_t predict(int64_t position, int64_t visible_end) const {
    int64_t known = std::min(position, visible_end) - 1;
    while (known > 0 && cache_[static_cast<size_t>(known)] == kMask) {
      --known;
    }
    return std::min<int64_t>(cache_[static_cast<size_t>(known)] + position - known, kEnd);
  }

  std::vector<int64_t> cache_ = std::vector<int64_t>(kMaxLen + 16, kMask);
  std::vector<float> logits_;
};

int fail(const diffulex::Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return 1;
}

}  // namespace

int main() {
  EdgeOptions options;  // an exported model has them in its session.conf: EdgeOptions::load
  options.engine.block_size = 4;
  options.engine.page_size = 4;
  options.engine.buffer_size = 2;
  options.engine.max_model_len = kMaxLen;
  options.engine.vocab_size = kVocab;
  options.engine.mask_token_id = kMask;
  options.engine.stop_token_ids = {kEnd};
  options.sampler.forbidden_token_ids = {kMask};

  auto created = EdgeSession::create(options, std::make_unique<CountingModel>());
  if (!created.ok()) {
    return fail(created.status());
  }
  EdgeSession& session = *created.value();
  const std::vector<int32_t> prompt = {3, 4, 5};
  const auto result = session.generate(prompt, options.request, [](const EdgeStep& step) {
    for (const int32_t token : step.tokens) {
      std::printf("%d ", token);  // settled: never taken back
    }
  });
  if (!result.ok()) {
    return fail(result.status());
  }
  const size_t count = result.value().output_ids.size();
  std::printf("\n%zu tokens in %d forwards, ended by %s\n", count, result.value().nfe,
              to_string(result.value().finish_reason));
  return count == 24 ? 0 : 1;
}
