// SPDX-License-Identifier: Apache-2.0

// accept_gemma: one denoise step of a canvas. The entropy bound selects the draws that stay, all
// other positions take a random id; a converged canvas becomes its argmax.

#include <algorithm>

#include "ops/accept/block_cpu.h"
#include "ops/accept/entropy_order_cpu.h"
#include "ops/cpu_ops.h"

namespace diffulex::cpu {
namespace {

constexpr const char* kOp = "accept_gemma";
// A canvas is sorted: some microseconds each.
constexpr int64_t kCanvasGrain = 4;

Status check_canvas(const AcceptGemmaParams& params, int64_t block) {
  if (params.valid_len.present()) {
    DIFFULEX_RETURN_IF_ERROR(
        check_block_value(kOp, "valid_len", params.valid_len, block, 0, params.tokens.size[1]));
  }
  DIFFULEX_RETURN_IF_ERROR(
      check_block_value(kOp, "stable_run", params.stable_run, block, -1, INT32_MAX));
  const int64_t end = valid_end(params, block);
  if (end > 0) {
    DIFFULEX_RETURN_IF_ERROR(
        check_block_value(kOp, "steps_left", params.steps_left, block, 1, INT32_MAX));
  }
  for (int64_t position = 0; position < end; ++position) {
    DIFFULEX_RETURN_IF_ERROR(check_block_row(kOp, params, block, position));
    const int64_t renoise = row_of<const int64_t>(params.renoise_ids, block)[position];
    if (renoise < 0) {
      return make_error(StatusCode::kOutOfRange, "diffulex::", kOp, ": renoise_ids[", block, "][",
                        position, "]: expected an id >= 0, got ", renoise);
    }
  }
  return {};
}

/// What one step found out about a canvas.
struct CanvasState {
  bool bad_logits = false;
  bool skipped = false;
  bool same_argmax = true;

  [[nodiscard]] bool usable() const { return !bad_logits && !skipped; }
};

/// Writes the argmax and confidence outputs, clears write_ids and collects the entropies.
CanvasState collect(const AcceptGemmaParams& params, int64_t block, EntropyOrder* order) {
  CanvasState state;
  order->clear();
  const auto* rows = row_of<const int32_t>(params.row_index, block);
  const auto* previous = row_of<const int64_t>(params.prev_argmax, block);
  auto* argmax = row_of<int64_t>(params.argmax, block);
  auto* confidence = row_of<float>(params.confidence, block);
  std::fill_n(row_of<int64_t>(params.write_ids, block), params.tokens.size[1], int64_t{-1});
  std::fill_n(argmax, params.tokens.size[1], int64_t{-1});
  std::fill_n(confidence, params.tokens.size[1], 0.0F);
  const int64_t end = valid_end(params, block);
  for (int64_t position = 0; position < end; ++position) {
    const int32_t row = rows[position];
    if (row < 0) {
      state.skipped = true;
      continue;
    }
    const float* stats = row_of<const float>(params.stats, row);
    argmax[position] = value_at<int64_t>(params.argmax_ids, row);
    confidence[position] = stats[kStatsConfidence];
    state.bad_logits =
        state.bad_logits || argmax[position] < 0 || value_at<int64_t>(params.ids, row) < 0;
    state.same_argmax = state.same_argmax && argmax[position] == previous[position];
    order->add(stats[kStatsEntropy]);
  }
  return state;
}

bool is_stable(const AcceptGemmaParams& params, int64_t block, const CanvasState& state) {
  const int64_t before = index_at(params.stable_run, block);
  const int64_t run = before >= 0 && state.same_argmax ? before + 1 : 0;
  return run >= params.stability_threshold;
}

void write_canvas(const AcceptGemmaParams& params, int64_t block, bool converged,
                  EntropyOrder* order) {
  const auto* rows = row_of<const int32_t>(params.row_index, block);
  auto* write_ids = row_of<int64_t>(params.write_ids, block);
  if (converged) {
    std::copy_n(row_of<const int64_t>(params.argmax, block), order->size(), write_ids);
    auto* confidence = row_of<float>(params.confidence, block);
    for (int64_t position = 0; position < order->size(); ++position) {
      confidence[position] = row_of<const float>(params.stats, rows[position])[kStatsMaxProb];
    }
    return;
  }
  std::copy_n(row_of<const int64_t>(params.renoise_ids, block), order->size(), write_ids);
  order->for_each_within(params.entropy_bound, [&](int64_t position) {
    write_ids[position] = value_at<int64_t>(params.ids, rows[position]);
  });
}

void run_canvas(const AcceptGemmaParams& params, int64_t block, EntropyOrder* order) {
  const CanvasState state = collect(params, block, order);
  const bool is_padding = valid_end(params, block) == 0;
  const bool is_confident = state.usable() && !is_padding &&
                            order->mean() < static_cast<double>(params.confidence_threshold);
  const bool is_last = !is_padding && index_at(params.steps_left, block) == 1;
  const bool converged =
      state.usable() && (is_last || (is_confident && is_stable(params, block, state)));
  bool is_same = true;
  if (state.usable()) {
    write_canvas(params, block, converged, order);
    is_same = std::equal(row_of<const int64_t>(params.write_ids, block),
                         row_of<const int64_t>(params.write_ids, block) + order->size(),
                         row_of<const int64_t>(params.tokens, block));
  }
  int32_t flags = 0;
  flags |= is_same ? kAcceptSameAsPrevious : 0;
  flags |= is_confident ? kAcceptAllConfident : 0;
  flags |= state.bad_logits ? kAcceptBadLogits : 0;
  flags |= state.skipped ? kAcceptSkipped : 0;
  flags |= converged ? kAcceptConverged : 0;
  *row_of<int32_t>(params.flags, block) = flags;
}

}  // namespace

Status accept_gemma(const AcceptGemmaParams& params, const ExecContext& context) {
  const int64_t num_blocks = params.tokens.size[0];
  for (int64_t block = 0; block < num_blocks; ++block) {
    DIFFULEX_RETURN_IF_ERROR(check_canvas(params, block));
  }
  parallel_ranges(context, num_blocks, kCanvasGrain, [&](int64_t begin, int64_t end) {
    thread_local EntropyOrder order;
    for (int64_t block = begin; block < end; ++block) {
      run_canvas(params, block, &order);
    }
  });
  return {};
}

}  // namespace diffulex::cpu
