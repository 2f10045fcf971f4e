// SPDX-License-Identifier: Apache-2.0
#include <memory>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "diffulex/core/block.h"
#include "diffulex/core/block_buffer.h"
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
      .def_readonly("stored_this_step", &Block::stored_this_step);
  py::class_<BlockBuffer>(module, "BlockBuffer", "Window of consecutive blocks of one request.")
      .def("__len__", &BlockBuffer::size)
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
      .def_readonly("status", &Request::status)
      .def_readonly("finish_reason", &Request::finish_reason)
      .def_readonly("request_slot", &Request::request_slot)
      .def_readonly("prompt_len", &Request::prompt_len)
      .def_readonly("limit_end", &Request::limit_end)
      .def_readonly("sampling_params", &Request::params)
      .def_readonly("num_cached_tokens", &Request::num_cached_tokens)
      .def_readonly("resume_until", &Request::resume_until)
      .def_readonly("nfe", &Request::nfe)
      .def_readonly("num_preemptions", &Request::num_preemptions)
      .def_property_readonly("context_len", &Request::context_len)
      .def_property_readonly("settled_end", &Request::settled_end)
      .def_property_readonly("prompt", [](const Request& self) { return to_vector(self.prompt()); })
      .def_property_readonly("tokens", [](const Request& self) { return to_vector(self.tokens()); })
      .def_property_readonly("output", [](const Request& self) { return to_vector(self.output()); })
      .def_property_readonly("page_table",
                             [](const Request& self) { return self.page_table.pages; })
      .def_property_readonly("buffer", [](const Request& self) { return self.buffer; });
  bind_records(module);
}

}  // namespace diffulex::bindings
