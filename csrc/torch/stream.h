// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include <torch/csrc/stable/accelerator.h>

#include "diffulex/ops/exec_context.h"
#include "torch/checks.h"

namespace diffulex::torch_ops {

/// Sets ExecContext::weights_settled of the ops that this thread calls from now on and returns what
/// it was; false at first.
bool exchange_weights_settled(bool settled) noexcept;
/// The same for ExecContext::batch_invariant.
bool exchange_batch_invariant(bool invariant) noexcept;

/// Makes the device of an op current for its lifetime and knows torch's current stream and thread
/// pool there. Raises where the device cannot be used by this torch build.
class DeviceScope final {
 public:
  /// `op` names the op in error texts.
  DeviceScope(const char* op, const OpDevice& device);
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  /// Context without workspace; valid while this object lives.
  [[nodiscard]] const ExecContext& context() const noexcept { return context_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  ExecContext context_;
};

}  // namespace diffulex::torch_ops
