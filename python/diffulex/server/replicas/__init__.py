# SPDX-License-Identifier: Apache-2.0
"""A server over several replicas of an engine: how it starts, and the routes it has beside the others."""
