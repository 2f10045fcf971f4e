// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "core/dual_cache_decoder.h"
#include "core/plan_simulator.h"
#include "core/threshold_block.h"

namespace diffulex::test {

/// Runs fast_dllm_v2 plans: the visibility follows from the row mode of each request alone.
class DualCacheSimulator final : public PlanSimulator {
 public:
  explicit DualCacheSimulator(const EngineOptions& options)
      : PlanSimulator(options), len_(options.decode_rows()) {}

 private:
  void run_request(int32_t r) override {
    StepPlan& plan = this->plan();
    const auto index = static_cast<size_t>(r);
    row0_ = plan.cu_seqlens_q()[index];
    const int32_t num_rows = plan.cu_seqlens_q()[index + 1] - row0_;
    ASSERT_GT(num_rows, 0) << "an empty forward";
    ASSERT_EQ(plan.valid_slices()[index] - row0_, num_rows);  // no dummy row ever
    ASSERT_EQ(plan.att_block_size(), len_);
    const auto first = static_cast<int32_t>(plan.positions()[static_cast<size_t>(row0_)]);
    std::vector<int64_t> tokens;
    for (int32_t i = 0; i < num_rows; ++i) {
      ASSERT_EQ(plan.positions()[static_cast<size_t>(row0_ + i)], first + i);
      tokens.push_back(plan.input_ids()[static_cast<size_t>(row0_ + i)]);
    }
    const auto mode = static_cast<RowMode>(plan.row_mode()[index]);
    if (mode == RowMode::kCacheOnly) {
      run_cache_only(r, first, tokens);
    } else {
      run_block_causal(r, first, tokens);
    }
    EXPECT_LE(plan.first_block(r + 1) - plan.first_block(r), 1);
    for (int32_t blk = plan.first_block(r); blk < plan.first_block(r + 1); ++blk) {
      sample_block(blk, first);
    }
    const int32_t seed = plan.seed_row()[index];
    if (seed >= 0) {
      // The last row of the forward predicts the first position of the next D-block.
      EXPECT_EQ(plan.logits_rows()[static_cast<size_t>(seed)], row0_ + num_rows - 1);
      EXPECT_EQ(plan.row_inv_temperature()[static_cast<size_t>(seed)], 0.0F);  // greedy always
      output().pending_next_token()[index] = toy_token(
          outputs_.back(), plan.row_uniforms()[static_cast<size_t>(seed)], options_.vocab_size);
    }
  }

  void run_cache_only(int32_t r, int32_t first, const std::vector<int64_t>& tokens) {
    StepPlan& plan = this->plan();
    const auto index = static_cast<size_t>(r);
    const int32_t base = first / len_ * len_;
    EXPECT_TRUE(options_.fdv2_use_block_cache);
    EXPECT_EQ(plan.mask_kinds()[index], 4);  // cache only
    ASSERT_EQ(plan.context_lens()[index], base + len_);
    ASSERT_EQ(static_cast<int32_t>(tokens.size()), options_.block_size);
    EXPECT_EQ(first % options_.block_size, 0);
    // Every slot up to base + D is written, the rows' own ones by an earlier INIT.
    std::vector<ToyKey> cache = read_cache(r, base + len_);
    outputs_ = toy_cache_only_forward(cache, static_cast<size_t>(first), tokens);
    check_all_stored(r, static_cast<int32_t>(tokens.size()));
    store(r,
          std::vector<ToyKey>(cache.begin() + first, cache.begin() + first + options_.block_size));
  }

  void run_block_causal(int32_t r, int32_t first, const std::vector<int64_t>& tokens) {
    StepPlan& plan = this->plan();
    const auto index = static_cast<size_t>(r);
    const auto count = static_cast<int32_t>(tokens.size());
    EXPECT_EQ(plan.mask_kinds()[index], 1);  // block-causal
    ASSERT_EQ(plan.context_lens()[index], first);
    EXPECT_EQ(first % len_, 0);
    EXPECT_EQ(count % len_, 0);
    std::vector<int32_t> visible;
    for (int32_t p = first; p < first + count; ++p) {
      visible.push_back((p / len_ + 1) * len_);
    }
    std::vector<ToyKey> keys;
    outputs_ = toy_forward(read_cache(r, first), tokens, visible, keys);
    const bool is_decode = r < plan.num_decode_reqs();
    EXPECT_EQ(static_cast<RowMode>(plan.row_mode()[index]),
              is_decode ? RowMode::kDecodeBlockCausal : RowMode::kPrefillBlockCausal);
    EXPECT_TRUE(!is_decode || count == len_);
    // An unsampled decode forward is a COMMIT or a rebuild; without a block cache a sampled one may
    // be a REFINE, which stores nothing.
    const bool is_sampled = plan.first_block(r) < plan.first_block(r + 1);
    if (plan.slot_mapping()[static_cast<size_t>(row0_)] >= 0 || !is_sampled ||
        options_.fdv2_use_block_cache) {
      check_all_stored(r, count);
    }
    store(r, keys);
  }

  void check_all_stored(int32_t r, int32_t count) {
    const auto row0 = static_cast<size_t>(plan().cu_seqlens_q()[static_cast<size_t>(r)]);
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      EXPECT_GE(plan().slot_mapping()[row0 + i], 0) << "row " << i << " is not stored";
    }
  }

  void sample_block(int32_t blk, int32_t first) {
    StepPlan& plan = this->plan();
    const auto index = static_cast<size_t>(blk);
    const auto width = static_cast<size_t>(options_.block_size);
    const int32_t start = plan.blk_start()[index];
    EXPECT_EQ(start, plan.blk_id()[index] * options_.block_size);
    EXPECT_EQ(plan.blk_row0()[index], row0_ + start - first);
    EXPECT_EQ(plan.blk_force_top1()[index], 1);
    EXPECT_EQ(plan.blk_valid_len()[index], options_.block_size);
    std::vector<int64_t> proposals(width, -1);
    std::vector<float> confidence(width, 0.0F);
    for (size_t rel = 0; rel < width; ++rel) {
      const int32_t row_index = plan.blk_row_index()[index * width + rel];
      const int32_t own_row = plan.blk_row0()[index] + static_cast<int32_t>(rel);
      const int64_t token = plan.blk_tokens()[index * width + rel];
      EXPECT_EQ(token, plan.input_ids()[static_cast<size_t>(own_row)]);
      const bool is_open = static_cast<int32_t>(rel) >= plan.blk_editable_start()[index] &&
                           token == options_.mask_token_id;
      EXPECT_TRUE(row_index >= 0 || !is_open);
      EXPECT_TRUE(row_index < 0 || is_open || !options_.masked_rows_only);
      if (row_index < 0) {
        continue;
      }
      // The block-local shift; the first row of a forward never predicts an open position.
      const int32_t row = plan.logits_rows()[static_cast<size_t>(row_index)];
      EXPECT_TRUE(own_row > row0_ || !is_open);
      EXPECT_EQ(row, own_row > row0_ ? own_row - 1 : row0_);
      const uint64_t output = outputs_[static_cast<size_t>(row - row0_)];
      proposals[rel] = toy_token(output, plan.row_uniforms()[static_cast<size_t>(row_index)],
                                 options_.vocab_size);
      confidence[rel] = toy_confidence(output);
      this->output().confidence()[index * width + rel] = confidence[rel];
    }
    ThresholdBlock block;
    block.tokens = plan.blk_tokens().data() + index * width;
    block.proposals = proposals.data();
    block.confidence = confidence.data();
    block.block_size = options_.block_size;
    block.editable_start = plan.blk_editable_start()[index];
    block.mask_token_id = options_.mask_token_id;
    block.threshold = plan.blk_accept_threshold()[index];
    block.gate = plan.blk_force_top1()[index] != 0;
    const int32_t left = accept_by_threshold(block, output().write_ids().data() + index * width);
    output().masks_left()[index] = left;
    output().flags()[index] = left == 0 ? kSamplerCommittable : 0;
  }

  int32_t len_;  // D
  int32_t row0_ = 0;
  std::vector<uint64_t> outputs_;  // of the request that runs
};

}  // namespace diffulex::test
