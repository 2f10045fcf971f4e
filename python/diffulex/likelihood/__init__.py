# SPDX-License-Identifier: Apache-2.0
"""Likelihoods of given tokens: which positions are masked, and what the forwards add up to.

`Diffulex.score` is the way in.
"""
