// SPDX-License-Identifier: Apache-2.0
#pragma once

// One random call of fused_moe and its fp64 value, written from the definition.

#include <cmath>
#include <cstdint>
#include <vector>

#include "diffulex/ops/moe.h"
#include "ops/test_tensor.h"

namespace diffulex::test {

struct MoeCaseShape {
  DType dtype = DType::kF32;
  int64_t num_tokens = 5;
  int64_t num_experts = 4;  // held here
  int64_t top_k = 2;
  int64_t hidden = 32;
  int64_t width = 16;
  bool has_map = false;  // twice as many experts, every other one elsewhere
  bool has_addend = false;
  Activation act = Activation::kSilu;
  bool weight_on_input = false;
};

[[nodiscard]] inline double activated(Activation act, double gate) {
  switch (act) {
    case Activation::kGeluTanh:
      return 0.5 * gate *
             (1 +
              std::tanh(std::sqrt(2 / std::acos(-1.0)) * (gate + 0.044715 * gate * gate * gate)));
    case Activation::kGeluErf:
      return 0.5 * gate * std::erfc(-gate / std::sqrt(2.0));
    default:
      return gate / (1 + std::exp(-gate));
  }
}

class MoeCase final {
 public:
  MoeCase(const MoeCaseShape& shape, uint64_t seed)
      : shape_(shape),
        x(shape.dtype, {shape.num_tokens, shape.hidden}),
        w13(shape.dtype, {shape.num_experts, 2 * shape.width, shape.hidden}),
        w2(shape.dtype, {shape.num_experts, shape.hidden, shape.width}),
        addend(shape.dtype, {shape.num_tokens, shape.hidden}),
        out(shape.dtype, {shape.num_tokens, shape.hidden}),
        weights(static_cast<size_t>(shape.num_tokens * shape.top_k)),
        ids(weights.size()) {
    std::mt19937_64 random(seed);
    x.fill_normal(&random);
    w13.fill_normal(&random, 1 / std::sqrt(static_cast<double>(shape.hidden)));
    w2.fill_normal(&random, 1 / std::sqrt(static_cast<double>(shape.width)));
    addend.fill_normal(&random);
    out.fill(kNaN);
    std::normal_distribution<float> normal;
    const int64_t global = shape.has_map ? 2 * shape.num_experts : shape.num_experts;
    for (size_t slot = 0; slot < ids.size(); ++slot) {
      weights[slot] = std::abs(normal(random));
      // One slot in eight has no expert.
      ids[slot] = random() % 8 == 0 ? -1 : static_cast<int32_t>(uniform(&random, 0, global - 1));
    }
    for (int64_t expert = 0; shape.has_map && expert < global; ++expert) {
      map.push_back(expert % 2 == 0 ? -1 : static_cast<int32_t>(expert / 2));
    }
  }

  [[nodiscard]] FusedMoeParams params() {
    FusedMoeParams params;
    params.x = x.ref();
    params.w13 = w13.ref();
    params.w2 = w2.ref();
    params.topk_weights = ref_of(weights, {shape_.num_tokens, shape_.top_k});
    params.topk_ids = ref_of(ids, {shape_.num_tokens, shape_.top_k});
    if (shape_.has_map) {
      params.expert_map = ref_of(map);
    }
    if (shape_.has_addend) {
      params.addend = addend.ref();
    }
    params.out = out.ref();
    params.act = shape_.act;
    params.weight_on_input = shape_.weight_on_input;
    return params;
  }

  [[nodiscard]] MoeShape moe_shape() const {
    return {shape_.num_tokens,
            static_cast<int32_t>(shape_.top_k),
            static_cast<int32_t>(shape_.num_experts),
            shape_.hidden,
            shape_.width,
            shape_.dtype};
  }

  /// Local expert of a slot, -1 = none.
  [[nodiscard]] int32_t local(size_t slot) const {
    const int32_t id = ids[slot];
    return id < 0 || !shape_.has_map ? id : map[static_cast<size_t>(id)];
  }

  /// Unrounded result, [T, H].
  [[nodiscard]] std::vector<double> expected() const {
    std::vector<double> result(static_cast<size_t>(shape_.num_tokens * shape_.hidden));
    for (int64_t token = 0; token < shape_.num_tokens; ++token) {
      double* row = result.data() + token * shape_.hidden;
      for (int64_t h = 0; shape_.has_addend && h < shape_.hidden; ++h) {
        row[h] = addend.get({token, h});
      }
      for (int64_t k = 0; k < shape_.top_k; ++k) {
        const auto slot = static_cast<size_t>(token * shape_.top_k + k);
        if (local(slot) >= 0) {
          add_expert(token, local(slot), static_cast<double>(weights[slot]), row);
        }
      }
    }
    return result;
  }

 private:
  MoeCaseShape shape_;

 public:
  TestTensor x;
  TestTensor w13;
  TestTensor w2;
  TestTensor addend;
  TestTensor out;
  std::vector<float> weights;
  std::vector<int32_t> ids;
  std::vector<int32_t> map;

 private:
  void add_expert(int64_t token, int32_t expert, double weight, double* row) const {
    std::vector<double> inner(static_cast<size_t>(shape_.width));
    for (int64_t i = 0; i < shape_.width; ++i) {
      double gate = 0;
      double up = 0;
      for (int64_t h = 0; h < shape_.hidden; ++h) {
        gate += x.get({token, h}) * w13.get({expert, i, h});
        up += x.get({token, h}) * w13.get({expert, shape_.width + i, h});
      }
      const double factor = shape_.weight_on_input ? weight : 1.0;
      inner[static_cast<size_t>(i)] = activated(shape_.act, gate * factor) * up * factor;
    }
    for (int64_t h = 0; h < shape_.hidden; ++h) {
      double sum = 0;
      for (int64_t i = 0; i < shape_.width; ++i) {
        sum += inner[static_cast<size_t>(i)] * w2.get({expert, h, i});
      }
      row[h] += sum * (shape_.weight_on_input ? 1.0 : weight);
    }
  }
};

/// Largest error of one element: two roundings to the dtype per slot and one at the end.
[[nodiscard]] inline double moe_bound(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return 4e-2;
    case DType::kF16:
      return 5e-3;
    default:
      return 2e-5;
  }
}

}  // namespace diffulex::test
