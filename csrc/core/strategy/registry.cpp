// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/strategy/strategies.h"
#include "diffulex/core/strategy.h"

namespace diffulex {
namespace {

struct StrategyEntry {
  const char* name;
  uint32_t traits;
  std::unique_ptr<Strategy> (*make)(const EngineOptions& options);
};

constexpr StrategyEntry kStrategies[] = {
#define DIFFULEX_STRATEGY(name, traits) {#name, traits, make_##name},
#include "core/strategy/strategies.def"
};

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

uint32_t strategy_traits(const std::string& name) noexcept {
  for (const StrategyEntry& entry : kStrategies) {
    if (name == entry.name) {
      return entry.traits;
    }
  }
  return 0;
}

std::string strategies_with(StrategyTrait trait) {
  std::vector<std::string> names;
  for (const StrategyEntry& entry : kStrategies) {
    if ((entry.traits & trait) != 0) {
      names.emplace_back(entry.name);
    }
  }
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
  }
  return text;
}

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
    std::sort(result.begin(), result.end());
    return result;
  }();
  return names;
}

}  // namespace diffulex
