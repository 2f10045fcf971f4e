# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: merged and unmerged against merging by hand, and everything that must be refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.checkpoint.lora import read_adapter
from diffulex.errors import CheckpointError, ConfigError
from fixtures.adapters import (
    ALPHA,
    LLADA_TARGETS,
    QWEN_TARGETS,
    RANK,
    AdapterBuilder,
    merged_by_hand,
)
from fixtures.decoder_oracle import DecoderOracle, block_mask, d2f_mask
from fixtures.families import family_builder, family_config
from fixtures.paged_batch import PREFIX_FULL, PagedRunner, Rows

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
TARGETS = {"dream": QWEN_TARGETS, "diffucoder": QWEN_TARGETS, "llada": LLADA_TARGETS}
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 300, (count,), generator=generator).tolist()


class Setup:
    """A base checkpoint, an adapter, and the oracle of the merged weights."""

    def __init__(self, family: str, root: Path, adapter: AdapterBuilder, **fields) -> None:
        self.family, self.root = family, root
        self.builder = family_builder(family, **fields)
        self.base = self.builder.write(root / "base")
        self.factors = adapter.write(root / "adapter", self.base)

    def load(self, merge: bool, dtype: torch.dtype = torch.float32, device: str = "cpu"):
        name, spec, _ = detect(self.root / "base", self.family)
        path = self.root / "adapter"
        return load_model(
            name, spec, self.root / "base", dtype, device, lora_path=path, merge_lora=merge
        )

    def oracle(self, scale: float) -> DecoderOracle:
        merged = merged_by_hand(self.base, self.factors, scale)
        return DecoderOracle(self.family, self.builder.config, merged)


@pytest.fixture(autouse=True)
def _exact_cuda_products():
    """The float32 tolerance cannot hold with TF32 products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def block_logits(model, tokens: list[int], device: str = "cpu", dtype=torch.float32):
    runner = PagedRunner(model, 4, device=device, dtype=dtype)
    sequence = runner.sequence(tokens)
    return runner.forward([Rows(sequence, len(tokens), should_store=False)])[0].float().cpu()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("family", TARGETS)
def test_d2f_adapter(tmp_path, family, merge, device):
    setup = Setup(family, tmp_path, AdapterBuilder(TARGETS[family]))
    runner = PagedRunner(setup.load(merge, device=device), 4, device=device)
    tokens = random_tokens(24, seed=1)
    rows = Rows(runner.sequence(tokens), 24, False, mask_kind=PREFIX_FULL, prefix=8)
    (logits,) = runner.forward([rows])
    expected = setup.oracle(ALPHA / RANK).logits(tokens, d2f_mask(24, 8, 4))
    assert_close(logits.cpu(), expected)
    plain = DecoderOracle(family, setup.builder.config, setup.base)
    assert (expected - plain.logits(tokens, d2f_mask(24, 8, 4))).abs().max() > 0.1


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("sdar", (*QWEN_TARGETS, *MLP_TARGETS)),
        ("stable_diffcoder", MLP_TARGETS),
        ("fast_dllm_v2", ("v_proj", "up_proj")),
        ("llada", ("ff_proj", "up_proj", "k_proj")),
    ],
)
def test_other_targets(tmp_path, family, targets, merge):
    """Among them projections that are stored in one matrix with others that stay as they are."""
    setup = Setup(family, tmp_path, AdapterBuilder(targets), num_shards=2)
    tokens = random_tokens(21, seed=2)
    expected = setup.oracle(ALPHA / RANK).logits(tokens, block_mask(21, 4))
    assert_close(block_logits(setup.load(merge), tokens), expected)


@pytest.mark.every(3)
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize(
    "form",
    [
        {"infix": ".default"},
        {"suffix": ""},
        {"infix": ".default", "suffix": ""},
        {"prefix": ""},
        {"dtype": torch.bfloat16},
    ],
)
def test_forms_of_names(tmp_path, form, merge):
    setup = Setup("dream", tmp_path, AdapterBuilder(QWEN_TARGETS, **form))
    tokens = random_tokens(9, seed=3)
    expected = setup.oracle(ALPHA / RANK).logits(tokens, block_mask(9, 4))
    assert_close(block_logits(setup.load(merge), tokens), expected)


@pytest.mark.parametrize("merge", [True, False])
def test_rank_stabilised_scale(tmp_path, merge):
    setup = Setup("dream", tmp_path, AdapterBuilder(QWEN_TARGETS, config={"use_rslora": True}))
    tokens = random_tokens(9, seed=4)
    expected = setup.oracle(ALPHA / math.sqrt(RANK)).logits(tokens, block_mask(9, 4))
    assert_close(block_logits(setup.load(merge), tokens), expected)


@pytest.mark.parametrize(
    "targets",
    [r".*\.layers\.\d+\.self_attn\.[qkvo]_proj", r"model\.layers\.[01]\.self_attn\..*"],
)
def test_targets_as_a_pattern(tmp_path, targets):
    adapter = AdapterBuilder(QWEN_TARGETS, config={"target_modules": targets})
    setup = Setup("dream", tmp_path, adapter)
    tokens = random_tokens(9, seed=5)
    expected = setup.oracle(ALPHA / RANK).logits(tokens, block_mask(9, 4))
    assert_close(block_logits(setup.load(merge=True), tokens), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_merging_rounds_once(tmp_path, dtype):
    """The float32 sum is what is rounded, not the stored weight before it."""
    setup = Setup("dream", tmp_path, AdapterBuilder(QWEN_TARGETS))
    table = setup.load(merge=True, dtype=dtype).weight_table()
    merged = merged_by_hand(setup.base, setup.factors, ALPHA / RANK)
    twice = 0
    for name, weight in merged.items():
        # The product is summed in float32, so a value next to a tie may fall to the other side.
        limit = torch.finfo(dtype).eps * weight.abs().double() + 1e-6
        exact = weight.to(dtype)
        assert ((table[name].double() - weight.double()).abs() <= limit).all(), name
        assert (table[name] != exact).float().mean() < 0.01, name
        module = name.removesuffix(".weight")
        if f"{module}.A" in setup.factors:
            a, b = setup.factors[f"{module}.A"], setup.factors[f"{module}.B"]
            product = ALPHA / RANK * (b.double() @ a.double())
            rounded = (setup.base[name].to(dtype).double() + product).to(dtype)
            twice += int((rounded != exact).sum())
    assert twice > 100


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_low_precision(tmp_path, merge, device):
    adapter = AdapterBuilder(QWEN_TARGETS, dtype=torch.bfloat16)
    setup = Setup("dream", tmp_path, adapter, dtype=torch.bfloat16)
    tokens = random_tokens(32, seed=6)
    model = setup.load(merge, dtype=torch.bfloat16, device=device)
    logits = block_logits(model, tokens, device, torch.bfloat16)
    expected = setup.oracle(ALPHA / RANK).logits(tokens, block_mask(32, 4))
    error = (logits - expected).pow(2).mean().sqrt()
    assert error <= 0.03 * expected.pow(2).mean().sqrt()


def test_unmerged_weights_stay_those_of_the_base(tmp_path):
    setup = Setup("dream", tmp_path, AdapterBuilder(QWEN_TARGETS))
    table = setup.load(merge=False).weight_table()
    assert table.keys() == setup.base.keys()
    for name, tensor in setup.base.items():
        assert torch.equal(table[name], tensor), name


@pytest.mark.parametrize(
    ("target", "rows"),
    [
        ("q_proj", slice(0, 8)),
        ("k_proj", slice(8, 12)),
        ("v_proj", slice(12, 16)),
        ("query_key_value", slice(0, 16)),
    ],
)
def test_fused_rows(tmp_path, target, rows):
    """A delta of q, k or v on the tensor that holds all three goes to the rows of that one."""
    from diffulex.checkpoint.lora import LoraAdapter, LoraFactors, MergePlan, attach
    from diffulex.families.spec.names import TensorNames
    from diffulex.nn.attention import BlockAttention

    parts = {part: f"attention.{part}_proj" for part in "qkv"}
    names = TensorNames(qkv="attention.query_key_value", **parts)
    attention = BlockAttention(8, 2, 1, 4, eps=1e-6, dtype=torch.float32, device="cpu")
    projections = attention.projections("layer.", names)
    pair = LoraFactors(torch.randn(3, 8), torch.randn(rows.stop - rows.start, 3))
    adapter = LoraAdapter(tmp_path, 0.5, {f"layer.attention.{target}": pair}, (target,))
    weight = torch.randn(16, 8)
    plan = MergePlan(adapter, projections)
    expected = weight.clone()
    expected[rows] += 0.5 * pair.b @ pair.a
    stored = "layer.attention.query_key_value.weight"
    parts = [plan.apply(stored, slice(s, s + 5), weight[s : s + 5]) for s in (0, 5, 10)]
    parts.append(plan.apply(stored, slice(15, 16), weight[15:]))
    torch.testing.assert_close(torch.cat(parts), expected)
    attention.qkv.row_major().copy_(weight)
    attach(adapter, projections)
    x = torch.randn(5, 8)
    torch.testing.assert_close(attention.qkv(x, torch.empty(5, 16)), x @ expected.t())


class TestRefused:
    def refuse(self, root: Path, message: str, family: str = "dream", **fields) -> None:
        """Loading fails in both ways, before anything is built."""
        targets = fields.pop("targets", TARGETS[family])
        setup = Setup(family, root, AdapterBuilder(targets, **fields))
        for merge in (True, False):
            with pytest.raises(CheckpointError, match=message):
                setup.load(merge)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("peft_type", "IA3"),
            ("use_dora", True),
            ("fan_in_fan_out", True),
            ("bias", "all"),
            ("bias", "lora_only"),
            ("modules_to_save", ["lm_head"]),
            ("rank_pattern", {"q_proj": 8}),
            ("alpha_pattern", {"q_proj": 8}),
            ("layers_to_transform", [0]),
            ("layers_to_transform", 0),
            ("layer_replication", [[0, 1]]),
            ("target_parameters", ["mlp.experts"]),
            ("r", 0),
            ("r", None),
            ("init_lora_weights", "pissa"),
            ("init_lora_weights", "pissa_niter_16"),
            ("init_lora_weights", "loftq"),
            ("init_lora_weights", {"kind": "olora"}),
            ("lora_alpha", "6"),
            ("lora_alpha", float("nan")),
            ("lora_alpha", 10**400),
            ("lora_alpha", 1e300),
            ("target_modules", []),
            ("target_modules", None),
            ("target_modules", "("),
        ],
    )
    def test_configuration(self, tmp_path, key, value):
        self.refuse(tmp_path, rf"adapter_config\.json: {key}: expected", config={key: value})

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("pattern", "message"),
        [
            (
                r"(\w|\.|[a-z])+[!?]",
                r"target_modules: expected a pattern that is matched within 1 s",
            ),
            # A backtracking matcher never ends with it; this one sees that there is no "!".
            (r"([a-z_.0-9]+)+!", "expected modules of target_modules"),
        ],
    )
    def test_pattern_without_an_end(self, tmp_path, pattern, message):
        self.refuse(tmp_path, message, config={"target_modules": pattern})

    def test_weights_in_another_format(self, tmp_path):
        base = family_builder("dream").write(tmp_path / "base")
        AdapterBuilder(QWEN_TARGETS).write(tmp_path / "adapter", base)
        path = tmp_path / "adapter" / "adapter_model.safetensors"
        path.rename(path.with_suffix(".bin"))
        with pytest.raises(CheckpointError, match=r"adapter_model\.bin: convert the weights"):
            read_adapter(tmp_path / "adapter")

    def test_matches_nothing(self, tmp_path):
        """The adapter of one family on another: LLaDA's names are not Dream's."""
        other = family_builder("llada").write(tmp_path / "other")
        setup = Setup("dream", tmp_path, AdapterBuilder(QWEN_TARGETS))
        AdapterBuilder(LLADA_TARGETS).write(tmp_path / "adapter", other)
        with pytest.raises(CheckpointError, match=r"expected projections .*transformer\.blocks"):
            setup.load(merge=True)

    def test_no_factors(self, tmp_path):
        self.refuse(tmp_path, "expected tensors, got a file without any", edit=dict.clear)

    @pytest.mark.parametrize("side", ["A", "B"])
    def test_one_factor(self, tmp_path, side):
        name = f"base_model.model.model.layers.1.self_attn.q_proj.lora_{side}.weight"
        self.refuse(
            tmp_path,
            r"expected lora_A and lora_B .* got one of them for model\.layers\.1\.self_attn\.q_",
            edit=lambda tensors: tensors.pop(name),
        )

    def test_missing_module_is_not_a_zero_delta(self, tmp_path):
        def drop(tensors):
            for name in [name for name in tensors if "layers.1.self_attn.k_proj" in name]:
                del tensors[name]

        self.refuse(tmp_path, r"missing factors of model\.layers\.1\.self_attn\.k_proj$", edit=drop)

    def test_module_outside_the_targets(self, tmp_path):
        config = {"target_modules": ["q_proj", "k_proj", "v_proj"]}
        self.refuse(tmp_path, r"expected modules of target_modules .*o_proj", config=config)

    def test_targets_are_not_substrings(self, tmp_path):
        config = {"target_modules": ["proj", "q_proj", "k_proj", "v_proj"]}
        self.refuse(tmp_path, r"expected modules of target_modules .*o_proj", config=config)

    @pytest.mark.parametrize(
        "name",
        [
            "base_model.model.lm_head.lora_A.weight",
            "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight",
        ],
    )
    def test_module_that_does_not_exist(self, tmp_path, name):
        def add(tensors):
            tensors[name] = torch.zeros(RANK, 64)
            tensors[name.replace("_A", "_B")] = torch.zeros(64, RANK)

        self.refuse(tmp_path, "expected projections of the base model, got", edit=add)

    @pytest.mark.parametrize(
        "name",
        [
            "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
            "base_model.model.model.layers.0.self_attn.q_proj.bias",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.other.weight",
        ],
    )
    def test_tensor_that_is_no_factor(self, tmp_path, name):
        self.refuse(
            tmp_path,
            "expected factors .lora_A.weight and .lora_B.weight, got base_model",
            edit=lambda tensors: tensors.update({name: torch.zeros(RANK, 64)}),
        )

    @pytest.mark.parametrize(
        ("side", "shape", "message"),
        [
            ("A", (RANK + 1, 64), r"expected shape \[4, in\], got \[5, 64\]"),
            ("B", (64, RANK + 1), r"expected shape \[out, 4\], got \[64, 5\]"),
            ("A", (RANK, 65), r"expected a product of shape \[64, 64\], got \[64, 65\]"),
            ("B", (63, RANK), r"expected a product of shape \[64, 64\], got \[63, 64\]"),
        ],
    )
    def test_shapes(self, tmp_path, side, shape, message):
        name = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight"
        self.refuse(
            tmp_path, message, edit=lambda tensors: tensors.update({name: torch.zeros(shape)})
        )

    def test_two_forms_of_one_factor(self, tmp_path):
        name = "model.layers.0.self_attn.q_proj.lora_A.weight"
        self.refuse(
            tmp_path,
            "expected one factor, got two",
            edit=lambda tensors: tensors.update({name: torch.zeros(RANK, 64)}),
        )

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
    def test_missing_file(self, tmp_path, name):
        setup = Setup("dream", tmp_path, AdapterBuilder(QWEN_TARGETS))
        (tmp_path / "adapter" / name).unlink()
        with pytest.raises(CheckpointError, match=rf"expected a file {name}, got none"):
            setup.load(merge=True)

    def test_damaged_files(self, tmp_path):
        Setup("dream", tmp_path, AdapterBuilder(QWEN_TARGETS))
        path = tmp_path / "adapter" / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:500])
        with pytest.raises(CheckpointError, match=r"cannot read .*adapter_model"):
            read_adapter(tmp_path / "adapter")
        (tmp_path / "adapter" / "adapter_config.json").write_text("[]")
        with pytest.raises(CheckpointError, match="expected a JSON object"):
            read_adapter(tmp_path / "adapter")

    def test_integer_factors(self, tmp_path):
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        self.refuse(
            tmp_path,
            "expected one of F64, F32, F16, BF16, got I64",
            edit=lambda tensors: tensors.update({name: torch.zeros(RANK, 64, dtype=torch.int64)}),
        )


def test_base_named_by_the_adapter_is_ignored(tmp_path):
    config = {"base_model_name_or_path": "no/such/model"}
    setup = Setup("dream", tmp_path, AdapterBuilder(QWEN_TARGETS, config=config))
    stored = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == "no/such/model"
    assert setup.load(merge=True).spec.family == "dream"


def test_large_head_dim_and_bias(tmp_path):
    """Columns of an output that is wider than its input, with biases under the product."""
    config = family_config("dream_reasoner", attention_bias=True, head_dim=32)
    setup = Setup("dream_reasoner", tmp_path, AdapterBuilder(QWEN_TARGETS), config=config)
    tokens = random_tokens(13, seed=8)
    expected = setup.oracle(ALPHA / RANK).logits(tokens, block_mask(13, 4))
    assert_close(block_logits(setup.load(merge=False), tokens), expected)


class TestEngine:
    """The options of the engine that load an adapter."""

    def run(self, setup: Setup, **settings) -> tuple[int, ...]:
        from diffulex import Diffulex, SamplingParams

        with Diffulex(str(setup.root / "base"), device="cpu", num_pages=64, **settings) as engine:
            params = SamplingParams(max_tokens=24, ignore_eos=True)
            (output,) = engine.generate(random_tokens(20, seed=9), params, summary=False)
            return tuple(output.token_ids)

    def test_adapter_changes_the_tokens_the_same_way_merged_or_not(self, tmp_path):
        setup = Setup("sdar", tmp_path, AdapterBuilder(QWEN_TARGETS))
        path = str(tmp_path / "adapter")
        merged = self.run(setup, use_lora=True, lora_path=path, pre_merge_lora=True)
        assert merged == self.run(setup, use_lora=True, lora_path=path)
        plain = self.run(setup)
        assert merged != plain
        assert plain == self.run(setup, use_lora=False, lora_path=path)

    def test_path_is_required(self, tmp_path):
        setup = Setup("sdar", tmp_path, AdapterBuilder(QWEN_TARGETS))
        with pytest.raises(ConfigError, match=r"lora_path: expected .* with use_lora, got ''"):
            self.run(setup, use_lora=True)

    def test_bad_adapter_is_not_served_as_the_base_model(self, tmp_path):
        setup = Setup("sdar", tmp_path, AdapterBuilder(QWEN_TARGETS))
        with pytest.raises(CheckpointError, match=r"expected a file adapter_config\.json"):
            self.run(setup, use_lora=True, lora_path=str(tmp_path / "nothing"))
