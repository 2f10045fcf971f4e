# SPDX-License-Identifier: Apache-2.0
"""The whole server in one process: a tiny random model on the CPU, `--inproc`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app_server import AppServer
from block_engine import BlockEngine
from byte_tokenizer import ByteTokenizer
from diffulex import Diffulex, SamplingParams
from diffulex.server.args import parse_args
from diffulex.server.http.api_server import create_app
from diffulex.server.launch import in_process_frontend
from diffulex.serving.engine import ServingEngine
from diffulex.serving.engine_loop import EngineLoop
from diffulex.serving.frontend import BackendUnavailable, OperationFailed, RequestFailed
from diffulex.serving.frontend_state import FrontendLimits, ServerState
from diffulex.serving.inproc_frontend import InprocFrontend
from diffulex.wire.protocol import PromptInput, ServingAbort, ServingGenerate
from engine.tiny_engine import TinyModel
from http_client import frames

PROMPT = [1, 2, 3, 4, 5]
LENGTH = 24
#: Generous: the host may be busy. Nothing is measured.
TIMEOUT_S = 120.0


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=TIMEOUT_S)


def tell(url: str, **keywords: Any) -> httpx.Response:
    """A request without a prompt."""
    return httpx.post(url, timeout=TIMEOUT_S, **keywords)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> TinyModel:
    directory: Path = tmp_path_factory.mktemp("tiny")
    return TinyModel(directory, "cpu")


@pytest.fixture(scope="module")
def url(model: TinyModel) -> Iterator[str]:
    def make(name: str, **settings: object) -> ServingEngine:
        return ServingEngine(model.engine(**settings))

    loop = EngineLoop("tiny", {"max_num_reqs": 4}, engine_factory=make)
    frontend = InprocFrontend(loop, tokenizer=model.facts.tokenizer)
    with AppServer(create_app(frontend)) as server:
        yield server.url


def post(url: str, path: str = "/generate", **body: object) -> httpx.Response:
    plain = {"prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True}
    return httpx.post(url + path, json={**plain, **body}, timeout=TIMEOUT_S)


def test_the_same_seed_gives_the_same_tokens(url):
    first, second, other = (post(url, seed=seed).json() for seed in (5, 5, 6))
    assert first["token_ids"] == second["token_ids"]
    assert first["token_ids"] != other["token_ids"]
    assert len(first["token_ids"]) == LENGTH, "ignore_eos asks for exactly max_tokens"
    drawn = post(url).json()
    assert post(url, seed=drawn["seed"]).json()["token_ids"] == drawn["token_ids"]


def test_a_drawn_seed_repeats_the_answer(url):
    answer = post(url, temperature=1.0).json()
    assert (
        post(url, temperature=1.0, seed=answer["seed"]).json()["token_ids"] == answer["token_ids"]
    )


# A strategy that draws at every temperature.

CANVAS_MODEL = str(Path(__file__).parents[3] / "examples" / "zoo" / "diffusion_gemma")
CANVAS_BODY: dict[str, Any] = {
    "prompt": "Tom has 3 apples. He buys 4 more apples.",
    "max_tokens": 24,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def canvas_url() -> Iterator[str]:
    frontend = InprocFrontend(EngineLoop(CANVAS_MODEL, {"device": "cpu", "seed": 5}))
    with AppServer(create_app(frontend)) as server:
        yield server.url


def ask_canvas(url: str, path: str, **fields: Any) -> Any:
    return httpx.post(url + path, json=CANVAS_BODY | fields, timeout=TIMEOUT_S).json()


def test_canvases_at_temperature_0_are_reproducible(canvas_url):
    answers = [ask_canvas(canvas_url, "/generate") for _ in range(3)]
    with Diffulex(CANVAS_MODEL, device="cpu", seed=5) as engine:
        params = SamplingParams(max_tokens=24, temperature=0)
        (offline,) = engine.generate([CANVAS_BODY["prompt"]], params, summary=False)
    assert [answer["token_ids"] for answer in answers] == [list(offline.token_ids)] * 3
    assert {answer["seed"] for answer in answers} == {5}


@pytest.mark.slow
def test_choices_of_canvases_are_separate_draws(canvas_url):
    first, second = (ask_canvas(canvas_url, "/v1/completions", n=3) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) > 1
    assert texts == [choice["text"] for choice in second["choices"]]
    seed = first["choices"][2]["diffulex"]["seed"]
    alone = ask_canvas(canvas_url, "/v1/completions", seed=seed)
    assert alone["choices"][0]["text"] == texts[2]


@pytest.mark.parametrize("mode", ["block_append", "denoise", "both"])
def test_streams_end_with_the_answer_in_one_piece(url, mode):
    whole = post(url, seed=5).json()
    *events, final, _ = frames(post(url, seed=5, stream=True, stream_mode=mode))
    assert final["event"] == "final"
    assert final["token_ids"] == whole["token_ids"]
    assert final["text"] == whole["text"]
    deltas = [event for event in events if event["event"] == "append"]
    drafts = [event for event in events if event["event"] == "buffer_snapshot"]
    assert bool(deltas) is (mode != "denoise")
    assert bool(drafts) is (mode != "block_append")
    if deltas:
        assert [token for event in deltas for token in event["token_ids"]] == whole["token_ids"]
        assert "".join(event["text"] for event in deltas) == whole["text"]
    draft: list[int] = []
    for event in drafts:
        draft[event["token_offset"] :] = event["token_ids"]
        assert event["text"] is not None
    if drafts:
        assert draft[:LENGTH] == whole["token_ids"]


def test_many_at_once(url):
    async def ask():
        body = {"prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            return await asyncio.gather(
                *(client.post(url + "/generate", json=body) for _ in range(12))
            )

    answers = asyncio.run(ask())
    assert {answer.status_code for answer in answers} == {200}
    assert len({tuple(answer.json()["token_ids"]) for answer in answers}) == 1


def test_leaving_frees_the_engine(url):
    body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/generate", json=body, timeout=TIMEOUT_S) as response:
        next(response.iter_raw())
    end = time.monotonic() + TIMEOUT_S
    while True:
        text = get(url + "/metrics").text
        is_idle = 'requests_running{model_name="tiny"} 0.0' in text
        if is_idle and 'requests_tracked{model_name="tiny"} 0.0' in text:
            break
        assert time.monotonic() < end, text
        time.sleep(0.05)


def test_service_routes(url):
    info = get(url + "/server_info").json()
    assert info["max_num_reqs"] == 4
    assert info["state"] == "ready"
    assert tell(url + "/flush_cache").json()["status"] == "ok"
    assert tell(url + "/start_profile").status_code == 409
    assert get(url + "/health").json() == {"status": "ready"}
    assert get(url + "/version").json()["extension_version"]


def test_a_recording_over_http(model, tmp_path):
    config = {"torch_profiler_dir": str(tmp_path), "max_iterations": 200}

    def make(name: str, **settings: object) -> ServingEngine:
        return ServingEngine(model.engine(profiler_config=config, **settings))

    loop = EngineLoop("tiny", {"max_num_reqs": 4}, engine_factory=make)
    frontend = InprocFrontend(loop, tokenizer=model.facts.tokenizer)
    with AppServer(create_app(frontend)) as server:
        assert tell(server.url + "/stop_profile").status_code == 409
        body = {"profile_prefix": "run"}
        started = tell(server.url + "/start_profile", json=body).json()
        assert started == {"status": "ok", "directory": str(tmp_path)}
        again = tell(server.url + "/start_profile")
        assert again.status_code == 409
        assert "no recording under way, got one" in again.json()["error"]["message"]
        post(server.url)
        stopped = tell(server.url + "/stop_profile").json()
        assert stopped["trace"] == str(tmp_path / "run.engine.trace.json")
        assert stopped["steps"] > 0
        wrong = tell(server.url + "/start_profile", json={"profile_prefix": 1})
        assert wrong.status_code == 400
    names = {
        event.get("name") for event in json.loads(Path(stopped["trace"]).read_text())["traceEvents"]
    }
    assert "diffulex.engine.step" in names


# The frontend, over a fake engine.


class TinyTokens(BlockEngine):
    def __init__(self, model, **kwargs):
        super().__init__()


def command(rid="a", **fields):
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return ServingGenerate(rid, PromptInput("x"), params, **fields)


def run(test, **options):
    async def body():
        loop = EngineLoop("m", engine_factory=TinyTokens)
        frontend = InprocFrontend(loop, **options)
        assert frontend.state is ServerState.STARTING
        await frontend.start()
        await frontend.start()
        assert frontend.state is ServerState.READY
        try:
            await asyncio.wait_for(test(frontend, loop), TIMEOUT_S)
        finally:
            await frontend.stop()
            await frontend.stop()
        assert not loop.is_running
        assert frontend.state is ServerState.STOPPED

    asyncio.run(body())


def test_frontend_answers_and_counts():
    async def test(frontend, loop):
        reply = await frontend.generate(command())
        assert len(reply.token_ids) == 8
        assert (await frontend.flush_cache()) == {"num_dropped_units": 0}
        with pytest.raises(OperationFailed, match="profiling is off"):
            await frontend.start_profile()
        assert frontend.num_inflight == 0

    run(test)


def test_limits_hold_in_one_process():
    async def test(frontend, loop):
        first = frontend.generate_stream(command("a", stream=True))
        await first.__anext__()
        with pytest.raises(RequestFailed) as caught:
            await frontend.generate(command("b"))
        assert caught.value.error.code == "queue_full"
        await first.aclose()
        while loop.engine.live or loop.has_waiters():
            await asyncio.sleep(0.002)
        await frontend.generate(command("c"))

    run(test, limits=FrontendLimits(max_queue_size=1))


def test_a_name_can_be_used_again_at_once():
    async def test(frontend, loop):
        for num_turns in (0, 1, 2, 5, 20):
            left = asyncio.ensure_future(frontend.generate(command()))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            left.cancel()
            await asyncio.wait({left})
            assert len((await frontend.generate(command())).token_ids) == 8
        # What the frontend sends when its loop is busy: all of it before anything begins.
        channel = frontend.send_backend
        frontend.discard_request_state(frontend.add_request_state("never sent").rid)
        state = frontend.add_request_state("a")
        await channel.put(command(generation=state.generation - 1))
        await channel.put(ServingAbort("a"))
        await channel.put(command(generation=state.generation))
        reply = await frontend.wait_for_event("a")
        assert reply.generation == state.generation
        assert len(reply.token_ids) == 8
        frontend.discard_request_state("a")
        assert loop.engine.is_finished()

    run(test)


def test_an_engine_that_fails_is_reported():
    reasons = []

    async def test(frontend, loop):
        loop.engine.failure = ZeroDivisionError("kernel")
        with pytest.raises(RequestFailed) as caught:
            await frontend.generate(command())
        assert caught.value.error.code == "engine_dead"
        while not reasons:
            await asyncio.sleep(0.01)
        assert frontend.state is ServerState.DEAD
        with pytest.raises(RequestFailed) as caught:
            await frontend.generate(command("b"))
        assert caught.value.error.http_status == 503
        with pytest.raises(BackendUnavailable):
            await frontend.flush_cache()

    async def body():
        loop = EngineLoop("m", engine_factory=TinyTokens)
        frontend = InprocFrontend(loop, on_dead=reasons.append)
        await frontend.start()
        await asyncio.wait_for(test(frontend, loop), TIMEOUT_S)
        await frontend.stop()

    asyncio.run(body())


def test_a_factory_gets_the_settings_of_the_command_line_and_no_others():
    seen = []

    def make(model, **settings):
        seen.append((model, settings))
        return BlockEngine()

    args = parse_args(["--model", "demo", "--max-num-reqs", "3"])
    frontend = in_process_frontend(args, engine_factory=make, tokenizer=ByteTokenizer())

    async def body():
        await frontend.start()
        await frontend.stop()

    asyncio.run(body())
    assert seen == [("demo", args.engine_kwargs())]
