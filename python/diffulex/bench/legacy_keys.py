# SPDX-License-Identifier: Apache-2.0
"""Values of older configuration files, in the words of this engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffulex.errors import ConfigError
from diffulex.log import get_logger

__all__ = ["core_value", "endpoint_sections"]

logger = get_logger(__name__)

#: Key -> older value -> what the engine takes; None leaves the choice to the engine.
_NATIVE: dict[str, dict[str, str | None]] = {
    "attn_impl": {"triton": None, "triton_grouped": None, "native": None},
    "moe_gemm_impl": {
        "triton": None,
        "vllm": None,
        "vllm_modular": None,
        "grouped": None,
        "reference": "naive",
    },
}
#: Keys without a meaning here; prefill never runs as a graph.
_FORCED: dict[str, Any] = {"enable_prefill_cudagraph": False}


def core_value(name: str, value: Any, *, is_given: bool) -> Any:
    """The value the engine is given for a key of a benchmark file; None: nothing. A value that was
    given and means something else here is logged."""
    if name in _FORCED:
        return _FORCED[name]
    native = _NATIVE.get(name, {})
    if value not in native:
        return value
    if is_given:
        logger.info("%s: %r means the native implementation", name, value)
    return native[value]


#: Keys of the section `endpoint` in files of other programs: the section and key they stand for.
_ENDPOINT_KEYS = {
    "base_url": ("eval", "endpoint"),
    "model": ("eval", "endpoint_model"),
    "tokenizer_path": ("engine", "tokenizer_path"),
    "batch_size": ("eval", "concurrency"),
    "timeout": ("eval", "timeout"),
    "verify": ("eval", "verify_tls"),
    "apply_chat_template": ("eval", "apply_chat_template"),
}
#: Those that need nothing here: a name for files, and code that tokenizers never run here.
_WITHOUT_EFFECT = ("engine_name", "trust_remote_code", "api_key")


def endpoint_sections(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of the engine and of the evaluation in a file with `endpoint` and `eval`.

    A key of the server is not among them: it belongs into no file of a run.

    Raises:
        ConfigError: a key of the section is unknown.
    """
    found: dict[str, dict[str, Any]] = {"engine": {}, "eval": dict(settings.get("eval") or {})}
    for name, value in settings["endpoint"].items():
        if name in _ENDPOINT_KEYS:
            section, key = _ENDPOINT_KEYS[name]
            found[section][key] = value
        elif name == "chat_completions":
            found["eval"]["endpoint_api"] = "chat" if value else "completions"
        elif name == "api_key" and value not in (None, "EMPTY"):
            raise ConfigError(
                "endpoint.api_key: expected EMPTY (the key comes from --api-key or OPENAI_API_KEY),"
                " got one"
            )
        elif name not in _WITHOUT_EFFECT:
            known = ", ".join((*_ENDPOINT_KEYS, "chat_completions", *_WITHOUT_EFFECT))
            raise ConfigError(f"endpoint: expected one of {known}, got {name!r}")
    return found["engine"], found["eval"]
