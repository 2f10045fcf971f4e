# SPDX-License-Identifier: Apache-2.0
"""Servers of images and videos take and answer what their OpenAPI documents say."""

from __future__ import annotations

import copy
import json
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")
for package in ("fastapi", "hypothesis", "jsonschema_rs", "schemathesis"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import httpx  # noqa: E402
import hypothesis  # noqa: E402
import jsonschema_rs  # noqa: E402
import uvicorn  # noqa: E402

from diffulex.omni import AsyncOmniDiffusion, RequestTimeout, worker  # noqa: E402
from diffulex.omni.serve import ServeOptions, create_images_app  # noqa: E402
from fixtures.omni_http import ask  # noqa: E402

_NUM_EXAMPLES = 12
#: They take about a second each to make.
_NUM_ILLEGAL = 6
_LEAST_ACCEPTED = 0.9
#: Seconds until a server, an answer or a video is given up.
WAIT_S = 60
_IMAGES = {
    "GET /health",
    "GET /metrics",
    "GET /server_info",
    "GET /v1/models",
    "POST /v1/images/edits",
    "POST /v1/images/generations",
}
_VIDEOS = {
    "DELETE /v1/videos/{video_id}",
    "GET /health",
    "GET /metrics",
    "GET /server_info",
    "GET /v1/models",
    "GET /v1/videos",
    "GET /v1/videos/{video_id}",
    "GET /v1/videos/{video_id}/content",
    "POST /v1/videos",
}
#: Forms carry files that are pictures, which no schema can say; tests of the routes send them.
_FORMS = {"POST /v1/images/edits"}
_DEFAULTS = {"height": 32, "width": 32, "num_inference_steps": 2}
GENERATIONS = "/v1/images/generations"


def with_defaults(directory, target, more):
    """A model that draws something small unless it is told otherwise."""
    path = shutil.copytree(directory, target)
    (path / "generation_config.json").write_text(json.dumps({"diffulex": {**_DEFAULTS, **more}}))
    return path


@pytest.fixture(scope="module")
def painter(tiny, tmp_path_factory):
    target = tmp_path_factory.mktemp("document") / "painter"
    return with_defaults(tiny("qwen"), target, {"true_cfg_scale": 1.0})


@contextmanager
def serving(model, **keywords) -> Iterator[str]:
    """The address of a server in a thread."""
    engine = AsyncOmniDiffusion(model=str(model), **keywords)
    server = uvicorn.Server(
        uvicorn.Config(create_images_app(engine, ServeOptions()), log_level="warning")
    )
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        end = time.monotonic() + WAIT_S
        while not server.started:
            assert thread.is_alive(), "the server has failed"
            assert time.monotonic() < end, "the server has not started"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()


@pytest.fixture(scope="module")
def images(painter):
    with serving(painter) as url:
        yield url


@pytest.fixture(scope="module")
def videos(tiny, tmp_path_factory):
    target = tmp_path_factory.mktemp("document") / "director"
    more = {"num_frames": 5, "guidance_scale": 1.0}
    with serving(with_defaults(tiny("wan"), target, more)) as url:
        yield url


def document_of(url):
    return httpx.get(f"{url}/openapi.json", timeout=WAIT_S).json()


def operations_of(document, url):
    import schemathesis

    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    found = [result.ok() for result in schema.get_all_operations()]
    return {f"{item.method.upper()} {item.path}": item for item in found}


def narrow(document, video_id=None):
    """With what depends on the model, on another field, or on what was drawn before."""
    document = copy.deepcopy(document)
    for operations in document["paths"].values():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                content.pop("multipart/form-data", None)
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in ("video_id", "after"):
                    parameter["schema"] = {"enum": [video_id]}
    bodies = [document["components"]["schemas"].get("ImageRequest")]
    if bodies == [None]:
        bodies = [document["paths"]["/v1/videos"]["post"]["requestBody"]["content"]]
        bodies = [media["schema"] for media in bodies[0].values()]
    for schema in bodies:
        fields = schema["properties"]
        fields["prompt"]["maxLength"] = 50
        fields["negative_prompt"] = {"type": "null"}
        fields["size"] = {"enum": ["32x32", "64x32", "auto", None]}
        fields["num_inference_steps"]["anyOf"][0]["maximum"] = 3
        for name, largest in (("n", 2), ("true_cfg_scale", 1), ("guidance_scale", 1)):
            if name in fields:
                forms = fields[name].get("anyOf", [fields[name]])
                forms[0]["maximum"] = largest
        # Coefficients of tea_cache are not known for all; settings ask for a cache beside them.
        fields["cache_backend"] = {"enum": ["none", "cache_dit", None]}
        fields["cache_config"] = {"enum": [{}, None]}
        if "sigmas" in fields:
            # As many as there are steps, and each less than the one before.
            fields["sigmas"] = {"enum": [[1, 0.5], None]}
            fields["num_inference_steps"]["anyOf"][0]["maximum"] = 2
        if "timeout_s" in fields:
            fields["timeout_s"] = {"enum": [60, 61.5, None]}
        if "num_frames" in fields:
            fields["num_frames"] = {"enum": [1, 5, None]}
            fields["seconds"] = {"enum": [0.25, "0.5", None]}
            fields["fps"]["maximum"] = 16
            # One transformer alone has no second scale.
            fields["guidance_scale_2"] = {"type": "null"}
    return document


def run(operation, mode, num_examples, check):
    @hypothesis.settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def inner(case):
        check(case)

    inner()


def test_every_route_is_in_the_document(images, videos):
    assert set(operations_of(document_of(images), images)) == _IMAGES
    assert set(operations_of(document_of(videos), videos)) == _VIDEOS


def check_legal(operation):
    """Declared statuses, content types and bodies, and few of them are refusals."""
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    statuses, refusals = Counter(), []

    def check(case):
        response = case.call(timeout=WAIT_S)
        case.validate_response(response, excluded_checks=[positive_data_acceptance])
        statuses[response.status_code] += 1
        if response.status_code >= 300:
            refusals.append(response.text)

    run(operation, GenerationMode.POSITIVE, _NUM_EXAMPLES, check)
    assert statuses[200] >= max(1, _LEAST_ACCEPTED * statuses.total()), refusals


def check_illegal(operation):
    """4xx with the body of every failure, for what the document does not allow."""
    from schemathesis import GenerationMode

    num_cases = 0

    def check(case):
        nonlocal num_cases
        num_cases += 1
        response = case.call(timeout=WAIT_S)
        case.validate_response(response)
        assert 400 <= response.status_code < 500
        body = response.json()
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["detail"] == body["error"]["message"] != ""

    run(operation, GenerationMode.NEGATIVE, _NUM_ILLEGAL, check)
    assert num_cases >= _NUM_ILLEGAL


@pytest.mark.slow  # many pictures
@pytest.mark.parametrize("name", sorted(_IMAGES - _FORMS))
def test_legal_requests_of_images_succeed_as_the_document_says(images, name):
    check_legal(operations_of(narrow(document_of(images)), images)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["POST /v1/images/edits", "POST /v1/images/generations"])
def test_illegal_requests_of_images_are_refused(images, name):
    check_illegal(operations_of(document_of(images), images)[name])
    assert httpx.get(f"{images}/health", timeout=WAIT_S).json() == {"status": "ready", "waiting": 0}


def make_video(url):
    """The id of a video that is completed."""
    fields, end = {"prompt": "a cat", "seed": 1}, time.monotonic() + WAIT_S
    job = httpx.post(f"{url}/v1/videos", json=fields, timeout=WAIT_S).json()
    while job["status"] in ("queued", "in_progress"):
        assert time.monotonic() < end, job
        time.sleep(0.02)
        job = httpx.get(f"{url}/v1/videos/{job['id']}", timeout=WAIT_S).json()
    assert job["status"] == "completed"
    return job["id"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(_VIDEOS - {"DELETE /v1/videos/{video_id}"}))
def test_legal_requests_of_videos_succeed_as_the_document_says(videos, name):
    document = narrow(document_of(videos), make_video(videos))
    check_legal(operations_of(document, videos)[name])
    listed = httpx.get(f"{videos}/v1/videos", params={"limit": 100}, timeout=WAIT_S)
    for job in listed.json()["data"]:
        answer = httpx.delete(f"{videos}/v1/videos/{job['id']}", timeout=WAIT_S)
        schema = {**document, "$ref": "#/components/schemas/VideoDeletedResponse"}
        assert jsonschema_rs.is_valid(schema, answer.json())


@pytest.mark.slow
def test_illegal_requests_of_videos_are_refused(videos):
    check_illegal(operations_of(document_of(videos), videos)["POST /v1/videos"])


def events_of(text):
    """(name, data) of each event but the last mark."""
    frames = text.strip().split("\n\n")
    assert frames.pop() == "data: [DONE]"
    parts = [frame.split("\ndata: ") for frame in frames]
    return [(name.removeprefix("event: "), json.loads(data)) for name, data in parts]


def stop_after_one_step(on_step, timeout_s):
    """In place of the limit of a worker, which looks at the clock."""

    def look(event):
        if event.step > 1:
            raise RequestTimeout.after(timeout_s, "timeout_s")
        return None if on_step is None else on_step(event)

    return look


def test_events_of_streams_are_those_of_the_document(images, monkeypatch):
    document = document_of(images)
    media = document["paths"][GENERATIONS]["post"]["responses"]["200"]["content"]
    *events, last = media["text/event-stream"]["schema"]["anyOf"]
    assert last["properties"] == {"data": {"const": "[DONE]"}}
    declared = {
        event["properties"]["event"]["const"]: event["properties"]["data"]["contentSchema"]
        for event in events
    }
    seen = set()
    monkeypatch.setattr(worker, "_limited", stop_after_one_step)
    late = {"timeout_s": WAIT_S}
    for fields in ({"partial_images": 1}, {"diffulex": {"preview_every": 1}}, late):
        body = {"prompt": "a cat", "stream": True, **fields}
        answer = httpx.post(f"{images}{GENERATIONS}", json=body, timeout=WAIT_S)
        for name, data in events_of(answer.text):
            schema = {**document, **declared[name]}
            assert jsonschema_rs.is_valid(schema, data), (name, data)
            assert not jsonschema_rs.is_valid(schema, {**data, "detail": 1, "size": 1})
            assert data.get("type", "error") == name or name == "error"
            seen.add(name)
    assert seen == set(declared)


def cached(**settings):
    return {"cache_backend": "cache_dit", "cache_config": settings}


#: Fields of requests for images, and whether they are legal for a model with `true_cfg_scale`.
FIELDS = [
    ({"n": 2, "size": "64x32", "seed": 0, "output_format": "webp"}, True),
    ({"stream": True, "partial_images": 3}, True),
    ({"stream": False, "partial_images": 0, "response_format": "b64_json"}, True),
    ({"guidance_scale": None, "true_cfg_scale": 1, "timeout_s": 5}, True),
    ({"model": "painter", "quality": "auto", "background": "opaque", "user": "a"}, True),
    ({"sigmas": [1, 0.5]}, True),
    ({"sigmas": None}, True),
    ({"sigmas": [1]}, False),
    ({"sigmas": [0.5, 0]}, False),
    ({"sigmas": [1.5, 1]}, False),
    ({"sigmas": ["1", "0.5"]}, False),
    ({"sigmas": 1}, False),
    ({"cache_backend": "none", "cache_config": None}, True),
    ({"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 1}}, True),
    (cached(Fn_compute_blocks=1.0, enable_taylorseer=True, scm_steps_policy="static"), True),
    (cached(residual_diff_threshold=0, max_accumulated_residual_diff_threshold=None), True),
    (cached(scm_steps_mask=[1, 0.0]), True),
    ({"cache_backend": "other"}, False),
    ({"cache_backend": 1}, False),
    (cached(residual_diff_threshold=-0.1), False),
    (cached(residual_diff_threshold="0.1"), False),
    (cached(max_warmup_steps=1.5), False),
    (cached(max_cached_steps=-2), False),
    (cached(max_cached_steps=2**31 - 1), True),
    (cached(max_cached_steps=2**31), False),
    (cached(enable_taylorseer=1), False),
    (cached(taylorseer_order=5), False),
    (cached(scm_steps_mask_policy="none"), False),
    (cached(scm_steps_mask=[1, 2]), False),
    (cached(coefficients=[1]), False),
    (cached(cache_backend="none"), False),
    (cached(num_inference_steps=8), False),
    ({"n": "2"}, False),
    ({"n": True}, False),
    ({"n": 0}, False),
    ({"stream": "true"}, False),
    ({"stream": True, "n": 2}, False),
    ({"partial_images": 1}, False),
    ({"diffulex": {"preview_every": 2}}, False),
    ({"diffulex": {"preview_every": "2"}, "stream": True}, False),
    ({"diffulex": {"other": 2}, "stream": True}, False),
    ({"guidance_scale": 3}, False),
    ({"size": "064x64"}, False),
    ({"size": "64x"}, False),
    ({"prompt": " \t\u2003"}, False),
    ({"model": "other"}, False),
    ({"num_inference_steps": 1}, False),
    ({"seed": -1}, False),
    ({"latents": []}, False),
]


def test_the_document_and_the_checks_agree(images):
    document = document_of(images)
    schema = {**document, "$ref": "#/components/schemas/ImageRequest"}
    for fields, is_legal in FIELDS:
        body = {"prompt": "a cat", **fields}
        assert jsonschema_rs.is_valid(schema, body) is is_legal, fields
        answer = httpx.post(f"{images}{GENERATIONS}", json=body, timeout=WAIT_S)
        assert (answer.status_code == 200) is is_legal, (fields, answer.text[:300])


def test_the_form_of_edits_has_its_files_and_fields(tiny):
    async def body(client, _engine):
        return (await client.get("/openapi.json")).json()

    document = ask(tiny("flux_img2img"), body)
    content = document["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]
    schema = content["multipart/form-data"]["schema"]
    assert schema["properties"]["image"] == {"type": "string", "format": "binary"}
    assert schema["properties"]["diffulex[preview_every]"]["anyOf"][0]["minimum"] == 1
    assert schema["properties"]["strength"]["anyOf"][0]["exclusiveMinimum"] == 0
    assert schema["properties"]["model"] == {"enum": ["flux_img2img", None]}
    settings = schema["properties"]["cache_config[residual_diff_threshold]"]["anyOf"]
    assert settings == [{"type": "number", "minimum": 0}, {"type": "null"}]
    (mask, _) = schema["properties"]["cache_config[scm_steps_mask][]"]["anyOf"]
    assert (mask["type"], mask["items"]["maximum"]) == ("array", 1)
    assert "cache_config[scm_steps_mask]" not in schema["properties"]
    # No coefficients are known, and a request may bring them.
    assert schema["properties"]["cache_backend"]["enum"] == ["none", "cache_dit", "tea_cache", None]
    items, _ = schema["properties"]["sigmas[]"]["anyOf"]
    assert (items["type"], items["minItems"], items["maxItems"]) == ("array", 1, 200)
    assert set(schema["required"]) == {"prompt", "image"}
    assert "$ref" not in json.dumps(schema)


def test_without_a_cache_the_document_has_none(tiny):
    async def body(client, _engine):
        answer = await client.get("/server_info")
        return (await client.get("/openapi.json")).json(), answer.json()["cache_backends"]

    for model, keywords, expected in (
        ("ovis", {}, ["none"]),
        ("qwen", {"allow_request_cache": False}, []),
    ):
        document, names = ask(tiny(model), body, **keywords)
        properties = document["components"]["schemas"]["ImageRequest"]["properties"]
        assert properties["cache_backend"] == {"enum": [*expected, None]}
        assert properties["cache_config"] == {"type": "null"}
        assert names == expected


def test_keys_are_in_the_document_where_they_are_asked_for(painter):
    async def body(client, _engine):
        return (await client.get("/openapi.json", headers={"authorization": "Bearer k"})).json()

    document = ask(painter, body, ServeOptions(api_keys=("k",)))
    asking = {
        path for path, methods in document["paths"].items()
        if any("security" in operation for operation in methods.values())
    }  # fmt: skip
    assert asking == {"/server_info", "/v1/images/edits", GENERATIONS, "/v1/models"}


def test_no_body_of_the_document_is_left_open(images, videos):
    for url in (images, videos):
        document = document_of(url)
        for methods in document["paths"].values():
            for operation in methods.values():
                assert "422" not in operation["responses"]
                assert {"401", "405", "500"} <= set(operation["responses"])
        ids = [op["operationId"] for ops in document["paths"].values() for op in ops.values()]
        assert len(ids) == len(set(ids))
        jsonschema_rs.validator_for({**document, "$ref": "#/components/schemas/ErrorResponse"})
