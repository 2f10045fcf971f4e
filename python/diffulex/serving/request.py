# SPDX-License-Identifier: Apache-2.0
"""A request of the real engine with the attributes the serving mixin reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffulex.config.sampling_params import SamplingParams
    from diffulex.engine.engine import Diffulex
    from diffulex.engine.output import BlockSnapshot, StepOutput
    from diffulex.runner.row_watch import TokenLogprob

__all__ = ["ServedRequest"]


class ServedRequest:
    """One running request. Lives as long as the request and changes with every step of it.

    Positions count from the start of the prompt; `begin` counts generated tokens.
    """

    is_multi_block = True

    def __init__(self, engine: Diffulex, req_id: int, params: SamplingParams) -> None:
        self.req_id = req_id
        self.is_finished = False
        self.new_tokens = 0
        self.mask_token_id: int | None = engine.config.model.mask_token_id
        if engine.config.decoding.decoding_strategy == "diffusion_gemma":
            self.mask_token_id = None  # a canvas has no masks
        self._last_execution_is_prefill = False
        self._engine = engine
        self._record = engine.record(req_id)
        self._logprobs: list[TokenLogprob] = []
        self._output: Any = None
        self._snapshot: Any = None
        self.prefix_len = self.num_prompt_tokens = len(self._record.prompt_token_ids)

    def update(self, step: StepOutput) -> None:
        """Takes over what a step did to the request."""
        self.new_tokens = step.new_tokens
        steps = self._record.steps
        self._last_execution_is_prefill = bool(steps) and not steps[-1][1]
        self._snapshot = step.snapshot
        self._logprobs.extend(step.logprobs)
        self.is_finished = step.is_finished
        self._output = step.output

    # The state of the answer.

    @property
    def nfe(self) -> int:
        """Forwards it took part in."""
        return self._record.num_steps

    @property
    def num_blocks(self) -> int:
        """Blocks it denoises, as far as the last step reported them."""
        return 0 if self._snapshot is None else len(self._snapshot.blocks)

    @property
    def num_stable(self) -> int:
        """Generated tokens that can never change."""
        return len(self._record.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; 0 before the end."""
        return 0 if self._output is None else int(self._output.metrics.cached_tokens)

    @property
    def num_preemptions(self) -> int:
        """How often it lost its pages; 0 before the end."""
        return 0 if self._output is None else int(self._output.metrics.num_preemptions)

    @property
    def token_ids(self) -> list[int]:
        """Prompt, then what is known of the answer."""
        return [*self._record.prompt_token_ids, *self.draft_ids(0)]

    def stable_ids(self, begin: int) -> list[int]:
        """Final tokens from `begin` on."""
        return self._record.token_ids[begin:]

    # The end.

    @property
    def completion_reason(self) -> str | None:
        """The engine's reason; None before the end."""
        return None if self._output is None else str(self._output.completion_reason)

    @property
    def error(self) -> str | None:
        """The message of a failed request."""
        return None if self._output is None else self._output.error

    @property
    def matched_stop_id(self) -> int | None:
        """The request's own stop id that ended it."""
        matched = None if self._output is None else self._output.matched_stop
        return matched if isinstance(matched, int) else None

    @property
    def truncated_response(self) -> list[int]:
        """The answer without its end token."""
        return list(self._output.token_ids)

    @property
    def full_response(self) -> list[int]:
        """Every generated position, masks included; before the end what is known."""
        if self._output is None:
            return self.draft_ids(0)
        return list(self._output.generated_ids)

    def logprobs(self, begin: int, count: int) -> Iterator[dict[str, Any]]:
        """Maps of the wire for `count` final tokens from `begin` on."""
        for item in self._logprobs[begin : begin + count]:
            shown = self._token(item.token_id, item.logprob)
            shown["step"], shown["confidence"] = item.step, item.confidence
            shown["top"] = [self._token(*pair) for pair in item.top]
            yield shown

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._engine.tokenizer.decode([token_id], False)
        return {
            "token_id": token_id,
            "token": text,
            "bytes": list(text.encode()),
            "logprob": logprob,
        }

    # The draft, for requests whose steps report the buffer.

    def _blocks(self) -> tuple[BlockSnapshot, ...]:
        return () if self._snapshot is None else self._snapshot.blocks

    def draft_ids(self, begin: int) -> list[int]:
        """Tokens and masks from `begin` to the end of the buffer's last block."""
        draft = self._record.token_ids[begin:]
        end = self.prefix_len + begin + len(draft)
        for block in self._blocks():
            # Blocks follow each other; a part of the first may be settled or prompt.
            skipped = max(0, end - block.start)
            draft.extend(block.token_ids[skipped:])
            end = max(end, block.start + len(block.token_ids))
        return draft

    def draft_blocks(self, start: int, end: int) -> list[dict[str, Any]]:
        """Blocks of the buffer within the positions."""
        listed = []
        for block in self._blocks():
            first = max(block.start, start)
            last = min(block.start + len(block.token_ids), end)
            if first >= last:
                continue
            part = block.token_ids[first - block.start : last - block.start]
            masked = 0 if self.mask_token_id is None else part.count(self.mask_token_id)
            listed.append(
                {
                    "id": block.block_id,
                    "start": first,
                    "end": last,
                    "state": block.status.lower(),
                    "masked": masked,
                }
            )
        return listed

    def draft_confidences(self) -> dict[int, float]:
        """Confidence of the write, by position in the buffer; 0 at masks."""
        return {
            block.start + rel: float(confidence)
            for block in self._blocks()
            for rel, confidence in enumerate(block.confidences)
        }
