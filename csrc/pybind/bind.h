// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "diffulex/core/arena.h"
#include "diffulex/core/span.h"
#include "diffulex/core/status.h"
#include "diffulex/core/strategy.h"

// Shared by the topic files of the module: how failures become Python exceptions and how arrays
// become numpy views.

namespace diffulex::bindings {

namespace py = pybind11;

/// Carries kOutOfPages to Python as diffulex_ext.OutOfPagesError.
class OutOfPagesError final : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Raises the Python exception that belongs to the code of a failed `status`.
inline void raise_if_error(const Status& status) {
  if (status.ok()) {
    return;
  }
  const std::string& message = status.message();
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kAlreadyExists:
      throw py::value_error(message);
    case StatusCode::kOutOfRange:
      throw py::index_error(message);
    case StatusCode::kNotFound:
      throw py::key_error(message);
    case StatusCode::kUnsupported:
      PyErr_SetString(PyExc_NotImplementedError, message.c_str());
      throw py::error_already_set();
    case StatusCode::kOutOfPages:
      throw OutOfPagesError(message);
    default:
      throw std::runtime_error(message);
  }
}

/// The value of `result`, or the exception of its status.
template <typename T>
[[nodiscard]] T unwrap(Result<T> result) {
  raise_if_error(result.status());
  return std::move(result).value();
}

/// Memory at `address`, or a null pointer; arenas check alignment and size.
[[nodiscard]] inline void* as_memory(uintptr_t address) {
  return reinterpret_cast<void*>(
      address);  // NOLINT(performance-no-int-to-ptr): address of a tensor
}

/// Sets the attributes named by keyword arguments; an unknown name is a TypeError naming it.
inline void assign_keywords(py::object target, const py::kwargs& values) {
  for (const auto& item : values) {
    if (!py::hasattr(target, item.first)) {
      throw py::type_error(std::string(py::str(py::type::of(target).attr("__name__"))) +
                           ": expected a field name, got " + std::string(py::str(item.first)));
    }
    py::setattr(target, item.first, item.second);
  }
}

/// Constructor that takes every field as an optional keyword.
template <typename T>
[[nodiscard]] auto keyword_init() {
  return py::init([](const py::kwargs& values) {
    py::object target = py::cast(T{});
    assign_keywords(target, values);
    return target.cast<T>();
  });
}

/// A strategy that forwards to a Python object of type Strategy and keeps it alive.
[[nodiscard]] std::unique_ptr<Strategy> borrow_strategy(const py::object& strategy);

void bind_options(py::module_& module);
void bind_kv_cache(py::module_& module);
void bind_request(py::module_& module);
void bind_plan(py::module_& module);
void bind_scheduler(py::module_& module);
void bind_strategy(py::module_& module);
void bind_kernels(py::module_& module);

}  // namespace diffulex::bindings
