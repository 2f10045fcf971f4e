// SPDX-License-Identifier: Apache-2.0
#include "edge/row_stage.h"

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "diffulex/ops/accept.h"
#include "diffulex/ops/sampling.h"

namespace diffulex {
namespace {

// A demoted proposal: below every threshold and last in every ranking.
constexpr float kDemotedProbability = -1.0F;
constexpr float kDemotedSecond = 3.0F;
constexpr float kDemotedEntropy = 1e30F;

template <typename T>
constexpr DType dtype_of() {
  return std::is_floating_point_v<T> ? (sizeof(T) == 4 ? DType::kF32 : DType::kF64)
         : sizeof(T) == 8            ? DType::kI64
         : sizeof(T) == 4            ? DType::kI32
                                     : DType::kU8;
}

/// Contiguous tensor; the ops write to their outputs only.
template <typename T>
TensorRef ref(const T* data, std::initializer_list<int64_t> sizes) {
  TensorRef tensor;
  tensor.data = const_cast<T*>(data);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  tensor.dtype = dtype_of<T>();
  tensor.rank = static_cast<int32_t>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), tensor.size);
  int64_t stride = 1;
  for (int32_t dim = tensor.rank - 1; dim >= 0; --dim) {
    tensor.stride[dim] = stride;
    stride *= tensor.size[dim];
  }
  return tensor;
}

TensorRef optional_ids(const std::vector<int64_t>& ids) {
  return ids.empty() ? TensorRef{} : ref(ids.data(), {static_cast<int64_t>(ids.size())});
}

}  // namespace

EdgeRowStage::EdgeRowStage(const EdgeOptions& options, const StepPlan& plan)
    : options_(options), vocab_size_(options.engine.vocab_size) {
  const auto records = static_cast<size_t>(plan.max_logits_rows() + plan.max_num_reqs());
  ids_.resize(records);
  stats_.resize(records * kTokenStatsColumns);
  if (options.engine.logits_shift) {
    saved_.resize(static_cast<size_t>(vocab_size_));
  }
  const size_t bytes =
      token_stats_workspace_bytes(plan.max_logits_rows(), vocab_size_, 0, Device::kCpu);
  workspace_.resize(bytes / sizeof(WorkspaceLine) + 1);
  context_.workspace = workspace_.data();
  context_.workspace_bytes = workspace_.size() * sizeof(WorkspaceLine);
}

Status EdgeRowStage::run(StepPlan& plan, const float* logits, SamplerOutput& output) {
  output.clear(plan.num_blocks());
  if (plan.num_logits_rows() > 0) {
    DIFFULEX_RETURN_IF_ERROR(record(plan, logits));
    save(plan, logits);
    if (options_.engine.has_dual_cache() && plan.seed_row()[0] >= 0) {
      output.pending_next_token()[0] = ids_[static_cast<size_t>(plan.seed_row()[0])];
    }
  }
  return plan.num_blocks() > 0 ? accept(plan, output) : Status();
}

Status EdgeRowStage::record(StepPlan& plan, const float* logits) {
  const int64_t rows = plan.num_logits_rows();
  TokenStatsParams params;
  params.logits = ref(logits, {rows, vocab_size_});
  if (plan.num_saved_source_rows() > 0) {
    source_.resize(static_cast<size_t>(rows));
    for (size_t i = 0; i < source_.size(); ++i) {
      // The saved row follows the rows of the step.
      source_[i] =
          static_cast<int32_t>(plan.logits_source()[i] >= 0 ? rows : static_cast<int64_t>(i));
    }
    params.extra_logits = ref(saved_.data(), {1, vocab_size_});
    params.row_index = ref(source_.data(), {rows});
  }
  if (plan.any_sampled()) {
    params.inv_temperature = ref(plan.row_inv_temperature().data(), {rows});
    params.uniforms = ref(plan.row_uniforms().data(), {rows});
  }
  params.forbidden_ids = optional_ids(options_.sampler.forbidden_token_ids);
  params.ids = ref(ids_.data(), {rows});
  params.stats = ref(stats_.data(), {rows, kTokenStatsColumns});
  params.vocab_limit = options_.sampler.vocab_limit;
  params.exclusion = options_.sampler.exclusion;
  DIFFULEX_RETURN_IF_ERROR(token_stats(params, context_));
  if (plan.num_filtered_rows() > 0) {
    DIFFULEX_RETURN_IF_ERROR(filter(plan, params));
  }
  demote(rows);
  return {};
}

Status EdgeRowStage::filter(StepPlan& plan, const TokenStatsParams& rows) {
  const int64_t num_rows = rows.logits.size[0];
  SampleFilteredParams params;
  params.logits = rows.logits;
  params.extra_logits = rows.extra_logits;
  params.row_index = rows.row_index;
  params.inv_temperature = rows.inv_temperature;
  params.uniforms = rows.uniforms;
  params.top_k = ref(plan.row_top_k().data(), {num_rows});
  params.top_p = ref(plan.row_top_p().data(), {num_rows});
  params.min_p = ref(plan.row_min_p().data(), {num_rows});
  params.forbidden_ids = rows.forbidden_ids;
  params.ids = rows.ids;
  params.stats = rows.stats;
  params.vocab_limit = rows.vocab_limit;
  params.exclusion = rows.exclusion;
  params.filter_order = options_.sampler.filter_order;
  params.confidence_space = options_.sampler.confidence_space;
  return sample_filtered(params, context_);
}

void EdgeRowStage::demote(int64_t num_rows) {
  const std::vector<int64_t>& demoted = options_.sampler.demote_token_ids;
  for (size_t row = 0; row < static_cast<size_t>(num_rows); ++row) {
    if (std::find(demoted.begin(), demoted.end(), ids_[row]) != demoted.end()) {
      float* stats = stats_.data() + row * kTokenStatsColumns;
      stats[kStatsConfidence] = kDemotedProbability;
      stats[kStatsRawConfidence] = kDemotedProbability;
      stats[kStatsSecondProb] = kDemotedSecond;
      stats[kStatsEntropy] = kDemotedEntropy;
    }
  }
}

void EdgeRowStage::save(StepPlan& plan, const float* logits) {
  if (!options_.engine.logits_shift || plan.last_row_index()[0] < 0) {
    return;
  }
  const auto row = static_cast<size_t>(plan.last_row_index()[0]);
  const auto place = static_cast<size_t>(plan.saved_row(plan.request_slots()[0]));
  ids_[place] = ids_[row];
  std::copy_n(stats_.data() + row * kTokenStatsColumns, kTokenStatsColumns,
              stats_.data() + place * kTokenStatsColumns);
  std::copy_n(logits + row * saved_.size(), saved_.size(), saved_.data());
}

Status EdgeRowStage::accept(StepPlan& plan, SamplerOutput& output) {
  const int64_t blocks = plan.num_blocks();
  const EdgeSampler& sampler = options_.sampler;
  gate_.resize(static_cast<size_t>(blocks));
  open_steps_.resize(gate_.size());
  for (size_t blk = 0; blk < gate_.size(); ++blk) {
    gate_[blk] = sampler.is_gated ? plan.blk_force_top1()[blk] : 1;
    open_steps_[blk] =
        sampler.is_gated ? plan.blk_open_steps()[blk] : plan.blk_total_steps()[blk] - 1;
  }
  const auto records = static_cast<int64_t>(ids_.size());
  const int64_t size = plan.block_size();
  const auto set_rows = [&](auto& params) {
    params.tokens = ref(plan.blk_tokens().data(), {blocks, size});
    params.row_index = ref(plan.blk_row_index().data(), {blocks, size});
    params.editable_start = ref(plan.blk_editable_start().data(), {blocks});
    params.valid_len = ref(plan.blk_valid_len().data(), {blocks});
    params.accept_threshold = ref(plan.blk_accept_threshold().data(), {blocks});
    params.write_ids = ref(output.write_ids().data(), {blocks, size});
    params.confidence = ref(output.confidence().data(), {blocks, size});
    params.masks_left = ref(output.masks_left().data(), {blocks});
    params.flags = ref(output.flags().data(), {blocks});
    params.gate = ref(gate_.data(), {blocks});
    params.open_steps = ref(open_steps_.data(), {blocks});
    params.ids = ref(ids_.data(), {records});
    params.stats = ref(stats_.data(), {records, kTokenStatsColumns});
    params.mask_token_id = options_.engine.mask_token_id;
    params.confidence_kind = sampler.confidence_type;
    params.raw_confidence = sampler.raw_confidence;
  };
  if (options_.engine.is_editing) {
    AcceptEditParams params;
    set_rows(params);
    params.edit_threshold = ref(plan.blk_edit_threshold().data(), {blocks});
    params.post_edit_steps = ref(plan.blk_post_edit_steps().data(), {blocks});
    params.max_post_edit_steps = ref(plan.blk_max_post_edit_steps().data(), {blocks});
    params.same_token_ratio = ref(output.same_token_ratio().data(), {blocks});
    return accept_edit(params, context_);
  }
  AcceptMaskFillParams params;
  set_rows(params);
  params.rule = sampler.acceptance_rule;
  params.denoising_steps = sampler.denoising_steps;
  params.force_accept_last_step = sampler.force_accept_last_step;
  params.factor = sampler.factor;
  params.entropy_bound = sampler.entropy_bound;
  params.low_threshold = sampler.low_threshold;
  return accept_mask_fill(params, context_);
}

}  // namespace diffulex
