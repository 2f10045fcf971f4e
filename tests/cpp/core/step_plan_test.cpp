// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/step_plan.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
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
  EXPECT_THROW(plan.append_request(1, 0, -1), InternalError);
  EXPECT_THROW(plan.append_block(0, 0, 0, 0), InternalError);  // no request yet
  EXPECT_THROW(plan.set_page_table(0, 0, {}), InternalError);
  for (int32_t r = 0; r < 3; ++r) {
    plan.append_request(r, r, 8);
    EXPECT_THROW(plan.append_block(r, 0, 0, 8 * r + 5), InternalError);  // past its last row
    EXPECT_THROW(plan.append_block(r, 0, 0, 8 * r - 1), InternalError);  // before its first row
    EXPECT_THROW(plan.append_block(r - 1, 0, 0, 8 * r), InternalError);  // not the last request
    EXPECT_EQ(plan.append_block(r, 0, 0, 8 * r), 2 * r);
    EXPECT_EQ(plan.append_block(r, 1, 4, 8 * r + 4), 2 * r + 1);
  }
  EXPECT_THROW(plan.append_request(3, 0, 8), InternalError);
  EXPECT_THROW(plan.append_block(2, 2, 8, 16), InternalError);  // 3 requests of 2 blocks
  EXPECT_EQ(plan.num_blocks(), 6);
  plan.commit_logits_rows(20, false);
  EXPECT_THROW(plan.commit_logits_rows(5, false), InternalError);
  EXPECT_THROW(plan.commit_logits_rows(-1, false), InternalError);
  EXPECT_EQ(plan.logits_cursor().next_index, 20);
  plan.commit_logits_rows(1, false);
  EXPECT_THROW((void)plan.logits_cursor(), InternalError);  // no room for a whole block
}

TEST(StepPlan, LayoutIsWhatTheOffsetsDependOn) {
  const PlanLayout layout = StepPlan(plan_options()).layout();
  EXPECT_EQ(layout.block_size, 4);
  EXPECT_EQ(layout.buffer_size, 2);
  EXPECT_EQ(layout.page_size, 4);
  EXPECT_EQ(layout.max_pages_per_req, 8);
  EXPECT_EQ(layout.max_num_reqs, 3);
  EXPECT_EQ(layout.max_num_rows, 40);
  EXPECT_EQ(layout.max_num_blocks(), 6);
  EngineOptions other = plan_options();
  other.seed = 5;
  other.num_pages = 64;
  other.thresholds.accept = 0.5F;
  EXPECT_TRUE(PlanLayout::of(other) == layout);
  EXPECT_EQ(PlanLayout::of(other).describe(),
            "block_size 4, buffer_size 2, page_size 4, max_pages_per_req 8, max_num_reqs 3, "
            "max_num_rows 40, att_block_size 4, merge_top_k 0");
}

TEST(StepPlan, IdentitiesAreNeverReused) {
  auto first = std::make_unique<StepPlan>(plan_options());
  const uint64_t identity = first->identity();
  first.reset();
  EXPECT_NE(StepPlan(plan_options()).identity(), identity);
}

TEST(StepPlan, GreedyRowsAreRestoredAfterSampledOnes) {
  StepPlan plan(plan_options());
  const auto check_greedy = [&plan](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      EXPECT_EQ(plan.row_inv_temperature()[i], 0.0F) << i;
      EXPECT_EQ(plan.row_uniforms()[i], 0.5) << i;
    }
  };
  plan.reset(PlanKind::kDecode, 0);
  plan.commit_logits_rows(4, false);
  const LogitsRowCursor cursor = plan.logits_cursor();
  std::fill_n(cursor.inv_temperature, 3, 2.0F);
  std::fill_n(cursor.uniforms, 3, 0.25);
  plan.commit_logits_rows(3, true);
  check_greedy(0, 4);
  for (size_t i = 4; i < 7; ++i) {
    EXPECT_EQ(plan.row_inv_temperature()[i], 2.0F);
    EXPECT_EQ(plan.row_uniforms()[i], 0.25);
  }
  EXPECT_EQ(plan.num_sampled_rows(), 3);
  plan.reset(PlanKind::kDecode, 1);
  plan.commit_logits_rows(5, false);
  plan.commit_logits_rows(4, false);
  check_greedy(0, 9);
  EXPECT_FALSE(plan.any_sampled());
}

/// Options that change one dependency of the layout each.
std::vector<EngineOptions> other_layouts() {
  std::vector<EngineOptions> others(6, plan_options());
  others[0].block_size = 8;
  others[0].buffer_size = 1;
  others[1].buffer_size = 1;
  others[2].page_size = 8;
  others[3].max_model_len = 40;
  others[4].max_num_reqs = 2;
  others[5].max_num_batched_tokens = 48;
  return others;
}

TEST(StepPlan, SchedulerRefusesPlansOfOtherOptions) {
  EngineCore core(plan_options());
  const std::vector<int32_t> prompt = {1, 2, 3, 4};
  ASSERT_TRUE(core.add_request(Span<const int32_t>(prompt), SamplingParams()).ok());
  for (const EngineOptions& options : other_layouts()) {
    StepPlan plan(options);
    EXPECT_FALSE(plan.layout() == StepPlan(plan_options()).layout());
    try {
      core.schedule(plan);
      ADD_FAILURE() << plan.layout().describe();
    } catch (const InternalError& error) {
      EXPECT_THAT(error.what(), HasSubstr("schedule: expected a plan of block_size 4, "));
      EXPECT_THAT(error.what(), HasSubstr("got " + plan.layout().describe()));
    }
  }
  StepPlan plan(plan_options());
  EXPECT_EQ(core.schedule(plan), PlanKind::kPrefill);  // nothing was lost
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
  EXPECT_EQ(plan_.uniform_q_len(), 4);  // of two blocks, one is open
  const int32_t num_logits_rows = plan_.num_logits_rows();
  ASSERT_TRUE(plan_.pad(3, 24).ok());
  EXPECT_EQ(plan_.num_reqs(), 3);
  EXPECT_EQ(plan_.num_padded_reqs(), 1);
  EXPECT_EQ(plan_.num_rows(), 24);
  EXPECT_EQ(plan_.num_blocks(), 2);
  EXPECT_EQ(plan_.num_logits_rows(), num_logits_rows);
  EXPECT_EQ(plan_.cu_seqlens_q()[3], 8);  // no request owns the rest
  EXPECT_EQ(plan_.cu_seqlens_k()[3], 8);
  EXPECT_EQ(plan_.valid_slices()[2], 8);
  EXPECT_EQ(plan_.context_lens()[2], 0);
  EXPECT_EQ(plan_.row_mode()[2], 1);
  EXPECT_EQ(plan_.mask_kinds()[2], 1);
  EXPECT_EQ(plan_.req_ids()[2], -1);
  EXPECT_EQ(plan_.last_row_index()[2], -1);
  EXPECT_EQ(plan_.max_seqlen_q(), 4);
  EXPECT_EQ(plan_.max_seqlen_k(), 4);
  for (size_t row = 8; row < 24; ++row) {
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
  EXPECT_EQ(core_.stats().num_rows, 2 * 8 + 2 * 4);  // prefill and decode, padding left out
}

TEST_F(DecodePlan, RefusesOutputsOfOtherOptions) {
  for (size_t i : {0U, 1U, 4U}) {  // those that change the layout of an output
    const SamplerOutput other(other_layouts()[i]);
    const Status status = core_.complete_step(plan_, other).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(),
                HasSubstr("expected an output of 6 blocks of 4 with merge_top_k 0, got "));
  }
  EXPECT_TRUE(core_.complete_step(plan_, output_).ok());  // still in flight
}

TEST_F(DecodePlan, TheStepBelongsToThePlanNotToItsAddress) {
  const auto memory = std::make_unique<std::aligned_storage_t<sizeof(StepPlan), 64>>();
  ASSERT_TRUE(core_.cancel_step(plan_).ok());
  auto* first = new (memory.get()) StepPlan(plan_options());
  ASSERT_NE(core_.schedule(*first), PlanKind::kIdle);
  first->~StepPlan();
  auto* second = new (memory.get()) StepPlan(plan_options());
  second->reset(PlanKind::kPrefill, 0);
  EXPECT_EQ(core_.complete_step(*second, output_).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(core_.cancel_step(*second).code(), StatusCode::kInvalidArgument);
  core_.release_all();
  EXPECT_EQ(core_.schedule(*second), PlanKind::kIdle);
  second->~StepPlan();
}

TEST_F(DecodePlan, ScalarsAndRowsOfThePosition) {
  EXPECT_EQ(plan_.max_seqlen_q(), 4);
  EXPECT_EQ(plan_.max_seqlen_k(), 4);
  EXPECT_EQ(plan_.max_context_len(), 4);
  EXPECT_EQ(plan_.block_size(), 4);
  EXPECT_EQ(plan_.att_block_size(), 4);
  EXPECT_EQ(plan_.buffer_size(), 2);
  EXPECT_EQ(plan_.page_size(), 4);
  ASSERT_EQ(plan_.num_blocks(), 2);
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(plan_.last_row_index()[r], -1);
    EXPECT_EQ(plan_.blk_prev_row()[r], -1);  // position 3 is cached
  }
  // One step on, a second block of each request runs behind the first.
  for (size_t blk = 0; blk < 2; ++blk) {
    output_.write_ids()[blk * 4] = 7;
  }
  ASSERT_TRUE(core_.complete_step(plan_, output_).ok());
  ASSERT_EQ(core_.schedule(plan_), PlanKind::kDecode);
  ASSERT_EQ(plan_.num_blocks(), 4);
  EXPECT_EQ(plan_.blk_prev_row()[0], -1);
  EXPECT_EQ(plan_.blk_prev_row()[1], 3);
  EXPECT_EQ(plan_.blk_prev_row()[2], -1);
  EXPECT_EQ(plan_.blk_prev_row()[3], 11);
}

TEST(StepPlan, TheFirstBlockHasNoPreviousRow) {
  EngineCore core(plan_options());
  StepPlan plan(plan_options());
  for (const std::vector<int32_t>& prompt :
       {std::vector<int32_t>{1, 2}, std::vector<int32_t>{1, 2, 3, 4, 5}}) {
    ASSERT_TRUE(core.add_request(Span<const int32_t>(prompt), SamplingParams()).ok());
  }
  ASSERT_EQ(core.schedule(plan), PlanKind::kPrefill);
  // Both tail blocks are at least 0.1 full, so a block opens behind each: rows 0..7 and 8..19.
  ASSERT_EQ(plan.num_blocks(), 4);
  EXPECT_EQ(plan.max_seqlen_q(), 12);
  EXPECT_EQ(plan.max_seqlen_k(), 12);
  EXPECT_EQ(plan.blk_prev_row()[0], -2);
  EXPECT_EQ(plan.blk_prev_row()[1], 3);
  EXPECT_EQ(plan.blk_prev_row()[2], 11);  // position 3 of the second request, run here
  EXPECT_EQ(plan.blk_prev_row()[3], 15);
}

TEST_F(DecodePlan, PaddingErrors) {
  EXPECT_THAT(plan_.pad(1, 16).message(),
              HasSubstr("expected a count in [2, 3] and rows in [8, 40], got 1 and 16"));
  EXPECT_THAT(plan_.pad(4, 16).message(), HasSubstr("got 4 and 16"));
  EXPECT_THAT(plan_.pad(2, 7).message(), HasSubstr("got 2 and 7"));
  EXPECT_THAT(plan_.pad(2, 41).message(), HasSubstr("got 2 and 41"));
  StepPlan idle(plan_options());
  EXPECT_EQ(idle.pad(1, 8).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(idle.pad(1, 8).message(), HasSubstr("got kind idle"));
}

TEST_F(DecodePlan, LogitsRowsAreTheOpenPositions) {
  EXPECT_EQ(plan_.num_logits_rows(), 8);
  EXPECT_FALSE(plan_.any_sampled());
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(plan_.logits_rows()[i], static_cast<int32_t>(i));
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
