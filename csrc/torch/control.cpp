// SPDX-License-Identifier: Apache-2.0
//
// Controls that are not ops: how the ops of this thread run, and the preparation of a device.
#include <torch/csrc/stable/library.h>

#include "diffulex/ops/warmup.h"
#include "torch/checks.h"
#include "torch/stream.h"

namespace diffulex::torch_ops {
namespace {

/// Sets whether ops of this thread may read weights ahead and returns what was set before.
bool settle_weights(bool settled) {
  return exchange_weights_settled(settled);
}

/// Sets whether results of ops of this thread may not depend on other requests, and returns what
/// was set before.
bool make_batch_invariant(bool invariant) {
  return exchange_batch_invariant(invariant);
}

/// Loads every kernel on a CUDA device.
void warm_kernels(int64_t device_index) {
  const OpDevice device{Device::kCuda, static_cast<int32_t>(device_index)};
  const DeviceScope scope("warm_kernels", device);
  raise_if_error(warmup(scope.context()));
}

}  // namespace
}  // namespace diffulex::torch_ops

STABLE_TORCH_LIBRARY(diffulex_control, library) {
  library.def("make_batch_invariant(bool invariant) -> bool");
  library.def("settle_weights(bool settled) -> bool");
  library.def("warm_kernels(int device_index) -> ()");
}

// None has a tensor, so none has a device to be dispatched by.
STABLE_TORCH_LIBRARY_IMPL(diffulex_control, CompositeExplicitAutograd, library) {
  library.impl("make_batch_invariant", TORCH_BOX(&diffulex::torch_ops::make_batch_invariant));
  library.impl("settle_weights", TORCH_BOX(&diffulex::torch_ops::settle_weights));
  library.impl("warm_kernels", TORCH_BOX(&diffulex::torch_ops::warm_kernels));
}
