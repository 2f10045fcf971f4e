# SPDX-License-Identifier: Apache-2.0
"""The rules by name, for programs that do not test any."""

from __future__ import annotations

__all__ = ["RULES"]

#: The rules, in the order of their lines.
RULES = (
    *("checkpoint", "tokenizer", "mask", "stop ids", "chat template"),
    *("prefix cache", "graphs", "logits", "greedy tokens", "recorded answers"),
)
