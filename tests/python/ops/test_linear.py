# SPDX-License-Identifier: Apache-2.0
"""linear_packed, linear_few_rows, the packing of weights, and the layers that use them."""

from __future__ import annotations

import itertools

import pytest
import torch

import op_calls
from diffulex import ops
from diffulex.nn.embedding import OutputHead, TokenEmbedding
from diffulex.nn.linear import Linear, pack_weights
from tolerance import assert_accurate, to_numpy

EXACT = pytest.mark.parametrize("is_bfloat16", [False, True])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def weight_of(out_features: int, in_features: int, is_bfloat16: bool) -> torch.Tensor:
    weight = normal(out_features, in_features)
    return weight.bfloat16().float() if is_bfloat16 else weight


@EXACT
@pytest.mark.parametrize("out_features", [1, 31, 32, 33, 100])
def test_panels_hold_the_columns_and_zeros(out_features: int, is_bfloat16: bool) -> None:
    weight = weight_of(out_features, 7, is_bfloat16)
    packed = ops.pack_weight(weight)
    assert packed.dtype == (torch.bfloat16 if is_bfloat16 else torch.float32)
    assert packed.shape == (-(-out_features // 32), 7, 32)
    for column in range(packed.shape[0] * 32):
        stored = packed[column // 32, :, column % 32].float()
        expected = weight[column] if column < out_features else torch.zeros(7)
        assert torch.equal(stored, expected)
    assert torch.equal(ops.unpack_weight(packed, out_features), weight)


@pytest.mark.parametrize("value", [1 + 2**-8, 1e-40 / 3, float("nan"), 3.4e38])
def test_one_inexact_element_keeps_float32(value: float) -> None:
    weight = torch.ones(70, 3)
    weight[69, 2] = value
    assert ops.pack_weight(weight).dtype == torch.float32


@pytest.mark.parametrize("weight", [torch.ones(3), torch.ones(3, 3).half()])
def test_pack_weight_errors(weight: torch.Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"pack_weight: weight: expected a float32 tensor \[N, K\]"
    ):
        ops.pack_weight(weight)


@EXACT
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features"),
    [(1, 1, 1), (3, 64, 33), (8, 256, 1280), (32, 1024, 96), (200, 300, 70)],
)
def test_linear_packed(rows: int, in_features: int, out_features: int, is_bfloat16: bool) -> None:
    x = normal(rows, in_features)
    weight = weight_of(out_features, in_features, is_bfloat16)
    packed = ops.pack_weight(weight)
    out = torch.full((rows, out_features), torch.nan)
    assert ops.linear_packed(x, packed, out_features, out=out) is out
    expected = to_numpy(x) @ to_numpy(weight).T
    plain = torch.mm(x, weight.t())
    slack = 1e-7 * in_features * float(x.abs().max() * weight.abs().max())
    assert_accurate(out, expected, plain, slack=slack)
    assert torch.equal(ops.linear_packed(x, packed, out_features), out)


def test_bfloat16_panels_give_the_same_bits() -> None:
    x, weight = normal(20, 300), weight_of(70, 300, True)
    packed = ops.pack_weight(weight)
    assert packed.dtype == torch.bfloat16
    wide = ops.linear_packed(x, packed.float(), 70)
    assert torch.equal(ops.linear_packed(x, packed, 70), wide)


@EXACT
def test_a_row_does_not_depend_on_the_batch_nor_on_threads(is_bfloat16: bool) -> None:
    x = normal(230, 520)
    packed = ops.pack_weight(weight_of(600, 520, is_bfloat16))
    alone = torch.cat([ops.linear_packed(row[None], packed, 600) for row in x])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for rows in (*range(1, 26), 191, 192, 193, 230):
                assert torch.equal(ops.linear_packed(x[:rows], packed, 600), alone[:rows])
    finally:
        torch.set_num_threads(before)


def test_strided_rows() -> None:
    wide = normal(6, 96)
    packed = ops.pack_weight(normal(40, 64))
    out = torch.full((6, 50), torch.nan)
    ops.linear_packed(wide[:, 16:80], packed, 40, out=out[:, 5:45])
    assert torch.equal(out[:, 5:45], ops.linear_packed(wide[:, 16:80].contiguous(), packed, 40))
    assert out[:, :5].isnan().all()
    assert out[:, 45:].isnan().all()


@pytest.mark.cuda
def test_cuda_tensors_are_an_error() -> None:
    tensors, numbers = op_calls.CALLS["linear_packed"]()
    moved = {name: tensor.cuda() for name, tensor in tensors.items()}
    message = r"^diffulex::linear_packed: x: expected a CPU tensor, got cuda$"
    with pytest.raises(RuntimeError, match=message):
        op_calls.run("linear_packed", moved, numbers)


def filled(layer: Linear, is_bfloat16: bool = False) -> Linear:
    for seed, parameter in enumerate(layer.parameters()):
        value = normal(*parameter.shape, seed=seed)
        parameter.copy_(value.bfloat16().float() if is_bfloat16 else value)
    return layer


@EXACT
@pytest.mark.parametrize("bias", [False, True])
def test_layer_equals_torch(bias: bool, is_bfloat16: bool) -> None:
    layer = Linear(96, (64, 17), bias=bias, dtype=torch.float32, device="cpu")
    filled(layer, is_bfloat16)
    weight, offset = layer.row_major().clone(), layer.bias
    x = normal(9, 96)
    expected = torch.nn.functional.linear(x, weight, offset)
    unpacked_bytes = layer.nbytes
    out = layer(x, torch.empty(9, 81))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)
    assert layer.weight is None, "the row-major matrix is released"
    assert layer.nbytes == 3 * 32 * 96 * (2 if is_bfloat16 else 4)
    assert torch.equal(layer.row_major(), weight)
    assert layer.nbytes == unpacked_bytes


def test_a_packed_layer_can_be_filled_again() -> None:
    layer = filled(Linear(8, (4, 5), dtype=torch.float32, device="cpu"))
    x = normal(3, 8)
    pack_weights(layer)
    layer.part(1)[0].zero_()
    out = layer(x, torch.empty(3, 9))
    assert (out[:, 4:] == 0).all()
    assert (out[:, :4] != 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_not_packed(dtype: torch.dtype) -> None:
    layer = filled(Linear(8, (9,), dtype=dtype, device="cpu"))
    pack_weights(layer)
    assert layer.weight is not None
    x = normal(3, 8).to(dtype)
    out = layer(x, torch.empty(3, 9, dtype=dtype))
    assert torch.equal(out, torch.mm(x, layer.weight.t()))


def test_a_tied_head_leaves_the_table_to_the_embedding() -> None:
    embedding = TokenEmbedding(70, 16, dtype=torch.float32, device="cpu")
    embedding.weight.copy_(normal(70, 16))
    head = OutputHead(70, 16, dtype=torch.float32, device="cpu")
    head.tie(embedding)
    x = normal(4, 16)
    expected = torch.mm(x, embedding.weight.t())
    torch.testing.assert_close(head(x), expected, rtol=1e-5, atol=1e-5)
    assert head.weight is embedding.weight
    assert head.row_major() is embedding.weight


def expected_few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, act: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and the sum of its terms' sizes, which bounds the error of the sums."""
    result = x.double() @ weight.double().t()
    scale = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        result = result + bias.double()
    if act is not None:
        gate, up = result.chunk(2, dim=1)
        gate_scale, up_scale = scale.chunk(2, dim=1)
        if act == ops.Activation.SILU:
            activated = gate * torch.sigmoid(gate)
        else:
            kind = "tanh" if act == ops.Activation.GELU_TANH else "none"
            activated = torch.nn.functional.gelu(gate, approximate=kind)
        result = activated * up
        scale = 1.2 * gate_scale * up.abs() + activated.abs() * up_scale
    return result, scale


def skip_without_few_rows(device: str) -> None:
    if device != "cpu" and not ops.has_hopper_kernels(torch.device(device)):
        pytest.skip("linear_few_rows needs a Hopper GPU and a library built for it")


# One tile, a last one that is not whole, one and two shares of the depth, several tiles to a CTA.
FEW_ROWS_SHAPES = [
    (128, 64),
    (16, 192),
    pytest.param(400, 448, marks=pytest.mark.slow),
    pytest.param(4096, 1088, marks=pytest.mark.slow),
    pytest.param(27136, 128, marks=pytest.mark.slow),
]
FEW_ROWS_COUNTS = [1, 7, 16, 17, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128]


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("weight_rows", "depth"), FEW_ROWS_SHAPES)
@pytest.mark.parametrize("kind", ["plain", "bias", "silu", "gelu_tanh", "gelu_erf"])
def test_few_rows_against_float64(
    device: str, dtype: torch.dtype, weight_rows: int, depth: int, kind: str
) -> None:
    """Every tile, rows with gaps, NaN behind the rows that must not be read, guarded results."""
    skip_without_few_rows(device)
    is_large = weight_rows * depth > 200_000
    act = {
        "silu": ops.Activation.SILU,
        "gelu_tanh": ops.Activation.GELU_TANH,
        "gelu_erf": ops.Activation.GELU_ERF,
    }.get(kind)
    weight = (normal(weight_rows, depth) / depth**0.5).to(dtype)
    bias = normal(weight_rows).to(dtype) if kind == "bias" else None
    columns = weight_rows if act is None else weight_rows // 2
    here = [None if t is None else t.to(device) for t in (weight, bias)]
    for num_rows in (5, 66) if device == "cpu" and is_large else FEW_ROWS_COUNTS:
        store = torch.full((num_rows + 1, depth + 8), torch.nan, dtype=dtype)
        x = store[:num_rows, :depth]
        x.copy_(normal(num_rows, depth, seed=num_rows))
        out = torch.full((num_rows + 1, columns + 16), torch.nan, dtype=dtype, device=device)
        view = out[:num_rows, :columns]
        on_device = store.to(device)[:num_rows, :depth]
        ops.linear_few_rows(on_device, here[0], here[1], act=act, out=view)
        expected, scale = expected_few_rows(x, weight, bias, act)
        tolerance = 2.0 ** -(8 if dtype == torch.bfloat16 else 11)
        error = (view.double().cpu() - expected).abs()
        assert (error <= tolerance * expected.abs() + 2e-6 * scale + 1e-7).all(), num_rows
        assert out[num_rows:].isnan().all()
        assert out[:, columns:].isnan().all()
        # Threads that finish in another order show up on a device alone.
        for _ in range(1 if device == "cpu" else 3):
            again = ops.linear_few_rows(on_device, here[0], here[1], act=act)
            assert torch.equal(again, view)


@pytest.mark.parametrize(("weight_rows", "depth"), FEW_ROWS_SHAPES)
def test_a_row_of_few_rows_does_not_depend_on_the_others(
    device: str, weight_rows: int, depth: int
) -> None:
    """All numbers of rows have one order of sums."""
    skip_without_few_rows(device)
    num_rows = 66 if device == "cpu" else ops.FEW_ROWS
    x = normal(num_rows, depth).bfloat16().to(device)
    weight = normal(weight_rows, depth).bfloat16().to(device)
    whole = ops.linear_few_rows(x, weight)
    for first, last in ((0, 1), (3, 19), (10, 42), (1, 66), (num_rows - 1, num_rows)):
        assert torch.equal(ops.linear_few_rows(x[first:last], weight), whole[first:last])


@pytest.mark.cuda
def test_shares_of_the_depth_exchange_tile_after_tile() -> None:
    """Two shares of the depth and three tiles to a cluster, on an H200."""
    skip_without_few_rows("cuda")
    x = torch.randn(33, 4096, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(27648, 4096, dtype=torch.bfloat16, device="cuda") / 64
    out = ops.linear_few_rows(x, weight)
    expected, scale = expected_few_rows(x, weight, None, None)
    error = (out.double() - expected).abs()
    assert (error <= 2.0**-8 * expected.abs() + 2e-6 * scale).all()
    for _ in range(5):
        assert torch.equal(ops.linear_few_rows(x, weight), out)


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [32, 50, 100])
def test_few_rows_in_a_graph(num_rows: int) -> None:
    """A chain whose launches overlap sees what changed, and equals the eager chain bit for bit."""
    skip_without_few_rows("cuda")
    sizes = (1024, 6144, 1024, 4096)
    weights = [(normal(n, k) / k**0.5).bfloat16().cuda() for k, n in itertools.pairwise(sizes)]
    x = normal(num_rows, sizes[0]).bfloat16().cuda()
    buffers = [x.new_empty(num_rows, n) for n in sizes[1:]]

    def chain() -> torch.Tensor:
        value = x
        for weight, buffer in zip(weights, buffers, strict=True):
            value = ops.linear_few_rows(value, weight, out=buffer)
        return value

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        chain()
    for seed in range(20):
        x.copy_(normal(num_rows, sizes[0], seed=seed).bfloat16())
        weights[1].copy_(weights[1].roll(1, 0))
        expected = chain().clone()
        for buffer in buffers:
            buffer.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(buffers[-1], expected)


@pytest.mark.parametrize(
    ("columns", "depth", "rows"),
    [
        (6144, 4096, {1, 64, 65, 96, 127, 128}),  # large
        (4096, 12288, {1, 64, 65, 96, 127, 128}),
        (24576, 4096, {1, 64, 65, 96, 127, 128}),
        (3072, 2048, {1, 64}),
        (157184, 2048, {1, 64}),  # several tiles to a processor
        (1000, 2048, set()),  # no whole runs of 16 columns
        (1024, 2000, set()),  # no whole steps of 64
    ],
)
def test_few_rows_by_shape(columns: int, depth: int, rows: set[int]) -> None:
    candidates = (0, 1, 64, 65, 96, 127, 128, 129, 256)
    assert {count for count in candidates if ops.is_few_rows(count, columns, depth)} == rows


@pytest.mark.cuda
def test_layers_choose_few_rows_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_few_rows("cuda")
    layer = filled(Linear(1024, (4096, 2048), bias=True, dtype=torch.bfloat16, device="cuda"))
    calls = []
    product = ops.linear_few_rows

    def record(x: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        calls.append(x.size(0))
        return product(x, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "linear_few_rows", record)
    for num_rows in (1, 64, 65):
        x = normal(num_rows, 1024).bfloat16().cuda()
        out = layer(x, torch.empty(num_rows, 6144, dtype=torch.bfloat16, device="cuda"))
        expected, _ = expected_few_rows(x, layer.row_major(), layer.bias, None)
        torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-1)
    assert calls == [1, 64]


@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_product_is_one_kernel_where_it_can(device: str, has_bias: bool) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = filled(Linear(128, (96, 96), bias=has_bias, dtype=dtype, device=device))
    is_fused = device != "cpu" and ops.has_hopper_kernels(torch.device(device)) and not has_bias
    for num_rows in (0, 3, 64, 65):
        x = normal(num_rows, 128).to(device, dtype)
        out = torch.full((num_rows, 96), torch.nan, dtype=dtype, device=device)
        done = layer.forward_gated(x, ops.Activation.SILU, out)
        assert done == (is_fused and 0 < num_rows <= 64)
        if done:
            expected, _ = expected_few_rows(x, layer.row_major(), None, ops.Activation.SILU)
            torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-1)
        else:
            assert out.isnan().all()
