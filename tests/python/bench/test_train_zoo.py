# SPDX-License-Identifier: Apache-2.0
"""The zoo: models against transformers, reference decoders on scripts, the committed checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "train_zoo"
ZOO = ROOT / "examples" / "zoo"
sys.path.insert(0, str(ROOT / "examples" / "train_demo"))
sys.path.append(str(EXAMPLE))

import judge  # noqa: E402
from canvas_model import CanvasModel, CanvasShape, load_canvas_model  # noqa: E402
from families import load_transformer, save_transformer  # noqa: E402
from model import additive_mask, block_causal_visible  # noqa: E402
from objective import TokenIds  # noqa: E402
from transformer import MoEShape, Shape, Transformer  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

DIRECTORIES = sorted({kind.directory for kind in judge.OBJECTIVES.values()})
BASE: dict[str, Any] = {
    "vocab_size": 48,
    "mask_token_id": 47,
    "eos_token_id": 45,
    "block_size": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 8,
}


def randomise(model: Any, seed: int = 1) -> Any:
    """Weights that are far from their initial values, router biases included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            base = 1.0 if tensor.dim() == 1 and "bias" not in name else 0.0
            std = 0.5 if "router" in name else 0.2
            tensor.copy_(base + std * torch.randn(tensor.shape, generator=generator))
            if "expert_bias" in name:
                tensor.sub_(0.9)
    return model.eval()


def block_logits(model: Transformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits under the block-causal mask, and the mask as transformers takes it."""
    length = tokens.shape[1]
    visible = block_causal_visible(length, 4, tokens.device)
    with torch.no_grad():
        got = model(tokens, torch.arange(length)[None], additive_mask(visible))
    dense = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[:, None]
    return got, dense.expand(len(tokens), -1, -1, -1)


def stock_logits(oracle: Any, tokens: Tensor, dense: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = oracle(input_ids=tokens, attention_mask=dense, use_cache=False).logits
    return logits


TOKENS = torch.randint(0, 45, (2, 14), generator=torch.Generator().manual_seed(3))
COMMON: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attn_implementation": "eager",
}


def test_llada_checkpoint_equals_llama_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    model = randomise(Transformer(Shape(**BASE)))
    save_transformer(model, "llada", tmp_path)
    renames = (
        ("model.transformer.blocks.", "model.layers."),
        (".attn_norm.", ".input_layernorm."),
        (".ff_norm.", ".post_attention_layernorm."),
        (".attn_out.", ".self_attn.o_proj."),
        (".q_proj.", ".self_attn.q_proj."),
        (".k_proj.", ".self_attn.k_proj."),
        (".v_proj.", ".self_attn.v_proj."),
        (".ff_proj.", ".mlp.gate_proj."),
        (".up_proj.", ".mlp.up_proj."),
        (".ff_out.", ".mlp.down_proj."),
        ("model.transformer.wte", "model.embed_tokens"),
        ("model.transformer.ln_f", "model.norm"),
    )
    state = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        renamed = name
        for old, new in renames:
            renamed = renamed.replace(old, new)
        state[renamed] = tensor.float()
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON)).eval()
    missing = oracle.load_state_dict(state, strict=False)
    assert missing.unexpected_keys == []
    assert missing.missing_keys == ["lm_head.weight"]
    oracle.tie_weights()
    got, dense = block_logits(load_transformer(tmp_path), TOKENS)
    torch.testing.assert_close(got, stock_logits(oracle, TOKENS, dense), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("model_type", ["Fast_dLLM_Qwen", "Dream"])
def test_qwen2_checkpoints_equal_qwen2_of_transformers(model_type: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    model = randomise(Transformer(Shape(**BASE, qkv_bias=True)))
    save_transformer(model, model_type, tmp_path)
    state = {n: t.float() for n, t in load_file(tmp_path / "model.safetensors").items()}
    config = transformers.Qwen2Config(**COMMON, layer_types=["full_attention"] * 3)
    oracle = transformers.Qwen2ForCausalLM(config).eval()
    missing = oracle.load_state_dict(state, strict=False)
    assert missing.unexpected_keys == []
    assert missing.missing_keys == ["lm_head.weight"]
    oracle.tie_weights()
    got, dense = block_logits(load_transformer(tmp_path), TOKENS)
    mask = {"full_attention": dense}
    torch.testing.assert_close(got, stock_logits(oracle, TOKENS, mask), atol=1e-4, rtol=1e-3)


def test_llada2_checkpoint_equals_glm4_moe_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    moe = MoEShape(num_experts=8, top_k=3, expert_size=16, shared_size=24, num_groups=4)
    shape = Shape(**{**BASE, "rotary_dim": 4}, qk_norm=True, moe=moe)
    save_transformer(randomise(Transformer(shape)), "llada2_moe", tmp_path)
    config = transformers.Glm4MoeConfig(
        **COMMON, head_dim=8, partial_rotary_factor=0.5, use_qk_norm=True, attention_bias=False,
        n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=16,
        n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
        first_k_dense_replace=1, num_mtp_layers=0,
    )  # fmt: skip
    state: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        value = tensor.float()
        if name.endswith("query_key_value.weight"):
            prefix = name.replace("attention.query_key_value.weight", "self_attn.")
            for part, rows in zip("qkv", value.split([32, 16, 16]), strict=True):
                state[f"{prefix}{part}_proj.weight"] = rows
            continue
        renamed = name.replace("word_embeddings", "embed_tokens")
        renamed = renamed.replace("attention.dense", "self_attn.o_proj")
        renamed = renamed.replace("attention.query_layernorm", "self_attn.q_norm")
        renamed = renamed.replace("attention.key_layernorm", "self_attn.k_norm")
        state[renamed.replace("gate.expert_bias", "gate.e_score_correction_bias")] = value
    for layer in (1, 2):  # transformers 5 stacks the experts in memory
        path = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([state.pop(f"{path}.{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        )
        state[f"{path}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[f"{path}.down_proj"] = down
    oracle = transformers.Glm4MoeForCausalLM(config)
    for layer in (1, 2):  # a shared expert of another size than the stock class gives it
        shared = oracle.model.layers[layer].mlp.shared_experts
        for part, (rows, columns) in {"gate": (24, 32), "up": (24, 32), "down": (32, 24)}.items():
            setattr(shared, f"{part}_proj", torch.nn.Linear(columns, rows, bias=False))
    missing = oracle.load_state_dict(state, strict=False)
    assert missing.unexpected_keys == []
    assert missing.missing_keys == ["lm_head.weight"]
    oracle.tie_weights()
    got, dense = block_logits(load_transformer(tmp_path), TOKENS)
    torch.testing.assert_close(
        got, stock_logits(oracle.eval(), TOKENS, dense), atol=1e-4, rtol=1e-3
    )


def test_canvas_checkpoint_equals_diffusion_gemma_of_transformers(tmp_path: Path) -> None:
    """Both passes, the window, self-conditioning and a second canvas."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"):
        pytest.skip("transformers without DiffusionGemma")
    from safetensors.torch import load_file

    from canvas_decoder import canvas_visibility
    from canvas_model import canvas_config, save_canvas_model

    shape = CanvasShape(
        vocab_size=48, eos_token_id=45, canvas_length=6, hidden_size=32, intermediate_size=48,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=8,
        layer_types=("sliding_attention", "sliding_attention", "full_attention"),
        num_experts=8, top_k_experts=2, moe_intermediate_size=16,
    )  # fmt: skip
    save_canvas_model(randomise(CanvasModel(shape)), tmp_path)
    model = load_canvas_model(tmp_path).eval()
    assert model.shape == shape
    text = transformers.DiffusionGemmaTextConfig(**canvas_config(shape)["text_config"])
    vision = transformers.Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    config = transformers.DiffusionGemmaConfig(
        text_config=text, vision_config=vision, canvas_length=6, tie_word_embeddings=True,
        attn_implementation="eager",
    )  # fmt: skip
    oracle = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    state = {n: t.float() for n, t in load_file(tmp_path / "model.safetensors").items()}
    assert oracle.load_state_dict(state, strict=False).unexpected_keys == []
    oracle.tie_weights()
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(0, 48, (1, 13), generator=generator)
    canvas = torch.randint(0, 48, (1, 6), generator=generator)
    cache = transformers.DynamicCache(config=text)

    def ours(context: Tensor, tokens: Tensor, signal: Tensor) -> Tensor:
        prefix = torch.tensor([context.shape[1]])
        positions, full = canvas_visibility(prefix, 1, 6, context.shape[1], None)
        _, sliding = canvas_visibility(prefix, 1, 6, context.shape[1], shape.sliding_window)
        logits: Tensor = model(
            tokens, signal, context, positions, additive_mask(full), additive_mask(sliding)
        )[0]
        return logits

    with torch.no_grad():
        zero = torch.zeros(1, 6, 32)
        first = oracle(input_ids=prompt, past_key_values=cache, decoder_input_ids=canvas).logits
        mine = ours(prompt, canvas, zero)
        torch.testing.assert_close(mine, first.float(), atol=2e-4, rtol=1e-3)
        tempered = first / 0.7
        second = oracle(
            past_key_values=cache, decoder_input_ids=canvas, self_conditioning_logits=tempered
        ).logits
        signal = model.soft_signal(tempered.float())
        torch.testing.assert_close(
            ours(prompt, canvas, signal), second.float(), atol=2e-4, rtol=1e-3
        )
        following = torch.randint(0, 48, (1, 6), generator=generator)
        third = oracle(input_ids=canvas, past_key_values=cache, decoder_input_ids=following).logits
        context = torch.cat([prompt, canvas], dim=1)
        torch.testing.assert_close(
            ours(context, following, zero), third.float(), atol=2e-4, rtol=1e-3
        )


# -- whole runs ------------------------------------------------------------------------------------


#: Runs the script once for every objective. What a tiny run takes is mostly to import torch and to train
#: the tokenizer: both are done once.
RUNS = """
import functools, runpy, sys, traceback
from pathlib import Path

script, out, *names = sys.argv[1:]
sys.path[:0] = [str(Path(script).parent), str(Path(script).parents[1] / "train_demo")]
import dataset

dataset.build_tokenizer = functools.cache(dataset.build_tokenizer)
options = "--steps 12 --batch 8 --layers 2 --device cpu --workers 1 --warmup 4".split()
for name in names:
    sys.argv = [script, "--objective", name, "--out", f"{out}/{name}", *options]
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory with what every objective has written, and what was said."""
    out = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-c", RUNS, str(EXAMPLE / "train.py"), str(out)]
    result = subprocess.run(
        [*command, *sorted(judge.OBJECTIVES)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return out, result.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first one waits for all runs, and the host may do other work
@pytest.mark.parametrize("name", sorted(judge.OBJECTIVES))
def test_a_tiny_run_trains_and_saves(name: str, runs: tuple[Path, str]) -> None:
    directory, said = runs[0] / name, runs[1]
    assert (directory / "losses.json").is_file(), said
    curve = json.loads((directory / "losses.json").read_text())
    assert curve["steps"] == len(curve["loss"]) == 12
    assert sum(curve["loss"][-4:]) < 0.9 * sum(curve["loss"][:4])
    assert {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "generation_config.json",
    } <= {path.name for path in directory.iterdir()}  # fmt: skip


# -- the committed checkpoints ---------------------------------------------------------------------


def test_validation_problems_are_the_generators_and_not_held_out() -> None:
    from diffulex.bench import problem_file

    stored = problem_file.load_problems(ZOO / "validation.jsonl")
    assert stored == judge.validation_problems()
    held_out = {problem.question for problem in judge.heldout_problems()}
    assert not held_out & {problem.question for problem in stored}


def test_heldout_problems_are_the_generators() -> None:
    from diffulex.bench import problem_file

    stored = problem_file.load_problems(ZOO / "heldout.jsonl")
    assert stored == judge.heldout_problems()
    assert len(stored) == 1000
    assert [sum(p.level == level for p in stored) for level in (1, 2, 3)] == [334, 333, 333]


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_checkpoint_is_complete_and_at_most_four_megabytes(directory: str) -> None:
    from safetensors import safe_open
    from tokenizers import Tokenizer

    path = ZOO / directory
    assert sum(file.stat().st_size for file in path.iterdir()) <= 4_000_000
    with safe_open(path / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert bool(torch.isfinite(tensor).all()), name
    demo = ROOT / "python" / "diffulex" / "assets" / "demo" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer.get_vocab() == Tokenizer.from_file(str(demo)).get_vocab()
    generation = json.loads((path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == list(TokenIds.of(tokenizer).stop_ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    "directory",
    [
        DIRECTORIES[0],
        *(pytest.param(name, marks=pytest.mark.slow) for name in DIRECTORIES[1:]),
    ],
)
def test_checkpoint_solves_held_out_problems_under_its_own_strategy(directory: str) -> None:
    """Every 25th problem: 40 of them, of all levels. The whole set reaches 90 %."""
    from tokenizers import Tokenizer

    import dataset
    from evaluate import score

    path = ZOO / directory
    objective = judge.objective_of(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    problems = judge.heldout_problems()[::25]
    prompts = [
        tokenizer.encode(dataset.render_prompt(p.question), add_special_tokens=False).ids
        for p in problems
    ]
    objective.model.eval()
    setting = objective.settings(torch.device("cpu"))[0]
    report = score(tokenizer, problems, setting.decode(prompts))
    assert report["accuracy"] >= 0.8
    assert report["tpf"] > 1.0
