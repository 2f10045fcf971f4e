// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "diffulex/core/acceptance.h"

namespace diffulex {
namespace {

/// What the rows of one canvas hold.
struct CanvasRows {
  double total_entropy = 0.0;
  bool is_same_argmax = true;
  bool has_bad = false;
  bool is_skipped = false;
};

/// Reads the rows and writes the argmax and confidence outputs.
CanvasRows collect(const CanvasStep& step, const AcceptBlock& block,
                   std::vector<float>& entropies) {
  entropies.clear();
  std::fill_n(step.argmax, block.block_size, int64_t{-1});
  std::fill_n(block.confidence, block.block_size, 0.0F);
  CanvasRows rows;
  for (int32_t index = 0; index < block.editable_end; ++index) {
    const int32_t row = block.row_index[index];
    if (row < 0) {
      rows.is_skipped = true;
      continue;
    }
    const float* stats = block.stats_of(row);
    const int64_t argmax = step.argmax_ids[row * step.argmax_stride];
    step.argmax[index] = argmax;
    block.confidence[index] = stats[kStatsConfidence];
    rows.has_bad = rows.has_bad || argmax < 0 || block.id_of(row) < 0;
    rows.is_same_argmax = rows.is_same_argmax && argmax == step.prev_argmax[index];
    entropies.push_back(stats[kStatsEntropy]);
    rows.total_entropy += static_cast<double>(ordering_entropy(stats[kStatsEntropy]));
  }
  return rows;
}

/// The next canvas: the argmax once converged, else the draws within the bound and random ids.
void write_canvas(const GemmaRules& rules, const CanvasStep& step, const AcceptBlock& block,
                  bool is_converged, const std::vector<float>& entropies) {
  thread_local std::vector<uint8_t> accepted;
  accepted.resize(entropies.size());
  if (!is_converged) {
    mark_within_entropy_bound(entropies.data(), block.editable_end, rules.entropy_bound,
                              accepted.data());
  }
  for (int32_t index = 0; index < block.editable_end; ++index) {
    const int32_t row = block.row_index[index];
    if (is_converged) {
      block.write_ids[index] = step.argmax[index];
      block.confidence[index] = block.stats_of(row)[kStatsMaxProb];
    } else {
      block.write_ids[index] =
          accepted[static_cast<size_t>(index)] != 0 ? block.id_of(row) : step.renoise_ids[index];
    }
  }
}

}  // namespace

void mark_within_entropy_bound(const float* entropies, int32_t count, float bound,
                               uint8_t* accepted) {
  thread_local std::vector<int32_t> order;
  order.resize(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    order[static_cast<size_t>(i)] = i;
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return ordering_entropy(entropies[a]) < ordering_entropy(entropies[b]);
  });
  double before = 0.0;
  for (size_t rank = 0; rank < order.size(); ++rank) {
    const int32_t index = order[rank];
    accepted[index] = is_within_entropy_bound(static_cast<int64_t>(rank), before, bound) ? 1 : 0;
    before += static_cast<double>(ordering_entropy(entropies[index]));
  }
}

AcceptOutcome accept_canvas_block(const GemmaRules& rules, const CanvasStep& step,
                                  const AcceptBlock& block) {
  thread_local std::vector<float> entropies;
  std::fill_n(block.write_ids, block.block_size, int64_t{-1});
  const CanvasRows rows = collect(step, block, entropies);
  const CanvasVerdict verdict =
      judge_canvas(rules, block.editable_end, rows.total_entropy, step.stable_run, step.steps_left,
                   rows.is_same_argmax, rows.has_bad, rows.is_skipped);
  bool has_changed = false;
  if (verdict.is_usable) {
    write_canvas(rules, step, block, verdict.is_converged, entropies);
    has_changed = !std::equal(block.write_ids, block.write_ids + block.editable_end, block.tokens);
  }
  return {canvas_flags(verdict, has_changed, rows.has_bad, rows.is_skipped)};
}

}  // namespace diffulex
