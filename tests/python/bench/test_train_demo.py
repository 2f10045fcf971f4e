# SPDX-License-Identifier: Apache-2.0
"""The training script of the demo model: objective, reference decoder, a whole tiny run."""

from __future__ import annotations

import dataclasses
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
EXAMPLE = ROOT / "examples" / "train_demo"
ASSET = ROOT / "python" / "diffulex" / "assets" / "demo"
sys.path.insert(0, str(EXAMPLE))

import dataset  # noqa: E402
import evaluate  # noqa: E402
import multitf  # noqa: E402
import reference_decoder  # noqa: E402
from model import (  # noqa: E402
    ModelConfig,
    SDARForCausalLM,
    additive_mask,
    block_causal_visible,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 4
MASK_ID = 30
END_ID = 29


def tiny_model(seed: int = 0, vocab_size: int = 32) -> SDARForCausalLM:
    """A random model whose logits vary enough for confidences on both sides of 0.5."""
    config = ModelConfig(
        vocab_size=vocab_size,
        mask_token_id=MASK_ID,
        eos_token_id=END_ID,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        block_size=BLOCK,
        tie_word_embeddings=False,
    )
    model = SDARForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                std = 0.6 if name == "lm_head.weight" else 0.3
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return model.eval()


# -- model -----------------------------------------------------------------------------------------


def test_logits_equal_qwen3_of_transformers_under_the_block_mask() -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny_model()
    config = model.config
    oracle = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    ).eval()
    oracle.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 29, (2, 18), generator=torch.Generator().manual_seed(3))
    visible = block_causal_visible(18, BLOCK, tokens.device)
    dense = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[:, None].expand(2, -1, -1, -1)
    with torch.no_grad():
        expected = oracle(input_ids=tokens, attention_mask={"full_attention": dense}).logits
        got = model(tokens, torch.arange(18)[None], additive_mask(visible))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_save_and_load_round_trip_is_bf16_exact(tmp_path: Path) -> None:
    model = tiny_model()
    model.save(tmp_path)
    loaded = SDARForCausalLM.load(tmp_path)
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float()), name


# -- objective -------------------------------------------------------------------------------------


def multitf_spec(**changes: Any) -> multitf.MultiTFSpec:
    fields: dict[str, Any] = {
        "block_size": BLOCK,
        "noisy_len": 24,
        "mask_token_id": MASK_ID,
        "filler_token_id": END_ID,
    }
    return multitf.MultiTFSpec(**{**fields, **changes})


def multitf_batch(batch: int = 64) -> tuple[Any, Any, Any, multitf.MultiTFBatch]:
    torch.manual_seed(5)
    prompt_len = torch.randint(1, 14, (batch,))
    used_len = prompt_len + torch.randint(3, 16, (batch,))
    tokens = torch.randint(0, 29, (batch, 32))
    tokens[torch.arange(32)[None] >= used_len[:, None]] = END_ID
    return (
        tokens,
        prompt_len,
        used_len,
        multitf.make_batch(tokens, prompt_len, used_len, multitf_spec()),
    )


def test_groups_are_consecutive_and_bounded() -> None:
    torch.manual_seed(1)
    starts = multitf.draw_groups(500, 11, (0.4, 0.3, 0.2, 0.1), torch.device("cpu"))
    seen = set()
    for row in starts.tolist():
        assert row[0] == 0
        sizes = [row.count(start) for start in sorted(set(row))]
        assert all(start == row.index(start) for start in row)
        assert row == sorted(row)
        assert all(1 <= size <= 4 for size in sizes)
        seen.update(sizes[:-1])
    assert seen == {1, 2, 3, 4}


def test_noise_is_a_uniform_chain_inside_each_group() -> None:
    torch.manual_seed(2)
    starts = multitf.draw_groups(4000, 6, (0.3, 0.3, 0.4), torch.device("cpu"))
    noise = multitf.draw_noise(starts)
    first, second = [], []
    for row, values in zip(starts.tolist(), noise.tolist(), strict=True):
        for block, value in enumerate(values):
            if row[block] == block:
                first.append(value)
            else:
                assert value >= values[block - 1]
                if row[block] == block - 1:
                    second.append((value - values[block - 1]) / (1 - values[block - 1]))
    for draws in (first, second):
        mean = sum(draws) / len(draws)
        assert abs(mean - 0.5) < 0.02
        assert abs(sum((d - mean) ** 2 for d in draws) / len(draws) - 1 / 12) < 0.01


def test_prompt_is_never_masked_and_targets_are_masked_response_positions() -> None:
    tokens, prompt_len, used_len, batch = multitf_batch()
    for row in range(len(tokens)):
        start = int(prompt_len[row]) // BLOCK * BLOCK
        end = (-(-int(used_len[row]) // BLOCK) + 3) * BLOCK
        for index in range(24):
            position = start + index
            assert int(batch.positions[row, index]) == position
            expected = int(tokens[row, position]) if position < 32 else END_ID
            assert int(batch.targets[row, index]) == expected
            is_masked = int(batch.tokens[row, index]) == MASK_ID
            assert is_masked or int(batch.tokens[row, index]) == expected
            assert not (is_masked and position < int(prompt_len[row]))
            assert bool(batch.is_target[row, index]) == (is_masked and position < end)
    assert torch.equal(batch.tokens[:, 24:], tokens)


def test_visibility_is_clean_before_the_group_noisy_inside_it() -> None:
    _, prompt_len, _, batch = multitf_batch(batch=8)
    for row in range(8):
        first = int(prompt_len[row]) // BLOCK
        starts = batch.group_start[row].tolist()
        for i in range(24 + 32):
            for j in range(24 + 32):
                if i < 24 and j < 24:
                    block_i, block_j = i // BLOCK, j // BLOCK
                    expected = starts[block_i] == starts[block_j] and block_j <= block_i
                elif i < 24:
                    expected = (j - 24) // BLOCK < first + starts[i // BLOCK]
                elif j < 24:
                    expected = False
                else:
                    expected = (j - 24) // BLOCK <= (i - 24) // BLOCK
                assert (float(batch.mask[row, 0, i, j]) == 0.0) == expected, (row, i, j)


def test_noisy_rows_equal_a_block_causal_forward_over_clean_prefix_and_noisy_group() -> None:
    """What the model is trained on is exactly what the decoder shows it."""
    tokens, prompt_len, _, batch = multitf_batch(batch=6)
    model = tiny_model()
    with torch.no_grad():
        logits = model(batch.tokens, batch.positions, batch.mask, num_logit_rows=24)
        for row in range(6):
            first = int(prompt_len[row]) // BLOCK
            for block in range(6):
                start = int(batch.group_start[row, block])
                prefix = tokens[row, : (first + start) * BLOCK]
                if len(prefix) < (first + start) * BLOCK:
                    continue  # beyond the clean copy: only filler blocks reach this
                noisy = batch.tokens[row, start * BLOCK : (block + 1) * BLOCK]
                sequence = torch.cat([prefix, noisy])[None]
                visible = block_causal_visible(sequence.shape[1], BLOCK, sequence.device)
                positions = torch.arange(sequence.shape[1])[None]
                expected = model(sequence, positions, additive_mask(visible))[0, -BLOCK:]
                got = logits[row, block * BLOCK : (block + 1) * BLOCK]
                torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


# -- reference decoder -----------------------------------------------------------------------------


def decoding_config(**changes: Any) -> reference_decoder.DecodingConfig:
    fields: dict[str, Any] = {
        "block_size": BLOCK,
        "mask_token_id": 0,
        "stop_ids": (50,),
        "max_tokens": 10,
        "max_model_len": 64,
    }
    return reference_decoder.DecodingConfig(**{**fields, **changes})


def run_script(
    request: reference_decoder.Request, script: list[dict[int, int]]
) -> tuple[list[str], reference_decoder.Completion | None]:
    """Feed scripted writes {position: token}; returns the statuses after each forward."""
    trace: list[str] = []
    for writes in script:
        assert request.completion() is None
        request.begin_step()
        proposed = [writes.get(i, 1) for i in range(len(request.tokens))]
        confidence = [1.0 if i in writes else 0.0 for i in range(len(request.tokens))]
        request.finish_step(proposed, confidence)
        letters = {"dummy": "D", "active": "A", "to_cache": "T", "in_cache": "I"}
        trace.append("".join(letters[status.value] for status in request.statuses))
    return trace, request.completion()


def test_single_block_trace_with_a_prompt_that_ends_inside_a_block() -> None:
    """strategies 8.1: prompt 1..6, ten tokens, eight forwards."""
    request = reference_decoder.Request(decoding_config(), [1, 2, 3, 4, 5, 6])
    script = [
        {6: 7}, {7: 8}, {}, {8: 9, 9: 10}, {10: 11, 11: 12}, {},
        {12: 13, 13: 14, 14: 15}, {15: 16},
    ]  # fmt: skip
    trace, completion = run_script(request, script)
    assert trace == ["IADD", "ITDD", "IIDD", "IIAD", "IITD", "IIID", "IIIA", "IIIT"]
    assert completion == reference_decoder.Completion(
        list(range(7, 17)), 8, "max_new_tokens_reached"
    )


def test_single_block_trace_with_an_aligned_prompt() -> None:
    """The aligned prompt shares its forward with the first block."""
    request = reference_decoder.Request(decoding_config(max_tokens=4), [1, 2, 3, 4])
    trace, completion = run_script(request, [{4: 5, 6: 7}, {5: 6, 7: 8}])
    assert trace == ["IA", "IT"]
    assert completion == reference_decoder.Completion([5, 6, 7, 8], 2, "max_new_tokens_reached")


def test_multi_block_trace_with_a_stop_id() -> None:
    """strategies 8.3: four blocks in flight, stop id at position 22, seven forwards."""
    config = decoding_config(max_tokens=40, buffer_size=4)
    request = reference_decoder.Request(config, [1, 2, 3, 4, 5, 6])
    script = [
        {6: 7},
        {7: 8, 8: 9},
        {9: 10, 12: 13},
        {10: 11, 13: 14, 14: 15},
        {11: 12, 15: 16, 16: 17},
        {17: 18, 18: 19, 19: 20, 20: 21},
        {21: 22, 22: 50, 24: 25},
    ]
    trace, completion = run_script(request, script)
    expected = ["IAAD", "ITAD", "IIAAD", "IIAAAD", "IITTAD", "IIIITAD", "IIIIIAAD"]
    assert [text[: len(want)] for text, want in zip(trace, expected, strict=True)] == expected
    assert completion == reference_decoder.Completion(list(range(7, 23)), 7, "eos_token_generated")


def test_limit_stops_activation() -> None:
    """strategies 8.4: no block starts at or after the limit."""
    config = decoding_config(max_tokens=10, buffer_size=4)
    request = reference_decoder.Request(config, [1, 2, 3, 4, 5, 6])
    script = [
        {6: 7}, {7: 8, 8: 9}, {9: 10, 12: 13}, {10: 11, 13: 14, 14: 15}, {11: 12, 15: 16},
    ]  # fmt: skip
    trace, completion = run_script(request, script)
    assert trace == ["IAAD", "ITAD", "IIAA", "IIAA", "IITT"]
    assert completion == reference_decoder.Completion(
        list(range(7, 17)), 5, "max_new_tokens_reached"
    )


def test_forced_pick_takes_the_best_position_and_the_lowest_on_a_tie() -> None:
    request = reference_decoder.Request(decoding_config(), [1, 2, 3, 4, 5])
    confidence = [0.0] * 5 + [0.3, 0.6, 0.6] + [0.0] * 8
    assert request.accepted(1, confidence) == [6]


def test_threshold_is_strict_and_the_gate_holds_back_later_blocks() -> None:
    config = decoding_config(buffer_size=2, accept_threshold=0.5, max_tokens=12)
    request = reference_decoder.Request(config, [1, 2, 3, 4, 5, 6])
    request.begin_step()
    assert request.active_blocks() == [1, 2]
    confidence = [0.5] * 16
    assert request.accepted(1, confidence) == [6]  # 0.5 is not above 0.5: one forced pick
    assert request.accepted(2, confidence) == []  # its predecessor is half full: no forced pick
    confidence[9] = 0.6
    assert request.accepted(2, confidence) == [9]


def test_mask_is_never_proposed_but_stays_in_the_normaliser() -> None:
    model = tiny_model()
    tokens = torch.full((1, 8), MASK_ID)
    visible = block_causal_visible(8, BLOCK, tokens.device)
    with torch.no_grad():
        model.lm_head.weight[MASK_ID] += 3.0 * model.model.norm.weight
        logits = model(tokens, torch.arange(8)[None], additive_mask(visible)).double()
    ids, confidence = reference_decoder.propose(model, tokens, num_candidates=32)
    probabilities = logits.softmax(-1)
    probabilities[..., MASK_ID] = 0.0
    assert torch.equal(ids, probabilities.argmax(-1))
    torch.testing.assert_close(confidence.double(), probabilities.amax(-1), atol=1e-6, rtol=1e-5)


def greedy_one_by_one(model: SDARForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Independent oracle for a threshold of 1: one position a forward, block by block."""
    tokens = list(prompt)
    goal = len(prompt) + num_tokens
    while len(tokens) < goal or len(tokens) % BLOCK:
        tokens.append(MASK_ID)
    for start in range(len(prompt) // BLOCK * BLOCK, len(tokens), BLOCK):
        while MASK_ID in tokens[start : start + BLOCK]:
            prefix = torch.tensor([tokens[: start + BLOCK]])
            visible = block_causal_visible(prefix.shape[1], BLOCK, prefix.device)
            with torch.no_grad():
                logits = model(prefix, torch.arange(prefix.shape[1])[None], additive_mask(visible))[
                    0
                ].double()
            probabilities = logits.softmax(-1)
            probabilities[:, MASK_ID] = 0.0
            best = max(
                (i for i in range(start, start + BLOCK) if tokens[i] == MASK_ID),
                key=lambda i: (float(probabilities[i].max()), -i),
            )
            tokens[best] = int(probabilities[best].argmax())
    return tokens[len(prompt) : goal]


@pytest.mark.parametrize("buffer_size", [1, 2, 4])
def test_decode_with_threshold_one_is_one_token_a_forward(buffer_size: int) -> None:
    model = tiny_model(seed=4)
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1, 8], [9], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5]]
    config = decoding_config(
        mask_token_id=MASK_ID, stop_ids=(), accept_threshold=1.0, add_block_threshold=1.0,
        buffer_size=buffer_size, max_tokens=11,
    )  # fmt: skip
    completions = reference_decoder.decode(
        model, prompts, config, device=torch.device("cpu"), num_candidates=32
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == greedy_one_by_one(model, prompt, 11)


@pytest.mark.parametrize("buffer_size", [1, 4])
def test_requests_do_not_influence_one_another(buffer_size: int) -> None:
    model = tiny_model(seed=6)
    config = decoding_config(
        mask_token_id=MASK_ID, stop_ids=(END_ID,), accept_threshold=0.4,
        buffer_size=buffer_size, max_tokens=20,
    )  # fmt: skip
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8], [9], [5] * 10]
    decode: Callable[..., list[reference_decoder.Completion]] = reference_decoder.decode
    options = {"device": torch.device("cpu"), "num_candidates": 32}
    together = decode(model, prompts, config, **options)
    narrow = decode(model, prompts, config, **options, max_batch=2)
    alone = [decode(model, [prompt], config, **options)[0] for prompt in prompts]
    assert together == alone == narrow
    assert len({completion.nfe for completion in alone}) > 1


def test_bad_prompt_length_is_an_error() -> None:
    for prompt in ([], [1] * 64):
        with pytest.raises(ValueError, match="expected a prompt length"):
            reference_decoder.Request(decoding_config(), prompt)


# -- tokenizer -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tokenizer_is_deterministic_keeps_digits_apart_and_round_trips_utf8() -> None:
    tokenizer = dataset.build_tokenizer(num_problems=2000)
    assert tokenizer.to_str() == dataset.build_tokenizer(num_problems=2000).to_str()
    assert tokenizer.get_vocab_size() == dataset.VOCAB_SIZE
    for text in ("Zoë has 1234 naïve 苹果 🍎.\n\n\tEnd", "12*34=408\n#### 408", " 7 ", "١٢٣ ²"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    encoding = tokenizer.encode("1234*56=7890", add_special_tokens=False)
    assert encoding.tokens == list("1234*56=7890")
    for token in tokenizer.get_vocab():
        assert len(token) == 1 or not any(
            character.isascii() and character.isdigit() for character in token
        )


# -- whole run -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tiny_run_trains_saves_and_judges(tmp_path: Path) -> None:
    command = [
        sys.executable, str(EXAMPLE / "train.py"), "--out", str(tmp_path / "out"),
        "--steps", "24", "--batch", "8", "--hidden", "64", "--intermediate", "128",
        "--layers", "1", "--device", "cpu", "--workers", "1", "--warmup", "5", "--eval", "4",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "remaining" in result.stdout
    losses = json.loads((tmp_path / "out" / "losses.json").read_text())
    assert len(losses) == 24
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    reports = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert [report["buffer_size"] for report in reports] == [1, 4]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "generation_config.json", "heldout.jsonl",
    } <= names  # fmt: skip


# -- the committed model ---------------------------------------------------------------------------


def test_asset_is_an_sdar_checkpoint_of_at_most_nine_megabytes() -> None:
    assert sum(path.stat().st_size for path in ASSET.iterdir()) <= 9_000_000
    fields = json.loads((ASSET / "config.json").read_text())
    assert fields["architectures"] == ["SDARForCausalLM"]
    assert fields["model_type"] == "sdar"
    from safetensors import safe_open

    with safe_open(ASSET / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert bool(torch.isfinite(tensor).all()), name


@pytest.mark.slow
def test_asset_tokenizer_is_what_the_script_builds() -> None:
    from tokenizers import Tokenizer

    asset = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    assert asset.get_vocab() == dataset.build_tokenizer().get_vocab()


def test_asset_tokenizer_loads_without_remote_code_and_renders_chatml() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(ASSET)
    fields = json.loads((ASSET / "config.json").read_text())
    assert tokenizer.mask_token_id == fields["mask_token_id"]
    assert tokenizer.eos_token_id == fields["eos_token_id"]
    assert len(tokenizer) == fields["vocab_size"]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 eggs é"}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt == dataset.render_prompt("2 eggs é")
    longer = [*turns, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    prompt = tokenizer.apply_chat_template(longer, tokenize=False, add_generation_prompt=True)
    assert prompt == dataset.render_prompt("3")
    assert (ASSET / "chat_template.jinja").read_text() == dataset.CHAT_TEMPLATE
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
    generation = json.loads((ASSET / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(
        ["<|im_end|>", "<|endoftext|>"]
    )


def test_held_out_sequences_fit_the_training_lengths_but_for_one() -> None:
    from tokenizers import Tokenizer

    from diffulex.bench import problem_file
    from train import CLEAN_LEN, NOISY_LEN

    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    lengths = []
    for problem in problem_file.load_problems(ASSET / "heldout.jsonl"):
        prompt, answer = dataset.encode_problem(tokenizer, problem)
        lengths.append(len(prompt) + len(answer))
        assert len(prompt) % 8 + len(answer) <= NOISY_LEN
    # Training drops the few longer draws; the held-out set has one, less than a block longer.
    assert max(lengths) <= CLEAN_LEN + 8
    assert sum(length > CLEAN_LEN for length in lengths) == 1


@pytest.mark.slow
def test_batches_do_not_depend_on_the_number_of_workers() -> None:
    spec = dataset.SequenceSpec(
        seed=1, length=144, block_size=8, max_noisy_len=64, excluded=frozenset(),
        tokenizer_json=(ASSET / "tokenizer.json").read_text(encoding="utf-8"),
    )  # fmt: skip
    short = dataclasses.replace(spec, length=48)
    pool = dataset.start_workers(1)
    with pytest.raises(ValueError, match="at least half of the problems, got length 48"):
        list(dataset.iterate_batches(pool, short, 700, 3))
    pool.terminate()
    runs = []
    for num_workers in (1, 2):
        pool = dataset.start_workers(num_workers)
        runs.append(list(dataset.iterate_batches(pool, spec, 700, 3)))
        pool.terminate()
    for one, two in zip(*runs, strict=True):
        assert one.tokens.shape == (700, 144)
        assert (one.tokens == two.tokens).all()
        assert (one.prompt_len == two.prompt_len).all()
        assert (one.used_len == two.used_len).all()
        assert (one.used_len <= 144).all()


@pytest.mark.slow
def test_asset_solves_held_out_problems_and_several_blocks_are_faster() -> None:
    # Every 50th problem: 20 of them, of all levels.
    from tokenizers import Tokenizer

    from diffulex.bench import problem_file

    model = SDARForCausalLM.load(ASSET).eval()
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    problems = problem_file.load_problems(ASSET / "heldout.jsonl")[::50]
    reports = [
        evaluate.evaluate(model, tokenizer, problems, setting, torch.device("cpu"))
        for setting in evaluate.REQUIRED
    ]
    for report in reports:
        assert report["accuracy"] >= 0.9
    assert reports[0]["tpf"] > 1.5
    assert reports[1]["tpf"] >= 1.15 * reports[0]["tpf"]
