// SPDX-License-Identifier: Apache-2.0
#pragma once

// Device copies of host tensors for one op call, and the guard that skips tests without a GPU.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

/// Skips the running test, with the reason, when no CUDA device can be used.
#define DIFFULEX_REQUIRE_DEVICE()                                             \
  do {                                                                        \
    int device_count = 0;                                                     \
    const cudaError_t device_error = cudaGetDeviceCount(&device_count);       \
    if (device_error != cudaSuccess || device_count == 0) {                   \
      cudaGetLastError();                                                     \
      GTEST_SKIP() << "no CUDA device: " << cudaGetErrorString(device_error); \
    }                                                                         \
  } while (false)

#define DIFFULEX_ASSERT_CUDA(expression) \
  ASSERT_EQ((expression), cudaSuccess) << cudaGetErrorString(cudaGetLastError())

namespace diffulex::test {

/// Device memory freed with the object. Allocation failures throw, which gtest reports.
class DeviceBuffer final {
 public:
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
    if (cudaMalloc(&data_, bytes == 0 ? 16 : bytes) != cudaSuccess) {
      throw std::runtime_error("DeviceBuffer: cudaMalloc failed");
    }
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  [[nodiscard]] uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Bytes from the first to the last element of a strided tensor.
[[nodiscard]] inline size_t span_bytes(const TensorRef& tensor) {
  int64_t last = 0;
  for (int32_t dim = 0; dim < tensor.rank; ++dim) {
    if (tensor.size[dim] == 0) {
      return 0;
    }
    last += (tensor.size[dim] - 1) * tensor.stride[dim];
  }
  return static_cast<size_t>((last + 1) * dtype_bytes(tensor.dtype));
}

/// Uploads the tensors of one call and downloads what the op may have written.
class DeviceMirror final {
 public:
  /// `shift` moves every tensor that many elements off its aligned address.
  explicit DeviceMirror(int64_t shift = 0) : shift_(shift) {}

  /// Device twin of `host` with the same strides and content; absent stays absent.
  TensorRef upload(const TensorRef& host) {
    if (!host.present()) {
      return host;
    }
    const size_t bytes = span_bytes(host);
    const size_t offset = static_cast<size_t>(shift_ * dtype_bytes(host.dtype));
    buffers_.push_back(std::make_unique<DeviceBuffer>(bytes + offset));
    TensorRef device = host;
    device.data = buffers_.back()->data() + offset;
    check(cudaMemcpy(device.data, host.data, bytes, cudaMemcpyHostToDevice));
    pairs_.push_back({host.data, device.data, bytes});
    return device;
  }

  /// Copies every tensor back over its host twin.
  void download() {
    check(cudaDeviceSynchronize());
    for (const Pair& pair : pairs_) {
      check(cudaMemcpy(pair.host, pair.device, pair.bytes, cudaMemcpyDeviceToHost));
    }
  }

  /// Uploads the host twins again, into the same device memory.
  void refresh() {
    for (const Pair& pair : pairs_) {
      check(cudaMemcpy(pair.device, pair.host, pair.bytes, cudaMemcpyHostToDevice));
    }
    check(cudaDeviceSynchronize());
  }

  static void check(cudaError_t error) {
    if (error != cudaSuccess) {
      throw std::runtime_error(std::string("DeviceMirror: ") + cudaGetErrorString(error));
    }
  }

 private:
  struct Pair {
    void* host;
    void* device;
    size_t bytes;
  };
  int64_t shift_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  std::vector<Pair> pairs_;
};

/// Context of device 0 with a workspace of rubbish bytes.
class DeviceContext final {
 public:
  explicit DeviceContext(size_t workspace_bytes) : workspace_(workspace_bytes) {
    poison();
    context_.device = Device::kCuda;
    context_.workspace = workspace_.data();
    context_.workspace_bytes = workspace_bytes;
  }
  void poison() {
    DeviceMirror::check(cudaMemset(workspace_.data(), 0xFF, workspace_.bytes()));
    DeviceMirror::check(cudaDeviceSynchronize());
  }
  [[nodiscard]] ExecContext& get() { return context_; }

 private:
  DeviceBuffer workspace_;
  ExecContext context_;
};

/// Scales down random test counts, for runs under a sanitizer.
[[nodiscard]] inline uint64_t num_seeds(uint64_t full) {
  const char* text = std::getenv("DIFFULEX_TEST_SEEDS");
  const uint64_t limit = text == nullptr ? full : std::strtoull(text, nullptr, 10);
  return limit < full ? limit : full;
}

}  // namespace diffulex::test
