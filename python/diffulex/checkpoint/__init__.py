# SPDX-License-Identifier: Apache-2.0
"""Checkpoint directories: where they are, what their files hold, how weights are loaded."""
