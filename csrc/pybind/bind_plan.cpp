// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "diffulex/core/arena.h"
#include "diffulex/core/decode_batch.h"
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

/// Adds a property that views a [rows, K] array.
template <typename T, typename Class>
void def_merge_matrix(Class& type, const char* name, Span<T> (StepPlan::*getter)() noexcept) {
  type.def_property_readonly(name, [getter](const py::object& self) {
    auto& plan = self.cast<StepPlan&>();
    return matrix_view((plan.*getter)(), plan.merge_top_k(), self);
  });
}

/// Adds a property that views a whole vector of a sampler output.
template <typename T, typename Class>
void def_output_vector(Class& type, const char* name, Span<T> (SamplerOutput::*getter)() noexcept) {
  type.def_property_readonly(name, [getter](const py::object& self) {
    return view((self.cast<SamplerOutput&>().*getter)(), self);
  });
}

/// Adds a property that views a [Nb, B] array of a sampler output.
template <typename T, typename Class>
void def_output_matrix(Class& type, const char* name, Span<T> (SamplerOutput::*getter)() noexcept) {
  type.def_property_readonly(name, [getter](const py::object& self) {
    auto& output = self.cast<SamplerOutput&>();
    return matrix_view((output.*getter)(), output.block_size(), self);
  });
}

/// Adds a property that views a [Nb, B, K] array of a sampler output.
template <typename T, typename Class>
void def_output_cube(Class& type, const char* name, Span<T> (SamplerOutput::*getter)() noexcept) {
  type.def_property_readonly(name, [getter](const py::object& self) {
    auto& output = self.cast<SamplerOutput&>();
    const Span<T> values = (output.*getter)();
    const py::ssize_t width = output.block_size();
    const py::ssize_t depth = output.merge_top_k();
    const auto count = static_cast<py::ssize_t>(values.size());
    const py::ssize_t rows = depth > 0 ? count / (width * depth) : 0;
    return py::array(py::array_t<T>({rows, width, depth}, values.data(), self));
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
        if (self.depth > 0) {
          shape = py::make_tuple(self.rows, self.cols / self.depth, self.depth);
        } else if (self.is_matrix) {
          shape = py::make_tuple(self.rows, self.cols);
        }
        return shape;
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
      .def_property_readonly("num_blocks", &StepPlan::num_blocks)
      .def_property_readonly("num_logits_rows", &StepPlan::num_logits_rows)
      .def_property_readonly("num_sampled_rows", &StepPlan::num_sampled_rows)
      .def_property_readonly("any_sampled", &StepPlan::any_sampled)
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
  def_array(type, "logits_source", &StepPlan::logits_source);
  def_array(type, "row_top_k", &StepPlan::row_top_k);
  def_array(type, "row_top_p", &StepPlan::row_top_p);
  def_array(type, "row_min_p", &StepPlan::row_min_p);
  def_array(type, "blk_request_slot", &StepPlan::blk_request_slot);
  def_array(type, "blk_step", &StepPlan::blk_step);
  def_array(type, "blk_edit_threshold", &StepPlan::blk_edit_threshold);
  def_array(type, "seed_row", &StepPlan::seed_row);
  def_array(type, "merge_mask", &StepPlan::merge_mask);
  def_merge_matrix(type, "merge_topk_ids", &StepPlan::merge_topk_ids);
  def_merge_matrix(type, "merge_topk_probs", &StepPlan::merge_topk_probs);
  def_array(type, "merge_residual", &StepPlan::merge_residual);
  def_array(type, "row_pass_kind", &StepPlan::row_pass_kind);
  def_array(type, "row_self_cond", &StepPlan::row_self_cond);
  def_block_matrix(type, "blk_prev_argmax", &StepPlan::blk_prev_argmax);
  def_array(type, "blk_stable_run", &StepPlan::blk_stable_run);
  def_array(type, "blk_steps_left", &StepPlan::blk_steps_left);
  def_block_matrix(type, "blk_renoise", &StepPlan::blk_renoise);
  type.def_property_readonly("page_tables", [](const py::object& self) {
    auto& plan = self.cast<StepPlan&>();
    return matrix_view(plan.page_tables(), plan.max_pages_per_req(), self);
  });
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
  def_output_matrix<int64_t>(type, "write_ids", &SamplerOutput::write_ids);
  def_output_matrix<float>(type, "confidence", &SamplerOutput::confidence);
  def_output_vector<int32_t>(type, "masks_left", &SamplerOutput::masks_left);
  def_output_vector<int32_t>(type, "flags", &SamplerOutput::flags);
  def_output_vector<float>(type, "same_token_ratio", &SamplerOutput::same_token_ratio);
  def_output_vector<int64_t>(type, "pending_next_token", &SamplerOutput::pending_next_token);
  def_output_matrix<uint8_t>(type, "merge_valid", &SamplerOutput::merge_valid);
  def_output_cube<int64_t>(type, "merge_topk_ids", &SamplerOutput::merge_topk_ids);
  def_output_cube<float>(type, "merge_topk_probs", &SamplerOutput::merge_topk_probs);
  def_output_matrix<float>(type, "merge_residual", &SamplerOutput::merge_residual);
  def_output_matrix<int64_t>(type, "canvas_argmax", &SamplerOutput::canvas_argmax);
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
      .def_property_readonly("any_filtered", &DecodeBatch::any_filtered);
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
  bind_decode_batch(module);
}

}  // namespace diffulex::bindings
