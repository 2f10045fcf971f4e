// SPDX-License-Identifier: Apache-2.0
// The phases, random ids and counters of canvas decoding on hand-made states.

#include "diffulex/core/canvas_rules.h"

#include <algorithm>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace diffulex {
namespace {

class CanvasRulesTest : public testing::Test {
 protected:
  void open(int32_t prompt_len, int32_t limit_end, int32_t max_model_len) {
    blocks_.block_size = 4;
    blocks_.buffer_size = 1;
    blocks_.mask_token_id = 0;
    blocks_.is_canvas = true;
    rules_.max_model_len = max_model_len;
    rules_.vocab_size = 1000;
    tokens_.assign(64, 0);
    state_.num_stop_ids = 2;
    state_.stop_ids[0] = 50;
    state_.stop_ids[1] = 51;
    init_canvas(blocks_, state_, canvas_, prompt_len, limit_end);
  }
  void open_next() { open_canvas(blocks_, rules_, state_, canvas_, kSeed, tokens_.data()); }
  void fill(const std::vector<int32_t>& ids) {
    std::copy(ids.begin(), ids.end(), tokens_.begin() + buffer_start(blocks_, state_));
  }

  static constexpr uint64_t kSeed = 0x123456789ABCDEFULL;
  BlockRules blocks_;
  CanvasRules rules_;
  BufferState state_;
  CanvasState canvas_;
  std::vector<int32_t> tokens_;
};

TEST_F(CanvasRulesTest, CanvasesLieRightBehindThePrompt) {
  open(6, 20, 64);
  EXPECT_EQ(state_.origin, 6);
  EXPECT_EQ(buffer_start(blocks_, state_), 6);
  EXPECT_EQ(state_.num_valid, 0);
  EXPECT_EQ(frozen_end(blocks_, state_), 6);
  EXPECT_EQ(next_canvas_phase(blocks_, state_, 0, 6), CanvasPhase::kEncodePrompt);
  EXPECT_EQ(next_canvas_phase(blocks_, state_, 5, 6), CanvasPhase::kEncodePrompt);
  EXPECT_EQ(next_canvas_phase(blocks_, state_, 6, 6), CanvasPhase::kDenoise);
}

TEST_F(CanvasRulesTest, RandomIdsFollowSeedPositionStepAndStream) {
  const auto id = [](uint64_t seed, int32_t position, int32_t step, RandomStream stream) {
    return random_token_id(seed, position, step, stream, 1 << 20);
  };
  const int32_t base = id(1, 2, 3, RandomStream::kRenoise);
  EXPECT_EQ(base, id(1, 2, 3, RandomStream::kRenoise));
  EXPECT_NE(base, id(2, 2, 3, RandomStream::kRenoise));
  EXPECT_NE(base, id(1, 3, 3, RandomStream::kRenoise));
  EXPECT_NE(base, id(1, 2, 4, RandomStream::kRenoise));
  EXPECT_NE(base, id(1, 2, 3, RandomStream::kCanvasInit));
  std::set<int32_t> seen;
  for (int32_t position = 0; position < 200; ++position) {
    const int32_t small = random_token_id(7, position, 0, RandomStream::kCanvasInit, 3);
    EXPECT_GE(small, 0);
    EXPECT_LT(small, 3);
    seen.insert(small);
    // floor(u * V) of the documented uniform.
    const double u = philox_uniform(7, position, 0, RandomStream::kCanvasInit);
    EXPECT_EQ(small, u < 1.0 / 3.0 ? 0 : (u < 2.0 / 3.0 ? 1 : 2));
  }
  EXPECT_EQ(seen.size(), 3U);
}

TEST_F(CanvasRulesTest, TemperatureFallsLinearly) {
  rules_.max_denoising_steps = 4;
  rules_.t_min = 0.4F;
  rules_.t_max = 0.8F;
  EXPECT_FLOAT_EQ(canvas_temperature(rules_, 4), 0.8F);
  EXPECT_FLOAT_EQ(canvas_temperature(rules_, 3), 0.7F);
  EXPECT_FLOAT_EQ(canvas_temperature(rules_, 2), 0.6F);
  EXPECT_FLOAT_EQ(canvas_temperature(rules_, 1), 0.5F);
  EXPECT_EQ(canvas_steps_left(rules_, canvas_), 4);
  canvas_.denoise_step = 3;
  EXPECT_EQ(canvas_steps_left(rules_, canvas_), 1);
  rules_.max_denoising_steps = 48;
  EXPECT_FLOAT_EQ(canvas_temperature(rules_, 48), 0.8F);
  EXPECT_NEAR(canvas_temperature(rules_, 47), .791667, 1e-6);
  EXPECT_NEAR(canvas_temperature(rules_, 1), .408333, 1e-6);
}

TEST_F(CanvasRulesTest, OnlyMaxModelLenShortensACanvas) {
  open(6, 8, 64);
  EXPECT_EQ(canvas_valid_len(blocks_, rules_, 6), 4);   // max_tokens 2 does not
  EXPECT_EQ(canvas_commit_len(blocks_, state_, 6), 2);  // but cuts the output
  open(6, 9, 9);
  EXPECT_EQ(canvas_valid_len(blocks_, rules_, 6), 3);
  EXPECT_EQ(canvas_commit_len(blocks_, state_, 6), 3);
  tokens_[9] = -5;
  open_next();
  EXPECT_EQ(tokens_[9], -5);  // beyond the end nothing is drawn
}

TEST_F(CanvasRulesTest, PreemptedCanvasStartsAgainFromTheSameIds) {
  open(6, 20, 64);
  open_next();
  const std::vector<int32_t> first(tokens_.begin() + 6, tokens_.begin() + 10);
  for (const int32_t id : first) {
    EXPECT_GE(id, 0);
    EXPECT_LT(id, 1000);
  }
  EXPECT_EQ(state_.blocks[0].status, BlockStatus::kActive);
  EXPECT_EQ(state_.blocks[0].num_masks, 0);
  const std::vector<int64_t> argmax = {1, 2, 3, 4};
  std::vector<int64_t> previous(4, 0);
  note_argmax_canvas(canvas_, argmax.data(), 4, previous.data());
  fill({1, 2, 3, 4});
  close_canvas(state_, canvas_);
  EXPECT_EQ(state_.num_valid, 0);
  EXPECT_EQ(canvas_.denoise_step, 0);
  EXPECT_EQ(canvas_.stable_run, kNoPreviousCanvas);
  open_next();
  EXPECT_EQ(std::vector<int32_t>(tokens_.begin() + 6, tokens_.begin() + 10), first);
}

TEST_F(CanvasRulesTest, StableRunCountsEqualCanvases) {
  std::vector<int64_t> previous(4, 0);
  const std::vector<int64_t> zeros = {0, 0, 0, 0};
  const std::vector<int64_t> other = {0, 0, 0, 9};
  note_argmax_canvas(canvas_, zeros.data(), 4, previous.data());
  EXPECT_EQ(canvas_.stable_run, 0);  // equal to the storage, but there was no canvas before
  note_argmax_canvas(canvas_, zeros.data(), 4, previous.data());
  EXPECT_EQ(canvas_.stable_run, 1);
  note_argmax_canvas(canvas_, other.data(), 3, previous.data());  // position 3 is no part of it
  EXPECT_EQ(canvas_.stable_run, 2);
  note_argmax_canvas(canvas_, other.data(), 4, previous.data());
  EXPECT_EQ(canvas_.stable_run, 0);
  EXPECT_EQ(previous, other);
  EXPECT_EQ(canvas_.denoise_step, 4);
}

TEST_F(CanvasRulesTest, CommitSettlesAndLooksForStopIds) {
  open(6, 20, 64);
  open_next();
  fill({7, 51, 50, 7});
  EXPECT_EQ(state_.stop_pos, kNoPosition);  // never in a canvas that is not committed
  EXPECT_EQ(commit_canvas(blocks_, state_, tokens_.data()), 4);
  EXPECT_EQ(state_.blocks[0].status, BlockStatus::kToCache);
  EXPECT_EQ(state_.blocks[0].valid_commit_len, 4);
  EXPECT_EQ(state_.settled_end, 10);
  EXPECT_EQ(state_.stop_pos, 7);
  EXPECT_EQ(state_.run_len, 1);
  EXPECT_EQ(frozen_end(blocks_, state_), 10);
  EXPECT_EQ(next_canvas_phase(blocks_, state_, 6, 6), CanvasPhase::kEncodeCanvas);
  close_canvas(state_, canvas_);  // a committed canvas survives a preemption
  EXPECT_EQ(state_.num_valid, 1);
  EXPECT_EQ(next_canvas_phase(blocks_, state_, 0, 10), CanvasPhase::kEncodePrompt);
  mark_canvas_cached(blocks_, state_, 8);  // a hit that ends inside the canvas
  EXPECT_EQ(state_.num_valid, 1);
  mark_canvas_cached(blocks_, state_, 10);
  EXPECT_EQ(state_.num_valid, 0);
  EXPECT_EQ(state_.context_len, 10);
  EXPECT_EQ(buffer_start(blocks_, state_), 10);
}

TEST_F(CanvasRulesTest, RunOfEqualTokensCrossesCanvasesButNotThePrompt) {
  open(6, 13, 64);
  std::fill_n(tokens_.begin(), 6, 7);
  open_next();
  fill({7, 7, 7, 7});
  commit_canvas(blocks_, state_, tokens_.data());
  EXPECT_EQ(state_.run_len, 4);
  mark_canvas_cached(blocks_, state_, 10);
  open_next();
  fill({7, 7, 7, 50});
  EXPECT_EQ(commit_canvas(blocks_, state_, tokens_.data()), 3);
  EXPECT_EQ(state_.run_len, 7);
  EXPECT_EQ(state_.settled_end, 13);
  EXPECT_EQ(state_.stop_pos, kNoPosition);  // a stop id past the limit does not count
}

}  // namespace
}  // namespace diffulex
