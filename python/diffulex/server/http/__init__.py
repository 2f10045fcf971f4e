# SPDX-License-Identifier: Apache-2.0
"""The HTTP application: middleware, errors, metrics, streams, service routes."""
