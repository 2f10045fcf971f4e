# SPDX-License-Identifier: Apache-2.0
"""Load generator for any server that speaks the OpenAI API: ``diffulex bench serve``.

Standard library only. A diffusion model delivers text in blocks, so every metric is defined on
content chunks: docs/bench_serve.md has the definitions and the result's keys.
"""
