// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/step_plan.h"

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "diffulex/core/engine_core.h"
#include "diffulex/core/sampler_output.h"

namespace diffulex {
namespace {

using testing::HasSubstr;

EngineOptions plan_options() {
  EngineOptions options;
  options.block_size = 4;
  options.buffer_size = 2;
  options.page_size = 4;
  options.num_pages = 32;
  options.max_num_reqs = 3;
  options.max_model_len = 30;
  options.max_num_batched_tokens = 40;
  options.mask_token_id = 99;
  return options;
}

TEST(StepPlan, LayoutIsAlignedOrderedAndEndsWithPageTables) {
  const StepPlan plan(plan_options());
  ASSERT_EQ(plan.fields().size(), static_cast<size_t>(PlanArray::kCount));
  size_t end = 0;
  for (const ArenaField& field : plan.fields()) {
    EXPECT_EQ(field.offset % kArenaAlignment, 0U) << field.name;
    EXPECT_GE(field.offset, end) << field.name;
    end = field.offset + field.bytes();
  }
  EXPECT_EQ(reinterpret_cast<uintptr_t>(plan.data()) % kArenaAlignment, 0U);
  EXPECT_LE(end, StepPlan::arena_bytes(plan_options()));
  EXPECT_STREQ(plan.fields().back().name, "page_tables");
  EXPECT_EQ(plan.fields().back().rows, 3);
  EXPECT_EQ(plan.fields().back().cols, 8);  // ceil(30 / 4)
  EXPECT_EQ(plan.fields()[0].rows, 40);     // max(40, 3 * 8)
  EXPECT_EQ(plan.used_bytes(), plan.fields().back().offset);
}

TEST(StepPlan, BorrowsAlignedMemoryOnly) {
  const EngineOptions options = plan_options();
  const size_t bytes = StepPlan::arena_bytes(options);
  std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(kArenaAlignment, bytes),
                                                     &std::free);
  StepPlan plan(options, memory.get(), bytes);
  EXPECT_EQ(plan.data(), memory.get());
  EXPECT_THROW(StepPlan(options, memory.get(), bytes - 1), InternalError);
  EXPECT_THROW(StepPlan(options, static_cast<char*>(memory.get()) + 64, bytes), InternalError);
  EXPECT_THROW(StepPlan(options, nullptr, bytes), InternalError);
}

TEST(StepPlan, PageTableRowsFollowTheirOwner) {
  StepPlan plan(plan_options());
  const auto fill = [&plan](int64_t req_id, uint64_t epoch, std::vector<int32_t> pages) {
    plan.reset(PlanKind::kDecode, 0);
    const int32_t r = plan.append_request(req_id, 0, 8);
    plan.set_page_table(r, epoch, Span<const int32_t>(pages));
    pages.resize(8, -1);
    const Span<int32_t> row = plan.page_tables();
    EXPECT_EQ(std::vector<int32_t>(row.begin(), row.end()), pages);
  };
  fill(1, 0, {4, 5});
  fill(1, 0, {4, 5, 6});
  fill(1, 0, {4, 5, 6});
  fill(1, 1, {7});     // preempted and resumed: other pages
  fill(2, 1, {8, 9});  // another request in the row
  fill(2, 1, {8, 9, 1, 2, 3, 0, 6, 5});
  fill(3, 0, {});
  EXPECT_THROW(plan.set_page_table(0, 0, std::vector<int32_t>(9, 1)), InternalError);
}

TEST(StepPlan, RefusesMoreThanItsCapacity) {
  StepPlan plan(plan_options());
  plan.reset(PlanKind::kPrefill, 0);
  EXPECT_THROW(plan.append_request(1, 0, 41), InternalError);
}

class DecodePlan : public testing::Test {
 protected:
  DecodePlan() : core_(plan_options()), plan_(plan_options()), output_(plan_options()) {
    for (int32_t i = 0; i < 2; ++i) {
      const std::vector<int32_t> prompt = {1, 2, 3, 4 + i};
      EXPECT_TRUE(core_.add_request(Span<const int32_t>(prompt), SamplingParams()).ok());
    }
    EXPECT_EQ(core_.schedule(plan_), PlanKind::kPrefill);
    EXPECT_TRUE(core_.complete_step(plan_, output_).ok());
    EXPECT_EQ(core_.schedule(plan_), PlanKind::kDecode);
  }
  EngineCore core_;
  StepPlan plan_;
  SamplerOutput output_;
};

TEST_F(DecodePlan, PadsWithRequestsThatDoNothing) {
  EXPECT_EQ(plan_.uniform_q_len(), 8);
  const int32_t num_logits_rows = plan_.num_logits_rows();
  ASSERT_TRUE(plan_.pad_requests(3).ok());
  EXPECT_EQ(plan_.num_reqs(), 3);
  EXPECT_EQ(plan_.num_padded_reqs(), 1);
  EXPECT_EQ(plan_.num_rows(), 24);
  EXPECT_EQ(plan_.num_blocks(), 2);
  EXPECT_EQ(plan_.num_logits_rows(), num_logits_rows);
  EXPECT_EQ(plan_.cu_seqlens_q()[3], 24);
  EXPECT_EQ(plan_.cu_seqlens_k()[3], 24);
  EXPECT_EQ(plan_.valid_slices()[2], 16);
  EXPECT_EQ(plan_.context_lens()[2], 0);
  EXPECT_EQ(plan_.row_mode()[2], 1);
  EXPECT_EQ(plan_.mask_kinds()[2], 1);
  EXPECT_EQ(plan_.req_ids()[2], -1);
  for (size_t row = 16; row < 24; ++row) {
    EXPECT_EQ(plan_.slot_mapping()[row], -1);
    EXPECT_EQ(plan_.positions()[row], 0);
    EXPECT_EQ(plan_.input_ids()[row], 0);
  }
  for (size_t i = 16; i < 24; ++i) {
    EXPECT_EQ(plan_.page_tables()[i], -1);
  }
  for (size_t blk = 0; blk < 2; ++blk) {
    output_.write_ids()[blk * 4] = 7;
  }
  const Result<const StepEvents*> events = core_.complete_step(plan_, output_);
  ASSERT_TRUE(events.ok()) << events.status().message();
  EXPECT_EQ(events.value()->requests.size(), 2U);
}

TEST_F(DecodePlan, PaddingErrors) {
  EXPECT_THAT(plan_.pad_requests(1).message(), HasSubstr("expected a count in [2, 3], got 1"));
  EXPECT_THAT(plan_.pad_requests(4).message(), HasSubstr("got 4"));
  StepPlan idle(plan_options());
  EXPECT_EQ(idle.pad_requests(1).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(idle.pad_requests(1).message(), HasSubstr("got kind idle"));
}

TEST_F(DecodePlan, LogitsRowsAreTheOpenPositions) {
  EXPECT_EQ(plan_.num_logits_rows(), 8);
  EXPECT_FALSE(plan_.any_sampled());
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(plan_.logits_rows()[i], static_cast<int32_t>(i < 4 ? i : i + 4));
    EXPECT_EQ(plan_.row_inv_temperature()[i], 0.0F);
    EXPECT_EQ(plan_.row_uniforms()[i], 0.5);
  }
}

TEST(SamplerOutput, StartsAndClearsAsUnchanged) {
  SamplerOutput output(plan_options());
  EXPECT_EQ(output.max_num_blocks(), 6);
  EXPECT_EQ(output.write_ids().size(), 24U);
  output.write_ids()[3] = 5;
  output.flags()[0] = kSamplerCommittable;
  output.same_token_ratio()[0] = 0.0F;
  output.clear(1);
  EXPECT_EQ(output.write_ids()[3], -1);
  EXPECT_EQ(output.flags()[0], 0);
  EXPECT_EQ(output.same_token_ratio()[0], 1.0F);
  EXPECT_THROW(output.clear(7), InternalError);
  for (const ArenaField& field : output.fields()) {
    EXPECT_EQ(field.offset % kArenaAlignment, 0U) << field.name;
  }
}

}  // namespace
}  // namespace diffulex
