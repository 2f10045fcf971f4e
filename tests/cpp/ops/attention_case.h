// SPDX-License-Identifier: Apache-2.0
#pragma once

// A random block_attention problem and its fp64 reference with a materialised mask, written from
// the table of visibility rules.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "diffulex/ops/attention.h"
#include "ops/test_tensor.h"

namespace diffulex::test {

struct CaseRequest {
  int64_t num_rows = 0;   // L
  int64_t num_valid = 0;  // nv
  int64_t context = 0;    // c
  int64_t kind = 1;
  bool hole = false;
  int64_t prefix = 0;
  int64_t padded_prefix = 0;
  int64_t start = 0;      // a
  bool anchored = false;  // the window is that of row 0
};

struct CaseShape {
  DType dtype = DType::kF32;
  KvLayout layout = KvLayout::kUnified;
  int64_t num_kv_heads = 1;
  int64_t group = 1;
  int64_t head_dim = 16;
  int64_t page_size = 4;
  int64_t block_size = 4;
  int64_t window = 0;
  double softcap = 0.0;
  int64_t extra_heads = 0;  // unified capacity beyond Hkv
  int64_t extra_dims = 0;
  int64_t key_group = 8;     // x of the distinct layout
  int64_t padding_rows = 0;  // packed rows past the last request
};

class AttentionCase final {
 public:
  AttentionCase(CaseShape shape, std::vector<CaseRequest> requests, uint64_t seed)
      : shape_(shape), requests_(std::move(requests)), random_(seed) {
    build_pages();
    build_rows();
    poison();
  }

  [[nodiscard]] BlockAttentionParams params() {
    BlockAttentionParams params;
    params.q = q_.ref();
    params.k = poisoned_k_.ref();
    params.v = poisoned_v_.ref();
    params.k_cache = poisoned_k_cache_.ref();
    params.v_cache = poisoned_v_cache_.ref();
    params.page_table = ref_of(page_table_, {num_requests(), max_pages_});
    params.cu_seqlens_q = ref_of(cu_seqlens_q_);
    params.context_lens = ref_of(context_lens_);
    params.valid_slices = ref_of(valid_slices_);
    params.mask_kinds = ref_of(mask_kinds_);
    params.prefix_lens = ref_of(prefix_lens_);
    params.padded_prefix_lens = ref_of(padded_prefix_lens_);
    params.q_starts = ref_of(q_starts_);
    params.out = out_.ref();
    params.lse = ref_of(lse_, {total_rows_, num_heads()});
    params.scale = static_cast<float>(scale());
    params.softcap = static_cast<float>(shape_.softcap);
    params.block_size = static_cast<int32_t>(shape_.block_size);
    params.sliding_window = static_cast<int32_t>(shape_.window);
    params.max_seqlen_q = std::max<int32_t>(1, static_cast<int32_t>(longest_));
    params.max_context_len = static_cast<int32_t>(longest_context_);
    params.kv_layout = shape_.layout;
    return params;
  }

  /// visible(i, j) of request r, straight from the table.
  [[nodiscard]] bool visible(size_t r, int64_t i, int64_t j) const {
    const CaseRequest& request = requests_[r];
    const int64_t c = request.context;
    const int64_t nv = request.num_valid;
    const int64_t position = request.start + i;
    const int64_t origin = request.padded_prefix % shape_.block_size;
    const int64_t blocks_before = (position - origin + shape_.block_size) / shape_.block_size;
    const int64_t block_end = blocks_before * shape_.block_size + origin;
    int64_t hi = 0;
    switch (request.kind) {
      case 0:
        hi = std::min(position + 1, c + nv);
        break;
      case 1:
        hi = std::min(block_end, c + nv);
        break;
      case 2:
        hi = c + nv;
        break;
      case 3:
        hi = position < request.prefix          ? std::min(request.prefix, c + nv)
             : position < request.padded_prefix ? std::min(request.padded_prefix, c + nv)
                                                : std::min(block_end, c + nv);
        break;
      default:
        hi = c;
        break;
    }
    const int64_t window_end = request.anchored ? request.start : position;
    const int64_t lo = shape_.window > 0 ? std::max<int64_t>(0, window_end - shape_.window + 1) : 0;
    if (j < lo || j >= hi) {
      return false;
    }
    if (j >= c) {
      return true;
    }
    if (request.hole && j >= request.prefix && j < request.padded_prefix) {
      return false;
    }
    return page_of(r, j) >= 0;
  }

  /// Compares out and lse with the reference; returns the largest error over its tolerance.
  [[nodiscard]] double worst_error() const {
    double worst = 0.0;
    for (size_t r = 0; r < requests_.size(); ++r) {
      for (int64_t kv_head = 0; kv_head < shape_.num_kv_heads; ++kv_head) {
        const HeadRows rows = gather(r, kv_head);
        for (int64_t i = 0; i < requests_[r].num_rows; ++i) {
          for (int64_t g = 0; g < shape_.group; ++g) {
            worst = std::max(worst, row_error(r, i, kv_head * shape_.group + g, rows));
          }
        }
      }
    }
    for (int64_t row = cu_seqlens_q_.back(); row < total_rows_; ++row) {
      for (int64_t head = 0; head < num_heads(); ++head) {
        worst = std::max(worst, empty_row_error(row, head));
      }
    }
    return worst;
  }

  /// Makes every element of both caches `value`, whatever pages the table names.
  void fill_caches(double value) {
    poisoned_k_cache_.fill(value);
    poisoned_v_cache_.fill(value);
  }

  /// Makes dim 0 of a key, or of its value, `value` in every head, visible or not.
  void plant(size_t r, int64_t j, bool is_value, double value) {
    for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
      if (j >= requests_[r].context) {
        const int64_t row = cu_seqlens_q_[r] + j - requests_[r].context;
        (is_value ? poisoned_v_ : poisoned_k_).set({row, head, 0}, value);
      } else if (is_value) {
        poisoned_v_cache_.set(value_index(r, j, head, 0), value);
      } else {
        poisoned_k_cache_.set(key_index(r, j, head, 0), value);
      }
    }
  }

  void clear_outputs() {
    out_.fill(kNaN);
    std::fill(lse_.begin(), lse_.end(), std::nanf(""));
  }
  [[nodiscard]] const TestTensor& out() const { return out_; }
  [[nodiscard]] const std::vector<float>& lse() const { return lse_; }
  [[nodiscard]] int64_t total_rows() const { return total_rows_; }
  [[nodiscard]] std::vector<int32_t>& page_table() { return page_table_; }
  [[nodiscard]] std::vector<int32_t>& context_lens() { return context_lens_; }
  [[nodiscard]] std::vector<int32_t>& cu_seqlens_q() { return cu_seqlens_q_; }
  [[nodiscard]] std::vector<int32_t>& mask_kinds() { return mask_kinds_; }
  [[nodiscard]] int64_t num_pages() const { return num_pages_; }

 private:
  [[nodiscard]] int64_t num_requests() const { return static_cast<int64_t>(requests_.size()); }
  [[nodiscard]] int64_t num_heads() const { return shape_.num_kv_heads * shape_.group; }
  [[nodiscard]] double scale() const {
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.head_dim)));
  }
  [[nodiscard]] int64_t page_of(size_t r, int64_t j) const {
    return page_table_[r * static_cast<size_t>(max_pages_) +
                       static_cast<size_t>(j / shape_.page_size)];
  }

  void build_pages() {
    for (const CaseRequest& request : requests_) {
      longest_context_ = std::max(longest_context_, request.context);
    }
    max_pages_ = longest_context_ / shape_.page_size + 2;
    // Fewer pages than entries: some pages are shared between requests.
    num_pages_ = std::max<int64_t>(1, num_requests() * max_pages_ * 3 / 4);
    page_table_.assign(static_cast<size_t>(num_requests() * max_pages_), -1);
    for (size_t r = 0; r < requests_.size(); ++r) {
      const int64_t used = (requests_[r].context + shape_.page_size - 1) / shape_.page_size;
      for (int64_t i = 0; i < used; ++i) {
        const bool unmapped = uniform(&random_, 0, 19) == 0;
        page_table_[r * static_cast<size_t>(max_pages_) + static_cast<size_t>(i)] =
            unmapped ? -1 : static_cast<int32_t>(uniform(&random_, 0, num_pages_ - 1));
      }
      // Entries past the context are never read: any rubbish is legal there.
      for (int64_t i = used; i < max_pages_; ++i) {
        page_table_[r * static_cast<size_t>(max_pages_) + static_cast<size_t>(i)] =
            uniform(&random_, 0, 1) == 0 ? -1 : 1 << 30;
      }
    }
    const int64_t heads = shape_.num_kv_heads;
    const int64_t dim = shape_.head_dim;
    if (shape_.layout == KvLayout::kUnified) {
      const std::vector<int64_t> extents = {num_pages_, shape_.page_size,
                                            heads + shape_.extra_heads, dim + shape_.extra_dims};
      k_cache_ = TestTensor(shape_.dtype, extents);
      v_cache_ = TestTensor(shape_.dtype, extents);
    } else {
      const int64_t x = shape_.key_group;
      k_cache_ = TestTensor(shape_.dtype, {num_pages_, heads, dim / x, shape_.page_size, x});
      v_cache_ = TestTensor(shape_.dtype, {num_pages_, heads, dim, shape_.page_size});
    }
    k_cache_.fill_normal(&random_);
    v_cache_.fill_normal(&random_);
  }

  void build_rows() {
    cu_seqlens_q_ = {0};
    for (const CaseRequest& request : requests_) {
      const int32_t first = cu_seqlens_q_.back();
      cu_seqlens_q_.push_back(first + static_cast<int32_t>(request.num_rows));
      valid_slices_.push_back(first + static_cast<int32_t>(request.num_valid));
      context_lens_.push_back(static_cast<int32_t>(request.context));
      mask_kinds_.push_back(static_cast<int32_t>(request.kind) | (request.hole ? 0x100 : 0) |
                            (request.anchored ? 0x200 : 0));
      prefix_lens_.push_back(static_cast<int32_t>(request.prefix));
      padded_prefix_lens_.push_back(static_cast<int32_t>(request.padded_prefix));
      q_starts_.push_back(static_cast<int32_t>(request.start));
      longest_ = std::max(longest_, request.num_rows);
    }
    total_rows_ = cu_seqlens_q_.back() + shape_.padding_rows;
    q_ = TestTensor(shape_.dtype, {total_rows_, num_heads(), shape_.head_dim},
                    {total_rows_, num_heads() + 1, shape_.head_dim});
    k_ = TestTensor(shape_.dtype, {total_rows_, shape_.num_kv_heads, shape_.head_dim});
    v_ = TestTensor(shape_.dtype, {total_rows_, shape_.num_kv_heads, shape_.head_dim},
                    {total_rows_, shape_.num_kv_heads + 2, shape_.head_dim});
    q_.fill_normal(&random_);
    k_.fill_normal(&random_);
    v_.fill_normal(&random_);
    out_ = TestTensor(shape_.dtype, {total_rows_, num_heads(), shape_.head_dim});
    lse_.assign(static_cast<size_t>(total_rows_ * num_heads()), 0.0F);
    clear_outputs();
  }

  /// Keeps only what some row of the same request sees; everything else becomes NaN or infinite.
  void poison() {
    poisoned_k_ = k_;
    poisoned_v_ = v_;
    poisoned_k_cache_ = k_cache_;
    poisoned_v_cache_ = v_cache_;
    poisoned_k_.fill(kNaN);
    poisoned_v_.fill(kInf);
    poisoned_k_cache_.fill(kInf);
    poisoned_v_cache_.fill(kNaN);
    for (size_t r = 0; r < requests_.size(); ++r) {
      const CaseRequest& request = requests_[r];
      for (int64_t j = 0; j < request.context + request.num_valid; ++j) {
        bool seen = false;
        for (int64_t i = 0; i < request.num_valid && !seen; ++i) {
          seen = visible(r, i, j);
        }
        if (seen) {
          restore(r, j);
        }
      }
    }
  }

  void restore(size_t r, int64_t j) {
    for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
      for (int64_t d = 0; d < shape_.head_dim; ++d) {
        if (j >= requests_[r].context) {
          const int64_t row = cu_seqlens_q_[r] + j - requests_[r].context;
          poisoned_k_.set({row, head, d}, k_.get({row, head, d}));
          poisoned_v_.set({row, head, d}, v_.get({row, head, d}));
        } else {
          poisoned_k_cache_.set(key_index(r, j, head, d), k_cache_.get(key_index(r, j, head, d)));
          poisoned_v_cache_.set(value_index(r, j, head, d),
                                v_cache_.get(value_index(r, j, head, d)));
        }
      }
    }
  }

  [[nodiscard]] std::vector<int64_t> key_index(size_t r, int64_t j, int64_t head, int64_t d) const {
    const int64_t offset = j % shape_.page_size;
    if (shape_.layout == KvLayout::kUnified) {
      return {page_of(r, j), offset, head, d};
    }
    return {page_of(r, j), head, d / shape_.key_group, offset, d % shape_.key_group};
  }
  [[nodiscard]] std::vector<int64_t> value_index(size_t r, int64_t j, int64_t head,
                                                 int64_t d) const {
    const int64_t offset = j % shape_.page_size;
    if (shape_.layout == KvLayout::kUnified) {
      return {page_of(r, j), offset, head, d};
    }
    return {page_of(r, j), head, d, offset};
  }
  [[nodiscard]] double key(size_t r, int64_t j, int64_t head, int64_t d) const {
    const int64_t c = requests_[r].context;
    return j >= c ? k_.get_offset(k_row(k_, r, j - c, head) + d)
                  : k_cache_.get(key_index(r, j, head, d));
  }
  [[nodiscard]] double value(size_t r, int64_t j, int64_t head, int64_t d) const {
    const int64_t c = requests_[r].context;
    return j >= c ? v_.get_offset(k_row(v_, r, j - c, head) + d)
                  : v_cache_.get(value_index(r, j, head, d));
  }
  [[nodiscard]] int64_t k_row(const TestTensor& tensor, size_t r, int64_t i, int64_t head) const {
    return tensor.offset({cu_seqlens_q_[r] + i, head, 0});
  }

  /// What one KV head of a request holds, [context + num_valid, head_dim]; 0 where no page is.
  struct HeadRows final {
    std::vector<double> keys, values;
  };

  [[nodiscard]] HeadRows gather(size_t r, int64_t kv_head) const {
    const int64_t count = requests_[r].context + requests_[r].num_valid;
    HeadRows rows;
    rows.keys.assign(static_cast<size_t>(count * shape_.head_dim), 0.0);
    rows.values = rows.keys;
    for (int64_t j = 0; j < count; ++j) {
      if (j < requests_[r].context && page_of(r, j) < 0) {
        continue;
      }
      for (int64_t d = 0; d < shape_.head_dim; ++d) {
        const auto place = static_cast<size_t>(j * shape_.head_dim + d);
        rows.keys[place] = key(r, j, kv_head, d);
        rows.values[place] = value(r, j, kv_head, d);
      }
    }
    return rows;
  }

  /// Of row `i` of request `r`.
  [[nodiscard]] double row_error(size_t r, int64_t i, int64_t head, const HeadRows& rows) const {
    const int64_t row = cu_seqlens_q_[r] + i;
    const int64_t dim = shape_.head_dim;
    std::vector<double> query(static_cast<size_t>(dim));
    for (int64_t d = 0; d < dim; ++d) {
      query[static_cast<size_t>(d)] = q_.get({row, head, d});
    }
    std::vector<double> scores;
    std::vector<int64_t> keys;
    const int64_t end =
        i < requests_[r].num_valid ? requests_[r].context + requests_[r].num_valid : 0;
    for (int64_t j = 0; j < end; ++j) {
      if (!visible(r, i, j)) {
        continue;
      }
      const double* key_row = rows.keys.data() + j * dim;
      double s = std::inner_product(query.begin(), query.end(), key_row, 0.0) * scale();
      s = shape_.softcap > 0.0 ? shape_.softcap * std::tanh(s / shape_.softcap) : s;
      scores.push_back(s);
      keys.push_back(j);
    }
    if (keys.empty()) {
      return empty_row_error(row, head);
    }
    const double top = *std::max_element(scores.begin(), scores.end());
    double sum = 0.0;
    for (double& s : scores) {
      s = std::exp(s - top);
      sum += s;
    }
    std::vector<double> expected(static_cast<size_t>(dim), 0.0);
    for (size_t n = 0; n < keys.size(); ++n) {
      const double* value_row = rows.values.data() + keys[n] * dim;
      for (int64_t d = 0; d < dim; ++d) {
        expected[static_cast<size_t>(d)] += scores[n] / sum * value_row[d];
      }
    }
    const double lse = top + std::log(sum);
    double worst = relative(std::abs(lse_at(row, head) - lse), 1e-5 * (1.0 + std::abs(lse)));
    for (int64_t d = 0; d < dim; ++d) {
      const double reference = expected[static_cast<size_t>(d)];
      const double error = std::abs(out_.get({row, head, d}) - reference);
      worst = std::max(worst, relative(error, rounding_error(shape_.dtype, reference) + 1e-5));
    }
    return worst;
  }

  [[nodiscard]] double lse_at(int64_t row, int64_t head) const {
    return lse_[static_cast<size_t>(row * num_heads() + head)];
  }

  [[nodiscard]] double empty_row_error(int64_t row, int64_t head) const {
    bool exact = lse_at(row, head) == -kInf;
    for (int64_t d = 0; d < shape_.head_dim; ++d) {
      exact = exact && out_.get({row, head, d}) == 0.0;
    }
    return exact ? 0.0 : kInf;
  }

  static double relative(double error, double tolerance) {
    return std::isfinite(error) ? error / tolerance : kInf;
  }

  CaseShape shape_;
  std::vector<CaseRequest> requests_;
  std::mt19937_64 random_;
  int64_t longest_ = 0;
  int64_t longest_context_ = 0;
  int64_t max_pages_ = 0;
  int64_t num_pages_ = 0;
  int64_t total_rows_ = 0;
  std::vector<int32_t> page_table_, cu_seqlens_q_, context_lens_, valid_slices_, mask_kinds_,
      prefix_lens_, padded_prefix_lens_, q_starts_;
  TestTensor q_, k_, v_, k_cache_, v_cache_;
  TestTensor poisoned_k_, poisoned_v_, poisoned_k_cache_, poisoned_v_cache_;
  TestTensor out_;
  std::vector<float> lse_;
};

}  // namespace diffulex::test
