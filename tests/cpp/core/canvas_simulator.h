// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include <gtest/gtest.h>

#include "core/canvas_decoder.h"
#include "core/plan_simulator.h"

namespace diffulex::test {

/// Runs diffusion_gemma plans: encoder and decoder rows as the pass kinds say, self-conditioning
/// signals kept by request slot as a device would.
class CanvasSimulator final : public PlanSimulator {
 public:
  explicit CanvasSimulator(const EngineOptions& options) : PlanSimulator(options) {}

  /// Plans in which encoder and decoder rows were mixed.
  int32_t num_mixed_passes() const { return num_mixed_passes_; }

 private:
  struct Signal {
    int64_t req_id = -1;
    int32_t start = -1;  // canvas
    uint64_t value = 0;
  };

  void run_request(int32_t r) override {
    StepPlan& plan = this->plan();
    const auto index = static_cast<size_t>(r);
    row0_ = plan.cu_seqlens_q()[index];
    num_rows_ = plan.cu_seqlens_q()[index + 1] - row0_;
    num_valid_ = plan.valid_slices()[index] - row0_;
    context_len_ = plan.context_lens()[index];
    ASSERT_GT(num_valid_, 0) << "an empty forward";
    EXPECT_TRUE(r >= plan.num_decode_reqs() || num_rows_ == options_.block_size);
    for (int32_t i = 0; i < num_valid_; ++i) {
      ASSERT_EQ(plan.positions()[static_cast<size_t>(row0_ + i)], context_len_ + i);
    }
    const auto mode = static_cast<RowMode>(plan.row_mode()[index]);
    num_decoders_ = r == 0 ? 0 : num_decoders_;
    num_decoders_ += mode == RowMode::kCanvas ? 1 : 0;
    if (r + 1 == plan.num_reqs()) {
      num_mixed_passes_ += num_decoders_ > 0 && num_decoders_ < plan.num_reqs() ? 1 : 0;
    }
    if (mode == RowMode::kCausal) {
      encode(r);
    } else {
      ASSERT_EQ(mode, RowMode::kCanvas);
      denoise(r);
    }
  }

  void encode(int32_t r) {
    StepPlan& plan = this->plan();
    EXPECT_EQ(plan.mask_kinds()[static_cast<size_t>(r)], 0);  // causal
    EXPECT_EQ(num_valid_, num_rows_);
    EXPECT_EQ(plan.first_block(r), plan.first_block(r + 1));  // nothing is sampled
    std::vector<int64_t> inputs;
    std::vector<int32_t> visible;
    for (int32_t i = 0; i < num_rows_; ++i) {
      const auto row = static_cast<size_t>(row0_ + i);
      EXPECT_EQ(plan.row_pass_kind()[row], 0);
      EXPECT_EQ(plan.row_self_cond()[row], -1);
      EXPECT_GE(plan.slot_mapping()[row], 0);
      inputs.push_back(plan.input_ids()[row]);
      visible.push_back(context_len_ + i + 1);
    }
    std::vector<ToyKey> keys;
    (void)toy_forward(read_cache(r, context_len_), inputs, visible, keys);
    store(r, keys);
  }

  void denoise(int32_t r) {
    StepPlan& plan = this->plan();
    EXPECT_LT(r, plan.num_decode_reqs());
    EXPECT_EQ(plan.mask_kinds()[static_cast<size_t>(r)], 2);  // full
    ASSERT_EQ(plan.first_block(r + 1), plan.first_block(r) + 1);
    const auto blk = static_cast<size_t>(plan.first_block(r));
    ASSERT_EQ(plan.blk_valid_len()[blk], num_valid_);
    EXPECT_EQ(num_valid_, std::min(options_.block_size, options_.max_model_len - context_len_));
    EXPECT_EQ(plan.blk_start()[blk], context_len_);
    EXPECT_EQ(plan.blk_row0()[blk], row0_);
    EXPECT_EQ(plan.blk_editable_start()[blk], 0);
    const int32_t steps_left = plan.blk_steps_left()[blk];
    const bool is_first = steps_left == options_.max_denoising_steps;
    EXPECT_EQ(plan.blk_step()[blk], options_.max_denoising_steps - steps_left);
    EXPECT_EQ(plan.blk_stable_run()[blk] == -1, is_first);
    std::vector<int64_t> inputs;
    for (int32_t i = 0; i < num_rows_; ++i) {
      const auto row = static_cast<size_t>(row0_ + i);
      EXPECT_EQ(plan.row_pass_kind()[row], 1);
      EXPECT_EQ(plan.slot_mapping()[row], -1);
      if (i < num_valid_) {
        inputs.push_back(toy_decoder_input(plan.input_ids()[row], read_signal(r, i, is_first)));
      } else {
        EXPECT_EQ(plan.row_self_cond()[row], -1);
        EXPECT_EQ(plan.positions()[row], 0);
      }
    }
    const std::vector<int32_t> visible(inputs.size(), context_len_ + num_valid_);
    std::vector<ToyKey> dropped;
    outputs_ = toy_forward(read_cache(r, context_len_), inputs, visible, dropped);
    sample(r, blk);
  }

  uint64_t read_signal(int32_t r, int32_t rel, bool is_first) {
    StepPlan& plan = this->plan();
    const int32_t source = plan.row_self_cond()[static_cast<size_t>(row0_ + rel)];
    EXPECT_EQ(source < 0, is_first);
    if (source < 0) {
      return 0;
    }
    EXPECT_EQ(source, plan.request_slots()[static_cast<size_t>(r)] * options_.block_size + rel);
    const Signal& signal = signals_[source];
    // A signal of another request, canvas or attempt would be read by mistake.
    EXPECT_EQ(signal.req_id, plan.req_ids()[static_cast<size_t>(r)]);
    EXPECT_EQ(signal.start, context_len_);
    return signal.value;
  }

  void sample(int32_t r, size_t blk) {
    StepPlan& plan = this->plan();
    const auto width = static_cast<size_t>(options_.block_size);
    std::vector<ToyCanvasRow> rows;
    for (size_t rel = 0; rel < width; ++rel) {
      const int32_t row_index = plan.blk_row_index()[blk * width + rel];
      if (static_cast<int32_t>(rel) >= num_valid_) {
        EXPECT_EQ(row_index, -1);
        continue;
      }
      ASSERT_GE(row_index, 0);
      const auto entry = static_cast<size_t>(row_index);
      EXPECT_EQ(plan.logits_rows()[entry], row0_ + static_cast<int32_t>(rel));
      EXPECT_EQ(plan.blk_tokens()[blk * width + rel],
                plan.input_ids()[static_cast<size_t>(row0_) + rel]);
      rows.push_back(toy_canvas_row(outputs_[rel], context_len_ + static_cast<int32_t>(rel),
                                    plan.row_uniforms()[entry], plan.row_inv_temperature()[entry],
                                    options_.vocab_size));
    }
    const std::vector<bool> accepted = accept_by_entropy(rows);
    const int64_t* previous = plan.blk_prev_argmax().data() + blk * width;
    bool is_equal = plan.blk_stable_run()[blk] >= 0;
    for (size_t rel = 0; rel < rows.size(); ++rel) {
      is_equal = is_equal && rows[rel].argmax == previous[rel];
    }
    const int32_t run = is_equal ? plan.blk_stable_run()[blk] + 1 : 0;
    const bool is_converged = (run >= options_.stability_threshold && is_confident(rows)) ||
                              plan.blk_steps_left()[blk] == 1;
    for (size_t rel = 0; rel < rows.size(); ++rel) {
      const size_t entry = blk * width + rel;
      output().canvas_argmax()[entry] = rows[rel].argmax;
      const int64_t next = accepted[rel] ? rows[rel].draw : plan.blk_renoise()[entry];
      output().write_ids()[entry] = is_converged ? rows[rel].argmax : next;
      output().confidence()[entry] = 1.0F - rows[rel].entropy;
      const int32_t source = plan.request_slots()[static_cast<size_t>(r)] * options_.block_size +
                             static_cast<int32_t>(rel);
      signals_[source] =
          Signal{plan.req_ids()[static_cast<size_t>(r)], context_len_, rows[rel].signal};
    }
    output().flags()[blk] = is_converged ? kSamplerConverged : 0;
  }

  std::map<int32_t, Signal> signals_;  // by row of the signal buffer
  std::vector<uint64_t> outputs_;      // of the request that runs
  int32_t row0_ = 0;
  int32_t num_rows_ = 0;
  int32_t num_valid_ = 0;
  int32_t context_len_ = 0;
  int32_t num_decoders_ = 0;  // of the plan so far
  int32_t num_mixed_passes_ = 0;
};

}  // namespace diffulex::test
