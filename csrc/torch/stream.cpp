// SPDX-License-Identifier: Apache-2.0
#include "torch/stream.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

// torch declares this function only for builds with CUDA. Weak, so that a library with CUDA kernels
// loads under a torch without CUDA, where the address is null.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace diffulex::torch_ops {
namespace {

/// Reads a switch: unset, empty or "0" is off, "1" is on.
bool read_switch(const char* name) {
  const char* text = std::getenv(name);
  const std::string_view value = text == nullptr ? std::string_view() : text;
  if (value.empty() || value == "0") {
    return false;
  }
  if (value != "1") {
    raise_error(detail::concat("environment: ", name, ": expected 0 or 1, got ", value));
  }
  return true;
}

struct Switches {
  bool check_data = read_switch("DIFFULEX_CHECK");
  // Read by the kernels (hopper.h), which have no way to refuse a wrong value.
  bool force_sm80 = read_switch("DIFFULEX_FORCE_SM80");
};

/// The switches as they were at the first op call.
const Switches& switches() {
  static const Switches values;
  return values;
}

thread_local bool weights_settled = false;
thread_local bool batch_invariant = false;

/// ParallelFor over torch's intra-op pool. torch may cut a range below the grain, the contract of
/// ParallelFor forbids it, so the pool is handed whole grains.
void pool_parallel_for(int64_t begin, int64_t end, int64_t grain, RangeFn body, void* context,
                       void* /*pool*/) {
  if (begin >= end) {
    return;
  }
  grain = std::max<int64_t>(grain, 1);
  const int64_t num_grains = (end - begin - 1) / grain + 1;
  if (num_grains == 1) {
    body(begin, end, context);
    return;
  }
  torch::stable::parallel_for(0, num_grains, 1, [=](int64_t first, int64_t last) {
    body(begin + first * grain, std::min(end, begin + last * grain), context);
  });
}

void* current_cuda_stream(const char* op, int32_t device_index) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    raise_error(detail::concat("diffulex::", op, ": this torch build has no CUDA"));
  }
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device_index, &stream) != AOTI_TORCH_SUCCESS) {
    raise_error(detail::concat("diffulex::", op, ": expected a current stream on cuda:",
                               device_index, ", got an error of torch"));
  }
  return stream;
}

}  // namespace

bool exchange_weights_settled(bool settled) noexcept {
  return std::exchange(weights_settled, settled);
}

bool exchange_batch_invariant(bool invariant) noexcept {
  return std::exchange(batch_invariant, invariant);
}

DeviceScope::DeviceScope(const char* op, const OpDevice& device) {
  context_.device = device.device;
  context_.device_index = device.index;
  context_.check_data = switches().check_data;
  context_.batch_invariant = batch_invariant;
  context_.weights_settled = weights_settled;
  context_.parallel_for = pool_parallel_for;
  if (device.device == Device::kCuda) {
    context_.stream = current_cuda_stream(op, device.index);
    guard_.emplace(device.index);
  }
}

}  // namespace diffulex::torch_ops
