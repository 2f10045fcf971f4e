// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/library.h>

namespace diffulex::torch_ops {

/// Registers every op for the dispatch key of `library`. An op serves CPU and CUDA tensors alike:
/// the kernel library picks the implementation from the device of the arguments. All of them raise
/// a RuntimeError `diffulex::<op>: <argument>: expected ..., got ...`.
void register_ops(torch::stable::detail::StableLibrary& library);

}  // namespace diffulex::torch_ops
