// SPDX-License-Identifier: Apache-2.0
#pragma once

// The parameters of all ops, for what expands ops.def.

#include "diffulex/ops/accept.h"
#include "diffulex/ops/activation.h"
#include "diffulex/ops/advance.h"
#include "diffulex/ops/attention.h"
#include "diffulex/ops/comm.h"
#include "diffulex/ops/kv.h"
#include "diffulex/ops/linear.h"
#include "diffulex/ops/merge.h"
#include "diffulex/ops/moe.h"
#include "diffulex/ops/norm.h"
#include "diffulex/ops/quantize.h"
#include "diffulex/ops/rope.h"
#include "diffulex/ops/routing.h"
#include "diffulex/ops/sampling.h"
