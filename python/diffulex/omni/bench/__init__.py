# SPDX-License-Identifier: Apache-2.0
"""Judging image models: scenes with captions, a checker by rule, reports."""
