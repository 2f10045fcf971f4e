# SPDX-License-Identifier: Apache-2.0
"""Streams over a fake frontend: frames, roles, usage, errors."""

from __future__ import annotations

import json

import pytest

from diffulex import SamplingParams
from diffulex.server.http.api_server import (
    ChatCompletionRequest,
    chat_delta_chunk,
    chat_finish_chunk,
    create_app,
    denoise_chat_event,
    sse,
)
from diffulex.server.openai.generation import Generation
from diffulex.server.openai.openai_format import OpenAIFrames, OpenAIRoute
from diffulex.wire.protocol import (
    PromptInput,
    ServingBufferSnapshot,
    ServingDelta,
    ServingError,
    ServingGenerate,
)
from fake_frontend import MASK, FakeFrontend
from http_client import AppClient, frames

USER = [{"role": "user", "content": "hi"}]
ROLE = {"role": "assistant", "content": ""}
CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.fixture(scope="module")
def app_frontend():
    frontend = FakeFrontend()
    return create_app(frontend), frontend


@pytest.fixture
def frontend(app_frontend):
    frontend = app_frontend[1]
    frontend.commands.clear()
    frontend.num_aborted = 0
    frontend.pieces, frontend.script = ("Hel", "lo ", "wörld"), frontend.answer
    return frontend


@pytest.fixture
def client(app_frontend, frontend):
    return AppClient(app_frontend[0])


def stream(client, path, **body):
    prompt = {"messages": USER} if path == CHAT else {"prompt": "x"}
    return frames(client.post(path, {**prompt, "stream": True, **body}))


# Framing.


def test_frames_and_headers(client):
    response = client.post(NATIVE, {"prompt": "x", "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"].startswith("diffulex-")
    assert "content-length" not in response.headers
    text = response.content.decode()
    assert text.endswith("\n\ndata: [DONE]\n\n")
    assert "\r" not in text
    assert "wörld" in text, "characters are not escaped"


def test_sse():
    assert sse("[DONE]") == b"data: [DONE]\n\n"
    assert json.loads(sse({"a": "ö\ud800"})[6:]) == {"a": "ö?"}
    assert sse({"a": "ö"}).startswith(b'data: {"a"')


# /generate


def test_generate_denoises_unless_told_otherwise(client, frontend):
    found = stream(client, NATIVE)
    assert frontend.commands[0].stream_mode == "denoise"
    assert [frame["event"] for frame in found[:-1]] == ["buffer_snapshot"] * 3 + ["final"]
    snapshot = found[0]
    assert snapshot["token_ids"] == [1, MASK, MASK]
    assert (snapshot["token_offset"], snapshot["absolute_start"]) == (0, 5)
    assert (snapshot["absolute_end"], snapshot["committed"]) == (8, 0)
    assert snapshot["id"] == found[-2]["id"]
    assert found[-2]["text"] == "Hello wörld"
    assert found[-2]["usage"]["nfe"] == 6


def test_generate_appends(client):
    found = stream(client, NATIVE, stream_mode="block_append")
    assert [frame["event"] for frame in found[:-1]] == ["append"] * 3 + ["final"]
    assert "".join(frame["text"] for frame in found[:-2]) == found[-2]["text"]


def test_generate_does_both(client):
    found = stream(client, NATIVE, stream_mode="both")
    assert [frame["event"] for frame in found[:-2]] == ["buffer_snapshot", "append"] * 3


# Chat chunks.


def test_chat_streams_chunks_unless_told_otherwise(client, frontend):
    found = stream(client, CHAT)
    assert frontend.commands[0].stream_mode == "block_append"
    assert [frame["object"] for frame in found[:-1]] == ["chat.completion.chunk"] * 5
    assert len({(f["id"], f["created"], f["model"]) for f in found[:-1]}) == 1
    assert found[0]["id"].startswith("chatcmpl-")
    deltas = [frame["choices"][0]["delta"] for frame in found[:-1]]
    assert deltas == [
        ROLE,
        {"content": "Hel"},
        {"content": "lo "},
        {"content": "wörld"},
        {},
    ]
    reasons = [frame["choices"][0]["finish_reason"] for frame in found[:-1]]
    assert reasons == [None, None, None, None, "length"]
    assert not any("usage" in frame for frame in found[:-1])


def test_deltas_without_text_are_not_sent(client, frontend):
    frontend.pieces = ("", "a", "", "b")
    deltas = [frame["choices"][0]["delta"] for frame in stream(client, CHAT)[:-1]]
    assert deltas == [ROLE, {"content": "a"}, {"content": "b"}, {}]


def test_an_empty_answer_has_a_role(client, frontend):
    frontend.pieces = ()
    (first, chunk, _) = stream(client, CHAT)
    assert first["choices"][0]["delta"] == ROLE
    assert chunk["choices"][0]["delta"] == {}
    assert chunk["choices"][0]["finish_reason"] == "length"


def test_the_role_comes_alone_and_with_the_first_text(client, frontend):
    """Clients that take a first chunk for a first token measure the right time; others add the
    log-probabilities of what is in a first chunk twice."""
    found = stream(client, CHAT, logprobs=True)
    assert found[0]["choices"] == [
        {"index": 0, "delta": ROLE, "logprobs": None, "finish_reason": None}
    ]
    assert "logprobs" not in stream(client, CHAT)[0]["choices"][0]
    route = OpenAIRoute("chat", "r", "m", 0)
    command = ServingGenerate("r", PromptInput("x"), SamplingParams(), True, "block_append")
    frames = OpenAIFrames(route, Generation("r", (command.input,), (command,)), "block_append")
    first, second = (
        frames.frames(0, event) for event in FakeFrontend(("a", "b")).answer(command)[:2]
    )
    assert first.count(b"data: ") == 2
    assert second.count(b"data: ") == 1


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_is_one_chunk_more_when_asked_for(client, path):
    found = stream(client, path, stream_options={"include_usage": True})
    assert all(frame["usage"] is None for frame in found[:-2])
    assert found[-2]["choices"] == []
    assert found[-2]["usage"]["total_tokens"] == 8
    assert found[-2]["id"] == found[0]["id"]


def test_running_usage(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = stream(client, CHAT, stream_options=options)
    assert [frame["usage"]["completion_tokens"] for frame in found[:-2]] == [1, 1, 2, 3, 3]


@pytest.mark.parametrize("options", [{"continuous_usage_stats": True}, {"include_usage": False}])
def test_no_chunk_has_usage_unless_it_is_included(client, options):
    found = stream(client, CHAT, stream_options=options)
    assert not any("usage" in frame for frame in found[:-1])


def test_choices_of_a_stream_are_told_apart(client, frontend):
    found = stream(client, CHAT, n=2)
    texts = {0: "", 1: ""}
    for frame in found[:-1]:
        (choice,) = frame["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "Hello wörld", 1: "Hello wörld"}
    assert len({frame["id"] for frame in found[:-1]}) == 1
    assert len(frontend.commands) == 2
    roles = [frame["choices"][0] for frame in found[:-1] if "role" in frame["choices"][0]["delta"]]
    assert sorted(choice["index"] for choice in roles) == [0, 1]


def test_greedy_choices_of_a_stream_are_copies(client, frontend):
    found = stream(client, CHAT, n=2, temperature=0)
    assert len(frontend.commands) == 1
    assert [frame["choices"][0]["index"] for frame in found[:4]] == [0, 0, 1, 1]
    deltas = [frame["choices"][0]["delta"] for frame in found[:4]]
    assert deltas == [ROLE, {"content": "Hel"}] * 2


def test_logprobs_travel_with_their_chunk(client, frontend):
    record = {"token": "a", "logprob": -1.0, "bytes": [97], "step": 1, "confidence": 0.5}
    frontend.script = lambda command: [
        ServingDelta(command.rid, 0, "a", [1], 2, logprobs=[record]),
        ServingDelta(command.rid, 1, "b", [2], 3, logprobs=[{**record, "token": "b"}]),
        frontend.reply(command),
    ]
    chunk = stream(client, CHAT, logprobs=True)[1]
    assert chunk["choices"][0]["logprobs"]["content"][0]["logprob"] == -1.0
    chunks = stream(client, TEXT, logprobs=0)
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in chunks[:2]] == [[0], [1]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_logprobs_of_tokens_without_text_come_with_the_next_chunk(client, frontend, path):
    tokens = ["", "a", "", "", "b", ""]
    records = [{"token": f"<{i}>", "logprob": -1.0 * i} for i in range(len(tokens))]
    frontend.script = lambda command: [
        *(
            ServingDelta(command.rid, i, text, [i], 2, logprobs=[records[i]])
            for i, text in enumerate(tokens)
        ),
        frontend.reply(command),
    ]
    wanted = {"logprobs": True} if path == CHAT else {"logprobs": 0}
    choices = [frame["choices"][0] for frame in stream(client, path, **wanted)[:-1]]
    if path == CHAT:
        assert choices.pop(0)["logprobs"] is None

    def values(choice):
        found = choice["logprobs"]
        if path == TEXT:
            return found["token_logprobs"]
        return [entry["logprob"] for entry in found["content"]]

    assert [values(choice) for choice in choices] == [[0.0, -1.0], [-2.0, -3.0, -4.0], [-5.0]]


# Denoise frames.


@pytest.mark.parametrize(
    ("path", "kind"),
    [(CHAT, "diffulex.chat.completion.denoise"), (TEXT, "diffulex.text_completion.denoise")],
)
def test_denoise_frames_have_no_choices_but_the_last(client, path, kind):
    found = stream(client, path, stream_mode="denoise", stream_options={"include_usage": True})
    assert [frame["object"] for frame in found[:-1]] == [kind] * 4
    assert [frame["event"] for frame in found[:-1]] == ["buffer_snapshot"] * 3 + ["final"]
    assert [frame["choices"] for frame in found[:-2]] == [[], [], []]
    assert found[0]["token_ids"] == [1, MASK, MASK]
    final = found[-2]
    (choice,) = final["choices"]
    assert (choice["delta"]["content"] if path == CHAT else choice["text"]) == "Hello wörld"
    assert choice["finish_reason"] == "length"
    assert choice["diffulex"]["finish_detail"] == "max_new_tokens_reached"
    assert final["usage"]["completion_tokens"] == 3
    assert "chunk" not in str([frame["object"] for frame in found[:-1]])


def test_both_interleaves_chunks_and_snapshots(client):
    found = stream(client, CHAT, stream_mode="both", stream_options={"include_usage": True})
    chunks = [frame for frame in found[:-1] if frame["object"] == "chat.completion.chunk"]
    drafts = [frame for frame in found[:-1] if frame["object"] != "chat.completion.chunk"]
    assert len(drafts) == 3
    assert all(frame["choices"] == [] for frame in drafts)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == "Hello wörld"
    assert chunks[-1]["choices"] == []
    assert "usage" in chunks[-1]


def test_the_default_mode_of_the_openai_routes_is_an_option():
    frontend = FakeFrontend()
    client = AppClient(create_app(frontend, v1_stream_mode="denoise"))
    assert stream(client, CHAT)[0]["event"] == "buffer_snapshot"


def test_snapshot_details_are_asked_for_and_shown(client, frontend):
    block = {"id": 0, "start": 5, "end": 9, "state": "active", "masked": 1}
    frontend.script = lambda command: [
        ServingBufferSnapshot(
            command.rid, 0, 5, 6, None, [MASK], 1, blocks=[block], confidences=[0.0]
        ),
        frontend.reply(command),
    ]
    found = stream(client, CHAT, stream_mode="denoise", denoise_detail=True)
    assert frontend.commands[0].denoise_detail is True
    assert found[0]["blocks"] == [block]
    assert found[0]["confidences"] == [0.0]


# Text completions.


def test_completion_chunks(client):
    found = stream(client, TEXT, echo=True)
    assert {frame["object"] for frame in found[:-1]} == {"text_completion"}
    choices = [frame["choices"][0] for frame in found[:-1]]
    assert [choice["text"] for choice in choices] == ["xHel", "lo ", "wörld", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]


def test_an_empty_completion_still_echoes(client, frontend):
    frontend.pieces = ()
    choices = [frame["choices"][0] for frame in stream(client, TEXT, echo=True)[:-1]]
    assert [choice["text"] for choice in choices] == ["x", ""]


# Failures.


def failing(frontend, error):
    def script(command):
        return [*frontend.answer(command)[:1], error(command.rid)]

    frontend.script = script


def test_an_error_in_the_stream_is_a_frame_of_its_own(client, frontend):
    failing(frontend, lambda rid: ServingError(rid, "broken"))
    found = stream(client, CHAT)
    assert found[2:] == [
        {"error": {"message": "broken", "type": "server_error", "code": 500}},
        "[DONE]",
    ]
    found = stream(client, NATIVE)
    assert found[1]["event"] == "error"
    assert (found[1]["message"], found[1]["code"]) == ("broken", "engine_error")
    assert len(found) == 3


def test_error_codes_that_say_more_are_kept(client, frontend):
    failing(frontend, lambda rid: ServingError(rid, "late", "request_timeout", 504))
    assert stream(client, CHAT)[2]["error"]["code"] == "request_timeout"


def test_runtime_errors_of_the_frontend_are_503(client, frontend):
    def script(command):
        yield frontend.answer(command)[0]
        raise RuntimeError("gone")

    frontend.script = script
    assert stream(client, CHAT)[2]["error"] == {
        "message": "gone",
        "type": "server_error",
        "code": 503,
    }


def test_a_stream_without_reply_ends_with_an_error(client, frontend):
    frontend.script = lambda command: frontend.answer(command)[:1]
    found = stream(client, CHAT)
    assert "without a reply" in found[2]["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT, NATIVE])
def test_a_refusal_before_the_first_event_has_a_status(client, frontend, path):
    frontend.script = lambda command: [
        ServingError(command.rid, "full", "queue_full", 429, retryable=True)
    ]
    prompt = {"messages": USER} if path == CHAT else {"prompt": "x"}
    response = client.post(path, {**prompt, "stream": True})
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "queue_full"
    assert response.headers["retry-after"] == "1"


def test_one_failed_choice_ends_the_stream(client, frontend):
    plain = frontend.answer

    def script(command):
        is_second = command.rid.endswith("-1")
        return [ServingError(command.rid, "broken")] if is_second else plain(command)

    frontend.script = script
    found = stream(client, CHAT, n=2)
    assert found[-2]["error"]["message"] == "broken"
    assert sum("error" in frame for frame in found) == 1


def test_pauses_are_filled_with_comments():
    frontend = FakeFrontend(pieces=("a", "b"))
    frontend.delay_s = 0.1
    client = AppClient(create_app(frontend, ping_interval=0.02))
    response = client.post(CHAT, {"messages": USER, "stream": True})
    assert response.content.startswith(b": ping\n\n")
    assert response.content.count(b": ping\n\n") >= 3
    assert len(frames(response)) == 5


def test_tokens_without_text_are_pauses_too():
    frontend = FakeFrontend(pieces=("",) * 20 + ("a",))
    frontend.delay_s = 0.01
    client = AppClient(create_app(frontend, ping_interval=0.05))
    response = client.post(CHAT, {"messages": USER, "stream": True})
    assert response.content.startswith(b": ping\n\n")
    assert response.content.count(b": ping\n\n") >= 2
    assert len(frames(response)) == 4


def test_comments_can_be_turned_off():
    frontend = FakeFrontend(pieces=("", "a"))
    frontend.delay_s = 0.05
    client = AppClient(create_app(frontend, ping_interval=0))
    response = client.post(CHAT, {"messages": USER, "stream": True})
    assert b": ping" not in response.content
    assert len(frames(response)) == 4


# The frames of a single choice.


def test_helpers_for_other_programs():
    request = ChatCompletionRequest(messages=USER)
    frontend = FakeFrontend()
    command = ServingGenerate("r", PromptInput("x"), SamplingParams(), True, "both")
    snapshot, delta, *_, reply = frontend.answer(command)
    chunk = chat_delta_chunk(delta, request, "m")
    assert (chunk["id"], chunk["model"]) == ("chatcmpl-r", "m")
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": "Hel"}
    later = ServingDelta("r", 3, "x", [1], 2)
    assert chat_delta_chunk(later, request, "m")["choices"][0]["delta"] == {"content": "x"}
    chunk = chat_finish_chunk(reply, request, "m")
    assert chunk["choices"][0]["delta"] == {}
    assert chunk["choices"][0]["finish_reason"] == "length"
    frame = denoise_chat_event(snapshot, request, "m")
    assert (frame["id"], frame["event"], frame["choices"]) == ("chatcmpl-r", "buffer_snapshot", [])
    frame = denoise_chat_event(reply, ChatCompletionRequest(messages=USER, model="n"), "m")
    assert (frame["event"], frame["model"]) == ("final", "n")
    assert frame["choices"][0]["delta"]["content"] == "Hello wörld"
    assert frame["usage"]["prompt_tokens"] == 5
