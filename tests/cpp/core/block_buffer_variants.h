// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/options.h"

namespace diffulex::test {

/// A kind of block-buffer decoding besides plain multi_bd.
struct Variant {
  const char* name;
  void (*apply)(EngineOptions& options);
};

inline constexpr Variant kVariants[] = {
    {"d2f", [](EngineOptions& o) { o.strategy = "d2f"; }},
    {"shifted_d2f",
     [](EngineOptions& o) {
       o.strategy = "d2f";
       o.logits_shift = true;
     }},
    {"d2f_on_the_grid",
     [](EngineOptions& o) {
       o.strategy = "d2f";
       o.d2f_block_grid = true;
     }},
    {"shifted_d2f_on_the_grid",
     [](EngineOptions& o) {
       o.strategy = "d2f";
       o.logits_shift = true;
       o.d2f_block_grid = true;
     }},
    {"shifted_multi_bd", [](EngineOptions& o) { o.logits_shift = true; }},
    {"edit", [](EngineOptions& o) { o.is_editing = true; }},
    {"dmax",
     [](EngineOptions& o) {
       o.strategy = "dmax";
       o.token_merge_top_k = 2;
     }},
    {"dmax_without_merging", [](EngineOptions& o) { o.strategy = "dmax"; }},
    {"dmax_soft_store",
     [](EngineOptions& o) {
       o.strategy = "dmax";
       o.token_merge_top_k = 1;
       o.dmax_store_soft_embeddings = true;
     }},
};

}  // namespace diffulex::test
