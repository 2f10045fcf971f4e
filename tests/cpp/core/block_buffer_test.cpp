// SPDX-License-Identifier: Apache-2.0
// The block rules on hand-made states, and the integrity check on damaged ones.

#include "diffulex/core/block_buffer.h"

#include <functional>
#include <vector>

#include <gtest/gtest.h>

namespace diffulex {
namespace {

constexpr int32_t kMask = 99;

BlockRules test_rules(int32_t buffer_size) {
  BlockRules rules;
  rules.block_size = 4;
  rules.buffer_size = buffer_size;
  rules.mask_token_id = kMask;
  return rules;
}

BlockBuffer make_buffer(int32_t prompt_len, int32_t limit_end, int32_t buffer_size) {
  BlockBuffer buffer(test_rules(buffer_size));
  std::vector<int32_t> prompt;
  for (int32_t i = 1; i <= prompt_len; ++i) {
    prompt.push_back(i);
  }
  buffer.state().num_stop_ids = 1;
  buffer.state().stop_ids[0] = 50;
  buffer.init(Span<const int32_t>(prompt), limit_end);
  return buffer;
}

TEST(BlockBuffer, HasNoTokensBeforeInit) {
  const BlockBuffer buffer(test_rules(2));
  EXPECT_TRUE(buffer.tokens().empty());
  EXPECT_TRUE(buffer.block_tokens(0).empty());
  EXPECT_TRUE(buffer.block_tokens(1).empty());
  EXPECT_THROW((void)buffer.block_tokens(2), InternalError);
  EXPECT_FALSE(buffer.check_integrity().ok());
}

void write(BlockBuffer& buffer, int32_t index, int32_t rel, int32_t token) {
  apply_write(buffer.rules(), buffer.state(), index, rel, token, buffer.token_data());
}

/// Fills buffer block `index` with a token and lets it be frozen.
void complete(BlockBuffer& buffer, int32_t index, int32_t token) {
  Block& block = buffer.state().blocks[index];
  for (int32_t rel = block.editable_start; rel < 4; ++rel) {
    if (buffer.block_tokens(index)[static_cast<size_t>(rel)] == kMask) {
      write(buffer, index, rel, token);
    }
  }
  block.commit_ready = true;
}

TEST(BlockBuffer, InitialStates) {
  const BlockBuffer padded = make_buffer(6, 20, 3);
  EXPECT_EQ(padded.start(), 4);
  EXPECT_EQ(padded.num_valid(), 1);
  EXPECT_EQ(padded.block(0).status, BlockStatus::kActive);
  EXPECT_EQ(padded.block(0).editable_start, 2);
  EXPECT_EQ(padded.block(0).num_masks, 2);
  EXPECT_EQ(padded.block(1).status, BlockStatus::kDummy);
  EXPECT_EQ(padded.block_status(0), BlockStatus::kToCache);
  EXPECT_EQ(padded.tokens().size(), 16U);
  const BlockBuffer aligned = make_buffer(8, 20, 2);
  EXPECT_EQ(aligned.num_valid(), 0);
  EXPECT_EQ(aligned.start(), 8);
  EXPECT_TRUE(aligned.check_integrity().ok()) << aligned.check_integrity().message();
}

TEST(BlockBuffer, PromptMasksAreNeitherOpenNorCounted) {
  BlockBuffer buffer(test_rules(1));
  const std::vector<int32_t> prompt = {1, kMask, 3, 4, kMask, kMask};
  buffer.init(Span<const int32_t>(prompt), 20);
  EXPECT_EQ(buffer.block(0).num_masks, 2);
  EXPECT_EQ(block_progress(buffer.rules(), buffer.block(0)), 0.5F);
  complete(buffer, 0, 7);
  EXPECT_EQ(scan_transitions(buffer.rules(), buffer.state()).num_frozen, 1);
  advance_settled(buffer.rules(), buffer.state(), buffer.token_data());
  EXPECT_TRUE(buffer.check_integrity().ok()) << buffer.check_integrity().message();
}

TEST(BlockBuffer, FixedTokensFollowThePromptAndAreCountedOnceActive) {
  BlockBuffer buffer(test_rules(2));
  const std::vector<int32_t> prompt = {1, 2};
  const std::vector<int32_t> fixed = {-1, 5, 6, kMask, 7, -1};
  buffer.init(Span<const int32_t>(prompt), 20, Span<const int32_t>(fixed));
  EXPECT_EQ(buffer.block(0).num_masks, 1);
  EXPECT_EQ(buffer.block(1).num_masks, 4);
  EXPECT_TRUE(buffer.check_integrity().ok()) << buffer.check_integrity().message();
  write(buffer, 0, 2, 8);
  ASSERT_TRUE(begin_buffer_step(buffer.rules(), buffer.state()));
  EXPECT_FALSE(buffer.check_integrity().ok());
  buffer.count_masks(1);
  EXPECT_EQ(buffer.block(1).num_masks, 2);
  advance_settled(buffer.rules(), buffer.state(), buffer.token_data());
  EXPECT_EQ(buffer.state().settled_end, 5);
  EXPECT_TRUE(buffer.check_integrity().ok()) << buffer.check_integrity().message();
}

TEST(BlockRules, WriteChecks) {
  BlockBuffer buffer = make_buffer(6, 20, 2);
  BlockRules rules = buffer.rules();
  const Block& block = buffer.block(0);
  EXPECT_EQ(check_write(rules, block, 2, kMask, 7), WriteCheck::kOk);
  EXPECT_EQ(check_write(rules, block, 1, 6, 7), WriteCheck::kNotEditable);
  EXPECT_EQ(check_write(rules, block, 2, kMask, kMask), WriteCheck::kMaskToken);
  EXPECT_EQ(check_write(rules, block, 2, kMask, -2), WriteCheck::kOutOfVocab);
  EXPECT_EQ(check_write(rules, block, 2, kMask, int64_t{1} << 31), WriteCheck::kOutOfVocab);
  EXPECT_EQ(check_write(rules, block, 2, 5, 7), WriteCheck::kNotOpen);
  EXPECT_EQ(check_write(rules, buffer.block(1), 2, kMask, 7), WriteCheck::kNotActive);
  rules.vocab_size = 8;
  EXPECT_EQ(check_write(rules, block, 2, kMask, 7), WriteCheck::kOk);
  EXPECT_EQ(check_write(rules, block, 2, kMask, 8), WriteCheck::kOutOfVocab);
}

TEST(BlockRules, ActivationFollowsProgressAndIsOnePerStep) {
  BlockBuffer buffer = make_buffer(4, 40, 3);
  BlockRules rules = buffer.rules();
  rules.add_block_threshold = 0.5F;
  EXPECT_TRUE(begin_buffer_step(rules, buffer.state()));  // in the forward of the prompt
  EXPECT_EQ(buffer.num_valid(), 1);
  EXPECT_EQ(buffer.block(0).total_steps, 1);
  write(buffer, 0, 0, 7);
  EXPECT_FALSE(begin_buffer_step(rules, buffer.state()));  // a quarter
  EXPECT_EQ(buffer.block(0).total_steps, 2);
  write(buffer, 0, 1, 7);
  EXPECT_TRUE(begin_buffer_step(rules, buffer.state()));  // exactly half: >=
  EXPECT_EQ(buffer.num_valid(), 2);
  undo_buffer_step(rules, buffer.state(), true);
  EXPECT_EQ(buffer.num_valid(), 1);
  EXPECT_EQ(buffer.block(0).total_steps, 2);
  EXPECT_EQ(buffer.block(1).status, BlockStatus::kDummy);
  rules.token_stability_threshold = 0.5F;
  buffer.state().blocks[0].same_token_ratio = 0.4F;
  EXPECT_FALSE(can_activate(rules, buffer.state()));
  buffer.state().blocks[0].same_token_ratio = 1.0F;
  EXPECT_TRUE(can_activate(rules, buffer.state()));
  buffer.state().blocks[0].type = BlockType::kLastInContext;
  EXPECT_FALSE(can_activate(rules, buffer.state()));
  buffer.state().blocks[0].type = BlockType::kInContext;
  buffer.state().blocks[1].type = BlockType::kOutOfContext;
  EXPECT_FALSE(can_activate(rules, buffer.state()));
}

TEST(BlockRules, NoActivationPastTheLimitOrBehindAStop) {
  BlockBuffer limited = make_buffer(6, 8, 2);
  write(limited, 0, 2, 7);
  EXPECT_FALSE(can_activate(limited.rules(), limited.state()));  // block 2 starts at the limit
  BlockBuffer stopped = make_buffer(6, 20, 2);
  write(stopped, 0, 3, 50);
  EXPECT_EQ(stopped.state().stop_pos, 7);
  EXPECT_FALSE(can_activate(stopped.rules(), stopped.state()));
  write(stopped, 0, 2, 50);
  EXPECT_EQ(stopped.state().stop_pos, 6);  // the smallest
}

TEST(BlockRules, StopIdsBeyondTheLimitDoNotCount) {
  BlockBuffer buffer = make_buffer(6, 7, 1);
  write(buffer, 0, 3, 50);
  EXPECT_EQ(buffer.state().stop_pos, kNoPosition);
}

TEST(BlockRules, ForceTop1NeedsASemiCompletePredecessor) {
  BlockBuffer buffer = make_buffer(6, 20, 2);
  BlockRules rules = buffer.rules();
  begin_buffer_step(rules, buffer.state());
  ASSERT_EQ(buffer.num_valid(), 2);
  rules.semi_complete_threshold = 0.75F;
  EXPECT_TRUE(force_top1(rules, buffer.state(), 0));
  EXPECT_FALSE(force_top1(rules, buffer.state(), 1));
  write(buffer, 0, 2, 7);
  EXPECT_TRUE(force_top1(rules, buffer.state(), 1));  // exactly the threshold
  count_sampler_steps(rules, buffer.state());
  EXPECT_EQ(buffer.block(1).open_steps, 1);
}

TEST(BlockRules, FreezesInOrderAndStoresInTheNextForward) {
  BlockBuffer buffer = make_buffer(4, 40, 3);
  const BlockRules& rules = buffer.rules();
  mark_cached(rules, buffer.state(), 4);
  begin_buffer_step(rules, buffer.state());
  write(buffer, 0, 0, 7);
  begin_buffer_step(rules, buffer.state());
  complete(buffer, 1, 8);
  EXPECT_EQ(scan_transitions(rules, buffer.state()).num_frozen, 0);  // the first is still open
  complete(buffer, 0, 7);
  Transitions done = scan_transitions(rules, buffer.state());
  EXPECT_EQ(done.num_frozen, 2);  // both in one scan
  EXPECT_EQ(done.num_stored, 0);
  EXPECT_EQ(frozen_end(rules, buffer.state()), 12);
  mark_stored(rules, buffer.state(), 4, 12);
  done = scan_transitions(rules, buffer.state());
  EXPECT_EQ(done.num_stored, 2);
  EXPECT_EQ(buffer.state().context_len, 12);
  EXPECT_EQ(buffer.start(), 12);
  EXPECT_EQ(buffer.num_valid(), 0);
}

TEST(BlockRules, CompleteBlockWaitsForTheSamplersVerdict) {
  BlockBuffer buffer = make_buffer(6, 20, 1);
  complete(buffer, 0, 7);
  buffer.state().blocks[0].commit_ready = false;
  EXPECT_EQ(scan_transitions(buffer.rules(), buffer.state()).num_frozen, 0);
}

TEST(BlockRules, StopPriorities) {
  BufferState state;
  state.prompt_len = 10;
  state.limit_end = 20;
  state.settled_end = 15;
  StopLimits limits;
  limits.max_tokens = 10;
  EXPECT_EQ(check_stop(state, limits), FinishReason::kNone);
  limits.nfe = 5;
  limits.max_nfe = 5;
  limits.max_repetition_run = 2;
  state.run_len = 2;
  EXPECT_EQ(check_stop(state, limits), FinishReason::kMaxNfeReached);
  limits.max_nfe = 6;
  EXPECT_EQ(check_stop(state, limits), FinishReason::kMaxRepetitionRunReached);
  state.settled_end = 20;
  EXPECT_EQ(check_stop(state, limits), FinishReason::kMaxNewTokensReached);
  limits.max_tokens = 11;
  EXPECT_EQ(check_stop(state, limits), FinishReason::kMaxModelLenReached);
  state.stop_pos = 19;
  EXPECT_EQ(check_stop(state, limits), FinishReason::kEosTokenGenerated);
  EXPECT_EQ(output_end(state), 19);
  state.settled_end = 19;  // the stop id itself is not settled
  state.limit_end = 25;
  limits.max_repetition_run = 0;
  EXPECT_EQ(check_stop(state, limits), FinishReason::kNone);
}

TEST(BlockRules, DroppingTheCacheGivesTheSpanToRebuild) {
  BlockBuffer buffer = make_buffer(6, 30, 2);
  const BlockRules& rules = buffer.rules();
  EXPECT_EQ(drop_cached(rules, buffer.state()), 4);
  mark_cached(rules, buffer.state(), 4);
  complete(buffer, 0, 7);
  scan_transitions(rules, buffer.state());
  EXPECT_EQ(buffer.block(0).status, BlockStatus::kToCache);
  EXPECT_EQ(drop_cached(rules, buffer.state()), 8);
  EXPECT_EQ(buffer.state().context_len, 0);
  EXPECT_EQ(buffer.block_status(0), BlockStatus::kToCache);
}

TEST(BlockRules, ResumeKeepsThePlacesOfBlocksItStored) {
  BlockBuffer buffer = make_buffer(4, 60, 2);
  const BlockRules& rules = buffer.rules();
  mark_cached(rules, buffer.state(), 4);
  begin_buffer_step(rules, buffer.state());
  complete(buffer, 0, 7);
  begin_buffer_step(rules, buffer.state());
  write(buffer, 1, 0, 8);
  scan_transitions(rules, buffer.state());  // [TO_CACHE, ACTIVE]: the buffer is full
  EXPECT_FALSE(can_activate(rules, buffer.state()));
  EXPECT_EQ(drop_cached(rules, buffer.state()), 8);
  mark_stored(rules, buffer.state(), 0, 8);
  mark_cached(rules, buffer.state(), 4);
  count_held(buffer.state(), false, scan_transitions(rules, buffer.state()));
  EXPECT_EQ(buffer.num_valid(), 1);
  EXPECT_FALSE(can_activate(rules, buffer.state()));  // as in the run that was not preempted
  count_held(buffer.state(), true, Transitions());
  EXPECT_TRUE(can_activate(rules, buffer.state()));
}

TEST(BlockBuffer, IntegrityCheckFindsDamage) {
  const std::vector<std::function<void(BlockBuffer&)>> damages = {
      [](BlockBuffer& b) { b.state().num_valid = 2; },
      [](BlockBuffer& b) { b.state().blocks[1].block_id = 5; },
      [](BlockBuffer& b) { b.state().blocks[0].num_masks = 1; },
      [](BlockBuffer& b) { b.state().blocks[0].status = BlockStatus::kToCache; },
      [](BlockBuffer& b) { b.state().blocks[0].status = BlockStatus::kInCache; },
      [](BlockBuffer& b) { b.state().context_len = 3; },
      [](BlockBuffer& b) { b.state().context_len = 8; },
      [](BlockBuffer& b) { b.state().settled_end = 7; },
      [](BlockBuffer& b) { b.state().run_len = 1; },
      [](BlockBuffer& b) { b.state().stop_pos = 6; },
      [](BlockBuffer& b) { b.token_data()[6] = 7; },
      [](BlockBuffer& b) { b.token_data()[9] = 7; },
  };
  for (size_t i = 0; i < damages.size(); ++i) {
    BlockBuffer buffer = make_buffer(6, 20, 2);
    ASSERT_TRUE(buffer.check_integrity().ok());
    damages[i](buffer);
    EXPECT_EQ(buffer.check_integrity().code(), StatusCode::kInternal) << "damage " << i;
  }
}

TEST(BlockBuffer, Preconditions) {
  BlockBuffer buffer(test_rules(1));
  EXPECT_THROW(buffer.init({}, 5), InternalError);
  EXPECT_THROW(buffer.init(std::vector<int32_t>{1, 2}, 2), InternalError);
  EXPECT_THROW((void)buffer.block(1), InternalError);
  EXPECT_THROW((void)buffer.block(-1), InternalError);
}

}  // namespace
}  // namespace diffulex
