// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the CUDA benchmarks share: tensors on both sides, random data, and the measurement.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "cuda_timer.h"
#include "diffulex/ops/tensor_ref.h"
#include "ops/shared/half.h"

namespace diffulex::bench {

/// Host vector with a device copy of the same length.
template <typename T>
class Mirrored final {
 public:
  explicit Mirrored(std::vector<T> values) : host(std::move(values)) {
    require(cudaMalloc(&device_, host.size() * sizeof(T) + 16), "malloc");
    upload();
  }
  ~Mirrored() { cudaFree(device_); }
  Mirrored(const Mirrored&) = delete;
  Mirrored& operator=(const Mirrored&) = delete;

  void upload() {
    require(cudaMemcpy(device_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice),
            "upload");
  }
  void download() {
    require(cudaMemcpy(host.data(), device_, host.size() * sizeof(T), cudaMemcpyDeviceToHost),
            "download");
  }
  TensorRef ref(bool on_device, DType dtype, std::vector<int64_t> shape) {
    TensorRef result;
    result.data = on_device ? device_ : static_cast<void*>(host.data());
    result.dtype = dtype;
    result.rank = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (size_t dim = shape.size(); dim-- > 0;) {
      result.size[dim] = shape[dim];
      result.stride[dim] = stride;
      stride *= shape[dim];
    }
    return result;
  }

  std::vector<T> host;

 private:
  void* device_ = nullptr;
};

using Bf16 = Mirrored<uint16_t>;
using Ints = Mirrored<int32_t>;

/// N(0, 1) in bf16; a block of fresh values repeats with a prime period, which no kernel can tell.
inline std::vector<uint16_t> normal_bf16(int64_t count, uint64_t seed) {
  constexpr int64_t kPeriod = 1000003;
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    values[static_cast<size_t>(i)] =
        i < kPeriod ? float_to_bf16(normal(random)) : values[static_cast<size_t>(i - kPeriod)];
  }
  return values;
}

/// False, with the reason in `state`, when there is no CUDA device.
inline bool has_device(benchmark::State& state) {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) {
    return true;
  }
  cudaGetLastError();
  state.SkipWithError("skipped: no CUDA device");
  return false;
}

/// What the current device could move and multiply in a second, by its clocks and units; 0:
/// unknown.
struct Roof {
  double bytes;  // of memory
  double flops;  // of dense 16-bit products in its tensor cores
};

[[nodiscard]] inline Roof device_roof() {
  int device = 0;
  require(cudaGetDevice(&device), "device");
  const auto property = [&](cudaDeviceAttr name) {
    int value = 0;
    require(cudaDeviceGetAttribute(&value, name, device), "attribute");
    return static_cast<double>(value);
  };
  const int major = static_cast<int>(property(cudaDevAttrComputeCapabilityMajor));
  const int minor = static_cast<int>(property(cudaDevAttrComputeCapabilityMinor));
  // Per multiprocessor and clock, of the architectures that kernels are written for.
  const double products = major == 9 ? 4096 : (major == 8 && minor == 0 ? 2048 : 0);
  const double clock = 1e3 * property(cudaDevAttrClockRate);
  // Two transfers a clock.
  const double transfers = 2e3 * property(cudaDevAttrMemoryClockRate);
  return {transfers * property(cudaDevAttrGlobalMemoryBusWidth) / 8,
          products * clock * property(cudaDevAttrMultiProcessorCount)};
}

/// Times `call` and reports median, 10th and 90th percentile in microseconds, the rates, and how
/// much of the time the device would need at the least.
inline void measure(benchmark::State& state, int64_t rotations, double bytes, double flops,
                    const std::function<void(int64_t, cudaStream_t)>& call) {
  const int64_t copies = std::max<int64_t>(rotations, 8);
  CudaTimer timer(copies, [&](int64_t i, cudaStream_t stream) { call(i % rotations, stream); });
  std::vector<double> times;
  for (auto _ : state) {
    times.push_back(timer.replay());
    state.SetIterationTime(times.back());
  }
  std::sort(times.begin(), times.end());
  const double median = times[times.size() / 2];
  state.counters["us"] = median * 1e6;
  state.counters["p10"] = times[times.size() / 10] * 1e6;
  state.counters["p90"] = times[times.size() - 1 - times.size() / 10] * 1e6;
  state.counters["GB/s"] = bytes / median * 1e-9;
  state.counters["TFLOP/s"] = flops / median * 1e-12;
  static const Roof roof = device_roof();
  if (roof.bytes > 0) {
    const double least = std::max(bytes / roof.bytes, roof.flops > 0 ? flops / roof.flops : 0.0);
    state.counters["% of roofline"] = 100 * least / median;
  }
}

}  // namespace diffulex::bench
