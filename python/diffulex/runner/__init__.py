# SPDX-License-Identifier: Apache-2.0
"""One rank on its device: batches, KV cache, model calls, graphs, the decode loop."""
