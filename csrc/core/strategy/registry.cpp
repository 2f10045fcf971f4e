// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "core/strategy/d2f.h"
#include "core/strategy/diffusion_gemma.h"
#include "core/strategy/dmax.h"
#include "core/strategy/fast_dllm_v2.h"
#include "core/strategy/multi_bd.h"
#include "diffulex/core/strategy.h"

namespace diffulex {
namespace {

struct StrategyEntry {
  const char* name;
  std::unique_ptr<Strategy> (*make)(const EngineOptions& options);
};

/// Every built-in strategy, sorted by name.
constexpr std::array<StrategyEntry, 5> kStrategies = {{
    {"d2f", make_d2f},
    {"diffusion_gemma", make_diffusion_gemma},
    {"dmax", make_dmax},
    {"fast_dllm_v2", make_fast_dllm_v2},
    {"multi_bd", make_multi_bd},
}};

}  // namespace

Strategy::~Strategy() = default;

bool Strategy::decodes_by_rules(const Request& /*request*/) const {
  return false;
}

int32_t Strategy::page_len_ahead(const Request& request) const {
  // The next step may open one block and freeze every block it runs; the device then plans to store
  // them at once. The block with the last output position is never stored.
  const BlockRules& rules = request.buffer.rules();
  return std::min(valid_end(rules, request.buffer.state()) + rules.block_size, request.limit_end);
}

int32_t Strategy::context_len_ahead(const Request& request) const {
  return std::max(request.context_len(), request.step.store_end);
}

void Strategy::complete_decode_request(const Request& /*request*/,
                                       DecodeRequest& /*decode*/) const {}

Result<std::unique_ptr<Strategy>> make_strategy(const EngineOptions& options) {
  for (const StrategyEntry& entry : kStrategies) {
    if (options.strategy == entry.name) {
      return entry.make(options);
    }
  }
  std::string known;
  for (const std::string& name : strategy_names()) {
    known += (known.empty() ? "" : ", ") + name;
  }
  return make_error(StatusCode::kUnsupported, "make_strategy: expected one of ", known, ", got \"",
                    options.strategy, "\"");
}

const std::vector<std::string>& strategy_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const StrategyEntry& entry : kStrategies) {
      result.emplace_back(entry.name);
    }
    return result;
  }();
  return names;
}

}  // namespace diffulex
