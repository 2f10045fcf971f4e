# SPDX-License-Identifier: Apache-2.0
"""Several gloo ranks draw what one process draws, for every pipeline that can be shared that way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

import torch  # noqa: E402

from diffulex.omni.config import OmniDiffusionConfig  # noqa: E402
from diffulex.omni.config_table import DiffusionCacheConfig  # noqa: E402
from diffulex.omni.loader import load_pipeline  # noqa: E402
from diffulex.omni.worker import Worker  # noqa: E402
from fixtures.omni_rank import make_calls  # noqa: E402

# Every rank imports torch and diffusers and draws dozens of cases; the host may do other work.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RANK = Path(__file__).resolve().parents[1] / "fixtures/omni_rank.py"
TIGHT = 1e-5
#: Of latents around 1 in 16 bits, after three steps.
COARSE = 0.1

#: Arguments of a call with guidance, per pipeline.
GUIDED = {
    "qwen": {"true_cfg_scale": 4.0},
    "flux": {"true_cfg_scale": 3.0, "guidance_scale": 3.5},
    "sd3": {"guidance_scale": 7.0},
    "z_image": {"guidance_scale": 5.0},
    "wan": {"guidance_scale": 5.0, "num_frames": 5},
    "wan22": {"guidance_scale": 5.0, "guidance_scale_2": 3.0, "num_frames": 5},
}


def make_call(name, prompts=("a cat",), has_guidance=True, **arguments):
    off = {key: 0.0 if name == "z_image" else 1.0 for key in GUIDED[name] if "cfg" in key}
    if name not in ("qwen", "flux"):
        off = {"guidance_scale": 0.0 if name == "z_image" else 1.0}
    return {
        "request_ids": [str(number) for number in range(len(prompts))],
        "prompts": list(prompts),
        "negative_prompts": ["bad"] * len(prompts) if has_guidance else None,
        "seeds": list(range(7, 7 + len(prompts))),
        "height": 64,
        "width": 64,
        "num_inference_steps": 3,
        "output_type": "latent",
        "arguments": {**GUIDED[name], **({} if has_guidance else off), **arguments},
    }


def draw_ranks(cases, directory):
    """Latents of every case and the account of its cache, by as many ranks as the first one needs."""
    world = 1
    for size in cases[0]["sizes"].values():
        world *= size
    file, out = directory / "cases.json", directory / "out.pt"
    file.write_text(json.dumps(cases))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, RANK, file, str(rank), directory, out],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(errors)[-4000:]
    return list(torch.load(out).values())


def draw_alone(case):
    config = OmniDiffusionConfig.from_kwargs(model=case["model"], device="cpu", **case["keywords"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        worker, calls = Worker(load_pipeline(config)), make_calls(case)
        drawn = list(worker.run([replace(call, replica=0) for call in calls], None))
    finally:
        torch.set_num_threads(threads)
    return torch.stack([image for item in drawn for image in item.images]), drawn[0].cache


def check(cases, tmp_path):
    for case, (got, cache) in zip(cases, draw_ranks(cases, tmp_path), strict=True):
        expected, alone = draw_alone(case)
        where = f"{Path(case['model']).name} {case['sizes']} {case['call']['prompts']}"
        assert torch.isfinite(got).all(), where
        assert decisions(cache) == decisions(alone), where
        has_cache = "cache_backend" in case["keywords"] or "cache" in case["call"]
        assert bool(cache) == has_cache, where
        if is_exact(case):
            assert torch.equal(got, expected), where
        else:
            difference = (got - expected).abs().max().item()
            most = COARSE if case["keywords"].get("dtype") == "bfloat16" else TIGHT
            assert difference <= most, f"{where}: {difference}"


def decisions(cache):
    """Cached steps by branch: the same on every rank, as they would wait for each other otherwise."""
    branches = (cache or {}).get("transformer", {})
    assert all(branch["cached"] for branch in branches.values())
    return {name: branch["cached"] for name, branch in branches.items()}


def make_cached(tiny, sizes, names):
    """Both caches in eight steps, at thresholds that are far from every change."""
    cached = []
    for name in names:
        (case,) = make_cases(tiny, sizes, [(name, make_call(name))])
        case["call"]["num_inference_steps"] = 8
        settings = [{"cache_backend": "cache_dit", "residual_diff_threshold": 0.9}]
        tea = {"cache_backend": "tea_cache", "rel_l1_thresh": 1e9, "coefficients": [0, 0, 0, 1, 0]}
        if name != "z_image":
            settings.append(tea)
        cached += [{**case, "keywords": keywords} for keywords in settings]
        # A request's own, whose hooks come later than all others.
        call = {**case["call"], "cache": asdict(DiffusionCacheConfig(**settings[0]))}
        cached.append({**case, "call": call})
    return cached


def make_cases(tiny, sizes, calls):
    """One case per (name of a pipeline, its call)."""
    return [
        {"model": str(tiny(name)), "sizes": sizes, "call": call, "keywords": {}}
        for name, call in calls
    ]


def make_half(tiny, sizes, names=("qwen",)):
    """In 16 bits, as on a GPU."""
    cases = make_cases(tiny, sizes, [(name, make_call(name)) for name in names])
    return [{**case, "keywords": {"dtype": "bfloat16"}} for case in cases]


def is_exact(case):
    """The same products: blocks on several ranks, and two calls of the transformer.

    Half a batch is rounded otherwise.
    """
    has_two_calls = Path(case["model"]).name in ("qwen", "flux", "wan", "wan22")
    return set(case["sizes"]) <= {"pp", "dp"} | ({"cfg"} if has_two_calls else set())


#: Guidance by the two pairs of calls, and by halves of a batch; off, and off for some steps.
BRANCHES = [
    *((name, make_call(name)) for name in GUIDED),
    ("qwen", make_call("qwen", ("a cat", "two very long dogs"))),
    ("qwen", make_call("qwen", has_guidance=False)),
    ("sd3", make_call("sd3", ("a", "b"))),
    ("sd3", make_call("sd3", has_guidance=False)),
    ("z_image", make_call("z_image", cfg_truncation=0.5)),
]
#: Prompts of one length, an odd one, and two of different lengths, which brings a mask.
TOKENS = [
    ("qwen", make_call("qwen")),
    ("qwen", make_call("qwen", ("a",))),
    ("qwen", make_call("qwen", ("a cat", "two very long dogs"))),
    ("flux", make_call("flux")),
    ("wan", make_call("wan")),
    ("wan22", make_call("wan22")),
]
HEADS = [(name, make_call(name)) for name in ("qwen", "flux", "sd3")]
BLOCKS = [(name, make_call(name)) for name in GUIDED]
BOTH = [(name, make_call(name)) for name in ("qwen", "flux")]


@pytest.fixture
def models(tiny, wan22):
    """Of all tests here: Wan 2.2 is one of the pipelines."""
    return lambda name: wan22 if name == "wan22" else tiny(name)


def test_two_ranks(models, tmp_path):
    cases = make_cases(models, {"cfg": 2}, BRANCHES) + make_cases(models, {"tp": 2}, HEADS)
    cases += make_cases(models, {"pp": 2}, BLOCKS)
    for axis in ("ulysses", "ring"):
        cases += make_cases(models, {axis: 2}, TOKENS)
        cases += make_cached(models, {axis: 2}, ("qwen", "wan"))
    cases += make_cached(models, {"cfg": 2}, ("qwen", "wan", "sd3"))
    cases += make_cached(models, {"tp": 2}, ("qwen", "flux"))
    for axis in ("cfg", "tp", "pp", "ulysses", "ring"):
        cases += make_half(models, {axis: 2}, ("qwen", "wan") if axis == "ulysses" else ("qwen",))
    check(cases, tmp_path)


def test_three_ranks(models, tmp_path):
    """Shares of different lengths, uneven heads, stages without a block, replicas without a picture."""
    cases = make_cases(models, {"ulysses": 3}, TOKENS) + make_cases(models, {"ring": 3}, TOKENS)
    cases += make_cases(models, {"pp": 3}, BOTH)
    prompts = ("a cat", "two dogs", "a bird", "b", "c")
    cases += make_cases(
        models, {"dp": 3}, [("qwen", make_call("qwen", prompts[:count])) for count in (1, 2, 5)]
    )
    check(cases, tmp_path)


def test_four_ranks(models, tmp_path):
    """Several ways at once."""
    cases = make_cases(models, {"ulysses": 2, "ring": 2}, TOKENS)
    for sizes in ({"ulysses": 4}, {"ring": 4}):
        cases += make_cases(models, sizes, TOKENS)
    cases += make_cases(models, {"ulysses": 2, "cfg": 2}, [("wan22", make_call("wan22"))])
    for sizes in (
        {"ulysses": 2, "cfg": 2},
        {"tp": 2, "ulysses": 2},
        {"tp": 2, "cfg": 2},
        {"ring": 2, "cfg": 2},
        {"pp": 2, "cfg": 2},
        {"pp": 2, "tp": 2},
        {"pp": 2, "ulysses": 2},
    ):
        cases += make_cases(models, sizes, BOTH)
    cases += make_cases(
        models, {"dp": 2, "cfg": 2}, [("qwen", make_call("qwen", ("a", "two dogs")))]
    )
    cases += make_cached(models, {"ring": 2, "cfg": 2}, ("qwen",))
    check(cases, tmp_path)
