# SPDX-License-Identifier: Apache-2.0
"""Model families: detection, configuration, weights and forward passes."""
