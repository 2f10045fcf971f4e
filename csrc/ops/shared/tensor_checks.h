// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "diffulex/core/status.h"
#include "diffulex/ops/activation.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// Wildcard extent of a shape pattern.
inline constexpr int64_t kAnyExtent = -1;

/// "[2, 8, 64]".
[[nodiscard]] std::string shape_text(const TensorRef& tensor);

/// Checks of one argument of one op; messages read
/// `diffulex::<op>: <argument>: expected <...>, got <...>`. Each returns the first violation.
class ArgumentCheck final {
 public:
  ArgumentCheck(const char* op, const char* argument, const TensorRef& tensor) noexcept
      : op_(op), argument_(argument), tensor_(tensor) {}

  /// The argument is given.
  [[nodiscard]] Status present() const;
  /// The argument is not given; `reason` explains why it cannot be.
  [[nodiscard]] Status absent(const char* reason) const;
  /// Given, of one of `dtypes`, of the shape (kAnyExtent matches any), last dimension contiguous.
  [[nodiscard]] Status matches(std::initializer_list<DType> dtypes,
                               std::initializer_list<int64_t> shape) const;
  /// As matches, and contiguous in every dimension.
  [[nodiscard]] Status dense(std::initializer_list<DType> dtypes,
                             std::initializer_list<int64_t> shape) const;
  /// float32, float16 or bfloat16, any rank >= 1, last dimension contiguous.
  [[nodiscard]] Status activation() const;
  /// One of `dtypes`.
  [[nodiscard]] Status dtype(std::initializer_list<DType> dtypes) const;
  /// Given, with the extents of `other`.
  [[nodiscard]] Status same_shape(const char* other_name, const TensorRef& other) const;
  /// Last dimension contiguous.
  [[nodiscard]] Status last_contiguous() const;
  /// Dimensions from `first_dim` on contiguous among themselves.
  [[nodiscard]] Status contiguous_from(int32_t first_dim) const;
  /// A failure about this argument.
  [[nodiscard]] Status error(StatusCode code, const std::string& expected,
                             const std::string& got) const;

 private:
  [[nodiscard]] Status shape(std::initializer_list<int64_t> shape) const;

  const char* op_;
  const char* argument_;
  const TensorRef& tensor_;
};

/// A failure about a scalar argument.
template <typename T>
[[nodiscard]] Status scalar_error(const char* op, const char* argument, const char* expected,
                                  const T& got) {
  return make_error(StatusCode::kInvalidArgument, "diffulex::", op, ": ", argument, ": expected ",
                    expected, ", got ", got);
}

/// The activation of a product that has one.
[[nodiscard]] Status check_act(const char* op, Activation act);

/// The scratch of `context` holds at least `needed` bytes and is 256-byte aligned.
[[nodiscard]] Status check_workspace(const char* op, const ExecContext& context, size_t needed);

}  // namespace diffulex
