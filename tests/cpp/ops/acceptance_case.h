// SPDX-License-Identifier: Apache-2.0
#pragma once

// Arguments of accept_edit, accept_dmax and accept_gemma: over the worked rows of the
// specification, or random. Outputs start as rubbish, so that what a kernel leaves out shows.

#include <map>
#include <random>
#include <vector>

#include "diffulex/ops/accept.h"
#include "ops/test_tensor.h"

namespace diffulex::test {

inline constexpr int64_t kAcceptMask = 7;

using Writes = std::map<int64_t, int64_t>;

struct AcceptanceCase {
  /// One block over the proposals of R0..R3, greedy, the mask excluded.
  explicit AcceptanceCase(std::vector<int64_t> content)
      : num_blocks(1), block_size(4), num_rows(4), tokens(std::move(content)) {
    row_index = {0, 1, 2, 3};
    ids = {1, 2, 3, 4};
    topk_ids = {1, 0, 2, 1, 3, 0, 4, 5};
    topk_probs = {.92F, .02F, .60F, .10F, .96F, .005F, .25F, .10F};
    // confidence, max, second, entropy, -, -, raw confidence, -
    const float rows[4][8] = {{.92F, .92F, .02F, .431262F, 0, 0, .92F, 0},
                              {.60F, .60F, .10F, 1.435474F, 0, 0, .60F, 0},
                              {.96F, .96F, .005F, .244190F, 0, 0, .96F, 0},
                              {.25F, .25F, .10F, 1.692281F, 0, 0, .25F, 0}};
    for (const auto& row : rows) {
      stats.insert(stats.end(), row, row + 8);
    }
    start = {0};
    valid = {4};
    gate = {1};
    threshold = {.5F};
    edit_threshold = {.5F};
    open_steps = {0};
    post_steps = {0};
    post_limits = {16};
    previous = {0, 0, 0, 0};
    stable_run = {-1};
    steps_left = {4};
    renoise = {6, 0, 2, 5};
    allocate();
  }

  /// Random blocks; entropies are multiples of 1/64, so that their sums are exact in any order.
  AcceptanceCase(std::mt19937_64* random, int64_t blocks, int64_t positions)
      : num_blocks(blocks), block_size(positions), num_rows(blocks * positions) {
    const auto byte = [&](int64_t high) { return static_cast<int32_t>(uniform(random, 0, high)); };
    const int64_t rare = 20 * positions;  // about one block in twenty
    for (int64_t i = 0; i < num_rows; ++i) {
      tokens.push_back(byte(2) == 0 ? kAcceptMask : byte(9));
      row_index.push_back(byte(rare) == 0 ? -1 : static_cast<int32_t>(num_rows - 1 - i));
      ids.push_back(byte(rare) == 0 ? -1 : byte(9));
      for (int64_t column = 0; column < kTokenStatsColumns; ++column) {
        stats.push_back(static_cast<float>(byte(64)) / 64.0F);
      }
      for (int64_t k = 0; k < kTop; ++k) {
        topk_ids.push_back(byte(k == 0 ? rare : 20) == 0 ? -1 : byte(9));
        topk_probs.push_back(static_cast<float>(byte(32)) / 64.0F);
      }
      previous.push_back(byte(9));
      renoise.push_back(byte(9));
    }
    for (int64_t block = 0; block < num_blocks; ++block) {
      start.push_back(byte(1) * byte(block_size) / 2);
      valid.push_back(byte(3) == 0 ? byte(block_size) : static_cast<int32_t>(block_size));
      gate.push_back(static_cast<uint8_t>(byte(1)));
      threshold.push_back(static_cast<float>(byte(64)) / 64.0F);
      edit_threshold.push_back(static_cast<float>(byte(64)) / 64.0F);
      open_steps.push_back(byte(block_size + 4));
      post_steps.push_back(byte(4));
      post_limits.push_back(byte(3));
      stable_run.push_back(byte(3) - 1);
      steps_left.push_back(1 + byte(3));
      if (byte(1) == 0) {
        // The previous argmax canvas is the current one.
        for (int64_t i = block * block_size; i < (block + 1) * block_size; ++i) {
          const int32_t row = row_index[static_cast<size_t>(i)];
          previous[static_cast<size_t>(i)] =
              row < 0 ? 0 : topk_ids[static_cast<size_t>(row * kTop)];
        }
      }
    }
    allocate();
  }
  AcceptanceCase(const AcceptanceCase&) = delete;
  AcceptanceCase& operator=(const AcceptanceCase&) = delete;

  void allocate() {
    const auto cells = static_cast<size_t>(num_rows);
    write_ids.assign(cells, -77);
    argmax.assign(cells, -77);
    confidence.assign(cells, -77.0F);
    left.assign(static_cast<size_t>(num_blocks), -77);
    flags.assign(static_cast<size_t>(num_blocks), -77);
    ratio.assign(static_cast<size_t>(num_blocks), -77.0F);
    merge_valid.assign(cells, 77);
    merge_ids.assign(cells * static_cast<size_t>(merge_k), -77);
    merge_probs.assign(cells * static_cast<size_t>(merge_k), -77.0F);
    residual.assign(cells, -77.0F);
  }

  template <typename Params, typename Place>
  void fill_common(Params* params, const Place& place) {
    params->tokens = place(grid(tokens));
    params->row_index = place(grid(row_index));
    params->valid_len = place(ref_of(valid));
    params->ids = place(ref_of(ids));
    params->stats = place(ref_of(stats, {num_rows, kTokenStatsColumns}));
    params->write_ids = place(grid(write_ids));
    params->confidence = place(grid(confidence));
    params->flags = place(ref_of(flags));
  }

  template <typename Place>
  AcceptEditParams edit(const Place& place) {
    AcceptEditParams params;
    fill_common(&params, place);
    params.editable_start = place(ref_of(start));
    params.gate = place(ref_of(gate));
    params.accept_threshold = place(ref_of(threshold));
    params.edit_threshold = place(ref_of(edit_threshold));
    params.open_steps = place(ref_of(open_steps));
    params.post_edit_steps = place(ref_of(post_steps));
    params.max_post_edit_steps = place(ref_of(post_limits));
    params.masks_left = place(ref_of(left));
    params.same_token_ratio = place(ref_of(ratio));
    params.mask_token_id = kAcceptMask;
    return params;
  }

  template <typename Place>
  AcceptDmaxParams dmax(const Place& place) {
    AcceptDmaxParams params;
    fill_common(&params, place);
    params.editable_start = place(ref_of(start));
    params.gate = place(ref_of(gate));
    params.accept_threshold = place(ref_of(threshold));
    params.open_steps = place(ref_of(open_steps));
    params.masks_left = place(ref_of(left));
    params.same_token_ratio = place(ref_of(ratio));
    if (with_lists) {
      params.topk_ids = place(ref_of(topk_ids, {num_rows, kTop}));
      params.topk_probs = place(ref_of(topk_probs, {num_rows, kTop}));
    }
    if (merge_k > 0) {
      params.merge_valid = place(grid(merge_valid));
      params.merge_ids = place(ref_of(merge_ids, {num_blocks, block_size, merge_k}));
      params.merge_probs = place(ref_of(merge_probs, {num_blocks, block_size, merge_k}));
      params.merge_residual = place(grid(residual));
    }
    params.mask_token_id = kAcceptMask;
    params.fast_path = fast_path;
    return params;
  }

  template <typename Place>
  AcceptGemmaParams gemma(const Place& place) {
    AcceptGemmaParams params;
    fill_common(&params, place);
    params.prev_argmax = place(grid(previous));
    params.stable_run = place(ref_of(stable_run));
    params.steps_left = place(ref_of(steps_left));
    params.renoise_ids = place(grid(renoise));
    params.argmax_ids = place(ref_of(topk_ids, {num_rows, kTop}));
    params.argmax_ids.rank = 1;  // column 0 of the lists
    params.argmax = place(grid(argmax));
    params.entropy_bound = entropy_bound;
    params.stability_threshold = stability;
    params.confidence_threshold = kappa;
    return params;
  }

  template <typename T>
  TensorRef grid(std::vector<T>& values) const {
    return ref_of(values, {num_blocks, block_size});
  }

  [[nodiscard]] Writes writes() const {
    Writes result;
    for (size_t i = 0; i < write_ids.size(); ++i) {
      if (write_ids[i] >= 0) {
        result[static_cast<int64_t>(i)] = write_ids[i];
      }
    }
    return result;
  }

  static constexpr int64_t kTop = 2;

  int64_t num_blocks, block_size, num_rows;
  int64_t merge_k = 1;
  bool with_lists = false;
  bool fast_path = false;
  float entropy_bound = .1F;
  int32_t stability = 1;
  float kappa = .005F;
  std::vector<int64_t> tokens, ids, topk_ids, previous, renoise, write_ids, argmax, merge_ids;
  std::vector<int32_t> row_index, start, valid, open_steps, post_steps, post_limits, stable_run,
      steps_left, left, flags;
  std::vector<uint8_t> gate, merge_valid;
  std::vector<float> threshold, edit_threshold, stats, topk_probs, confidence, ratio, merge_probs,
      residual;
};

/// For params(place): the host memory itself.
inline constexpr auto kOnHost = [](const TensorRef& tensor) { return tensor; };

}  // namespace diffulex::test
