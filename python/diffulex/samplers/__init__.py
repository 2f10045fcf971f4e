# SPDX-License-Identifier: Apache-2.0
"""Samplers: from logits rows to block writes. One file per model family."""
