# SPDX-License-Identifier: Apache-2.0
"""Errors of the image engine."""

from __future__ import annotations

from diffulex.errors import CheckpointError, ConfigError, DiffulexError

__all__ = [
    "ModelLoadError",
    "OmniError",
    "RequestAborted",
    "RequestError",
    "UnsupportedFeatureError",
    "UnsupportedModelError",
]


class OmniError(DiffulexError):
    """Base of the errors of the image engine."""


class RequestError(OmniError, ValueError):
    """A request cannot be served as it is; the engine stays usable."""


class RequestAborted(OmniError):  # noqa: N818 (a request that ends as asked is no error)
    """A request was stopped by its callback; the engine stays usable."""


class UnsupportedModelError(OmniError, ConfigError):
    """No pipeline is registered for the model."""


class UnsupportedFeatureError(OmniError, ConfigError):
    """The model's pipeline cannot do what a setting or a request asks for."""


class ModelLoadError(OmniError, CheckpointError):
    """A model's files are missing, incomplete or do not fit its classes."""
