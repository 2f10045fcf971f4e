# SPDX-License-Identifier: Apache-2.0
"""CPU: seconds per generated token of the engine against the same algorithm without a cache.

    python benchmarks/python/bench_cpu_decode.py --output cpu_decode.json

The reference recomputes the whole sequence at every step through transformers' Qwen3 with the block
mask; weights, threads, acceptance rule and prompts are the same, and the tokens must be equal.
`valid_rows` is the share of the rows of a full buffer that a decode step runs on average.
`speedup` compares whole generations; `decode_speedup` leaves out the engine's prefill step, for which
the reference has no counterpart: its every forward is a denoising step.

    python benchmarks/python/bench_cpu_decode.py --quantization none,int8,fp8,int4

also runs engines whose weights have low precision, and gives what they take beside the first row of their
model; they have no reference, as their activations are rounded too. `of_first` compares forwards, since
other weights accept other tokens. `cpu_ms` are those of all threads of the process, prefill included: what
can be compared where the host does other things as well.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from published_shapes import SDAR_SHAPES, SHAPES
from random_engine import build_engine, build_model, random_prompts
from transformers import Qwen3Config, Qwen3ForCausalLM

from diffulex import Diffulex, SamplingParams
from diffulex.bench.problem_file import load_problems
from diffulex.checkpoint.auto_model import load_model
from diffulex.checkpoint.resolve import demo_dir
from diffulex.config.config import Config, read_model_facts

if TYPE_CHECKING:
    from diffulex.families.spec import ModelSpec
    from diffulex.nn.decoder import DecoderForDiffusionLM


@dataclass(frozen=True, slots=True)
class Decoding:
    """What decides the tokens of the reference."""

    block_size: int
    buffer_size: int
    add_block: float
    semi_complete: float
    accept_threshold: float
    mask_token_id: int
    stop_token_ids: frozenset[int]
    vocab_limit: int
    max_tokens: int


def reference_model(model: DecoderForDiffusionLM) -> Qwen3ForCausalLM:
    """transformers' Qwen3 on the memory of the engine's weights where the layout allows."""
    spec: ModelSpec = model.spec
    config = Qwen3Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_q_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_theta=spec.rope_theta,
        max_position_embeddings=spec.max_positions,
        attention_bias=spec.o_bias,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        reference = Qwen3ForCausalLM(config)
    weights = {name: tensor.detach() for name, tensor in model.weight_table().items()}
    reference.load_state_dict(weights, assign=True, strict=True)
    # Built on the meta device, the rotary table has no data yet.
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)
    return reference.eval()


class Status(IntEnum):
    """State of a block; PENDING waits for the step that would write it to a cache."""

    UNUSED = 0
    ACTIVE = 1
    PENDING = 2
    DONE = 3


class ReferenceDecoder:
    """One request, decoded by whole-sequence forwards under the block rules of the engine."""

    def __init__(self, model: Qwen3ForCausalLM, prompt: list[int], decoding: Decoding) -> None:
        self.model = model
        self.decoding = decoding
        self.prompt_len = len(prompt)
        self.limit = len(prompt) + decoding.max_tokens
        size = decoding.block_size
        num_blocks = -(-self.limit // size)
        self.tokens = prompt + [decoding.mask_token_id] * (num_blocks * size - len(prompt))
        self.status = [Status.DONE] * (len(prompt) // size)
        self.status += [Status.UNUSED] * (num_blocks - len(self.status))
        self.num_forwards = 0
        if len(prompt) % size:
            self.status[len(prompt) // size] = Status.ACTIVE

    def decode(self) -> list[int]:
        """The answer ids."""
        answer = self.step()
        while answer is None:
            answer = self.step()
        return answer

    @torch.inference_mode()
    def step(self) -> list[int] | None:
        """One forward, if a block is active; the answer ids once they are decided."""
        self._activate()
        active = [i for i, status in enumerate(self.status) if status is Status.ACTIVE]
        if active:
            self._denoise(active)
        self._transition()
        return self._answer()

    def _open(self, block: int) -> list[int]:
        """Undecided positions of a block."""
        size, mask = self.decoding.block_size, self.decoding.mask_token_id
        first = max(block * size, self.prompt_len)
        return [i for i in range(first, (block + 1) * size) if self.tokens[i] == mask]

    def _has_reached(self, block: int, threshold: float) -> bool:
        progress = 1 - len(self._open(block)) / self.decoding.block_size
        return bool(np.float32(progress) >= np.float32(threshold))

    def _activate(self) -> None:
        """Opens the next block when the window has room and the block before is far enough."""
        if Status.UNUSED not in self.status:
            return
        head = next(i for i, status in enumerate(self.status) if status is not Status.DONE)
        following = self.status.index(Status.UNUSED)
        if following >= head + self.decoding.buffer_size or self._stop() is not None:
            return
        if following == head or self._has_reached(following - 1, self.decoding.add_block):
            self.status[following] = Status.ACTIVE

    def _denoise(self, active: list[int]) -> None:
        size = self.decoding.block_size
        first, end = active[0] * size, (active[-1] + 1) * size
        blocks = torch.arange(end) // size
        logits = self.model(
            input_ids=torch.tensor([self.tokens[:end]]),
            attention_mask=(blocks[None, :] <= blocks[:, None])[None, None],
            use_cache=False,
            logits_to_keep=end - first,
        ).logits[0]
        self.num_forwards += 1
        gates = [
            block == 0 or self._has_reached(block - 1, self.decoding.semi_complete)
            for block in active
        ]
        for block, is_gate_open in zip(active, gates, strict=True):
            self._accept(logits, first, self._open(block), is_gate_open)

    def _accept(
        self, logits: torch.Tensor, first: int, positions: list[int], is_gate_open: bool
    ) -> None:
        """Writes the proposals above the threshold; with an open gate at least the best one."""
        if not positions:
            return
        rows = logits[[position - first for position in positions]].float()
        probabilities = torch.softmax(rows, dim=-1)
        # The mask token and ids without a string keep their share but are never chosen.
        probabilities[:, self.decoding.mask_token_id] = -1.0
        probabilities[:, self.decoding.vocab_limit :] = -1.0
        confidence, ids = probabilities.max(dim=-1)
        is_accepted = confidence > self.decoding.accept_threshold
        if is_gate_open and not is_accepted.any():
            is_accepted[confidence.argmax()] = True
        for index in is_accepted.nonzero().flatten().tolist():
            self.tokens[positions[index]] = int(ids[index])

    def _transition(self) -> None:
        stored = [i for i, status in enumerate(self.status) if status is Status.PENDING]
        for block, status in enumerate(self.status):
            is_next = block == 0 or self.status[block - 1] in (Status.PENDING, Status.DONE)
            if status is Status.ACTIVE and is_next and not self._open(block):
                self.status[block] = Status.PENDING
        for block in stored:
            self.status[block] = Status.DONE

    def _stop(self) -> int | None:
        """First position with a stop id."""
        for position in range(self.prompt_len, self.limit):
            if self.tokens[position] in self.decoding.stop_token_ids:
                return position
        return None

    def _answer(self) -> list[int] | None:
        """The answer once nothing before its end can change."""
        mask, end = self.decoding.mask_token_id, self.prompt_len
        while end < self.limit and self.tokens[end] != mask:
            end += 1
        stop = self._stop()
        if stop is not None and stop < end:
            return self.tokens[self.prompt_len : stop]
        return self.tokens[self.prompt_len : end] if end == self.limit else None


def compare(
    name: str,
    engine: Diffulex,
    model: DecoderForDiffusionLM | None,
    prompts: list[list[int]],
    max_tokens: int,
) -> dict[str, Any]:
    """Times both on the same prompts, one at a time; unequal tokens are an error. Without a model there
    is no reference."""
    config = engine.config
    vocab_limit = config.model.tokenizer_vocab_size
    assert vocab_limit is not None
    decoding = Decoding(
        block_size=config.decoding.block_size,
        buffer_size=config.decoding.buffer_size,
        add_block=config.decoding.add_block_threshold,
        semi_complete=config.decoding.semi_complete_threshold,
        accept_threshold=config.decoding.accept_threshold,
        mask_token_id=config.model.mask_token_id,
        stop_token_ids=frozenset(config.model.eos),
        vocab_limit=vocab_limit,
        max_tokens=max_tokens,
    )
    reference = None if model is None else reference_model(model)
    params = SamplingParams(max_tokens=max_tokens)
    # The first call of each pays for lazy initialisation.
    few = SamplingParams(max_tokens=max_tokens, max_nfe=3)
    engine.generate([prompts[0]], few, summary=False, progress_log_interval=0)
    if reference is not None:
        ReferenceDecoder(reference, prompts[0], decoding).step()
    num_steps, num_rows = -engine.stats().num_decode_steps, -engine.stats().num_rows
    engine_s = cpu_s = decode_s = reference_s = 0.0
    num_tokens = engine_nfe = reference_nfe = 0
    for index, prompt in enumerate(prompts):
        start, cpu_start = time.perf_counter(), time.process_time()
        outputs = engine.generate([prompt], params, summary=False, progress_log_interval=0)
        middle = time.perf_counter()
        (output,) = outputs
        num_rows -= outputs.stats.prefill_tokens
        engine_s += middle - start
        cpu_s += time.process_time() - cpu_start
        decode_s += output.metrics.decode_s
        num_tokens += len(output.token_ids)
        engine_nfe += output.metrics.nfe
        if reference is None:
            continue
        decoder = ReferenceDecoder(reference, prompt, decoding)
        expected = decoder.decode()
        reference_s += time.perf_counter() - middle
        if list(output.token_ids) != expected:
            raise RuntimeError(
                f"{name}: prompt {index}: expected the tokens of the reference {expected}, "
                f"got {list(output.token_ids)}"
            )
        reference_nfe += decoder.num_forwards
    num_steps += engine.stats().num_decode_steps
    num_rows += engine.stats().num_rows
    found = {
        "model": name,
        "quantization": config.model.quantization,
        "prompts": len(prompts),
        "tokens": num_tokens,
        "block_size": decoding.block_size,
        "buffer_size": decoding.buffer_size,
        "accept_threshold": decoding.accept_threshold,
        "valid_rows": round(num_rows / num_steps / decoding.buffer_size / decoding.block_size, 4),
        "weight_bytes": engine.memory_report().weights,
        "engine_nfe": engine_nfe,
        "engine_ms_per_token": round(1e3 * engine_s / num_tokens, 4),
        "engine_decode_ms_per_token": round(1e3 * decode_s / num_tokens, 4),
        "decode_ms_per_forward": round(1e3 * decode_s / num_steps, 4),
        "cpu_ms_per_forward": round(1e3 * cpu_s / engine_nfe, 4),
    }
    if reference is None:
        return found
    return found | {
        "reference_nfe": reference_nfe,
        "reference_ms_per_token": round(1e3 * reference_s / num_tokens, 4),
        "speedup": round(reference_s / engine_s, 3),
        "decode_speedup": round(reference_s / decode_s, 3),
    }


def run_demo(options: argparse.Namespace, buffer_size: int, scheme: str) -> dict[str, Any]:
    problems = load_problems(demo_dir() / "heldout.jsonl")[: options.prompts]
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "buffer_size": buffer_size,
        "enable_prefix_caching": False,
        "quantization": scheme,
    }
    facts = read_model_facts("demo", settings)
    prompts = [
        facts.tokenizer.apply_chat_template([{"role": "user", "content": problem.question}])
        for problem in problems
    ]
    max_tokens = options.max_tokens or 512
    if scheme != "none":
        with Diffulex("demo", **settings) as engine:
            return compare("demo", engine, None, prompts, max_tokens)
    model = load_model(facts.model_name, facts.spec, facts.model_dir, torch.float32, "cpu")
    config = Config.resolve("demo", facts, settings)
    with Diffulex.from_components(config, model, facts.tokenizer) as engine:
        return compare("demo", engine, model, prompts, max_tokens)


def run_random(
    options: argparse.Namespace, shape: str, buffer_size: int, scheme: str
) -> dict[str, Any]:
    model = build_model(SHAPES[shape], torch.float32, "cpu", quantization=scheme)
    max_tokens = options.max_tokens or 32
    prompts = random_prompts(model.spec, options.random_prompts, options.prompt_len)
    with build_engine(
        SHAPES[shape],
        model,
        "cpu",
        block_size=options.block_size,
        buffer_size=buffer_size,
        max_num_reqs=1,
        max_model_len=options.prompt_len + max_tokens + 2 * buffer_size * options.block_size,
        enable_prefix_caching=False,
        quantization=scheme,
    ) as engine:
        return compare(shape, engine, model if scheme == "none" else None, prompts, max_tokens)


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--model", action="append", choices=["demo", *SDAR_SHAPES], help="[demo, sdar-0.6b]"
    )
    parser.add_argument("--buffer-size", type=integers, default=[1, 4], help="blocks, 1,4")
    parser.add_argument(
        "--quantization", type=lambda text: text.split(","), default=["none"], help="none"
    )
    parser.add_argument("--threads", type=int, help="threads of both [torch's choice]")
    parser.add_argument("--prompts", type=int, default=20, help="held-out problems [20]")
    parser.add_argument("--random-prompts", type=int, default=1, help="random prompts [1]")
    parser.add_argument("--prompt-len", type=int, default=256, help="of random prompts [256]")
    parser.add_argument("--block-size", type=int, default=32, help="of random models [32]")
    parser.add_argument("--max-tokens", type=int, help="[512 for demo, 32 for random models]")
    parser.add_argument("--output", type=Path, help="write the JSON to this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    results = []
    for name, buffer_size in itertools.product(
        options.model or ["demo", "sdar-0.6b"], options.buffer_size
    ):
        first: dict[str, Any] = {}
        for scheme in options.quantization:
            run = run_demo if name == "demo" else partial(run_random, shape=name)
            result = run(options, buffer_size=buffer_size, scheme=scheme)
            first = first or result
            for key in ("weight_bytes", "decode_ms_per_forward", "cpu_ms_per_forward"):
                result[f"{key}_of_first"] = round(result[key] / first[key], 3)
            results.append(result)
            print(json.dumps(result), file=sys.stderr, flush=True)
    content = {
        "benchmark": "cpu_decode",
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "results": results,
    }
    text = json.dumps(content, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
