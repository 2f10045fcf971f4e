// SPDX-License-Identifier: Apache-2.0
#pragma once

// Statistics of one chunk of a vocabulary row; the rules are in common/token_stats_config.h.

#include "ops/shared/cpu_isa/kernel_table.h"

namespace diffulex::cpu {
namespace {

/// Differences below this have an exponential of exactly 0; it keeps 0 * -inf out of sums.
constexpr float kFloor = -200.0F;

DIFFULEX_ISA_INLINE int32_t padded_columns(int32_t n) {
  return (n + kWidth - 1) / kWidth * kWidth;
}

/// Fills out[0, padded n) with sanitised logits (padding -inf); returns how many were not finite.
template <typename Element>
int32_t sanitize(const StatsChunkArgs& args, float* out) {
  const auto* logits = static_cast<const typename Element::Stored*>(args.logits);
  VecI bad{};
  for (int32_t i = 0; i < args.n; i += kWidth) {
    const VecF values = load_some<Element>(logits + i, args.n - i);
    const VecU bits = (VecU)values;
    const VecI not_finite = (VecI)((bits & 0x7F800000U) == 0x7F800000U);
    const VecF replaced = (VecI)(bits == 0x7F800000U) ? splat(kMaxFloat) : splat(-kInfinity);
    bad -= not_finite;
    store_floats(out + i, not_finite ? replaced : values);
  }
  for (int32_t i = args.n; i < padded_columns(args.n); ++i) {
    out[i] = -kInfinity;
  }
  int32_t count = 0;
  for (int32_t lane = 0; lane < kWidth; ++lane) {
    count += bad[lane];
  }
  return count;
}

int32_t sanitize_any(const StatsChunkArgs& args, float* out) {
  switch (args.dtype) {
    case DType::kBF16:
      return sanitize<ElementBF16>(args, out);
    case DType::kF16:
      return sanitize<ElementF16>(args, out);
    default:
      return sanitize<ElementF32>(args, out);
  }
}

DIFFULEX_ISA_INLINE bool has_exclusions(const StatsChunkArgs& args) {
  return args.exclusion != ExclusionMode::kOff &&
         (args.num_excluded > 0 || args.candidate_end < args.n);
}

void exclude(const StatsChunkArgs& args, float* values) {
  for (int32_t i = 0; i < args.num_excluded; ++i) {
    values[args.excluded[i]] = -kInfinity;
  }
  for (int32_t i = args.candidate_end; i < args.n; ++i) {
    values[i] = -kInfinity;
  }
}

/// Sanitised, capped and penalised logits in z; the same without the cap in key. Returns the
/// number of bad logits. Without a cap both are `args.key` unless `separate`.
struct Transformed {
  float* z;
  int32_t bad_count;
};

Transformed transform(const StatsChunkArgs& args, bool separate) {
  Transformed result{args.key, sanitize_any(args, args.key)};
  if (args.softcap > 0.0F) {
    result.z = args.z;
    for (int32_t i = 0; i < args.n; i += kWidth) {
      const VecF raw = load_floats(args.key + i);
      const VecF capped = tanh_of(raw / args.softcap) * args.softcap;
      store_floats(args.z + i, raw == -kInfinity ? raw : capped);
    }
  } else if (separate) {
    result.z = args.z;
    for (int32_t i = 0; i < args.n; i += kWidth) {
      store_floats(args.z + i, load_floats(args.key + i));
    }
  }
  if (args.penalty_column >= 0) {
    args.key[args.penalty_column] -= args.penalty;
    if (result.z != args.key) {
      result.z[args.penalty_column] -= args.penalty;
    }
  }
  return result;
}

/// True if some lane of the comparison results is set; folds vectors before lanes.
DIFFULEX_ISA_INLINE bool any_lane(VecI hits) {
  int64_t words[kWidth / 2];
  __builtin_memcpy(words, &hits, sizeof(words));
  int64_t any = 0;
  for (int32_t i = 0; i < kWidth / 2; ++i) {
    any |= words[i];
  }
  return any != 0;
}

/// Lowest column with values[column] == target other than `skip`; n is not padded.
int32_t find_equal(const float* values, int32_t n, float target, int32_t skip) {
  constexpr int32_t kStride = 8 * kWidth;
  int32_t i = 0;
  while (i < n) {
    const int32_t end = i + kStride < n ? i + kStride : n;
    if (end - i == kStride) {
      VecI hits{};
#pragma GCC unroll 8
      for (int32_t part = 0; part < 8; ++part) {
        hits |= (VecI)(load_floats(values + i + part * kWidth) == target);
      }
      if (!any_lane(hits)) {
        i = end;
        continue;
      }
    }
    for (; i < end; ++i) {
      if (values[i] == target && i != skip) {
        return i;
      }
    }
  }
  return -1;
}

/// The two largest keys and their lowest columns.
void find_top_two(const float* key, int32_t n, StatsRecord* record) {
  VecF best = splat(-kInfinity);
  VecF second = splat(-kInfinity);
  for (int32_t i = 0; i < n; i += kWidth) {
    const VecF values = load_floats(key + i);
    second = larger(second, smaller(best, values));
    best = larger(best, values);
  }
  float lanes[2 * kWidth];
  store_floats(lanes, best);
  store_floats(lanes + kWidth, second);
  float first_key = -kInfinity;
  float second_key = -kInfinity;
  for (int32_t lane = 0; lane < 2 * kWidth; ++lane) {
    if (lanes[lane] > first_key) {
      second_key = first_key;
      first_key = lanes[lane];
    } else if (lanes[lane] > second_key) {
      second_key = lanes[lane];
    }
  }
  record->best_key = first_key;
  record->second_key = second_key;
  record->best_column = first_key > -kInfinity ? find_equal(key, n, first_key, -1) : -1;
  record->second_column =
      second_key > -kInfinity ? find_equal(key, n, second_key, record->best_column) : -1;
}

struct Sums {
  float max;
  float sum;
  float weighted;
};

float largest(const float* z, int32_t n) {
  VecF highest = splat(-kInfinity);
  for (int32_t i = 0; i < n; i += kWidth) {
    highest = larger(highest, load_floats(z + i));
  }
  return lane_max(highest);
}

DIFFULEX_ISA_INLINE VecF tempered(VecF z, float factor) {
  // The largest finite logit times a factor above 1 must not become infinite.
  return smaller(larger(z * factor, splat(-kMaxFloat)), splat(kMaxFloat));
}

/// max, sum exp(z f - max) and sum exp(z f - max)(z f - max) over finite entries; z_max is the
/// largest z.
Sums exp_sums(const float* z, int32_t n, float factor, float z_max) {
  if (z_max == -kInfinity) {
    return Sums{-kInfinity, 0.0F, 0.0F};
  }
  float max = z_max * factor;
  max = max > kMaxFloat ? kMaxFloat : (max < -kMaxFloat ? -kMaxFloat : max);
  VecF sums[2] = {};
  VecF weighted[2] = {};
  for (int32_t i = 0; i < n; i += 2 * kWidth) {
#pragma GCC unroll 2
    for (int32_t part = 0; part < 2; ++part) {
      if (part == 1 && i + kWidth >= n) {
        break;
      }
      const VecF values = load_floats(z + i + part * kWidth);
      const VecF scaled = tempered(values, factor) - max;
      const VecF difference = values == -kInfinity ? splat(kFloor) : larger(scaled, splat(kFloor));
      const VecF e = exp_of(difference);
      sums[part] += e;
      weighted[part] += e * difference;
    }
  }
  return Sums{max, lane_sum(sums[0] + sums[1]), lane_sum(weighted[0] + weighted[1])};
}

void stats_chunk(const StatsChunkArgs& args, StatsRecord* record) {
  const bool excluding = has_exclusions(args);
  const bool keep_mass = excluding && args.exclusion == ExclusionMode::kExclude;
  const Transformed values = transform(args, keep_mass);
  if (excluding) {
    exclude(args, args.key);
    if (!keep_mass && values.z != args.key) {
      exclude(args, values.z);
    }
  }
  record->bad_count = values.bad_count;
  find_top_two(args.key, args.n, record);
  record->best_z = record->best_column >= 0 ? values.z[record->best_column] : -kInfinity;
  record->second_z = record->second_column >= 0 ? values.z[record->second_column] : -kInfinity;
  const bool draws = args.inv_temperature != 0.0F;
  const float factor = draws ? args.inv_temperature : 1.0F;
  const float z_max = values.z == args.key ? record->best_key : largest(values.z, args.n);
  const Sums all = exp_sums(values.z, args.n, factor, z_max);
  const Sums raw = factor == 1.0F ? all : exp_sums(values.z, args.n, 1.0F, z_max);
  Sums candidates = all;
  if (draws && keep_mass) {
    exclude(args, values.z);
    candidates = exp_sums(values.z, args.n, factor, largest(values.z, args.n));
  }
  record->max = all.max;
  record->sum = all.sum;
  record->weighted = all.weighted;
  record->raw_max = raw.max;
  record->raw_sum = raw.sum;
  record->candidate_max = candidates.max;
  record->candidate_sum = candidates.sum;
}

void stats_values(const StatsChunkArgs& args) {
  transform(args, true);
  if (has_exclusions(args)) {
    exclude(args, args.key);
    exclude(args, args.z);
  }
}

void exp_shifted(float* values, float factor, float shift, int64_t n) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const VecF z = load_some<ElementF32>(values + i, n - i);
    const VecF difference =
        z == -kInfinity ? splat(kFloor) : larger(tempered(z, factor) - shift, splat(kFloor));
    store_some<ElementF32>(values + i, exp_of(difference), n - i);
  }
}

int64_t find_at_least(const float* values, int64_t from, int64_t n, float threshold) {
  int64_t i = from;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    VecI hits{};
#pragma GCC unroll 4
    for (int32_t part = 0; part < 4; ++part) {
      hits |= (VecI)(load_floats(values + i + part * kWidth) >= threshold);
    }
    if (any_lane(hits)) {
      break;
    }
  }
  for (; i < n; ++i) {
    if (values[i] >= threshold) {
      return i;
    }
  }
  return n;
}

}  // namespace
}  // namespace diffulex::cpu
