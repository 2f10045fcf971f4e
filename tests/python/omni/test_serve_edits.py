# SPDX-License-Identifier: Apache-2.0
"""Edits over HTTP: what the client of OpenAI gets, limits of uploads, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io
import threading

import numpy as np
import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")
pytest.importorskip("fastapi", reason="pip install '.[serve]'")

import openai  # noqa: E402
from PIL import Image  # noqa: E402

from diffulex.omni import OmniDiffusion, images_routes  # noqa: E402
from diffulex.omni import serve as omni_serve  # noqa: E402
from diffulex.omni.api_schema import MAX_HTTP_STEPS  # noqa: E402
from fixtures.omni_http import ask  # noqa: E402

PATH = "/v1/images/edits"
FIELDS = {"prompt": "a cat", "size": "64x48", "seed": "1", "num_inference_steps": "4"}


def png(width=40, height=30, kind="PNG"):
    """A file."""
    pixels = np.linspace(0, 255, width * height * 3, dtype=np.uint8).reshape(height, width, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def pixels(text):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB"))


def test_the_client_of_openai_gets_edits_and_previews(tiny):
    fields = {"height": 48, "width": 64, "num_inference_steps": 4, "strength": 0.8}
    with (
        Image.open(io.BytesIO(png())) as opened,
        OmniDiffusion(model=str(tiny("flux_img2img"))) as engine,
    ):
        (plain,) = engine.generate(
            "a cat", **fields, seed=1, num_outputs_per_prompt=2, pil_image=opened
        )

    async def body(http, _engine):
        client = openai.AsyncOpenAI(api_key="-", base_url="http://localhost/v1", http_client=http)
        call = {"prompt": "a cat", "size": "64x48"}
        more = {"seed": 1, "num_inference_steps": 4, "strength": 0.8}
        answer = await client.images.edit(image=io.BytesIO(png()), n=2, **call, extra_body=more)
        stream = await client.images.edit(
            image=[png()],
            stream=True,
            partial_images=1,
            output_format="webp",
            **call,
            extra_body=more,
        )
        return answer, [event async for event in stream]

    answer, events = ask(tiny("flux_img2img"), body)
    assert answer.size == "64x48"
    assert answer.model_extra["diffulex"]["seeds"] == [1, 2]
    for item, expected in zip(answer.data, plain.images, strict=True):
        assert np.array_equal(pixels(item.b64_json), np.asarray(expected))
    kinds = [event.type for event in events]
    assert kinds == ["image_edit.partial_image", "image_edit.completed"]
    assert events[0].diffulex == {"step": 2, "num_steps": 4}


def test_previews_are_counted_in_the_steps_that_run(tiny):
    """Of ten steps at a strength of 0.3 three run."""

    async def body(http, _engine):
        client = openai.AsyncOpenAI(api_key="-", base_url="http://localhost/v1", http_client=http)
        stream = await client.images.edit(
            image=png(), prompt="a cat", size="64x48", stream=True, partial_images=2,
            extra_body={"num_inference_steps": 10, "strength": 0.3},
        )  # fmt: skip
        return [event.type.rpartition(".")[2] async for event in stream]

    assert ask(tiny("flux_img2img"), body) == ["partial_image", "partial_image", "completed"]


def test_a_schedule_and_a_cache_in_a_form(tiny):
    """Clients send a list as fields with brackets."""
    sigmas = [1.0, 0.7, 0.4]
    fields = {name: value for name, value in FIELDS.items() if name != "num_inference_steps"}
    cache = {"max_warmup_steps": 0, "scm_steps_policy": "static"}

    async def body(client, engine):
        texts = {"sigmas[]": [str(item) for item in sigmas], "strength": "0.9"}
        texts |= {f"cache_config[{name}]": str(value) for name, value in cache.items()}
        texts["cache_backend"] = "cache_dit"
        mask, files = "cache_config[scm_steps_mask]", {"image": png()}
        answer = await client.post(
            PATH, data={**fields, **texts, f"{mask}[]": ["1", "0", "1"]}, files=files
        )
        # As one text it is JSON.
        again = await client.post(PATH, data={**fields, **texts, mask: "[1, 0.0, 1]"}, files=files)
        sdk = openai.AsyncOpenAI(api_key="-", base_url="http://localhost/v1", http_client=client)
        third = await sdk.images.edit(
            image=png(),
            prompt=fields["prompt"],
            size=fields["size"],
            extra_body={
                "seed": 1,
                "strength": 0.9,
                "sigmas": sigmas,
                "cache_backend": "cache_dit",
                "cache_config": {**cache, "scm_steps_mask": [1, 0, 1]},
            },
        )
        wrong = [
            await client.post(PATH, data={**fields, **more}, files=files)
            for more in (
                {"sigmas": "1"},
                {"cache_backend": "cache_dit", "cache_config[max_warmup_steps]": "x"},
                {"sigmas[]": ["1", "x"]},
                {"seed[]": "1", "sigmas[]": "1"},
                {"sigmas[5]": "1"},
                {"sigmas[a]": ["1"]},
                {f"{mask}[a]": "1"},
                {mask: "1", f"{mask}[]": "1"},
                {"cache_backend": "cache_dit", f"{mask}[]": ["1", "x"]},
                {"cache_backend": "cache_dit", mask: "[" * 200_000},
                {"cache_backend": "cache_dit", mask: "[[1]]"},
            )
        ]
        with Image.open(io.BytesIO(png())) as opened:
            output = await engine.generate(
                "a cat",
                height=48,
                width=64,
                seed=1,
                strength=0.9,
                sigmas=sigmas,
                pil_image=opened,
                cache_backend="cache_dit",
                cache_config={**cache, "scm_steps_mask": (1, 0, 1)},
            )
        return (answer.json(), again.json(), third.model_dump()), wrong, output

    answers, wrong, output = ask(tiny("flux_img2img"), body)
    for answer in answers:
        (image,) = answer["data"]
        assert np.array_equal(pixels(image["b64_json"]), np.asarray(output.images[0]))
        (branch,) = answer["diffulex"]["cache"]["transformer"].values()
        assert branch["cached"] == [1]
    assert [item.status_code for item in wrong] == [400] * 11
    starts = [item.json()["error"]["message"].partition(":")[0] for item in wrong]
    mask = "scm_steps_mask"
    assert starts == [
        *("sigmas", "max_warmup_steps", "sigmas.1", "seed[]", "sigmas", "sigmas"),
        *(f"cache_config[{mask}][a]", f"cache_config[{mask}][]", mask, mask, mask),
    ]
    assert {wrong[i].json()["error"]["param"] for i in (1, 8, 9, 10)} == {"cache_config"}


def test_a_form_has_a_schedule_of_as_many_steps_as_a_request(tiny):
    async def body(client, _engine):
        fields = {name: value for name, value in FIELDS.items() if name != "num_inference_steps"}
        return [
            await client.post(
                PATH,
                data={**fields, "sigmas[]": [str(1 - step / 300) for step in range(number)]},
                files={"image": png()},
            )
            for number in (MAX_HTTP_STEPS, MAX_HTTP_STEPS + 1)
        ]

    drawn, refused = ask(tiny("flux_img2img"), body)
    assert drawn.status_code == 200, drawn.text
    assert drawn.json()["diffulex"]["num_inference_steps"] == MAX_HTTP_STEPS
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("sigmas: ")


def test_what_is_refused(tiny, monkeypatch):
    # A body may be as large as this, with its fields.
    monkeypatch.setattr(omni_serve, "_MAX_FORM_BYTES", 20_000)
    cases = [
        ({"data": FIELDS}, 415, "Content-Type: expected application/json, got"),
        ({"json": FIELDS}, 415, "Content-Type: expected multipart/form-data, got"),
        ({"files": {"other": png()}}, 400, "other: expected no file, got 1"),
        ({"files": {"image": b"GIF89a"}}, 400, "image: expected a readable PNG, JPEG or WebP"),
        ({"files": {"image": png()[:70]}}, 400, "image: expected a readable PNG, JPEG or WebP"),
        (
            {"files": {"image": png(101, 50)}},
            400,
            "image: expected at most 5000 pixels (max_pixels)",
        ),
        ({"files": {"image": png(), "mask": png()}}, 400, "mask: expected no file, got 1"),
        (
            {"files": [("image[]", png()), ("image[]", png())]},
            400,
            "image: expected at most 1 files",
        ),
        ({"files": {"note": (None, "1")}}, 400, "note: "),
        ({"files": {"image": png(), "strength": (None, "2")}}, 400, "strength: "),
        ({"files": {"image": png(), "stream": (None, "so")}}, 400, "stream: "),
        ({"files": {"image": png(), "n": (None, "11")}}, 400, "n: "),
        ({"files": {"image": png(), "model": (None, "other")}}, 404, "model: expected one of"),
        ({"files": {"seed": (None, "2")}}, 400, "seed: expected it once, got it again"),
        ({"files": {"background": (None, "auto")}}, 400, "image: expected a picture, got none"),
        ({"files": {"image": b"x" * 30_000}}, 413, "body: expected at most 20000 bytes"),
    ]

    async def body(client, engine):
        found = []
        for case, _, _ in cases:
            fields = {} if "json" in case else {"data": FIELDS}
            found.append(await client.post(PATH, **{**fields, **case}))
        headers = {"Sec-Fetch-Site": "cross-site"}
        other = await client.post(PATH, data=FIELDS, files={"image": png()}, headers=headers)
        return found, other, await client.get("/health"), engine.num_waiting

    found, other, health, waiting = ask(tiny("flux_img2img"), body, max_pixels=5000)
    for (case, status, expected), answer in zip(cases, found, strict=True):
        assert answer.status_code == status, (case, answer.text)
        message = answer.json()["error"]["message"]
        assert message.startswith(expected), message
        assert "\n" not in message
        if status == 400:
            assert answer.json()["error"]["param"] == message.partition(":")[0]
    assert other.status_code == 403
    assert (health.status_code, waiting) == (200, 0)


def test_other_pipelines_refuse_edits(tiny):
    async def body(client, _engine):
        answer = await client.post(PATH, data=FIELDS, files={"image": png()})
        facts = await client.get("/server_info")
        page = await client.get("/")
        return answer, facts.json()["edits"], page.status_code

    answer, edits, page = ask(tiny("flux"), body)
    assert answer.status_code == 400
    expected = "edits: expected a pipeline that changes pictures, got FluxPipeline"
    assert answer.json()["error"]["message"] == expected
    assert (edits, page) == (False, 307)


def test_a_pipeline_of_edits_needs_a_picture_and_a_client_may_leave(tiny):
    async def body(client, engine):
        plain = await client.post("/v1/images/generations", json={"prompt": "a cat"})
        page = await client.get("/ui")
        fields = {**FIELDS, "num_inference_steps": "200", "strength": "1"}
        task = asyncio.create_task(client.post(PATH, data=fields, files={"image": png()}))
        while engine._current is None:
            await asyncio.sleep(0.01)
        task.cancel()
        while engine._live:
            await asyncio.sleep(0.01)
        return plain, page.status_code

    plain, page = ask(tiny("flux_img2img"), body)
    assert plain.status_code == 400
    expected = "pil_image: expected 1 pictures for FluxImg2ImgPipeline, got 0"
    assert plain.json()["error"]["message"] == expected
    assert plain.json()["error"]["param"] is None
    # Which asks for one.
    assert page == 200


def test_a_full_server_decodes_nothing(tiny, monkeypatch):
    decoded = []
    read = images_routes.read_picture
    monkeypatch.setattr(
        images_routes, "read_picture", lambda *args: decoded.append(args) or read(*args)
    )

    async def body(client, engine):
        fields = {**FIELDS, "num_inference_steps": "200", "strength": "1"}
        tasks = []
        for is_there in (lambda: engine._current is not None, lambda: engine.num_waiting):
            tasks.append(
                asyncio.create_task(client.post(PATH, data=fields, files={"image": png()}))
            )
            while not is_there():
                await asyncio.sleep(0.01)
        before = len(decoded)
        refused = await client.post(PATH, data=FIELDS, files={"image": png()})
        # What is wrong with it is not even looked at.
        broken = await client.post(PATH, data=FIELDS, files={"image": b"GIF89a"})
        after = len(decoded)
        for task in tasks:
            task.cancel()
        return before, after, refused, broken

    before, after, *refused = ask(tiny("flux_img2img"), body, max_queue_size=1)
    assert before == after == 2
    for answer in refused:
        assert answer.status_code == 429
        expected = "queue: expected at most 1 waiting requests (max_queue_size), got one more"
        assert answer.json()["error"]["message"] == expected


def test_no_more_pictures_are_decoded_than_may_wait(tiny, monkeypatch):
    is_reading, may_read = threading.Event(), threading.Event()
    read = images_routes.read_picture

    def slowly(*args):
        is_reading.set()
        assert may_read.wait(60)
        return read(*args)

    monkeypatch.setattr(images_routes, "read_picture", slowly)

    async def body(client, _engine):
        first = asyncio.create_task(client.post(PATH, data=FIELDS, files={"image": png()}))
        await asyncio.to_thread(is_reading.wait, 60)
        second = await client.post(PATH, data=FIELDS, files={"image": png()})
        may_read.set()
        return (await first).status_code, second.status_code

    assert ask(tiny("flux_img2img"), body, max_queue_size=1) == (200, 429)
