// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "diffulex/ops/accept.h"
#include "ops/acceptance_case.h"
#include "ops/guarded_tensor.h"

namespace diffulex::test {
namespace {

constexpr int64_t kM = kAcceptMask;

/// Guards every tensor of a call.
class Guards final {
 public:
  TensorRef operator()(const TensorRef& tensor) {
    tensors_.push_back(std::make_unique<GuardedTensor>(tensor));
    return tensors_.back()->ref();
  }

 private:
  std::vector<std::unique_ptr<GuardedTensor>> tensors_;
};

struct EditStep {
  Writes writes;
  float ratio;
  int32_t flags;
};

EditStep run_edit(AcceptanceCase* block, float tau, float edit_tau, int32_t step) {
  block->start = {1};
  block->threshold = {tau};
  block->edit_threshold = {edit_tau};
  block->open_steps = {step};
  const Status status = accept_edit(block->edit(kOnHost), ExecContext{});
  EXPECT_TRUE(status.ok()) << status.message();
  return EditStep{block->writes(), block->ratio[0], block->flags[0]};
}

TEST(AcceptEdit, VectorE) {
  for (const auto& [tau, edit_tau] : {std::pair{.7F, .5F}, std::pair{.5F, 0.0F}}) {
    AcceptanceCase first({3, kM, 5, kM});
    EditStep step = run_edit(&first, tau, edit_tau, 0);
    EXPECT_EQ(step.writes, (Writes{{1, 2}, {2, 3}}));
    EXPECT_EQ(step.ratio, 0.0F);
    EXPECT_EQ(step.flags, kAcceptProgressed);
    EXPECT_EQ(first.left[0], 1);

    AcceptanceCase second({3, 2, 3, kM});
    step = run_edit(&second, tau, edit_tau, 1);
    EXPECT_EQ(step.writes, (Writes{{3, 4}}));
    EXPECT_EQ(step.ratio, 1.0F);
    EXPECT_EQ(step.flags, kAcceptProgressed);

    AcceptanceCase third({3, 2, 3, 4});
    step = run_edit(&third, tau, edit_tau, 2);
    EXPECT_EQ(step.writes, (Writes{}));
    EXPECT_EQ(step.ratio, 1.0F);
    EXPECT_EQ(step.flags, kAcceptCommittable | kAcceptSameAsPrevious | kAcceptAllConfident);
  }
}

TEST(AcceptEdit, VectorEModeOff) {
  AcceptanceCase block({3, 2, 3, 4});
  block.ids[3] = kM;
  const EditStep step = run_edit(&block, .5F, 0.0F, 2);
  EXPECT_EQ(step.writes, (Writes{{3, kM}}));
  EXPECT_NEAR(step.ratio, .666667, 1e-6);
  EXPECT_EQ(block.left[0], 1);
  EXPECT_EQ(step.flags & kAcceptCommittable, 0);
}

TEST(AcceptEdit, VectorETimeout) {
  AcceptanceCase block({3, kM, 5, kM});
  const EditStep step = run_edit(&block, .7F, .5F, 19);
  EXPECT_EQ(step.writes, (Writes{{1, 2}, {2, 3}, {3, 4}}));
  EXPECT_EQ(step.flags, kAcceptCommittable | kAcceptProgressed | kAcceptTimedOut);
  AcceptanceCase early({3, kM, 5, kM});
  EXPECT_EQ(run_edit(&early, .7F, .5F, 18).flags, kAcceptProgressed);
}

TEST(AcceptEdit, PostEditBudget) {
  for (const int32_t post : {0, 1, 2, 3}) {
    AcceptanceCase block({3, 2, 5, 4});
    block.post_limits = {3};
    block.post_steps = {post};
    const EditStep step = run_edit(&block, .7F, .5F, 0);
    EXPECT_EQ(step.flags & kAcceptCommittable, post >= 2 ? kAcceptCommittable : 0) << post;
    // Past the budget the edits are dropped.
    EXPECT_EQ(step.writes, post == 3 ? Writes{} : (Writes{{2, 3}})) << post;
  }
}

TEST(AcceptEdit, SkippedAndBadRows) {
  AcceptanceCase skipped({3, kM, 5, kM});
  skipped.row_index[2] = -1;
  EditStep step = run_edit(&skipped, .1F, 0.0F, 30);
  EXPECT_EQ(step.writes, (Writes{}));
  EXPECT_EQ(step.flags, kAcceptSkipped | kAcceptSameAsPrevious);
  AcceptanceCase bad({3, kM, 5, kM});
  bad.ids[1] = -1;
  step = run_edit(&bad, 0.0F, 0.0F, 30);
  EXPECT_EQ(step.writes, (Writes{{2, 3}, {3, 4}}));
  EXPECT_EQ(step.flags, kAcceptBadLogits | kAcceptTimedOut | kAcceptProgressed);
  EXPECT_EQ(bad.left[0], 1);
}

void run_dmax(AcceptanceCase* block, int32_t step) {
  block->open_steps = {step};
  const Status status = accept_dmax(block->dmax(kOnHost), ExecContext{});
  ASSERT_TRUE(status.ok()) << status.message();
}

TEST(AcceptDmax, VectorF) {
  AcceptanceCase first({kM, kM, kM, kM});
  run_dmax(&first, 0);
  EXPECT_EQ(first.writes(), (Writes{{0, 1}, {1, 2}, {2, 3}}));
  EXPECT_EQ(first.flags[0], kAcceptProgressed);
  EXPECT_EQ(first.merge_valid, (std::vector<uint8_t>{1, 1, 1, 0}));
  EXPECT_EQ(first.merge_ids, (std::vector<int64_t>{1, 2, 3, kM}));
  EXPECT_EQ(first.merge_probs, (std::vector<float>{.92F, .60F, .96F, 0.0F}));
  EXPECT_NEAR(first.residual[0], .08, 1e-6);
  EXPECT_NEAR(first.residual[1], .40, 1e-6);
  EXPECT_NEAR(first.residual[2], .04, 1e-6);
  EXPECT_EQ(first.residual[3], 0.0F);

  AcceptanceCase second({1, 2, 3, kM});
  run_dmax(&second, 1);
  EXPECT_EQ(second.writes(), (Writes{{3, 4}}));
  EXPECT_EQ(second.flags[0], kAcceptProgressed);
  EXPECT_NEAR(second.residual[3], .75, 1e-6);

  AcceptanceCase third({1, 2, 3, 4});
  run_dmax(&third, 2);
  EXPECT_EQ(third.writes(), (Writes{}));
  EXPECT_EQ(third.flags[0], kAcceptCommittable | kAcceptSameAsPrevious);
}

TEST(AcceptDmax, VectorFModeOffNeverCommitsAMask) {
  AcceptanceCase block({1, 2, 3, kM});
  block.ids[3] = kM;
  run_dmax(&block, 1);
  EXPECT_EQ(block.writes(), (Writes{}));
  EXPECT_EQ(block.left[0], 1);
  EXPECT_EQ(block.flags[0], kAcceptSameAsPrevious);
}

TEST(AcceptDmax, VectorFFastPathAndPrompt) {
  AcceptanceCase fast({1, 2, 3, 4});
  fast.fast_path = true;
  run_dmax(&fast, 2);
  EXPECT_NE(fast.flags[0] & kAcceptAllConfident, 0);
  EXPECT_EQ(fast.merge_probs, (std::vector<float>{1, 1, 1, 1}));
  EXPECT_EQ(fast.residual, (std::vector<float>{0, 0, 0, 0}));
  AcceptanceCase prompt({5, 2, 3, 4});
  prompt.start = {1};
  run_dmax(&prompt, 0);
  EXPECT_EQ(prompt.writes(), (Writes{}));
  EXPECT_NE(prompt.flags[0] & kAcceptCommittable, 0);
  EXPECT_EQ(prompt.merge_valid[0], 0);
}

TEST(AcceptDmax, StepBoundAndLists) {
  AcceptanceCase block({1, 2, kM, kM});
  block.threshold = {.99F};
  block.with_lists = true;
  block.merge_k = 2;
  block.allocate();
  run_dmax(&block, 3);
  EXPECT_EQ(block.writes(), (Writes{{2, 3}, {3, 4}}));
  EXPECT_EQ(block.flags[0], kAcceptCommittable | kAcceptProgressed | kAcceptTimedOut);
  EXPECT_EQ(block.merge_ids, (std::vector<int64_t>{1, 0, 2, 1, 3, 0, 4, 5}));
  EXPECT_NEAR(block.residual[1], .3, 1e-6);
}

void run_gemma(AcceptanceCase* canvas) {
  // R0..R3 at T = .8, drawn with u = .5, .05, .5, .5; the argmax of R3 is the mask of the others.
  const float entropy[] = {.183414F, 1.098799F, .084954F, 1.503733F};
  for (size_t row = 0; row < 4; ++row) {
    if (canvas->kappa < 1.0F) {
      canvas->stats[row * 8 + kStatsEntropy] = entropy[row];
    }
  }
  canvas->ids = {1, 1, 3, 6};
  canvas->topk_ids = {1, 0, 2, 1, 3, 0, 7, 4};
  const Status status = accept_gemma(canvas->gemma(kOnHost), ExecContext{});
  ASSERT_TRUE(status.ok()) << status.message();
}

TEST(AcceptGemma, VectorGNextCanvas) {
  const std::pair<float, std::vector<int64_t>> cases[] = {
      {.1F, {1, 0, 3, 5}}, {.3F, {1, 1, 3, 5}}, {1.0F, {1, 1, 3, 5}}};
  for (const auto& [bound, canvas] : cases) {
    AcceptanceCase block({0, 0, 0, 0});
    block.entropy_bound = bound;
    run_gemma(&block);
    EXPECT_EQ(block.write_ids, canvas) << bound;
    EXPECT_EQ(block.argmax, (std::vector<int64_t>{1, 2, 3, 7}));
    EXPECT_EQ(block.flags[0], 0);
  }
}

TEST(AcceptGemma, VectorGConvergence) {
  for (const int32_t stability : {0, 1, 2}) {
    int32_t run = -1;
    std::vector<int64_t> previous = {0, 0, 0, 0};
    int32_t converged_at = 0;
    for (int32_t step = 1; step <= 4 && converged_at == 0; ++step) {
      AcceptanceCase block({0, 0, 0, 0});
      block.stability = stability;
      block.kappa = .005F;
      block.previous = previous;
      block.stable_run = {run};
      block.ids = {1, 1, 3, 6};
      block.topk_ids = {1, 0, 2, 1, 3, 0, 7, 4};
      for (size_t row = 0; row < 4; ++row) {
        block.stats[row * 8 + kStatsEntropy] = .004F;
      }
      ASSERT_TRUE(accept_gemma(block.gemma(kOnHost), ExecContext{}).ok());
      if ((block.flags[0] & kAcceptConverged) != 0) {
        converged_at = step;
        EXPECT_EQ(block.write_ids, (std::vector<int64_t>{1, 2, 3, 7}));
      }
      run = previous == block.argmax && run >= 0 ? run + 1 : 0;
      previous = block.argmax;
    }
    EXPECT_EQ(converged_at, stability + 1);
  }
}

TEST(AcceptGemma, MeanEntropyIsStrictAndTheLastStepConverges) {
  for (const float entropy : {.005F, .004F}) {
    AcceptanceCase block({0, 0, 0, 0});
    block.stability = 0;
    for (size_t row = 0; row < 4; ++row) {
      block.stats[row * 8 + kStatsEntropy] = entropy;
    }
    ASSERT_TRUE(accept_gemma(block.gemma(kOnHost), ExecContext{}).ok());
    EXPECT_EQ((block.flags[0] & kAcceptConverged) != 0, entropy < .005F);
  }
  AcceptanceCase last({0, 0, 0, 0});
  last.steps_left = {1};
  run_gemma(&last);
  EXPECT_EQ(last.flags[0], kAcceptConverged);
  EXPECT_EQ(last.write_ids, (std::vector<int64_t>{1, 2, 3, 7}));
}

TEST(AcceptGemma, ShortenedCanvas) {
  AcceptanceCase block({0, 0, 0, 0});
  block.valid = {3};
  block.stability = 0;
  const float entropy[] = {.001F, .002F, .001F, 9.0F};
  for (size_t row = 0; row < 4; ++row) {
    block.stats[row * 8 + kStatsEntropy] = entropy[row];
  }
  ASSERT_TRUE(accept_gemma(block.gemma(kOnHost), ExecContext{}).ok());
  EXPECT_EQ(block.flags[0], kAcceptConverged | kAcceptAllConfident);
  EXPECT_EQ(block.write_ids, (std::vector<int64_t>{1, 2, 3, -1}));
  EXPECT_EQ(block.argmax, (std::vector<int64_t>{1, 2, 3, -1}));
}

TEST(EntropyBoundMask, VectorG) {
  std::vector<float> entropy = {.183414F, 1.098799F, .084954F, 1.503733F, 5.0F};
  std::vector<int32_t> segments = {0, 4};
  std::vector<uint8_t> mask(5, 9);
  EntropyBoundMaskParams params;
  params.entropy = ref_of(entropy);
  params.segments = ref_of(segments);
  params.mask = ref_of(mask);
  const std::pair<float, std::vector<uint8_t>> cases[] = {{.1F, {1, 0, 1, 0, 9}},
                                                          {.3F, {1, 1, 1, 0, 9}},
                                                          {1.0F, {1, 1, 1, 0, 9}},
                                                          {-1.0F, {1, 1, 1, 1, 9}}};
  for (const auto& [bound, wanted] : cases) {
    params.bound = bound;
    ASSERT_TRUE(entropy_bound_mask(params, ExecContext{}).ok());
    EXPECT_EQ(mask, wanted) << bound;
  }
}

/// Every output cell is written, nothing outside is touched, and blocks do not influence each
/// other.
TEST(Acceptance, RandomBlocksStayInBoundsAndAreIndependent) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    std::mt19937_64 random(seed);
    const int64_t size = pick(&random, {1, 4, 8, 32, 33, 256});
    AcceptanceCase whole(&random, 3, size);
    whole.with_lists = seed % 2 == 0;
    whole.merge_k = whole.with_lists ? 2 : 1;
    whole.kappa = .5F;
    whole.entropy_bound = 2.0F;
    whole.allocate();
    for (const int kind : {0, 1, 2}) {
      Guards guards;
      const auto place = [&](const TensorRef& tensor) { return guards(tensor); };
      Status status;
      std::vector<TensorRef> outputs;
      if (kind == 0) {
        const AcceptEditParams params = whole.edit(place);
        status = accept_edit(params, ExecContext{});
        outputs = {params.write_ids, params.confidence, params.masks_left, params.flags,
                   params.same_token_ratio};
        ASSERT_TRUE(accept_edit(whole.edit(kOnHost), ExecContext{}).ok());
      } else if (kind == 1) {
        const AcceptDmaxParams params = whole.dmax(place);
        status = accept_dmax(params, ExecContext{});
        outputs = {params.write_ids, params.confidence, params.masks_left, params.flags,
                   params.same_token_ratio};
        ASSERT_TRUE(accept_dmax(whole.dmax(kOnHost), ExecContext{}).ok());
        for (const float prob : whole.merge_probs) {
          ASSERT_NE(prob, -77.0F);
        }
        for (const float value : whole.residual) {
          ASSERT_NE(value, -77.0F);
        }
      } else {
        const AcceptGemmaParams params = whole.gemma(place);
        status = accept_gemma(params, ExecContext{});
        outputs = {params.write_ids, params.confidence, params.flags, params.argmax};
        ASSERT_TRUE(accept_gemma(whole.gemma(kOnHost), ExecContext{}).ok());
      }
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_EQ(std::memcmp(outputs[0].data, whole.write_ids.data(), whole.write_ids.size() * 8),
                0);
      ASSERT_EQ(std::memcmp(outputs[1].data, whole.confidence.data(), whole.confidence.size() * 4),
                0);
      for (const int64_t id : whole.write_ids) {
        ASSERT_NE(id, -77);
      }
      for (const float value : whole.confidence) {
        ASSERT_NE(value, -77.0F);
      }
      for (const int32_t value : whole.flags) {
        ASSERT_NE(value, -77);
      }
    }
  }
}

TEST(Acceptance, Errors) {
  AcceptanceCase block({3, kM, 5, kM});
  const auto message = [](const Status& status) { return std::string(status.message()); };
  block.post_limits = {-1};
  EXPECT_EQ(message(accept_edit(block.edit(kOnHost), ExecContext{})),
            "diffulex::accept_edit: max_post_edit_steps[0]: expected a value >= 0, got -1");
  block.post_limits = {16};
  block.row_index[1] = 4;
  EXPECT_EQ(message(accept_edit(block.edit(kOnHost), ExecContext{})),
            "diffulex::accept_edit: row_index[0][1]: expected -1 or a row below 4, got 4");
  block.row_index[1] = 1;
  AcceptDmaxParams dmax = block.dmax(kOnHost);
  dmax.merge_probs = TensorRef{};
  EXPECT_EQ(message(accept_dmax(dmax, ExecContext{})),
            "diffulex::accept_dmax: merge_probs: expected a tensor with merge_valid, got none");
  block.merge_k = 2;
  block.allocate();
  EXPECT_EQ(message(accept_dmax(block.dmax(kOnHost), ExecContext{})),
            "diffulex::accept_dmax: merge_ids: expected 1 to 1 entries per position (the columns "
            "of topk_ids, 1 without), got 2");
  AcceptGemmaParams gemma = block.gemma(kOnHost);
  gemma.stability_threshold = -1;
  EXPECT_EQ(message(accept_gemma(gemma, ExecContext{})),
            "diffulex::accept_gemma: stability_threshold: expected a value >= 0, got -1");
  std::vector<int64_t> wide(1025, 0);
  AcceptEditParams edit = block.edit(kOnHost);
  edit.tokens = ref_of(wide, {1, 1025});
  EXPECT_EQ(message(accept_edit(edit, ExecContext{})),
            "diffulex::accept_edit: tokens: expected blocks of 1 to 1024 positions, got [1, 1025]");
}

}  // namespace
}  // namespace diffulex::test
