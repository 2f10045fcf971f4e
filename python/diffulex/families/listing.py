# SPDX-License-Identifier: Apache-2.0
"""The built-in families and the tables of the registries, derived from their records."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from diffulex import families

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffulex.families.base import Family

__all__ = ["FAMILIES", "MODELS", "MODEL_ALIASES", "SAMPLERS", "family_named", "kept_modules"]

# Modules of the package that describe no family.
_OTHERS = ("base", "detection", "listing", "spec")


def _records() -> Iterator[Family]:
    for module in pkgutil.iter_modules(families.__path__):
        if module.name not in _OTHERS:
            yield importlib.import_module(f"{families.__name__}.{module.name}").FAMILY


#: Every family with a published checkpoint: the `FAMILY` of each other module of the package.
FAMILIES = tuple(_records())
#: Rows of `AutoModelForDiffusionLM`, and its aliases.
MODELS = {family.name: family.decoder for family in FAMILIES}
MODEL_ALIASES = {name: family.name for family in FAMILIES for name in family.architectures}
#: Rows of `AutoSampler`.
SAMPLERS = {
    name: sampler
    for family in FAMILIES
    for name, sampler in {family.name: family.sampler_path, **family.aliases}.items()
}

_BY_NAME = {name: family for family in FAMILIES for name in (family.name, *family.aliases)}


def family_named(model_name: str) -> Family | None:
    """The family that a `model_name` option stands for; None: no built-in one has the name."""
    return _BY_NAME.get(model_name)


def kept_modules(family: str, scheme: str) -> tuple[str, ...]:
    """Patterns of the modules that keep their dtype under a scheme unless the user names others."""
    record = family_named(family)
    return () if record is None else record.quantization_ignore.get(scheme, ())
