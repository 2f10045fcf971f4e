# SPDX-License-Identifier: Apache-2.0
"""Export of block-diffusion language models to ExecuTorch, and their programs.

Importing this package loads neither torch nor executorch; the names below are imported when used.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "backends": ("BACKENDS", "BackendRegistry", "EdgeBackend"),
    "bundle": ("Bundle", "read_bundle"),
    "decoders": (
        "MODEL_REGISTRY",
        "DreamEdge",
        "FastDLLMv2Edge",
        "FastdLLMV2Edge",
        "LLaDAEdge",
        "SDAREdge",
    ),
    "errors": ("EdgeError", "ProgramError"),
    "exporter": ("ExportConfig", "ExportResult", "export_model", "load_decoder"),
    "model": ("EdgeDecoder", "EdgeForm", "EdgeProgram"),
    "program": ("PteModel", "PteProgram"),
    "quant": ("QuantizationResult", "quantize_model", "quantize_with_report"),
    "recipes": ("Recipe", "parse_recipe", "quantise"),
    "unified": ("KVCache", "KVCacheConfig", "create_kv_caches"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_HOMES)  # noqa: PLE0605 (made from the table above)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
