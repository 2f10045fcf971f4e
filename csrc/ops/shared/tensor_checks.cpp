// SPDX-License-Identifier: Apache-2.0
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

constexpr uintptr_t kWorkspaceAlignment = 256;

std::string dtype_list(std::initializer_list<DType> dtypes) {
  std::string text;
  size_t index = 0;
  for (const DType dtype : dtypes) {
    text += index == 0 ? "" : (index + 1 == dtypes.size() ? " or " : ", ");
    text += to_string(dtype);
    ++index;
  }
  return text;
}

std::string pattern_text(std::initializer_list<int64_t> shape) {
  std::string text = "[";
  for (const int64_t extent : shape) {
    text += text.size() > 1 ? ", " : "";
    text += extent == kAnyExtent ? "*" : std::to_string(extent);
  }
  return text + "]";
}

}  // namespace

std::string shape_text(const TensorRef& tensor) {
  std::string text = "[";
  for (int32_t dim = 0; dim < tensor.rank; ++dim) {
    text += dim > 0 ? ", " : "";
    text += std::to_string(tensor.size[dim]);
  }
  return text + "]";
}

Status ArgumentCheck::error(StatusCode code, const std::string& expected,
                            const std::string& got) const {
  return make_error(code, "diffulex::", op_, ": ", argument_, ": expected ", expected, ", got ",
                    got);
}

Status ArgumentCheck::present() const {
  if (!tensor_.present()) {
    return error(StatusCode::kInvalidArgument, "a tensor", "none");
  }
  return {};
}

Status ArgumentCheck::absent(const char* reason) const {
  if (tensor_.present()) {
    return error(StatusCode::kUnsupported, std::string("none (") + reason + ")",
                 "a tensor of shape " + shape_text(tensor_));
  }
  return {};
}

Status ArgumentCheck::dtype(std::initializer_list<DType> dtypes) const {
  DIFFULEX_RETURN_IF_ERROR(present());
  for (const DType dtype : dtypes) {
    if (tensor_.dtype == dtype) {
      return {};
    }
  }
  return error(StatusCode::kInvalidArgument, "dtype " + dtype_list(dtypes),
               to_string(tensor_.dtype));
}

Status ArgumentCheck::shape(std::initializer_list<int64_t> shape) const {
  bool equal = tensor_.rank == static_cast<int32_t>(shape.size());
  int32_t dim = 0;
  for (const int64_t extent : shape) {
    equal = equal && (extent == kAnyExtent || extent == tensor_.size[dim]);
    ++dim;
  }
  if (!equal) {
    return error(StatusCode::kInvalidArgument, "shape " + pattern_text(shape), shape_text(tensor_));
  }
  return {};
}

Status ArgumentCheck::last_contiguous() const {
  if (tensor_.rank > 0 && tensor_.numel() > 0 && tensor_.last() > 1 &&
      tensor_.stride[tensor_.rank - 1] != 1) {
    return error(StatusCode::kInvalidArgument, "a contiguous last dimension",
                 "stride " + std::to_string(tensor_.stride[tensor_.rank - 1]));
  }
  return {};
}

Status ArgumentCheck::contiguous_from(int32_t first_dim) const {
  if (tensor_.numel() == 0) {
    return {};
  }
  int64_t expected = 1;
  for (int32_t dim = tensor_.rank - 1; dim >= first_dim; --dim) {
    if (tensor_.size[dim] > 1 && tensor_.stride[dim] != expected) {
      return error(
          StatusCode::kInvalidArgument,
          "contiguous dimensions from " + std::to_string(first_dim) + " on",
          "stride " + std::to_string(tensor_.stride[dim]) + " in dimension " + std::to_string(dim));
    }
    expected *= tensor_.size[dim];
  }
  return {};
}

Status ArgumentCheck::matches(std::initializer_list<DType> dtypes,
                              std::initializer_list<int64_t> shape) const {
  DIFFULEX_RETURN_IF_ERROR(dtype(dtypes));
  DIFFULEX_RETURN_IF_ERROR(this->shape(shape));
  return last_contiguous();
}

Status ArgumentCheck::dense(std::initializer_list<DType> dtypes,
                            std::initializer_list<int64_t> shape) const {
  DIFFULEX_RETURN_IF_ERROR(dtype(dtypes));
  DIFFULEX_RETURN_IF_ERROR(this->shape(shape));
  return contiguous_from(0);
}

Status ArgumentCheck::activation() const {
  DIFFULEX_RETURN_IF_ERROR(dtype({DType::kF32, DType::kF16, DType::kBF16}));
  if (tensor_.rank < 1) {
    return error(StatusCode::kInvalidArgument, "at least one dimension", shape_text(tensor_));
  }
  return last_contiguous();
}

Status ArgumentCheck::same_shape(const char* other_name, const TensorRef& other) const {
  DIFFULEX_RETURN_IF_ERROR(present());
  bool equal = tensor_.rank == other.rank;
  for (int32_t dim = 0; equal && dim < other.rank; ++dim) {
    equal = tensor_.size[dim] == other.size[dim];
  }
  if (!equal) {
    return error(StatusCode::kInvalidArgument,
                 std::string("the shape of ") + other_name + " " + shape_text(other),
                 shape_text(tensor_));
  }
  return {};
}

Status check_act(const char* op, Activation act) {
  if (act != Activation::kSilu && act != Activation::kGeluTanh && act != Activation::kGeluErf) {
    return scalar_error(op, "act", "-1 (none), 0 (silu), 1 (gelu tanh) or 2 (gelu erf)",
                        static_cast<int32_t>(act));
  }
  return {};
}

Status check_workspace(const char* op, const ExecContext& context, size_t needed) {
  if (needed == 0) {
    return {};
  }
  if (context.workspace == nullptr || context.workspace_bytes < needed) {
    return make_error(StatusCode::kInvalidArgument, "diffulex::", op,
                      ": workspace: expected at least ", needed, " bytes, got ",
                      context.workspace == nullptr ? size_t{0} : context.workspace_bytes);
  }
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): alignment needs the address
  const uintptr_t address = reinterpret_cast<uintptr_t>(context.workspace);
  if (address % kWorkspaceAlignment != 0) {
    return make_error(StatusCode::kInvalidArgument, "diffulex::", op,
                      ": workspace: expected a 256-byte aligned address, got remainder ",
                      address % kWorkspaceAlignment);
  }
  return {};
}

}  // namespace diffulex
