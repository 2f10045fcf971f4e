// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <torch/csrc/stable/tensor.h>

#include "diffulex/core/status.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex::torch_ops {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// Where every tensor of one op call has to live.
struct OpDevice {
  Device device = Device::kCpu;
  int32_t index = 0;  // CUDA ordinal, 0 on CPU
};

/// Raises the RuntimeError that Python sees, with exactly `message` as its text.
[[noreturn]] void raise_error(const std::string& message);

/// Raises `status` unless it is ok.
void raise_if_error(const Status& status);

/// The arguments of one op call. Turns torch tensors and integers into what the kernels take and
/// requires all tensors to live on the device of the first one. Shapes, dtypes and strides are
/// checked by the kernel library itself. Not thread-safe; one object per call.
class OpArguments final {
 public:
  /// `op` is the name without namespace; a string literal.
  explicit OpArguments(const char* op) noexcept : op_(op) {}

  /// Borrows a tensor the op only reads.
  [[nodiscard]] TensorRef input(const char* name, const Tensor& tensor);
  /// As above; an absent tensor gives an absent TensorRef.
  [[nodiscard]] TensorRef input(const char* name, const OptionalTensor& tensor);
  /// Borrows a tensor the op writes.
  [[nodiscard]] TensorRef output(const char* name, const Tensor& tensor);
  [[nodiscard]] TensorRef output(const char* name, const OptionalTensor& tensor);
  /// Borrows an optional tensor of truth values: uint8, or bool, which is stored the same way.
  [[nodiscard]] TensorRef flags(const char* name, const OptionalTensor& tensor);
  /// Takes the scratch tensor: uint8, contiguous, 256-byte aligned.
  void set_workspace(const OptionalTensor& tensor);

  /// Narrows an integer argument.
  [[nodiscard]] int32_t int32(const char* name, int64_t value) const;
  /// Converts an integer argument to an enumeration over int32_t; the kernel library rejects values
  /// that have no enumerator.
  template <typename Enum>
  [[nodiscard]] Enum enumeration(const char* name, int64_t value) const {
    return static_cast<Enum>(int32(name, value));
  }

  /// Runs `kernel` on the device and stream of the arguments; raises its error.
  template <typename Params>
  void run(Status (*kernel)(const Params&, const ExecContext&), const Params& params) const {
    run_on_device(
        [](const void* function, const void* arguments, const ExecContext& context) {
          const auto* typed =
              static_cast<Status (*const*)(const Params&, const ExecContext&)>(function);
          return (*typed)(*static_cast<const Params*>(arguments), context);
        },
        &kernel, &params);
  }

 private:
  using Invoke = Status (*)(const void* kernel, const void* params, const ExecContext& context);

  [[noreturn]] void fail(const char* name, const std::string& expected,
                         const std::string& got) const;
  [[nodiscard]] TensorRef describe(const char* name, const Tensor& tensor);
  /// Extents and strides; no data, no dtype.
  [[nodiscard]] TensorRef shape_of(const char* name, const Tensor& tensor) const;
  void require_device(const char* name, const Tensor& tensor);
  void run_on_device(Invoke invoke, const void* kernel, const void* params) const;

  const char* op_;
  std::optional<OpDevice> device_;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
};

}  // namespace diffulex::torch_ops
