// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random calls of the embedding mixes with fp64 references written from the specification.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "diffulex/ops/merge.h"
#include "ops/test_tensor.h"

namespace diffulex::test {

/// One call of token_merge_embed; copies are independent.
struct MergeCase {
  MergeCase(std::mt19937_64* random, DType dtype, int64_t num_rows, int64_t hidden, int64_t top_k,
            int64_t vocab_size, int64_t gap)
      : rows(num_rows),
        width(hidden),
        count(top_k),
        vocab(vocab_size),
        hidden_states(dtype, {num_rows, hidden}, {num_rows, hidden + gap}),
        table(dtype, {vocab_size, hidden}, {vocab_size, hidden + gap}) {
    hidden_states.fill_normal(random);
    table.fill_normal(random);
    std::uniform_real_distribution<float> probability(0.0F, 1.0F / static_cast<float>(top_k + 1));
    for (int64_t row = 0; row < num_rows; ++row) {
      mask.push_back(static_cast<uint8_t>(uniform(random, 0, 3) != 0));
      float left = 1.0F;
      for (int64_t k = 0; k < top_k; ++k) {
        ids.push_back(uniform(random, 0, 9) == 0 ? -1 : uniform(random, 0, vocab_size - 1));
        probs.push_back(uniform(random, 0, 9) == 0 ? 0.0F : probability(*random));
        left -= probs.back();
      }
      residual.push_back(uniform(random, 0, 9) == 0 ? 0.0F : left);
    }
    mask_token_id = vocab_size - 1;
  }

  [[nodiscard]] TokenMergeEmbedParams params() {
    TokenMergeEmbedParams result;
    result.hidden = hidden_states.ref();
    result.embedding = table.ref();
    result.merge_mask = ref_of(mask);
    result.topk_ids = ref_of(ids, {rows, count});
    result.topk_probs = ref_of(probs, {rows, count});
    result.residual_probs = ref_of(residual);
    result.mask_token_id = mask_token_id;
    return result;
  }

  /// The new hidden row, in fp64.
  [[nodiscard]] std::vector<double> expected(int64_t row, MergeKind kind, bool renormalize,
                                             double weight) const {
    std::vector<double> mix(static_cast<size_t>(width), 0.0);
    double norms = 0.0;
    const auto add = [&](int64_t id, double probability) {
      if (id < 0 || probability == 0.0) {
        return;
      }
      double squares = 0.0;
      for (int64_t i = 0; i < width; ++i) {
        const double value = table.get({id, i});
        mix[static_cast<size_t>(i)] += probability * value;
        squares += value * value;
      }
      norms += probability * std::sqrt(squares);
    };
    for (int64_t k = 0; k < count; ++k) {
      const auto at = static_cast<size_t>(row * count + k);
      add(ids[at], probs[at]);
    }
    if (kind == MergeKind::kIterSmoothTopk) {
      for (int64_t i = 0; i < width; ++i) {
        auto& value = mix[static_cast<size_t>(i)];
        value = hidden_states.get({row, i}) + weight * value;
      }
      return mix;
    }
    add(mask_token_id, residual[static_cast<size_t>(row)]);
    if (renormalize) {
      double squares = 0.0;
      for (const double value : mix) {
        squares += value * value;
      }
      for (double& value : mix) {
        value *= norms / (std::sqrt(squares) + 1e-6);
      }
    }
    return mix;
  }

  int64_t rows;
  int64_t width;
  int64_t count;
  int64_t vocab;
  TestTensor hidden_states;
  TestTensor table;
  std::vector<uint8_t> mask;
  std::vector<int64_t> ids;
  std::vector<float> probs;
  std::vector<float> residual;
  int64_t mask_token_id = 0;
};

/// One call of soft_embedding.
struct SoftCase {
  SoftCase(std::mt19937_64* random, DType logits_dtype, DType table_dtype, int64_t num_rows,
           int64_t vocab_size, int64_t hidden, int64_t gap)
      : rows(num_rows),
        vocab(vocab_size),
        width(hidden),
        logits(logits_dtype, {num_rows, vocab_size}, {num_rows, vocab_size + gap}),
        table(table_dtype, {vocab_size, hidden}, {vocab_size, hidden + gap}),
        out(DType::kF32, {num_rows, hidden}, {num_rows, hidden + gap}) {
    logits.fill_normal(random, 4.0);
    table.fill_normal(random);
    out.fill(kNaN);
    softcap = uniform(random, 0, 1) == 0 ? 0.0F : 30.0F;
    for (int64_t row = 0; row < num_rows; ++row) {
      valid.push_back(static_cast<uint8_t>(uniform(random, 0, 4) != 0));
      inverse.push_back(uniform(random, 0, 5) == 0 ? 0.0F
                                                   : 1.0F + 0.1F * static_cast<float>(row % 9));
      lse.push_back(static_cast<float>(log_sum(row)));
    }
  }

  [[nodiscard]] SoftEmbeddingParams params() {
    SoftEmbeddingParams result;
    result.logits = logits.ref();
    result.lse = ref_of(lse);
    result.inv_temperature = ref_of(inverse);
    result.embedding = table.ref();
    result.row_valid = ref_of(valid);
    result.out = out.ref();
    result.normalizer = 2.5F;
    result.softcap = softcap;
    return result;
  }

  [[nodiscard]] double score(int64_t row, int64_t column) const {
    const double raw = logits.get({row, column});
    const double capped = softcap > 0.0F ? softcap * std::tanh(raw / softcap) : raw;
    const double factor = inverse[static_cast<size_t>(row)];
    return capped * (factor == 0.0 ? 1.0 : factor);
  }

  [[nodiscard]] double log_sum(int64_t row) const {
    double highest = -kInf;
    for (int64_t column = 0; column < vocab; ++column) {
      highest = std::max(highest, score(row, column));
    }
    double sum = 0.0;
    for (int64_t column = 0; column < vocab; ++column) {
      sum += std::exp(score(row, column) - highest);
    }
    return highest + std::log(sum);
  }

  [[nodiscard]] double expected(int64_t row, int64_t column) const {
    if (valid[static_cast<size_t>(row)] == 0) {
      return 0.0;
    }
    const double total = log_sum(row);
    double sum = 0.0;
    for (int64_t v = 0; v < vocab; ++v) {
      sum += std::exp(score(row, v) - total) * table.get({v, column});
    }
    return 2.5 * sum;
  }

  int64_t rows;
  int64_t vocab;
  int64_t width;
  TestTensor logits;
  TestTensor table;
  TestTensor out;
  std::vector<float> lse;
  std::vector<float> inverse;
  std::vector<uint8_t> valid;
  float softcap = 0.0F;
};

}  // namespace diffulex::test
