# SPDX-License-Identifier: Apache-2.0
"""Caches over denoising steps: a step that hardly differs from an earlier one takes its blocks' sum."""
