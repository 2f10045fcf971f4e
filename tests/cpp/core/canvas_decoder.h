// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <set>
#include <vector>

#include "core/toy_model.h"
#include "diffulex/core/options.h"
#include "diffulex/core/philox.h"
#include "diffulex/core/status_enums.h"

// The toy model and sampler of canvas decoding, and the oracle of its property tests: one request
// decoded canvas by canvas as the specification describes it, without pages, batches or preemption.

namespace diffulex::test {

/// Bounds of the toy sampler, chosen so that canvases converge after a few steps or not at all.
inline constexpr float kToyEntropyBound = 0.3F;
inline constexpr float kToyConfidenceBound = 0.11F;

/// Input of a decoder row: its token and its self-conditioning signal (0 = none). Encoder rows take
/// the token alone.
[[nodiscard]] inline int64_t toy_decoder_input(int64_t token, uint64_t signal) {
  return static_cast<int64_t>(toy_hash(static_cast<uint64_t>(token) + 0xDEC0DEULL, signal));
}

/// What the sampler gets out of one canvas row.
struct ToyCanvasRow {
  int64_t argmax = 0;
  int64_t draw = 0;
  float entropy = 0.0F;
  uint64_t signal = 0;  // for the next step
};

/// Row statistics of an output at `position`. Most argmax tokens are stable from step to step, so
/// that canvases converge; every sixth, the draws and the entropies depend on all visible keys.
[[nodiscard]] inline ToyCanvasRow toy_canvas_row(uint64_t output, int32_t position, double uniform,
                                                 float inv_temperature, int32_t vocab_size) {
  const auto size = static_cast<uint64_t>(vocab_size);
  const auto milli = static_cast<uint64_t>(std::lround(inv_temperature * 1000.0F));
  uint64_t bits = 0;
  std::memcpy(&bits, &uniform, sizeof(bits));
  ToyCanvasRow row;
  row.argmax = static_cast<int64_t>(
      (output % 6 == 0 ? toy_hash(output, 1) : toy_hash(static_cast<uint64_t>(position), 2)) %
      size);
  row.draw = static_cast<int64_t>(toy_hash(toy_hash(output, bits), milli) % size);
  row.entropy = static_cast<float>(toy_hash(output, milli) >> 44) / 1048576.0F * 0.2F;
  row.signal = toy_hash(output, milli + 7) | 1U;
  return row;
}

/// Entropy-bound acceptance: in ascending order of entropy, a row is accepted if the entropies
/// before it sum to at most the bound.
[[nodiscard]] inline std::vector<bool> accept_by_entropy(const std::vector<ToyCanvasRow>& rows) {
  std::vector<size_t> order(rows.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&rows](size_t a, size_t b) { return rows[a].entropy < rows[b].entropy; });
  std::vector<bool> accepted(rows.size(), false);
  double sum = 0.0;
  for (const size_t i : order) {
    accepted[i] = sum <= static_cast<double>(kToyEntropyBound);
    sum += static_cast<double>(rows[i].entropy);
  }
  return accepted;
}

[[nodiscard]] inline bool is_confident(const std::vector<ToyCanvasRow>& rows) {
  double sum = 0.0;
  for (const ToyCanvasRow& row : rows) {
    sum += static_cast<double>(row.entropy);
  }
  return sum / static_cast<double>(rows.size()) < static_cast<double>(kToyConfidenceBound);
}

struct CanvasResult {
  std::vector<int32_t> output;
  FinishReason reason = FinishReason::kNone;
  int32_t nfe = 0;
  int32_t num_canvases = 0;
  int32_t num_converged = 0;  // before the last step
};

class CanvasDecoder {
 public:
  CanvasDecoder(const EngineOptions& options, const std::vector<int32_t>& prompt,
                const SamplingParams& params, uint64_t seed)
      : options_(options),
        params_(params),
        seed_(seed),
        prompt_len_(static_cast<int32_t>(prompt.size())),
        limit_end_(std::min(prompt_len_ + params.max_tokens, options.max_model_len)),
        committed_(prompt.begin(), prompt.end()) {
    if (!params.ignore_eos) {
      stops_.insert(options.stop_token_ids.begin(), options.stop_token_ids.end());
      stops_.insert(params.stop_token_ids.begin(), params.stop_token_ids.end());
    }
  }

  CanvasResult decode() {
    encode();
    result_.reason = stop_reason();
    while (result_.reason == FinishReason::kNone) {
      denoise();
      if (result_.reason == FinishReason::kNone) {
        encode();
        result_.reason = stop_reason();
      }
    }
    const int32_t end = std::min(settled_end(), first_stop());
    result_.output.assign(committed_.begin() + prompt_len_, committed_.begin() + end);
    return result_;
  }

 private:
  /// Causal encoder pass over everything committed and not cached yet.
  void encode() {
    const std::vector<int64_t> inputs(
        committed_.begin() + static_cast<std::ptrdiff_t>(cache_.size()), committed_.end());
    std::vector<int32_t> visible;
    for (size_t i = 0; i < inputs.size(); ++i) {
      visible.push_back(static_cast<int32_t>(cache_.size() + i + 1));
    }
    std::vector<ToyKey> keys;
    (void)toy_forward(cache_, inputs, visible, keys);
    cache_.insert(cache_.end(), keys.begin(), keys.end());
    ++result_.nfe;
  }

  [[nodiscard]] int64_t random_id(int32_t position, int32_t step, RandomStream stream) const {
    return static_cast<int64_t>(
        std::floor(philox_uniform(seed_, position, step, stream) * options_.vocab_size));
  }

  /// One canvas, until it is committed or a forward limit ends the request.
  void denoise() {
    const auto start = static_cast<int32_t>(cache_.size());
    const int32_t len = std::min(options_.block_size, options_.max_model_len - start);
    std::vector<int64_t> canvas;
    for (int32_t i = 0; i < len; ++i) {
      canvas.push_back(random_id(start + i, 0, RandomStream::kCanvasInit));
    }
    std::vector<uint64_t> signals(canvas.size(), 0);
    std::vector<std::vector<int64_t>> history;
    for (int32_t n = options_.max_denoising_steps; n >= 1; --n) {
      const int32_t step = options_.max_denoising_steps - n;
      const float temperature =
          options_.t_min + (options_.t_max - options_.t_min) * static_cast<float>(n) /
                               static_cast<float>(options_.max_denoising_steps);
      std::vector<ToyCanvasRow> rows = run_decoder(canvas, signals, start, step, temperature);
      const std::vector<bool> accepted = accept_by_entropy(rows);
      std::vector<int64_t> argmax;
      for (size_t i = 0; i < rows.size(); ++i) {
        const int32_t position = start + static_cast<int32_t>(i);
        canvas[i] = accepted[i] ? rows[i].draw : random_id(position, step, RandomStream::kRenoise);
        signals[i] = rows[i].signal;
        argmax.push_back(rows[i].argmax);
      }
      const bool is_stable = is_stable_canvas(history, argmax);
      history.push_back(argmax);
      ++result_.nfe;
      if ((is_stable && is_confident(rows)) || n == 1) {
        result_.num_converged += n > 1 ? 1 : 0;
        ++result_.num_canvases;
        committed_.insert(committed_.end(), argmax.begin(), argmax.end());
      }
      result_.reason = stop_reason();
      if (committed_.size() > cache_.size() || result_.reason != FinishReason::kNone) {
        return;
      }
    }
  }

  std::vector<ToyCanvasRow> run_decoder(const std::vector<int64_t>& canvas,
                                        const std::vector<uint64_t>& signals, int32_t start,
                                        int32_t step, float temperature) {
    std::vector<int64_t> inputs;
    for (size_t i = 0; i < canvas.size(); ++i) {
      inputs.push_back(toy_decoder_input(canvas[i], signals[i]));
    }
    const auto end = start + static_cast<int32_t>(canvas.size());
    const std::vector<int32_t> visible(canvas.size(), end);
    std::vector<ToyKey> dropped;
    const std::vector<uint64_t> outputs = toy_forward(cache_, inputs, visible, dropped);
    std::vector<ToyCanvasRow> rows;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const int32_t position = start + static_cast<int32_t>(i);
      rows.push_back(toy_canvas_row(outputs[i], position,
                                    philox_uniform(seed_, position, step, RandomStream::kToken),
                                    1.0F / temperature, options_.vocab_size));
    }
    return rows;
  }

  /// The last `stability_threshold` argmax canvases exist and equal this one.
  [[nodiscard]] bool is_stable_canvas(const std::vector<std::vector<int64_t>>& history,
                                      const std::vector<int64_t>& argmax) const {
    const auto wanted = static_cast<size_t>(options_.stability_threshold);
    if (history.size() < wanted) {
      return false;
    }
    return std::all_of(history.end() - options_.stability_threshold, history.end(),
                       [&argmax](const std::vector<int64_t>& past) { return past == argmax; });
  }

  [[nodiscard]] int32_t settled_end() const {
    return std::min(limit_end_, static_cast<int32_t>(committed_.size()));
  }
  [[nodiscard]] int32_t first_stop() const {
    for (int32_t p = prompt_len_; p < settled_end(); ++p) {
      if (stops_.count(static_cast<int32_t>(committed_[static_cast<size_t>(p)])) > 0) {
        return p;
      }
    }
    return 1 << 30;
  }
  [[nodiscard]] FinishReason stop_reason() const {
    const int32_t settled = settled_end();
    if (first_stop() < settled) {
      return FinishReason::kEosTokenGenerated;
    }
    if (settled == limit_end_) {
      return limit_end_ == prompt_len_ + params_.max_tokens ? FinishReason::kMaxNewTokensReached
                                                            : FinishReason::kMaxModelLenReached;
    }
    if (params_.max_nfe > 0 && result_.nfe >= params_.max_nfe) {
      return FinishReason::kMaxNfeReached;
    }
    int32_t run = 0;
    for (int32_t p = settled - 1; p >= prompt_len_; --p) {
      if (committed_[static_cast<size_t>(p)] != committed_[static_cast<size_t>(settled - 1)]) {
        break;
      }
      ++run;
    }
    return params_.max_repetition_run > 0 && run >= params_.max_repetition_run
               ? FinishReason::kMaxRepetitionRunReached
               : FinishReason::kNone;
  }

  EngineOptions options_;
  SamplingParams params_;
  uint64_t seed_;
  int32_t prompt_len_;
  int32_t limit_end_;
  std::vector<int64_t> committed_;  // prompt and committed canvases
  std::set<int32_t> stops_;
  std::vector<ToyKey> cache_;  // encoder keys
  CanvasResult result_;
};

}  // namespace diffulex::test
