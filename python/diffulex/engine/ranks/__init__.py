# SPDX-License-Identifier: Apache-2.0
"""An engine whose model several processes share: one scheduler in the first, a worker in each other."""
