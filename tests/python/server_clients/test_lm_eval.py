# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness' endpoint models against the real server."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.expected_answers import MAX_TOKENS, Expected
from fixtures.live_server import LiveServer

models = pytest.importorskip(
    "lm_eval.models.openai_completions", reason="lm-eval or what it needs is not installed"
)


def _requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=item, idx=index)  # type: ignore[arg-type]
        for index, item in enumerate(arguments)
    ]


def _settings() -> dict[str, Any]:
    return {"until": ["\n\n"], "max_gen_toks": MAX_TOKENS, "temperature": 0, "do_sample": False}


def _completions(server: LiveServer, **settings: Any) -> Any:
    return models.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model="demo", max_retries=1, **settings
    )


def _rendered(server: LiveServer, items: list[Expected]) -> list[str]:
    """The text of each conversation, which is what a harness without chat route sends."""
    import httpx

    texts = []
    for item in items:
        response = httpx.post(f"{server.url}/detokenize", json={"tokens": item.chat_ids})
        texts.append(response.json()["prompt"])
    return texts


def test_texts_are_answered_in_order(server: LiveServer, expected: list[Expected]) -> None:
    model = _completions(server, tokenizer_backend=None, tokenized_requests=False, num_concurrent=1)
    prompts = _rendered(server, expected)
    answers = model.generate_until(
        _requests("generate_until", [(prompt, _settings()) for prompt in prompts]),
        disable_tqdm=True,
    )
    assert answers == [item.text.split("\n\n")[0] for item in expected]


def test_the_servers_tokenizer_is_found_and_used(
    server: LiveServer, expected: list[Expected]
) -> None:
    """Batches of token ids, several at once: prompts were encoded by the server before."""
    model = _completions(server, tokenizer_backend="auto", batch_size=2, num_concurrent=2)
    assert model.tokenizer_backend == "remote"
    prompts = _rendered(server, expected)
    assert [model.tok_encode(prompt) for prompt in prompts] == [item.chat_ids for item in expected]
    answers = model.generate_until(
        _requests("generate_until", [(prompt, _settings()) for prompt in prompts]),
        disable_tqdm=True,
    )
    assert answers == [item.text.split("\n\n")[0] for item in expected]


def test_stop_strings_are_cut_off(server: LiveServer, expected: list[Expected]) -> None:
    model = _completions(server, tokenizer_backend=None, tokenized_requests=False)
    item = next(item for item in expected if "=" in item.text)
    (prompt,) = _rendered(server, [item])
    settings = {**_settings(), "until": ["=", "\n"]}
    (answer,) = model.generate_until(
        _requests("generate_until", [(prompt, settings)]), disable_tqdm=True
    )
    assert answer == item.text[: min(item.text.index(c) for c in "=\n" if c in item.text)]


def test_likelihoods_are_refused_and_never_made_up(server: LiveServer) -> None:
    """Sampling knows no left-to-right likelihood; a placeholder number would be worse than none."""
    import requests

    model = _completions(server, tokenizer_backend="remote")
    with pytest.raises(requests.HTTPError) as caught:
        model.loglikelihood(_requests("loglikelihood", [("1 + 2 =", " 3")]), disable_tqdm=True)
    response = caught.value.response
    assert response.status_code == 400
    assert "logprobs" in response.json()["error"]["message"]


def test_the_chat_model_of_the_harness(server: LiveServer, expected: list[Expected]) -> None:
    model = models.LocalChatCompletion(
        base_url=f"{server.url}/v1/chat/completions",
        model="demo",
        max_retries=1,
        tokenizer_backend=None,
        tokenized_requests=False,
    )
    prompts = [
        model.apply_chat_template([{"role": "user", "content": item.question}]) for item in expected
    ]
    answers = model.generate_until(
        _requests("generate_until", [(prompt, _settings()) for prompt in prompts]),
        disable_tqdm=True,
    )
    assert answers == [item.text.split("\n\n")[0] for item in expected]
