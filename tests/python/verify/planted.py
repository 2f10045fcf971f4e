# SPDX-License-Identifier: Apache-2.0
"""Defects that `diffulex verify` has to find, each with the rule that finds it.

`PYTHONPATH=tests/python python tests/python/verify/planted.py` prints the table of docs/verify.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffulex.verify import run as verification
from fixtures.checkpoints import write_tokenizer
from fixtures.families import DENSE_FAMILIES, family_builder
from fixtures.gemma import GemmaOracle
from fixtures.moe_families import MOE_FAMILIES, moe_builder

#: Every family.
FAMILIES = (*DENSE_FAMILIES, *MOE_FAMILIES, "diffusion_gemma")
#: Those whose decoding under their own strategy uses the prefix cache.
_CACHED = tuple(
    name for name in FAMILIES if name not in ("dream", "diffucoder", "llada", "diffusion_gemma")
)
_MASKED = tuple(name for name in FAMILIES if name != "diffusion_gemma")
_QK_NORM = ("dream_reasoner", "sdar", "sdar_moe", "llada2")


def write(family: str, directory: Path) -> None:
    """A tiny checkpoint without defects."""
    if family == "diffusion_gemma":
        oracle = GemmaOracle(vocab_size=300, max_position_embeddings=256)
        oracle.write(directory, eos_token_id=[256, 258])
        write_tokenizer(directory, "fast")
    else:
        builder = moe_builder if family in MOE_FAMILIES else family_builder
        builder(family).write(directory)


Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Defect:
    """A defect of a checkpoint or of the engine.

    Attributes:
        what: in words.
        rule: the one that finds it.
        plant: puts it into a directory or, by patches, into the engine.
        families: that can have it.
    """

    what: str
    rule: str
    plant: Callable[[Path, Patch], None]
    families: tuple[str, ...] = FAMILIES


# Defects of files.


def _edit_json(directory: Path, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
    path = directory / name
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def _edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _first(tensors: dict[str, torch.Tensor], ending: str = "") -> str:
    names = [n for n in sorted(tensors) if "vision" not in n and n.endswith(ending)]
    return next(name for name in names if tensors[name].dim() == 2)


def _missing_tensor(directory: Path, patch: Patch) -> None:
    _edit_tensors(directory, lambda tensors: tensors.pop(_first(tensors)))


def _not_finite(directory: Path, patch: Patch) -> None:
    _edit_tensors(directory, lambda tensors: tensors[_first(tensors)].fill_(torch.nan))


def _lost_spaces(directory: Path, patch: Patch) -> None:
    normalizer = {"type": "Replace", "pattern": {"String": "  "}, "content": " "}
    _edit_json(directory, "tokenizer.json", lambda found: found.update(normalizer=normalizer))


def _ordinary_mask(directory: Path, patch: Patch) -> None:
    """Neither file says that the mask of the configuration is wrong."""

    def rename(found: dict[str, Any]) -> None:
        (token,) = [item for item in found["added_tokens"] if item["id"] == 259]
        token["content"] = "<|other|>"

    def undeclare(found: dict[str, Any]) -> None:
        found.pop("mask_token", None)

    _edit_json(directory, "config.json", lambda found: found.update(mask_token_id=65))
    _edit_json(directory, "tokenizer.json", rename)
    _edit_json(directory, "tokenizer_config.json", undeclare)


def _template(directory: Path, text: str) -> None:
    (directory / "chat_template.jinja").write_text(text, encoding="utf-8")


def _unknown_end(directory: Path, patch: Patch) -> None:
    _template(
        directory,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|turn|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    )

    def add(found: dict[str, Any]) -> None:
        found["added_tokens"].append(
            {**found["added_tokens"][-1], "id": 260, "content": "<|turn|>"}
        )

    _edit_json(directory, "tokenizer.json", add)


def _no_head(directory: Path, patch: Patch) -> None:
    _template(directory, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")


def _lost_question(directory: Path, patch: Patch) -> None:
    _template(directory, "{% for m in messages %}{{ m.role }}\n{% endfor %}assistant: ")


def _other_weights(directory: Path, patch: Patch) -> None:
    verification.verify(
        str(directory), rules=("recorded answers",), device="cpu",
        record_to=directory / "diffulex_verify.safetensors", **model_name(directory),
    )  # fmt: skip
    _edit_tensors(directory, lambda tensors: tensors[_first(tensors)].mul_(1.05))


def model_name(directory: Path) -> dict[str, str]:
    """What a checkpoint needs besides its files."""
    return {"model_name": "diffucoder"} if directory.name == "diffucoder" else {}


# Defects of the engine.


def _change_model(patch: Patch, change: Callable[[Any], None]) -> None:
    load = verification.load_model

    def loaded(*arguments: Any, **keywords: Any) -> Any:
        model = load(*arguments, **keywords)
        change(model)
        return model

    patch.setattr(verification, "load_model", loaded)


def _wrong_rotation(directory: Path, patch: Patch) -> None:
    def change(model: Any) -> None:
        for name, buffer in model.named_buffers():
            if "cos_sin" in name:
                buffer.copy_(buffer.roll(1, 0))

    _change_model(patch, change)


def _lost_norm(directory: Path, patch: Patch) -> None:
    def change(model: Any) -> None:
        for layer in model.decoder_layers:
            layer.attention.q_norm.fill_(1.0)

    _change_model(patch, change)


def _half_layer(directory: Path, patch: Patch) -> None:
    def change(model: Any) -> None:
        model.norm.weight.mul_(0.5)

    _change_model(patch, change)


def _swapped_experts(directory: Path, patch: Patch) -> None:
    def change(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "w13") and hasattr(module, "w2"):
                module.w2.copy_(module.w2.flip(0))

    _change_model(patch, change)


def _causal(directory: Path, patch: Patch) -> None:
    from diffulex.nn.attention_metadata import AttnMetadata

    plain = AttnMetadata.__init__

    def causal(self: Any, *arguments: Any, **keywords: Any) -> None:
        plain(self, *arguments, **keywords)
        self.mask_kinds = torch.zeros_like(self.mask_kinds)  # CAUSAL

    patch.setattr(AttnMetadata, "__init__", causal)


def _improbable_tokens(directory: Path, patch: Patch) -> None:
    from diffulex.runner import model_runner

    plain = model_runner.head_logits
    patch.setattr(model_runner, "head_logits", lambda model, hidden: -plain(model, hidden))


def _spoiled_pages(directory: Path, patch: Patch) -> None:
    """Whoever finds cached pages finds others' values in them."""
    from diffulex.engine.engine import Diffulex

    plain = Diffulex.generate

    def generate(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = plain(self, *arguments, **keywords)
        runner = self._executor.runner
        for layer in range(runner.config.model.spec.num_layers):
            for part in runner.kv_cache.layer(layer):
                part.copy_(-part)
        return result

    patch.setattr(Diffulex, "generate", generate)


def _other_tokens_ahead(directory: Path, patch: Patch) -> None:
    from diffulex.runner import decode_loop

    plain = decode_loop.head_logits
    patch.setattr(decode_loop, "head_logits", lambda model, hidden: -plain(model, hidden))


DEFECTS = {
    "missing tensor": Defect("a tensor is missing", "checkpoint", _missing_tensor),
    "not finite": Defect("a tensor holds NaN", "checkpoint", _not_finite),
    "lost spaces": Defect("the tokenizer merges double spaces", "tokenizer", _lost_spaces),
    "ordinary mask": Defect("the mask is an ordinary letter", "mask", _ordinary_mask, _MASKED),
    "unknown end": Defect("the template's end of turn is no stop id", "stop ids", _unknown_end),
    "no head": Defect("the template begins no answer", "chat template", _no_head),
    "lost question": Defect("the template drops the question", "chat template", _lost_question),
    "spoiled pages": Defect(
        "cached pages hold other keys and values", "prefix cache", _spoiled_pages, _CACHED
    ),
    "other tokens ahead": Defect(
        "steps ahead of the host decide otherwise", "graphs", _other_tokens_ahead, _MASKED
    ),
    "wrong rotation": Defect("positions are off by one", "logits", _wrong_rotation),
    "lost norm": Defect("the norm of queries is left out", "logits", _lost_norm, _QK_NORM),
    "other norm": Defect("the last norm has other weights", "logits", _half_layer),
    "swapped experts": Defect(
        "rows go to other experts", "logits", _swapped_experts, (*MOE_FAMILIES, "diffusion_gemma")
    ),
    "causal": Defect("rows do not see the rest of their block", "logits", _causal),
    "improbable tokens": Defect(
        "the least probable token is written", "greedy tokens", _improbable_tokens, _MASKED
    ),
    "other weights": Defect(
        "the weights are not those that were recorded", "recorded answers", _other_weights
    ),
}


def table() -> str:
    """The defects in markdown."""
    lines = ["| Defect | Found by | Families |", "| --- | --- | --- |"]
    for defect in DEFECTS.values():
        left = [name for name in FAMILIES if name not in defect.families]
        few = len(defect.families) <= len(left)
        names = ", ".join(defect.families) if few else f"all but {', '.join(left)}"
        lines.append(f"| {defect.what} | {defect.rule} | {names if left else 'all'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
