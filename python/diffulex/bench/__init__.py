# SPDX-License-Identifier: Apache-2.0
"""Evaluation and measurement: problem generator, graders, reports. Optional; imported on request."""
