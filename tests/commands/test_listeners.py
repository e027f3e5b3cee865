"""What listens where: a real local run is asked from a second host and from its own, a cluster from a second
host."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from end_to_end import ENVIRONMENT, finish, metrics
from other_host import other_host
from ray_cluster import AUTHENTICATION, RayCluster
from runs import named, run_config, start, until

from services.local_ray import OWNER_VARIABLE
from trainer.commands.checks.doctor import check_listeners
from trainer.commands.checks.leftovers import is_running
from trainer.commands.checks.listeners import Listener, gcs_refuses, is_loopback, listeners, summary

STRANGER = str(Path(__file__).parent / "ray_stranger.py")


@pytest.fixture
def host():
    with other_host("unspiral-out", "10.79.0") as made:
        yield made


def of(process: subprocess.Popen) -> list:
    parent = psutil.Process(process.pid)
    return listeners([parent, *parent.children(recursive=True)])


def strangers(token: str | None = None) -> dict[str, str]:
    return ENVIRONMENT | ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {})


def answers(host, at: str, ports, token: str | None = None) -> dict[int, dict[str, str]]:
    """What each port says to somebody on the other host (None: on this one); ports that nobody reaches are
    left out."""
    command = [sys.executable, STRANGER, "ask", at, *map(str, ports)]
    if host is None:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=strangers(token))
    else:
        done = host.run(*command, seconds=90, environment=strangers(token))
    assert done.returncode == 0, done.stderr
    return {int(port): said for port, said in json.loads(done.stdout).items() if said}


def task(address: str, token: str | None, seconds: float = 90) -> subprocess.CompletedProcess:
    """Who is refused may ask again for minutes before it gives up: it is ended, with 124."""
    command = ["timeout", "-k", "5", str(seconds), sys.executable, STRANGER, "task", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=strangers(token))


def given(said: dict[int, dict[str, str]], call: str, answer: str) -> set[int]:
    """Ports that answered a call so."""
    return {port for port, answers in said.items() if answers[call] == answer}


def content(file: Path) -> bytes:
    """Of a file that the run may have removed meanwhile, as it does with old spans: nothing."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


def command(process: psutil.Process) -> str:
    """Of a process that may have ended meanwhile: nothing."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie too
        return ""


KV, TASKS = "InternalKVGcsService/InternalKVKeys", "CoreWorkerService/GetCoreWorkerStats"
RAYLET, METRICS = "NodeManagerService/GetSystemConfig", "GET /metrics"


@pytest.mark.ray
@pytest.mark.timeout(800)
def test_nothing_of_a_local_run_answers_another_host_or_anybody_without_its_token(files, tmp_path, host):
    home, folder, config = tmp_path / "home", tmp_path / "runs", None
    stale = home / ".ray" / "auth_token"
    stale.parent.mkdir(parents=True)
    stale.write_text("of an earlier Ray of this user's")
    folder.mkdir()
    config = run_config(files, folder, "here", trainer={"steps": 1000, "checkpoint_every": 0})
    process = start(config, environment={"HOME": str(home)})
    try:
        until(lambda: metrics(folder / "here"), process, 240)
        found = of(process)
        for listener in found:
            print(f"{listener.what:30} {listener.host}:{listener.port}")
        assert {"Ray: gcs_server", "Ray: raylet"} <= {each.what for each in found} and len(found) >= 10
        assert [each for each in found if not is_loopback(each.host)] == []

        # another host: reaches what listens widely, and none of these
        ports = sorted({each.port for each in found})
        with socket.socket() as wide:
            wide.bind(("0.0.0.0", 0))
            wide.listen()
            reached = answers(host, host.here, [*ports, wide.getsockname()[1]])
            assert set(reached) == {wide.getsockname()[1]}

        # this host, without the token: every server of Ray refuses, but for its exporters of metrics
        raylet = named(process, "raylet")
        token = raylet.environ()["RAY_AUTH_TOKEN"]
        (gcs,) = {each.port for each in found if each.what == "Ray: gcs_server"}
        ray_ports = sorted({each.port for each in found if each.what.startswith("Ray: ")})
        refused = answers(None, "127.0.0.1", ray_ports)
        granted = answers(None, "127.0.0.1", ray_ports, token)
        assert given(refused, KV, "UNAUTHENTICATED") == given(granted, KV, "OK") == {gcs}
        for call in (RAYLET, TASKS):
            assert given(refused, call, "UNAUTHENTICATED") and not given(granted, call, "UNAUTHENTICATED")
        assert not any(given(refused, call, "OK") for call in (KV, RAYLET, TASKS))
        began = time.monotonic()
        its_own = task(f"127.0.0.1:{gcs}", token)
        assert its_own.stdout.strip() == "ran", its_own.stderr
        enough = 2 * (time.monotonic() - began) + 5
        with ThreadPoolExecutor(2) as pool:
            strangers_tasks = pool.map(lambda t: task(f"127.0.0.1:{gcs}", t, enough), (None, "x" * 64))
        for stranger in strangers_tasks:
            assert stranger.returncode and "ran" not in stranger.stdout, stranger.stderr

        # the token is nowhere but in the environment
        assert len(token) == 64 and token != stale.read_text() and stale.parent.is_dir()
        assert [p.name for p in stale.parent.iterdir()] == ["auth_token"]
        session = Path(f"/tmp/unspiral-{os.getuid()}/ray/session_latest").resolve()
        assert session.parent.parent.stat().st_mode & 0o777 == 0o700
        written = [f for place in (folder / "here", session) for f in place.rglob("*") if f.is_file()]
        assert len(written) > 20
        assert [f for f in written if token.encode() in content(f)] == []
        commands = [command(p) for p in psutil.Process(process.pid).children(recursive=True)]
        assert not any(token in one for one in commands)

        # the doctor sees the same
        rows = {f.what: (f.level, f.seen) for f in summary(found)}
        level, seen = rows[f"Ray at port {gcs}"]
        server = named(process, "gcs_server")
        assert level == "good"
        assert seen == f"process {server.pid}, reached from this machine; asks for a token"
        assert rows["Ray's listeners"][0] == "good" and ", 0 of them beyond" in rows["Ray's listeners"][1]
        assert is_running(raylet.environ()[OWNER_VARIABLE])
        process.send_signal(signal.SIGTERM)
        code, out = finish(process, 120)
        assert code == 143 and token not in out, out
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert [p.name for p in stale.parent.iterdir()] == ["auth_token"]


@pytest.mark.ray
def test_a_cluster_answers_another_host_with_the_token_alone(host):
    token = AUTHENTICATION["RAY_AUTH_TOKEN"]
    with RayCluster(at=host.here, rollout=1) as cluster:
        found = of(cluster.nodes[0].process)
        ports = sorted({each.port for each in found})
        gcs = int(cluster.address.rpartition(":")[2])
        refused, granted = answers(host, host.here, ports), answers(host, host.here, ports, token)
        assert given(refused, KV, "UNAUTHENTICATED") == given(granted, KV, "OK") == {gcs}
        assert not any(given(refused, call, "OK") for call in (KV, RAYLET, TASKS))
        assert gcs_refuses(cluster.address) and gcs_refuses(cluster.address, "x" * 64)
        assert gcs_refuses(cluster.address, token) is False

        # what a token cannot keep is named: exporters of metrics
        open_to_all = given(refused, METRICS, "200")
        rows = {f.what: (f.level, f.seen, f.advice) for f in summary(found)}
        assert rows[f"Ray at port {gcs}"][0] == "good"
        level, _, advice = rows["Ray's listeners"]
        assert level == "note" and all(str(port) in advice for port in open_to_all)


def test_the_ports_of_many_rays_are_counted_and_those_of_one_are_named():
    def advice(rays):
        found = [Listener(n, "Ray: raylet", "0.0.0.0", 4000 + n) for n in range(rays)]
        found += [Listener(9, "Ray: dashboard", "10.0.0.1", port) for port in (8265, 8266)]
        (row,) = summary([*found, Listener(9, "Ray: raylet", "127.0.0.1", 9000)])
        assert (
            row.what == "Ray's listeners"
            and row.seen == f"{rays + 3} ports, {rays + 2} of them beyond this machine"
        )
        return row.advice.removeprefix("keep the network out (docs/security.md): ")

    assert advice(2) == "dashboard 8265, 8266; raylet 4000, 4001"
    assert advice(25) == "dashboard 8265, 8266; raylet 4000 and 24 more"


def test_a_control_plane_that_would_be_open_is_bad(monkeypatch):
    monkeypatch.delenv("UNSPIRAL_API_TOKEN", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert next(check_listeners("127.0.0.1")).level == "good"
    wide = next(check_listeners("0.0.0.0"))
    assert wide.level == "bad" and "UNSPIRAL_API_TOKEN" in wide.advice
    monkeypatch.setenv("UNSPIRAL_API_TOKEN", "t" * 40)
    assert next(check_listeners("0.0.0.0")).level == "good"


def test_a_service_that_answers_everyone_is_bad_and_one_that_asks_for_a_token_is_not(tmp_path):
    from services.likelihood.rest.launch import ServeSettings, serve_in_thread
    from trainer.commands.checks.listeners import Listener

    for token, level in ((None, "bad"), ("t" * 40, "good")):
        server = serve_in_thread(
            ServeSettings(store=str(tmp_path / f"{level}.db"), host="127.0.0.1", port=0, token=token)
        )
        try:
            port = int(server.url.rpartition(":")[2])
            (row,) = summary([Listener(1, "unspiral serve likelihood", "0.0.0.0", port)])
            assert row.level == level, row
            (row,) = summary([Listener(1, "unspiral serve likelihood", "127.0.0.1", port)])
            assert row.level == "good"
        finally:
            server.stop()
