# SPDX-License-Identifier: Apache-2.0
"""The routes that generate: bodies, prompts, formats."""
