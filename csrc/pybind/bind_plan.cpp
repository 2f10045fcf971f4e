// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "diffulex/core/arena.h"
#include "diffulex/core/decode_batch.h"
#include "diffulex/core/plan_layout.h"
#include "diffulex/core/sampler_output.h"
#include "diffulex/core/step_plan.h"
#include "pybind/bind.h"

namespace diffulex::bindings {
namespace {

/// Extents of an array whose first dimension is `rows`.
[[nodiscard]] std::vector<py::ssize_t> shape_of(const ArenaField& field, int64_t rows) {
  if (field.depth > 0) {
    return {rows, field.cols / field.depth, field.depth};
  }
  return field.is_matrix ? std::vector<py::ssize_t>{rows, field.cols}
                         : std::vector<py::ssize_t>{rows};
}

/// numpy view of the used part of an array of `arena` that keeps `owner` alive; no copy.
template <typename T>
[[nodiscard]] py::array array_view(Span<T> used, const ArenaField& field, const void* arena,
                                   const py::object& owner) {
  const int64_t rows = field.cols > 0 ? static_cast<int64_t>(used.size()) / field.cols : 0;
  // Also an array that is not there has its place.
  const auto* first = static_cast<const unsigned char*>(arena) + field.offset;
  return py::array_t<T>(shape_of(field, rows), reinterpret_cast<const T*>(first), owner);
}

/// Adds a property that views array `index` of a StepPlan or SamplerOutput.
template <typename T, typename Class>
void def_array(py::class_<Class>& type, const char* name, size_t index,
               Span<T> (Class::*getter)() noexcept) {
  type.def_property_readonly(name, [index, getter](const py::object& self) {
    auto& arrays = self.cast<Class&>();
    return array_view((arrays.*getter)(), arrays.fields()[index], arrays.data(), self);
  });
}

/// Constructor over owned memory (address 0) or borrowed memory.
template <typename T>
[[nodiscard]] auto arena_init() {
  return py::init([](const EngineOptions& options, uintptr_t memory, size_t nbytes) {
    raise_if_error(options.validate());
    return memory == 0 ? std::make_unique<T>(options)
                       : std::make_unique<T>(options, as_memory(memory), nbytes);
  });
}

void bind_arena_field(py::module_& module) {
  py::class_<ArenaField>(module, "ArenaField", "Place of one array inside an arena.")
      .def_property_readonly("name", [](const ArenaField& self) { return std::string(self.name); })
      .def_property_readonly(
          "dtype", [](const ArenaField& self) { return std::string(to_string(self.dtype)); })
      .def_property_readonly("extent",
                             [](const ArenaField& self) { return std::string(self.extent); })
      .def_readonly("offset", &ArenaField::offset)
      .def_property_readonly("nbytes", &ArenaField::bytes)
      .def_property_readonly("shape", [](const ArenaField& self) {
        return py::tuple(py::cast(shape_of(self, self.rows)));
      });
}

[[nodiscard]] int32_t first_block(const StepPlan& plan, int32_t req_idx) {
  if (req_idx < 0 || req_idx > plan.num_reqs() - plan.num_padded_reqs()) {
    throw py::index_error("StepPlan.first_block: expected a request in [0, " +
                          std::to_string(plan.num_reqs()) + "], got " + std::to_string(req_idx));
  }
  return plan.first_block(req_idx);
}

int32_t append_logits_rows(StepPlan& plan, const std::vector<int32_t>& rows, float inv_temperature,
                           const std::vector<double>& uniforms) {
  const bool is_sampled = inv_temperature > 0.0F;
  if (rows.size() > static_cast<size_t>(plan.block_size()) ||
      (is_sampled && uniforms.size() != rows.size())) {
    throw py::value_error("StepPlan.append_logits_rows: expected at most " +
                          std::to_string(plan.block_size()) +
                          " rows and as many uniforms when sampling, got " +
                          std::to_string(rows.size()) + " and " + std::to_string(uniforms.size()));
  }
  const LogitsRowCursor cursor = plan.logits_cursor();
  std::copy(rows.begin(), rows.end(), cursor.rows);
  if (is_sampled) {
    std::fill_n(cursor.inv_temperature, rows.size(), inv_temperature);
    std::copy(uniforms.begin(), uniforms.end(), cursor.uniforms);
  }
  plan.commit_logits_rows(static_cast<int32_t>(rows.size()), is_sampled);
  return cursor.next_index;
}

void def_plan_scalars(py::class_<StepPlan>& type) {
  type.def_property_readonly("kind", &StepPlan::kind)
      .def_property_readonly("num_rows", &StepPlan::num_rows)
      .def_property_readonly("num_reqs", &StepPlan::num_reqs)
      .def_property_readonly("num_padded_reqs", &StepPlan::num_padded_reqs)
      .def_property_readonly("num_decode_reqs", &StepPlan::num_decode_reqs)
      .def_property_readonly("num_blocks", &StepPlan::num_blocks)
      .def_property_readonly("num_logits_rows", &StepPlan::num_logits_rows)
      .def_property_readonly("num_sampled_rows", &StepPlan::num_sampled_rows)
      .def_property_readonly("any_sampled", &StepPlan::any_sampled)
      .def_property_readonly("any_penalised", &StepPlan::any_penalised)
      .def_property_readonly("num_filtered_rows", &StepPlan::num_filtered_rows)
      .def_property_readonly("num_saved_source_rows", &StepPlan::num_saved_source_rows)
      .def_property_readonly("max_logits_rows", &StepPlan::max_logits_rows)
      .def_property_readonly("merge_top_k", &StepPlan::merge_top_k)
      .def("saved_row", &StepPlan::saved_row, py::arg("request_slot"),
           "Index of the record of the row saved for a request slot.")
      .def_property_readonly("max_seqlen_q", &StepPlan::max_seqlen_q)
      .def_property_readonly("max_seqlen_k", &StepPlan::max_seqlen_k)
      .def_property_readonly("max_context_len", &StepPlan::max_context_len)
      .def_property_readonly("need_kv_cache_store", &StepPlan::need_kv_cache_store)
      .def_property_readonly("step_id", &StepPlan::step_id)
      .def_property_readonly("uniform_q_len", &StepPlan::uniform_q_len)
      .def_property_readonly("block_size", &StepPlan::block_size)
      .def_property_readonly("buffer_size", &StepPlan::buffer_size)
      .def_property_readonly("att_block_size", &StepPlan::att_block_size)
      .def_property_readonly("page_size", &StepPlan::page_size)
      .def_property_readonly("max_pages_per_req", &StepPlan::max_pages_per_req)
      .def_property_readonly("max_num_reqs", &StepPlan::max_num_reqs)
      .def_property_readonly("max_num_rows", &StepPlan::max_num_rows)
      .def("first_block", &first_block, py::arg("req_idx"),
           "First block of a request of the plan; one past its last at req_idx + 1.")
      .def("append_block", &StepPlan::append_block, py::arg("req_idx"), py::arg("block_id"),
           py::arg("start"), py::arg("row0"), "For strategies: appends an ACTIVE block.")
      .def("append_logits_rows", &append_logits_rows, py::arg("rows"),
           py::arg("inv_temperature") = 0.0F, py::arg("uniforms") = std::vector<double>(),
           "For strategies: appends rows whose logits are needed; returns the index of the first.")
      .def("note_kv_store", &StepPlan::note_kv_store,
           "For strategies: records that a row has a slot.")
      .def("used_bytes", &StepPlan::used_bytes)
      .def_property_readonly(
          "address", [](const StepPlan& self) { return reinterpret_cast<uintptr_t>(self.data()); });
}

void def_plan_arrays(py::class_<StepPlan>& type) {
  size_t index = 0;
#define DIFFULEX_ARRAY(name, value_type, ...) \
  def_array<value_type>(type, #name, index++, &StepPlan::name);
#include "diffulex/core/plan_arrays.def"
}

void def_output_arrays(py::class_<SamplerOutput>& type) {
  size_t index = 0;
#define DIFFULEX_ARRAY(name, value_type, ...) \
  def_array<value_type>(type, #name, index++, &SamplerOutput::name);
#include "diffulex/core/output_arrays.def"
}

void bind_sampler_output(py::module_& module) {
  py::class_<SamplerOutput> type(module, "SamplerOutput",
                                 "Decisions of the sampler, in the order of the plan's blocks; "
                                 "arrays are numpy views at full capacity.");
  type.def(arena_init<SamplerOutput>(), py::arg("options"), py::arg("memory") = 0,
           py::arg("nbytes") = 0)
      .def_static("arena_bytes", &SamplerOutput::arena_bytes, py::arg("options"))
      .def("fields", [](const SamplerOutput& self) { return self.fields(); })
      .def("clear", &SamplerOutput::clear, py::arg("num_blocks"))
      .def_property_readonly("max_num_blocks", &SamplerOutput::max_num_blocks)
      .def_property_readonly("block_size", &SamplerOutput::block_size)
      .def_property_readonly("merge_top_k", &SamplerOutput::merge_top_k)
      .def_property_readonly("address", [](const SamplerOutput& self) {
        return reinterpret_cast<uintptr_t>(self.data());
      });
  def_output_arrays(type);
}

void bind_decode_batch(py::module_& module) {
  py::class_<DecodeBatch>(module, "DecodeBatch",
                          "The requests, tokens and pages that a device needs to decode on.")
      .def(arena_init<DecodeBatch>(), py::arg("options"), py::arg("memory") = 0,
           py::arg("nbytes") = 0)
      .def_static("arena_bytes", &DecodeBatch::arena_bytes, py::arg("options"))
      .def("fields", [](const DecodeBatch& self) { return self.fields(); })
      .def_property_readonly("size", &DecodeBatch::size)
      .def_property_readonly("capacity", &DecodeBatch::capacity)
      .def_property_readonly("any_drawn", &DecodeBatch::any_drawn)
      .def_property_readonly("any_filtered", &DecodeBatch::any_filtered)
      .def_property_readonly("any_penalised", &DecodeBatch::any_penalised);
}

/// What advance_decode takes for a layout, and what it expects of the memory.
void bind_plan_layout(py::module_& module) {
  module.def(
      "plan_layout",
      [](const EngineOptions& options) {
        raise_if_error(options.validate());
        return PlanLayout::of(options).to_ints();
      },
      py::arg("options"), "Layout of the arenas of a step as numbers, their version first.");
  module.def(
      "arena_bytes",
      [](const std::vector<int64_t>& layout) {
        const PlanLayout parsed = unwrap(PlanLayout::from_ints(layout));
        return py::make_tuple(Arena::arena_bytes(PlanArrays::fields(parsed)),
                              Arena::arena_bytes(OutputArrays::fields(parsed)),
                              Arena::arena_bytes(BatchArrays::fields(parsed)));
      },
      py::arg("layout"), "Bytes of the plan, the sampler output and the decode batch of a layout.");
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_arena_field(module);
  bind_plan_layout(module);
  py::class_<StepPlan> type(module, "StepPlan",
                            "Every array of one forward and its sampling, in one arena; attributes "
                            "are numpy views trimmed to the used length.");
  type.def(arena_init<StepPlan>(), py::arg("options"), py::arg("memory") = 0, py::arg("nbytes") = 0)
      .def_static("arena_bytes", &StepPlan::arena_bytes, py::arg("options"))
      .def("fields", [](const StepPlan& self) { return self.fields(); })
      .def(
          "pad",
          [](StepPlan& self, int32_t num_reqs, int32_t num_rows) {
            raise_if_error(self.pad(num_reqs, num_rows));
          },
          py::arg("num_reqs"), py::arg("num_rows"));
  def_plan_scalars(type);
  def_plan_arrays(type);
  bind_sampler_output(module);
  bind_decode_batch(module);
}

}  // namespace diffulex::bindings
