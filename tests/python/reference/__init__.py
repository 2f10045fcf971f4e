# SPDX-License-Identifier: Apache-2.0
"""One plain reference of every formula that an op computes, by the text of its documentation.

No kernel code, slow loops: dense.py (attention, norms, rotation, activation, row statistics, masks that
take a proposal), experts.py (routing and experts), filters.py (draws from filtered distributions,
entropy bound), acceptance.py (samplers that rewrite). The CPU and the CUDA kernels are compared with
these alike.
"""
