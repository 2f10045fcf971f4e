// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "core/plan_simulator.h"
#include "core/toy_model.h"
#include "core/toy_sampler.h"

namespace diffulex::test {

/// Runs the plans of block-buffer strategies: any visibility of theirs, shifted logits, filters,
/// editing samplers and merge descriptors.
class EngineSimulator final : public PlanSimulator {
 public:
  explicit EngineSimulator(const EngineOptions& options)
      : PlanSimulator(options), saved_(static_cast<size_t>(options.max_num_reqs), kPoison) {}

  const std::set<int64_t>& preempted_ids() const { return preempted_; }
  int32_t max_rows_seen() const { return max_rows_seen_; }
  /// Tokens that were rewritten, positions predicted by a saved row, soft rows, filtered rows.
  int64_t num_edits() const { return num_edits_; }
  int64_t num_saved_reads() const { return num_saved_reads_; }
  int64_t num_soft_rows() const { return num_soft_rows_; }
  int64_t num_filtered_rows() const { return num_filtered_rows_; }
  /// Stop ids that an edit put in place or took away.
  int64_t num_stop_edits() const { return num_stop_edits_; }

 private:
  void before_schedule() override {
    num_valid_.clear();
    for (const Request* request : core().scheduler().running()) {
      num_valid_[request->req_id] = request->buffer.num_valid();
    }
  }

  void after_schedule() override {
    max_rows_seen_ = std::max(max_rows_seen_, plan().num_rows());
    for (const Request* request : core().scheduler().running()) {
      const auto before = num_valid_.find(request->req_id);
      if (before != num_valid_.end()) {
        EXPECT_LE(request->buffer.num_valid(), before->second + 1);  // I9
      }
    }
    int32_t num_filtered = 0;
    for (size_t i = 0; i < static_cast<size_t>(plan().num_logits_rows()); ++i) {
      num_filtered +=
          plan().row_top_k()[i] > 0 || plan().row_top_p()[i] < 1.0F || plan().row_min_p()[i] > 0.0F
              ? 1
              : 0;
    }
    EXPECT_EQ(plan().num_filtered_rows(), num_filtered);
    num_filtered_rows_ += num_filtered;
    int32_t num_sources = 0;
    for (const int32_t source : plan().logits_source()) {
      num_sources += source >= 0 ? 1 : 0;
    }
    EXPECT_EQ(plan().num_saved_source_rows(), num_sources);
  }

  // The row saved for a slot dies with its owner.
  void note_events(const StepEvents& events) override {
    for (const PreemptedRequest& preempted : events.preempted) {
      preempted_.insert(preempted.req_id);
      forget_unless_saved_in(events.step_id, preempted.request_slot);
    }
    for (const FinishedRequest& finished : events.finished) {
      forget_unless_saved_in(events.step_id, finished.request_slot);
    }
  }

  // A slot freed at the boundary before the step may have been taken and saved again since.
  void forget_unless_saved_in(int64_t step_id, int32_t slot) {
    if (slot >= 0 && saved_in_step_[slot] != step_id) {
      saved_[static_cast<size_t>(slot)] = kPoison;
    }
  }

  void run_request(int32_t r) override {
    StepPlan& plan = this->plan();
    const auto index = static_cast<size_t>(r);
    const int32_t row0 = plan.cu_seqlens_q()[index];
    const int32_t num_valid = plan.valid_slices()[index] - row0;
    const int32_t context_len = plan.context_lens()[index];
    ASSERT_GT(num_valid, 0) << "an empty forward";
    ASSERT_EQ(plan.cu_seqlens_q()[index + 1] - row0, num_valid) << "a row that does nothing";
    const std::vector<ToyKey> context = read_cache(r, context_len);
    std::vector<int64_t> tokens;
    std::vector<int32_t> visible;
    for (int32_t i = 0; i < num_valid; ++i) {
      const auto position = static_cast<int32_t>(plan.positions()[static_cast<size_t>(row0 + i)]);
      ASSERT_EQ(position, context_len + i);
      tokens.push_back(input_of(static_cast<size_t>(row0 + i)));
      visible.push_back(std::min(visible_end(index, position), context_len + num_valid));
    }
    std::vector<ToyKey> keys;
    const std::vector<uint64_t> outputs = toy_forward(context, tokens, visible, keys);
    store(r, keys);
    for (int32_t blk = plan.first_block(r); blk < plan.first_block(r + 1); ++blk) {
      sample_block(blk, row0, outputs);
    }
    save_row(index, row0, outputs);
  }

  void save_row(size_t r, int32_t row0, const std::vector<uint64_t>& outputs) {
    StepPlan& plan = this->plan();
    const int32_t last_row = plan.last_row_index()[r];
    EXPECT_TRUE(options_.logits_shift || last_row == -1);
    if (last_row < 0) {
      return;
    }
    const int32_t row = plan.logits_rows()[static_cast<size_t>(last_row)];
    EXPECT_GE(plan.slot_mapping()[static_cast<size_t>(row)], 0) << "not a stored row";
    const int32_t slot = plan.request_slots()[r];
    saved_[static_cast<size_t>(slot)] = outputs[static_cast<size_t>(row - row0)];
    saved_in_step_[slot] = plan.step_id();
  }

  /// The token of a row, or its soft embedding.
  int64_t input_of(size_t row) {
    StepPlan& plan = this->plan();
    const auto top_k = static_cast<size_t>(options_.token_merge_top_k);
    if (top_k == 0 || plan.merge_mask()[row] == 0) {
      return plan.input_ids()[row];
    }
    ToyDescriptor descriptor;
    for (size_t k = row * top_k; k < (row + 1) * top_k; ++k) {
      descriptor.ids.push_back(plan.merge_topk_ids()[k]);
      descriptor.probs.push_back(plan.merge_topk_probs()[k]);
    }
    descriptor.residual = plan.merge_residual()[row];
    ++num_soft_rows_;
    return toy_soft_token(descriptor);
  }

  /// Keys that row mode 0, 1 or 3 lets a position see, counted from position 0.
  int32_t visible_end(size_t r, int32_t position) {
    StepPlan& plan = this->plan();
    if (plan.row_mode()[r] == static_cast<int32_t>(RowMode::kPrefillPrefixFull)) {
      EXPECT_EQ(plan.context_lens()[r], 0);
      if (position < plan.padded_prefix_lens()[r]) {
        return position < plan.prefix_lens()[r] ? plan.prefix_lens()[r]
                                                : plan.padded_prefix_lens()[r];
      }
    }
    const int32_t size = options_.block_size;
    const int32_t first = plan.padded_prefix_lens()[r] % size;  // blocks are counted from there
    return position < first ? first : first + ((position - first) / size + 1) * size;
  }

  /// The row that predicts relative position `rel` of a block: the block's own, or the one before.
  int32_t predictor(size_t blk, int32_t rel) {
    StepPlan& plan = this->plan();
    if (!options_.logits_shift) {
      return plan.blk_row0()[blk] + rel;
    }
    return rel > 0 ? plan.blk_row0()[blk] + rel - 1 : plan.blk_prev_row()[blk];
  }

  /// Model output for a position with row index `row_index`.
  uint64_t output_for(size_t blk, int32_t rel, int32_t row_index, int32_t row0,
                      const std::vector<uint64_t>& outputs) {
    StepPlan& plan = this->plan();
    const int32_t slot = plan.blk_request_slot()[blk];
    const int32_t row = predictor(blk, rel);
    if (row >= 0) {
      EXPECT_EQ(plan.logits_rows()[static_cast<size_t>(row_index)], row);
      EXPECT_TRUE(!options_.logits_shift ||
                  plan.logits_source()[static_cast<size_t>(row_index)] == -1);
      return outputs[static_cast<size_t>(row - row0)];
    }
    ++num_saved_reads_;
    if (row_index < plan.num_logits_rows()) {
      EXPECT_EQ(plan.logits_source()[static_cast<size_t>(row_index)], slot);
      EXPECT_GT(plan.row_inv_temperature()[static_cast<size_t>(row_index)], 0.0F);
    } else {
      EXPECT_EQ(row_index, plan.saved_row(slot));
    }
    EXPECT_NE(saved_[static_cast<size_t>(slot)], kPoison) << "no saved row";
    return saved_[static_cast<size_t>(slot)];
  }

  void check_row(int32_t row_index, const SamplingParams& params) {
    StepPlan& plan = this->plan();
    if (row_index >= plan.num_logits_rows()) {
      EXPECT_FALSE(params.is_sampled());
      return;
    }
    const auto at = static_cast<size_t>(row_index);
    EXPECT_EQ(plan.row_inv_temperature()[at],
              params.is_sampled() ? 1.0F / params.temperature : 0.0F);
    EXPECT_EQ(plan.row_top_k()[at], params.is_filtered() ? params.top_k : 0);
    EXPECT_EQ(plan.row_top_p()[at], params.is_filtered() ? params.top_p : 1.0F);
    EXPECT_EQ(plan.row_min_p()[at], params.is_filtered() ? params.min_p : 0.0F);
  }

  void sample_block(int32_t blk, int32_t row0, const std::vector<uint64_t>& outputs) {
    StepPlan& plan = this->plan();
    const auto index = static_cast<size_t>(blk);
    const auto width = static_cast<size_t>(options_.block_size);
    const int64_t req_id = plan.req_ids()[static_cast<size_t>(plan.blk_req()[index])];
    const Request& request = *core().find_request(req_id);
    EXPECT_EQ(plan.blk_request_slot()[index], request.request_slot);
    ToyBlock block;
    block.tokens.assign(plan.blk_tokens().begin() + index * width,
                        plan.blk_tokens().begin() + (index + 1) * width);
    block.proposals.assign(width, -1);
    block.confidence.assign(width, 0.0F);
    block.editable_start = plan.blk_editable_start()[index];
    block.mask_token_id = options_.mask_token_id;
    block.gate = plan.blk_force_top1()[index] != 0;
    block.accept_threshold = plan.blk_accept_threshold()[index];
    block.edit_threshold =
        plan.blk_edit_threshold().empty() ? 0.0F : plan.blk_edit_threshold()[index];
    block.open_steps = plan.blk_open_steps()[index];
    block.post_edit_steps = plan.blk_post_edit_steps()[index];
    for (size_t rel = 0; rel < width; ++rel) {
      const int32_t row_index = plan.blk_row_index()[index * width + rel];
      const auto row = static_cast<size_t>(plan.blk_row0()[index]) + rel;
      EXPECT_EQ(block.tokens[rel], plan.input_ids()[row]);
      const bool is_editable = static_cast<int32_t>(rel) >= block.editable_start;
      const bool is_open = is_editable && block.tokens[rel] == options_.mask_token_id;
      EXPECT_TRUE(row_index >= 0 || !is_open) << "an open position without a row";
      EXPECT_TRUE(row_index >= 0 || !is_editable || !options_.rewrites_tokens());
      if (row_index < 0) {
        continue;
      }
      check_row(row_index, request.params);
      const uint64_t value = output_for(index, static_cast<int32_t>(rel), row_index, row0, outputs);
      const double uniform = row_index < plan.num_logits_rows()
                                 ? plan.row_uniforms()[static_cast<size_t>(row_index)]
                                 : 0.5;
      block.proposals[rel] = toy_token(value, uniform, options_.vocab_size);
      block.confidence[rel] = toy_confidence(value);
      output().confidence()[index * width + rel] = block.confidence[rel];
    }
    apply_verdict(index, block, toy_sample(options_, block));
  }

  void apply_verdict(size_t index, const ToyBlock& block, const ToyVerdict& verdict) {
    const auto width = static_cast<size_t>(options_.block_size);
    const auto top_k = static_cast<size_t>(options_.token_merge_top_k);
    int32_t left = 0;
    for (size_t rel = 0; rel < width; ++rel) {
      const size_t at = index * width + rel;
      output().write_ids()[at] = verdict.writes[rel];
      const bool is_open = block.tokens[rel] == options_.mask_token_id;
      left +=
          is_open && static_cast<int32_t>(rel) >= block.editable_start && verdict.writes[rel] < 0
              ? 1
              : 0;
      if (!is_open && verdict.writes[rel] >= 0 && verdict.writes[rel] != block.tokens[rel]) {
        ++num_edits_;
        num_stop_edits_ += block.tokens[rel] == 1 || verdict.writes[rel] == 1 ? 1 : 0;
      }
      if (top_k > 0 && verdict.descriptors[rel].is_valid()) {
        const ToyDescriptor& descriptor = verdict.descriptors[rel];
        output().merge_valid()[at] = 1;
        output().merge_residual()[at] = descriptor.residual;
        std::copy(descriptor.ids.begin(), descriptor.ids.end(),
                  output().merge_topk_ids().begin() + at * top_k);
        std::copy(descriptor.probs.begin(), descriptor.probs.end(),
                  output().merge_topk_probs().begin() + at * top_k);
      }
    }
    output().masks_left()[index] = left;
    output().flags()[index] = verdict.flags;
    output().same_token_ratio()[index] = verdict.same_token_ratio;
  }

  std::vector<uint64_t> saved_;  // by request slot: output of the saved row
  std::map<int32_t, int64_t> saved_in_step_;
  std::map<int64_t, int32_t> num_valid_;
  std::set<int64_t> preempted_;
  int32_t max_rows_seen_ = 0;
  int64_t num_edits_ = 0;
  int64_t num_saved_reads_ = 0;
  int64_t num_soft_rows_ = 0;
  int64_t num_filtered_rows_ = 0;
  int64_t num_stop_edits_ = 0;
};

}  // namespace diffulex::test
