# SPDX-License-Identifier: Apache-2.0
"""Engines with weights in low precision, from the key to the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffulex import Diffulex, SamplingParams, ops
from diffulex.bench.evaluate import read_problems
from diffulex.bench.word_problems import Problem, heldout_problems, is_correct
from diffulex.checkpoint import tensor_reader
from diffulex.checkpoint.auto_model import load_model
from diffulex.checkpoint.loader import weight_table_of
from diffulex.config.config import Config
from diffulex.config.facts import read_facts
from diffulex.config.parse import Options
from diffulex.engine.startup import startup_lines
from diffulex.errors import CheckpointError, ConfigError
from diffulex.nn.linear import Linear
from diffulex.quantization.experts import QuantizedExperts
from diffulex.quantization.layers import ModelQuantizer
from diffulex.quantization.scheme import SCHEMES, QuantizationPlan
from diffulex.quantization.weights import QuantizedWeight
from fixtures.adapters import ALPHA, QWEN_TARGETS, RANK, AdapterBuilder
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.moe_families import moe_builder, moe_config
from fixtures.quantized import FORMATS, Checked, rows_by_product
from fixtures.quick import quick
from tiny_gemma import TinyGemma

ZOO = Path(__file__).parents[3] / "examples" / "zoo"
#: So that an engine does not take the memory of a GPU from the tests that run beside it.
PAGES: dict[str, Any] = {"num_pages": 2048}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
#: Of the kind that the model was trained on: nothing is decided by the last bits of a product.
PROMPTS = [
    "Nina has 37 buttons. Lily gives Nina 52 more buttons. How many buttons does Nina have in the end?",
    "Mia has 16 stones. Mia buys 128 more stones. How many stones does Mia have now?",
]


def tokens(engine: Diffulex) -> list[list[int]]:
    return [list(o.token_ids) for o in engine.generate(PROMPTS, GREEDY, summary=False)]


def model_of(engine: Diffulex) -> Any:
    return engine._executor.runner.model


def test_none_changes_no_token() -> None:
    with (
        Diffulex("demo", device="cpu") as plain,
        Diffulex("demo", device="cpu", quantization="none") as none,
    ):
        assert tokens(plain) == tokens(none)


@pytest.mark.parametrize("scheme", quick(SCHEMES, ["fp8_block"]))
def test_products_are_those_of_dequantised_operands(scheme: str) -> None:
    with Diffulex("demo", device="cpu", quantization=scheme) as engine:
        found = tokens(engine)
    with Diffulex("demo", device="cpu", quantization=scheme) as engine:
        layers = [m for m in model_of(engine).modules() if isinstance(m, Linear)]
        assert len(layers) == 4 * engine.config.model.spec.num_layers
        checked = []
        for layer in layers:
            assert isinstance(layer.format, QuantizedWeight)
            checked.append(Checked(layer.format, rows_by_product(layer.format)))
            layer.format = checked[-1]
        assert tokens(engine) == found
    assert len({each.products for each in checked}) == 1
    assert checked[0].products > 0


def num_right(engine: Diffulex, problems: list[Problem]) -> int:
    """How many an engine answers rightly."""
    params = SamplingParams(temperature=0.0, max_tokens=128)
    prompts: list[Any] = [p.question for p in problems]
    tokenizer = engine.tokenizer
    if tokenizer is not None and tokenizer.has_chat_template:
        turns = ([{"role": "user", "content": question}] for question in prompts)
        prompts = [tokenizer.apply_chat_template(turn) for turn in turns]
    answers = engine.generate(prompts, params, summary=False)
    return sum(is_correct(p, o.text) for p, o in zip(problems, answers, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", SCHEMES)
def test_cuda_answers_as_well_as_the_cpu(scheme: str) -> None:
    """Some problems turn on the last bits; the host's loop, the device's own and steps without graphs
    give the same tokens."""
    right = {}
    for device in ("cpu", "cuda"):
        with Diffulex("demo", device=device, quantization=scheme, **PAGES) as engine:
            layers = [m for m in model_of(engine).modules() if isinstance(m, Linear)]
            assert all(isinstance(layer.format, QuantizedWeight) for layer in layers)
            right[device] = num_right(engine, heldout_problems(100))
            assert device == "cpu" or engine.run_stats.num_graph_steps > 0
            found = tokens(engine)
    assert right["cpu"] >= 90
    assert abs(right["cuda"] - right["cpu"]) <= 4
    settings: dict[str, Any]
    for settings in ({"run_ahead": "off"}, {"enforce_eager": True}):
        with Diffulex("demo", device="cuda", quantization=scheme, **PAGES, **settings) as engine:
            assert tokens(engine) == found


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_on_cuda_answer_as_well_as_on_the_cpu(scheme: str) -> None:
    """A model of the zoo with routed experts; graphs change no token."""
    problems = read_problems(str(ZOO / "heldout.jsonl"))[:32]
    model = str(ZOO / "edit_llada2")
    given = {"quantization": scheme, "quantization_ignore": (), **PAGES}
    right = {}
    for device in ("cpu", "cuda"):
        with Diffulex(model, device=device, **given) as engine:
            held = [getattr(m, "matrices", None) for m in model_of(engine).modules()]
            assert any(isinstance(each, QuantizedExperts) for each in held)
            right[device] = num_right(engine, problems)
            found = tokens(engine)
    assert right["cpu"] >= 25
    assert abs(right["cuda"] - right["cpu"]) <= 4
    with Diffulex(model, device="cuda", enforce_eager=True, **given) as engine:
        assert tokens(engine) == found


@pytest.mark.cuda
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_on_cuda_are_those_of_the_cpu(tmp_path, scheme: str) -> None:
    """A checkpoint in pieces; the device holds no matrix beside its codes."""
    CheckpointBuilder(tiny_config(intermediate_size=200)).write(tmp_path)
    settings = {"max_model_len": 64, "num_pages": 8, "quantization": scheme, "dtype": "bfloat16"}
    held = []
    for device in ("cpu", "cuda"):
        with Diffulex(str(tmp_path), device=device, **settings) as engine:
            held.append([tensor.cpu() for tensor in codes_of(engine)])
    for of_cpu, codes in zip(*held, strict=True):
        assert torch.equal(of_cpu, codes)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize(("width", "group"), [(64, 32), (48, 64)])
def test_experts_of_4_bits_are_those_of_the_definition(
    tmp_path, device: str, width: int, group: int
) -> None:
    """A layer of a tiny mixture against its values in float64; on CUDA the codes of the CPU in stacks, and
    the same tokens with graphs and without. Of the width 48 down has a scale a row, and no tensor cores."""
    config = moe_config("sdar_moe", moe_intermediate_size=width, hidden_size=64)
    moe_builder("sdar_moe", config=config).write(tmp_path)
    settings = {"max_model_len": 128, "num_pages": 8, "quantization": "int4", "dtype": "bfloat16"}
    settings |= {"quantization_group_size": group}

    def experts_of(engine: Diffulex) -> QuantizedExperts:
        held = (getattr(module, "matrices", None) for module in model_of(engine).modules())
        return next(item for item in held if isinstance(item, QuantizedExperts))

    def generated(engine: Diffulex) -> list[int]:
        return list(engine.generate([[5, 6, 7, 8]], GREEDY, summary=False)[0].token_ids)

    with Diffulex(str(tmp_path), device="cpu", **settings) as engine:
        experts = experts_of(engine)
        codes = [p.row_major() for w in (*experts.w13, *experts.w2) for p in w.parts]
        values = [rows_by_product(weight).double() for weight in (*experts.w13, *experts.w2)]
    with Diffulex(str(tmp_path), device=device, **settings) as engine:
        experts, found = experts_of(engine), generated(engine)
        held = [p.row_major() for w in (*experts.w13, *experts.w2) for p in w.parts]
        assert all(map(torch.equal, codes, (tensor.cpu() for tensor in held)))
        count, top_k = len(experts.w13), 2
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        order = torch.rand(40, count, generator=torch.Generator().manual_seed(2))
        ids = order.topk(top_k).indices.int()
        routing = ops.Routing(torch.full((40, top_k), 0.5), ids)
        on_device = ops.Routing(*(part.to(device) for part in routing))
        rows = x.to(device)
        workspace = experts.new_workspace(rows, top_k)
        out = experts.product(rows, on_device, out=torch.empty_like(rows), workspace=workspace)
    want = torch.zeros(40, 64, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for expert in chosen:
            gate, up = (values[expert] @ x[token].double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            want[token] += 0.5 * (values[count + expert] @ inner)
    assert (out.cpu().double() - want).norm() <= 0.01 * want.norm()
    with Diffulex(str(tmp_path), device=device, enforce_eager=True, **settings) as engine:
        assert generated(engine) == found
    assert len(found) > 0


@pytest.mark.cuda
def test_no_matrix_is_whole_on_the_device(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes the codes and pieces of what is read, not the matrices in their dtype."""
    monkeypatch.setattr(tensor_reader, "_PIECE_BYTES", 1 << 18)
    config = tiny_config(hidden_size=512, intermediate_size=4096, num_hidden_layers=2)
    CheckpointBuilder(config).write(tmp_path)
    facts = read_facts(Options.parse(str(tmp_path), {}))
    plan = ModelQuantizer(QuantizationPlan("fp8"))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load_model(
        facts.model_name, facts.spec, tmp_path, torch.bfloat16, "cuda", quantizer=plan
    )
    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    del model
    assert peak <= held + (4 << 20)


def test_the_report_counts_the_weights_that_are_there() -> None:
    """Panels of the CPU are bfloat16: codes of a byte, and of half of it, save that much of them."""
    with Diffulex("demo", device="cpu") as plain:
        layers = [m for m in model_of(plain).modules() if isinstance(m, Linear)]
        panels = sum(layer.nbytes for layer in layers)
        rest = plain.memory_report().weights - panels
    for scheme, share in (("int8", 0.5), ("int4", 0.25)):
        with Diffulex("demo", device="cpu", quantization=scheme) as engine:
            held = engine.memory_report().weights
            codes = sum(m.nbytes for m in model_of(engine).modules() if isinstance(m, Linear))
        assert held == rest + codes
        assert share * panels < codes < 1.15 * share * panels


def test_random_weights_are_quantised_too() -> None:
    with Diffulex("demo", device="cpu", load_format="dummy", quantization="int8") as engine:
        layers = [m for m in model_of(engine).modules() if isinstance(m, Linear)]
        assert all(isinstance(layer.format, QuantizedWeight) for layer in layers)
        first = tokens(engine)
    with Diffulex("demo", device="cpu", load_format="dummy", quantization="int8") as engine:
        assert tokens(engine) == first


def codes_of(engine: Diffulex) -> list[torch.Tensor]:
    """Copies of everything that the layers hold in low precision."""
    layers = [m.format for m in model_of(engine).modules() if isinstance(m, Linear)]
    parts = [part for weight in layers for part in weight._parts]
    held = [tensor for part in parts for tensor in (part.row_major(), part.scale)]
    return [tensor.view(torch.uint8).clone() for tensor in held]


@pytest.mark.every(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_new_weights_are_quantised(tmp_path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """Given tensors and files alike, in small pieces too: as if they had been loaded at first."""
    monkeypatch.setattr(tensor_reader, "_PIECE_BYTES", 20_000)
    config = tiny_config(intermediate_size=200)
    old, new = (CheckpointBuilder(config, seed=seed) for seed in (0, 1))
    old.write(tmp_path / "old")
    tensors = new.write(tmp_path / "new")
    settings = {"device": "cpu", "max_model_len": 64, "quantization": scheme}

    def answer(engine: Diffulex) -> list[int]:
        return list(engine.generate([[5, 6, 7]], GREEDY, summary=False)[0].token_ids)

    with Diffulex(str(tmp_path / "new"), **settings) as engine:
        answers = [answer(engine)]
        expected = codes_of(engine)
    with Diffulex(str(tmp_path / "old"), **settings) as engine:
        answers.append(answer(engine))
        before = codes_of(engine)
        engine.update_weights(tensors)
        assert all(map(torch.equal, codes_of(engine), expected))
        assert answer(engine) == answers[0]
        engine.update_weights(str(tmp_path / "old"))
        assert all(map(torch.equal, codes_of(engine), before))
        assert answer(engine) == answers[1]
        name = "model.layers.1.self_attn.k_proj.weight"
        engine.update_weights({name: tensors[name]})
        assert not all(map(torch.equal, codes_of(engine), before))
        with pytest.raises(CheckpointError, match=rf"{name}: expected shape \[64, 64\], got"):
            engine.update_weights({name: torch.zeros(3, 64)})
    assert not all(map(torch.equal, before, expected))


def test_new_weights_for_stored_codes(tmp_path) -> None:
    """Quantising makes no zero points; codes are not quantised once more."""
    for name in ("gptq_v1", "ct_int8"):
        CheckpointBuilder(tiny_config(intermediate_size=160)).write(tmp_path / name)
        FORMATS[name].write(tmp_path / name)
    name = "model.layers.0.mlp.down_proj.weight"
    with (
        Diffulex(str(tmp_path / "gptq_v1"), device="cpu", max_model_len=64) as engine,
        pytest.raises(ConfigError, match=r"update_weights: .* quantised while loading, got"),
    ):
        engine.update_weights({name: torch.zeros(64, 160)})
    with Diffulex(str(tmp_path / "ct_int8"), device="cpu", max_model_len=64) as engine:
        engine.update_weights({name: torch.ones(64, 160)})
        with pytest.raises(CheckpointError, match="expected weights in their dtype for an engine"):
            engine.update_weights(str(tmp_path / "ct_int8"))


def test_adapters_need_weights_in_their_dtype(tmp_path) -> None:
    with (
        Diffulex("demo", device="cpu", quantization="fp8") as engine,
        pytest.raises(ConfigError, match="load_lora: expected quantization none, got fp8"),
    ):
        engine.load_lora(str(tmp_path))


@pytest.mark.parametrize("scheme", quick(SCHEMES, ["int8"]))
def test_adapters_are_merged_before_and_added_behind(tmp_path, scheme: str) -> None:
    """Merged: the codes of the merged checkpoint. Beside: the codes of the base, and the product of the
    factors with rows as they were before they were quantised."""
    builder = CheckpointBuilder(tiny_config(intermediate_size=160))
    base = builder.write(tmp_path / "base")
    factors = AdapterBuilder(QWEN_TARGETS).write(tmp_path / "adapter", base)
    builder.write(tmp_path / "merged")
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 64}
    adapter = {"use_lora": True, "lora_path": str(tmp_path / "adapter")}
    with Diffulex(str(tmp_path / "base"), **settings, **adapter, pre_merge_lora=True) as engine:
        table = weight_table_of(model_of(engine), {})
        merged = {name: tensor.contiguous() for name, tensor in table.items()}
        save_file(merged, tmp_path / "merged" / "model.safetensors")
    settings["quantization"] = scheme
    held = {}
    for name in ("base", "merged"):
        with Diffulex(str(tmp_path / name), **settings) as engine:
            held[name] = codes_of(engine)
    assert not all(map(torch.equal, held["base"], held["merged"]))
    path = str(tmp_path / "base")
    with Diffulex(path, **settings, **adapter, pre_merge_lora=True) as engine:
        assert all(map(torch.equal, codes_of(engine), held["merged"]))
    with Diffulex(path, **settings, **adapter, pre_merge_lora=False) as engine:
        assert all(map(torch.equal, codes_of(engine), held["base"]))
        name, linear = "model.layers.1.self_attn.o_proj", model_of(engine).layers[1].attention.o
        x = torch.randn(5, linear.in_features, generator=torch.Generator().manual_seed(1))
        down, up = factors[f"{name}.A"], factors[f"{name}.B"]
        want = linear.format.product(x, None, None) + ALPHA / RANK * (x @ down.T) @ up.T
        found = linear(x, torch.empty_like(want))
        assert len(engine.generate([[5, 6, 7]], GREEDY, summary=False)[0].token_ids) == 24
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_a_given_model_has_the_weights_that_are_named() -> None:
    with Diffulex("demo", device="cpu") as plain:
        config, model = (
            Config.from_kwargs("demo", device="cpu", quantization="int8"),
            model_of(plain),
        )
        message = (
            r"from_components: expected a model with weights in int8 \(quantization\), got one"
        )
        with pytest.raises(ConfigError, match=message):
            Diffulex.from_components(config, model, None)
    with (
        Diffulex("demo", device="cpu", quantization="int8") as engine,
        Diffulex.from_components(engine.config, model_of(engine), None) as other,
    ):
        assert other.config.model.quantization == "int8"


@pytest.mark.slow
def test_stacked_experts_answer_alike_alone_and_again(tmp_path) -> None:
    """A canvas model whose experts are int8, through its engine."""
    gemma = TinyGemma(tmp_path, "cpu", moe_intermediate_size=40)
    facts = gemma.facts
    quantizer = ModelQuantizer(QuantizationPlan("int8"))
    gemma.model = load_model(
        facts.model_name, facts.spec, tmp_path, torch.float32, "cpu", quantizer=quantizer
    )
    experts = [layer.experts.matrices for layer in gemma.model.decoder_layers]
    assert all(isinstance(each, QuantizedExperts) for each in experts)
    params = SamplingParams(temperature=0.0, max_tokens=12, seed=1, ignore_eos=True)
    found = []
    for _ in range(2):
        with gemma.engine(quantization="int8") as engine:
            assert "weights int8" in "\n".join(
                startup_lines(engine.config, engine._prepared, engine.memory_report(), None)
            )
            outputs = engine.generate([[7, 9, 11]], params, summary=False)
            found.append(list(outputs[0].token_ids))
    assert found[0] == found[1]
    assert len(found[0]) == 12
    with gemma.engine() as engine:
        assert engine.config.model.quantization == "auto"


def test_unknown_schemes_are_an_error() -> None:
    message = "quantization: expected one of auto, none, fp8, fp8_block, int8, int4, got 'fp4'"
    with pytest.raises(ConfigError, match=message):
        Diffulex("demo", device="cpu", quantization="fp4")


@pytest.mark.cuda
def test_float32_on_cuda_is_an_error() -> None:
    message = "dtype: expected bfloat16 or float16 with weights in low precision on cuda"
    with pytest.raises(ConfigError, match=message):
        Diffulex("demo", device="cuda", quantization="int8", dtype="float32")
