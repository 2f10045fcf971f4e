// SPDX-License-Identifier: Apache-2.0
#pragma once

// The constants of the acceptance rules that the arguments of an op choose.

#include "diffulex/core/accept_rules.h"
#include "diffulex/ops/accept.h"

namespace diffulex {

[[nodiscard]] inline MaskFillRules mask_fill_rules(const AcceptMaskFillParams& params) noexcept {
  MaskFillRules rules;
  rules.mask_token_id = params.mask_token_id;
  rules.rule = params.rule;
  rules.confidence_kind = params.confidence_kind;
  rules.denoising_steps = params.denoising_steps;
  rules.factor = params.factor;
  rules.entropy_bound = params.entropy_bound;
  rules.low_threshold = params.low_threshold;
  rules.raw_confidence = params.raw_confidence;
  rules.force_accept_last_step = params.force_accept_last_step;
  return rules;
}

[[nodiscard]] inline EditRules edit_rules(const AcceptEditParams& params) noexcept {
  return {params.mask_token_id, params.confidence_kind, params.raw_confidence};
}

[[nodiscard]] inline DmaxRules dmax_rules(const AcceptDmaxParams& params) noexcept {
  return {params.mask_token_id, params.fast_path};
}

[[nodiscard]] inline GemmaRules gemma_rules(const AcceptGemmaParams& params) noexcept {
  return {params.entropy_bound, params.stability_threshold, params.confidence_threshold};
}

}  // namespace diffulex
