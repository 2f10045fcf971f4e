// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "diffulex/core/block.h"
#include "diffulex/core/block_buffer.h"
#include "diffulex/core/block_rules.h"
#include "diffulex/core/request.h"
#include "pybind/bind.h"

namespace diffulex::bindings {
namespace {

[[nodiscard]] std::vector<int32_t> to_vector(Span<const int32_t> span) {
  return std::vector<int32_t>(span.begin(), span.end());
}

void check_index(const BlockBuffer& buffer, int32_t index) {
  if (index < 0 || index >= buffer.size()) {
    throw py::index_error("BlockBuffer: expected an index below " + std::to_string(buffer.size()) +
                          ", got " + std::to_string(index));
  }
}

/// What every finish_step counts.
void record_forward(Request& request, bool is_prefill, int32_t new_tokens) {
  request.step.is_in_flight = false;
  ++request.nfe;
  request.new_tokens = new_tokens;
  request.decided_tokens += new_tokens;
  request.new_tokens_per_step.push_back(new_tokens);
  request.prefill_per_step.push_back(is_prefill ? 1 : 0);
}

/// Sets the limit and the stop ids of a request, then opens its blocks after the prompt.
void open_request(Request& request, int32_t limit_end, const std::vector<int32_t>& stop_ids) {
  if (request.prompt_len >= limit_end || stop_ids.size() > static_cast<size_t>(kMaxStopIds)) {
    throw py::value_error("Request.open: expected a limit_end past the prompt and at most " +
                          std::to_string(kMaxStopIds) + " stop ids, got " +
                          std::to_string(limit_end) + " and " + std::to_string(stop_ids.size()));
  }
  request.limit_end = limit_end;
  BufferState& state = request.buffer.state();
  state.num_stop_ids = static_cast<int32_t>(stop_ids.size());
  std::copy(stop_ids.begin(), stop_ids.end(), state.stop_ids);
  request.buffer.init(request.prompt(), limit_end);
  const BlockRules& rules = request.buffer.rules();
  const int32_t num_blocks = (limit_end + rules.block_size - 1) / rules.block_size;
  request.confidences.assign(
      static_cast<size_t>((num_blocks + rules.buffer_size) * rules.block_size), 0.0F);
}

/// Writes one position of an ACTIVE block after the check of complete_step.
bool write_token(BlockBuffer& buffer, int32_t index, int32_t rel, int32_t token) {
  check_index(buffer, index);
  if (rel < 0 || rel >= buffer.rules().block_size) {
    throw py::index_error("BlockBuffer.write: expected a position below " +
                          std::to_string(buffer.rules().block_size) + ", got " +
                          std::to_string(rel));
  }
  const int32_t current = buffer.block_tokens(index)[static_cast<size_t>(rel)];
  if (check_write(buffer.rules(), buffer.block(index), rel, current, token) != WriteCheck::kOk) {
    throw py::value_error("BlockBuffer.write: expected a token for a writable position, got " +
                          std::to_string(token) + " at " + std::to_string(rel));
  }
  return apply_write(buffer.rules(), buffer.state(), index, rel, token, buffer.token_data());
}

/// The rules of block_rules.h that are applied before a forward, as methods: with def_step_end,
/// what a custom strategy is made of.
void def_step_begin(py::class_<BlockBuffer>& type) {
  type.def("write", &write_token, py::arg("index"), py::arg("rel"), py::arg("token"),
           "Writes a position of an ACTIVE block; returns whether it was open.")
      .def(
          "set_verdict",
          [](BlockBuffer& self, int32_t index, bool commit_ready, float same_token_ratio) {
            check_index(self, index);
            Block& block = self.state().blocks[index];
            block.commit_ready = commit_ready;
            block.same_token_ratio = same_token_ratio;
          },
          py::arg("index"), py::arg("commit_ready"), py::arg("same_token_ratio") = 1.0F)
      .def(
          "force_top1",
          [](const BlockBuffer& self, int32_t index) {
            check_index(self, index);
            return force_top1(self.rules(), self.state(), index);
          },
          py::arg("index"))
      .def("can_activate",
           [](const BlockBuffer& self) { return can_activate(self.rules(), self.state()); })
      .def(
          "begin_step",
          [](BlockBuffer& self) { return begin_buffer_step(self.rules(), self.state()); },
          "Counts a forward of every ACTIVE block and opens at most one; returns whether it did.")
      .def(
          "undo_step",
          [](BlockBuffer& self, bool has_activated) {
            undo_buffer_step(self.rules(), self.state(), has_activated);
          },
          py::arg("has_activated"))
      .def(
          "mark_stored",
          [](BlockBuffer& self, int32_t begin, int32_t end) {
            mark_stored(self.rules(), self.state(), begin, end);
          },
          py::arg("begin"), py::arg("end"))
      .def(
          "mark_cached",
          [](BlockBuffer& self, int32_t cached_len) {
            mark_cached(self.rules(), self.state(), cached_len);
          },
          py::arg("cached_len"));
}

/// Those that are applied after it.
void def_step_end(py::class_<BlockBuffer>& type) {
  type.def("count_sampler_steps",
           [](BlockBuffer& self) { count_sampler_steps(self.rules(), self.state()); })
      .def(
          "finish_step",
          [](BlockBuffer& self, bool is_decode) {
            const Transitions done = scan_transitions(self.rules(), self.state());
            count_held(self.state(), is_decode, done);
            if (self.rules().is_editing) {
              find_stop(self.rules(), self.state(), self.token_data());
            }
            advance_settled(self.rules(), self.state(), self.token_data());
            return done.num_frozen + done.num_stored;
          },
          py::arg("is_decode"),
          "Applies the block status table, then settles; returns the number of transitions.")
      .def(
          "drop_cached", [](BlockBuffer& self) { return drop_cached(self.rules(), self.state()); },
          "Forgets all KV; returns the end of what a resume forward must rebuild.")
      .def(
          "check_stop",
          [](const BlockBuffer& self, int32_t max_tokens, int32_t nfe, int32_t max_nfe,
             int32_t max_repetition_run) {
            return check_stop(self.state(), {max_tokens, nfe, max_nfe, max_repetition_run});
          },
          py::arg("max_tokens"), py::arg("nfe"), py::arg("max_nfe") = 0,
          py::arg("max_repetition_run") = 0)
      .def_property_readonly(
          "valid_end",
          [](const BlockBuffer& self) { return valid_end(self.rules(), self.state()); })
      .def_property_readonly("frozen_end", [](const BlockBuffer& self) {
        return frozen_end(self.rules(), self.state());
      });
}

void bind_blocks(py::module_& module) {
  py::class_<Block>(module, "Block", "One diffusion block (a copy of its state).")
      .def_readonly("block_id", &Block::block_id)
      .def_readonly("status", &Block::status)
      .def_readonly("type", &Block::type)
      .def_readonly("editable_start", &Block::editable_start)
      .def_readonly("num_masks", &Block::num_masks)
      .def_readonly("total_steps", &Block::total_steps)
      .def_readonly("open_steps", &Block::open_steps)
      .def_readonly("post_edit_steps", &Block::post_edit_steps)
      .def_readonly("same_token_ratio", &Block::same_token_ratio)
      .def_readonly("commit_ready", &Block::commit_ready)
      .def_readonly("same_as_previous", &Block::same_as_previous)
      .def_readonly("all_confident", &Block::all_confident)
      .def_readonly("valid_commit_len", &Block::valid_commit_len)
      .def_readonly("stored_this_step", &Block::stored_this_step);
  py::class_<RequestStep>(module, "RequestStep", "What a request does in the forward in flight.")
      .def_readwrite("is_in_flight", &RequestStep::is_in_flight)
      .def_readwrite("is_prefill", &RequestStep::is_prefill)
      .def_readwrite("is_final", &RequestStep::is_final)
      .def_readwrite("has_sampling", &RequestStep::has_sampling)
      .def_readwrite("has_activated", &RequestStep::has_activated)
      .def_readwrite("row_mode", &RequestStep::row_mode)
      .def_readwrite("first_pos", &RequestStep::first_pos)
      .def_readwrite("num_rows", &RequestStep::num_rows)
      .def_readwrite("num_valid_rows", &RequestStep::num_valid_rows)
      .def_readwrite("store_end", &RequestStep::store_end);
  py::class_<BlockBuffer> buffer(module, "BlockBuffer",
                                 "Window of consecutive blocks of one request.");
  def_step_begin(buffer);
  def_step_end(buffer);
  buffer.def("__len__", &BlockBuffer::size)
      .def_property_readonly("num_valid", &BlockBuffer::num_valid)
      .def_property_readonly("start", &BlockBuffer::start)
      .def_property_readonly("context_len",
                             [](const BlockBuffer& self) { return self.state().context_len; })
      .def("__getitem__",
           [](const BlockBuffer& self, int32_t index) {
             check_index(self, index);
             return self.block(index);
           })
      .def(
          "block_tokens",
          [](const BlockBuffer& self, int32_t index) {
            check_index(self, index);
            return to_vector(self.block_tokens(index));
          },
          py::arg("index"), "Tokens of a buffer block; none before the request was added.")
      .def("block_status", &BlockBuffer::block_status, py::arg("block_id"))
      .def("check_integrity",
           [](const BlockBuffer& self) { raise_if_error(self.check_integrity()); });
}

void bind_records(py::module_& module) {
  py::class_<RequestResult>(module, "RequestResult", "Final record of a request.")
      .def_readonly("req_id", &RequestResult::req_id)
      .def_readonly("finish_reason", &RequestResult::finish_reason)
      .def_readonly("is_auto_nfe_cap", &RequestResult::is_auto_nfe_cap)
      .def_readonly("output_ids", &RequestResult::output_ids)
      .def_readonly("prompt_len", &RequestResult::prompt_len)
      .def_readonly("num_cached_tokens", &RequestResult::num_cached_tokens)
      .def_readonly("nfe", &RequestResult::nfe)
      .def_readonly("num_preemptions", &RequestResult::num_preemptions)
      .def_readonly("decided_tokens", &RequestResult::decided_tokens)
      .def_readonly("new_tokens_per_step", &RequestResult::new_tokens_per_step)
      .def_property_readonly("prefill_per_step", [](const RequestResult& self) {
        return std::vector<bool>(self.prefill_per_step.begin(), self.prefill_per_step.end());
      });
  py::class_<BlockSnapshot>(module, "BlockSnapshot", "One valid buffer block of a snapshot.")
      .def_readonly("block_id", &BlockSnapshot::block_id)
      .def_readonly("start", &BlockSnapshot::start)
      .def_readonly("status", &BlockSnapshot::status)
      .def_readonly("tokens", &BlockSnapshot::tokens)
      .def_readonly("confidences", &BlockSnapshot::confidences)
      .def_readonly("newly_written", &BlockSnapshot::newly_written);
  py::class_<RequestSnapshot>(module, "RequestSnapshot",
                              "Denoising state of a request after its last step.")
      .def_readonly("req_id", &RequestSnapshot::req_id)
      .def_readonly("status", &RequestSnapshot::status)
      .def_readonly("finish_reason", &RequestSnapshot::finish_reason)
      .def_readonly("nfe", &RequestSnapshot::nfe)
      .def_readonly("context_len", &RequestSnapshot::context_len)
      .def_readonly("output_ids", &RequestSnapshot::output_ids)
      .def_readonly("blocks", &RequestSnapshot::blocks);
}

}  // namespace

void bind_request(py::module_& module) {
  bind_blocks(module);
  py::class_<Request>(module, "Request",
                      "One request. Scheduler.add_request takes a copy; read its state through "
                      "Scheduler.find_request and Scheduler.snapshot.")
      .def(py::init([](const std::vector<int32_t>& token_ids, const SamplingParams& params,
                       const EngineOptions& options) {
             raise_if_error(options.validate());
             return std::make_unique<Request>(Span<const int32_t>(token_ids), params, options);
           }),
           py::arg("token_ids"), py::arg("sampling_params"), py::arg("options"))
      .def_readonly("req_id", &Request::req_id)
      .def_readwrite("status", &Request::status)
      .def_readonly("finish_reason", &Request::finish_reason)
      .def_readonly("request_slot", &Request::request_slot)
      .def_readonly("prompt_len", &Request::prompt_len)
      .def_readonly("limit_end", &Request::limit_end)
      .def_readonly("sampling_params", &Request::params)
      .def_readonly("num_cached_tokens", &Request::num_cached_tokens)
      .def_readwrite("resume_until", &Request::resume_until)
      .def_readwrite("needs_prompt_prefill", &Request::needs_prompt_prefill)
      .def_readwrite("prefix_limit", &Request::prefix_limit)
      .def_readwrite("share_limit", &Request::share_limit)
      .def_readonly("step", &Request::step)
      .def_readonly("nfe", &Request::nfe)
      .def_readonly("num_preemptions", &Request::num_preemptions)
      .def_property_readonly("context_len", &Request::context_len)
      .def_property_readonly("settled_end", &Request::settled_end)
      .def_property_readonly("prompt", [](const Request& self) { return to_vector(self.prompt()); })
      .def_property_readonly("tokens", [](const Request& self) { return to_vector(self.tokens()); })
      .def_property_readonly("output", [](const Request& self) { return to_vector(self.output()); })
      .def_property_readonly("page_table",
                             [](const Request& self) { return self.page_table.pages; })
      .def_property_readonly(
          "buffer", [](Request& self) -> BlockBuffer& { return self.buffer; },
          py::return_value_policy::reference_internal)
      .def("open", &open_request, py::arg("limit_end"), py::arg("stop_ids"),
           "For strategies: sets limit and stop ids, opens the blocks behind the prompt.")
      .def("record_forward", &record_forward, py::arg("is_prefill"), py::arg("new_tokens"),
           "Counts a completed forward; once per finish_step.");
  bind_records(module);
}

}  // namespace diffulex::bindings
