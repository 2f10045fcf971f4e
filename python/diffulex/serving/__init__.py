# SPDX-License-Identifier: Apache-2.0
"""Jobs between a server and an engine: ticks, processes, queues, frontends."""
