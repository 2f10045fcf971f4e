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
      .def_readwrite("seed", &SamplingParams::seed)
      .def_readwrite("accept_threshold", &SamplingParams::accept_threshold)
      .def_readwrite("edit_threshold", &SamplingParams::edit_threshold)
      .def_readwrite("add_block_threshold", &SamplingParams::add_block_threshold)
      .def_readwrite("semi_complete_threshold", &SamplingParams::semi_complete_threshold)
      .def_readwrite("token_stability_threshold", &SamplingParams::token_stability_threshold)
      .def("validate", [](const SamplingParams& self) { raise_if_error(self.validate()); });
  py::class_<EngineOptions>(module, "EngineOptions",
                            "Configuration of the core; a scheduler copies it.")
      .def(keyword_init<EngineOptions>())
      .def_readwrite("strategy", &EngineOptions::strategy)
      .def_readwrite("block_size", &EngineOptions::block_size)
      .def_readwrite("buffer_size", &EngineOptions::buffer_size)
      .def_readwrite("page_size", &EngineOptions::page_size)
      .def_readwrite("num_pages", &EngineOptions::num_pages)
      .def_readwrite("max_num_reqs", &EngineOptions::max_num_reqs)
      .def_readwrite("max_num_batched_tokens", &EngineOptions::max_num_batched_tokens)
      .def_readwrite("max_model_len", &EngineOptions::max_model_len)
      .def_readwrite("mask_token_id", &EngineOptions::mask_token_id)
      .def_readwrite("vocab_size", &EngineOptions::vocab_size)
      .def_readwrite("stop_token_ids", &EngineOptions::stop_token_ids)
      .def_readwrite("thresholds", &EngineOptions::thresholds)
      .def_readwrite("enable_prefix_caching", &EngineOptions::enable_prefix_caching)
      .def_readwrite("enable_chunked_prefill", &EngineOptions::enable_chunked_prefill)
      .def_readwrite("decode_headroom", &EngineOptions::decode_headroom)
      .def_readwrite("auto_max_nfe", &EngineOptions::auto_max_nfe)
      .def_readwrite("auto_max_nfe_warmup_steps", &EngineOptions::auto_max_nfe_warmup_steps)
      .def_readwrite("auto_max_nfe_tpf_floor", &EngineOptions::auto_max_nfe_tpf_floor)
      .def_readwrite("max_consecutive_prefill_batches",
                     &EngineOptions::max_consecutive_prefill_batches)
      .def_readwrite("cache_salt", &EngineOptions::cache_salt)
      .def_readwrite("seed", &EngineOptions::seed)
      .def_readwrite("masked_rows_only", &EngineOptions::masked_rows_only)
      .def_readwrite("is_editing", &EngineOptions::is_editing)
      .def_readwrite("logits_shift", &EngineOptions::logits_shift)
      .def_readwrite("token_merge_top_k", &EngineOptions::token_merge_top_k)
      .def_readwrite("dmax_store_soft_embeddings", &EngineOptions::dmax_store_soft_embeddings)
      .def_readwrite("d2f_block_grid", &EngineOptions::d2f_block_grid)
      .def_readwrite("fdv2_use_block_cache", &EngineOptions::fdv2_use_block_cache)
      .def_readwrite("group_decode_by_rows", &EngineOptions::group_decode_by_rows)
      .def_readwrite("max_denoising_steps", &EngineOptions::max_denoising_steps)
      .def_readwrite("stability_threshold", &EngineOptions::stability_threshold)
      .def_readwrite("t_min", &EngineOptions::t_min)
      .def_readwrite("t_max", &EngineOptions::t_max)
      .def_property_readonly("decode_rows", &EngineOptions::decode_rows)
      .def_property_readonly("att_block_size", &EngineOptions::att_block_size)
      .def_property_readonly("max_pages_per_req", &EngineOptions::max_pages_per_req)
      .def("num_pages_for", &EngineOptions::num_pages_for, py::arg("length"))
      .def("validate", [](const EngineOptions& self) { raise_if_error(self.validate()); });
  module.def("strategy_names", &strategy_names, "Names the option `strategy` accepts, sorted.");
}

}  // namespace diffulex::bindings
