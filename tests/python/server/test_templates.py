# SPDX-License-Identifier: Apache-2.0
"""Templates over HTTP: what the engine is asked for, and which prompts may hold masks."""

from __future__ import annotations

from typing import Any

import pytest

from byte_tokenizer import MASK
from diffulex.config.sampling_params import SamplingParams
from diffulex.server.http.api_server import create_app
from diffulex.serving.admission import AdmissionError, AdmissionLimits
from diffulex.wire.protocol import sampling_params_from_dict, sampling_params_to_dict
from fake_frontend import FakeFrontend
from http_client import AppClient, check_error
from template_frontend import make_frontend

BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "x"},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
TEMPLATE = [5, None, None, 7, *[None] * 30]


@pytest.mark.parametrize("path", BODIES)
def test_requests_carry_them(path: str) -> None:
    frontend = FakeFrontend()
    client = AppClient(create_app(frontend))
    body = {**BODIES[path], "template_token_ids": TEMPLATE}
    assert client.post(path, body).status_code == 200
    assert client.post(path, {**body, "max_tokens": 40}).status_code == 200
    for command in frontend.commands:
        params = command.sampling_params
        assert params.template_token_ids == tuple(TEMPLATE)
        assert (params.max_tokens, params.min_tokens) == (34, 4)
        assert sampling_params_from_dict(sampling_params_to_dict(params)) == params
    assert len(frontend.commands) == 2
    for wrong in ([], "abc", [1, "a"], [-1], [True]):
        response = client.post(path, {**body, "template_token_ids": wrong})
        check_error(response, 400, "invalid_request_error", "invalid_request", "template_token_ids")
    response = client.post(path, {**body, "max_tokens": 8})
    assert "expected at most max_tokens (8) positions, got 34" in response.text
    assert response.status_code == 400


def test_masks_in_prompts_need_the_flag() -> None:
    sizes = {"block_size": 4, "buffer_size": 4, "page_size": 4, "num_pages": 64}
    limits = {"max_model_len": 64, "vocab_size": 50, "max_num_batched_tokens": 256, **sizes}
    params = SamplingParams(max_tokens=8)
    refusing = AdmissionLimits(**limits, mask_token_id=9)
    with pytest.raises(AdmissionError, match="expected no mask token, got id 9") as caught:
        refusing.check([1, 9], params, is_strict=False)
    assert caught.value.code == "mask_token_in_prompt"
    allowing = AdmissionLimits(**limits, mask_token_id=9, allows_mask_in_prompt=True)
    allowing.check([1, 9], params, is_strict=False)


def test_masks_in_prompts_are_limited_as_answers_are() -> None:
    sizes = {"block_size": 4, "buffer_size": 2, "page_size": 4, "num_pages": 10}
    limits = AdmissionLimits(
        **{"max_model_len": 64, "vocab_size": 50, "max_num_batched_tokens": 32, **sizes},
        mask_token_id=9,
        allows_mask_in_prompt=True,
    )
    params = SamplingParams(max_tokens=8)
    fits, longer = [1, 2, *[9] * 8], [1, 2, 9, 3, *[9] * 7]
    limits.check(fits, params, is_strict=True)
    assert limits.lengths(fits, params) == (2, 8)
    # What the client did not ask for is as long as the template, as with template_token_ids.
    limits.check(longer, params, is_strict=False)
    assert limits.lengths(longer, params) == (2, 9)
    with pytest.raises(AdmissionError, match=r"max_tokens: expected at least 9, .*, got 8") as e:
        limits.check(longer, params, is_strict=True)
    assert (e.value.param, e.value.code) == ("max_tokens", "invalid_request")
    # Pages and rows are those of prompt and template, not of the masks and another answer beside.
    limits.check([1, 2, *[9] * 36], SamplingParams(max_tokens=60), is_strict=True)
    with pytest.raises(AdmissionError, match="fit into 10 pages of 4 tokens, got 2 and 39 tokens"):
        limits.check([1, 2, *[9] * 39], SamplingParams(max_tokens=60), is_strict=True)
    with pytest.raises(AdmissionError, match="expected at most 63 tokens"):
        limits.check([1, *[9] * 63], SamplingParams(max_tokens=64), is_strict=True)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_prompt_with_masks_says_how_long_its_answer_is(path: str) -> None:
    """A request need not, but where it does it says enough; its trajectory has the same bound."""
    frontend = make_frontend()
    frontend.info["allows_mask_in_prompt"] = True
    client = AppClient(create_app(frontend, max_trajectory_tokens=40, default_max_tokens=16))
    for length, given in (
        (50, {}), (20, {"max_tokens": 20}), (40, {"return_trajectory": "full"}),
        (20, {"max_tokens": 20, "return_trajectory": "full"}),
    ):  # fmt: skip
        response = client.post(path, {"prompt": [65, 66, *[MASK] * length], **given})
        assert response.status_code == 200, response.text
    for length, given, param, text in (
        (20, {"max_tokens": 19}, "max_tokens", "max_tokens: expected at least 20, "),
        (41, {"return_trajectory": "blocks"}, "return_trajectory",
         "return_trajectory: expected the prompt from its first mask on to be at most 40 with it"
         " (--max-trajectory-tokens), got 41"),
    ):  # fmt: skip
        response = client.post(path, {"prompt": [65, 66, *[MASK] * length], **given})
        error = check_error(response, 400, "invalid_request_error", "invalid_request", param)
        assert text in error
    # A prompt without masks is answered as far as the model goes.
    assert client.post("/generate", {"prompt": [65], "max_tokens": 200}).status_code == 200
