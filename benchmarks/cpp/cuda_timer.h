// SPDX-License-Identifier: Apache-2.0
#pragma once

// Time of one op on the device: a CUDA graph holds `copies` calls over rotated buffers, events
// around its replay give the time. Buffers rotate over at least three times the L2 cache, so every
// call meets cold data.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime.h>

namespace diffulex::bench {

inline void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

/// Bytes that rotated buffers must cover: three times an L2 of 60 MB.
inline constexpr int64_t kRotatedBytes = 180LL << 20;

/// Sets of buffers to rotate when one call touches `bytes`.
[[nodiscard]] inline int64_t num_rotations(int64_t bytes) {
  return std::clamp<int64_t>(kRotatedBytes / std::max<int64_t>(bytes, 1) + 1, 2, 64);
}

/// Captures calls into a graph once and times its replays.
class CudaTimer final {
 public:
  /// `call(i, stream)` enqueues the op on buffer set i % rotations.
  CudaTimer(int64_t copies, const std::function<void(int64_t, cudaStream_t)>& call)
      : copies_(copies) {
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    require(cudaEventCreate(&start_), "event");
    require(cudaEventCreate(&stop_), "event");
    call(0, stream_);
    require(cudaStreamSynchronize(stream_), "eager call");
    cudaGraph_t graph = nullptr;
    require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "begin capture");
    for (int64_t i = 0; i < copies; ++i) {
      call(i, stream_);
    }
    require(cudaStreamEndCapture(stream_, &graph), "end capture");
    require(cudaGraphInstantiate(&graph_, graph, 0), "instantiate");
    cudaGraphDestroy(graph);
    for (int warm = 0; warm < 10; ++warm) {
      replay();
    }
  }
  ~CudaTimer() {
    cudaGraphExecDestroy(graph_);
    cudaEventDestroy(start_);
    cudaEventDestroy(stop_);
    cudaStreamDestroy(stream_);
  }
  CudaTimer(const CudaTimer&) = delete;
  CudaTimer& operator=(const CudaTimer&) = delete;

  /// Seconds of one call, averaged over the copies of one replay.
  double replay() {
    require(cudaEventRecord(start_, stream_), "record");
    require(cudaGraphLaunch(graph_, stream_), "launch");
    require(cudaEventRecord(stop_, stream_), "record");
    require(cudaEventSynchronize(stop_), "synchronise");
    float milliseconds = 0.0F;
    require(cudaEventElapsedTime(&milliseconds, start_, stop_), "elapsed");
    return static_cast<double>(milliseconds) * 1e-3 / static_cast<double>(copies_);
  }

 private:
  int64_t copies_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t stop_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace diffulex::bench
