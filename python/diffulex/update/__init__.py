# SPDX-License-Identifier: Apache-2.0
"""Other weights for a model that is in use: tensors, files and adapters, written in place."""
