// SPDX-License-Identifier: Apache-2.0
#include <initializer_list>
#include <string>
#include <utility>

#include <pybind11/pybind11.h>

#include "diffulex/core/options.h"
#include "diffulex/core/status_enums.h"
#include "diffulex/core/strategy.h"
#include "pybind/bind.h"

namespace diffulex::bindings {
namespace {

template <typename Enum>
void bind_enum(py::module_& module, const char* name,
               std::initializer_list<std::pair<const char*, Enum>> values, const char* doc) {
  py::enum_<Enum> type(module, name, doc);
  for (const auto& [label, value] : values) {
    type.value(label, value);
  }
  type.attr("__str__") = py::cpp_function([](Enum value) { return std::string(to_string(value)); },
                                          py::name("__str__"), py::is_method(type));
}

void bind_enums(py::module_& module) {
  bind_enum<RequestStatus>(module, "RequestStatus",
                           {{"WAITING", RequestStatus::kWaiting},
                            {"PENDING", RequestStatus::kPending},
                            {"PREFILLING", RequestStatus::kPrefilling},
                            {"DECODING", RequestStatus::kDecoding},
                            {"COMPLETED", RequestStatus::kCompleted},
                            {"FINISHED", RequestStatus::kFinished}},
                           "Life cycle of a request.");
  bind_enum<BlockStatus>(module, "BlockStatus",
                         {{"DUMMY", BlockStatus::kDummy},
                          {"ACTIVE", BlockStatus::kActive},
                          {"TO_CACHE", BlockStatus::kToCache},
                          {"IN_CACHE", BlockStatus::kInCache}},
                         "State of one diffusion block.");
  bind_enum<BlockType>(module, "BlockType",
                       {{"IN_CONTEXT", BlockType::kInContext},
                        {"LAST_IN_CONTEXT", BlockType::kLastInContext},
                        {"OUT_OF_CONTEXT", BlockType::kOutOfContext}},
                       "Whether a block, or a block after it, may be activated.");
  bind_enum<FinishReason>(module, "FinishReason",
                          {{"NONE", FinishReason::kNone},
                           {"EOS_TOKEN_GENERATED", FinishReason::kEosTokenGenerated},
                           {"MAX_NEW_TOKENS_REACHED", FinishReason::kMaxNewTokensReached},
                           {"MAX_MODEL_LEN_REACHED", FinishReason::kMaxModelLenReached},
                           {"MAX_NFE_REACHED", FinishReason::kMaxNfeReached},
                           {"MAX_REPETITION_RUN_REACHED", FinishReason::kMaxRepetitionRunReached},
                           {"ABORTED", FinishReason::kAborted},
                           {"REJECTED", FinishReason::kRejected},
                           {"ERROR", FinishReason::kError}},
                          "Why a request ended; str() gives the documented name.");
  bind_enum<RowMode>(module, "RowMode",
                     {{"PREFILL_BLOCK_CAUSAL", RowMode::kPrefillBlockCausal},
                      {"DECODE_BLOCK_CAUSAL", RowMode::kDecodeBlockCausal},
                      {"CACHE_ONLY", RowMode::kCacheOnly},
                      {"PREFILL_PREFIX_FULL", RowMode::kPrefillPrefixFull},
                      {"CAUSAL", RowMode::kCausal},
                      {"CANVAS", RowMode::kCanvas}},
                     "Visibility rule of the rows of a request.");
  bind_enum<PlanKind>(
      module, "PlanKind",
      {{"IDLE", PlanKind::kIdle}, {"PREFILL", PlanKind::kPrefill}, {"DECODE", PlanKind::kDecode}},
      "What a scheduled step is.");
}

}  // namespace

void bind_options(py::module_& module) {
  bind_enums(module);
  py::class_<Thresholds>(module, "Thresholds", "Decoding thresholds, each in [0, 1].")
      .def(keyword_init<Thresholds>())
      .def_readwrite("add_block", &Thresholds::add_block)
      .def_readwrite("semi_complete", &Thresholds::semi_complete)
      .def_readwrite("accept", &Thresholds::accept)
      .def_readwrite("edit", &Thresholds::edit)
      .def_readwrite("remask", &Thresholds::remask)
      .def_readwrite("token_stability", &Thresholds::token_stability);
  py::class_<SamplingParams>(module, "SamplingParams", "Per-request parameters of the core.")
      .def(keyword_init<SamplingParams>())
      .def_readwrite("temperature", &SamplingParams::temperature)
      .def_readwrite("top_p", &SamplingParams::top_p)
      .def_readwrite("top_k", &SamplingParams::top_k)
      .def_readwrite("min_p", &SamplingParams::min_p)
      .def_readwrite("max_tokens", &SamplingParams::max_tokens)
      .def_readwrite("max_nfe", &SamplingParams::max_nfe)
      .def_readwrite("max_repetition_run", &SamplingParams::max_repetition_run)
      .def_readwrite("ignore_eos", &SamplingParams::ignore_eos)
      .def_readwrite("stop_token_ids", &SamplingParams::stop_token_ids)
      .def_readwrite("template_token_ids", &SamplingParams::template_token_ids)
      .def_readwrite("seed", &SamplingParams::seed)
      .def_readwrite("accept_threshold", &SamplingParams::accept_threshold)
      .def_readwrite("edit_threshold", &SamplingParams::edit_threshold)
      .def_readwrite("add_block_threshold", &SamplingParams::add_block_threshold)
      .def_readwrite("semi_complete_threshold", &SamplingParams::semi_complete_threshold)
      .def_readwrite("token_stability_threshold", &SamplingParams::token_stability_threshold)
      .def_readwrite("max_post_edit_steps", &SamplingParams::max_post_edit_steps)
      .def_readwrite("penalty_lambda", &SamplingParams::penalty_lambda)
      .def("validate", [](const SamplingParams& self) { raise_if_error(self.validate()); });
  py::class_<EngineOptions> options(module, "EngineOptions",
                                    "Configuration of the core; a scheduler copies it.");
  options.def(keyword_init<EngineOptions>());
#define DIFFULEX_OPTION(Type, name, value) options.def_readwrite(#name, &EngineOptions::name);
#include "diffulex/core/engine_options.def"
#undef DIFFULEX_OPTION
  options.def_property_readonly("decode_rows", &EngineOptions::decode_rows)
      .def_property_readonly("att_block_size", &EngineOptions::att_block_size)
      .def_property_readonly("max_pages_per_req", &EngineOptions::max_pages_per_req)
      .def("num_pages_for", &EngineOptions::num_pages_for, py::arg("length"))
      .def("validate", [](const EngineOptions& self) { raise_if_error(self.validate()); });
  module.def("strategy_names", &strategy_names, "Names the option `strategy` accepts, sorted.");
}

}  // namespace diffulex::bindings
