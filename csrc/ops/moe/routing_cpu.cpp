// SPDX-License-Identifier: Apache-2.0

// moe_topk and router_gemm: one row at a time; results do not depend on the other rows.

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu_ops.h"
#include "ops/moe/routing_check.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMaxFloat = std::numeric_limits<float>::max();
constexpr float kTinySum = 1e-20F;

struct RouterScores;
struct RouterChoices;
struct RouterGroups;
struct RouterRows;

/// Turns logits into scores in place; false when no logit is finite or +inf.
bool score_row(RouterScoring scoring, float* values, int64_t n) {
  float highest = -kInfinity;
  for (int64_t i = 0; i < n; ++i) {
    values[i] = std::isnan(values[i]) ? -kInfinity : std::min(values[i], kMaxFloat);
    highest = std::max(highest, values[i]);
  }
  if (highest == -kInfinity) {
    return false;
  }
  const KernelTable& kernels = kernel_table();
  if (scoring == RouterScoring::kSigmoid) {
    for (int64_t i = 0; i < n; ++i) {
      values[i] = std::max(values[i], -kMaxFloat);
    }
    kernels.exp_shifted(values, -1.0F, 0.0F, n);
    for (int64_t i = 0; i < n; ++i) {
      values[i] = 1.0F / (1.0F + values[i]);
    }
    return true;
  }
  kernels.exp_shifted(values, 1.0F, highest, n);
  float sum = 0.0F;
  for (int64_t i = 0; i < n; ++i) {
    sum += values[i];
  }
  for (int64_t i = 0; i < n; ++i) {
    values[i] /= sum;
  }
  return true;
}

/// Value a group of `size` consecutive choices is ranked by.
float group_value(GroupScore kind, const float* choices, int64_t size) {
  float first = -kInfinity;
  float second = -kInfinity;
  for (int64_t i = 0; i < size; ++i) {
    second = std::max(second, std::min(first, choices[i]));
    first = std::max(first, choices[i]);
  }
  return kind == GroupScore::kMax || size == 1 ? first : first + second;
}

/// Leaves only the choices of the best groups; equal groups go by their number.
void keep_best_groups(const MoeTopkParams& params, float* choices, int64_t num_experts) {
  const int64_t size = num_experts / params.n_group;
  float* values = thread_floats<RouterGroups>(params.n_group);
  for (int64_t group = 0; group < params.n_group; ++group) {
    values[group] = group_value(params.group_score, choices + group * size, size);
  }
  for (int64_t group = 0; group < params.n_group; ++group) {
    int64_t better = 0;
    for (int64_t other = 0; other < params.n_group; ++other) {
      const bool wins =
          values[other] > values[group] || (values[other] == values[group] && other < group);
      better += wins ? 1 : 0;
    }
    if (better >= params.topk_group) {
      std::fill_n(choices + group * size, size, -kInfinity);
    }
  }
}

/// The K largest choices, best first, lower ids first among equals. -inf can be chosen, NaN marks
/// what was taken.
void choose_experts(float* choices, int64_t num_experts, int32_t top_k, int32_t* ids) {
  for (int32_t k = 0; k < top_k; ++k) {
    int64_t best = -1;
    for (int64_t i = 0; i < num_experts; ++i) {
      if (!std::isnan(choices[i]) && (best < 0 || choices[i] > choices[best])) {
        best = i;
      }
    }
    ids[k] = static_cast<int32_t>(best);
    choices[best] = std::numeric_limits<float>::quiet_NaN();
  }
}

void fill_row(int32_t* ids, float* weights, int32_t top_k, bool is_valid) {
  for (int32_t k = 0; k < top_k; ++k) {
    ids[k] = is_valid ? k : -1;
    weights[k] = 0.0F;
  }
}

void weigh_row(const MoeTopkParams& params, const float* scores, const int32_t* ids,
               float* weights) {
  float sum = 0.0F;
  for (int32_t k = 0; k < params.top_k; ++k) {
    weights[k] = scores[ids[k]];
    sum += weights[k];
  }
  const float divisor = params.renormalize && params.top_k > 1 ? sum + kTinySum : 1.0F;
  const float* scale = params.expert_scale.as<const float>();
  for (int32_t k = 0; k < params.top_k; ++k) {
    weights[k] = weights[k] / divisor * params.routed_scaling;
    if (params.expert_scale.present()) {
      weights[k] *= scale[ids[k]];
    }
  }
}

void route_row(const MoeTopkParams& params, int64_t row) {
  int32_t* ids = params.ids.as<int32_t>() + row * params.ids.stride[0];
  float* weights = params.weights.as<float>() + row * params.weights.stride[0];
  if (params.token_valid.present() && params.token_valid.as<const uint8_t>()[row] == 0) {
    fill_row(ids, weights, params.top_k, false);
    return;
  }
  const int64_t num_experts = params.logits.size[1];
  float* scores = thread_floats<RouterScores>(num_experts);
  kernel_table().load(GatherArgs{element_at(params.logits, row * params.logits.stride[0]),
                                 params.logits.dtype, num_experts, num_experts, num_experts},
                      scores);
  if (!score_row(params.scoring, scores, num_experts)) {
    fill_row(ids, weights, params.top_k, true);
    return;
  }
  float* choices = thread_floats<RouterChoices>(num_experts);
  const float* bias = params.bias.as<const float>();
  for (int64_t i = 0; i < num_experts; ++i) {
    const float choice = scores[i] + (params.bias.present() ? bias[i] : 0.0F);
    choices[i] = std::isnan(choice) ? -kInfinity : choice;
  }
  if (is_grouped(params)) {
    keep_best_groups(params, choices, num_experts);
  }
  choose_experts(choices, num_experts, params.top_k, ids);
  weigh_row(params, scores, ids, weights);
}

}  // namespace

Status moe_topk(const MoeTopkParams& params, const ExecContext& context) {
  const int64_t row_elements = params.logits.size[1] * (params.top_k + 1);
  parallel_ranges(context, params.logits.size[0], row_grain(row_elements),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t row = begin; row < end; ++row) {
                      route_row(params, row);
                    }
                  });
  return {};
}

Status router_gemm(const RouterGemmParams& params, const ExecContext& context) {
  // Rows per piece: enough to use a column of the weight several times while it is in the cache.
  constexpr int64_t kRows = 32;
  const int64_t num_tokens = params.x.size[0];
  const int64_t num_pieces = (num_tokens + kRows - 1) / kRows;
  const int64_t hidden = params.x.size[1];
  const int64_t num_experts = params.w.size[0];
  // Pieces of experts, so that a few rows still use every thread.
  constexpr int64_t kColumns = 64;
  const int64_t num_columns = (num_experts + kColumns - 1) / kColumns;
  const int64_t grain = std::max<int64_t>(
      1, (kParallelElements << 3) /
             (std::min(kRows, num_tokens) * hidden * std::min(kColumns, num_experts)));
  parallel_ranges(context, num_pieces * num_columns, grain, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t first_row = piece / num_columns * kRows;
      const int64_t first_column = piece % num_columns * kColumns;
      const int64_t rows = std::min(kRows, num_tokens - first_row);
      const float* pointers[kRows];
      float* wide =
          params.x.dtype == DType::kF32 ? nullptr : thread_floats<RouterRows>(rows * hidden);
      for (int64_t row = 0; row < rows; ++row) {
        const void* source = element_at(params.x, (first_row + row) * params.x.stride[0]);
        pointers[row] = static_cast<const float*>(source);
        if (wide != nullptr) {
          kernel_table().load(GatherArgs{source, params.x.dtype, hidden, hidden, hidden},
                              wide + row * hidden);
          pointers[row] = wide + row * hidden;
        }
      }
      DotRowsArgs args;
      args.x = pointers;
      args.weight = element_at(params.w, first_column * params.w.stride[0]);
      args.weight_dtype = params.w.dtype;
      args.weight_stride = params.w.stride[0];
      args.out = params.logits.as<float>() + first_row * params.logits.stride[0] + first_column;
      args.out_stride = params.logits.stride[0];
      args.rows = rows;
      args.columns = std::min(kColumns, num_experts - first_column);
      args.depth = hidden;
      kernel_table().dot_rows(args);
    }
  });
  return {};
}

}  // namespace diffulex::cpu
