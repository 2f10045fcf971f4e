// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/toy_model.h"
#include "diffulex/core/acceptance.h"
#include "diffulex/core/engine_core.h"

namespace diffulex::test {

/// Drives an EngineCore with the toy model: reads only the arrays of the plan, keeps the KV cache
/// as tags by slot, and checks on the way what the plan promises.
class EngineSimulator {
 public:
  explicit EngineSimulator(const EngineOptions& options)
      : options_(options),
        core_(options),
        plans_{StepPlan(options), StepPlan(options)},
        output_(options),
        cache_(static_cast<size_t>(options.num_pages * options.page_size),
               ToyKey{kPoison, kPoison}) {}

  EngineCore& core() { return core_; }
  StepPlan& plan() { return plans_[num_steps_ % 2]; }
  SamplerOutput& output() { return output_; }
  const std::vector<int32_t>& streamed(int64_t req_id) { return streamed_[req_id]; }
  const std::set<int64_t>& preempted_ids() const { return preempted_; }
  int32_t max_rows_seen() const { return max_rows_seen_; }

  int64_t add(const std::vector<int32_t>& prompt, const SamplingParams& params) {
    Result<int64_t> id = core_.add_request(Span<const int32_t>(prompt), params);
    EXPECT_TRUE(id.ok()) << id.status().message();
    return id.ok() ? id.value() : -1;
  }

  /// Schedules and runs the forward and the sampler; the step is still to be completed.
  PlanKind forward() {
    ++num_steps_;
    std::map<int64_t, int32_t> num_valid;
    for (const Request* request : core_.scheduler().running()) {
      num_valid[request->req_id] = request->buffer.num_valid();
    }
    const PlanKind kind = core_.schedule(plan());
    check_plan(num_valid);
    output_.clear(plan().num_blocks());
    for (int32_t r = 0; r < plan().num_reqs(); ++r) {
      run_request(r);
    }
    return kind;
  }

  void complete() {
    const Result<const StepEvents*> events = core_.complete_step(plan(), output_);
    ASSERT_TRUE(events.ok()) << events.status().message();
    for (const RequestEvent& event : events.value()->requests) {
      for (const int32_t token : events.value()->appended(event)) {
        streamed_[event.req_id].push_back(token);
      }
    }
    note_preempted(*events.value());
    check_integrity();
  }

  void cancel() {
    // What a failed forward left in the cache must never be read.
    for (const int32_t slot : plan().slot_mapping()) {
      if (slot >= 0) {
        cache_[static_cast<size_t>(slot)] = ToyKey{kPoison, kPoison};
      }
    }
    const Status status = core_.cancel_step(plan());
    ASSERT_TRUE(status.ok()) << status.message();
    check_integrity();
  }

  /// Steps until nothing is left; fails after `max_steps`.
  void drain(int32_t max_steps = 20000) {
    while (core_.has_unfinished() && !testing::Test::HasFatalFailure()) {
      ASSERT_GT(max_steps--, 0) << "no termination";
      ASSERT_NE(forward(), PlanKind::kIdle);
      complete();
    }
  }

  void check_integrity() {
    const Status status = core_.check_integrity();
    ASSERT_TRUE(status.ok()) << status.message();
  }

 private:
  void note_preempted(const StepEvents& events) {
    for (const PreemptedRequest& preempted : events.preempted) {
      preempted_.insert(preempted.req_id);
    }
  }

  void check_plan(const std::map<int64_t, int32_t>& num_valid) {
    max_rows_seen_ = std::max(max_rows_seen_, plan().num_rows());
    EXPECT_LE(plan().num_rows(), options_.max_num_batched_tokens);
    EXPECT_LE(plan().num_reqs(), options_.max_num_reqs);
    std::set<int32_t> slots;
    for (const int32_t slot : plan().slot_mapping()) {
      if (slot >= 0) {
        EXPECT_TRUE(slots.insert(slot).second) << "slot " << slot << " twice";
        // I6: no write into a shared page.
        EXPECT_EQ(core_.kv_cache().pool().ref_count(slot / options_.page_size), 1);
      }
    }
    EXPECT_EQ(plan().need_kv_cache_store(), !slots.empty());
    for (const Request* request : core_.scheduler().running()) {
      const auto before = num_valid.find(request->req_id);
      if (before != num_valid.end()) {
        EXPECT_LE(request->buffer.num_valid(), before->second + 1);  // I9
      }
    }
  }

  void run_request(int32_t r) {
    StepPlan& plan = this->plan();
    const auto index = static_cast<size_t>(r);
    const int32_t row0 = plan.cu_seqlens_q()[index];
    const int32_t num_valid = plan.valid_slices()[index] - row0;
    const int32_t context_len = plan.context_lens()[index];
    ASSERT_GT(num_valid, 0) << "an empty forward";
    std::vector<ToyKey> context;
    for (int32_t p = 0; p < context_len; ++p) {
      const int32_t page =
          plan.page_tables()[index * static_cast<size_t>(plan.max_pages_per_req()) +
                             static_cast<size_t>(p / options_.page_size)];
      ASSERT_GE(page, 0);
      context.push_back(
          cache_[static_cast<size_t>(page * options_.page_size + p % options_.page_size)]);
      ASSERT_NE(context.back().layer1, kPoison) << "read of an unwritten slot at " << p;
    }
    std::vector<int64_t> tokens;
    std::vector<int32_t> visible;
    for (int32_t i = 0; i < num_valid; ++i) {
      const auto position = static_cast<int32_t>(plan.positions()[static_cast<size_t>(row0 + i)]);
      ASSERT_EQ(position, context_len + i);
      tokens.push_back(plan.input_ids()[static_cast<size_t>(row0 + i)]);
      const int32_t block_end = (position / options_.block_size + 1) * options_.block_size;
      visible.push_back(std::min(block_end, context_len + num_valid));
    }
    std::vector<ToyKey> keys;
    const std::vector<uint64_t> outputs = toy_forward(context, tokens, visible, keys);
    for (int32_t i = 0; i < num_valid; ++i) {
      const int32_t slot = plan.slot_mapping()[static_cast<size_t>(row0 + i)];
      if (slot >= 0) {
        cache_[static_cast<size_t>(slot)] = keys[static_cast<size_t>(i)];
      }
    }
    for (int32_t blk = plan.first_block(r); blk < plan.first_block(r + 1); ++blk) {
      sample_block(blk, row0, outputs);
    }
  }

  void sample_block(int32_t blk, int32_t row0, const std::vector<uint64_t>& outputs) {
    StepPlan& plan = this->plan();
    const auto index = static_cast<size_t>(blk);
    const auto width = static_cast<size_t>(options_.block_size);
    std::vector<int64_t> proposals(width, -1);
    std::vector<float> confidence(width, 0.0F);
    for (size_t rel = 0; rel < width; ++rel) {
      const int32_t row_index = plan.blk_row_index()[index * width + rel];
      const int32_t row = plan.blk_row0()[index] + static_cast<int32_t>(rel);
      EXPECT_EQ(plan.blk_tokens()[index * width + rel], plan.input_ids()[static_cast<size_t>(row)]);
      if (row_index < 0) {
        continue;
      }
      EXPECT_EQ(plan.logits_rows()[static_cast<size_t>(row_index)], row);
      const uint64_t output = outputs[static_cast<size_t>(row - row0)];
      proposals[rel] = toy_token(output, plan.row_uniforms()[static_cast<size_t>(row_index)],
                                 options_.vocab_size);
      confidence[rel] = toy_confidence(output);
      output_.confidence()[index * width + rel] = confidence[rel];
    }
    MaskFillBlock block;
    block.tokens = plan.blk_tokens().data() + index * width;
    block.proposals = proposals.data();
    block.confidence = confidence.data();
    block.block_size = options_.block_size;
    block.editable_start = plan.blk_editable_start()[index];
    block.mask_token_id = options_.mask_token_id;
    block.threshold = plan.blk_accept_threshold()[index];
    block.gate = plan.blk_force_top1()[index] != 0;
    const int32_t left = accept_by_threshold(block, output_.write_ids().data() + index * width);
    output_.masks_left()[index] = left;
    output_.flags()[index] = left == 0 ? kSamplerCommittable : 0;
  }

  EngineOptions options_;
  EngineCore core_;
  StepPlan plans_[2];
  SamplerOutput output_;
  std::vector<ToyKey> cache_;  // by slot
  std::map<int64_t, std::vector<int32_t>> streamed_;
  std::set<int64_t> preempted_;
  size_t num_steps_ = 0;
  int32_t max_rows_seen_ = 0;
};

}  // namespace diffulex::test
