// SPDX-License-Identifier: Apache-2.0
#pragma once

// Conversions, RMSNorm rows, rotary heads and gated activations.

#include "ops/shared/cpu_isa/kernel_table.h"

namespace diffulex::cpu {
namespace {

template <typename Element>
void load_elements(const GatherArgs& args, float* out) {
  const auto* source = static_cast<const typename Element::Stored*>(args.source);
  if (args.group == 1) {
    for (int64_t i = 0; i < args.count; i += kWidth) {
      const int64_t count = args.count - i < kWidth ? args.count - i : kWidth;
      typename Element::Stored lanes[kWidth] = {};
      for (int64_t lane = 0; lane < count; ++lane) {
        lanes[lane] = source[(i + lane) * args.group_stride];
      }
      store_some<ElementF32>(out + i, load_some<Element>(lanes, kWidth), count);
    }
    return;
  }
  for (int64_t first = 0; first < args.count; first += args.group) {
    const int64_t count = args.count - first < args.group ? args.count - first : args.group;
    for (int64_t i = 0; i < count; i += kWidth) {
      store_some<ElementF32>(out + first + i, load_some<Element>(source + i, count - i), count - i);
    }
    source += args.group_stride;
  }
}

void load(const GatherArgs& args, float* out) {
  switch (args.dtype) {
    case DType::kBF16:
      return load_elements<ElementBF16>(args, out);
    case DType::kF16:
      return load_elements<ElementF16>(args, out);
    default:
      return load_elements<ElementF32>(args, out);
  }
}

template <typename Element>
void store_elements(const float* values, void* out, int64_t n) {
  auto* target = static_cast<typename Element::Stored*>(out);
  for (int64_t i = 0; i < n; i += kWidth) {
    store_some<Element>(target + i, load_some<ElementF32>(values + i, n - i), n - i);
  }
}

void store(const float* values, DType dtype, void* out, int64_t n) {
  switch (dtype) {
    case DType::kBF16:
      return store_elements<ElementBF16>(values, out, n);
    case DType::kF16:
      return store_elements<ElementF16>(values, out, n);
    default:
      return store_elements<ElementF32>(values, out, n);
  }
}

/// Weight lanes [i, i + kWidth) plus offset; absent weight = 1.
struct WeightRow {
  const void* data;
  DType dtype;
  float offset;
  int64_t n;
};

DIFFULEX_ISA_INLINE VecF weight_lanes(const WeightRow& weight, int64_t i) {
  if (weight.data == nullptr) {
    return splat(1.0F);
  }
  const int64_t count = weight.n - i;
  VecF lanes;
  switch (weight.dtype) {
    case DType::kBF16:
      lanes = load_some<ElementBF16>(static_cast<const uint16_t*>(weight.data) + i, count);
      break;
    case DType::kF16:
      lanes = load_some<ElementF16>(static_cast<const uint16_t*>(weight.data) + i, count);
      break;
    default:
      lanes = load_some<ElementF32>(static_cast<const float*>(weight.data) + i, count);
      break;
  }
  return lanes + weight.offset;
}

/// 1 / sqrt(mean of squares + eps) of `n` values; lanes past n are 0 in the padded buffer.
DIFFULEX_ISA_INLINE float inverse_rms(const float* padded, int64_t n, float eps) {
  VecF sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
#pragma GCC unroll 4
    for (int32_t part = 0; part < 4; ++part) {
      const VecF values = load_floats(padded + i + part * kWidth);
      sums[part] += values * values;
    }
  }
  for (; i < n; i += kWidth) {
    const VecF values = load_floats(padded + i);
    sums[0] += values * values;
  }
  const float sum = lane_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1.0F / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
}

template <typename Element>
void norm_elements(const NormRowArgs& args) {
  using Stored = typename Element::Stored;
  const auto* x = static_cast<const Stored*>(args.x);
  auto* residual = static_cast<Stored*>(args.residual);
  auto* out = static_cast<Stored*>(args.out);
  for (int64_t i = 0; i < args.n; i += kWidth) {
    VecF values = load_some<Element>(x + i, args.n - i);
    if (args.kind == NormKind::kAddFirst) {
      values += load_some<Element>(residual + i, args.n - i);
      store_some<Element>(residual + i, values, args.n - i);
    }
    store_floats(args.scratch + i, values);
  }
  const float factor = inverse_rms(args.scratch, args.n, args.eps);
  const WeightRow weight{args.weight, args.weight_dtype, args.weight_offset, args.n};
  for (int64_t i = 0; i < args.n; i += kWidth) {
    VecF values = load_floats(args.scratch + i) * factor * weight_lanes(weight, i);
    if (args.kind == NormKind::kAddAfter) {
      values = (values + load_some<Element>(residual + i, args.n - i)) * args.out_scale;
    }
    store_some<Element>(out + i, values, args.n - i);
  }
}

void norm_row(const NormRowArgs& args) {
  switch (args.dtype) {
    case DType::kBF16:
      return norm_elements<ElementBF16>(args);
    case DType::kF16:
      return norm_elements<ElementF16>(args);
    default:
      return norm_elements<ElementF32>(args);
  }
}

void rotate(const RopeHeadArgs& args) {
  float* values = args.scratch;
  const int64_t half = args.rotary_dim / 2;
  if (!args.neox) {
    for (int64_t i = 0; i < half; ++i) {
      const float first = values[2 * i];
      const float second = values[2 * i + 1];
      values[2 * i] = first * args.cosines[i] - second * args.sines[i];
      values[2 * i + 1] = second * args.cosines[i] + first * args.sines[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; i += kWidth) {
    const int64_t count = half - i;
    const VecF cosine = load_some<ElementF32>(args.cosines + i, count);
    const VecF sine = load_some<ElementF32>(args.sines + i, count);
    const VecF first = load_some<ElementF32>(values + i, count);
    const VecF second = load_some<ElementF32>(values + half + i, count);
    store_some<ElementF32>(values + i, first * cosine - second * sine, count);
    store_some<ElementF32>(values + half + i, second * cosine + first * sine, count);
  }
}

template <typename Element>
void rope_elements(const RopeHeadArgs& args) {
  using Stored = typename Element::Stored;
  const auto* x = static_cast<const Stored*>(args.x);
  for (int64_t i = 0; i < args.dim; i += kWidth) {
    store_floats(args.scratch + i, load_some<Element>(x + i, args.dim - i));
  }
  if (args.normalize) {
    const float factor = inverse_rms(args.scratch, args.dim, args.eps);
    const WeightRow weight{args.weight, args.weight_dtype, args.weight_offset, args.dim};
    for (int64_t i = 0; i < args.dim; i += kWidth) {
      store_floats(args.scratch + i,
                   load_floats(args.scratch + i) * factor * weight_lanes(weight, i));
    }
  }
  rotate(args);
  store_elements<Element>(args.scratch, args.out, args.dim);
}

void rope_head(const RopeHeadArgs& args) {
  switch (args.dtype) {
    case DType::kBF16:
      return rope_elements<ElementBF16>(args);
    case DType::kF16:
      return rope_elements<ElementF16>(args);
    default:
      return rope_elements<ElementF32>(args);
  }
}

DIFFULEX_ISA_INLINE VecF silu(VecF gate) {
  return gate / (1.0F + exp_of(-gate));
}

/// 0.5 g (1 + tanh u) = g / (1 + exp(-2u)), which keeps the relative error in the lower tail.
DIFFULEX_ISA_INLINE VecF gelu_tanh(VecF gate) {
  const VecF u = 0.7978845608028654F * (gate + 0.044715F * (gate * gate * gate));
  return gate / (1.0F + exp_of(-2.0F * u));
}

/// 0.5 g erfc(-g / sqrt 2), exact in the lower tail.
DIFFULEX_ISA_INLINE VecF gelu_erf(VecF gate) {
  VecF result;
  for (int32_t lane = 0; lane < kWidth; ++lane) {
    result[lane] = 0.5F * gate[lane] * __builtin_erfcf(gate[lane] * -0.70710678118654752F);
  }
  return result;
}

template <typename Element, Activation kAct>
void act_elements(const ActRowArgs& args) {
  using Stored = typename Element::Stored;
  const auto* gate = static_cast<const Stored*>(args.gate);
  const auto* up = static_cast<const Stored*>(args.up);
  auto* out = static_cast<Stored*>(args.out);
  for (int64_t i = 0; i < args.n; i += kWidth) {
    const int64_t count = args.n - i;
    const VecF value = load_some<Element>(gate + i, count);
    VecF activated;
    if constexpr (kAct == Activation::kSilu) {
      activated = silu(value);
    } else if constexpr (kAct == Activation::kGeluTanh) {
      activated = gelu_tanh(value);
    } else {
      activated = gelu_erf(value);
    }
    store_some<Element>(out + i, activated * load_some<Element>(up + i, count), count);
  }
}

template <typename Element>
void act_kind(const ActRowArgs& args) {
  switch (args.act) {
    case Activation::kGeluTanh:
      return act_elements<Element, Activation::kGeluTanh>(args);
    case Activation::kGeluErf:
      return act_elements<Element, Activation::kGeluErf>(args);
    default:
      return act_elements<Element, Activation::kSilu>(args);
  }
}

void act_row(const ActRowArgs& args) {
  switch (args.dtype) {
    case DType::kBF16:
      return act_kind<ElementBF16>(args);
    case DType::kF16:
      return act_kind<ElementF16>(args);
    default:
      return act_kind<ElementF32>(args);
  }
}

}  // namespace
}  // namespace diffulex::cpu
