// SPDX-License-Identifier: Apache-2.0
#pragma once

// Comparison of host tensors written by the CPU kernels and by the device.

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_mirror.h"
#include "ops/test_tensor.h"

namespace diffulex::test {

/// Units in the last place of `dtype` two correct results may differ by, as a relative bound.
[[nodiscard]] inline double parity_bound(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return 1.0 / 128;
    case DType::kF16:
      return 1.0 / 1024;
    default:
      return 4e-6;
  }
}

/// Every element, gaps included, within the bound; NaN must meet NaN.
inline void expect_parity(const TestTensor& want, const TestTensor& got, DType dtype,
                          const char* what) {
  // Sums that cancel leave the rounding of their terms, which are of the order of one.
  const double floor = dtype == DType::kF32 ? 2e-6 : 1e-4;
  ASSERT_EQ(want.elements(), got.elements());
  for (int64_t i = 0; i < want.elements(); ++i) {
    const double expected = want.get_offset(i);
    const double actual = got.get_offset(i);
    if (std::isnan(expected) || std::isinf(expected)) {
      ASSERT_EQ(std::isnan(expected), std::isnan(actual)) << what << " element " << i;
      continue;
    }
    ASSERT_LE(std::abs(actual - expected), parity_bound(dtype) * std::abs(expected) + floor)
        << what << " element " << i << " want " << expected << " got " << actual;
  }
}

/// Random tensor, contiguous or with gaps.
[[nodiscard]] inline TestTensor random_tensor(std::mt19937_64* random, DType dtype,
                                              const std::vector<int64_t>& shape,
                                              int64_t extra_columns = 0) {
  std::vector<int64_t> capacity = shape;
  capacity.back() += extra_columns;
  TestTensor tensor(dtype, shape, capacity);
  tensor.fill_normal(random);
  return tensor;
}

}  // namespace diffulex::test
