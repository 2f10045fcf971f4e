// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "diffulex/core/arena.h"
#include "diffulex/core/sampler_output.h"
#include "diffulex/core/step_plan.h"
#include "pybind/bind.h"

namespace diffulex::bindings {
namespace {

/// Adds a property that views a flat array, trimmed to its used length.
template <typename T, typename Class>
void def_array(Class& type, const char* name, Span<T> (StepPlan::*getter)() noexcept) {
  type.def_property_readonly(name, [getter](const py::object& self) {
    return view((self.cast<StepPlan&>().*getter)(), self);
  });
}

/// Adds a property that views a [rows, B] array.
template <typename T, typename Class>
void def_block_matrix(Class& type, const char* name, Span<T> (StepPlan::*getter)() noexcept) {
  type.def_property_readonly(name, [getter](const py::object& self) {
    auto& plan = self.cast<StepPlan&>();
    return matrix_view((plan.*getter)(), plan.block_size(), self);
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
      .def_readonly("offset", &ArenaField::offset)
      .def_property_readonly("nbytes", &ArenaField::bytes)
      .def_property_readonly("shape", [](const ArenaField& self) {
        py::tuple shape = py::make_tuple(self.rows);
        if (self.is_matrix) {
          shape = py::make_tuple(self.rows, self.cols);
        }
        return shape;
      });
}

void def_plan_scalars(py::class_<StepPlan>& type) {
  type.def_property_readonly("kind", &StepPlan::kind)
      .def_property_readonly("num_rows", &StepPlan::num_rows)
      .def_property_readonly("num_reqs", &StepPlan::num_reqs)
      .def_property_readonly("num_padded_reqs", &StepPlan::num_padded_reqs)
      .def_property_readonly("num_blocks", &StepPlan::num_blocks)
      .def_property_readonly("num_logits_rows", &StepPlan::num_logits_rows)
      .def_property_readonly("num_sampled_rows", &StepPlan::num_sampled_rows)
      .def_property_readonly("any_sampled", &StepPlan::any_sampled)
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
      .def("used_bytes", &StepPlan::used_bytes)
      .def_property_readonly(
          "address", [](const StepPlan& self) { return reinterpret_cast<uintptr_t>(self.data()); });
}

void def_plan_arrays(py::class_<StepPlan>& type) {
  def_array(type, "input_ids", &StepPlan::input_ids);
  def_array(type, "positions", &StepPlan::positions);
  def_array(type, "slot_mapping", &StepPlan::slot_mapping);
  def_array(type, "cu_seqlens_q", &StepPlan::cu_seqlens_q);
  def_array(type, "cu_seqlens_k", &StepPlan::cu_seqlens_k);
  def_array(type, "context_lens", &StepPlan::context_lens);
  def_array(type, "valid_slices", &StepPlan::valid_slices);
  def_array(type, "row_mode", &StepPlan::row_mode);
  def_array(type, "mask_kinds", &StepPlan::mask_kinds);
  def_array(type, "prefix_lens", &StepPlan::prefix_lens);
  def_array(type, "padded_prefix_lens", &StepPlan::padded_prefix_lens);
  def_array(type, "last_row_index", &StepPlan::last_row_index);
  def_array(type, "req_ids", &StepPlan::req_ids);
  def_array(type, "request_slots", &StepPlan::request_slots);
  def_array(type, "logits_rows", &StepPlan::logits_rows);
  def_array(type, "row_inv_temperature", &StepPlan::row_inv_temperature);
  def_array(type, "row_uniforms", &StepPlan::row_uniforms);
  def_array(type, "blk_req", &StepPlan::blk_req);
  def_array(type, "blk_id", &StepPlan::blk_id);
  def_array(type, "blk_start", &StepPlan::blk_start);
  def_array(type, "blk_row0", &StepPlan::blk_row0);
  def_array(type, "blk_prev_row", &StepPlan::blk_prev_row);
  def_block_matrix(type, "blk_tokens", &StepPlan::blk_tokens);
  def_block_matrix(type, "blk_row_index", &StepPlan::blk_row_index);
  def_array(type, "blk_editable_start", &StepPlan::blk_editable_start);
  def_array(type, "blk_valid_len", &StepPlan::blk_valid_len);
  def_array(type, "blk_force_top1", &StepPlan::blk_force_top1);
  def_array(type, "blk_accept_threshold", &StepPlan::blk_accept_threshold);
  def_array(type, "blk_total_steps", &StepPlan::blk_total_steps);
  def_array(type, "blk_open_steps", &StepPlan::blk_open_steps);
  def_array(type, "blk_post_edit_steps", &StepPlan::blk_post_edit_steps);
  type.def_property_readonly("page_tables", [](const py::object& self) {
    auto& plan = self.cast<StepPlan&>();
    return matrix_view(plan.page_tables(), plan.max_pages_per_req(), self);
  });
}

void bind_sampler_output(py::module_& module) {
  py::class_<SamplerOutput>(module, "SamplerOutput",
                            "Decisions of the sampler, in the order of the plan's blocks; arrays "
                            "are numpy views at full capacity.")
      .def(arena_init<SamplerOutput>(), py::arg("options"), py::arg("memory") = 0,
           py::arg("nbytes") = 0)
      .def_static("arena_bytes", &SamplerOutput::arena_bytes, py::arg("options"))
      .def("fields", [](const SamplerOutput& self) { return self.fields(); })
      .def("clear", &SamplerOutput::clear, py::arg("num_blocks"))
      .def_property_readonly("max_num_blocks", &SamplerOutput::max_num_blocks)
      .def_property_readonly("block_size", &SamplerOutput::block_size)
      .def_property_readonly(
          "address",
          [](const SamplerOutput& self) { return reinterpret_cast<uintptr_t>(self.data()); })
      .def_property_readonly("write_ids",
                             [](const py::object& self) {
                               auto& output = self.cast<SamplerOutput&>();
                               return matrix_view(output.write_ids(), output.block_size(), self);
                             })
      .def_property_readonly("confidence",
                             [](const py::object& self) {
                               auto& output = self.cast<SamplerOutput&>();
                               return matrix_view(output.confidence(), output.block_size(), self);
                             })
      .def_property_readonly("masks_left",
                             [](const py::object& self) {
                               return view(self.cast<SamplerOutput&>().masks_left(), self);
                             })
      .def_property_readonly(
          "flags",
          [](const py::object& self) { return view(self.cast<SamplerOutput&>().flags(), self); })
      .def_property_readonly("same_token_ratio", [](const py::object& self) {
        return view(self.cast<SamplerOutput&>().same_token_ratio(), self);
      });
}

}  // namespace

void bind_plan(py::module_& module) {
  bind_arena_field(module);
  py::class_<StepPlan> type(module, "StepPlan",
                            "Every array of one forward and its sampling, in one arena; attributes "
                            "are numpy views trimmed to the used length.");
  type.def(arena_init<StepPlan>(), py::arg("options"), py::arg("memory") = 0, py::arg("nbytes") = 0)
      .def_static("arena_bytes", &StepPlan::arena_bytes, py::arg("options"))
      .def("fields", [](const StepPlan& self) { return self.fields(); })
      .def(
          "pad_requests",
          [](StepPlan& self, int32_t num_reqs) { raise_if_error(self.pad_requests(num_reqs)); },
          py::arg("num_reqs"));
  def_plan_scalars(type);
  def_plan_arrays(type);
  bind_sampler_output(module);
}

}  // namespace diffulex::bindings
