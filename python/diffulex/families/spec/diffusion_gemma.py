# SPDX-License-Identifier: Apache-2.0
"""DiffusionGemma: reads the text part of ``config.json`` into a DiffusionGemmaSpec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.errors import CheckpointError
from diffulex.families.spec.model_spec import MAX_CANVAS, ModelSpec
from diffulex.families.spec.moe import MoeSpec
from diffulex.families.spec.names import TensorNames
from diffulex.families.spec.reader import ConfigReader, read_optional_json
from diffulex.families.spec.token_ids import read_tokenizer_files, resolve_stop_token_ids
from diffulex.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from typing_extensions import Self

__all__ = ["GEMMA_NAMES", "DiffusionGemmaSpec", "GemmaLayer", "GemmaRotary", "read_gemma_spec"]

logger = get_logger(__name__)

#: Names by role; the layer tensors that other families lack are in the model itself.
GEMMA_NAMES = TensorNames(
    embedding="model.decoder.embed_tokens.weight",
    final_norm="model.decoder.norm.weight",
    layer="model.decoder.layers.{}.",
    experts="experts",
    ignored=("model.encoder.vision_tower.*", "model.encoder.embed_vision.*"),
)

_TURN_END_TEXTS = ("<turn|>",)
_TURN_END_IDS = (1, 106, 50)
_CANVAS_LENGTH = 256
_SOFTCAP = 30.0
_GLOBAL_HEAD_DIM = 512
#: The default pattern: every sixth layer sees everything.
_LAYER_PERIOD = 6
_SLIDING, _FULL = "sliding_attention", "full_attention"

#: Keys of the text configuration that change the math, with the values that are implemented.
_REQUIRED: Mapping[str, tuple[object, ...]] = {
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "use_bidirectional_attention": (None, "vision"),
    "attention_bias": (None, False),
    "attn_logit_softcapping": (None,),
    "tie_word_embeddings": (None, True),
}


class GemmaRotary(NamedTuple):
    """Rotary embedding of one kind of layer."""

    theta: float
    #: Frequency slots that turn; the others have angle 0.
    num_turning: int
    #: Entries of a head that take part, in pairs half this far apart.
    rotary_dim: int
    #: Denominator of the exponents.
    base_dim: int


_NO_ROTARY = GemmaRotary(theta=1.0, num_turning=0, rotary_dim=0, base_dim=1)


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    """What differs between layers."""

    is_sliding: bool
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class DiffusionGemmaSpec(ModelSpec):
    """Description of the text model. `head_dim`, `num_kv_heads` and the rotary fields of the base
    are those of the sliding layers."""

    layers: tuple[GemmaLayer, ...] = ()
    sliding_window: int = 0
    sliding_rotary: GemmaRotary = _NO_ROTARY
    full_rotary: GemmaRotary = _NO_ROTARY

    def per_rank(self, num_ranks: int) -> Self:
        if num_ranks == 1:
            return self
        layers = tuple(
            replace(layer, num_kv_heads=max(1, layer.num_kv_heads // num_ranks))
            for layer in self.layers
        )
        # A dataclass with slots is another class than the one that `super()` would find.
        return replace(ModelSpec.per_rank(self, num_ranks), layers=layers)

    @property
    def has_dense_blocks(self) -> bool:
        return True  # beside the experts of every layer

    @property
    def kv_layers(self) -> tuple[tuple[int, int], ...]:
        return tuple((layer.num_kv_heads, layer.head_dim) for layer in self.layers)

    @property
    def rotary_columns(self) -> int:
        return sum(
            rotary.rotary_dim
            for rotary, is_sliding in ((self.sliding_rotary, True), (self.full_rotary, False))
            if any(layer.is_sliding == is_sliding for layer in self.layers)
        )

    @property
    def num_parameters(self) -> int:
        hidden, moe = self.hidden_size, self.moe
        total = self.vocab_size * hidden + hidden  # tied embedding, final norm
        total += 3 * hidden * self.intermediate_size + hidden  # self-conditioning
        for layer in self.layers:
            heads = 2 * self.num_q_heads + layer.num_kv_heads * (2 if layer.is_sliding else 1)
            total += heads * layer.head_dim * hidden + 2 * layer.head_dim
            total += 3 * hidden * self.intermediate_size + 7 * hidden + 2  # norms and scalars
            if moe is not None:
                total += moe.num_parameters(hidden) + hidden + moe.num_experts  # router scales
        return total


class _TextReader(ConfigReader):
    """Reader of ``text_config``; errors name the place."""

    def fail(self, key: str, expected: str, value: object) -> CheckpointError:
        return CheckpointError(
            f"config.json: text_config.{key}: expected {expected}, got {value!r}"
        )


def read_gemma_spec(
    config: Mapping[str, Any], model_dir: Path, *, mask_token_id: int | None = None
) -> DiffusionGemmaSpec:
    """Builds the description of a DiffusionGemma checkpoint.

    Head sizes of the full-attention layers come from ``per_layer_config`` (what transformers
    writes) or from ``global_head_dim`` and ``num_global_key_value_heads``.

    Args:
        config: parsed ``config.json``.
        model_dir: directory with the tokenizer files and ``generation_config.json``, if any.
        mask_token_id: must be None; the family has no mask token.

    Raises:
        CheckpointError: a value is missing, malformed, contradictory or not supported.
    """
    if mask_token_id is not None:
        raise CheckpointError(
            f"mask token: expected none (DiffusionGemma has no mask token), got {mask_token_id}"
        )
    top = ConfigReader(config)
    top.require("tie_word_embeddings", (None, True))
    text_config = config.get("text_config")
    if not isinstance(text_config, dict):
        raise top.fail("text_config", "an object", text_config)
    text = _TextReader(text_config)
    for key, allowed in _REQUIRED.items():
        text.require(key, allowed)
    vocab_size = text.integer("vocab_size", 262144)
    num_q_heads = text.integer("num_attention_heads", 8)
    num_layers = text.count("num_hidden_layers", 30)
    layers = _read_layers(text, num_layers, num_q_heads)
    sliding, full = _first_layer(layers, True), _first_layer(layers, False)
    sliding_rotary = _read_rotary(text, _SLIDING, sliding.head_dim)
    moe = _read_moe(text, num_layers)
    files = read_tokenizer_files(model_dir)
    canvas_length = top.integer("canvas_length", _CANVAS_LENGTH, maximum=MAX_CANVAS)
    return DiffusionGemmaSpec(
        family="diffusion_gemma",
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size", 2304),
        intermediate_size=text.integer("intermediate_size", 9216),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=sliding.num_kv_heads,
        head_dim=sliding.head_dim,
        max_positions=text.integer("max_position_embeddings", 131072),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        rope_theta=sliding_rotary.theta,
        rotary_dim=sliding_rotary.rotary_dim,
        tie_word_embeddings=True,
        dtype=_read_dtype(top, text),
        block_size=canvas_length,
        canvas_length=canvas_length,
        mask_token_id=None,
        stop_token_ids=resolve_stop_token_ids(
            {"eos_token_id": config.get("eos_token_id", text_config.get("eos_token_id"))},
            read_optional_json(model_dir / "generation_config.json"),
            files,
            vocab_size=vocab_size,
            turn_end_texts=_TURN_END_TEXTS,
            turn_end_ids=_TURN_END_IDS,
        ),
        final_logit_softcap=text.number("final_logit_softcapping", _SOFTCAP),
        names=GEMMA_NAMES,
        moe=moe,
        layers=layers,
        sliding_window=text.integer("sliding_window", 512),
        sliding_rotary=sliding_rotary,
        full_rotary=_read_rotary(text, _FULL, full.head_dim),
    )


def _first_layer(layers: tuple[GemmaLayer, ...], is_sliding: bool) -> GemmaLayer:
    """The first layer of a kind; a model without it has any layer stand in."""
    return next((layer for layer in layers if layer.is_sliding == is_sliding), layers[-1])


def _read_dtype(top: ConfigReader, text: ConfigReader) -> str:
    """Storage dtype, from whichever level names one."""
    has_own = any(top.config.get(key) for key in ("dtype", "torch_dtype"))
    return top.dtype() if has_own else text.dtype()


def _read_moe(text: ConfigReader, num_layers: int) -> MoeSpec:
    num_experts = text.count("num_experts")
    top_k = text.integer("top_k_experts")
    if top_k > num_experts:
        raise text.fail("top_k_experts", f"at most num_experts {num_experts}", top_k)
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=text.integer("moe_intermediate_size"),
        layers=frozenset(range(num_layers)),
    )


def _read_layer_types(text: ConfigReader, num_layers: int) -> list[str]:
    types = text.config.get("layer_types")
    if types is None:
        types = [_SLIDING if (layer + 1) % _LAYER_PERIOD else _FULL for layer in range(num_layers)]
        types[-1] = _FULL
        return types
    is_list = isinstance(types, list) and all(item in (_SLIDING, _FULL) for item in types)
    if not is_list or len(types) != num_layers:
        expected = f"{num_layers} entries {_SLIDING!r} or {_FULL!r}"
        raise text.fail("layer_types", expected, types)
    if types[-1] != _FULL:
        logger.warning("config.json: text_config.layer_types: the last layer is taken as %s", _FULL)
    return [*types[:-1], _FULL]


def _read_layers(text: ConfigReader, num_layers: int, num_q_heads: int) -> tuple[GemmaLayer, ...]:
    types = _read_layer_types(text, num_layers)
    head_dim = text.integer("head_dim", 256)
    num_kv_heads = text.num_kv_heads(num_q_heads)
    if text.config.get("num_key_value_heads") is None:
        num_kv_heads = _divisor(text, "num_key_value_heads", 4, num_q_heads)
    overrides = _read_overrides(text, num_layers)
    # transformers derives the sizes of full layers only where it finds no per-layer table.
    default_dim = _GLOBAL_HEAD_DIM if overrides is None else head_dim
    global_head_dim = text.integer("global_head_dim", default_dim)
    global_kv_heads = num_kv_heads
    if text.config.get("num_global_key_value_heads") is not None:
        global_kv_heads = text.num_kv_heads(num_q_heads, "num_global_key_value_heads")
    layers = []
    for index, kind in enumerate(types):
        is_sliding = kind == _SLIDING
        override = (overrides or {}).get(index, {})
        layers.append(
            GemmaLayer(
                is_sliding=is_sliding,
                num_kv_heads=_divisor(
                    text,
                    f"per_layer_config.{index}.num_key_value_heads",
                    override.get("num_key_value_heads")
                    or (num_kv_heads if is_sliding else global_kv_heads),
                    num_q_heads,
                ),
                head_dim=override.get("head_dim") or (head_dim if is_sliding else global_head_dim),
            )
        )
    _check_uniform(text, layers)
    return tuple(layers)


def _check_uniform(text: ConfigReader, layers: list[GemmaLayer]) -> None:
    """Layers of one kind share their rotary table and the buffers of a forward."""
    for is_sliding, kind in ((True, _SLIDING), (False, _FULL)):
        shapes = {
            (layer.num_kv_heads, layer.head_dim)
            for layer in layers
            if layer.is_sliding == is_sliding
        }
        if len(shapes) > 1:
            expected = f"one number of KV heads and head size for all layers of {kind!r}"
            raise text.fail("per_layer_config", expected, sorted(shapes))


def _divisor(text: ConfigReader, key: str, value: int, num_q_heads: int) -> int:
    if num_q_heads % value:
        raise text.fail(key, f"a divisor of {num_q_heads}", value)
    return value


def _read_overrides(text: ConfigReader, num_layers: int) -> dict[int, dict[str, int]] | None:
    """``per_layer_config`` by layer number, or None where there is none."""
    table = text.config.get("per_layer_config")
    if table is None:
        return None
    if not isinstance(table, dict):
        raise text.fail("per_layer_config", "an object by layer number", table)
    overrides: dict[int, dict[str, int]] = {}
    for key, entry in table.items():
        if not key.isdecimal() or int(key) >= num_layers:
            raise text.fail("per_layer_config", f"layer numbers below {num_layers}", key)
        if not isinstance(entry, dict):
            raise text.fail(f"per_layer_config.{key}", "an object", entry)
        reader = _TextReader({f"per_layer_config.{key}.{name}": v for name, v in entry.items()})
        values = {}
        for name in entry:
            if name not in ("head_dim", "num_key_value_heads"):
                expected = "head_dim and num_key_value_heads only"
                raise text.fail(f"per_layer_config.{key}", expected, name)
            values[name] = reader.integer(f"per_layer_config.{key}.{name}")
        overrides[int(key)] = values
    return overrides


def _read_rotary(text: ConfigReader, kind: str, head_dim: int) -> GemmaRotary:
    """Rotary embedding of the layers of one kind."""
    tables = text.config.get("rope_parameters")
    if tables is None:
        is_sliding = kind == _SLIDING
        entry: Mapping[str, Any] = (
            {"rope_type": "default", "rope_theta": 1e4}
            if is_sliding
            else {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
        )
    else:
        found = tables.get(kind) if isinstance(tables, dict) else None
        if not isinstance(found, dict):
            raise text.fail("rope_parameters", f"an object with {kind!r}", tables)
        entry = found
    where = f"rope_parameters.{kind}"
    rope_type = entry.get("rope_type", "default")
    if rope_type not in ("default", "proportional"):
        raise text.fail(f"{where}.rope_type", "'default' or 'proportional'", rope_type)
    if entry.get("factor") not in (None, 1, 1.0):
        raise text.fail(f"{where}.factor", "1 (no scaling)", entry["factor"])
    values = _TextReader({f"{where}.{key}": value for key, value in entry.items()})
    if entry.get("rope_theta") is None:
        raise text.fail(f"{where}.rope_theta", "a positive number", None)
    theta = values.number(f"{where}.rope_theta", 1.0)
    factor = values.number(f"{where}.partial_rotary_factor", 1.0)
    if factor > 1:
        raise text.fail(f"{where}.partial_rotary_factor", "at most 1", factor)
    if head_dim % 2:
        raise text.fail("head_dim", "an even number", head_dim)
    if rope_type == "proportional":
        return GemmaRotary(theta, int(factor * head_dim // 2), head_dim, head_dim)
    if factor != 1.0:
        raise text.fail(f"{where}.partial_rotary_factor", "1 with 'default'", factor)
    return GemmaRotary(theta, head_dim // 2, head_dim, head_dim)
