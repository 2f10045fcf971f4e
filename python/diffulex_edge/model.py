# SPDX-License-Identifier: Apache-2.0
"""The decoder in the form that exports well, and the one program made of it.

Symbols: S rows of a call, n logits rows, T rows of the cache, L layers, Hq and Hkv heads, g = Hq / Hkv,
D head size, V vocabulary.

Against the engine's decoder: products over the heads instead of attention ops, a mask made from one
number per row, a norm whose mean is a product, a rotation by a matrix. Each of them keeps a backend
from cutting the graph into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.nn import functional

from diffulex.checkpoint.projection import Projection
from diffulex.nn.rotary import build_cos_sin_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diffulex.families.spec import ModelSpec

__all__ = ["EdgeDecoder", "EdgeForm", "EdgeProgram", "visible_mask"]

#: Finite, so that a row without keys is no NaN; half precision has no larger power of ten.
_HIDDEN = -1e9
_HIDDEN_HALF = -3e4

LayerCache = tuple["Tensor", "Tensor"]


@dataclass(frozen=True, slots=True)
class EdgeForm:
    """How a backend wants the operations written that it would otherwise not take."""

    #: Mean of the squares: a product with a constant row, or the reduction.
    norm: Literal["linear", "mean"] = "linear"
    #: How rows of K and V enter the cache.
    cache_write: Literal["index_copy", "scatter"] = "index_copy"
    #: Who holds the cache: the program, or its caller (`diffulex_edge.static_io`).
    layout: Literal["inplace", "static_io"] = "inplace"


class EdgeNorm(nn.Module):
    """RMSNorm of the last dimension."""

    def __init__(self, size: int, eps: float, form: EdgeForm) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.mean_row: Tensor | None
        row = torch.full((1, size), 1.0 / size) if form.norm == "linear" else None
        self.register_buffer("mean_row", row, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = wide * wide
        if self.mean_row is None:
            mean = squares.mean(-1, keepdim=True)
        else:
            mean = functional.linear(squares, self.mean_row)
        return self.weight * (wide * torch.rsqrt(mean + self.eps)).to(x.dtype)


class EdgeLayer(nn.Module):
    """One decoder layer over rows [S, H] and a cache [Hkv, T, D] of K and of V."""

    def __init__(self, spec: ModelSpec, form: EdgeForm) -> None:
        super().__init__()
        hidden, dim, eps = spec.hidden_size, spec.head_dim, spec.rms_norm_eps
        q_size, kv_size = spec.num_q_heads * dim, spec.num_kv_heads * dim
        self.heads = (spec.num_q_heads, spec.num_kv_heads, dim)
        self.form = form
        self.input_norm, self.post_norm = EdgeNorm(hidden, eps, form), EdgeNorm(hidden, eps, form)
        self.q = nn.Linear(hidden, q_size, bias=spec.qkv_bias)
        self.k = nn.Linear(hidden, kv_size, bias=spec.qkv_bias)
        self.v = nn.Linear(hidden, kv_size, bias=spec.qkv_bias)
        self.o = nn.Linear(q_size, hidden, bias=spec.o_bias)
        self.gate = nn.Linear(hidden, spec.intermediate_size, bias=False)
        self.up = nn.Linear(hidden, spec.intermediate_size, bias=False)
        self.down = nn.Linear(spec.intermediate_size, hidden, bias=False)
        self.q_norm = EdgeNorm(dim, eps, form) if spec.qk_norm else None
        self.k_norm = EdgeNorm(dim, eps, form) if spec.qk_norm else None

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor, turn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [Hq, S, D], k and v [Hkv, S, D] of normalised rows, rotated."""
        num_q, num_kv, dim = self.heads
        num_rows = x.shape[0]
        q = self.q(x).view(num_rows, num_q, dim).transpose(0, 1)
        k = self.k(x).view(num_rows, num_kv, dim).transpose(0, 1)
        v = self.v(x).view(num_rows, num_kv, dim).transpose(0, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = q * cos + functional.linear(q, turn) * sin
        k = k * cos + functional.linear(k, turn) * sin
        return q, k, v

    def store(self, cache: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Writes rows [Hkv, S, D] to a cache at positions [S]."""
        if self.form.cache_write == "index_copy":
            cache.index_copy_(1, positions, rows)
            return
        num_kv, num_rows, dim = rows.shape
        cache.scatter_(1, positions.view(1, num_rows, 1).expand(num_kv, num_rows, dim), rows)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """[S, Hq * D] for keys and values [Hkv, T, D] and an additive mask [S, T]."""
        num_q, num_kv, dim = self.heads
        num_rows, num_keys = q.shape[1], keys.shape[1]
        group = num_q // num_kv
        q = (q * dim**-0.5).reshape(num_kv, group * num_rows, dim)
        scores = torch.bmm(q, keys.transpose(1, 2)).view(num_q, num_rows, num_keys)
        shares = torch.softmax(scores + mask, dim=-1).view(num_kv, group * num_rows, num_keys)
        mixed = torch.bmm(shares, values).view(num_q, num_rows, dim)
        return mixed.transpose(0, 1).reshape(num_rows, num_q * dim)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Rows after the output projection and the feed-forward block, residuals included."""
        x = x + self.o(attended)
        h = self.post_norm(x)
        return cast("Tensor", x + self.down(functional.silu(self.gate(h)) * self.up(h)))

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor, Tensor],
        positions: Tensor,
        mask: Tensor,
        cache: LayerCache,
    ) -> Tensor:
        """Rows after this layer; stores their K and V first, so that they see each other."""
        q, k, v = self.project(self.input_norm(x), *rotary)
        self.store(cache[0], positions, k)
        self.store(cache[1], positions, v)
        return self.finish(x, self.attend(q, cache[0], cache[1], mask))


def _turn_matrix(dim: int, rotary_dim: int) -> Tensor:
    """R [D, D] with ``linear(x, R)`` = the rotated half of x, zero beyond the rotary part."""
    turn, half = torch.zeros(dim, dim), rotary_dim // 2
    index = torch.arange(half)
    turn[index, index + half] = -1.0
    turn[index + half, index] = 1.0
    return turn


def visible_mask(visible_end: Tensor, num_keys: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Additive mask [S, T]: row i sees the keys before ``visible_end[i]``."""
    keys = torch.arange(num_keys, device=visible_end.device)
    hidden = _HIDDEN_HALF if dtype == torch.float16 else _HIDDEN
    return torch.where(keys.unsqueeze(0) < visible_end.unsqueeze(1), 0.0, hidden).to(dtype)


class EdgeDecoder(nn.Module):
    """Decoder and head of a dense family. Weights are uninitialised until loaded.

    Fills itself through `diffulex.checkpoint.loader.load_weights`: names, shapes and ties are checked as
    for the engine's decoder.

    Args:
        spec: description of the checkpoint.
        max_seq_len: rows of the rotary tables, and most rows of a cache.
        form: how operations are written; see `EdgeForm`.
    """

    def __init__(
        self, spec: ModelSpec, max_seq_len: int | None = None, form: EdgeForm | None = None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.form = form or EdgeForm()
        self.max_seq_len = spec.max_positions if max_seq_len is None else max_seq_len
        self.embedding = nn.Embedding(spec.embedding_rows, spec.hidden_size)
        self.layers = nn.ModuleList(EdgeLayer(spec, self.form) for _ in range(spec.num_layers))
        self.norm = EdgeNorm(spec.hidden_size, spec.rms_norm_eps, self.form)
        self.head = nn.Linear(spec.hidden_size, spec.embedding_rows, bias=False)
        self.cos: Tensor
        self.sin: Tensor
        self.turn: Tensor
        for name, table in self._rotary_tables().items():
            self.register_buffer(name, table, persistent=False)
        self.requires_grad_(False)

    def _rotary_tables(self) -> dict[str, Tensor]:
        spec, device = self.spec, self.norm.weight.device
        table = build_cos_sin_cache(self.max_seq_len, spec.rotary_dim, spec.rope_theta, device)
        cos, sin = table.chunk(2, dim=-1)
        rest = spec.head_dim - spec.rotary_dim
        ones, zeros = torch.ones(self.max_seq_len, rest), torch.zeros(self.max_seq_len, rest)
        return {
            "cos": torch.cat((cos, cos, ones), dim=-1),
            "sin": torch.cat((sin, sin, zeros), dim=-1),
            "turn": _turn_matrix(spec.head_dim, spec.rotary_dim),
        }

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations and of caches."""
        return self.norm.weight.dtype

    def to_half(self) -> None:
        """Weights and tables in float16, in place; norms keep their statistics in float32."""
        norms = [module for module in self.modules() if isinstance(module, EdgeNorm)]
        rows = [norm.mean_row for norm in norms]
        self.half()
        for norm, row in zip(norms, rows, strict=True):
            norm.mean_row = row

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        caches: Sequence[LayerCache],
        slots: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [S, H] before the last norm, of tokens and positions [S].

        K and V are stored at the cache rows `slots` [S]; None: at the positions.
        """
        rotary = (self.cos[positions], self.sin[positions], self.turn)
        x: Tensor = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rotary, positions if slots is None else slots, mask, cache)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of hidden states [n, H]."""
        return cast("Tensor", self.head(self.norm(hidden)))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        kv_cache: Tensor | None = None,
        start_pos: int = 0,
        *,
        attention_mode: str | None = None,
        prompt_len: int | None = None,
        logits_rows: Tensor | slice | Literal["last"] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [B, S', V] of ids [B, S], and the cache that was given.

        Args:
            input_ids: [B, S] int64 in [0, V).
            positions: [B, S] int64; None: ``start_pos + arange(S)``. With a cache they must be
                contiguous.
            kv_cache: [L, 2, B, Hkv, T, D], K at index 0; rows [start_pos, start_pos + S) are written
                in place. None: the rows see each other only.
            start_pos: first row of the cache that is written.
            attention_mode: `full`, `block_causal` (absolute blocks) or `d2f`; None: `block_causal`.
            prompt_len: rows that see each other under `d2f`; the blocks start there.
            logits_rows: rows that the head is applied to; None: all.

        Raises:
            ValueError: the rows do not fit the cache, or an argument is malformed.
        """
        from diffulex_edge.unified import run_unified  # noqa: PLC0415 (imports this module)

        return run_unified(
            self,
            input_ids,
            positions,
            kv_cache,
            start_pos,
            attention_mode=attention_mode,
            prompt_len=prompt_len,
            logits_rows=logits_rows,
        )

    # What the loader asks for.

    def weight_table(self) -> dict[str, Tensor]:
        """Checkpoint tensor name -> tensor that it fills."""
        names = self.spec.names
        table: dict[str, Tensor] = {
            names.embedding: self.embedding.weight,
            names.final_norm: self.norm.weight,
            names.head: self.head.weight,
        }
        for module, linear in self.projections_by_name().items():
            table[f"{module}.weight"] = linear.weight
            if linear.bias is not None:
                table[f"{module}.bias"] = linear.bias
        for index, item in enumerate(self.layers):
            layer, prefix = cast("EdgeLayer", item), names.layer.format(index)
            table[prefix + names.input_norm] = layer.input_norm.weight
            table[prefix + names.post_norm] = layer.post_norm.weight
            if layer.q_norm is not None and layer.k_norm is not None:
                table[prefix + names.q_norm] = layer.q_norm.weight
                table[prefix + names.k_norm] = layer.k_norm.weight
        return table

    def projections_by_name(self) -> dict[str, nn.Linear]:
        """Module name in the checkpoint -> projection of a layer."""
        names = self.spec.names
        parts = {part: getattr(names, part) for part in ("q", "k", "v", "o", "gate", "up", "down")}
        return {
            names.layer.format(index) + name: cast("nn.Linear", getattr(layer, part))
            for index, layer in enumerate(self.layers)
            for part, name in parts.items()
        }

    def projections(self) -> dict[str, Projection]:
        """The same as adapters see them."""
        return {
            module: Projection(
                cast("Any", linear),
                slice(0, linear.out_features),
                f"{module}.weight",
                slice(0, linear.out_features),
            )
            for module, linear in self.projections_by_name().items()
        }

    def tie_embeddings(self) -> None:
        """Lets the head use the embedding table."""
        self.head.weight = self.embedding.weight

    def finish_loading(self) -> None:
        """Drops rows of the head beyond the vocabulary."""
        if self.spec.embedding_rows != self.spec.vocab_size:
            rows = self.head.weight[: self.spec.vocab_size].clone()
            self.head.weight = nn.Parameter(rows, requires_grad=False)


class EdgeProgram(nn.Module):
    """The exported method: `forward(tokens, positions, visible_end, logits_rows)`.

    Holds the cache of one sequence. K and V of row i go to cache row ``positions[i]`` before
    attention, and row i attends to the cache rows [0, ``visible_end[i]``). Nothing else decides what
    a row sees: block sizes, attention modes, shifts and prompts are the caller's.
    """

    def __init__(self, decoder: EdgeDecoder) -> None:
        super().__init__()
        self.decoder = decoder
        spec = decoder.spec
        shape = (spec.num_kv_heads, decoder.max_seq_len, spec.head_dim)
        for index in range(spec.num_layers):
            for name in (f"k_{index}", f"v_{index}"):
                self.register_buffer(
                    name, torch.zeros(shape, dtype=decoder.dtype), persistent=False
                )

    @property
    def caches(self) -> list[LayerCache]:
        """K and V [Hkv, T, D] of every layer."""
        count = self.decoder.spec.num_layers
        return [(self.get_buffer(f"k_{i}"), self.get_buffer(f"v_{i}")) for i in range(count)]

    def forward(
        self, tokens: Tensor, positions: Tensor, visible_end: Tensor, logits_rows: Tensor
    ) -> Tensor:
        """[1, n, V] float32 for int64 tokens [1, S], positions [S], ends [S] and rows [n]."""
        decoder = self.decoder
        mask = visible_mask(visible_end, decoder.max_seq_len, decoder.dtype)
        hidden = decoder.hidden(tokens[0], positions, mask, self.caches)
        return decoder.logits(hidden[logits_rows]).float().unsqueeze(0)
