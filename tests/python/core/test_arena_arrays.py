# SPDX-License-Identifier: Apache-2.0
"""The lists of arrays of a step, and what is written down of them elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import diffulex_ext
from diffulex_ext import _core

OPTIONS: dict[str, object] = {"block_size": 4, "page_size": 4, "num_pages": 16, "vocab_size": 40}
OPTIONS |= {"max_num_reqs": 3, "max_model_len": 32}
#: Options under which every array is there at least once.
STRATEGIES = (
    {"logits_shift": True},
    {"is_editing": True},
    {"strategy": "fast_dllm_v2", "buffer_size": 2},
    {"strategy": "dmax", "token_merge_top_k": 3},
    {"strategy": "diffusion_gemma"},
)


def options(**fields: object) -> _core.EngineOptions:
    return _core.EngineOptions(**(OPTIONS | fields))


def properties(name: str) -> dict[str, str]:
    """dtypes of the array properties of a class of the stub."""
    stub = Path(diffulex_ext.__file__).with_name("_arena_arrays.pyi").read_text()
    body = stub.split(f"\nclass {name}Arrays:\n")[1].split("\nclass ")[0]
    return dict(re.findall(r"def (\w+)\(self\) -> npt\.NDArray\[np\.(\w+)\]", body))


@pytest.mark.parametrize("kind", [_core.StepPlan, _core.SamplerOutput])
def test_the_stub_has_every_array_with_its_dtype(kind: type[_core.StepPlan]) -> None:
    """The stub is what editors see of the expansion of the list."""
    assert properties(kind.__name__) == {f.name: f.dtype for f in kind(options()).fields()}


@pytest.mark.parametrize("kind", [_core.StepPlan, _core.SamplerOutput, _core.DecodeBatch])
def test_places_follow_the_options(kind: type[_core.StepPlan]) -> None:
    """All have the same arrays in the same order; each is there under one of the strategies."""
    present = set()
    for fields in STRATEGIES:
        places = kind(options(**fields)).fields()
        assert [f.name for f in places] == [f.name for f in kind(options()).fields()]
        ends = [f.offset + f.nbytes for f in places]
        starts = [f.offset for f in places] + [kind.arena_bytes(options(**fields))]
        assert starts[0] == 0
        assert all(e <= s < e + 256 for e, s in zip(ends, starts[1:]))
        present |= {f.name for f in places if f.nbytes > 0}
    assert present == {f.name for f in places}


def test_arrays_of_the_step_loop_have_these_shapes() -> None:
    """T rows, R requests, Nb blocks of B positions, n logits rows, K candidates, P pages."""
    opts = options(strategy="dmax", token_merge_top_k=3, buffer_size=2, max_num_batched_tokens=64)
    rows, reqs, blocks, width, pages = 64, 3, 6, 4, 8
    plan = {f.name: f.shape for f in _core.StepPlan(opts).fields()}
    assert plan["input_ids"] == (rows,)
    assert plan["cu_seqlens_q"] == (reqs + 1,)
    assert plan["logits_rows"] == (blocks * width,)
    assert plan["blk_tokens"] == (blocks, width)
    assert plan["merge_topk_ids"] == (rows, 3)
    assert plan["seed_row"] == (0,)
    assert plan["page_tables"] == (reqs, pages)
    output = {f.name: f.shape for f in _core.SamplerOutput(opts).fields()}
    assert output["write_ids"] == (blocks, width)
    assert output["merge_topk_probs"] == (blocks, width, 3)
    batch = {f.name: f.shape for f in _core.DecodeBatch(opts).fields()}
    assert batch["windows"] == (reqs, 2 * width + 2)


def test_the_first_dimension_of_an_array_has_the_name_of_the_list() -> None:
    opts = options(strategy="dmax", token_merge_top_k=3, buffer_size=2, max_num_batched_tokens=64)
    sizes = {"rows": 64, "reqs": 3, "request_ends": 4, "blocks": 6, "logits_rows": 24}
    for kind in (_core.StepPlan, _core.SamplerOutput, _core.DecodeBatch):
        used = [field for field in kind(opts).fields() if field.nbytes]
        assert [sizes[field.extent] for field in used] == [field.shape[0] for field in used]


def test_a_layout_is_its_version_and_its_numbers() -> None:
    for fields in STRATEGIES:
        opts = options(**fields)
        layout = _core.plan_layout(opts)
        kinds = (_core.StepPlan, _core.SamplerOutput, _core.DecodeBatch)
        assert _core.arena_bytes(layout) == tuple(kind.arena_bytes(opts) for kind in kinds)
        assert layout[0] == _core.plan_layout(options())[0]
        assert layout[1:] != _core.plan_layout(options())[1:]
        with pytest.raises(ValueError, match=r"^layout: expected 13 numbers of version"):
            _core.arena_bytes([layout[0] + 1, *layout[1:]])


@pytest.mark.parametrize("empty", [(1,), (2,), (1, 2)])
def test_a_layout_without_positions_is_refused(empty: tuple[int, ...]) -> None:
    """It has no rows, so that their bounds hold, but more blocks than a 32-bit index can name."""
    layout = list(_core.plan_layout(options()))
    layout[1:7] = [2**31 - 1, 2**31 - 1, layout[3], 0, 2**30 - 1, 0]
    for place in empty:
        layout[place] = 0
    with pytest.raises(ValueError, match=r"^layout: expected block_size and buffer_size of at"):
        _core.arena_bytes(layout)
