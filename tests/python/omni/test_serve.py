# SPDX-License-Identifier: Apache-2.0
"""The images API: what its client gets, what is refused, clients that leave, the command."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from unittest.mock import MagicMock

import numpy as np
import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")
pytest.importorskip("fastapi", reason="pip install '.[serve]'")

import openai  # noqa: E402
from PIL import Image  # noqa: E402

from diffulex.errors import ConfigError  # noqa: E402
from diffulex.omni import (  # noqa: E402
    AsyncOmniDiffusion,
    OmniDiffusion,
    RequestError,
    WorkerDeadError,
)
from diffulex.omni.images_metrics import ImagesMetrics  # noqa: E402
from diffulex.omni.images_routes import as_failure  # noqa: E402
from diffulex.omni.serve import ServeOptions, create_images_app  # noqa: E402
from diffulex.omni.videos_routes import VideoRequest  # noqa: E402
from diffulex.tools.cli import main  # noqa: E402
from fixtures.omni_http import WAIT_S, ask  # noqa: E402

PATH = "/v1/images/generations"
SMALL = {
    "prompt": "a cat",
    "size": "64x64",
    "seed": 1,
    "num_inference_steps": 4,
    "true_cfg_scale": 1,
}


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    path = shutil.copytree(tiny("qwen"), tmp_path_factory.mktemp("serve") / "painter")
    defaults = {"height": 64, "width": 64, "num_inference_steps": 4, "true_cfg_scale": 1.0}
    (path / "generation_config.json").write_text(json.dumps({"diffulex": defaults}))
    return path


def picture(text):
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_the_client_of_openai_gets_pictures_and_previews(model):
    with OmniDiffusion(model=str(model)) as engine:
        (plain,) = engine.generate("a cat", seed=1, num_outputs_per_prompt=2)

    async def body(http, _engine):
        client = openai.AsyncOpenAI(api_key="-", base_url="http://localhost/v1", http_client=http)
        answer = await client.images.generate(
            model="painter", prompt="a cat", n=2, size="64x64",  # type: ignore[call-overload]
            extra_body={"seed": 1},
        )  # fmt: skip
        stream = await client.images.generate(
            model="painter", prompt="a cat", stream=True, partial_images=1, output_format="webp",
            extra_body={"seed": 1},
        )  # fmt: skip
        return answer, [event async for event in stream], await client.models.list()

    answer, events, models = ask(model, body)
    assert answer.size == "64x64"
    assert answer.model_extra["diffulex"]["seeds"] == [1, 2]
    for item, expected in zip(answer.data, plain.images, strict=True):
        assert np.array_equal(np.asarray(picture(item.b64_json)), np.asarray(expected))
    assert [event.type for event in events] == [
        "image_generation.partial_image", "image_generation.completed",
    ]  # fmt: skip
    assert events[0].partial_image_index == 0
    assert events[0].diffulex == {"step": 2, "num_steps": 4}
    assert all(picture(event.b64_json).format == "WEBP" for event in events)
    assert events[1].size == "64x64"
    assert [item.id for item in models.data] == ["painter"]


def test_more_previews_than_three(model):
    async def body(client, _engine):
        fields = {**SMALL, "num_inference_steps": 7, "stream": True}
        answer = await client.post(PATH, json={**fields, "diffulex": {"preview_every": 1}})
        return answer.text

    frames = ask(model, body).strip().split("\n\n")
    assert frames.pop() == "data: [DONE]"
    kinds = [frame.split("\n")[0].removeprefix("event: ") for frame in frames]
    assert kinds == ["image_generation.partial_image"] * 6 + ["image_generation.completed"]
    steps = [json.loads(frame.split("data: ")[1])["diffulex"] for frame in frames[:-1]]
    assert steps == [{"step": step, "num_steps": 7} for step in range(1, 7)]


def test_a_schedule_of_the_client(model):
    """The picture is that of the engine, and previews are counted in its steps."""
    fields = {**SMALL, "sigmas": [1, 0.6, 0.3], "num_inference_steps": None}

    async def body(client, engine):
        answer = await client.post(PATH, json=fields)
        streamed = await client.post(PATH, json={**fields, "stream": True, "partial_images": 2})
        size = dict(zip(("width", "height"), map(int, SMALL["size"].split("x"))))
        given = {"seed": SMALL["seed"], "sigmas": fields["sigmas"], **size}
        return answer, streamed.text, await engine.generate(SMALL["prompt"], **given)

    answer, streamed, output = ask(model, body)
    (image,) = answer.json()["data"]
    assert np.array_equal(np.asarray(picture(image["b64_json"])), np.asarray(output.images[0]))
    assert answer.json()["diffulex"]["num_inference_steps"] == 3
    for number in (1, 2):
        assert f'"step":{number},"num_steps":3' in streamed.replace(" ", "")


def test_a_cache_of_the_client(model):
    """The picture is that of the engine; requests without one are drawn as before, and it is counted."""
    fields = {**SMALL, "num_inference_steps": 8}
    config = {"residual_diff_threshold": 0.9, "max_warmup_steps": 2}
    choice = {"cache_backend": "cache_dit", "cache_config": config}

    async def body(client, engine):
        answers = [
            (await client.post(PATH, json={**fields, **more})).json()
            for more in ({}, choice, {"cache_backend": "none"})
        ]
        given = {"height": 64, "width": 64, "num_inference_steps": 8, "seed": 1, **choice}
        output = await engine.generate("a cat", **given)
        return answers, output, (await client.get("/metrics")).text

    answers, output, metrics = ask(model, body)
    first, cached, last = (np.asarray(picture(a["data"][0]["b64_json"])) for a in answers)
    assert np.array_equal(first, last)
    assert np.array_equal(cached, np.asarray(output.images[0]))
    assert not np.array_equal(cached, first)
    assert ["cache" in answer["diffulex"] for answer in answers] == [False, True, False]
    skipped = [
        len(branch["cached"]) for branch in answers[1]["diffulex"]["cache"]["transformer"].values()
    ]
    # Of four blocks the first always runs.
    assert f"diffulex_image_cached_blocks_total {3.0 * sum(skipped)}" in metrics
    assert sum(skipped) >= 4


def test_a_server_may_forbid_caches_of_requests(model):
    async def body(client, _engine):
        forbidden = await client.post(PATH, json={**SMALL, "cache_backend": "cache_dit"})
        return forbidden, await client.post(PATH, json=SMALL)

    forbidden, plain = ask(model, body, allow_request_cache=False)
    message = (
        "cache_backend: expected to be left out with allow_request_cache false, got 'cache_dit'"
    )
    error = forbidden.json()["error"]
    assert (forbidden.status_code, error["message"]) == (400, message)
    assert error["param"] == "cache_backend"
    assert plain.status_code == 200


def test_a_request_that_takes_too_long_is_a_gateway_timeout(model):
    async def body(client, _engine):
        long = {**SMALL, "num_inference_steps": 200, "timeout_s": 0.05}
        streamed = await client.post(PATH, json={**long, "stream": True})
        return await client.post(PATH, json=long), streamed, await client.post(PATH, json=SMALL)

    late, streamed, after = ask(model, body)
    message = "request: expected an end within 0.05 s (timeout_s), got none"
    assert late.status_code == 504
    assert late.json()["error"]["message"] == message
    assert message in streamed.text
    assert after.status_code == 200


def cached(**settings):
    return {"cache_backend": "cache_dit", "cache_config": settings}


# With the field that is named where the text does not begin with it.
BAD: list[tuple] = [
    ({"timeout_s": 0}, 400, "timeout_s"),
    ({"prompt": ""}, 400, "prompt: expected some text, got ''"),
    ({"prompt": "\ud800"}, 400, "prompt: Input should be a valid string, unable to parse"),
    ({"negative_prompt": "\ud800"}, 400, r"negative_prompt: expected UTF-8 text, got '\ud800'"),
    ({"model": "other"}, 404, "model: expected one of painter, got 'other'"),
    ({"n": 11}, 400, "n"),
    ({"n": 0}, 400, "n"),
    ({"size": "64"}, 400, "size: expected WIDTHxHEIGHT or auto, got '64'"),
    ({"size": "64xx"}, 400, "size: expected WIDTHxHEIGHT or auto, got '64xx'"),
    ({"size": "0x64"}, 400, "size: expected WIDTHxHEIGHT or auto, got '0x64'"),
    ({"size": "72x64"}, 400, "width: expected a multiple of 16, got 72", "size"),
    ({"response_format": "url"}, 400, "response_format"),
    ({"output_format": "gif"}, 400, "output_format"),
    ({"seed": -1}, 400, "seed"),
    ({"num_inference_steps": 201}, 400, "num_inference_steps"),
    ({"num_inference_steps": 1}, 400, "num_inference_steps: expected at least 2"),
    ({"guidance_scale": 3}, 400, "guidance_scale: expected one of"),
    ({"negative_prompt": "b"}, 400, "negative_prompt: expected true_cfg_scale above 1"),
    ({"vae_use_tiling": True}, 400, "vae_use_tiling"),
    ({"quality": "hd"}, 400, "quality"),
    ({"latents": [[0.0]]}, 400, "latents"),
    ({"prompt_embeds": [[0.0]]}, 400, "prompt_embeds"),
    ({"sigmas": [0.5, 1.0]}, 400, "sigmas: expected 1 to 1000 falling numbers in (0, 1], got [0.5"),
    (
        {"cache_backend": "all"},
        400,
        "cache_backend: expected one of none, tea_cache, cache_dit, got",
    ),
    (
        {"cache_backend": "cache_dit", "cache_config": {"max_warmup_step": 1}},
        400,
        "cache_config: expected a known key, nearest is 'max_warmup_steps', got 'max_warmup_step'",
    ),
    (
        {"cache_config": {"max_warmup_steps": 1}},
        400,
        "cache_config: expected a cache_backend with it, got none",
    ),
    (
        {"cache_backend": "cache_dit", "cache_config": {"Fn_compute_blocks": 4}},
        400,
        "Fn_compute_blocks + Bn_compute_blocks: expected at most 3 for 4 blocks, got 4",
        "cache_config",
    ),
    (
        {"cache_backend": "cache_dit", "cache_config": {"scm_steps_mask": [1, 0]}},
        400,
        "scm_steps_mask: expected one value for each of 4 steps, got 2",
        "cache_config",
    ),
    (
        cached(scm_steps_mask=functools.reduce(lambda inner, _: [inner], range(500))),
        400,
        "cache_config",
        "cache_config.scm_steps_mask",
    ),
    (cached(scm_steps_mask=[[1]]), 400, "scm_steps_mask: ", "cache_config"),
    (
        cached(max_cached_steps=10**30),
        400,
        "max_cached_steps: expected int [-1, 2147483647], got",
        "cache_config",
    ),
    (cached(residual_diff_threshold=10**400), 400, "residual_diff_threshold: ", "cache_config"),
    ({"sigmas": []}, 400, "sigmas: "),
    ({"sigmas": [1.0] * 201}, 400, "sigmas: "),
    ({"sigmas": [1.5, 0.5]}, 400, "sigmas.0: "),
    ({"sigmas": [1.0, "0.5"]}, 400, "sigmas.1: "),
    (
        {"sigmas": [0.5], "num_inference_steps": None},
        400,
        "num_inference_steps: expected at least 2",
        "sigmas",
    ),
    ({"sigmas": [1.0, 0.5]}, 400, "num_inference_steps: expected 2 with so many sigmas, got 4"),
    ({"partial_images": 1}, 400, "partial_images: expected stream true with previews, got false"),
    ({"stream": True, "partial_images": 4}, 400, "partial_images"),
    ({"stream": True, "n": 2}, 400, "n: expected 1 with stream, got 2"),
    ({"stream": True, "size": "72x64"}, 400, "width: expected a multiple of 16, got 72", "size"),
]


def test_bad_requests_get_one_clear_error(model):
    async def body(client, _engine):
        headers = {"content-type": "application/json"}
        answers = [
            # In ASCII: a client cannot write half of a surrogate pair otherwise.
            await client.post(PATH, content=json.dumps({**SMALL, **fields}), headers=headers)
            for fields, *_ in BAD
        ]
        broken = await client.post(PATH, content="{", headers=headers)
        large = await client.post(PATH, json={**SMALL, "prompt": "a" * (1 << 20)})
        other = await client.get("/v1/nothing")
        good = await client.post(PATH, json=SMALL)
        return answers, broken, large, other, good, (await client.get("/metrics")).text

    answers, broken, large, other, good, metrics = ask(model, body)
    params, expected = {}, {}
    for answer, (fields, status, text, *param) in zip(answers, BAD, strict=True):
        error, case = answer.json()["error"], str(fields)
        assert answer.status_code == status, (fields, error)
        assert error["message"].startswith(text), (fields, error)
        assert "\n" not in error["message"]
        params[case] = error["param"].split(".list.")[0]  # of one that is too deep
        (expected[case],) = param or [text.partition(":")[0]]
    assert params == expected
    assert [item.status_code for item in (broken, large, other, good)] == [400, 413, 404, 200]
    assert 'diffulex_image_requests_total{status="200"} 1.0' in metrics
    assert "diffulex_images_total 1.0" in metrics
    assert "diffulex_image_steps_total 4.0" in metrics


@pytest.mark.parametrize(
    ("fields", "text", "picture", "param"),
    [
        ({"num_frames": 5}, "num_frames: ", None, "num_frames"),
        ({"seconds": 1}, "num_frames: ", None, "seconds"),
        ({"seconds": 1}, "num_inference_steps: ", None, "num_inference_steps"),
        ({}, "timeout_s: ", None, None),
        ({}, "expected more", None, None),
        ({}, "pil_image: ", None, None),
        ({}, "pil_image: ", "input_reference", "input_reference"),
        ({}, "input_reference: ", "input_reference", "input_reference"),
        ({}, "scm_steps_mask: ", None, None),
        ({"cache_backend": "tea_cache"}, "coefficients: ", None, "cache_config"),
        ({"cache_config": {}}, "max_warmup_steps: ", None, "cache_config"),
    ],
)
def test_errors_name_fields_of_their_request(fields, text, picture, param):
    body, metrics = VideoRequest(prompt="a cat", **fields), ImagesMetrics(MagicMock())
    failure = as_failure(RequestError(f"{text}5"), metrics, body, picture)
    assert (failure.status, failure.param) == (400, param)


def test_keys_and_pages_of_other_sites(model):
    async def with_key(client, _engine):
        return [
            (
                await client.post(PATH, json={}, headers={"authorization": f"Bearer {key}"})
            ).status_code
            for key in ("wrong", "right")
        ] + [(await client.get(path)).status_code for path in ("/health", "/v1/models")]

    options = ServeOptions(api_keys=("right",))
    assert ask(model, with_key, options) == [401, 400, 200, 401]

    async def without_key(client, _engine):
        headers = {"origin": "https://elsewhere.example"}
        return (await client.post(PATH, json=SMALL, headers=headers)).status_code

    assert ask(model, without_key) == 403


def test_a_full_queue_a_timeout_and_dead_workers(model, monkeypatch):
    async def body(client, engine):
        long = asyncio.create_task(engine.generate("a", num_inference_steps=900))
        while not engine._current:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(engine.generate("b", request_id="b"))
        await asyncio.sleep(0)
        full = await client.post(PATH, json=SMALL)
        for task in (long, waiting):
            task.cancel()
        await asyncio.wait({long, waiting})
        dead = WorkerDeadError("worker 0: expected a running process, got none")

        def fail(*_args, **_keywords):
            raise dead

        monkeypatch.setattr(engine.engine, "step", fail)
        monkeypatch.setattr(engine.engine, "health", lambda: {"state": "dead", "pids": []})
        return full, await client.post(PATH, json=SMALL), await client.get("/health")

    full, dead, health = ask(model, body, max_queue_size=1)
    assert full.status_code == 429
    assert full.headers["retry-after"]
    assert dead.status_code == health.status_code == 503
    assert dead.json()["error"]["message"].startswith("worker 0: expected a running process")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_takes_its_request_along(model, is_stream):
    """Straight into the application: the client of tests waits for whole answers."""

    async def whole():
        engine = AsyncOmniDiffusion(model=str(model))
        app = create_images_app(engine, ServeOptions())
        fields = {**SMALL, "num_inference_steps": 200, "n": 1 if is_stream else 10}
        body = json.dumps({**fields, "stream": is_stream}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        scope = {
            "type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(),
            "query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        }  # fmt: skip

        async def receive():
            if messages:
                return messages.pop()
            while not engine._current:
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(_message):
            pass

        try:
            await asyncio.wait_for(app(scope, receive, send), WAIT_S)
            # The next one does not wait for the images of a client that is gone.
            output = await asyncio.wait_for(engine.generate("b"), WAIT_S)
            assert output.num_images == 1
            assert engine.num_waiting == 0
        finally:
            await engine.close()

    asyncio.run(whole())


@pytest.mark.slow  # starts a process
def test_the_command(model, tmp_path):
    command = [sys.executable, "-m", "diffulex", "omni", "serve", "--model", str(model)]
    process = subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        (address,) = re.findall(r"^serving images on (http://127\.0\.0\.1:\d+)$", line.strip())
        request = urllib.request.Request(
            address + PATH, json.dumps(SMALL).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            (item,) = json.load(answer)["data"]
        assert picture(item["b64_json"]).size == (64, 64)
        port = address.rpartition(":")[2]
        second = subprocess.run(
            [*command, "--port", port], capture_output=True, text=True, check=False
        )
        assert second.returncode == 2
        expected = f"cannot listen on 127.0.0.1:{port}: Address already in use"
        assert expected in second.stderr
    finally:
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "expected a port from 0 to 65535, got '70000'"),
        (["--portt", "1"], "--port"),
        (["--max-batch-size", "0"], "max_batch_size: expected int >= 1, got 0"),
    ],
)
def test_bad_options(words, message, capsys):
    assert main(["omni", "serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch):
    from diffulex.omni import cli

    monkeypatch.setitem(sys.modules, "diffulex.omni.serve", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[serve\]'"):
        cli.run(["serve"])
