// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/scheduler.h"

#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/brute_force_decoder.h"
#include "core/engine_simulator.h"
#include "core/scheduler_requests.h"

namespace diffulex {
namespace {

using test::BruteForceDecoder;
using test::EngineSimulator;
using test::fixed_len;
using test::prompt_of;
using test::scheduler_options;
using testing::HasSubstr;

/// Fills the first open position of every block whose gate is open.
void accept_first(StepPlan& plan, SamplerOutput& output, int32_t token) {
  const auto width = static_cast<size_t>(plan.block_size());
  output.clear(plan.num_blocks());
  for (size_t blk = 0; blk < static_cast<size_t>(plan.num_blocks()); ++blk) {
    int32_t num_open = 0;
    for (size_t rel = 0; rel < width; ++rel) {
      num_open += plan.blk_row_index()[blk * width + rel] >= 0 ? 1 : 0;
      if (num_open == 1 && output.write_ids()[blk * width] == -1 &&
          plan.blk_row_index()[blk * width + rel] >= 0) {
        output.write_ids()[blk * width + rel] = token;
      }
    }
    output.flags()[blk] = num_open <= 1 ? kSamplerCommittable : 0;
  }
}

TEST(SchedulerIntegrity, ASharedPageAheadOfTheContextIsReported) {
  const EngineOptions options = scheduler_options();
  KVCacheManager kv_cache(options);
  Scheduler scheduler(options, kv_cache);
  StepPlan plan(options);
  SamplerOutput output(options);
  const std::vector<int32_t> prompt = prompt_of(6);
  const int64_t id = scheduler
                         .add_request(std::make_unique<Request>(Span<const int32_t>(prompt),
                                                                fixed_len(20), options))
                         .value();
  ASSERT_EQ(scheduler.schedule(plan), PlanKind::kPrefill);
  ASSERT_TRUE(scheduler.complete_step(plan, output).ok());
  const Request& request = *scheduler.find_request(id);
  ASSERT_EQ(request.context_len(), 4);
  // The open block gets its page in the step that stores it.
  ASSERT_EQ(scheduler.schedule(plan), PlanKind::kDecode);
  while (request.page_table.pages.size() < 2) {
    accept_first(plan, output, 3);
    ASSERT_TRUE(scheduler.complete_step(plan, output).ok());
    ASSERT_EQ(scheduler.schedule(plan), PlanKind::kDecode);
  }
  ASSERT_EQ(request.context_len(), 4);
  ASSERT_TRUE(scheduler.check_integrity().ok()) << scheduler.check_integrity().message();
  // A copy of the table lets that page into the prefix index while its KV is being written.
  PageTable table = request.page_table;
  kv_cache.register_prefix(table, request.tokens(), 8);
  EXPECT_THAT(scheduler.check_integrity().message(), HasSubstr("expected private pages"));
}

// --- add_request --------------------------------------------------------------------------------

TEST(SchedulerAdd, EveryRejectionHasCodeAndMessage) {
  EngineOptions options = scheduler_options();
  options.num_pages = 8;
  EngineCore core(options);
  SamplingParams bad_params;
  bad_params.max_tokens = 0;
  SamplingParams mask_stop;
  mask_stop.stop_token_ids = {0};
  SamplingParams far_stop;
  far_stop.stop_token_ids = {50};
  SamplingParams many_stops;
  many_stops.stop_token_ids.assign(32, 5);
  int64_t num_refused = 0;
  const auto refuses = [&](const std::vector<int32_t>& prompt, const SamplingParams& params,
                           StatusCode code, const std::string& message) {
    SCOPED_TRACE(message);
    const Result<int64_t> id = core.add_request(Span<const int32_t>(prompt), params);
    ASSERT_FALSE(id.ok());
    EXPECT_EQ(id.status().code(), code);
    EXPECT_THAT(id.status().message(), HasSubstr(message));
    ++num_refused;
  };
  const SamplingParams fine;
  refuses({}, fine, StatusCode::kInvalidArgument,
          "add_request: expected at least one prompt token, got 0");
  refuses(prompt_of(64), fine, StatusCode::kOutOfRange,
          "add_request: expected a prompt shorter than max_model_len 64, got 64 tokens");
  refuses(prompt_of(90), fine, StatusCode::kOutOfRange, "got 90 tokens");
  refuses({3, -1}, fine, StatusCode::kInvalidArgument,
          "add_request: prompt: expected ids in [0, 50), got -1");
  refuses({3, 50}, fine, StatusCode::kInvalidArgument, "got 50");
  refuses({3}, bad_params, StatusCode::kInvalidArgument, "SamplingParams.max_tokens");
  refuses({3}, mask_stop, StatusCode::kInvalidArgument, "expected no mask token, got 0");
  refuses({3}, far_stop, StatusCode::kInvalidArgument, "SamplingParams.stop_token_ids");
  refuses({3}, many_stops, StatusCode::kInvalidArgument, "got 33");
  refuses(prompt_of(20), fixed_len(13), StatusCode::kOutOfPages,
          "add_request: expected a request of at most 8 pages, got 9 pages for 33 tokens");
  SamplingParams filled = fixed_len(4);
  const auto refuses_template = [&](const std::vector<int32_t>& ids, StatusCode code,
                                    const std::string& message) {
    filled.template_token_ids = ids;
    refuses(prompt_of(62), filled, code, message);
  };
  refuses_template({5, -2}, StatusCode::kInvalidArgument, "expected ids >= 0 or -1, got -2");
  refuses_template({-1, 5, 5, 5, 5}, StatusCode::kInvalidArgument,
                   "expected at most max_tokens 4 positions, got 5");
  refuses_template({-1, 5, 5}, StatusCode::kOutOfRange,
                   "expected at most 2 positions after the prompt (max_model_len 64), got 3");
  refuses_template({-1, 50}, StatusCode::kInvalidArgument, "expected ids in [0, 50), got 50");
  refuses_template({5, 6}, StatusCode::kInvalidArgument, "expected at least one free position");
  filled.ignore_eos = false;
  refuses_template({-1, 1}, StatusCode::kInvalidArgument, "expected no stop id among the fixed");
  EXPECT_EQ(num_refused, 16);
  EXPECT_EQ(core.stats().num_rejected, num_refused);
  EXPECT_EQ(core.stats().num_requests, 0);
  EXPECT_FALSE(core.has_unfinished());
  // The largest request that fits is accepted.
  EXPECT_TRUE(core.add_request(Span<const int32_t>(prompt_of(20)), fixed_len(12)).ok());
}

TEST(SchedulerAdd, RefusesATemplateWhereTokensAreRewritten) {
  EngineOptions options = scheduler_options();
  options.is_editing = true;
  EngineCore core(options);
  SamplingParams params = fixed_len(4);
  params.template_token_ids = {-1, 5};
  const Result<int64_t> id = core.add_request(Span<const int32_t>(prompt_of(3)), params);
  EXPECT_EQ(id.status().code(), StatusCode::kUnsupported);
  EXPECT_THAT(id.status().message(),
              HasSubstr("expected a strategy that only fills masks, got multi_bd with editing"));
}

TEST(SchedulerAdd, RefusesARequestOfOtherOptions) {
  const EngineOptions options = scheduler_options();
  EngineCore core(options);
  EngineOptions other = options;
  other.block_size = 8;
  const Result<int64_t> id = core.scheduler().add_request(
      std::make_unique<Request>(Span<const int32_t>(prompt_of(3)), SamplingParams(), other));
  ASSERT_FALSE(id.ok());
  EXPECT_THAT(id.status().message(), HasSubstr("options of the scheduler, got block_size 8"));
}

// --- limits -------------------------------------------------------------------------------------

class Limits : public testing::TestWithParam<int32_t> {};

TEST_P(Limits, ExactNumberOfTokens) {
  EngineOptions options = scheduler_options();
  options.buffer_size = GetParam();
  const int32_t rows = options.decode_rows();
  const int32_t block = options.block_size;
  for (const int32_t max_tokens : {1, block - 1, block, block + 1, rows, rows + 1, 2 * rows - 1}) {
    for (const int32_t prompt_len : {1, block - 1, block, block + 1, 2 * block, 13}) {
      SCOPED_TRACE(std::to_string(prompt_len) + " + " + std::to_string(max_tokens));
      EngineSimulator sim(options);
      const int64_t id = sim.add(prompt_of(prompt_len), fixed_len(max_tokens));
      sim.drain();
      const RequestResult result = sim.core().take_result(id).value();
      const int32_t room = options.max_model_len - prompt_len;
      EXPECT_EQ(static_cast<int32_t>(result.output_ids.size()), std::min(max_tokens, room));
      EXPECT_EQ(result.finish_reason, max_tokens <= room ? FinishReason::kMaxNewTokensReached
                                                         : FinishReason::kMaxModelLenReached);
    }
  }
}

TEST_P(Limits, EveryPromptLengthUpToTheModelLength) {
  EngineOptions options = scheduler_options();
  options.buffer_size = GetParam();
  options.max_model_len = 46;  // neither a multiple of the block nor of the page
  options.page_size = 8;
  for (int32_t prompt_len = 1; prompt_len < options.max_model_len; ++prompt_len) {
    SCOPED_TRACE(prompt_len);
    EngineSimulator sim(options);
    const std::vector<int32_t> prompt = prompt_of(prompt_len);
    const int64_t id = sim.add(prompt, fixed_len(1000));
    sim.drain();
    const RequestResult result = sim.core().take_result(id).value();
    EXPECT_EQ(result.finish_reason, FinishReason::kMaxModelLenReached);
    EXPECT_EQ(static_cast<int32_t>(result.output_ids.size()), options.max_model_len - prompt_len);
    EXPECT_EQ(result.output_ids,
              BruteForceDecoder(options, prompt, fixed_len(1000)).decode().output);
  }
}

INSTANTIATE_TEST_SUITE_P(BufferSizes, Limits, testing::Values(1, 2, 3, 4, 6));

TEST(SchedulerEquivalence, OneBlockAtATimeIsSingleBlockDecoding) {
  for (const int32_t buffer_size : {2, 3, 5}) {
    for (int32_t prompt_len = 1; prompt_len < 20; ++prompt_len) {
      std::vector<int32_t> outputs[2];
      for (int32_t k = 0; k < 2; ++k) {
        EngineOptions options = scheduler_options();
        options.buffer_size = k == 0 ? 1 : buffer_size;
        options.thresholds.add_block = 1.0F;
        EngineSimulator sim(options);
        const int64_t id = sim.add(prompt_of(prompt_len), SamplingParams());
        sim.drain();
        outputs[k] = sim.core().take_result(id).value().output_ids;
      }
      EXPECT_EQ(outputs[0], outputs[1]);
    }
  }
}

TEST(SchedulerLimits, MaxNfeAndRepetitionRun) {
  EngineSimulator sim(scheduler_options());
  SamplingParams params = fixed_len(30);
  params.max_nfe = 4;
  const int64_t capped = sim.add(prompt_of(6), params);
  sim.drain();
  const RequestResult result = sim.core().take_result(capped).value();
  EXPECT_EQ(result.finish_reason, FinishReason::kMaxNfeReached);
  EXPECT_EQ(result.nfe, 4);
  EXPECT_FALSE(result.is_auto_nfe_cap);

  params = fixed_len(30);
  params.max_repetition_run = 3;
  const int64_t repeated = sim.add(prompt_of(4), params);
  while (sim.core().has_unfinished()) {
    sim.forward();
    accept_first(sim.plan(), sim.output(), 9);
    sim.complete();
  }
  const RequestResult run = sim.core().take_result(repeated).value();
  EXPECT_EQ(run.finish_reason, FinishReason::kMaxRepetitionRunReached);
  EXPECT_EQ(run.output_ids, (std::vector<int32_t>{9, 9, 9}));
}

TEST(SchedulerLimits, AutomaticCapIsComputedOnceAfterTheWarmUp) {
  EngineOptions options = scheduler_options();
  options.buffer_size = 1;
  options.auto_max_nfe = true;
  options.auto_max_nfe_warmup_steps = 8;
  EngineSimulator sim(options);
  const int64_t id = sim.add(prompt_of(4), fixed_len(20));
  while (sim.core().has_unfinished()) {
    sim.forward();
    accept_first(sim.plan(), sim.output(), 9);
    sim.complete();
  }
  // Prefill, then 4 fills and a store per block: 6 tokens in 8 forwards, below the floor of 1, so
  // the cap is 20 forwards: prefill, three blocks of 5, and 4 more fills.
  const RequestResult result = sim.core().take_result(id).value();
  EXPECT_EQ(result.finish_reason, FinishReason::kMaxNfeReached);
  EXPECT_TRUE(result.is_auto_nfe_cap);
  EXPECT_EQ(result.nfe, 20);
  EXPECT_EQ(result.output_ids.size(), 16U);
}

// --- failures -----------------------------------------------------------------------------------

TEST(SchedulerFailures, NoProgressIsAnErrorOfTheRequest) {
  EngineSimulator sim(scheduler_options());
  const int64_t id = sim.add(prompt_of(4), fixed_len(8));
  sim.forward();
  sim.complete();
  sim.forward();
  sim.output().clear(sim.plan().num_blocks());
  sim.complete();
  EXPECT_EQ(sim.core().take_result(id).value().finish_reason, FinishReason::kError);
  EXPECT_EQ(sim.core().stats().num_failed, 1);
}

TEST(SchedulerFailures, BadLogitsFailTheRequestAlone) {
  EngineSimulator sim(scheduler_options());
  const int64_t bad = sim.add(prompt_of(6), fixed_len(8));
  const int64_t good = sim.add(prompt_of(6, 3), fixed_len(8));
  sim.forward();
  ASSERT_EQ(sim.plan().num_reqs(), 2);
  sim.output().flags()[0] |= kSamplerBadLogits;
  sim.complete();
  EXPECT_EQ(sim.core().take_result(bad).value().finish_reason, FinishReason::kError);
  sim.drain();
  EXPECT_EQ(sim.core().take_result(good).value().finish_reason, FinishReason::kMaxNewTokensReached);
}

TEST(SchedulerFailures, IllegalWritesAreRefusedAndNothingIsApplied) {
  EngineSimulator sim(scheduler_options());
  const int64_t id = sim.add(prompt_of(6), fixed_len(8));
  sim.forward();
  const struct {
    size_t rel;
    int64_t token;
    const char* message;
  } cases[] = {{1, 5, "got a prompt position: token 5 at position 1 of block 1 of request 0"},
               {2, 0, "got the mask token: token 0"},
               {2, 50, "got an id outside the vocabulary: token 50"},
               {2, -2, "got an id outside the vocabulary: token -2"}};
  for (const auto& bad : cases) {
    sim.output().clear(sim.plan().num_blocks());
    sim.output().write_ids()[bad.rel] = bad.token;
    const Result<const StepEvents*> events = sim.core().complete_step(sim.plan(), sim.output());
    ASSERT_FALSE(events.ok());
    EXPECT_EQ(events.status().code(), StatusCode::kInvalidArgument);
    EXPECT_THAT(events.status().message(), HasSubstr(bad.message));
    EXPECT_EQ(sim.core().scheduler().find_request(id)->nfe, 0);
  }
  sim.output().clear(sim.plan().num_blocks());
  sim.output().write_ids()[2] = 7;
  sim.complete();  // the plan is still in flight
  sim.forward();
  sim.output().clear(sim.plan().num_blocks());
  sim.output().write_ids()[2] = 8;
  EXPECT_THAT(sim.core().complete_step(sim.plan(), sim.output()).status().message(),
              HasSubstr("got a position that holds a token: token 8"));
}

TEST(SchedulerFailures, CallsInTheWrongOrder) {
  const EngineOptions options = scheduler_options();
  EngineSimulator sim(options);
  const int64_t id = sim.add(prompt_of(6), fixed_len(8));
  StepPlan other(options);
  EXPECT_EQ(sim.core().preempt(id).code(), StatusCode::kNotFound);  // still in the mailbox
  EXPECT_EQ(sim.core().take_result(id).status().code(), StatusCode::kNotFound);
  sim.forward();
  EXPECT_THROW((void)sim.core().schedule(other), InternalError);
  EXPECT_EQ(sim.core().cancel_step(other).code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(sim.core().preempt(id).message(), HasSubstr("no plan in flight"));
  EXPECT_THAT(sim.core().take_result(id).status().message(), HasSubstr("got PREFILLING"));
  EXPECT_EQ(sim.core().snapshot(77).status().code(), StatusCode::kNotFound);
  EXPECT_FALSE(sim.core().abort(77));
  sim.complete();
  StepPlan& done = sim.plan();
  EXPECT_EQ(sim.core().complete_step(done, sim.output()).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(sim.core().cancel_step(done).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(sim.core().preempt(id).ok());
  EXPECT_THAT(sim.core().preempt(id).message(), HasSubstr("running request, got WAITING"));
}

TEST(SchedulerFailures, CancelledStepsChangeNoToken) {
  for (const int32_t prompt_len : {3, 4, 9}) {
    EngineSimulator sim(scheduler_options());
    const std::vector<int32_t> prompt = prompt_of(prompt_len);
    const int64_t id = sim.add(prompt, fixed_len(20));
    bool cancels = true;
    while (sim.core().has_unfinished()) {
      sim.forward();
      cancels ? sim.cancel() : sim.complete();
      if (cancels) {
        const Request& request = *sim.core().scheduler().find_request(id);
        EXPECT_EQ(request.status, RequestStatus::kWaiting);
        EXPECT_TRUE(request.page_table.pages.empty());
        // Every other step would be spent on rebuilding: let the resume and a decode step pass.
        sim.forward();
        sim.complete();
      }
      cancels = !cancels;
    }
    EXPECT_EQ(sim.core().take_result(id).value().output_ids,
              BruteForceDecoder(scheduler_options(), prompt, fixed_len(20)).decode().output);
  }
}

// --- abort and release --------------------------------------------------------------------------

TEST(SchedulerAbort, WaitingRunningAndInFlight) {
  EngineOptions options = scheduler_options();
  options.max_num_reqs = 1;
  EngineSimulator sim(options);
  const int64_t first = sim.add(prompt_of(6), fixed_len(20));
  const int64_t second = sim.add(prompt_of(6, 5), fixed_len(20));
  const int64_t third = sim.add(prompt_of(6, 9), fixed_len(20));
  sim.forward();
  EXPECT_TRUE(sim.core().abort(first));   // in flight: its result is dropped
  EXPECT_TRUE(sim.core().abort(second));  // waiting
  const Result<const StepEvents*> events = sim.core().complete_step(sim.plan(), sim.output());
  ASSERT_TRUE(events.ok());
  EXPECT_EQ(events.value()->finished.size(), 2U);
  EXPECT_EQ(sim.core().take_result(first).value().output_ids.size(), 0U);
  EXPECT_EQ(sim.core().take_result(first).status().code(), StatusCode::kNotFound);  // once
  EXPECT_EQ(sim.core().take_result(second).value().finish_reason, FinishReason::kAborted);
  sim.forward();
  sim.complete();
  EXPECT_TRUE(sim.core().abort(third));  // between steps
  EXPECT_EQ(sim.core().schedule(sim.plan()), PlanKind::kIdle);
  const Result<const StepEvents*> idle = sim.core().complete_step(sim.plan(), sim.output());
  ASSERT_TRUE(idle.ok()) << idle.status().message();
  ASSERT_EQ(idle.value()->finished.size(), 1U);
  EXPECT_EQ(idle.value()->finished[0].req_id, third);
  EXPECT_EQ(idle.value()->finished[0].request_slot, 0);
  EXPECT_FALSE(sim.core().abort(third));
  EXPECT_EQ(sim.core().stats().num_aborted, 3);
  EXPECT_EQ(sim.core().kv_cache().num_free_pages(), options.num_pages);
}

TEST(SchedulerAbort, ReleaseAllEndsEverything) {
  EngineOptions options = scheduler_options();
  options.max_num_reqs = 2;
  EngineSimulator sim(options);
  for (int32_t i = 0; i < 4; ++i) {
    sim.add(prompt_of(6, i), fixed_len(20));
  }
  sim.forward();  // in flight
  sim.add(prompt_of(6, 9), fixed_len(20));
  sim.core().release_all();
  EXPECT_FALSE(sim.core().has_unfinished());
  EXPECT_EQ(sim.core().kv_cache().num_free_pages(), options.num_pages);
  EXPECT_EQ(sim.core().stats().num_aborted, 5);
  sim.check_integrity();
  EXPECT_EQ(sim.core().schedule(sim.plan()), PlanKind::kIdle);
}

// --- budgets ------------------------------------------------------------------------------------

TEST(SchedulerBudgets, DecodeRowBudgetRotates) {
  EngineOptions options = scheduler_options();
  options.buffer_size = 1;
  options.enable_chunked_prefill = true;
  options.max_num_batched_tokens = 8;  // two requests of four rows
  options.max_num_reqs = 3;
  EngineSimulator sim(options);
  for (int32_t i = 0; i < 3; ++i) {
    sim.add(prompt_of(3, i), fixed_len(20));
  }
  while (sim.core().stats().num_prefill_steps < 2) {
    sim.forward();
    sim.complete();
  }
  std::vector<std::vector<int64_t>> plans;
  for (int32_t i = 0; i < 3; ++i) {
    ASSERT_EQ(sim.forward(), PlanKind::kDecode);
    const Span<int64_t> ids = sim.plan().req_ids();
    plans.emplace_back(ids.begin(), ids.end());
    sim.complete();
  }
  EXPECT_EQ(plans, (std::vector<std::vector<int64_t>>{{0, 1}, {2, 0}, {1, 2}}));
}

TEST(SchedulerBudgets, ChunkedPrefillSplitsAtBlocksAndSamplesLast) {
  EngineOptions options = scheduler_options();
  options.buffer_size = 2;
  options.enable_chunked_prefill = true;
  options.max_num_batched_tokens = 10;
  EngineSimulator sim(options);
  const std::vector<int32_t> prompt = prompt_of(18);
  const int64_t id = sim.add(prompt, fixed_len(9));
  const std::vector<int32_t> expected_rows = {8, 8, 8};  // 0..7, 8..15, 16..23 with activation
  const std::vector<int32_t> expected_blocks = {0, 0, 2};
  for (size_t i = 0; i < expected_rows.size(); ++i) {
    EXPECT_EQ(sim.forward(), PlanKind::kPrefill);
    EXPECT_EQ(sim.plan().num_rows(), expected_rows[i]);
    EXPECT_EQ(sim.plan().num_blocks(), expected_blocks[i]);
    EXPECT_EQ(sim.plan().context_lens()[0], static_cast<int32_t>(i) * 8);
    sim.complete();
  }
  EXPECT_EQ(sim.forward(), PlanKind::kDecode);
  sim.complete();
  sim.drain();
  EXPECT_EQ(sim.core().take_result(id).value().output_ids,
            BruteForceDecoder(options, prompt, fixed_len(9)).decode().output);
}

TEST(SchedulerBudgets, ForcedDecodeBatchesBoundPrefill) {
  EngineOptions options = scheduler_options();
  options.max_num_batched_tokens = 68;
  options.max_consecutive_prefill_batches = 1;
  EngineSimulator sim(options);
  for (int32_t i = 0; i < 3; ++i) {
    sim.add(prompt_of(40, i), fixed_len(8));  // one prompt per batch
  }
  EXPECT_EQ(sim.forward(), PlanKind::kPrefill);
  sim.complete();
  EXPECT_EQ(sim.forward(), PlanKind::kDecode);
  sim.complete();
  EXPECT_EQ(sim.forward(), PlanKind::kPrefill);
  sim.complete();
  sim.drain();
}

TEST(SchedulerBudgets, HeadroomDelaysAdmissionWithoutChangingOutput) {
  std::vector<int32_t> outputs[2];
  int64_t preemptions[2];
  for (int32_t k = 0; k < 2; ++k) {
    EngineOptions options = scheduler_options();
    options.num_pages = 16;
    options.enable_prefix_caching = false;
    options.decode_headroom = k == 1;
    EngineSimulator sim(options);
    std::vector<int64_t> ids;
    for (int32_t i = 0; i < 4; ++i) {
      ids.push_back(sim.add(prompt_of(16, i), fixed_len(32)));
    }
    sim.drain();
    for (const int64_t id : ids) {
      const RequestResult result = sim.core().take_result(id).value();
      outputs[k].insert(outputs[k].end(), result.output_ids.begin(), result.output_ids.end());
    }
    preemptions[k] = sim.core().stats().num_preemptions;
  }
  EXPECT_EQ(outputs[0], outputs[1]);
  EXPECT_GT(preemptions[0], 0);
  EXPECT_LT(preemptions[1], preemptions[0]);
}

TEST(SchedulerBudgets, PreemptionTakesTheNewestAndKeepsOrder) {
  EngineOptions options = scheduler_options();
  EngineSimulator sim(options);
  for (int32_t i = 0; i < 3; ++i) {
    sim.add(prompt_of(6, i), fixed_len(20));
  }
  sim.forward();
  sim.cancel();  // all three go back, the oldest first
  sim.forward();
  const Span<int64_t> ids = sim.plan().req_ids();
  EXPECT_EQ(std::vector<int64_t>(ids.begin(), ids.end()), (std::vector<int64_t>{0, 1, 2}));
  const Span<int32_t> slots = sim.plan().request_slots();
  EXPECT_EQ(std::set<int32_t>(slots.begin(), slots.end()), (std::set<int32_t>{0, 1, 2}));
  sim.complete();
}

TEST(SchedulerSnapshot, ShowsBlocksAndLastWrites) {
  EngineSimulator sim(scheduler_options());
  const int64_t id = sim.add(prompt_of(6), fixed_len(20));
  sim.forward();
  sim.output().clear(sim.plan().num_blocks());
  sim.output().write_ids()[3] = 7;
  sim.output().confidence()[3] = 0.75F;
  sim.complete();
  const RequestSnapshot snapshot = sim.core().snapshot(id).value();
  EXPECT_EQ(snapshot.status, RequestStatus::kPrefilling);
  EXPECT_EQ(snapshot.nfe, 1);
  EXPECT_TRUE(snapshot.output_ids.empty());  // position 6 is still open
  ASSERT_EQ(snapshot.blocks.size(), 2U);
  EXPECT_EQ(snapshot.blocks[0].block_id, 1);
  EXPECT_EQ(snapshot.blocks[0].start, 4);
  EXPECT_EQ(snapshot.blocks[0].tokens[2], 0);
  EXPECT_EQ(snapshot.blocks[0].tokens[3], 7);
  EXPECT_EQ(snapshot.blocks[0].newly_written, (std::vector<int32_t>{3}));
  EXPECT_EQ(snapshot.blocks[0].confidences[3], 0.75F);
  EXPECT_TRUE(snapshot.blocks[1].newly_written.empty());
}

TEST(SchedulerSampling, RowsCarryTemperatureAndUniforms) {
  EngineSimulator sim(scheduler_options());
  SamplingParams params = fixed_len(8);
  params.temperature = 0.5F;
  params.seed = 123;
  params.accept_threshold = 0.25F;
  sim.add(prompt_of(6), params);
  sim.forward();
  StepPlan& plan = sim.plan();
  EXPECT_TRUE(plan.any_sampled());
  EXPECT_EQ(plan.num_sampled_rows(), 6);  // two open positions and an activated block of four
  EXPECT_EQ(plan.blk_accept_threshold()[0], 0.25F);
  EXPECT_EQ(plan.row_inv_temperature()[0], 2.0F);
  EXPECT_EQ(plan.row_uniforms()[0], philox_uniform(123, 6, 0, RandomStream::kToken));
  EXPECT_EQ(plan.row_uniforms()[2], philox_uniform(123, 8, 0, RandomStream::kToken));
  sim.output().clear(plan.num_blocks());
  sim.output().write_ids()[2] = 9;
  sim.complete();
  sim.forward();
  EXPECT_EQ(sim.plan().row_uniforms()[0], philox_uniform(123, 7, 1, RandomStream::kToken));
  EXPECT_EQ(sim.plan().blk_total_steps()[0], 2);
  EXPECT_EQ(sim.plan().blk_open_steps()[0], 1);
  EXPECT_EQ(sim.plan().blk_open_steps()[1], 0);  // its gate was closed
}

}  // namespace
}  // namespace diffulex
