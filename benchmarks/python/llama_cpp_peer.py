# SPDX-License-Identifier: Apache-2.0
"""Forwards of llama.cpp over random weights, for `bench_cpu_steps.py`; a program of an environment of its own.

    PYTHON benchmarks/python/llama_cpp_peer.py '{"layers": 28, ...}' --weights q8_0 --threads 2

PYTHON has the packages llama-cpp-python (0.3.36 was tried) and gguf (0.19.0); nothing of Diffulex is imported. A model of Qwen3's layers
(those of SDAR) is written to a temporary file and loaded. Each line of standard input asks for one forward,
and one line answers: `{"batch": 8, "rows": 32, "context": 256, "logits": 20}` is 8 sequences with 32 rows
each, which see each other and 256 cached positions, and 20 of which want logits; `{"ms": 812.5}` is what the
call took.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

WEIGHTS = ("f32", "f16", "q8_0")


def write_model(path: Path, shape: dict[str, int], weights: str) -> int:
    """Writes a GGUF without a tokenizer; all layers have the values of the first. Bytes of its embedding."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(shape["layers"])
    writer.add_context_length(shape["positions"])
    writer.add_embedding_length(shape["hidden"])
    writer.add_feed_forward_length(shape["inner"])
    writer.add_head_count(shape["q_heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape["vocab"])
    writer.add_tokenizer_model("none")
    kind = gguf.GGMLQuantizationType[weights.upper()]
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        values = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
        return gguf.quants.quantize(values, kind)

    hidden, inner, head_dim = shape["hidden"], shape["inner"], shape["head_dim"]
    q_rows, kv_rows = shape["q_heads"] * head_dim, shape["kv_heads"] * head_dim
    of_layer = {
        "attn_q": matrix(q_rows, hidden),
        "attn_k": matrix(kv_rows, hidden),
        "attn_v": matrix(kv_rows, hidden),
        "attn_output": matrix(hidden, q_rows),
        "ffn_gate": matrix(inner, hidden),
        "ffn_up": matrix(inner, hidden),
        "ffn_down": matrix(hidden, inner),
    }
    norms = {
        "attn_norm": hidden,
        "ffn_norm": hidden,
        "attn_q_norm": head_dim,
        "attn_k_norm": head_dim,
    }
    for layer in range(shape["layers"]):
        for name, values in of_layer.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", values, raw_dtype=kind)
        for name, size in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    embedding, head = (matrix(shape["vocab"], hidden) for _ in range(2))
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=kind)
    writer.add_tensor("output.weight", head, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding.nbytes


class Sequences:
    """Sequences with a cached context, whose next rows are run again and again."""

    def __init__(self, model: object, batch: int, rows: int, context: int, threads: int) -> None:
        self.batch, self.rows, self.context = batch, rows, context
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = batch * (-(-(context + rows) // 256) * 256)
        params.n_batch = params.n_ubatch = batch * max(context, rows)
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = threads
        self._handle = llama_cpp.llama_init_from_model(model, params)
        if not self._handle:
            raise RuntimeError("llama_init_from_model: expected a context, got none")
        self._memory = llama_cpp.llama_get_memory(self._handle)
        self._call(0, context, 1)
        # Rows of a block see each other.
        llama_cpp.llama_set_causal_attn(self._handle, False)

    def _call(self, first: int, count: int, logits: int) -> float:
        """Milliseconds of rows [first, first + count) of every sequence, of which the last want logits."""
        total = self.batch * count
        batch = llama_cpp.llama_batch_init(total, 0, 1)
        batch.n_tokens = total
        for i in range(total):
            sequence, row = divmod(i, count)
            batch.token[i] = 7 + i % 251
            batch.pos[i] = first + row
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = row >= count - logits
        start = time.perf_counter()
        status = llama_cpp.llama_decode(self._handle, batch)
        llama_cpp.llama_synchronize(self._handle)
        duration = time.perf_counter() - start
        llama_cpp.llama_batch_free(batch)
        value = llama_cpp.llama_get_logits(self._handle)[0]
        if status != 0 or not math.isfinite(value):
            raise RuntimeError(
                f"llama_decode: expected status 0 and finite logits, got {status}, {value}"
            )
        return 1e3 * duration

    def forward(self, logits: int) -> float:
        """Milliseconds of one forward of the rows behind the context."""
        duration = self._call(self.context, self.rows, logits)
        for sequence in range(self.batch):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, self.context, -1)
        return duration

    def close(self) -> None:
        llama_cpp.llama_free(self._handle)


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _say_nothing(level: int, text: bytes, user: object) -> None:
    del level, text, user


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("shape", type=json.loads)
    parser.add_argument("--weights", choices=WEIGHTS, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    llama_cpp.llama_log_set(_say_nothing, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        embedding_bytes = write_model(path, options.shape, options.weights)
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = False
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise RuntimeError("llama_model_load_from_file: expected a model, got none")
    facts = {
        "llama_cpp_python": llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode(),
        # Without the embedding, of which a forward reads a few rows.
        "weight_bytes": llama_cpp.llama_model_size(model) - embedding_bytes,
    }
    print(json.dumps(facts), flush=True)
    held: Sequences | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        logits, key = asked.pop("logits"), tuple(asked.values())
        if held is None or key != (held.batch, held.rows, held.context):
            if held is not None:
                held.close()
            held = Sequences(model, **asked, threads=options.threads)
        print(json.dumps({"ms": round(held.forward(logits), 3)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
