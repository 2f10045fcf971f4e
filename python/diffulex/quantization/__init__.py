# SPDX-License-Identifier: Apache-2.0
"""Weights in low precision: which ones, how they are held, and how they are made while loading."""
