// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/engine_core.h"

namespace diffulex {

EngineCore::EngineCore(const EngineOptions& options)
    : kv_cache_(options), scheduler_(options, kv_cache_) {}

Result<std::unique_ptr<EngineCore>> EngineCore::create(const EngineOptions& options) {
  const Status status = options.validate();
  if (!status.ok()) {
    return status;
  }
  return std::make_unique<EngineCore>(options);
}

Result<int64_t> EngineCore::add_request(Span<const int32_t> token_ids,
                                        const SamplingParams& params) {
  return scheduler_.add_request(std::make_unique<Request>(token_ids, params, scheduler_.options()));
}

}  // namespace diffulex
