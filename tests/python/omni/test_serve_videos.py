# SPDX-License-Identifier: Apache-2.0
"""Videos over HTTP: jobs of the client of OpenAI, their files, limits, and what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")
pytest.importorskip("fastapi", reason="pip install '.[serve]'")

import httpx  # noqa: E402
import openai  # noqa: E402

from diffulex.omni import (  # noqa: E402
    AsyncOmniDiffusion,
    OmniDiffusion,
    RequestAborted,
    videos_routes,
)
from diffulex.omni.mp4 import save_video, write_mp4  # noqa: E402
from diffulex.omni.serve import ImagesServer, ServeOptions, create_images_app  # noqa: E402
from fixtures.omni_http import WAIT_S, ask  # noqa: E402

PATH = "/v1/videos"
SMALL = {"prompt": "a cat", "size": "32x32", "num_frames": 5, "num_inference_steps": 2, "seed": 1}
LONG = {**SMALL, "num_inference_steps": 200}


async def ended(client, job):
    """The job when it is over."""
    while job["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
        job = (await client.get(f"{PATH}/{job['id']}")).json()
    return job


@pytest.mark.filterwarnings("ignore:The Sora API")
def test_the_client_of_openai_starts_and_downloads_a_video(tiny, tmp_path):
    with OmniDiffusion(model=str(tiny("wan"))) as engine:
        (plain,) = engine.generate(
            "a cat", height=32, width=32, num_frames=5, num_inference_steps=2, seed=1
        )
    write_mp4(tmp_path / "plain.mp4", [np.asarray(frame) for frame in plain.images[0]], 8)

    async def body(http, _engine):
        client = openai.AsyncOpenAI(api_key="-", base_url="http://localhost/v1", http_client=http)
        more = {"fps": 8, "num_inference_steps": 2, "seed": 1}
        job = await client.videos.create_and_poll(
            prompt="a cat", model="wan", size="32x32", seconds="0.5", extra_body=more,
            poll_interval_ms=20,
        )  # fmt: skip
        file = await client.videos.download_content(job.id)
        listed = await client.videos.list()
        found = (job, file.read(), [item.id async for item in listed])
        gone = await client.videos.delete(job.id)
        return *found, gone, (await http.get(f"{PATH}/{job.id}/content")).status_code

    job, data, ids, gone, status = ask(tiny("wan"), body)
    assert (job.status, job.progress, job.model, job.size) == ("completed", 100, "wan", "32x32")
    # Half a second of 8 frames is rounded to 4, plus the first one.
    assert job.seconds == "0.625"
    assert job.expires_at - job.completed_at == 3600
    assert job.model_extra["diffulex"]["seed"] == 1
    assert data == (tmp_path / "plain.mp4").read_bytes()
    assert ids == [job.id]
    assert gone.deleted
    assert status == 404


def test_jobs_wait_in_line_and_can_be_stopped(tiny):
    async def body(client, engine):
        first = (await client.post(PATH, json=LONG)).json()
        while engine._current is None:
            await asyncio.sleep(0.01)
        second = (await client.post(PATH, json=LONG)).json()
        third = await client.post(PATH, json=SMALL)
        fourth = await client.post(PATH, json=SMALL)
        early = await client.get(f"{PATH}/{first['id']}/content")
        gone = [await client.delete(f"{PATH}/{job['id']}") for job in (second, first)]
        last = await ended(client, third.json())
        for _ in range(200):
            if not engine._live:
                break
            await asyncio.sleep(0.01)
        metrics = (await client.get("/metrics")).text
        listed = (await client.get(PATH)).json()["data"]
        return third, fourth, early, gone, last, listed, metrics, dict(engine._live)

    third, fourth, early, gone, last, listed, metrics, live = ask(
        tiny("wan"), body, max_queue_size=2
    )
    assert (third.status_code, fourth.status_code) == (200, 429)
    assert (early.status_code, early.json()["error"]["message"].split(",")[0]) == (
        409, "video: expected a completed one",
    )  # fmt: skip
    assert [answer.json()["deleted"] for answer in gone] == [True, True]
    assert last["status"] == "completed"
    assert [job["id"] for job in listed] == [last["id"]]
    assert 'diffulex_image_requests_total{status="499"} 2.0' in metrics
    assert live == {}


def test_finished_videos_are_forgotten_in_turn_and_nothing_is_left(tiny, monkeypatch):
    monkeypatch.setattr(videos_routes, "_MAX_KEPT", 1)
    directories = []
    make = videos_routes.tempfile.TemporaryDirectory

    def making(**keywords):
        directories.append(made := make(**keywords))
        return made

    monkeypatch.setattr(videos_routes.tempfile, "TemporaryDirectory", making)

    async def body(client, _engine):
        jobs = [await ended(client, (await client.post(PATH, json=SMALL)).json()) for _ in range(2)]
        listed = (await client.get(PATH, params={"order": "asc"})).json()
        files = [path.name for path in Path(directories[0].name).iterdir()]
        await client.delete(f"{PATH}/{jobs[1]['id']}")
        return jobs, listed, files, (await client.get(PATH)).json()

    jobs, listed, files, empty = ask(tiny("wan"), body)
    assert [job["id"] for job in listed["data"]] == [jobs[1]["id"]]
    assert listed["first_id"] == listed["last_id"] == jobs[1]["id"]
    assert files == [f"{jobs[1]['id']}.mp4"]
    assert empty == {"object": "list", "data": [], "has_more": False}
    assert not Path(directories[0].name).exists()


def test_finished_videos_leave_when_their_time_is_up_without_a_request(tiny, monkeypatch):
    monkeypatch.setattr(videos_routes, "_KEPT_S", 0)
    paths = []

    def noting(path, frames, fps):
        save_video(path, frames, fps)
        assert path.exists()
        paths.append(path)

    monkeypatch.setattr(videos_routes, "save_video", noting)

    async def body(client, _engine):
        await client.post(PATH, json=SMALL)
        while not paths or paths[0].exists():
            await asyncio.sleep(0.01)
        return (await client.get(PATH)).json()["data"]

    assert ask(tiny("wan"), body) == []


def test_finished_videos_have_a_limit_of_bytes(tiny, monkeypatch):
    sizes, paths = [1000, 1000, 1000, 2501], []

    def plain(path, _frames, _fps):
        paths.append(path)
        path.write_bytes(bytes(sizes[len(paths) - 1]))

    monkeypatch.setattr(videos_routes, "save_video", plain)

    async def body(client, _engine):
        jobs = [await ended(client, (await client.post(PATH, json=SMALL)).json()) for _ in sizes]
        listed = (await client.get(PATH, params={"order": "asc"})).json()["data"]
        oldest = await client.get(f"{PATH}/{jobs[0]['id']}/content")
        metrics = (await client.get("/metrics")).text
        return jobs, listed, oldest.status_code, [path.exists() for path in paths], metrics

    jobs, listed, status, are_there, metrics = ask(tiny("wan"), body, max_video_bytes=2500)
    assert [job["id"] for job in listed] == [job["id"] for job in jobs[1:]]
    assert [job["status"] for job in listed] == ["completed", "completed", "failed"]
    expected = "video: expected at most 2500 bytes (max_video_bytes), got 2501"
    assert jobs[3]["error"]["message"] == expected
    assert status == 404
    assert are_there == [False, True, True, False]
    assert 'diffulex_image_requests_total{status="507"} 1.0' in metrics


def serving(model, drain_s, body):
    """Runs `body(client, engine)` with a client of a server with a socket, which ends by itself."""

    async def whole():
        engine = AsyncOmniDiffusion(model=str(model))
        server = ImagesServer(create_images_app(engine, ServeOptions()), drain_s)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            running = asyncio.create_task(server.serve([listener]))
            async with httpx.AsyncClient(base_url=address, timeout=WAIT_S) as client:
                found = await asyncio.wait_for(body(client, engine), WAIT_S)
            await asyncio.wait_for(running, WAIT_S)
        assert server.exit_code == 0
        return found

    return asyncio.run(whole())


def test_a_server_that_is_told_to_end_finishes_its_videos(tiny, monkeypatch):
    may_draw = threading.Event()

    async def body(client, engine):
        step = engine.engine.step

        def gated(*args, **keywords):
            assert may_draw.wait(WAIT_S)
            return step(*args, **keywords)

        monkeypatch.setattr(engine.engine, "step", gated)
        job = (await client.post(PATH, json=SMALL)).json()
        os.kill(os.getpid(), signal.SIGTERM)
        while (health := await client.get("/health")).status_code == 200:
            await asyncio.sleep(0.01)
        refused = await client.post(PATH, json=SMALL)
        may_draw.set()
        last = await ended(client, job)
        content = await client.get(f"{PATH}/{job['id']}/content")
        return health, refused, last, content

    health, refused, last, content = serving(tiny("wan"), 2 * WAIT_S, body)
    assert health.json()["status"] == "draining"
    assert refused.status_code == 503
    expected = "videos: expected a running server, got one that ends"
    assert refused.json()["error"]["message"] == expected
    assert last["status"] == "completed"
    assert content.status_code == 200
    assert content.content[4:8] == b"ftyp"


def test_a_server_whose_time_to_end_is_over_stops_its_videos(tiny, monkeypatch):
    outcomes = []

    async def body(client, engine):
        step = engine.engine.step

        def until_stopped(*args, **keywords):
            while not engine._current.is_aborted:
                time.sleep(0.01)
            try:
                return step(*args, **keywords)
            except RequestAborted as error:
                outcomes.append(str(error))
                raise

        monkeypatch.setattr(engine.engine, "step", until_stopped)
        await client.post(PATH, json=SMALL)
        while engine._current is None:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    serving(tiny("wan"), 0.0, body)
    (text,) = outcomes
    assert text.endswith("stopped by its callback")


def test_a_video_that_is_deleted_while_it_is_written_leaves_no_file(tiny, monkeypatch):
    is_writing, may_write = threading.Event(), threading.Event()
    paths = []

    def slowly(path, frames, fps):
        paths.append(path)
        is_writing.set()
        assert may_write.wait(60)
        save_video(path, frames, fps)

    monkeypatch.setattr(videos_routes, "save_video", slowly)

    async def body(client, _engine):
        job = (await client.post(PATH, json=SMALL)).json()
        await asyncio.to_thread(is_writing.wait, 60)
        deletion = asyncio.create_task(client.delete(f"{PATH}/{job['id']}"))
        await asyncio.sleep(0.1)
        may_write.set()
        assert (await deletion).status_code == 200
        return [path.exists() for path in paths]

    assert ask(tiny("wan"), body) == [False]


BAD = [
    ({"prompt": ""}, 400, "prompt: expected some text, got ''"),
    ({"model": "other"}, 404, "model: expected one of wan, got 'other'"),
    ({"size": "32"}, 400, "size: expected WIDTHxHEIGHT or auto, got '32'"),
    ({"size": "30x32"}, 400, "width: expected a multiple of 16, got 30"),
    ({"num_frames": 6}, 400, "num_frames: expected a multiple of 4 plus 1, got 6"),
    ({"num_frames": 2000}, 400, "num_frames"),
    ({"seconds": 1}, 400, "seconds: expected no num_frames with it, got both"),
    ({"num_frames": None, "seconds": 100}, 400, "seconds: expected at most 1025 frames, got 1601"),
    ({"seconds": "long", "num_frames": None}, 400, "seconds"),
    ({"fps": 0}, 400, "fps"),
    ({"quality": "high"}, 400, "quality"),
]


def test_what_is_refused(tiny):
    async def body(client, _engine):
        found = [await client.post(PATH, json={**SMALL, **fields}) for fields, _, _ in BAD]
        files = {"input_reference": b"1"}
        with_file = await client.post(PATH, data={"prompt": "a cat"}, files=files)
        broken = await client.post(PATH, content="{", headers={"Content-Type": "application/json"})
        unknown = await client.get(f"{PATH}/video_1")
        image = await client.post("/v1/images/generations", json={"prompt": "a cat"})
        keys = await client.get(PATH, headers={"Authorization": "Bearer other"})
        return found, with_file, broken, unknown, image, keys

    found, with_file, broken, unknown, image, keys = ask(
        tiny("wan"), body, ServeOptions(api_keys=("k",)), headers={"Authorization": "Bearer k"}
    )
    for (fields, status, expected), answer in zip(BAD, found, strict=True):
        assert answer.status_code == status, (fields, answer.text)
        error = answer.json()["error"]
        assert error["message"].startswith(expected), answer.text
        assert error["param"] == expected.partition(":")[0].replace("width", "size")
    assert with_file.json()["error"]["message"] == "input_reference: expected no file, got 1"
    assert broken.status_code == 400
    assert unknown.json()["error"]["message"] == "video: expected a known one, got 'video_1'"
    assert (image.status_code, keys.status_code) == (404, 401)


def test_a_video_that_fails_says_so(tiny):
    async def body(client, engine):
        def fail(*_args, **_keywords):
            raise RuntimeError("no memory")

        engine._omni.engine.step = fail
        return await ended(client, (await client.post(PATH, json=SMALL)).json())

    job = ask(tiny("wan"), body)
    assert (job["status"], job["error"]["code"]) == ("failed", "internal_error")
    assert job["error"]["message"] == "internal error, see the log"
