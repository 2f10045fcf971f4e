// SPDX-License-Identifier: Apache-2.0
// The mode table and the transitions of dual-cache decoding on hand-made states.

#include "diffulex/core/dual_cache_rules.h"

#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace diffulex {
namespace {

constexpr int32_t kMask = 99;

/// One request with B = 4 and N sub-blocks, driven by hand.
class DualCacheRules : public testing::Test {
 protected:
  void open(int32_t prompt_len, int32_t limit_end, int32_t buffer_size) {
    rules_.block_size = 4;
    rules_.buffer_size = buffer_size;
    rules_.mask_token_id = kMask;
    tokens_.assign(256, kMask);
    for (int32_t i = 0; i < prompt_len; ++i) {
      tokens_[static_cast<size_t>(i)] = i + 1;
    }
    state_.num_stop_ids = 1;
    state_.stop_ids[0] = 50;
    init_dual_cache(rules_, state_, cache_, prompt_len, limit_end);
  }
  DualCacheStep next(bool has_block_cache = true) const {
    return next_dual_step(rules_, state_, cache_, tokens_.data(), has_block_cache);
  }
  void write(int32_t position, int32_t token) {
    const int32_t rel = position - buffer_start(rules_, state_);
    apply_write(rules_, state_, rel / 4, rel % 4, token, tokens_.data());
  }
  /// Runs the next forward with `writes` of (position, token).
  DualCacheStep run(const std::vector<std::pair<int32_t, int32_t>>& writes) {
    const DualCacheStep step = next();
    begin_dual_step(state_, cache_, step);
    if (step.mode == DualCacheMode::kFullBufferInit) {
      finish_full_buffer_init(rules_, state_, cache_, step, tokens_.data());
    }
    for (const auto& [position, token] : writes) {
      write(position, token);
    }
    if (step.mode == DualCacheMode::kFinalCommit) {
      finish_final_commit(rules_, state_, cache_);
    }
    return step;
  }

  BlockRules rules_;
  BufferState state_;
  DualCacheState cache_;
  std::vector<int32_t> tokens_;
};

TEST_F(DualCacheRules, PromptTailLiesInTheFirstDBlock) {
  open(22, 60, 4);  // D = 16: base 16, sub-blocks at 16, 20, 24, 28
  EXPECT_EQ(buffer_start(rules_, state_), 16);
  EXPECT_EQ(state_.num_valid, 4);
  const std::vector<int32_t> editable = {4, 2, 0, 0};
  const std::vector<int32_t> masks = {0, 2, 4, 4};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(state_.blocks[i].status, BlockStatus::kActive);
    EXPECT_EQ(state_.blocks[i].block_id, 4 + static_cast<int32_t>(i));
    EXPECT_EQ(state_.blocks[i].editable_start, editable[i]);
    EXPECT_EQ(state_.blocks[i].num_masks, masks[i]);
  }
  EXPECT_FALSE(needs_seed(rules_, state_, tokens_.data()));
  EXPECT_EQ(next().sub_idx, 1);
}

TEST_F(DualCacheRules, AlignedPromptNeedsASeed) {
  open(8, 20, 2);
  EXPECT_EQ(buffer_start(rules_, state_), 8);
  EXPECT_TRUE(needs_seed(rules_, state_, tokens_.data()));
  place_seed(rules_, state_, 9, tokens_.data());
  EXPECT_FALSE(needs_seed(rules_, state_, tokens_.data()));
  EXPECT_EQ(tokens_[8], 9);
  EXPECT_EQ(state_.blocks[0].num_masks, 3);
  EXPECT_EQ(state_.stop_pos, kNoPosition);
  // A prompt may hold the mask id; it is a token like any other.
  open(9, 20, 2);
  tokens_[8] = kMask;
  EXPECT_FALSE(needs_seed(rules_, state_, tokens_.data()));
}

TEST_F(DualCacheRules, SeedMayBeAStopId) {
  open(8, 20, 2);
  place_seed(rules_, state_, 50, tokens_.data());
  EXPECT_EQ(state_.stop_pos, 8);
}

TEST_F(DualCacheRules, ModesOfTheWorkedTrace) {
  open(6, 18, 4);
  DualCacheStep step = run({{6, 7}});
  EXPECT_EQ(step.mode, DualCacheMode::kFullBufferInit);
  EXPECT_EQ(step.sub_idx, 1);
  EXPECT_EQ(step.first_pos, 0);
  EXPECT_EQ(step.num_rows, 16);
  EXPECT_EQ(step.context_len, 0);
  EXPECT_TRUE(step.is_stored && step.is_sampled && !step.is_cache_only && !step.is_rebuild);
  EXPECT_EQ(dual_logits_row(step, 6), 5);
  step = run({{7, 8}});
  EXPECT_EQ(step.mode, DualCacheMode::kSubBlockRefine);
  EXPECT_EQ(step.first_pos, 4);
  EXPECT_EQ(step.num_rows, 4);
  EXPECT_EQ(step.context_len, 16);
  EXPECT_TRUE(step.is_stored && step.is_sampled && step.is_cache_only);
  EXPECT_EQ(dual_logits_row(step, 7), 2);
  EXPECT_EQ(dual_logits_row(step, 4), 0);
  step = run({{9, 9}});  // position 8 stays open
  EXPECT_EQ(step.mode, DualCacheMode::kFullBufferInit);
  EXPECT_EQ(step.sub_idx, 2);
  EXPECT_EQ(dual_logits_row(step, 8), 7);
  step = run({{8, 10}});  // INIT repeats while the first position is open
  EXPECT_EQ(step.mode, DualCacheMode::kFullBufferInit);
  EXPECT_EQ(cache_.open_at_init, 0b1101U);
  step = run({{10, 11}, {11, 12}});
  EXPECT_EQ(step.mode, DualCacheMode::kSubBlockRefine);
  EXPECT_EQ(step.first_pos, 8);
  step = run({{12, 13}, {13, 14}, {14, 15}, {15, 16}});
  EXPECT_EQ(step.mode, DualCacheMode::kFullBufferInit);
  step = run({});
  EXPECT_EQ(step.mode, DualCacheMode::kFinalCommit);
  EXPECT_EQ(step.sub_idx, 3);
  EXPECT_EQ(step.num_rows, 16);
  EXPECT_EQ(step.context_len, 0);
  EXPECT_TRUE(step.is_stored && !step.is_sampled);
  EXPECT_EQ(state_.context_len, 16);
  EXPECT_EQ(buffer_start(rules_, state_), 16);
  EXPECT_TRUE(needs_seed(rules_, state_, tokens_.data()));
  place_seed(rules_, state_, 17, tokens_.data());
  step = next();
  EXPECT_EQ(step.mode, DualCacheMode::kFullBufferInit);  // known first token, but no block cache
  EXPECT_EQ(step.sub_idx, 0);
  EXPECT_EQ(step.context_len, 16);
}

TEST_F(DualCacheRules, StepsOfASubBlockCountSampledForwardsOnly) {
  open(6, 40, 2);  // D = 8
  run({{6, 7}});
  run({{7, 8}});
  EXPECT_EQ(state_.blocks[1].total_steps, 2);
  const DualCacheStep commit = next();
  EXPECT_EQ(commit.mode, DualCacheMode::kFinalCommit);
  begin_dual_step(state_, cache_, commit);
  EXPECT_EQ(state_.blocks[1].total_steps, 2);
  undo_dual_step(state_, commit);
  EXPECT_EQ(state_.blocks[1].total_steps, 2);
  open(6, 40, 2);
  const DualCacheStep init = next();
  begin_dual_step(state_, cache_, init);
  EXPECT_EQ(state_.blocks[1].total_steps, 1);
  undo_dual_step(state_, init);
  EXPECT_EQ(state_.blocks[1].total_steps, 0);
}

TEST_F(DualCacheRules, CompleteDBlockIsCommittedWithoutAnInit) {
  open(7, 40, 2);
  write(7, 8);  // seed plus prompt fill everything before any forward
  EXPECT_FALSE(cache_.is_initialized);
  EXPECT_EQ(next().mode, DualCacheMode::kFinalCommit);
}

TEST_F(DualCacheRules, RefineWithoutBlockCacheRunsTheWholeBlockUnstored) {
  open(6, 40, 2);
  run({{6, 7}});
  const DualCacheStep step = next(false);
  EXPECT_EQ(step.mode, DualCacheMode::kSubBlockRefine);
  EXPECT_EQ(step.first_pos, 0);
  EXPECT_EQ(step.num_rows, 8);
  EXPECT_EQ(step.context_len, 0);
  EXPECT_FALSE(step.is_stored || step.is_cache_only);
  EXPECT_EQ(dual_logits_row(step, 7), 6);
}

TEST_F(DualCacheRules, PreemptionInTheMiddleOfASubBlockIsRebuilt) {
  open(17, 60, 2);  // base 16: position 16 known, 17..23 open
  state_.context_len = 16;
  run({{18, 7}});  // INIT saw 17, 18, 19 open
  run({{17, 8}});  // REFINE
  EXPECT_EQ(next().mode, DualCacheMode::kSubBlockRefine);
  EXPECT_EQ(drop_dual_cache(rules_, state_, cache_, tokens_.data(), true), 16);
  EXPECT_EQ(state_.context_len, 0);
  EXPECT_EQ(drop_dual_cache(rules_, state_, cache_, tokens_.data(), true), 16);  // before it ran
  DualCacheStep step = next();
  EXPECT_EQ(step.mode, DualCacheMode::kFullBufferInit);
  EXPECT_TRUE(step.is_rebuild);
  EXPECT_FALSE(step.is_sampled);
  EXPECT_TRUE(step.is_stored);
  EXPECT_EQ(step.num_rows, 8);
  const auto input = [&](int32_t position) {
    return dual_input_token(rules_, state_, cache_, step, tokens_.data(), position);
  };
  EXPECT_EQ(input(16), 17);
  EXPECT_EQ(input(17), kMask);
  EXPECT_EQ(input(18), kMask);
  EXPECT_EQ(input(19), kMask);
  EXPECT_EQ(input(20), kMask);
  const int32_t steps_before = state_.blocks[0].total_steps;
  run({});
  EXPECT_EQ(state_.blocks[0].total_steps, steps_before);
  EXPECT_FALSE(cache_.needs_rebuild);
  EXPECT_EQ(cache_.open_at_init, 0b1110U);
  step = next();
  EXPECT_EQ(step.mode, DualCacheMode::kSubBlockRefine);
  EXPECT_EQ(input(17), 8);
  EXPECT_EQ(input(18), 7);
}

TEST_F(DualCacheRules, PreemptionElsewhereNeedsNoRebuild) {
  open(6, 60, 2);
  drop_dual_cache(rules_, state_, cache_, tokens_.data(), true);  // before any forward
  EXPECT_FALSE(cache_.needs_rebuild);
  run({{7, 7}});
  drop_dual_cache(rules_, state_, cache_, tokens_.data(), false);  // no block cache to lose
  EXPECT_FALSE(cache_.needs_rebuild);
  EXPECT_FALSE(cache_.is_initialized);
  run({{6, 8}});
  drop_dual_cache(rules_, state_, cache_, tokens_.data(), true);  // a commit comes next
  EXPECT_FALSE(cache_.needs_rebuild);
  EXPECT_EQ(next().mode, DualCacheMode::kFinalCommit);
  open(2, 60, 2);
  run({{2, 7}, {3, 8}});
  drop_dual_cache(rules_, state_, cache_, tokens_.data(), true);  // an INIT of the next sub-block
  EXPECT_FALSE(cache_.needs_rebuild);
}

}  // namespace
}  // namespace diffulex
