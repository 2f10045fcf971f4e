# SPDX-License-Identifier: Apache-2.0
"""What the files of a checkpoint say; read once, between parsing options and resolving them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.config.types import ModelFacts

if TYPE_CHECKING:
    from pathlib import Path

    from diffulex.config.parse import Options
    from diffulex_edge.bundle import Bundle

__all__ = ["read_facts"]


def read_facts(options: Options) -> ModelFacts:
    """Finds the checkpoint and reads its configuration and tokenizer files.

    Raises:
        ConfigError: the model name does not suit the checkpoint.
        CheckpointError: the model cannot be found or read.
    """
    from diffulex.checkpoint.auto_model import detect  # noqa: PLC0415
    from diffulex.checkpoint.resolve import resolve_model  # noqa: PLC0415
    from diffulex.checkpoint.tokenizer import Tokenizer  # noqa: PLC0415
    from diffulex.families.spec.reader import read_optional_json  # noqa: PLC0415

    explicit = options.given
    model_dir = resolve_model(options.model, explicit.get("revision"))
    name, spec, info = detect(
        model_dir, explicit.get("model_name"), mask_token_id=explicit.get("mask_token_id")
    )
    tokenizer = Tokenizer.from_dir(model_dir)
    return ModelFacts(
        model_name=name,
        model_dir=model_dir,
        spec=spec,
        checkpoint_defaults=info.engine_defaults,
        tokenizer_vocab_size=tokenizer.tokenizer_vocab_size,
        tokenizer=tokenizer,
        generation_config=read_optional_json(model_dir / "generation_config.json"),
        stored=info.stored,
        program=_exported_program(model_dir, explicit.get("load_format", "auto")),
    )


def _exported_program(model_dir: Path, load_format: str) -> Bundle | None:
    """What the directory says about its exported program, if that is to be run."""
    has_program = (model_dir / "model.pte").is_file()
    is_chosen = load_format == "auto" and has_program and not any(model_dir.glob("*.safetensors"))
    if not is_chosen and load_format != "pte":
        return None
    from diffulex_edge.bundle import read_bundle  # noqa: PLC0415 (exported programs only)

    return read_bundle(model_dir)
