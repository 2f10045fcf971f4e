# SPDX-License-Identifier: Apache-2.0
"""The routes over a fake frontend: what is asked of it, and what clients get."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from diffulex.server.http.api_server import (
    ChatCompletionRequest,
    GenerateRequest,
    create_app,
    maybe_await,
    sampling_params_from_request,
)
from diffulex.wire.protocol import ChatInput, PromptInput, ServingReply
from fake_frontend import FakeFrontend
from http_client import AppClient, check_error, frames

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared():
    frontend = FakeFrontend()
    return create_app(frontend), frontend


@pytest.fixture
def client(shared, frontend):
    """A client of one application for all tests: making one takes longer than asking it."""
    app, own = shared
    own.__dict__ = frontend.__dict__
    return AppClient(app)


@pytest.fixture
def frontend():
    return FakeFrontend()


# The native route.


def test_generate_has_the_documented_defaults(client, frontend):
    response = client.post("/generate", {"prompt": "x"})
    assert response.status_code == 200
    (command,) = frontend.commands
    assert command.input == PromptInput("x")
    assert (command.stream, command.user, command.strict_max_tokens) == (False, None, False)
    params = command.sampling_params
    assert (params.temperature, params.max_tokens, params.max_nfe) == (1.0, 512, None)
    assert (params.max_repetition_run, params.ignore_eos, params.stop) == (None, False, ())
    assert params.skip_special_tokens is False
    assert params.seed is not None
    assert command.created_time > 1e9


def test_generate_answers_with_the_reply(client):
    response = client.post("/generate", {"prompt": "x", "seed": 7})
    body = response.json()
    assert body["id"] == response.headers["x-request-id"] == "diffulex-0"
    assert body["text"] == body["full_text"] == "Hello wörld"
    assert body["token_ids"] == body["full_token_ids"] == [1, 2, 3]
    assert body["finish_reason"] == body["finish_detail"] == "max_new_tokens_reached"
    assert body["seed"] == 7
    assert "event" not in body
    assert body["usage"]["total_tokens"] == 8
    assert "prompt_token_ids" not in body


def test_generate_passes_every_parameter(client, frontend):
    body = {
        "prompt": [1, 2],
        "max_tokens": 9,
        "temperature": 0.5,
        "max_nfe": 8,
        "max_repetition_run": 7,
        "ignore_eos": True,
        "user": "somebody",
        "seed": 6,
        "stop": "end",
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "min_tokens": 4,
        "top_p": 0.75,
        "top_k": 3,
        "skip_special_tokens": True,
        "logprobs": 2,
        "decoding": {"accept_threshold": 0.25},
        "return_prompt_token_ids": True,
    }
    assert client.post("/generate", body).json()["prompt_token_ids"] == [1, 2]
    (command,) = frontend.commands
    params = command.sampling_params
    assert command.input == PromptInput([1, 2])
    assert command.user == "somebody"
    assert (params.max_tokens, params.temperature, params.max_nfe) == (9, 0.5, 8)
    assert (params.max_repetition_run, params.ignore_eos, params.seed) == (7, True, 6)
    assert (params.stop, params.stop_token_ids, params.min_tokens) == (("end",), (5,), 4)
    assert (params.top_p, params.top_k, params.logprobs) == (0.75, 3, 2)
    assert params.include_stop_str_in_output is True
    assert params.skip_special_tokens is True
    assert params.decoding == {"accept_threshold": 0.25}


def test_default_max_tokens_is_an_option(frontend):
    client = AppClient(create_app(frontend, default_max_tokens=33))
    client.post("/generate", {"prompt": "x"})
    client.post("/v1/chat/completions", {"messages": USER, "max_tokens": None})
    client.post("/v1/completions", {"prompt": "x"})
    assert [c.sampling_params.max_tokens for c in frontend.commands] == [33, 33, 16]
    assert not any(command.strict_max_tokens for command in frontend.commands)


def test_almost_zero_temperature_is_greedy(client, frontend):
    client.post("/generate", {"prompt": "x", "temperature": 9e-6})
    assert frontend.commands[0].sampling_params.temperature == 0.0


def test_drawn_seeds_differ_and_survive_doubles(client):
    seeds = {client.post("/generate", {"prompt": "x"}).json()["seed"] for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**53 for seed in seeds)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_unseeded_requests_at_temperature_0_have_the_seed_of_the_engine(client, frontend, path):
    frontend.info = {"seed": 5}
    for _ in range(2):
        client.post(path, {"prompt": "x", "temperature": 0})
    client.post(path, {"prompt": "x", "temperature": 0, "seed": 7})
    assert [command.sampling_params.seed for command in frontend.commands] == [5, 5, 7]


@pytest.mark.parametrize("seed", [-2, -(2**63), 2**63, 2**64 - 1])
def test_any_integer_of_64_bits_is_a_seed(client, frontend, seed):
    assert client.post("/generate", {"prompt": "x", "seed": seed}).json()["seed"] == seed


def test_seed_minus_1_draws_one(client, frontend):
    seeds = {client.post("/generate", {"prompt": "x", "seed": -1}).json()["seed"] for _ in range(3)}
    assert len(seeds) == 3
    assert min(seeds) >= 0


def test_unpaired_surrogates_are_replaced(client, frontend):
    response = client.request(
        "POST",
        "/generate",
        content=b'{"prompt": "a\\ud800b", "request_id": "r"}',
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 200
    assert frontend.commands[0].input == PromptInput("a?b")


# Chat.


def test_chat_completion(client, frontend):
    response = client.post("/v1/chat/completions", {"messages": USER, "model": "fake"})
    body = response.json()
    assert body["id"] == "chatcmpl-diffulex-0"
    assert body["object"] == "chat.completion"
    assert isinstance(body["created"], int)
    assert body["model"] == "fake"
    (choice,) = body["choices"]
    assert choice["index"] == 0
    assert choice["message"] == {"role": "assistant", "content": "Hello wörld"}
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert choice["diffulex"]["finish_detail"] == "max_new_tokens_reached"
    assert choice["diffulex"]["nfe"] == 6
    assert choice["diffulex"]["num_masked"] == 0
    assert frontend.commands[0].input == ChatInput(USER)
    assert frontend.commands[0].sampling_params.max_tokens == 512
    assert frontend.commands[0].sampling_params.skip_special_tokens is True


def test_usage_has_integers_and_what_the_diffusion_cost(client):
    usage = client.post("/v1/chat/completions", {"messages": USER}).json()["usage"]
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
        "nfe": 6,
        "dllm_prefill_steps": 1,
        "dllm_decode_steps": 5,
        "dllm_prefill_output_tokens": 0,
        "dllm_decode_output_tokens": 3,
        "prefill_time_s": 0.25,
        "decode_time_s": 0.5,
        "e2e_time_s": 1.0,
        "queue_time_s": 0.01,
        "ttft_s": 0.1,
        "tpf": 0.5,
        "decode_tpf": 0.6,
        "decode_tps": 6.0,
        "e2e_tps": 4.0,
        "dllm_time_semantics": "batch_step_wall",
    }


def test_usage_of_a_plain_reply_is_still_integers(client, frontend):
    frontend.script = lambda command: [ServingReply(command.rid, "", [], 0)]
    usage = client.post("/v1/completions", {"prompt": [1, 2, 3]}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)
    assert usage["tpf"] is None
    assert usage["decode_tps"] is None


def test_usage_without_diffusion(frontend):
    client = AppClient(create_app(frontend, disable_dllm_usage=True))
    usage = client.post("/v1/chat/completions", {"messages": USER}).json()["usage"]
    assert set(usage) == {
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
    }


def test_max_completion_tokens_wins(client, frontend):
    body = {"messages": USER, "max_tokens": 5, "max_completion_tokens": 6}
    client.post("/v1/chat/completions", body)
    client.post("/v1/chat/completions", {"messages": USER, "max_tokens": 5})
    client.post("/v1/completions", {"prompt": "x", "max_tokens": 5})
    assert [c.sampling_params.max_tokens for c in frontend.commands] == [6, 5, 5]
    assert all(command.strict_max_tokens for command in frontend.commands)


def test_parts_and_missing_content_become_texts(client, frontend):
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "assistant", "content": None},
        {"role": "user", "content": "c", "name": "ignored"},
    ]
    assert client.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    assert frontend.commands[0].input.messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("detail", "reason"),
    [
        ("eos_token_generated", "stop"),
        ("stop", "stop"),
        ("max_new_tokens_reached", "length"),
        ("max_model_len_reached", "length"),
        ("max_nfe_reached", "length"),
        ("max_repetition_run_reached", "length"),
        ("completed_without_reason", "stop"),
    ],
)
def test_finish_reasons_are_those_of_openai(client, frontend, detail, reason):
    frontend.script = lambda command: [frontend.reply(command, finish_reason=detail)]
    (choice,) = client.post("/v1/chat/completions", {"messages": USER}).json()["choices"]
    assert (choice["finish_reason"], choice["diffulex"]["finish_detail"]) == (reason, detail)


def test_neutral_fields_are_accepted(client):
    body = {
        "messages": USER,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "reasoning_effort": "low",
        "guided_json": None,
        "made_up": 1,
        "n": None,
        "stream": None,
    }
    assert client.post("/v1/chat/completions", body).status_code == 200
    body = {"prompt": "x", "best_of": 1, "suffix": None, "logprobs": None, "echo": None}
    assert client.post("/v1/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"suffix": ""}),
        ("/v1/completions", {"stop": ""}),
        ("/v1/chat/completions", {"stop": ""}),
        ("/v1/chat/completions", {"tools": [{"type": "function"}], "tool_choice": "none"}),
        ("/v1/chat/completions", {"functions": [{"name": "f"}], "function_call": "none"}),
    ],
)
def test_fields_that_are_filled_but_ask_nothing(client, frontend, path, fields):
    body = {"prompt": "x"} if path.endswith("/v1/completions") else {"messages": USER}
    assert client.post(path, body | fields).status_code == 200
    assert frontend.commands[0].sampling_params.stop == ()


# Several choices and prompts.


def test_choices_have_seeds_of_their_own(client, frontend):
    body = {"messages": USER, "n": 3, "seed": 10}
    answer = client.post("/v1/chat/completions", body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [command.rid for command in frontend.commands] == [f"diffulex-0-{i}" for i in range(3)]
    assert [command.sampling_params.seed for command in frontend.commands] == [10, 11, 12]
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [
        (-3, [-3, -2, 2**64 - 1, 0]),
        (2**63 - 2, [2**63 - 2, 2**63 - 1, 0, 1]),
        (2**64 - 1, [2**64 - 1, 0, 1, 2]),
    ],
)
def test_seeds_of_choices_at_the_ends_of_the_range(client, frontend, seed, seeds):
    client.post("/v1/chat/completions", {"messages": USER, "n": 4, "seed": seed})
    assert [command.sampling_params.seed for command in frontend.commands] == seeds


def test_choices_are_draws_where_temperature_0_draws(client, frontend):
    frontend.info = {"seed": 5, "draws_at_zero": True}
    for _ in range(2):
        body = {"messages": USER, "n": 3, "temperature": 0}
        answer = client.post("/v1/chat/completions", body).json()
        assert [choice["diffulex"]["seed"] for choice in answer["choices"]] == [5, 6, 7]
    assert len(frontend.commands) == 6


def test_greedy_choices_are_computed_once(client, frontend):
    body = {"messages": USER, "n": 3, "temperature": 0}
    answer = client.post("/v1/chat/completions", body).json()
    assert len(answer["choices"]) == 3
    assert [command.rid for command in frontend.commands] == ["diffulex-0"]
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["usage"]["nfe"] == 6


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([1.0, 2], [[1, 2]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_completions_take_every_form_of_prompt(client, frontend, prompt, inputs):
    answer = client.post("/v1/completions", {"prompt": prompt, "n": 2}).json()
    assert [command.input.prompt for command in frontend.commands[::2]] == inputs
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(inputs)))
    assert answer["object"] == "text_completion"
    assert answer["id"] == "cmpl-diffulex-0"
    assert all(choice["text"] == "Hello wörld" for choice in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == 5 * len(inputs)
    assert answer["usage"]["completion_tokens"] == 6 * len(inputs)


def test_echo_puts_the_prompt_in_front(client):
    answer = client.post("/v1/completions", {"prompt": ["a", "b"], "echo": True}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["aHello wörld", "bHello wörld"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_asks_no_engine(client, frontend, stream):
    body = {"prompt": ["a", "b"], "echo": True, "max_tokens": 0, "n": 2, "stream": stream}
    response = client.post("/v1/completions", body)
    if stream:
        chunks = frames(response)[:-1]
        texts = {c["choices"][0]["index"]: c["choices"][0]["text"] for c in chunks[::2]}
        assert [texts[index] for index in range(4)] == ["a", "a", "b", "b"]
        assert {c["choices"][0]["finish_reason"] for c in chunks[1::2]} == {"length"}
    else:
        answer = response.json()
        assert [choice["text"] for choice in answer["choices"]] == ["a", "a", "b", "b"]
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        assert answer["usage"]["completion_tokens"] == 0
    assert not frontend.commands


def test_no_tokens_without_echo_are_refused(client):
    response = client.post("/v1/completions", {"prompt": "a", "max_tokens": 0})
    check_error(response, 400, "invalid_request_error", "invalid_request", "max_tokens")


def test_a_failed_choice_fails_the_request_and_ends_the_others(client, frontend):
    frontend.delay_s = 0.01
    plain = frontend.script

    def script(command):
        return [] if command.rid.endswith("-1") else plain(command)

    frontend.script = script
    assert client.post("/v1/completions", {"prompt": "x", "n": 3}).status_code == 503
    assert frontend.num_aborted == 3


# Log-probabilities.

RECORDS = [
    {
        "token_id": index + 1,
        "token": text,
        "bytes": list(text.encode()),
        "logprob": -0.5 * index,
        "step": 2,
        "confidence": 0.9,
        "top": [{"token_id": 1, "token": "Hel", "bytes": [72], "logprob": -0.25}],
    }
    for index, text in enumerate(("Hel", "lo ", "wörld"))
]


def test_logprobs_of_a_chat(client, frontend):
    frontend.script = lambda command: [frontend.reply(command, logprobs=RECORDS)]
    body = {"messages": USER, "logprobs": True, "top_logprobs": 1}
    (choice,) = client.post("/v1/chat/completions", body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["Hel", "lo ", "wörld"]
    assert content[1] == {
        "token": "lo ",
        "logprob": -0.5,
        "bytes": [108, 111, 32],
        "top_logprobs": [{"token": "Hel", "logprob": -0.25, "bytes": [72]}],
        "diffulex": {"step": 2, "confidence": 0.9},
    }
    assert frontend.commands[0].sampling_params.logprobs == 1


def test_text_offsets_are_those_of_the_text(client, frontend):
    offsets = (0, 3, 3, 5)  # the second token is a special one, the text has no trace of it
    records = [{**RECORDS[0], "token": "<|x|>", "text_offset": offset} for offset in offsets]
    frontend.script = lambda command: [frontend.reply(command, logprobs=records)]
    body = {"prompt": "ab", "logprobs": 0, "echo": False}
    (choice,) = client.post("/v1/completions", body).json()["choices"]
    assert choice["logprobs"]["text_offset"] == list(offsets)


@pytest.mark.parametrize("role", ["tool", "function"])
def test_turns_of_tools_are_refused_by_name(client, frontend, role):
    body = {"messages": [*USER, {"role": role, "content": "x"}]}
    response = client.post("/v1/chat/completions", body)
    kind = "invalid_request_error"
    message = check_error(response, 400, kind, "invalid_request", "messages.1.role")
    assert message.endswith(f"tools are not supported, got {role!r}")
    assert not frontend.commands


@pytest.mark.parametrize(("wanted", "top"), [(0, None), (2, [{"Hel": -0.25}] * 3)])
def test_logprobs_of_a_completion(client, frontend, wanted, top):
    frontend.script = lambda command: [frontend.reply(command, logprobs=RECORDS)]
    body = {"prompt": "ab", "logprobs": wanted}
    (choice,) = client.post("/v1/completions", body).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["Hel", "lo ", "wörld"],
        "token_logprobs": [0.0, -0.5, -1.0],
        "top_logprobs": top,
        "text_offset": [0, 3, 6],
    }


# Request models and helpers of the package.


def test_sampling_params_from_either_request():
    payload = GenerateRequest(prompt="x", stop=None, max_tokens=3.0)
    params = sampling_params_from_request(payload)
    assert (params.max_tokens, params.stop, params.temperature) == (3, (), 1.0)
    chat = ChatCompletionRequest(messages=USER, temperature=0.5, stop=["a", "b"])
    params = sampling_params_from_request(chat)
    assert (params.max_tokens, params.stop, params.temperature) == (512, ("a", "b"), 0.5)


def test_maybe_await():
    async def later():
        return 1

    async def both():
        return [await maybe_await(later()), await maybe_await(2)]

    assert asyncio.run(both()) == [1, 2]


# What is served, and how it is.


def test_models(frontend):
    app = create_app(frontend, served_model_name=("first", "org/second"), model="/models/tiny")
    client = AppClient(app)
    cards = client.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["first", "org/second"]
    assert cards["data"][0]["object"] == "model"
    assert cards["data"][0]["owned_by"] == "diffulex"
    assert cards["data"][0]["root"] == "tiny"
    assert client.get("/v1/models/org/second").json()["id"] == "org/second"
    assert client.get("/v1/models/other").status_code == 404
    body = {"messages": USER, "model": "org/second"}
    assert client.post("/v1/chat/completions", body).json()["model"] == "org/second"
    assert client.post("/v1/chat/completions", {"messages": USER}).json()["model"] == "first"


def test_any_model_name_on_request(frontend):
    client = AppClient(create_app(frontend, accept_any_model=True))
    body = {"messages": USER, "model": "whatever"}
    assert client.post("/v1/chat/completions", body).json()["model"] == "whatever"


@pytest.mark.parametrize("path", ["/health", "/ready", "/health/live", "/ping", "/version"])
def test_health_of_a_ready_server(client, path):
    assert client.get(path).status_code == 200


def test_ping_can_be_headed(client):
    assert client.request("HEAD", "/ping").status_code == 200


@pytest.mark.parametrize("state", ["starting", "draining", "unresponsive", "stuck", "dead"])
def test_health_says_why_it_is_not_ready(client, frontend, state):
    frontend.state, frontend.retry_after_s = state, 7
    for path in ("/health", "/ready"):
        response = client.get(path)
        assert response.status_code == 503
        assert response.json()["status"] == state
        code = response.json()["error"]["code"]
        known = Path(__file__).parents[3].joinpath("docs", "serving.md").read_text("utf-8")
        assert f"`{code}`" in known
        assert code == {"dead": "engine_dead"}.get(state, code)
        assert response.headers["retry-after"] == "7"
    assert client.get("/health/live").status_code == 200


def test_server_info(frontend):
    frontend.info = {"block_size": 8, "decoding": {"accept_threshold": 0.9}, "device": "cuda:0"}
    frontend.stats = {"last_gen_throughput": 12.5}
    client = AppClient(create_app(frontend, settings={"port": 1}))
    info = client.get("/server_info").json()
    assert info["block_size"] == 8
    assert info["decoding"] == {"accept_threshold": 0.9}
    assert info["server_args"] == {"port": 1}
    assert info["state"] == "ready"
    assert client.get("/get_server_info").json()["internal_states"] == [
        {"last_gen_throughput": 12.5}
    ]
    assert client.get("/version").json()["cuda"] is True


def test_lifespan_starts_and_stops_the_frontend(frontend):
    calls = []

    async def start():
        calls.append("start")

    frontend.start, frontend.stop = start, lambda: calls.append("stop")
    client = AppClient(create_app(frontend))
    assert client.get("/health").status_code == 200
    assert calls == ["start", "stop"]


def test_unknown_options_are_errors(frontend):
    with pytest.raises(TypeError, match="max_bodies"):
        create_app(frontend, max_bodies=1)


def test_the_page_is_served_unless_turned_off(frontend):
    client = AppClient(create_app(frontend))
    assert client.get("/ui").headers["content-type"].startswith("text/html")
    assert client.get("/").headers["location"] == "/ui"
    client = AppClient(create_app(frontend, disable_ui=True))
    assert client.get("/ui").status_code == client.get("/").status_code == 404


def test_the_routes_are_those_that_were_made():
    """Not made anew at the first request, which would wait for it."""
    routes = {getattr(route, "path", None): route for route in create_app(FakeFrontend()).routes}
    for path in ("/generate", "/tokenize", "/health", "/v1/chat/completions"):
        assert isinstance(routes[path], APIRoute)
