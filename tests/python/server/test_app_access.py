# SPDX-License-Identifier: Apache-2.0
"""Who may ask, from where and how much: keys, origins, body limit."""

from __future__ import annotations

import functools
import json
import logging

import pytest

from diffulex.server.args import parse_args
from diffulex.server.http.api_server import create_app
from diffulex.server.http.service_routes import ADMIN_PATHS, WEIGHT_PATHS
from diffulex.serving.frontend import FrontendLimits
from fake_frontend import FakeFrontend
from http_client import AppClient, check_error

USER = [{"role": "user", "content": "hi"}]
CHAT, NATIVE = "/v1/chat/completions", "/generate"

# Bodies over the limit.


def test_bodies_over_the_limit():
    app = create_app(FakeFrontend(), max_body_bytes=200, allowed_origins=("https://page",))
    client = AppClient(app)
    assert client.post(NATIVE, {"prompt": "a" * 100}).status_code == 200
    big = json.dumps({"prompt": "a" * 200}).encode()
    headers = {"content-type": "application/json", "origin": "https://page"}
    response = client.request("POST", NATIVE, content=big, headers=headers)
    check_error(response, 413, "invalid_request_error", "request_too_large")
    assert response.headers["access-control-allow-origin"] == "https://page"

    async def chunks():
        for start in range(0, len(big), 10):
            yield big[start : start + 10]

    response = client.request("POST", NATIVE, content=chunks(), headers=headers)
    check_error(response, 413, "invalid_request_error", "request_too_large")
    count = 'requests_total{model_name="fake",route="/generate",status="413"} 2.0'
    assert count in client.get("/metrics").text


def test_bodies_over_the_limit_are_refused_before_keys_are_read():
    app = create_app(FakeFrontend(), max_body_bytes=200, api_key=("k",))
    response = AppClient(app).post(NATIVE, {"prompt": "a" * 200})
    check_error(response, 413, "invalid_request_error", "request_too_large")


# More than the queue takes.


def test_what_no_queue_would_ever_take_is_not_worth_a_retry():
    frontend = FakeFrontend()
    frontend.limits = FrontendLimits(max_queue_size=2, max_queued_tokens=100)
    frontend.info = {"max_num_reqs": 1}
    client = AppClient(create_app(frontend))
    body = {"prompt": ["a", "b", "c", "d"], "max_tokens": 4}
    message = check_error(
        client.post("/v1/completions", body), 400, "invalid_request_error", "invalid_request", "n"
    )
    assert "at most 3 choices" in message
    message = check_error(
        client.post(NATIVE, {"prompt": [1] * 50, "max_tokens": 51, "request_id": "a"}),
        400,
        "invalid_request_error",
        "invalid_request",
        "max_tokens",
    )
    assert "at most 100 tokens" in message
    assert not frontend.commands
    for good in (
        {**body, "prompt": ["a", "b", "c"]},
        {"prompt": "a", "n": 8, "temperature": 0, "max_tokens": 99},
        {"prompt": [1] * 50, "max_tokens": 50, "request_id": "a"},
    ):
        assert client.post("/v1/completions", good).status_code == 200


# Keys and origins.


@pytest.fixture(scope="module")
def guarded():
    return AppClient(create_app(FakeFrontend(), api_key=("key-one", "schlüssel")))


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/tokenizer_info", "/openapi.json"])
def test_keys_are_needed(guarded, path):
    check_error(guarded.get(path), 401, "authentication_error", "invalid_api_key")
    for value in ("Bearer wrong", "Bearer", "key-one", "Basic key-one", "Bearer key-one2"):
        response = guarded.get(path, headers={"Authorization": value})
        check_error(response, 401, "authentication_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"


def test_each_key_opens(guarded):
    headers = {"Authorization": "Bearer key-one"}
    assert guarded.get("/v1/models", headers=headers).status_code == 200
    assert guarded.get("/v1/models", headers={"Authorization": "bearer key-one"}).status_code == 200
    encoded = {"Authorization": "Bearer schlüssel".encode()}
    assert guarded.get("/v1/models", headers=encoded).status_code == 200
    assert guarded.post(NATIVE, {"prompt": "x"}, headers=headers).status_code == 200
    assert guarded.post(NATIVE, {"prompt": "x"}).status_code == 401


@pytest.mark.parametrize(
    "path", ["/health", "/health/live", "/ready", "/ping", "/version", "/metrics", "/ui", "/"]
)
def test_open_paths_need_no_key(guarded, path):
    assert guarded.get(path).status_code in (200, 307)


def status(client, path, key):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = {"path": "/w"} if path in ("/update_weights", "/load_lora") else None
    return client.post(path, body, headers=headers).status_code


@functools.cache
def client_with_keys(**keys):
    """An application whose answers about weights do not depend on earlier requests."""

    async def control(action, path=None):
        return {}

    frontend = FakeFrontend()
    frontend.control = control
    return AppClient(create_app(frontend, **keys))


@functools.cache
def guarded_paths(client):
    document = client.get("/openapi.json").json()["paths"]
    return {name for name in document for item in document[name].values() if "security" in item}


@pytest.mark.parametrize("path", WEIGHT_PATHS)
def test_an_admin_key_guards_the_weights(path):
    client = client_with_keys(admin_api_key=("root",), api_key=("user",))
    for address in (path, path + "/"):
        assert [status(client, address, key) for key in (None, "user")] == [401, 401]
    assert status(client, path, "root") == 200
    message = check_error(client.post(path), 401, "authentication_error", "invalid_api_key")
    assert message == "Authorization: expected Bearer with an admin key, got none"
    # It opens the others as well; these need none where there is no ordinary key.
    assert client.get("/v1/models", headers={"Authorization": "Bearer root"}).status_code == 200
    assert client.get("/v1/models").status_code == 401
    client = client_with_keys(admin_api_key=("root",))
    assert [status(client, path, key) for key in (None, "user", "root")] == [401, 401, 200]
    assert client.get("/v1/models").status_code == 200
    assert guarded_paths(client) == set(WEIGHT_PATHS)
    # Without an admin key, an ordinary one.
    client = client_with_keys(api_key=("user",))
    assert [status(client, path, key) for key in (None, "user")] == [401, 200]


def test_a_server_open_to_everybody_keeps_its_weights(monkeypatch):
    monkeypatch.delenv("DIFFULEX_API_KEY", raising=False)
    monkeypatch.delenv("DIFFULEX_ADMIN_API_KEY", raising=False)

    def client_of(*flags):
        return AppClient(create_app(FakeFrontend(), args=parse_args(list(flags)), allowed_hosts=()))

    client = client_of("--host", "0.0.0.0")
    for path in WEIGHT_PATHS:
        message = check_error(client.post(path), 404, "invalid_request_error", "not_found")
        assert message.startswith(
            f"{path}: expected --admin-api-key, --api-key or a loopback --host"
        )
        assert path not in client.get("/openapi.json").json()["paths"]
    assert client.post("/flush_cache").status_code == 200
    for flags in (
        (),
        ("--host", "::1"),
        ("--uds", "/tmp/socket"),
        ("--host", "0.0.0.0", "--api-key", "k"),
        ("--host", "0.0.0.0", "--admin-api-key", "k"),
    ):
        assert status(client_of(*flags), "/pause", "k") not in (401, 403, 404), flags


def test_metrics_may_need_a_key():
    client = AppClient(create_app(FakeFrontend(), api_key=("k",), metrics_auth=True))
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers={"Authorization": "Bearer k"}).status_code == 200


def test_nothing_of_a_wrong_key_is_logged(guarded, caplog):
    with caplog.at_level(logging.WARNING, logger="diffulex"):
        guarded.get("/v1/models", headers={"Authorization": "Bearer qzwxecrv"})
        guarded.get("/v1/models")
    assert "/v1/models: refused a wrong key" in caplog.text
    assert "/v1/models: refused no key" in caplog.text
    assert "qz" not in caplog.text


# Pages of other sites.


@pytest.fixture(scope="module")
def local():
    app = create_app(
        FakeFrontend(), allowed_hosts=("localhost",), allowed_origins=("https://page",)
    )
    return AppClient(app)


HERE = ["127.0.0.1:8000", "127.8.0.1", "localhost", "LOCALHOST:1", "[::1]:8000", "x.localhost"]


@pytest.mark.parametrize("host", HERE)
def test_names_of_this_machine_are_its_own(local, host):
    headers = {"Host": host, "Origin": f"http://{host}"}
    assert local.post(NATIVE, {"prompt": "x"}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:8000",
        "8.8.8.8",
        "a@b",
        "[",
        "[x]",
    ],
)
def test_other_names_are_refused(local, host):
    response = local.post(NATIVE, {"prompt": "x"}, headers={"Host": host})
    message = check_error(response, 403, "permission_error", "forbidden")
    assert message == f"Host: expected a name of this machine (--allowed-hosts), got {host!r}"
    headers = {"Host": "localhost", "Origin": f"https://{host}"}
    response = local.get("/v1/models", headers=headers)
    assert "Origin: expected" in check_error(response, 403, "permission_error", "forbidden")


def test_allowed_origins_and_programs_are_let_in(local):
    for origin in ("https://page", "null", "vscode-webview://x", "chrome-extension://y"):
        headers = {"Host": "localhost", "Origin": origin}
        assert local.get("/v1/models", headers=headers).status_code == 200
    assert AppClient(create_app(FakeFrontend())).get("/v1/models").status_code == 200


@pytest.fixture(scope="module")
def of_all_operators():
    """Clients of a server without allowed origins, and of one with."""
    allowed = ("https://page",)
    apps = create_app(FakeFrontend()), create_app(FakeFrontend(), allowed_origins=allowed)
    return [AppClient(app) for app in apps]


@pytest.mark.parametrize("path", ADMIN_PATHS)
def test_operators_do_not_come_from_other_sites(path, of_all_operators):
    client, with_origins = of_all_operators
    for address in (path, path + "/"):
        response = client.request("POST", address, headers={"Sec-Fetch-Site": "cross-site"})
        check_error(response, 403, "permission_error", "forbidden")
    for origin in ("http://other", "https://here:81", "null"):
        headers = {"Host": "here", "Origin": origin}
        response = client.request("POST", path, headers=headers)
        check_error(response, 403, "permission_error", "forbidden")
    # A proxy may change the name of the host.
    same = {"Sec-Fetch-Site": "same-origin", "Host": "here", "Origin": "https://proxy"}
    for headers in (same, {"Host": "here", "Origin": "https://Here"}):
        assert client.request("POST", path, headers=headers).status_code != 403
    headers = {"Host": "here", "Origin": "https://page"}
    assert with_origins.request("POST", path, headers=headers).status_code != 403


def test_origins(guarded):
    asking = {"Origin": "https://page", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in guarded.get("/health", headers=asking).headers
    app = create_app(FakeFrontend(), allowed_origins=("https://page",), api_key=("k",))
    client = AppClient(app)
    response = client.request("OPTIONS", CHAT, headers=asking)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://page"
    response = client.post(CHAT, {"messages": USER}, headers={"Origin": "https://page"})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "https://page"
    other = {**asking, "Origin": "https://other"}
    assert "access-control-allow-origin" not in client.get("/health", headers=other).headers


def test_a_path_prefix_of_a_proxy_changes_nothing():
    app = create_app(FakeFrontend(), api_key=("k",))
    app.root_path = "/api"
    client = AppClient(app)
    assert client.get("/api/health").status_code == 200
    assert client.get("/api/v1/models").status_code == 401
    assert client.get("/api/health/").status_code == 200
    # Where the page is, from the prefix alone and from below.
    for path in ("/api/", "/api/ui/", "/api//"):
        response = client.get(path)
        assert (response.status_code, response.headers["location"]) == (307, "/api/ui")
