// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include "diffulex/version.h"
#include "pybind/bind.h"

PYBIND11_MODULE(_core, module) {
  using namespace diffulex::bindings;  // NOLINT(google-build-using-namespace): function scope
  module.doc() = "Torch-free core of Diffulex: requests, blocks, pages, scheduler, step plans.";
  module.attr("__version__") = DIFFULEX_VERSION_STRING;
  pybind11::register_exception<OutOfPagesError>(module, "OutOfPagesError", PyExc_RuntimeError);
  bind_options(module);
  bind_kv_cache(module);
  bind_request(module);
  bind_plan(module);
  bind_strategy(module);
  bind_scheduler(module);
  bind_kernels(module);
}
