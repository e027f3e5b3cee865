"""The gate before the four services: tokens, names and foreign pages, decided on what the client cannot
choose."""

from __future__ import annotations

import json

import pytest

from services.common.errors import UserError
from services.common.http.auth import (
    COOKIE,
    cookie_of,
    refuse_wide_without_token,
    required_token,
)
from services.common.http.hosts import is_ours
from services.control.cli import ask
from services.control.places import Place
from services.control.records import RunStatus
from tests.common.gate_services import NAMES, POSTS, serving
from tests.retriever.retriever_fixtures import small_index  # noqa: F401


@pytest.fixture(scope="module", params=NAMES)
def opened(request, tmp_path_factory, small_index):
    with serving(request.param, tmp_path_factory.mktemp("open"), small_index) as served:
        yield served


@pytest.fixture(scope="module", params=NAMES)
def guarded(request, tmp_path_factory, small_index):
    with serving(request.param, tmp_path_factory.mktemp("guarded"), small_index, token="s3cret") as served:
        yield served


@pytest.mark.parametrize("host", ["x/healthz?", "x/login?", "x/favicon.ico#", "x/?"])
def test_a_host_header_that_holds_a_path_does_not_pass_the_token(guarded, host):
    path, body = POSTS[guarded.name]
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    answer = guarded.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert answer.startswith(b"HTTP/1.1 401 ")
    read = guarded.raw(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert read.startswith(b"HTTP/1.1 401 ")


def test_a_token_is_asked_for_by_all_but_health_and_the_icon(guarded):
    with guarded.client() as client:
        for path in ("/healthz", "/readyz", "/favicon.ico"):
            assert client.get(path).status_code == 200, path
        for path in ("/metrics", "/docs", "/openapi.json", "/healthz/", "/HEALTHZ"):
            assert client.get(path).status_code == 401, path
        for path in (
            "/./healthz",
            "//healthz",
            "/docs/../healthz",
            "/docs?/healthz",
            "http://localhost/docs#/healthz",
        ):
            asked = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            assert guarded.raw(asked).startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 ")), path
        for given in ("Bearer wrong", "Bearer", "Basic s3cret", "s3cret", "Bearer s3cret2"):
            assert client.get("/metrics", headers={"Authorization": given}).status_code == 401, given
        assert guarded.post(client).status_code == 401
        assert guarded.post(client, Cookie=f"{COOKIE}=x").status_code == 401
        for given in ("Bearer s3cret", "bearer  s3cret"):
            assert guarded.post(client, Authorization=given).status_code == 200, given


@pytest.mark.parametrize("other", ['theme={"dark":true}', "a b=c", "x", '"=;', "\xe9=\xe9"])
def test_the_cookie_is_found_beside_those_of_other_services_on_the_host(guarded, other):
    if guarded.name == "retriever":
        pytest.skip("it has no login form")
    cookies = f"{other}; {COOKIE}={cookie_of('s3cret')}; {other}".encode("latin-1")
    head = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nCookie: %b\r\n\r\n"
    assert guarded.raw(head % cookies).startswith(b"HTTP/1.1 200 ")
    assert guarded.raw(head % cookies.replace(b"=" + cookie_of("s3cret").encode(), b"=x")).startswith(
        b"HTTP/1.1 401 "
    )


def test_what_a_foreign_page_sends_is_refused(opened):
    with opened.client() as client:
        for headers in (
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Origin": f"https://127.0.0.1.evil.example:{opened.port}"},
        ):
            answer = opened.post(client, **headers)
            assert (answer.status_code, answer.headers["content-type"]) == (403, "application/json"), headers
        assert client.get("/healthz", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
        followed = {
            "Sec-Fetch-Site": "cross-site",
            "Sec-Fetch-Mode": "navigate",
            "Sec-Fetch-Dest": "document",
        }
        assert client.get("/docs", headers=followed).status_code == 200
        for headers in (
            {"Sec-Fetch-Site": "same-origin", "Origin": opened.url},
            {"Sec-Fetch-Site": "none"},
            {"Origin": opened.url},
            {},
        ):
            assert opened.post(client, **headers).status_code == 200, headers


def test_without_a_token_only_names_that_no_stranger_can_own_are_answered(opened):
    with opened.client() as client:
        for host in (
            "evil.example",
            f"evil.example:{opened.port}",
            "localhost.evil.example",
            "10.0.0.1",
            "[",
            "a b",
        ):
            for path in ("/healthz", "/metrics", "/docs"):
                assert client.get(path, headers={"Host": host}).status_code == 403, host
            assert opened.post(client, Host=host).status_code == 403, host
        for host in (
            "localhost",
            f"LOCALHOST:{opened.port}",
            "127.0.0.2",
            f"[::1]:{opened.port}",
            "app.localhost",
        ):
            assert opened.post(client, Host=host).status_code == 200, host
    double = opened.raw(
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    )
    assert double.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("host", "server", "ours"),
    [
        ("retriever:8000", "172.18.0.3", True),
        ("retriever.unspiral.svc.cluster.local:8000", "10.1.2.3", True),
        ("retriever.unspiral.svc", "10.1.2.3", True),
        ("192.168.1.5:8000", "192.168.1.5", True),
        ("[fd00::5]:8000", "fd00::5", True),
        ("localhost:8000", "172.18.0.3", True),
        ("search.example:8000", "172.18.0.3", True),
        ("evil.example:8000", "192.168.1.5", False),
        ("evil.example", "127.0.0.1", False),
        ("192.168.1.5", "127.0.0.1", False),
        ("search.example", "127.0.0.1", True),
        ("user@localhost", "127.0.0.1", False),
        ("[::1]", "127.0.0.1", True),
        ("[::1]:8000", "::1", True),
        ("[::1]evil.example", "127.0.0.1", False),
        ("[::1]evil.example:8000", "::1", False),
        ("[::1].evil.example", "127.0.0.1", False),
        ("evil.example[::1]", "127.0.0.1", False),
        ("[::1", "127.0.0.1", False),
        ("::1", "127.0.0.1", False),
        ("localhost:80:80", "127.0.0.1", False),
        ("localhost:port", "127.0.0.1", False),
        ("localhost/healthz?", "127.0.0.1", False),
        ("localhost:65535", "127.0.0.1", True),
        ("localhost:65536", "127.0.0.1", False),
        ("localhost:99999", "127.0.0.1", False),
        ("[fe80::1%25eth0]:80", "fe80::1", True),
        ("[fe80::1%25]:80", "fe80::1", True),
        ("[fe80::1%25eth0/x]:80", "fe80::1", False),
    ],
)
def test_names_of_a_service_by_the_address_that_it_is_reached_at(host, server, ours):
    assert is_ours(host, server, frozenset({"search.example"})) is ours


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz"])
def test_a_head_request_is_answered_as_get_is_and_without_a_body(opened, path):
    """Load balancers look at health so."""
    whole = opened.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    head = opened.raw(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert head.endswith(b"\r\n\r\n")
    undated = [
        sorted(line for line in answer.partition(b"\r\n\r\n")[0].split(b"\r\n") if b"date:" not in line)
        for answer in (whole, head)
    ]
    assert undated[0] == undated[1] and b"405" not in head
    with opened.client() as client:
        assert client.post(path).headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5"])
def test_a_wide_address_without_a_token_is_refused_with_the_remedy(host):
    with pytest.raises(UserError, match="reachable from other machines, so set X, or bind to"):
        refuse_wide_without_token(host, None, "set X")
    refuse_wide_without_token(host, "token", "set X")
    refuse_wide_without_token("127.0.0.2", None, "set X")


def test_a_token_loses_the_line_break_of_the_file_that_it_comes_from(monkeypatch):
    monkeypatch.setenv("UNSPIRAL_API_TOKEN", "s3cret\n")
    assert required_token("0.0.0.0") == "s3cret"
    monkeypatch.setenv("UNSPIRAL_API_TOKEN", " \n")
    with pytest.raises(UserError):
        required_token("0.0.0.0")


@pytest.mark.parametrize("token", ["s\u00e9cret", "s3 cret", "s3\ncret"])
def test_a_token_that_no_header_can_carry_is_refused_without_being_shown(monkeypatch, token):
    monkeypatch.setenv("UNSPIRAL_API_TOKEN", token)
    for use in (required_token, lambda url: ask(RunStatus, "GET", Place(url), "/v1/status")):
        with pytest.raises(UserError, match=r"UNSPIRAL_API_TOKEN: character [23] is U\+00") as caught:
            use("http://127.0.0.1:9")
        assert caught.value.exit_code == 2 and "cret" not in str(caught.value)


def test_pages_come_from_the_package_and_name_no_other_host(opened):
    with opened.client() as client:
        docs = client.get("/docs")
        assert docs.status_code == 200 and "://" not in docs.text.replace("http://www.w3.org/2000/svg", "")
        assert "default-src 'none'" in docs.headers["content-security-policy"]
        icon = client.get("/favicon.ico")
        assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")
        assert "paths" in client.get("/openapi.json").json()


def test_errors_are_described_as_they_are(opened):
    with opened.client() as client:
        api = client.get("/openapi.json").json()
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            described = route["responses"]["422"]["content"]["application/json"]["schema"]
            name = described["$ref"].rpartition("/")[2]
            if opened.name == "agent":  # OpenAI's form
                assert name == "ErrorObject", f"{method} {path}"
                continue
            detail = api["components"]["schemas"][name]["properties"]["detail"]
            assert detail["type"] == "string", f"{method} {path}"
    assert "HTTPValidationError" not in json.dumps(api)
