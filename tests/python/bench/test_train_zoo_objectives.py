# SPDX-License-Identifier: Apache-2.0
"""The zoo's training rows show a model what its reference decoder shows it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "examples" / "train_demo"))
sys.path.append(str(ROOT / "examples" / "train_zoo"))

import block_decoders  # noqa: E402
import canvas_decoder  # noqa: E402
import dual_cache_decoder  # noqa: E402
from model import additive_mask  # noqa: E402
from objective import TokenIds  # noqa: E402
from objective_d2f import D2F, D2FOnGrid  # noqa: E402
from objective_d2f_dream import D2FDream  # noqa: E402
from objective_diffusion_gemma import DiffusionGemma  # noqa: E402
from objective_dmax import DMax, fill_leftmost  # noqa: E402
from objective_edit import Edit  # noqa: E402
from objective_fast_dllm_v2 import FastDLLMv2  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

IDS = TokenIds(vocab_size=40, mask=39, end_of_text=37, turn_end=38, digits=tuple(range(10)))
BATCH = 16


def sequences(length: int, max_prompt: int, max_answer: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    prompt_len = torch.randint(2, max_prompt, (BATCH,), generator=generator)
    prompt_len[0], prompt_len[1] = 32, 64
    used_len = prompt_len + torch.randint(4, max_answer, (BATCH,), generator=generator)
    tokens = torch.randint(0, 37, (BATCH, length), generator=generator)
    tokens[torch.arange(length)[None] >= used_len[:, None]] = IDS.end_of_text
    return tokens, prompt_len, used_len


def randomise(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            base = 1.0 if parameter.dim() == 1 else 0.0
            parameter.copy_(base + 0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("kind", [D2F, D2FOnGrid])
def test_d2f_rows_equal_the_decoder(kind: type[D2F]) -> None:
    torch.manual_seed(0)
    objective = kind(IDS, num_layers=2)
    model = randomise(objective.model)
    tokens, prompt_len, used_len = sequences(112, 70, 40)
    rows = objective.make_rows(tokens, prompt_len, used_len)
    size, num_rows = objective.block_size, objective.max_noisy_len
    starts = block_decoders.first_block_start(prompt_len, size, kind.on_grid)
    with torch.no_grad():
        logits = model(rows["tokens"], rows["positions"], additive_mask(rows["visible"]), num_rows)
    num_checked = 0
    for index in range(BATCH):
        prompt, start = int(prompt_len[index]), int(starts[index])
        for first in sorted(set(rows["group"][index].tolist())):
            group = [b for b, g in enumerate(rows["group"][index].tolist()) if g == first]
            noisy = rows["tokens"][index, first * size : (group[-1] + 1) * size]
            known = torch.cat([tokens[index], torch.full((num_rows,), IDS.end_of_text)])
            state = torch.cat([known[: start + first * size], noisy])
            padded = torch.full((max(len(state), prompt),), IDS.mask)
            padded[: len(state)] = state
            # A first forward shows its prompt tail the prompt only.
            is_first = first == 0 and bool((noisy[prompt - start :] == IDS.mask).all())
            candidates = []
            for flag in {is_first, False}:
                row_tokens, positions, visible = block_decoders.prefix_full_rows(
                    padded[None],
                    prompt_len[index : index + 1],
                    starts[index : index + 1],
                    size,
                    prompt,
                    torch.tensor([flag]),
                )
                with torch.no_grad():
                    expected = model(row_tokens, positions, additive_mask(visible))
                candidates.append(expected[0, first * size : first * size + len(noisy)])
            got = logits[index, first * size : first * size + len(noisy)]
            assert any(torch.allclose(got, want, atol=1e-4) for want in candidates)
            num_checked += 1
    assert num_checked > 2 * BATCH


@pytest.mark.slow
def test_d2f_dream_rows_predict_the_next_position_as_in_the_decoder() -> None:
    torch.manual_seed(0)
    objective = D2FDream(IDS, num_layers=2)
    model = randomise(objective.model)
    tokens, prompt_len, used_len = sequences(112, 70, 40)
    rows = objective.make_rows(tokens, prompt_len, used_len)
    targets, weights = objective.shifted_targets(rows, tokens, prompt_len, used_len)
    size, num_rows = objective.block_size, objective.max_noisy_len
    with torch.no_grad():
        logits = model(rows["tokens"], rows["positions"], additive_mask(rows["visible"]))
    num_weighted = 0
    for index in range(BATCH):
        prompt, groups = int(prompt_len[index]), rows["group"][index].tolist()
        for block, first in enumerate(groups):
            # What a decoder runs: everything before the group is settled, the group is noisy.
            noisy = rows["tokens"][index, first * size : (block + 1) * size]
            known = torch.cat([tokens[index], torch.full((num_rows,), IDS.end_of_text)])
            state = torch.cat([known[: prompt + first * size], noisy])
            place = slice(index, index + 1)
            row_tokens, positions, visible = block_decoders.prefix_full_rows(
                state[None], prompt_len[place], prompt_len[place], size, prompt,
                torch.tensor([False]),
            )  # fmt: skip
            with torch.no_grad():
                decoder = model(row_tokens, positions, additive_mask(visible))[0]
            for place_in_answer in range(block * size, (block + 1) * size):
                at_first = place_in_answer == first * size
                if place_in_answer == 0:
                    row, want = 2 * num_rows + prompt - 1, decoder[len(state) + prompt - 1]
                else:
                    row = place_in_answer - 1 + (num_rows if at_first else 0)
                    want = decoder[place_in_answer - 1]
                torch.testing.assert_close(logits[index, row], want, atol=1e-4, rtol=0)
                assert targets[index, row] == known[prompt + place_in_answer]
                if not at_first:
                    assert weights[index, row] == rows["weights"][index, place_in_answer]
                num_weighted += int(weights[index, row] > 0)
    # No other row counts.
    assert num_weighted == int((weights > 0).sum()) > 4 * BATCH


def test_d2f_visibility_on_the_grid_is_the_prefix_full_rule() -> None:
    """Prompt 6, blocks of 4: strategies 5.2, mode 3 in the first forward, block-causal after it."""
    prompt_len, start = torch.tensor([6]), torch.tensor([4])
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    for is_first in (True, False):
        _, positions, visible = block_decoders.prefix_full_rows(
            tokens, prompt_len, start, 4, 6, torch.tensor([is_first])
        )
        seq, table = positions[0, :12], visible[0]
        assert seq[:4].tolist() == [4, 5, 6, 7]
        for row, q in enumerate(seq.tolist()[:8]):
            seen = {int(positions[0, k]) for k in range(18) if table[row, k]}
            if is_first and q < 6:
                assert seen == set(range(6))
            else:
                assert seen == set(range((q // 4 + 1) * 4))
        # Keys of the full prompt block come from rows that saw the whole prompt, tail included.
        for k in range(4):
            assert table[12 + k].nonzero().flatten().tolist() == list(range(12, 18))


def test_d2f_visibility_as_published() -> None:
    """Prompt 6, blocks of 4 at 6, 10, ...: prompt rows see the prompt alone, in every forward."""
    prompt_len, tokens = torch.tensor([6]), torch.zeros(1, 12, dtype=torch.int64)
    start = block_decoders.first_block_start(prompt_len, 4, on_grid=False)
    for is_first in (True, False):
        _, positions, visible = block_decoders.prefix_full_rows(
            tokens, prompt_len, start, 4, 6, torch.tensor([is_first])
        )
        assert positions[0, :12].tolist() == list(range(6, 18))
        for row, q in enumerate(positions[0, :12].tolist()):
            seen = [int(positions[0, k]) for k in range(18) if visible[0, row, k]]
            assert sorted(seen) == list(range(6 + ((q - 6) // 4 + 1) * 4))
        for k in range(6):
            assert visible[0, 12 + k].nonzero().flatten().tolist() == list(range(12, 18))


def test_fast_dllm_rows_equal_the_decoder() -> None:
    torch.manual_seed(0)
    objective = FastDLLMv2(IDS, num_layers=2)
    model = randomise(objective.model)
    tokens, prompt_len, used_len = sequences(128, 75, 40)
    rows = objective.make_rows(tokens, prompt_len, used_len)
    with torch.no_grad():
        logits = model(rows["tokens"], rows["positions"], additive_mask(rows["visible"]))
    num_checked = 0
    for index in range(BATCH):
        clean_start = rows["tokens"].shape[1] - 128
        for block in range(3):
            base = int(rows["positions"][index, block * 32])
            if base + 32 > 128:
                continue
            own = rows["tokens"][index, block * 32 : block * 32 + 32]
            sub_rows = slice(96 + block * 8, 104 + block * 8)
            sub = rows["tokens"][index, sub_rows]
            sub_start = rows["positions"][index, 96 + block * 8]
            clean = rows["tokens"][index, clean_start : clean_start + max(base, 32)]
            positions, visible = dual_cache_decoder.dual_cache_rows(
                torch.tensor([base]), sub_start.view(1, 1), 1, 32, 8, len(clean)
            )
            with torch.no_grad():
                want = model(torch.cat([own, sub, clean])[None], positions, additive_mask(visible))
            torch.testing.assert_close(
                logits[index, block * 32 : block * 32 + 32], want[0, :32], atol=1e-4, rtol=1e-3
            )
            torch.testing.assert_close(
                logits[index, sub_rows], want[0, 32:40], atol=1e-4, rtol=1e-3
            )
            num_checked += 1
    assert num_checked > BATCH


def test_fast_dllm_masks_are_complementary_and_targets_are_shifted() -> None:
    torch.manual_seed(0)
    objective = FastDLLMv2(IDS, num_layers=1)
    tokens, prompt_len, used_len = sequences(128, 75, 40)
    rows = objective.make_rows(tokens, prompt_len, used_len)
    noisy, positions = rows["tokens"][:, :96], rows["positions"][:, :96]
    is_mask = noisy == IDS.mask
    assert not is_mask[positions % 32 == 0].any()
    pair = is_mask[8:12].int() + is_mask[12:16].int()
    may_mask = (positions[8:12] >= prompt_len[8:12, None]) & (positions[8:12] % 32 != 0)
    assert torch.equal(pair, may_mask.int())
    weights = rows["weights"]
    row, column = weights.nonzero(as_tuple=True)
    place = rows["positions"][row, column] + 1
    padded = torch.cat([tokens, torch.full((BATCH, 97), IDS.end_of_text)], dim=1)
    order = torch.arange(BATCH)
    order[12:16] = order[8:12]
    assert torch.equal(rows["targets"][row, column], padded[order[row], place])
    # A weighted noisy or sub-block row is followed by a mask in the same block.
    inner = column < 120
    assert (rows["tokens"][row[inner], column[inner] + 1] == IDS.mask).all()
    assert (place[inner] % 32 != 0).all()
    assert (place[~inner] % 32 == 0).all()


@pytest.mark.parametrize("kind", [Edit, DMax])
def test_editing_losses_are_finite_and_reach_every_parameter(kind: type[Any]) -> None:
    torch.manual_seed(0)
    objective = kind(IDS, num_layers=2)
    objective.model.initialise(0)
    tokens, prompt_len, used_len = sequences(112, 70, 40)
    loss = objective.compute_loss(tokens, prompt_len, used_len)
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in objective.model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.abs().sum() > 0), name


def test_leftmost_fill_takes_the_prefix_or_one() -> None:
    is_mask = torch.tensor([[0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0]]).bool()
    p = torch.tensor([[0.1, 0.6, 0.9, 0.4, 0.9, 0.1, 0.3, 0.9, 0.0, 0.0, 0.0, 0.0]])
    accepted = fill_leftmost(is_mask, p, torch.tensor([[0.5]]), 4)
    assert accepted.int().tolist() == [[0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]]
    p[0, 4] = 0.2
    accepted = fill_leftmost(is_mask, p, torch.tensor([[0.5]]), 4)
    assert accepted.int().tolist() == [[0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]]


@pytest.mark.slow
def test_gemma_rows_equal_the_decoder() -> None:
    torch.manual_seed(0)
    objective = DiffusionGemma(IDS, num_layers=3)
    model = randomise(objective.model)
    tokens, prompt_len, used_len = sequences(112, 75, 40)
    rows = objective.make_rows(tokens, prompt_len, used_len)
    hidden, size = model.shape.hidden_size, model.shape.canvas_length
    signal = 0.1 * torch.randn(BATCH, 2 * size, hidden)
    fixed = (rows["context"], rows["positions"], *rows["masks"])
    with torch.no_grad():
        logits, _ = model(rows["canvas"], signal, *fixed)
    num_checked = 0
    for index in range(BATCH):
        for canvas in range(2):
            start = int(prompt_len[index]) + canvas * size
            if start > 112:
                continue
            part = slice(canvas * size, canvas * size + size)
            prefix = torch.tensor([start])
            positions, full = canvas_decoder.canvas_visibility(prefix, 1, size, start, None)
            _, sliding = canvas_decoder.canvas_visibility(
                prefix, 1, size, start, model.shape.sliding_window
            )
            with torch.no_grad():
                want, _ = model(
                    rows["canvas"][index : index + 1, part],
                    signal[index : index + 1, part],
                    tokens[index : index + 1, :start],
                    positions,
                    additive_mask(full),
                    additive_mask(sliding),
                )
            torch.testing.assert_close(logits[index, part], want[0], atol=1e-4, rtol=1e-3)
            num_checked += 1
    assert num_checked > BATCH
