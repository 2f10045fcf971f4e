// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "diffulex/ops/tensor_ref.h"
#include "ops/shared/half.h"

namespace diffulex::test {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInf = std::numeric_limits<double>::infinity();

/// Float tensor that owns its memory and is read and written as double. Strides may leave gaps.
class TestTensor final {
 public:
  TestTensor() = default;
  TestTensor(DType dtype, std::vector<int64_t> shape)
      : TestTensor(dtype, shape, std::vector<int64_t>(shape)) {}
  /// `capacity` gives the extents the strides are computed from.
  TestTensor(DType dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& capacity) {
    ref_.dtype = dtype;
    ref_.rank = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (size_t dim = shape.size(); dim-- > 0;) {
      ref_.size[dim] = shape[dim];
      ref_.stride[dim] = stride;
      stride *= capacity[dim];
    }
    storage_.assign(static_cast<size_t>(stride * dtype_bytes(dtype)) + 1, 0);
  }

  [[nodiscard]] TensorRef ref() {
    TensorRef result = ref_;
    result.data = storage_.data();
    return result;
  }

  // Lists do not allocate: references read millions of elements.
  [[nodiscard]] int64_t offset(std::initializer_list<int64_t> index) const {
    return offset_of(index.begin(), index.size());
  }
  [[nodiscard]] int64_t offset(const std::vector<int64_t>& index) const {
    return offset_of(index.data(), index.size());
  }
  [[nodiscard]] double get(std::initializer_list<int64_t> index) const {
    return get_offset(offset(index));
  }
  [[nodiscard]] double get(const std::vector<int64_t>& index) const {
    return get_offset(offset(index));
  }
  void set(std::initializer_list<int64_t> index, double value) { set_offset(offset(index), value); }
  void set(const std::vector<int64_t>& index, double value) { set_offset(offset(index), value); }

  [[nodiscard]] double get_offset(int64_t element) const {
    const uint8_t* source = storage_.data() + element * dtype_bytes(ref_.dtype);
    if (ref_.dtype == DType::kF32) {
      float value = 0.0F;
      std::memcpy(&value, source, sizeof(value));
      return value;
    }
    uint16_t bits = 0;
    std::memcpy(&bits, source, sizeof(bits));
    return ref_.dtype == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
  }

  void set_offset(int64_t element, double value) {
    uint8_t* target = storage_.data() + element * dtype_bytes(ref_.dtype);
    const auto narrow = static_cast<float>(value);
    if (ref_.dtype == DType::kF32) {
      std::memcpy(target, &narrow, sizeof(narrow));
      return;
    }
    const uint16_t bits = ref_.dtype == DType::kBF16 ? float_to_bf16(narrow) : float_to_f16(narrow);
    std::memcpy(target, &bits, sizeof(bits));
  }

  /// Every element of the storage, gaps included.
  void fill(double value) {
    for (int64_t i = 0; i < elements(); ++i) {
      set_offset(i, value);
    }
  }
  void fill_normal(std::mt19937_64* random, double deviation = 1.0) {
    std::normal_distribution<double> normal(0.0, deviation);
    for (int64_t i = 0; i < elements(); ++i) {
      set_offset(i, normal(*random));
    }
  }
  [[nodiscard]] int64_t elements() const {
    return static_cast<int64_t>((storage_.size() - 1) /
                                static_cast<size_t>(dtype_bytes(ref_.dtype)));
  }
  [[nodiscard]] const std::vector<uint8_t>& bytes() const { return storage_; }

 private:
  [[nodiscard]] int64_t offset_of(const int64_t* index, size_t count) const {
    int64_t result = 0;
    for (size_t dim = 0; dim < count; ++dim) {
      result += index[dim] * ref_.stride[dim];
    }
    return result;
  }

  TensorRef ref_;
  std::vector<uint8_t> storage_;
};

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<int32_t> {
  static constexpr DType kValue = DType::kI32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType kValue = DType::kI64;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType kValue = DType::kU8;
};
template <>
struct DTypeOf<float> {
  static constexpr DType kValue = DType::kF32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType kValue = DType::kF64;
};

/// Contiguous tensor over the memory of a vector; an empty shape means one dimension.
template <typename T>
[[nodiscard]] TensorRef ref_of(std::vector<T>& values, std::vector<int64_t> shape = {}) {
  if (shape.empty()) {
    shape = {static_cast<int64_t>(values.size())};
  }
  TensorRef result;
  result.data = values.data();
  result.dtype = DTypeOf<T>::kValue;
  result.rank = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    result.size[dim] = shape[dim];
    result.stride[dim] = stride;
    stride *= shape[dim];
  }
  return result;
}

/// Largest error of one rounding of `reference` to `dtype` (half a unit in the last place).
[[nodiscard]] inline double rounding_error(DType dtype, double reference) {
  const double magnitude = std::abs(reference);
  switch (dtype) {
    case DType::kBF16:
      return magnitude / 256.0 + 1e-38;
    case DType::kF16:
      return magnitude / 2048.0 + 6e-8;
    default:
      return magnitude * 6e-8;
  }
}

[[nodiscard]] inline int64_t pick(std::mt19937_64* random, std::vector<int64_t> choices) {
  return choices[(*random)() % choices.size()];
}
[[nodiscard]] inline int64_t uniform(std::mt19937_64* random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>((*random)() % static_cast<uint64_t>(high - low + 1));
}

}  // namespace diffulex::test
