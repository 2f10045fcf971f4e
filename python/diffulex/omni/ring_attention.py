# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence whose tokens lie on several ranks.

Ulysses exchanges tokens for heads, attends to the whole sequence with a part of the heads, and
exchanges back. A ring keeps the queries and passes keys and values around, merging partial results by
the logarithm of their sums. Both together: Ulysses outside, the ring inside.

Tensors are [B, S, H, D] with the S of a rank; masks are bool [B, S], true where a key is visible.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

if TYPE_CHECKING:
    from diffulex.omni.attention.kernels import AttentionKernel
    from diffulex.omni.groups import RankGroups

__all__ = ["SequenceAttention", "attend_with_lse"]


@dataclass(frozen=True)
class _Ring:
    """A group in the order of its ranks; alone without a group.

    Attributes:
        known: tokens of every rank by those of this one, in the forward that runs.
    """

    group: Any
    ranks: list[int]
    place: int
    known: dict[int, list[int]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def lengths(self, length: int, device: torch.device) -> list[int]:
        """Tokens of every rank."""
        if length not in self.known:
            own = torch.tensor([length], device=device)
            found = [torch.empty_like(own) for _ in self.ranks]
            dist.all_gather(found, own, group=self.group)
            self.known[length] = [int(item) for item in found]
        return self.known[length]


class SequenceAttention:
    """Joint attention of one rank with the others of its sequence.

    Sequences of one forward that are equally long here are so on every rank.

    Args:
        groups: of this rank.
        kernel: of the attention over the whole sequence; a ring has its own.
    """

    def __init__(self, groups: RankGroups, kernel: AttentionKernel) -> None:
        self._kernel = kernel
        self._ulysses, self._ring = (
            _Ring(groups.group(name), groups.ranks(name), groups.coords[name])
            for name in ("ulysses", "ring")
        )

    def begin(self) -> None:
        """A forward begins: other lengths than this rank's may differ from the last one's."""
        self._ulysses.known.clear()
        self._ring.known.clear()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        """[B, S, H, D] of the tokens of this rank; every rank passes a mask or none does."""
        if self._ulysses.size == 1:
            return self._inner(query, key, value, mask, scale)
        batch, tokens, heads, width = query.shape
        missing = -heads % self._ulysses.size
        lengths = self._ulysses.lengths(tokens, query.device)
        parts = (F.pad(item, (0, 0, 0, missing)) for item in (query, key, value))
        wide = [self._to_heads(item, lengths) for item in parts]
        whole_mask = None if mask is None else _gather(mask, lengths, self._ulysses)
        out = self._inner(wide[0], wide[1], wide[2], whole_mask, scale)
        own = self._to_tokens(out, lengths).reshape(batch, tokens, heads + missing, width)
        return own[:, :, :heads]

    def _to_heads(self, item: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """[B, S, H, D] -> [B, S of all ranks, H of this rank, D]."""
        batch, tokens, heads, width = item.shape
        size = self._ulysses.size
        # [U, S, B, H / U, D]: what goes to a rank is contiguous.
        sent = item.reshape(batch, tokens, size, heads // size, width).permute(2, 1, 0, 3, 4)
        cell = batch * (heads // size) * width
        got = self._exchange(sent, [tokens * cell] * size, [n * cell for n in lengths])
        return got.view(sum(lengths), batch, heads // size, width).transpose(0, 1)

    def _to_tokens(self, item: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """[B, S of all ranks, H of this rank, D] -> [B, S, H, D]."""
        batch, _, heads, width = item.shape
        size, own = self._ulysses.size, lengths[self._ulysses.place]
        cell = batch * heads * width
        got = self._exchange(item.transpose(0, 1), [n * cell for n in lengths], [own * cell] * size)
        return got.view(size, own, batch, heads, width).permute(2, 1, 0, 3, 4)

    def _exchange(self, sent: torch.Tensor, out: list[int], into: list[int]) -> torch.Tensor:
        got = sent.new_empty(sum(into))
        flat = sent.contiguous().view(-1)
        dist.all_to_all_single(got, flat, into, out, group=self._ulysses.group)
        return got

    def _inner(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        if self._ring.size > 1:
            return self._around(query, key, value, mask, scale)
        return self._kernel(query, key, value, mask, scale=scale)

    def _around(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> torch.Tensor:
        """Keys and values of all ranks, one after the other."""
        ring = self._ring
        lengths = ring.lengths(key.shape[1], key.device)
        keys_values = torch.stack((key, value)).contiguous()
        out = torch.zeros_like(query, dtype=torch.float32)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
        for turn in range(ring.size):
            source = (ring.place - turn) % ring.size
            requests: list[Any] = []
            following = keys_values, mask
            if turn + 1 < ring.size:
                following, requests = self._pass_on(
                    keys_values, mask, lengths[(source - 1) % ring.size]
                )
            part, part_lse = attend_with_lse(query, keys_values[0], keys_values[1], mask, scale)
            total = torch.logaddexp(lse, part_lse)
            # No key was visible so far: nothing is weighed, and nothing is divided by zero.
            shift = torch.where(total.isfinite(), total, 0.0)
            out = out * (lse - shift).exp()[..., None] + part * (part_lse - shift).exp()[..., None]
            lse = total
            for request in requests:
                request.wait()
            keys_values, mask = following
        return out.to(query.dtype)

    def _pass_on(
        self, keys_values: torch.Tensor, mask: torch.Tensor | None, length: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor | None], list[Any]]:
        """Sends to the next rank, and receives `length` tokens from the one before."""
        ring = self._ring
        after, before = (ring.ranks[(ring.place + step) % ring.size] for step in (1, -1))
        two, batch, _, heads, width = keys_values.shape
        coming = keys_values.new_empty(two, batch, length, heads, width)
        pairs = [(keys_values, coming)]
        coming_mask = None
        if mask is not None:
            coming_mask = torch.empty(batch, length, dtype=torch.uint8, device=mask.device)
            pairs.append((mask.to(torch.uint8), coming_mask))
        operations = []
        for sent, got in pairs:
            operations.append(dist.P2POp(dist.isend, sent, after, ring.group))
            operations.append(dist.P2POp(dist.irecv, got, before, ring.group))
        return (coming, coming_mask), dist.batch_isend_irecv(operations)


def attend_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [B, S, H, D] and the logarithm of the sum of exponentials [B, S, H].

    Rows of the batch without a visible key give 0 and minus infinity.
    """
    q, k, v = (item.transpose(1, 2) for item in (query, key, value))
    visible = None if mask is None else mask.to(torch.bool)
    if query.device.type == "cpu":
        additive = None
        if visible is not None:
            additive = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
            additive = additive.masked_fill(~visible, -torch.inf)[:, None, None, :]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=additive, scale=scale
        )
    elif (
        visible is None
        and q.dtype in (torch.float16, torch.bfloat16)
        # The kernel takes no other widths; what calls it elsewhere pads them.
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
    ):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)[:2]
    else:
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        scores = (q.float() * factor) @ k.float().transpose(-1, -2)
        if visible is not None:
            scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
        lse = scores.logsumexp(-1)
        out = scores.softmax(-1) @ v.float()
    out, lse = out.transpose(1, 2).float(), lse.transpose(1, 2).float()
    if visible is not None:
        # Kernels differ in what they give for a row that sees nothing.
        is_blind = ~visible.any(-1)[:, None, None]
        lse = lse.masked_fill(is_blind, -torch.inf)
        out = torch.where(is_blind[..., None], 0.0, out)
    return out, lse


def _gather(mask: torch.Tensor, lengths: list[int], ring: _Ring) -> torch.Tensor:
    """The masks of all ranks side by side; every piece is trimmed to its own length."""
    own = F.pad(mask.to(torch.uint8), (0, max(lengths) - mask.shape[1])).contiguous()
    pieces = [torch.empty_like(own) for _ in lengths]
    dist.all_gather(pieces, own, group=ring.group)
    return torch.cat([piece[:, :n] for piece, n in zip(pieces, lengths)], 1).to(torch.bool)
