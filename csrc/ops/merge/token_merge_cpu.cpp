// SPDX-License-Identifier: Apache-2.0

// token_merge_embed and its two halves for vocabulary shards: sums in fp32, squared norms in fp64.

#include <algorithm>
#include <cmath>
#include <string>

#include "ops/cpu_ops.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/data_checks_cpu.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

struct MergeTag;
/// Keeps the norm of a zero sum from dividing by zero.
constexpr double kNormEpsilon = 1e-6;

[[nodiscard]] bool is_merged(const TensorRef& merge_mask, int64_t row) {
  return merge_mask.as<const uint8_t>()[row * merge_mask.stride[0]] != 0;
}

double squared_norm(const float* values, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  return sum;
}

/// The table rows of one vocabulary (shard).
struct MergeTable {
  const TensorRef& embedding;
  int64_t vocab_start;

  /// Local row of a global id, or -1 when the id is absent or another shard's.
  [[nodiscard]] int64_t local_row(int64_t id) const {
    const int64_t row = id - vocab_start;
    return id >= 0 && row >= 0 && row < embedding.size[0] ? row : -1;
  }
};

/// The descriptor arrays of a call.
struct MergeInput {
  const TensorRef& topk_ids;
  const TensorRef& topk_probs;
  const TensorRef& residual_probs;
  int64_t mask_token_id;
  MergeKind kind;
};

/// Accumulates one row: sum[H] = sum p_k E[i_k] (+ r E[M]); returns sum p_k |E[i_k]| (+ r |E[M]|).
/// `loaded` is scratch of H floats.
double sum_row(const MergeInput& input, const MergeTable& table, int64_t row, float* sum,
               float* loaded) {
  const KernelTable& kernels = kernel_table();
  const int64_t hidden = table.embedding.size[1];
  std::fill_n(sum, hidden, 0.0F);
  double norms = 0.0;
  const auto add = [&](int64_t id, float probability) {
    const int64_t local = table.local_row(id);
    if (local < 0 || probability == 0.0F) {
      return;
    }
    const char* source = element_at(table.embedding, local * table.embedding.stride[0]);
    kernels.load(GatherArgs{source, table.embedding.dtype, hidden, hidden, hidden}, loaded);
    for (int64_t i = 0; i < hidden; ++i) {
      sum[i] += probability * loaded[i];
    }
    norms += static_cast<double>(probability) * std::sqrt(squared_norm(loaded, hidden));
  };
  const int64_t* ids = input.topk_ids.as<const int64_t>() + row * input.topk_ids.stride[0];
  const float* probs = input.topk_probs.as<const float>() + row * input.topk_probs.stride[0];
  for (int64_t k = 0; k < input.topk_ids.size[1]; ++k) {
    add(ids[k], probs[k]);
  }
  if (input.kind == MergeKind::kDmaxTopk) {
    add(input.mask_token_id,
        input.residual_probs.as<const float>()[row * input.residual_probs.stride[0]]);
  }
  return norms;
}

/// How a sum becomes the new hidden row.
struct MergeFinish {
  MergeKind kind;
  bool renormalize;
  float weight;
};

/// `sum` [H] is overwritten; `loaded` is scratch of H floats.
void write_hidden(const MergeFinish& finish, const TensorRef& hidden, int64_t row, double norms,
                  float* sum, float* loaded) {
  const KernelTable& kernels = kernel_table();
  const int64_t width = hidden.size[1];
  char* target = element_at(hidden, row * hidden.stride[0]);
  if (finish.kind == MergeKind::kIterSmoothTopk) {
    kernels.load(GatherArgs{target, hidden.dtype, width, width, width}, loaded);
    for (int64_t i = 0; i < width; ++i) {
      sum[i] = loaded[i] + finish.weight * sum[i];
    }
  } else if (finish.renormalize) {
    const double norm = std::sqrt(squared_norm(sum, width));
    kernels.scale(sum, static_cast<float>(norms / (norm + kNormEpsilon)), width);
  }
  kernels.store(sum, hidden.dtype, target, width);
}

/// Ids of the merged rows lie below the table's size.
Status check_ids(const TokenMergeEmbedParams& params) {
  const int64_t top_k = params.topk_ids.size[1];
  for (int64_t row = 0; row < params.hidden.size[0]; ++row) {
    if (!is_merged(params.merge_mask, row)) {
      continue;
    }
    const int64_t* ids = params.topk_ids.as<const int64_t>() + row * params.topk_ids.stride[0];
    for (int64_t k = 0; k < top_k; ++k) {
      if (ids[k] >= params.embedding.size[0]) {
        return data_error("token_merge_embed", "topk_ids", row * top_k + k,
                          "an id below " + std::to_string(params.embedding.size[0]), ids[k]);
      }
    }
  }
  return {};
}

/// Two rows of `width` floats of this thread.
struct RowScratch {
  explicit RowScratch(int64_t width) {
    const int64_t padded = (width + kDimPad - 1) / kDimPad * kDimPad;
    sum = thread_floats<MergeTag>(2 * padded);
    loaded = sum + padded;
  }
  float* sum;
  float* loaded;
};

}  // namespace

Status token_merge_embed(const TokenMergeEmbedParams& params, const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(check_ids(params));
  const MergeInput input{params.topk_ids, params.topk_probs, params.residual_probs,
                         params.mask_token_id, params.merge_kind};
  const MergeFinish finish{params.merge_kind, params.renormalize, params.weight};
  const MergeTable table{params.embedding, 0};
  const int64_t width = params.hidden.size[1];
  parallel_ranges(
      context, params.hidden.size[0], row_grain(width * (params.topk_ids.size[1] + 2)),
      [&](int64_t begin, int64_t end) {
        const RowScratch scratch(width);
        for (int64_t row = begin; row < end; ++row) {
          if (is_merged(params.merge_mask, row)) {
            const double norms = sum_row(input, table, row, scratch.sum, scratch.loaded);
            write_hidden(finish, params.hidden, row, norms, scratch.sum, scratch.loaded);
          }
        }
      });
  return {};
}

Status token_merge_partial(const TokenMergePartialParams& params, const ExecContext& context) {
  const MergeInput input{params.topk_ids, params.topk_probs, params.residual_probs,
                         params.mask_token_id, params.merge_kind};
  const MergeTable table{params.embedding, params.vocab_start};
  const int64_t width = params.embedding.size[1];
  parallel_ranges(context, params.partial.size[0], row_grain(width * (params.topk_ids.size[1] + 2)),
                  [&](int64_t begin, int64_t end) {
                    const RowScratch scratch(width);
                    for (int64_t row = begin; row < end; ++row) {
                      float* out = params.partial.as<float>() + row * params.partial.stride[0];
                      if (!is_merged(params.merge_mask, row)) {
                        std::fill_n(out, width + 1, 0.0F);
                        continue;
                      }
                      const double norms = sum_row(input, table, row, scratch.sum, scratch.loaded);
                      std::copy_n(scratch.sum, width, out);
                      out[width] = static_cast<float>(norms);
                    }
                  });
  return {};
}

Status token_merge_finalize(const TokenMergeFinalizeParams& params, const ExecContext& context) {
  const MergeFinish finish{params.merge_kind, params.renormalize, params.weight};
  const int64_t width = params.hidden.size[1];
  parallel_ranges(
      context, params.hidden.size[0], row_grain(2 * width), [&](int64_t begin, int64_t end) {
        const RowScratch scratch(width);
        for (int64_t row = begin; row < end; ++row) {
          if (is_merged(params.merge_mask, row)) {
            const float* in = params.partial.as<const float>() + row * params.partial.stride[0];
            std::copy_n(in, width, scratch.sum);
            write_hidden(finish, params.hidden, row, in[width], scratch.sum, scratch.loaded);
          }
        }
      });
  return {};
}

}  // namespace diffulex::cpu
