# SPDX-License-Identifier: Apache-2.0
"""The resolved settings of a model as the C++ session reads them: `key = value` lines.

C++ knows no family defaults and no precedence of settings; what the engine would decode with is resolved
here, when a bundle is written. The keys are those of csrc/edge/options.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.config.config import Config
from diffulex.config.facts import read_facts
from diffulex.config.parse import Options
from diffulex.config.sampling_params import SamplingParams
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from diffulex.checkpoint.tokenizer import Tokenizer

__all__ = ["SESSION_FILE", "session_conf", "write_session_conf"]

SESSION_FILE = "session.conf"
_HEADER = "# Settings of the C++ session, resolved by diffulex edge export."
_ENGINE_KEYS = (
    "strategy",
    "block_size",
    "buffer_size",
    "page_size",
    "max_num_batched_tokens",
    "max_model_len",
    "mask_token_id",
    "vocab_size",
    "stop_token_ids",
    "enable_chunked_prefill",
    "auto_max_nfe",
    "auto_max_nfe_warmup_steps",
    "auto_max_nfe_tpf_floor",
    "seed",
    "masked_rows_only",
    "is_editing",
    "logits_shift",
    "d2f_block_grid",
    "fdv2_use_block_cache",
)
_THRESHOLDS = ("add_block", "semi_complete", "accept", "edit", "token_stability")
_SAMPLER_KEYS = (
    "demote_token_ids",
    "force_accept_last_step",
    "factor",
    "entropy_bound",
    "low_threshold",
)
_REQUEST_KEYS = ("temperature", "top_p", "top_k", "min_p")
#: Code point for private use: no template and no tokenizer gives it a meaning.
_MESSAGE = "\ue000"
_ESCAPES = {ord("\\"): "\\\\", ord('"'): '\\"', ord("\n"): "\\n", ord("\r"): "\\r"}


def write_session_conf(
    directory: Path, model_name: str | None = None, mask_token_id: int | None = None
) -> None:
    """Writes the file of a bundle whose other files are there.

    Args:
        model_name: registered family, where the configuration does not say it.
        mask_token_id: as `model_name`.

    Raises:
        ConfigError: the session lacks something that the settings need.
    """
    given = {"model_name": model_name, "mask_token_id": mask_token_id}
    options = Options.parse(str(directory), given)
    facts = read_facts(options)
    config = Config.of(options, facts)
    text = session_conf(config, facts.tokenizer)
    (directory / SESSION_FILE).write_text(text, encoding="utf-8", newline="\n")


def session_conf(config: Config, tokenizer: Tokenizer | None = None) -> str:
    """The file's text for a resolved configuration.

    Args:
        tokenizer: gives what stands around a prompt that is text; None: nothing does.

    Raises:
        ConfigError: the session lacks something that the configuration needs.
    """
    values = {**_engine_values(config), **_sampler_values(config), **_prompt_values(tokenizer)}
    request = SamplingParams().with_defaults(config.sampler).to_core()
    values.update((key, getattr(request, key)) for key in _REQUEST_KEYS)
    return "\n".join([_HEADER, *(f"{key} = {_written(values[key])}" for key in values), ""])


def _engine_values(config: Config) -> dict[str, Any]:
    core = config.with_num_pages(config.pages_per_request).to_core()
    values = {key: getattr(core, key) for key in _ENGINE_KEYS}
    for name in _THRESHOLDS:
        values[f"{name}_threshold"] = getattr(core.thresholds, name)
    return values


def _sampler_values(config: Config) -> dict[str, Any]:
    # Numbers and orders of the engine's samplers; nothing of them runs.
    from diffulex.samplers.base import CONFIDENCE_KINDS, RULES, RowSampler  # noqa: PLC0415
    from diffulex.samplers.row_stage import EXCLUSIONS  # noqa: PLC0415
    from diffulex.samplers.selection import select_sampler  # noqa: PLC0415

    sampler, decoding = config.sampler, config.decoding
    kind = select_sampler(
        config.model.model_name, decoding.decoding_strategy, decoding.sampling_mode
    )
    if not (isinstance(kind, type) and issubclass(kind, RowSampler)):
        raise ConfigError(f"model_name: expected a built-in sampler for C++, got {kind!r}")
    if decoding.penalty_lambda > 0:
        raise ConfigError(
            f"penalty_lambda: expected 0 for a session in C++, got {decoding.penalty_lambda}"
        )
    return {
        **{key: getattr(sampler, key) for key in _SAMPLER_KEYS},
        "acceptance_rule": RULES[sampler.acceptance_rule or "threshold"],
        "confidence_type": CONFIDENCE_KINDS[sampler.confidence_type],
        "confidence_space": int(sampler.confidence_space == "tempered"),
        "raw_confidence": sampler.confidence_space == "raw",
        "filter_order": int(kind.filter_order),
        "exclusion": EXCLUSIONS[sampler.mask_suppression],
        "forbidden_token_ids": list(config.forbidden_ids),
        "vocab_limit": config.model.tokenizer_vocab_size,
        "denoising_steps": sampler.denoising_steps or 0,
        "is_gated": sampler.forced_gate == "prev_semi_complete",
        "max_post_edit_steps": decoding.max_post_edit_steps,
    }


def _prompt_values(tokenizer: Tokenizer | None) -> dict[str, Any]:
    begin: list[int] = []
    before = after = ""
    has_template = tokenizer is not None and tokenizer.has_chat_template
    if tokenizer is not None:
        begin = tokenizer.encode("")
    if tokenizer is not None and has_template:
        rendered = tokenizer.render_chat([{"role": "user", "content": _MESSAGE}])
        if rendered.count(_MESSAGE) == 1:
            before, _, after = rendered.partition(_MESSAGE)
    return {
        "begin_token_ids": begin,
        "has_template": has_template,
        "template_before": before,
        "template_after": after,
    }


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str):
        return f'"{value.translate(_ESCAPES)}"'
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return str(value)
