// SPDX-License-Identifier: Apache-2.0
#include "torch/checks.h"

#include <limits>
#include <stdexcept>

#include <torch/headeronly/core/ScalarType.h>

#include "torch/stream.h"

namespace diffulex::torch_ops {
namespace {

using torch::headeronly::ScalarType;

constexpr uintptr_t kWorkspaceAlignment = 256;

std::optional<DType> to_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return DType::kF32;
    case ScalarType::Half:
      return DType::kF16;
    case ScalarType::BFloat16:
      return DType::kBF16;
    case ScalarType::Float8_e4m3fn:
      return DType::kF8E4M3;
    case ScalarType::Char:
      return DType::kI8;
    // A bool is one byte, 0 or 1: every op that takes flags as uint8 takes it as well.
    case ScalarType::Bool:
    case ScalarType::Byte:
      return DType::kU8;
    case ScalarType::Int:
      return DType::kI32;
    case ScalarType::Long:
      return DType::kI64;
    case ScalarType::Double:
      return DType::kF64;
    default:
      return std::nullopt;
  }
}

std::string device_name(const OpDevice& device) {
  return device.device == Device::kCpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

}  // namespace

void raise_error(const std::string& message) {
  // STD_TORCH_CHECK throws this very type, but puts the function, file and line of the build
  // machine in front of the text; the documented text starts with the op.
  throw std::runtime_error(message);
}

void raise_if_error(const Status& status) {
  if (!status.ok()) {
    raise_error(status.message());
  }
}

void OpArguments::fail(const char* name, const std::string& expected,
                       const std::string& got) const {
  raise_error(
      detail::concat("diffulex::", op_, ": ", name, ": expected ", expected, ", got ", got));
}

void OpArguments::require_device(const char* name, const Tensor& tensor) {
  OpDevice device;
  if (tensor.is_cuda()) {
    device.device = Device::kCuda;
    device.index = tensor.get_device_index();
  } else if (!tensor.is_cpu()) {
    fail(name, "a tensor on cpu or cuda", "a tensor on another device");
  }
  if (!device_) {
    device_ = device;
  } else if (device_->device != device.device || device_->index != device.index) {
    fail(name, "a tensor on " + device_name(*device_), device_name(device));
  }
}

TensorRef OpArguments::describe(const char* name, const Tensor& tensor) {
  require_device(name, tensor);
  const std::optional<DType> dtype = to_dtype(tensor.scalar_type());
  if (!dtype) {
    fail(name, "float32, float16, bfloat16, float8_e4m3fn, float64, int8, uint8, int32 or int64",
         torch::headeronly::toString(tensor.scalar_type()));
  }
  TensorRef ref = shape_of(name, tensor);
  ref.dtype = *dtype;
  return ref;
}

TensorRef OpArguments::shape_of(const char* name, const Tensor& tensor) const {
  const int64_t rank = tensor.dim();
  if (rank > TensorRef::kMaxRank) {
    fail(name, detail::concat("at most ", TensorRef::kMaxRank, " dimensions"),
         std::to_string(rank));
  }
  TensorRef ref;
  ref.rank = static_cast<int32_t>(rank);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (int32_t dim = 0; dim < ref.rank; ++dim) {
    ref.size[dim] = sizes[static_cast<size_t>(dim)];
    ref.stride[dim] = strides[static_cast<size_t>(dim)];
  }
  return ref;
}

TensorRef OpArguments::input(const char* name, const Tensor& tensor) {
  TensorRef ref = describe(name, tensor);
  // TensorRef has one pointer type for both directions; kernels write only through outputs. The
  // const accessor keeps a copy-on-write tensor shared.
  ref.data = const_cast<void*>(tensor.const_data_ptr());
  return ref;
}

TensorRef OpArguments::input(const char* name, const OptionalTensor& tensor) {
  return tensor ? input(name, *tensor) : TensorRef{};
}

TensorRef OpArguments::output(const char* name, const Tensor& tensor) {
  TensorRef ref = describe(name, tensor);
  ref.data = tensor.mutable_data_ptr();
  return ref;
}

TensorRef OpArguments::output(const char* name, const OptionalTensor& tensor) {
  return tensor ? output(name, *tensor) : TensorRef{};
}

TensorRef OpArguments::flags(const char* name, const OptionalTensor& tensor) {
  if (!tensor || tensor->scalar_type() != ScalarType::Bool) {
    return input(name, tensor);
  }
  require_device(name, *tensor);
  TensorRef ref = shape_of(name, *tensor);
  ref.dtype = DType::kU8;
  ref.data = const_cast<void*>(tensor->const_data_ptr());
  return ref;
}

void OpArguments::set_workspace(const OptionalTensor& tensor) {
  if (!tensor) {
    return;
  }
  const TensorRef ref = output("workspace", *tensor);
  if (ref.dtype != DType::kU8 || !tensor->is_contiguous()) {
    fail("workspace", "a contiguous uint8 tensor",
         detail::concat(tensor->is_contiguous() ? "a contiguous " : "a strided ",
                        to_string(ref.dtype), " tensor"));
  }
  const auto address = reinterpret_cast<uintptr_t>(ref.data);
  if (address % kWorkspaceAlignment != 0) {
    fail("workspace", detail::concat("an address that is a multiple of ", kWorkspaceAlignment),
         detail::concat("remainder ", address % kWorkspaceAlignment));
  }
  workspace_ = ref.data;
  workspace_bytes_ = static_cast<size_t>(ref.numel());
}

int32_t OpArguments::int32(const char* name, int64_t value) const {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    fail(name, "a 32-bit integer", std::to_string(value));
  }
  return static_cast<int32_t>(value);
}

void OpArguments::run_on_device(Invoke invoke, const void* kernel, const void* params) const {
  const DeviceScope scope(op_, device_.value_or(OpDevice{}));
  ExecContext context = scope.context();
  context.workspace = workspace_;
  context.workspace_bytes = workspace_bytes_;
  raise_if_error(invoke(kernel, params, context));
}

}  // namespace diffulex::torch_ops
