// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "diffulex/core/status.h"
#include "diffulex/ops/dtype.h"
#include "diffulex/ops/exec_context.h"

namespace diffulex::cuda {

/// Turns a CUDA error into a Status naming the op. The runtime's last error is cleared: the next
/// op, which reads it after its launch, must not find the error of this one.
[[nodiscard]] inline Status cuda_status(const char* where, cudaError_t error) {
  if (error == cudaSuccess) {
    return Status::ok_status();
  }
  cudaGetLastError();
  return make_error(StatusCode::kCudaError, where, ": expected success from CUDA, got ",
                    cudaGetErrorName(error), " (", cudaGetErrorString(error), ")");
}

/// Status of the launch just made. The runtime is linked statically, so its last error is ours
/// alone and must be read at once.
[[nodiscard]] inline Status check_launch(const char* where) {
  return cuda_status(where, cudaGetLastError());
}

[[nodiscard]] inline cudaStream_t stream_of(const ExecContext& context) {
  return static_cast<cudaStream_t>(context.stream);
}

/// Makes `context.device_index` current for the scope.
class DeviceGuard final {
 public:
  explicit DeviceGuard(const ExecContext& context) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != context.device_index) {
      error_ = cudaSetDevice(context.device_index);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) {
      cudaSetDevice(previous_);
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  [[nodiscard]] Status status(const char* where) const { return cuda_status(where, error_); }

 private:
  int previous_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

template <typename T>
struct TypeTag final {
  using type = T;
};

/// Calls `body(TypeTag<T>)` for the activation type `dtype` names.
template <typename Body>
[[nodiscard]] Status dispatch_dtype(const char* where, DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kF32:
      return body(TypeTag<float>{});
    case DType::kF16:
      return body(TypeTag<__half>{});
    case DType::kBF16:
      return body(TypeTag<__nv_bfloat16>{});
    default:
      return make_error(StatusCode::kNoKernel, where,
                        ": dtype: expected float32, float16 or bfloat16, got ", to_string(dtype));
  }
}

/// Calls `body` for every activation type until one fails.
template <typename Body>
[[nodiscard]] Status for_each_dtype(const char* where, Body&& body) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    DIFFULEX_RETURN_IF_ERROR(dispatch_dtype(where, dtype, body));
  }
  return Status::ok_status();
}

/// Loads the code of a kernel on the current device.
template <typename Kernel>
[[nodiscard]] Status touch_kernel(const char* where, Kernel* kernel) {
  cudaFuncAttributes attributes;
  return cuda_status(where, cudaFuncGetAttributes(&attributes, kernel));
}

[[nodiscard]] constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// True when the address in `pointer` is a multiple of 16 bytes.
[[nodiscard]] inline bool is_aligned16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace diffulex::cuda
