// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/accept.h"

namespace diffulex {

[[nodiscard]] Status check_accept_edit(const AcceptEditParams& params);
[[nodiscard]] Status check_accept_dmax(const AcceptDmaxParams& params);
[[nodiscard]] Status check_accept_gemma(const AcceptGemmaParams& params);

}  // namespace diffulex
