// SPDX-License-Identifier: Apache-2.0
#pragma once

// The rows of arguments in ops.def as types: each knows its text in a torch schema, the type of its
// value in a call, and the field of the parameters that it fills.

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "torch/checks.h"

namespace diffulex::torch_ops {

/// What an op does with a tensor of the caller.
enum class Access { kRead, kWrite };

/// Type of a row: an optional tensor of uint8, or of bool, which is stored the same way.
struct OptionalFlags {};
/// Type of a row: an optional tensor that callers may leave out.
struct OmittableTensor {};

template <typename Type, typename... Choices>
inline constexpr bool kIsOneOf = (std::is_same_v<Type, Choices> || ...);

template <typename Type>
inline constexpr bool kIsOptionalEnum = false;
template <typename Type>
inline constexpr bool kIsOptionalEnum<std::optional<Type>> = std::is_enum_v<Type>;

/// The text of one torch schema. Every op writes tensors of the caller and returns nothing, so that
/// it can run inside CUDA graph capture.
class SchemaText final {
 public:
  explicit SchemaText(const char* op) : text_(std::string(op) + "(") {}

  /// `Type` is that of a row.
  template <typename Type>
  void tensor(const char* name, Access access) {
    constexpr bool kIsOptional = !std::is_same_v<Type, Tensor>;
    add_tensor(name, kIsOptional, access);
    if (std::is_same_v<Type, OmittableTensor>) {
      text_ += "=None";
    }
  }
  /// `type` is that of torch; no default where `default_value` is null.
  void scalar(const char* name, const char* type, const char* default_value);
  [[nodiscard]] std::string finish() && { return std::move(text_) + ") -> ()"; }

 private:
  void add_tensor(const char* name, bool is_optional, Access access);
  void separate();

  std::string text_;
  int num_written_ = 0;
  bool is_first_ = true;
  bool has_scalars_ = false;
};

/// DIFFULEX_TENSOR: fills a TensorRef.
template <typename Params, typename Type, Access kAccess>
struct TensorArgument {
  static_assert(
      kIsOneOf<Type, Tensor, OptionalTensor, OmittableTensor, OptionalFlags>,
      "DIFFULEX_TENSOR: expected Tensor, OptionalTensor, OmittableTensor or OptionalFlags");
  static_assert(kAccess == Access::kRead || !std::is_same_v<Type, OptionalFlags>,
                "DIFFULEX_TENSOR: expected OptionalFlags that the op only reads");
  using Value = std::conditional_t<std::is_same_v<Type, Tensor>, Tensor, OptionalTensor>;

  const char* name;
  TensorRef Params::* field;

  void declare(SchemaText& schema) const { schema.tensor<Type>(name, kAccess); }
  void assign(const Value& value, OpArguments& arguments, Params& params) const {
    if constexpr (std::is_same_v<Type, OptionalFlags>) {
      params.*field = arguments.flags(name, value);
    } else if constexpr (kAccess == Access::kRead) {
      params.*field = arguments.input(name, value);
    } else {
      params.*field = arguments.output(name, value);
    }
  }
};

/// DIFFULEX_WORKSPACE: becomes the scratch of the call.
template <typename Params, typename Type>
struct WorkspaceArgument {
  static_assert(kIsOneOf<Type, Tensor, OptionalTensor>,
                "DIFFULEX_WORKSPACE: expected Tensor or OptionalTensor");
  using Value = Type;

  void declare(SchemaText& schema) const { schema.tensor<Type>("workspace", Access::kWrite); }
  void assign(const Value& value, OpArguments& arguments, Params& /*params*/) const {
    arguments.set_workspace(value);
  }
};

/// DIFFULEX_SCALAR: fills a field of type bool, float, int32_t, int64_t, of a list of int64_t or of
/// an enumeration; -1 stands for no value of an optional one.
template <typename Params, typename Type>
struct ScalarArgument {
  static_assert(kIsOneOf<Type, bool, float, int32_t, int64_t, std::vector<int64_t>> ||
                    std::is_enum_v<Type> || kIsOptionalEnum<Type>,
                "DIFFULEX_SCALAR: expected bool, float, int32_t, int64_t, a list of int64_t, an "
                "enumeration or an optional one");
  static constexpr bool kIsBool = std::is_same_v<Type, bool>;
  static constexpr bool kIsFloat = std::is_same_v<Type, float>;
  static constexpr bool kIsList = std::is_same_v<Type, std::vector<int64_t>>;
  using Number = std::conditional_t<kIsBool, bool, std::conditional_t<kIsFloat, double, int64_t>>;
  using Value = std::conditional_t<kIsList, Type, Number>;

  const char* name;
  Type Params::* field;
  const char* default_value = nullptr;

  void declare(SchemaText& schema) const {
    const char* number = kIsBool ? "bool" : kIsFloat ? "float" : "int";
    schema.scalar(name, kIsList ? "int[]" : number, default_value);
  }
  void assign(const Value& value, OpArguments& arguments, Params& params) const {
    if constexpr (kIsBool || kIsFloat || kIsList || std::is_same_v<Type, int64_t>) {
      params.*field = static_cast<Type>(value);
    } else if constexpr (std::is_same_v<Type, int32_t>) {
      params.*field = arguments.int32(name, value);
    } else if constexpr (std::is_enum_v<Type>) {
      params.*field = arguments.enumeration<Type>(name, value);
    } else if (value != -1) {
      params.*field = arguments.enumeration<typename Type::value_type>(name, value);
    }
  }
};

/// The schema of `op` with the arguments `rows`.
template <typename... Rows>
std::string schema_of(const char* op, const std::tuple<Rows...>& rows) {
  SchemaText schema(op);
  std::apply([&](const auto&... row) { (row.declare(schema), ...); }, rows);
  return std::move(schema).finish();
}

template <typename Params, typename... Rows, size_t... kIndex>
void call_kernel(const char* op, Status (*kernel)(const Params&, const ExecContext&),
                 const std::tuple<Rows...>& rows, StableIValue* stack,
                 std::index_sequence<kIndex...> /*arguments*/) {
  // The stack hands its tensors over: all of them are taken before the first check can raise.
  const std::tuple<typename Rows::Value...> values{
      torch::stable::detail::to<typename Rows::Value>(stack[kIndex])...};
  OpArguments arguments(op);
  Params params;
  (std::get<kIndex>(rows).assign(std::get<kIndex>(values), arguments, params), ...);
  arguments.run(kernel, params);
}

/// Calls `kernel` with the arguments `rows` of a boxed call, one entry of `stack` each.
template <typename Params, typename... Rows>
void call_kernel(const char* op, Status (*kernel)(const Params&, const ExecContext&),
                 const std::tuple<Rows...>& rows, StableIValue* stack) {
  call_kernel(op, kernel, rows, stack, std::index_sequence_for<Rows...>());
}

}  // namespace diffulex::torch_ops
