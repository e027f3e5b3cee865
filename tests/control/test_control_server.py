"""The control plane's HTTP rules and its gateway, without a run behind them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest
from control_world import Run
from ports import kept_port

from services.common.errors import EnvironmentLacks, UnspiralError, UserError
from services.control.gateway import Gateway
from services.control.launch import serve_in_thread
from services.control.server import create_app
from services.settings import ControlSettings
from trainer.commands.cli import main
from trainer.config.schema import parse_config
from trainer.session import control as run_control
from trainer.session.control import RunControl


@pytest.fixture
def run():
    return Run()


@pytest.fixture
def served(run, monkeypatch):
    monkeypatch.delenv("UNSPIRAL_API_TOKEN", raising=False)
    server = serve_in_thread(run, ControlSettings(host="127.0.0.1", port=0), print, "id-r")
    yield server.url
    server.stop()


def test_what_is_accepted_and_what_is_said_of_the_rest(run, served):
    with httpx.Client(base_url=served) as http:
        for n in (4, 1, "all"):
            answer = http.post("/v1/workers/scale", json={"n": n})
            assert answer.status_code == 202 and answer.json()["text"] == f"{n} workers wanted"
        for body in (
            b"",
            b"{}",
            b'{"n": -1}',
            b'{"n": 0}',
            b'{"n": 1.5}',
            b'{"n": "4"}',
            b'{"n": true}',
            b'{"n": null}',
            b'{"n": 1, "m": 2}',
            b"[4]",
            b"{",
            b'{"n": 10001}',
            b"\xff",
        ):
            answer = http.post("/v1/workers/scale", content=body)
            assert answer.status_code == 422, body
            assert answer.json()["detail"].startswith(
                'expected {"n": N} with N a whole number from 1 to 10000, or "all", and optionally "ahead": '
                "true; got "
            )
        assert "use `unspiral pause`" in http.post("/v1/workers/scale", json={"n": 0}).json()["detail"]
        answer = http.post("/v1/workers/scale", content=b" " * 5000)
        assert (answer.status_code, answer.json()["detail"]) == (
            413,
            "body of 5000 bytes; at most 4096 accepted",
        )
        assert http.post("/v1/pause", content=b" " * 5000).status_code == 413
        answer = http.post("/v1/workers/scale", json={"n": 99})
        assert (answer.status_code, answer.json()["detail"]) == (
            409,
            "99 rollout workers ask for CPU 99; the cluster has CPU 2",
        )
        assert http.post("/v1/workers/w9/drain").status_code == 404
        assert http.post("/v1/workers/w0.1/drain").status_code == 202
        assert http.get("/v1/pause").status_code == 405 and http.get("/v1/nothing").status_code == 404
        assert (
            http.post("/v1/pause").json()["text"] == "pauses" and http.post("/v1/resume").status_code == 200
        )
        assert (
            http.post("/v1/pause", headers={"sec-fetch-site": "cross-site"}).status_code == 403
        )  # a foreign page in this machine's browser
    assert run.asked == [("scale", 4), ("scale", 1), ("scale", "all"), ("drain", "w0.1"), "pause", "resume"]


def test_a_page_whose_name_was_bound_to_this_machine_is_refused(run, served):
    port = served.rpartition(":")[2]
    with httpx.Client(base_url=served) as http:
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "10.0.0.1",
            "[",
            "127.0.0.1@evil.example",
        ):
            for method, path in (("POST", "/v1/pause"), ("GET", "/v1/status"), ("GET", "/healthz")):
                answer = http.request(method, path, headers={"Host": host})
                assert answer.status_code == 403, host
                assert (
                    "Host is localhost or a loopback address such as 127.0.0.1 are answered"
                    in answer.json()["detail"]
                )
        assert run.asked == []
        for host in ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", "127.0.0.2", f"[::1]:{port}"):
            assert http.post("/v1/pause", headers={"Host": host}).status_code == 200, host


def test_health_documentation_and_metrics(run, served):
    with httpx.Client(base_url=served) as http:
        assert http.get("/healthz").json() == {"status": "ok", "run": "id-r"}
        assert http.get("/readyz").json() == {"status": "ready"}
        docs = http.get("/docs").text
        assert "<title>Unspiral control: API</title>" in docs and "<h2>Control plane: API</h2>" in docs
        assert {
            "/v1/status",
            "/v1/workers/scale",
            "/v1/workers/{worker}/drain",
            "/v1/pause",
            "/v1/resume",
        } <= set(http.get("/openapi.json").json()["paths"])
        assert http.get("/v1/status").json()["rewards"] == [0.5, None]
        http.post("/v1/workers/scale", json={})
        text = http.get("/metrics").text
        for line in (
            'unspiral_control_workers{state="ready"} 1.0',
            "unspiral_control_step 4.0",
            "unspiral_control_run 1.0",
            'unspiral_control_refused_total{status="422"} 1.0',
        ):
            assert line in text
        run.asked = ["away"]
        assert http.get("/readyz").status_code == 504 and http.get("/healthz").status_code == 200


def test_beyond_this_machine_a_token_is_needed(run, monkeypatch):
    monkeypatch.delenv("UNSPIRAL_API_TOKEN", raising=False)
    with pytest.raises(UserError, match="UNSPIRAL_API_TOKEN"):
        serve_in_thread(run, ControlSettings(host="0.0.0.0", port=0), print)
    monkeypatch.setenv("UNSPIRAL_API_TOKEN", "secret")
    server = serve_in_thread(run, ControlSettings(host="0.0.0.0", port=0), print)
    try:
        with httpx.Client(base_url=server.url) as http:
            assert http.get("/healthz").status_code == 200 == http.get("/readyz").status_code
            for method, path in (
                ("GET", "/v1/status"),
                ("GET", "/metrics"),
                ("GET", "/docs"),
                ("POST", "/v1/pause"),
                ("POST", "/v1/workers/scale"),
            ):
                assert http.request(method, path).status_code == 401, path
                assert (
                    http.request(method, path, headers={"Authorization": "Bearer wrong"}).status_code == 401
                )
            assert http.post("/v1/pause", headers={"Authorization": "Bearer secret"}).status_code == 200
    finally:
        server.stop()


def test_a_port_that_is_taken_is_said_and_a_free_one_serves(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port, said = taken.getsockname()[1], []
        server = serve_in_thread(run, ControlSettings(host="127.0.0.1", port=port), said.append)
        server.stop()
    assert said == [
        f"control plane: port {port} of 127.0.0.1 is in use, by another run perhaps; "
        f"{server.url} serves this one"
    ]


def test_settings_come_from_the_environment_and_a_bad_one_is_named(monkeypatch):
    raw = {"model": {"path": "m"}, "data": {"train": "t"}, "retriever": {"url": "http://x"}}
    monkeypatch.setenv("UNSPIRAL_CONTROL_HOST", "10.0.0.1")
    monkeypatch.setenv("UNSPIRAL_CONTROL_PORT", "8300")
    assert parse_config(raw).control == ControlSettings(host="10.0.0.1", port=8300)
    assert parse_config(raw | {"control": {"port": 0, "host": "127.0.0.1"}}).control.port == 0
    monkeypatch.setenv("UNSPIRAL_CONTROL_PORT", "many")
    with pytest.raises(UserError, match=r"control\.port.*many"):
        parse_config(raw)


def test_the_commands_print_one_line_and_their_status(served, run, capsys, monkeypatch):
    monkeypatch.setenv("UNSPIRAL_CONTROL_URL", served)
    monkeypatch.setenv("COLUMNS", "160")

    def said(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        out = capsys.readouterr()
        return caught.value.code, out.out + out.err

    assert said("workers", "scale", "4") == (0, "4 workers wanted\n")
    assert said("workers", "scale", "all") == (0, "all workers wanted\n")
    assert said("workers", "scale", "99") == (
        3,
        "unspiral: 99 rollout workers ask for CPU 99; the cluster has CPU 2\n",
    )
    assert said("workers", "scale", "99", "--ahead") == (0, "99 workers wanted\n")
    assert said("workers", "scale", "-1")[0] == 2 and said("workers", "scale", "many")[0] == 2
    code, out = said("workers", "scale", "0")
    assert code == 2 and "use `unspiral pause`" in out and out.count("\n") == 1
    assert said("workers", "drain", "w/7") == (2, "unspiral: POST /v1/workers/w/7/drain: Not Found\n")
    assert said("workers", "drain", "w7") == (2, "unspiral: no worker w7; there are w0.1\n")
    assert said("workers", "drain", "w0.1") == (0, "w0.1 drains\n")
    assert said("pause") == (0, "pauses\n") and said("resume") == (0, "goes on\n")
    code, out = said("pause", "--json")
    assert code == 0 and json.loads(out) == {"text": "pauses", "target": None}
    code, out = said("status")
    assert (
        code == 0
        and "r, attempt 0: running" in out
        and "4 of 9" in out
        and "0.500 -" in out
        and "w0.1" in out
    )
    assert json.loads(said("workers", "list", "--json")[1])[0]["pid"] == 7
    monkeypatch.setenv("UNSPIRAL_CONTROL_URL", "http://127.0.0.1:9")
    code, out = said("status")
    assert (
        code == 3
        and out.startswith(
            "unspiral: http://127.0.0.1:9: no control plane answers there (Connection refused)"
        )
        and out.count("\n") == 1
    )


# -- a driver's loop and the server's thread


def test_a_driver_that_is_busy_is_an_answer_within_the_timeout(monkeypatch, tmp_path):
    monkeypatch.setattr(run_control, "ANSWER_SECONDS", 0.2)
    config = parse_config({"model": {"path": "m"}, "data": {"train": "t"}, "retriever": {"url": "http://x"}})

    async def driver():
        control, answers = RunControl(config, tmp_path), []

        def elsewhere():
            for ask in (control.status, control.pause, control.ready):
                try:
                    answers.append(asyncio.run(ask()))
                except UnspiralError as e:
                    answers.append(e)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()  # the loop is blocked
        monkeypatch.setattr(run_control, "ANSWER_SECONDS", 60.0)
        fresh = threading.Thread(target=elsewhere)
        fresh.start()
        while fresh.is_alive():
            await asyncio.sleep(0.02)
        return answers

    answers = asyncio.run(driver())
    assert all(a.status == 504 and "did not answer within 0.2 s" in str(a) for a in answers[:3])
    assert answers[3].state == "starting" and answers[4].status == 409 and answers[5] is None


# -- the gateway


@pytest.fixture
def cluster(monkeypatch):
    """What runs have announced, in the place of Ray's key-value store."""
    runs = []
    monkeypatch.setattr(Gateway, "_registered", lambda self: runs)
    return runs


def through(gateway, path="/v1/status", method="GET", **kwargs):
    async def ask():
        transport = httpx.ASGITransport(create_app(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, **kwargs)

    return asyncio.run(ask())


def test_a_gateway_speaks_for_the_newest_run_that_answers(run, served, cluster):
    gateway = Gateway("127.0.0.1:6379", None)
    assert through(gateway).json()["state"] == "no run"
    refused = through(gateway, "/v1/pause", "POST")
    assert (refused.status_code, refused.json()["detail"]) == (409, "no run on the cluster at 127.0.0.1:6379")
    assert through(gateway, "/healthz").status_code == 200
    assert "unspiral_control_run 0.0" in through(gateway, "/metrics").text
    other = serve_in_thread(Run(), ControlSettings(host="127.0.0.1", port=0), print, "id-old")
    try:
        cluster += [
            {"run": "killed", "id": "id-0", "url": served, "started": 9.0},  # another run took its address
            {"run": "old", "id": "id-old", "url": other.url, "started": 1.0},
            {"run": "r", "id": "id-r", "url": served, "started": 2.0},
            {"run": "dead", "id": "id-1", "url": "http://127.0.0.1:9", "started": 3.0},
            {"run": "no address", "id": "id-2", "url": "http://[", "started": 3.0},
        ]
        status = through(gateway).json()
        assert (status["run"], status["others"]) == ("r", ["old"])
        assert through(gateway, "/v1/workers/scale", "POST", json={"n": 3}).json() == {
            "text": "3 workers wanted",
            "target": 3,
        }
        assert run.asked == [("scale", 3)]
        assert through(gateway, "/v1/workers/scale", "POST", json={"n": 99}).status_code == 409
        assert (
            through(gateway, "/v1/workers/w9/drain", "POST").json()["detail"]
            == "no worker w9; there are w0.1"
        )
        assert (
            through(gateway, "/v1/workers/w9%3Fx%23y/drain", "POST").json()["detail"]
            == "no worker w9?x#y; there are w0.1"
        )
        cluster[1]["started"] = 4.0  # a newer one is seen at once
        assert through(gateway).json()["others"] == ["r"]
    finally:
        other.stop()


def test_without_ray_a_gateway_is_up_and_says_what_it_lacks():
    pytest.importorskip("ray")
    address = f"127.0.0.1:{kept_port()}"
    gateway, began = Gateway(address, None), time.monotonic()
    answer = through(gateway, "/readyz")
    assert (
        answer.status_code == 503
        and answer.json()["detail"] == f"--ray-address {address}: no Ray answers there (Connection refused)"
    )
    assert through(gateway, "/healthz").status_code == 200 and time.monotonic() - began < 60
    with pytest.raises(EnvironmentLacks):
        asyncio.run(gateway.status())


@pytest.mark.parametrize("address", ["ray-head", "http://ray-head:8265", "ray-head:", ":6379"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(UserError, match="expected HOST:PORT of the cluster's head, such as ray-head:6379"):
        Gateway(address, None)
