# SPDX-License-Identifier: Apache-2.0
"""A cache that a request chooses: as an engine's, nothing of it is left, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

import torch  # noqa: E402

from diffulex.omni import (  # noqa: E402
    ModelLoadError,
    RequestAborted,
    RequestError,
    UnsupportedFeatureError,
    support,
)
from diffulex.omni.request import make_request  # noqa: E402
from fixtures.omni_tiny import FRAMES, IDENTITY, counted_compilation, offloaded, open_engine  # noqa: E402

SMALL = {"height": 64, "width": 64, "num_inference_steps": 12, "output_type": "latent", "seed": 3}
#: What changes little between steps: far below it on every processor.
CHOICE = {"cache_backend": "cache_dit", "cache_config": {"residual_diff_threshold": 0.9}}
OF_ENGINE = {"cache_backend": "cache_dit", "residual_diff_threshold": 0.9}

pytestmark = pytest.mark.usefixtures("one_thread")


def draw(engine, name="qwen", **fields):
    """Latents of a picture, and what its cache has done."""
    (output,) = engine.generate("a cat", **{**SMALL, **FRAMES.get(name, {}), **fields})
    return output.latents[0], output.metrics.get("cache")


@pytest.mark.parametrize("name", ["qwen", "flux", "wan", "sd3", "z_image"])
def test_a_request_chooses_as_an_engine_does(tiny, name):
    """Bit by bit, and requests before and after it know nothing of it."""
    with open_engine(tiny, name, **OF_ENGINE) as engine:
        cached, account = draw(engine, name)
        plain, nothing = draw(engine, name, cache_backend="none")
        assert nothing is None
        assert not torch.equal(plain, cached)
        assert torch.equal(draw(engine, name)[0], cached)
        latents, exact = draw(engine, name, cache_config={"residual_diff_threshold": 0})
        assert torch.equal(latents, plain)
        assert exact["transformer"]
    with open_engine(tiny, name) as engine:
        for fields, latents, found in (({}, plain, None), (CHOICE, cached, account)) * 2:
            drawn = draw(engine, name, **fields)
            assert torch.equal(drawn[0], latents)
            assert drawn[1] == found
        if name in ("qwen", "flux"):
            tea = {"rel_l1_thresh": 1e9, "coefficients": IDENTITY}
            _, found = draw(engine, name, cache_backend="TEA-cache", cache_config=tea)
            (skipped,) = {len(branch["cached"]) for branch in found["transformer"].values()}
            assert skipped == SMALL["num_inference_steps"] - 2


def test_nothing_of_the_cache_of_a_request_stays_on_the_device(tiny):
    """Neither after one that is stopped; the engine's own tells of its last call."""
    with open_engine(tiny) as engine:
        worker = engine.engine._worker
        assert draw(engine, **CHOICE)[1]["transformer"]
        assert worker._cache.branches() == []
        kept = []

        def stop(event):
            kept.append(len(worker._cache.branches()))
            return event.step < 2

        with pytest.raises(RequestAborted):
            engine.generate_requests([make_request("a cat", {**SMALL, **CHOICE})], on_step=stop)
        assert min(kept) >= 1
        assert worker._cache.branches() == []
    with open_engine(tiny, **OF_ENGINE) as engine:
        assert draw(engine)[1] == engine.engine._worker.cache_summary()


def test_requests_of_a_batch_have_each_their_cache(tiny):
    cases = ({}, CHOICE, CHOICE, {"cache_backend": "none"})
    with open_engine(tiny, max_batch_size=4) as engine:
        alone = [draw(engine, **case)[0] for case in cases]
        requests = [make_request("a cat", {**SMALL, **case}) for case in cases]
        together = engine.generate_requests(requests)
    for latents, output in zip(alone, together, strict=True):
        # Two of them are drawn in one call.
        assert (output.latents[0] - latents).abs().max() <= 1e-5
    assert ["cache" in output.metrics for output in together] == [False, True, True, False]


@pytest.mark.slow
def test_worker_processes_have_the_cache_of_a_request(tiny):
    with open_engine(tiny) as engine:
        plain, cached = draw(engine)[0], draw(engine, **CHOICE)[0]
    with open_engine(tiny, data_parallel_size=2) as engine:
        for case, expected in ((CHOICE, cached), ({}, plain)):
            outputs = engine.generate(["a cat", "a cat"], **SMALL, **case)
            assert ["cache" in output.metrics for output in outputs] == [bool(case)] * 2
            for output in outputs:
                assert torch.equal(output.latents[0], expected)
        wrong = {"cache_backend": "cache_dit", "cache_config": {"Fn_compute_blocks": 4}}
        with pytest.raises(UnsupportedFeatureError, match="expected at most 3 for 4 blocks, got 4"):
            draw(engine, **wrong)
        # Nothing of the one that failed is left.
        assert torch.equal(draw(engine)[0], plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "name"),
    [("ulysses_degree", "wan"), ("ring_degree", "qwen"), ("cfg_parallel_size", "qwen")],
)
def test_ranks_that_share_a_picture_take_the_cache_of_a_request(tiny, axis, name):
    """What compares tokens sees those of its rank, also where it comes after what shares them.

    Those of Wan are shared at its first block.
    """
    with open_engine(tiny, name, **OF_ENGINE, **{axis: 2}) as engine:
        cached, account = draw(engine, name)
        plain, _ = draw(engine, name, cache_backend="none")
        assert torch.equal(draw(engine, name)[0], cached)
    with open_engine(tiny, name, **{axis: 2}) as engine:
        for case, latents, found in (({}, plain, None), (CHOICE, cached, account)) * 2:
            drawn = draw(engine, name, **case)
            assert torch.equal(drawn[0], latents)
            assert drawn[1] == found


@pytest.mark.slow
def test_compiled_blocks_take_the_cache_of_a_request(tiny):
    with open_engine(tiny) as engine:
        plain, cached = draw(engine)[0], draw(engine, **CHOICE)[0]
    with counted_compilation() as (keywords, graphs), open_engine(tiny, **keywords) as engine:
        for case, expected in (({}, plain), (CHOICE, cached)) * 2:
            assert torch.equal(draw(engine, **case)[0], expected)
        assert graphs


def test_offloaded_blocks_take_the_cache_of_a_request(tiny):
    with open_engine(tiny) as engine:
        plain, cached = draw(engine)[0], draw(engine, **CHOICE)[0]
    with open_engine(tiny, dit_cpu_offload=True) as engine:
        assert set(offloaded(engine)) == {"transformer"}
        for case, expected in (({}, plain), (CHOICE, cached), ({}, plain)):
            assert torch.equal(draw(engine, **case)[0], expected)


def test_offload_with_a_stream_asks_for_a_cache_at_the_start(tiny, monkeypatch):
    """The stream loads the block that follows, which a cache may skip."""
    monkeypatch.setattr(support, "resolve_device", lambda *_: "cuda")
    with open_engine(tiny) as engine:
        found, memory = engine.engine._found, replace(engine.config.memory, dit_cpu_offload=True)
        config = replace(engine.config, memory=memory)
    cache = replace(config.cache, **OF_ENGINE)
    with pytest.raises(UnsupportedFeatureError, match="expected none with dit_cpu_offload"):
        support.check_chosen_cache(config, cache, found)
    support.check_chosen_cache(replace(config, cache=cache), cache, found)
    memory = replace(memory, pin_cpu_memory=False)
    support.check_chosen_cache(replace(config, memory=memory), cache, found)


def test_what_a_request_may_not_choose(tiny):
    def refused(engine, **fields):
        with pytest.raises(RequestError) as raised:
            draw(engine, **fields)
        return str(raised.value)

    names = "cache_backend: expected one of none, tea_cache, cache_dit, got"
    cases = [
        ({"cache_backend": "x"}, f"{names} 'x'"),
        ({"cache_backend": 3}, f"{names} 3"),
        ({"cache_config": 3}, "cache_config: expected a mapping, got 3"),
        (
            {"cache_config": {"taylorseer_order": 1}},
            "cache_config: expected a cache_backend with it, got none",
        ),
        (
            {**CHOICE, "cache_config": {"taylor_order": 1}},
            "cache_config: expected a known key, nearest is 'taylorseer_order', got 'taylor_order'",
        ),
        (
            {**CHOICE, "cache_config": {"taylorseer_order": 5}},
            "taylorseer_order: expected int [0, 4], got 5",
        ),
    ]
    with open_engine(tiny) as engine:
        for fields, expected in cases:
            assert refused(engine, **fields) == expected
    with open_engine(tiny, "z_image") as engine:
        expected = "cache_backend: expected none or cache_dit for ZImagePipeline, got 'tea_cache'"
        assert refused(engine, cache_backend="tea_cache") == expected
        assert engine.engine.caches() == ("none", "cache_dit")
    with open_engine(tiny, "ovis") as engine:
        expected = "cache_backend: expected none for OvisImagePipeline, got cache_dit"
        assert refused(engine, **CHOICE) == expected
        assert engine.engine.caches() == ("none",)


def test_an_engine_may_forbid_caches_of_requests(tiny):
    with open_engine(tiny, **OF_ENGINE, allow_request_cache=False) as engine:
        for name, given, shown in (
            ("cache_backend", "none", "'none'"),
            ("cache_config", {"taylorseer_order": 1}, "{'taylorseer_order': 1}"),
            ("cache_config", {"scm_steps_mask": [1] * 200}, f"{{'scm_steps_mask': [{'1, ' * 26}1,"),
        ):
            with pytest.raises(RequestError) as raised:
                draw(engine, **{name: given})
            expected = (
                f"{name}: expected to be left out with allow_request_cache false, got {shown}"
            )
            assert str(raised.value) == expected
        assert engine.engine.caches() == ()
        assert draw(engine)[1]["transformer"]


def test_requests_read_nothing_of_the_model(tiny, tmp_path):
    """What is known of it was read at the start: files that go or break later change nothing."""
    model = shutil.copytree(tiny("qwen"), tmp_path / "model")
    record = model / "shapes.json"
    record.write_text(json.dumps({"tea_cache": {"coefficients": IDENTITY, "rel_l1_thresh": 1e9}}))
    tea = {"cache_backend": "tea_cache"}
    with open_engine(lambda _: model) as engine:
        latents, account = draw(engine, **tea)
        (skipped,) = {len(branch["cached"]) for branch in account["transformer"].values()}
        assert skipped == SMALL["num_inference_steps"] - 2
        record.write_text("{")
        (model / "transformer" / "config.json").unlink()
        assert {*engine.engine.caches()} == {"none", "tea_cache", "cache_dit"}
        assert torch.equal(draw(engine, **tea)[0], latents)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "shapes.json: expected readable JSON"),
        ('{"tea_cache": []}', r"shapes.json: expected 5 coefficients in tea_cache, got \[\]"),
        ('{"tea_cache": {"coefficients": [1]}}', "coefficients: expected floats 5 numbers, got"),
        (
            '{"tea_cache": {"coefficients": [1, 2, 3, 4, 5], "rel_l1_thresh": "low"}}',
            "shapes.json: tea_cache: rel_l1_thresh: expected float > 0, got 'low'",
        ),
    ],
)
def test_a_broken_record_is_an_error_of_the_start(tiny, tmp_path, content, message):
    """Also without a cache, since requests may choose one."""
    model = shutil.copytree(tiny("qwen"), tmp_path / "model")
    (model / "shapes.json").write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        open_engine(lambda _: model)


@pytest.mark.slow
def test_stages_of_blocks_exclude_the_cache_of_a_request(tiny):
    with open_engine(tiny, pipeline_parallel_size=2) as engine:
        expected = "cache_backend: expected none with pipeline_parallel_size above 1, got cache_dit"
        with pytest.raises(RequestError, match=expected):
            draw(engine, **CHOICE)
        assert draw(engine, cache_backend="none")[1] is None
