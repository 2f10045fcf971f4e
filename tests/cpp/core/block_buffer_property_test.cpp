// SPDX-License-Identifier: Apache-2.0
// The variants of block-buffer decoding (d2f, shifted logits, edit, dmax) under random scripts
// against the brute-force decoder: invariants after every step, termination, no page leak, no read
// of an unwritten slot or of a foreign saved row, and for every request the tokens of an
// undisturbed run alone.

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/block_buffer_variants.h"
#include "core/brute_force_decoder.h"
#include "core/engine_simulator.h"
#include "core/property_script.h"

namespace diffulex {
namespace {

using test::BruteForceDecoder;
using test::BruteForceResult;
using test::EngineSimulator;
using test::ExpectedResult;
using test::kVariants;
using test::ScriptCoverage;
using test::Variant;

class Script final : public test::PropertyScript {
 public:
  Script(const Variant& variant, uint32_t seed) : PropertyScript(seed) {
    variant.apply(options_);
    options_.block_size = pick({4, 8});
    options_.page_size = pick({4, 8, 16, 32});
    options_.buffer_size = uniform(1, 6);
    options_.max_model_len = uniform(20, 90);
    options_.max_num_reqs = uniform(1, 5);
    options_.vocab_size = pick({12, 60, 400});
    options_.mask_token_id = 0;
    options_.stop_token_ids = {1};
    options_.thresholds.add_block = pick({0.0F, 0.1F, 0.5F, 1.0F});
    options_.thresholds.semi_complete = pick({0.0F, 0.5F, 0.9F, 1.0F});
    options_.thresholds.accept = pick({0.0F, 0.3F, 0.7F, 0.95F, 1.0F});
    options_.thresholds.edit = pick({0.0F, 0.5F, 0.9F, 1.0F});
    options_.thresholds.token_stability = pick({0.0F, 0.5F, 1.0F});
    options_.enable_chunked_prefill = options_.strategy != "d2f" && uniform(0, 1) == 0;
    options_.masked_rows_only = uniform(0, 1) == 0;
    const int32_t block_size = options_.block_size;
    const int32_t padded = (options_.max_model_len + block_size - 1) / block_size * block_size;
    const int32_t longest = std::max(padded + block_size, options_.decode_rows());
    const int32_t least = options_.enable_chunked_prefill ? options_.decode_rows() : longest;
    draw_common_options(options_.num_pages_for(options_.max_model_len), least);
    if (draws_max_nfe_) {
      options_.max_num_batched_tokens = std::max(options_.max_num_batched_tokens, longest);
    }
  }

 private:
  ExpectedResult expect(int64_t /*req_id*/, const std::vector<int32_t>& prompt,
                        const SamplingParams& params) override {
    const BruteForceResult result = BruteForceDecoder(options_, prompt, params).decode();
    return ExpectedResult{result.output, result.reason, result.nfe};
  }

  void draw_params(SamplingParams& params) override {
    if (uniform(0, 3) == 0) {
      params.add_block_threshold = pick({0.0F, 0.5F, 1.0F});
      params.semi_complete_threshold = pick({0.0F, 0.5F, 1.0F});
    }
    if (uniform(0, 3) == 0) {
      params.edit_threshold = pick({0.0F, 0.7F});
      params.token_stability_threshold = pick({0.0F, 1.0F});
    }
    if (uniform(0, 2) == 0) {
      params.top_k = uniform(-1, 5);
      params.top_p = pick({0.5F, 1.0F, 1.5F});
      params.min_p = pick({0.0F, 0.1F});
    }
  }

  std::vector<int32_t> special_lengths() const override {
    const int32_t block = options_.block_size;
    return {1,
            block - 1,
            block,
            block + 1,
            2 * block,
            options_.page_size - 1,
            options_.page_size,
            options_.decode_rows(),
            options_.max_model_len - 1};
  }
};

class BlockBufferVariant : public testing::TestWithParam<Variant> {};

TEST_P(BlockBufferVariant, EqualsTheBruteForceDecoder) {
  constexpr int32_t kNumScripts = 400;
  const Variant& variant = GetParam();
  ScriptCoverage seen;
  int64_t num_edits = 0;
  int64_t num_stop_edits = 0;
  int64_t num_saved_reads = 0;
  int64_t num_soft_rows = 0;
  int64_t num_filtered_rows = 0;
  for (int32_t i = 0; i < kNumScripts && !HasFailure(); ++i) {
    Script script(variant, static_cast<uint32_t>(i));
    SCOPED_TRACE("script " + std::to_string(i) + ": block " +
                 std::to_string(script.options().block_size) + ", buffer " +
                 std::to_string(script.options().buffer_size) + ", page " +
                 std::to_string(script.options().page_size));
    EngineSimulator sim(script.options());
    script.run(sim);
    seen.add(script.stats(), script.num_capped());
    num_edits += sim.num_edits();
    num_stop_edits += sim.num_stop_edits();
    num_saved_reads += sim.num_saved_reads();
    num_soft_rows += sim.num_soft_rows();
    num_filtered_rows += sim.num_filtered_rows();
  }
  EngineOptions options;
  variant.apply(options);
  // The scripts must reach what they are meant to test, and nothing else.
  EXPECT_GT(seen.num_preemptions, kNumScripts);
  EXPECT_GT(seen.num_cancelled_steps, kNumScripts / 2);
  EXPECT_GT(seen.num_aborted, kNumScripts / 4);
  EXPECT_GT(seen.num_capped, kNumScripts / 10);
  EXPECT_GT(num_filtered_rows, kNumScripts);
  const auto reaches = [](bool is_meant, int64_t count) {
    return is_meant ? count > kNumScripts : count == 0;
  };
  EXPECT_PRED2(reaches, options.strategy != "d2f", seen.num_prefix_hit_tokens);
  EXPECT_PRED2(reaches, options.rewrites_tokens(), num_edits);
  EXPECT_PRED2(reaches, options.rewrites_tokens(), num_stop_edits);
  EXPECT_PRED2(reaches, options.logits_shift, num_saved_reads);
  EXPECT_PRED2(reaches, options.token_merge_top_k > 0, num_soft_rows);
}

INSTANTIATE_TEST_SUITE_P(All, BlockBufferVariant, testing::ValuesIn(kVariants),
                         [](const auto& tested) { return std::string(tested.param.name); });

}  // namespace
}  // namespace diffulex
