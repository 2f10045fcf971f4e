# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of `torch.ops.diffulex`: the checks of the real ones without data.

Every op writes tensors of the caller and returns nothing, so a fake only checks devices, dtypes and
shapes. Conditions go through `torch._check`, which accepts symbolic sizes. One module per op family;
importing this package registers all fakes, and the op library must be loaded.
"""

from __future__ import annotations

from diffulex_ext._fake import acceptance as acceptance
from diffulex_ext._fake import activation as activation
from diffulex_ext._fake import attention as attention
from diffulex_ext._fake import decode as decode
from diffulex_ext._fake import kv_cache as kv_cache
from diffulex_ext._fake import linear as linear
from diffulex_ext._fake import moe as moe
from diffulex_ext._fake import norm as norm
from diffulex_ext._fake import rope as rope
from diffulex_ext._fake import sampling as sampling
from diffulex_ext._fake import token_merge as token_merge
