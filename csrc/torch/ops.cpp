// SPDX-License-Identifier: Apache-2.0
//
// Schemas, boxed calls and registration of all ops, expanded from ops.def.
#include "torch/ops.h"

#include "ops/params.h"
#include "torch/op_arguments.h"

namespace diffulex::torch_ops {
namespace {

// `rows_of_NAME::kArguments`: a tuple of the rows between DIFFULEX_OP and DIFFULEX_END.
// clang-format off
#define DIFFULEX_OP(name, OpParams, ...) \
  namespace rows_of_##name { \
  using Params = OpParams; \
  constexpr auto kArguments = std::tuple{
#define DIFFULEX_TENSOR(field, Type, access) \
    TensorArgument<Params, Type, Access::k##access>{#field, &Params::field},
#define DIFFULEX_WORKSPACE(Type) \
    WorkspaceArgument<Params, Type>{},
#define DIFFULEX_SCALAR(field, Type) \
    ScalarArgument<Params, Type>{#field, &Params::field},
#define DIFFULEX_OPTION(field, Type, default_value) \
    ScalarArgument<Params, Type>{#field, &Params::field, #default_value},
#define DIFFULEX_END() \
  }; \
  }
// clang-format on
#include "ops/ops.def"

}  // namespace

// The boxed calls; a debugger finds diffulex::torch_ops::NAME below torch's dispatcher.
#define DIFFULEX_OP(name, ...)                                                                  \
  static void name(StableIValue* stack, uint64_t /*num_arguments*/, uint64_t /*num_results*/) { \
    call_kernel(#name, &diffulex::name, rows_of_##name::kArguments, stack);                     \
  }
#include "ops/ops.def"

void register_ops(torch::stable::detail::StableLibrary& library) {
  // An op for CPU tensors alone stands in both: for CUDA it explains where it runs.
#define DIFFULEX_OP(name, ...) library.impl(#name, &name);
#include "ops/ops.def"
}

}  // namespace diffulex::torch_ops

STABLE_TORCH_LIBRARY(diffulex, library) {
  namespace ops = diffulex::torch_ops;
#define DIFFULEX_OP(name, ...) \
  library.def(ops::schema_of(#name, ops::rows_of_##name::kArguments).c_str());
#include "ops/ops.def"
}

STABLE_TORCH_LIBRARY_IMPL(diffulex, CPU, library) {
  diffulex::torch_ops::register_ops(library);
}
