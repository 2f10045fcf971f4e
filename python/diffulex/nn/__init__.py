# SPDX-License-Identifier: Apache-2.0
"""Building blocks of the decoders.

Layers write into buffers that the model passes in: one set of scratch per forward serves all
layers, which keeps the host cost of a forward low and every address static under graph capture.
"""
