# SPDX-License-Identifier: Apache-2.0
"""In which order the tokens of an answer were written: recording, files, statistics, pictures.

`SamplingParams.return_trajectory` asks for it, `diffulex trace` shows it.
"""
