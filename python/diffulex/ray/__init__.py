# SPDX-License-Identifier: Apache-2.0
"""Engines on a Ray cluster: processes of several hosts, Ray Serve and Ray Data (extra `ray`)."""
