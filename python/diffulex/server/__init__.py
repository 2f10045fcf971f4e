# SPDX-License-Identifier: Apache-2.0
"""Online serving: an HTTP process in front of a process that owns the engine."""
