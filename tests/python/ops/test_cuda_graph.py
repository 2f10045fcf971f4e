# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs and streams: every op captured, its inputs changed in place, replayed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import op_calls
from attention_cases import AttentionCase, random_case
from diffulex import ops

pytestmark = pytest.mark.cuda

OPS = sorted(op_calls.CALLS.keys() - op_calls.CPU_ONLY.keys())
# Written in place from their own old value, or kept where no row is stored.
IN_PLACE = {"x", "hidden", "residual", "qkv", "q", "k", "k_cache", "v_cache"}
IN_PLACE |= {"plan", "batch"}


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """Other values that are still legal for every op: floats scaled, integers kept."""
    if tensor.is_floating_point():
        return tensor * 0.75
    return tensor


def capture(
    op: str, tensors: op_calls.Arguments, numbers: op_calls.Keywords
) -> torch.cuda.CUDAGraph:
    """One eager call on a side stream, then the capture; capture must not allocate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op_calls.run(op, tensors, numbers)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        op_calls.run(op, tensors, numbers)
        after = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert before == after
    return graph


@pytest.mark.parametrize("op", OPS)
def test_replay_equals_eager_after_a_change_in_place(op: str) -> None:
    static, numbers = op_calls.make(op, "cuda")
    eager, _ = op_calls.make(op, "cuda")
    graph = capture(op, static, numbers)
    for name, tensor in eager.items():
        if tensor is not None and name != "workspace":
            if name not in op_calls.written(op) or name in IN_PLACE:
                tensor.copy_(changed(tensor))
            static[name].copy_(tensor)
    graph.replay()
    op_calls.run(op, eager, numbers)
    for name in op_calls.written(op):
        if eager[name] is not None and name != "workspace":
            assert torch.equal(static[name], eager[name]), name


def call_attention(
    case: AttentionCase, out: torch.Tensor, lse: torch.Tensor, workspace: Any
) -> None:
    names = [
        "q",
        "k",
        "v",
        "k_cache",
        "v_cache",
        "page_table",
        "cu_seqlens_q",
        "context_lens",
        "valid_slices",
        "mask_kinds",
    ]
    optional = {n: t for n, t in case.tensors.items() if n not in names}
    ops.block_attention(
        *(case.tensors[name] for name in names),
        **optional,
        **case.numbers,
        out=out,
        lse=lse,
        workspace=workspace,
    )


@pytest.mark.parametrize("num_splits", [0, 1, 4])
@pytest.mark.parametrize("layout", [0, 1])
def test_attention_graph_follows_its_metadata(layout: int, num_splits: int) -> None:
    """Lengths, kinds, tables, q/k/v change in place and live requests shrink; then replay."""
    seeds = [s for s in range(200) if len(random_case(s, "cpu", layout=layout).requests) >= 3]
    case = random_case(seeds[layout], "cuda", layout=layout, dtype=torch.bfloat16)
    case.numbers["num_splits"] = num_splits
    q, k = case.tensors["q"], case.tensors["k"]
    assert q is not None
    assert k is not None
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    needed = ops.attention_workspace_bytes(
        len(case.requests),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        case.numbers["max_seqlen_q"],
        case.numbers["max_context_len"],
        num_splits,
    )
    workspace = ops.empty_workspace(needed, q.device)
    call_attention(case, out, lse, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call_attention(case, out, lse, workspace)

    def compare() -> None:
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        expected, expected_lse = case.run()
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)

    compare()
    for name in ("q", "k", "v", "k_cache", "v_cache"):
        tensor = case.tensors[name]
        assert tensor is not None
        tensor.copy_(torch.randn(tensor.shape, device="cuda"))
    compare()
    for name, change in (
        ("context_lens", lambda t: t // 2),
        ("mask_kinds", lambda t: (t & 0xFF).flip(0)),
        ("page_table", lambda t: t.flip(0)),
        ("valid_slices", lambda t: (t - 1).clamp(min=0)),
    ):
        tensor = case.tensors[name]
        assert tensor is not None
        tensor.copy_(change(tensor))
        compare()
    starts = case.tensors["cu_seqlens_q"]
    assert starts is not None
    starts[2:] = starts[1].clone()
    compare()


def test_two_graphs_share_a_pool() -> None:
    pool = torch.cuda.graph_pool_handle()
    calls = [op_calls.make(op, "cuda") for op in ("rms_norm", "block_attention")]
    graphs = []
    for op, (tensors, numbers) in zip(("rms_norm", "block_attention"), calls):
        op_calls.run(op, tensors, numbers)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            op_calls.run(op, tensors, numbers)
        graphs.append(graph)
    expected = [tensors["out"].clone() for tensors, _ in calls]
    for tensors, _ in calls:
        tensors["out"].zero_()
    for graph in graphs:
        graph.replay()
    for (tensors, _), wanted in zip(calls, expected):
        assert torch.equal(tensors["out"], wanted)


@pytest.mark.parametrize("op", OPS)
def test_ops_run_on_the_current_stream(op: str) -> None:
    """Work queued before the op on a busy side stream has to be seen by it."""
    expected, numbers = op_calls.make(op, "cuda")
    op_calls.run(op, expected, numbers)
    source, _ = op_calls.make(op, "cuda")
    late = {
        name: torch.zeros_like(t) if t is not None and t.is_floating_point() else t
        for name, t in source.items()
    }
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for name, tensor in late.items():
            if tensor is not None and tensor.is_floating_point():
                tensor.copy_(source[name])
        op_calls.run(op, late, numbers)
    stream.synchronize()
    for name in op_calls.written(op):
        if expected[name] is not None and name != "workspace":
            assert torch.equal(late[name], expected[name]), name


@pytest.mark.parametrize("op", OPS)
def test_ops_do_not_synchronise(op: str) -> None:
    """The host comes back while the device is still busy with earlier work."""
    tensors, numbers = op_calls.make(op, "cuda")
    op_calls.run(op, tensors, numbers)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        op_calls.run(op, tensors, numbers)
        assert not stream.query()
    stream.synchronize()


@pytest.mark.multi_gpu
def test_device_guard() -> None:
    for op in OPS:
        expected, numbers = op_calls.make(op, "cuda:0")
        op_calls.run(op, expected, numbers)
        tensors, _ = op_calls.make(op, "cuda:1")
        op_calls.run(op, tensors, numbers)
        assert torch.cuda.current_device() == 0
        for name in op_calls.written(op):
            if expected[name] is not None and name != "workspace":
                assert torch.equal(tensors[name].cpu(), expected[name].cpu())


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


CHECKED = """
import torch
from diffulex import ops
cache = torch.zeros(2, 4, 1, 64, device="cuda")
rows = torch.zeros(1, 1, 64, device="cuda")
ops.store_kv_cache(rows, rows, cache, cache.clone(), torch.tensor([99], device="cuda"))
torch.cuda.synchronize()
"""


def test_data_is_checked_on_request() -> None:
    assert _python(CHECKED, DIFFULEX_CHECK="0").returncode == 0
    done = _python(CHECKED, DIFFULEX_CHECK="1")
    assert done.returncode != 0
    assert "RuntimeError: diffulex::store_kv_cache: slot_mapping" in done.stderr


def test_attention_of_a_request_is_independent_of_the_others() -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v = normal(16, 8, 128), normal(16, 2, 128), normal(16, 2, 128)
    cache = normal(64, 32, 2, 128)

    def attend(lengths: list[int], contexts: list[int]) -> torch.Tensor:
        count = len(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        return ops.block_attention(
            *(torch.cat([x[:length] for length in lengths]) for x in (q, k, v)),
            cache,
            cache,
            torch.arange(64).int().repeat(count, 1).cuda(),
            starts,
            torch.tensor(contexts).int().cuda(),
            starts[1:],
            torch.ones(count, dtype=torch.int32).cuda(),
            block_size=4,
            max_seqlen_q=max(lengths),
            max_context_len=max(contexts),
        )

    others = [([4, 16], [1500, 2000]), ([4] * 9, [1500] + [7] * 8), ([4, 1], [1500, 0])]
    with ops.batch_invariant():
        alone = attend([4], [1500])
        for lengths, contexts in others:
            assert torch.equal(attend(lengths, contexts)[:4], alone), (lengths, contexts)


def test_soft_embeddings_of_a_row_are_independent_of_the_others() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    logits = torch.randn(600, 20011, device="cuda", generator=generator)
    table = torch.randn(20011, 256, device="cuda", generator=generator).to(torch.bfloat16)
    stats = ops.token_stats(logits, exclusion=ops.ExclusionMode.OFF).stats
    lse = stats[:, ops.StatsColumn.LOGSUMEXP]
    with ops.batch_invariant():
        whole = ops.soft_embedding(logits, lse, table)
        for rows in (1, 7, 129, 600):
            assert torch.equal(ops.soft_embedding(logits[:rows], lse[:rows], table), whole[:rows])


FRESH = """
import sys
sys.path[:0] = {path!r}
import torch
import op_calls
from diffulex import ops

def captured(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph

experts, inputs = [], []
for num_tokens in (8, 330, 2048):  # tiles sorted inside, of 128 slots, of two CTAs with a gather
    x = torch.randn(num_tokens, 192, device="cuda", dtype=torch.bfloat16)
    w13 = torch.randn(6, 256, 192, device="cuda", dtype=torch.bfloat16) / 14
    w2 = torch.randn(6, 192, 128, device="cuda", dtype=torch.bfloat16) / 11
    weights = torch.rand(num_tokens, 2, device="cuda")
    ids = torch.randint(0, 6, (num_tokens, 2), device="cuda", dtype=torch.int32)
    inputs.append((x, w13, w2, weights, ids))
calls = [(op, op_calls.make(op, "cuda"), op_calls.make(op, "cuda")) for op in {names!r}]
torch.cuda.synchronize()
ops.warmup("cuda")
for arguments in inputs:
    out = torch.empty_like(arguments[0])
    graph = captured(lambda: ops.fused_moe(*arguments, out=out))
    graph.replay()
    assert torch.equal(out, ops.fused_moe(*arguments)), arguments[0].shape
for op, (static, numbers), (eager, _) in calls:
    graph = captured(lambda: op_calls.run(op, static, numbers))
    graph.replay()
    op_calls.run(op, eager, numbers)
    for name in op_calls.written(op):
        if eager[name] is not None and name != "workspace":
            assert torch.equal(static[name], eager[name]), (op, name)
"""


def test_every_op_can_be_captured_after_the_warm_up() -> None:
    """In a process that loads kernels lazily and has called none of them before."""
    code = FRESH.format(path=sys.path[:], names=OPS)
    done = _python(code, CUDA_MODULE_LOADING="LAZY")
    assert done.returncode == 0, done.stderr
