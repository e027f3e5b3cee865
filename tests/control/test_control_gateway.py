"""What a gateway and the commands make of addresses that are no longer, or never were, a run's."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import pytest
from ray.exceptions import AuthenticationError

from services.common.errors import EnvironmentLacks, UnspiralError, UserError
from services.common.peers.proof import proof, proven
from services.control.gateway import Gateway, announce_run, announcement, read_answer, withdraw_run
from services.control.launch import serve_in_thread
from services.control.records import (
    Done,
    Reach,
    RunStatus,
)
from services.control.server import ControlMetrics
from services.rollout.pool import placement
from services.settings import ControlSettings, RolloutSettings
from trainer.commands.cli import main
from trainer.config.schema import parse_config
from trainer.session import control as run_control
from trainer.session.control import RunControl, announced, reach, served

LOCAL = ControlSettings(host="127.0.0.1", port=0)
CONFIG = {"model": {"path": "m"}, "data": {"train": "t"}, "retriever": {"url": "http://x"}}
NO_RUN = "no run on the cluster at 127.0.0.1:6379"


@pytest.fixture
def stranger():
    """A server that answers everything with `answers[path]`, or as `relay` does, and remembers what it was
    sent."""
    answers, asked = {}, []
    here = SimpleNamespace(answers=answers, asked=asked, relay=None)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.partition("?")[0]
            asked.append((path, self.headers.get("Authorization")))
            status, body = (
                here.relay(self.path) if here.relay else answers.get(path, (200, {"hello": "world"}))
            )
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    here.url = f"http://127.0.0.1:{server.server_port}"
    yield here
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cluster(monkeypatch):
    """What runs have announced, in the place of Ray's key-value store."""
    monkeypatch.delenv("UNSPIRAL_API_TOKEN", raising=False)
    runs = []
    monkeypatch.setattr(Gateway, "_registered", lambda self: runs)
    return runs


def test_a_gateway_that_took_a_killed_runs_port_does_not_ask_itself(cluster, monkeypatch):
    looked = []
    monkeypatch.setattr(Gateway, "_registered", lambda self: looked.append(1) or cluster)
    server = serve_in_thread(Gateway("127.0.0.1:6379", None), LOCAL, print)
    try:
        cluster.append({"run": "killed", "id": "gone", "url": server.url, "started": 1.0})
        assert httpx.get(server.url + "/v1/status", timeout=60).json()["state"] == "no run"
        assert len(looked) == 1 and httpx.get(server.url + "/healthz").json() == {"status": "ok"}
    finally:
        server.stop()


def test_who_holds_a_stale_address_is_never_sent_the_token(cluster, stranger):
    gateway = Gateway("127.0.0.1:6379", "secret")
    cluster.append({"run": "killed", "id": "gone", "url": stranger.url, "started": 1.0})
    for health in (
        (200, {"hello": "world"}),
        (200, {"run": "other"}),
        (200, [1]),
        (200, b"<html>"),
        (302, {"run": "gone"}),
    ):
        stranger.answers["/healthz"] = health
        assert asyncio.run(gateway.status()).state == "no run"
    assert [token for _, token in stranger.asked] == [None] * 5


@pytest.fixture
def stranger_announced(cluster, stranger):
    """Somebody announced a run at an address of theirs, and answers there with the id that they announced."""
    cluster.append({"run": "r", "id": "i", "url": stranger.url, "started": 1.0})
    stranger.answers |= {"/healthz": (200, {"run": "i"}), "/v1/pause": (200, {"text": "pauses"})}
    return stranger


def test_who_announced_an_address_is_never_sent_the_token_without_a_proof(stranger_announced, caplog):
    gateway = Gateway("127.0.0.1:6379", "secret")
    for answer in (None, "", "0" * 64, 5):
        stranger_announced.answers["/healthz"] = (200, {"run": "i", "proof": answer})
        with pytest.raises(EnvironmentLacks, match=NO_RUN):
            asyncio.run(gateway.pause())
    assert {(path, token) for path, token in stranger_announced.asked} == {("/healthz", None)}
    assert f"run r at {stranger_announced.url} does not hold this UNSPIRAL_API_TOKEN" in caplog.text


def test_a_real_runs_proof_does_not_help_who_passes_it_on(stranger_announced, monkeypatch):
    monkeypatch.setenv("UNSPIRAL_API_TOKEN", "secret")
    real = serve_in_thread(SimpleNamespace(), LOCAL, print, "i")
    try:
        handed_on = []

        def relay(path):
            handed_on.append(httpx.get(real.url + path, timeout=60).json())
            return 200, handed_on[-1]

        stranger_announced.relay = relay
        with pytest.raises(EnvironmentLacks, match=NO_RUN):
            asyncio.run(Gateway("127.0.0.1:6379", "secret").pause())
        assert handed_on[0].keys() == {"status", "run", "proof"}
        assert [token for _, token in stranger_announced.asked] == [None]
    finally:
        real.stop()


@pytest.mark.parametrize("token", [None, "secret"])
def test_a_run_that_proves_that_it_holds_the_token_is_asked_with_it(cluster, monkeypatch, token):
    if token:
        monkeypatch.setenv("UNSPIRAL_API_TOKEN", token)

    class Run:
        async def pause(self):
            return Done(text="pauses")

    server = serve_in_thread(Run(), LOCAL, print, "i")
    try:
        cluster.append({"run": "r", "id": "i", "url": server.url, "started": 1.0})
        assert asyncio.run(Gateway("127.0.0.1:6379", token).pause()) == Done(text="pauses")
        with pytest.raises(EnvironmentLacks if token else UnspiralError, match=NO_RUN if token else None):
            asyncio.run(Gateway("127.0.0.1:6379", "another").drain("w"))
    finally:
        server.stop()


def test_a_proof_is_of_one_nonce_one_run_and_one_address():
    here = proof("secret", "n", "i", ("10.0.0.1", 80))
    assert proven(here, "secret", "n", "i", ("::ffff:10.0.0.1", 80))
    for other in (
        ("other", "n", "i", ("10.0.0.1", 80)),
        ("secret", "m", "i", ("10.0.0.1", 80)),
        ("secret", "n", "j", ("10.0.0.1", 80)),
        ("secret", "n", "i", ("10.0.0.2", 80)),
        ("secret", "n", "i", ("10.0.0.1", 81)),
    ):
        assert not proven(here, *other)


@pytest.mark.parametrize(
    "body", [{"hello": "world"}, [1], b"<html>", {"state": "somewhere"}, {"state": "running", "step": "x"}]
)
def test_another_programs_answer_is_one_line_for_a_gateway_and_for_the_command(
    cluster, stranger, body, monkeypatch, capsys
):
    cluster.append({"run": "r", "id": "i", "url": stranger.url, "started": 1.0})
    stranger.answers |= {"/healthz": (200, {"run": "i"}), "/v1/status": (200, body), "/v1/pause": (200, body)}
    server = serve_in_thread(Gateway("127.0.0.1:6379", None), LOCAL, print)
    try:
        for method, path in (("GET", "/v1/status"), ("POST", "/v1/pause"), ("GET", "/metrics")):
            answer = httpx.request(method, server.url + path, timeout=60)
            assert answer.status_code == 503, path
            assert answer.json()["detail"].startswith(
                f"{stranger.url}: what answers there is no control plane of a run"
            )
    finally:
        server.stop()
    monkeypatch.setenv("UNSPIRAL_CONTROL_URL", stranger.url)
    for arguments in (
        ["status"],
        ["status", "--json"],
        ["workers", "list"],
        ["workers", "list", "--json"],
        ["pause"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        said = capsys.readouterr()
        assert caught.value.code == 3 and said.out == "" and said.err.count("\n") == 1, (arguments, said)
        assert said.err.startswith(
            f"unspiral: {stranger.url}: what answers there is no control plane of a run"
        )


def test_what_a_newer_run_adds_to_its_status_is_passed_over(stranger, monkeypatch, capsys):
    worker = {
        "id": "w0.1",
        "node": "n",
        "pid": 7,
        "state": "ready",
        "version": 3,
        "outstanding_tokens": 5,
        "trajectories": 2,
    }
    status = {
        "state": "running",
        "run": "r",
        "step": 4,
        "mood": "good",
        "workers": [worker | {"colour": "red"}],
    }
    stranger.answers["/v1/status"] = (
        200,
        status | {"store": {"url": "http://s", "reachable": True, "since": 3}},
    )
    monkeypatch.setenv("UNSPIRAL_CONTROL_URL", stranger.url)
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as caught:
        main(["status"])
    assert caught.value.code == 0 and "r, attempt 0: running" in capsys.readouterr().out


def test_a_token_that_ray_refuses_is_one_line(monkeypatch):
    import ray._raylet

    def refuse(address):
        raise AuthenticationError("token\nmismatch")

    monkeypatch.setattr(ray._raylet, "GcsClient", refuse)
    server = serve_in_thread(SimpleNamespace(), LOCAL, print)  # something that listens
    try:
        address = server.url.removeprefix("http://")
        with pytest.raises(EnvironmentLacks) as caught:
            asyncio.run(Gateway(address, None).ready())
    finally:
        server.stop()
    assert (
        str(caught.value) == f"--ray-address {address}: Ray refuses the token; "
        "RAY_AUTH_MODE and RAY_AUTH_TOKEN must be the cluster's"
    )
    assert caught.value.status == 503


@pytest.mark.parametrize(
    ("status", "body"), [(404, b"default backend - 404"), (408, b""), (429, b"<html>"), (404, b"[" * 100_000)]
)
def test_a_refusal_that_is_no_control_planes_is_what_the_environment_lacks(stranger, status, body):
    stranger.answers["/v1/status"] = (status, body)
    answer = httpx.get(f"{stranger.url}/v1/status", trust_env=False)
    with pytest.raises(UnspiralError, match=rf"^{stranger.url}/v1/status: HTTP {status}$") as error:
        read_answer(answer, RunStatus, stranger.url)
    assert error.value.exit_code == 3


@pytest.mark.parametrize(
    "value", [None, b"", b"{", b"[" * 100_000, b"[1]", b'{"run": "r", "url": "http://x", "started": 1.0}']
)
def test_what_cannot_be_checked_is_no_announcement(value):
    assert announcement(value) is None


@pytest.mark.ray
def test_runs_of_one_name_do_not_take_each_others_address(caplog):
    import ray

    context = ray.init(address="local", num_cpus=1, include_dashboard=False, configure_logging=False)
    try:
        gateway = Gateway(context.address_info["gcs_address"], None)
        announce_run("r", "a", "http://127.0.0.1:1", "/one")
        announce_run("r", "b", "http://127.0.0.1:2", "/two")
        announce_run(
            "r", "c", "http://127.0.0.1:3", "/one"
        )  # the next attempt in the folder of a, which was killed
        assert sorted(r["id"] for r in gateway._registered()) == ["b", "c"]
        withdraw_run("r", "b")
        assert [(r["run"], r["id"], r["url"]) for r in gateway._registered()] == [
            ("r", "c", "http://127.0.0.1:3")
        ]
        withdraw_run("r", "c")
        assert gateway._registered() == [] and not caplog.records
    finally:
        ray.shutdown()


# -- the run's side


def test_a_cluster_that_is_gone_does_not_hide_how_the_run_ended(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr("trainer.session.control.announce_run", lambda *_: None)

    async def run():
        control = RunControl(parse_config(CONFIG), tmp_path)
        control.url = "http://127.0.0.1:1"
        with announced(control, SimpleNamespace()):
            raise ValueError("the run's own error")

    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="the run's own error"):
        asyncio.run(run())  # no Ray was joined: taking the address back fails
    assert "could not be taken off its cluster's list" in caplog.text


def test_without_a_control_plane_a_killed_attempts_address_is_not_announced(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr("trainer.session.control.announce_run", lambda *about: said.append(about))
    monkeypatch.setattr("trainer.session.control.withdraw_run", lambda *about: said.append(about))

    async def run(**control):
        (tmp_path / "control.json").write_text('{"run": "r", "url": "http://127.0.0.1:1", "pid": 1}')
        async with served(parse_config(CONFIG | {"control": control}), tmp_path, print) as it:
            with announced(it, SimpleNamespace()):
                found = (tmp_path / "control.json").exists() and json.loads(
                    (tmp_path / "control.json").read_text()
                )
                if it.url:
                    async with httpx.AsyncClient() as http:
                        assert (await http.get(it.url + "/healthz")).json()["run"] == it.id
        assert not (tmp_path / "control.json").exists()
        return it, found

    assert asyncio.run(run(enabled=False))[1] is False and said == []
    it, found = asyncio.run(run(host="127.0.0.1", port=0))
    name = it.config.run.name
    assert found == {"run": name, "url": it.url, "pid": os.getpid(), "host": socket.gethostname()}
    assert said == [(name, it.id, it.url, str(tmp_path.resolve())), (name, it.id)]


def test_a_run_leaves_the_address_of_another_one_that_has_its_folders_name_by_now(tmp_path):
    address = tmp_path / "control.json"
    others = '{"run": "r", "url": "http://127.0.0.1:1", "pid": 1}'

    async def run():
        config = parse_config(CONFIG | {"control": {"host": "127.0.0.1", "port": 0}})
        async with served(config, tmp_path, print):
            address.write_text(others)

    asyncio.run(run())
    assert address.read_text() == others


def test_the_last_worker_is_not_drained(tmp_path):
    drained = []

    async def run(target, *states):
        async def drain(worker):
            drained.append(worker)

        workers = [SimpleNamespace(id=f"w{i}.1", state=state) for i, state in enumerate(states)]
        pool = SimpleNamespace(target=target, workers=lambda: workers, drain=drain)
        folder = SimpleNamespace(event=lambda *_, **__: None)
        config = parse_config(CONFIG | {"rollout": {"deterministic": False}})
        control = RunControl(config, tmp_path)
        control.driver = SimpleNamespace(system=SimpleNamespace(pool=pool, folder=folder))
        return await control.drain("w0.1")

    for target, states in ((1, ("ready",)), (2, ("ready", "draining")), (2, ("ready", "failed"))):
        with pytest.raises(
            UserError, match=r"w0\.1 is the last worker, and .* use `unspiral pause`"
        ) as caught:
            asyncio.run(run(target, *states))
        assert caught.value.status == 422 and drained == []
    assert asyncio.run(run(2, "ready", "ready")).text == "w0.1 drains; 2 workers wanted" and drained == [
        "w0.1"
    ]


def test_more_workers_than_fit_beside_the_learner_are_refused_with_the_numbers(tmp_path):
    """Two CPUs, of which the learner's rank holds one."""
    scaled = []

    async def run(n, ahead=False):
        async def scale(n):
            scaled.append(n)

        settings = RolloutSettings(engine="transformers")
        pool = SimpleNamespace(
            target=1, scale=scale, lacking=lambda n, held: placement.lacking(settings, n, {"CPU": 2.0}, held)
        )
        folder = SimpleNamespace(event=lambda *_, **__: None)
        control = RunControl(parse_config(CONFIG), tmp_path)
        learner = SimpleNamespace(held={"CPU": 1.0})
        control.driver = SimpleNamespace(system=SimpleNamespace(pool=pool, folder=folder, learner=learner))
        done = await control.scale(n, ahead)
        await asyncio.sleep(0)
        return done

    with pytest.raises(EnvironmentLacks) as caught:
        asyncio.run(run(2))
    said = "2 rollout workers ask for CPU 2; the cluster has CPU 2, of which the learner has CPU 1"
    assert str(caught.value) == said and caught.value.exit_code == 3 and scaled == []
    asyncio.run(run(2, ahead=True))
    assert scaled == [2]


def test_a_status_shows_no_password_of_an_address(monkeypatch):
    monkeypatch.setattr(run_control, "REACH_SECONDS", 0.5)
    shown = asyncio.run(reach("http://me:pass@127.0.0.1:9/?api_key=k"))
    assert shown == Reach(
        url="http://***@127.0.0.1:9/?api_key=***", reachable=False, problem="All connection attempts failed"
    )


def test_metrics_forget_the_services_of_a_run_that_ended():
    metrics = ControlMetrics()
    there = RunStatus(state="running", retriever=Reach(url="http://x", reachable=True))
    assert b'unspiral_control_reachable{service="retriever"} 1.0' in metrics.text(there)
    assert b"unspiral_control_reachable{" not in metrics.text(RunStatus(state="no run"))
