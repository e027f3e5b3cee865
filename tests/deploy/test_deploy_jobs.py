"""deploy/ray: what a job uploads, which variables it passes on, and how its client goes on after a loss."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from places import ROOT
from ruamel.yaml import YAML


def submit():
    spec = importlib.util.spec_from_file_location("submit", ROOT / "deploy/ray/submit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_upload_is_the_code_and_small(tmp_path):
    from ray._private.runtime_env.packaging import create_package

    excludes = YAML(typ="safe").load((ROOT / "deploy/ray/runtime_env.yaml").read_text())["excludes"]
    package = tmp_path / "package.zip"
    create_package(str(ROOT), package, include_gitignore=True, excludes=excludes)
    names = zipfile.ZipFile(package).namelist()
    held = {name.split("/")[0] for name in names}
    rooms = ("trainer", "services", "retriever_service")
    code = {str(file.relative_to(ROOT)) for room in rooms for file in (ROOT / room).rglob("*.py")}
    assert code - set(names) == set(), "what git ignores in a room is missing in the job"
    assert {"trainer/data/questions.py", "deploy/ray/demo.yaml"} <= set(names)
    assert {"services/likelihood/static/live.html", "services/common/http/static/login.html"} <= set(names)
    assert {"trainer", "services", "retriever_service", "examples", "deploy"} <= held
    assert not held & {".git", ".venv", ".env", "runs", "tests", "docs", "data", "benchmarks"}
    assert package.stat().st_size < 4_000_000


def test_variables_pass_by_an_allow_list_without_secrets(monkeypatch):
    for name in ("REDIS_PASSWORD", "UNSPIRAL_API_TOKEN", "RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret-value")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    env = submit().runtime_env(ROOT)
    assert env["env_vars"] == {
        "HF_HUB_OFFLINE": env["env_vars"]["HF_HUB_OFFLINE"],
        "OMP_NUM_THREADS": "7",
        "RAY_JOB_STOP_WAIT_TIME_S": "90",
    }
    assert "secret-value" not in str(env)
    assert env["working_dir"] == str(ROOT) and env["excludes"]
    assert submit().runtime_env(None).keys() == {"env_vars"}, "nothing is uploaded unless a folder is named"


def test_ray_takes_the_runtime_environment():
    from ray.runtime_env import RuntimeEnv

    env = submit().runtime_env(None)
    assert RuntimeEnv(**env).env_vars() == env["env_vars"]


def test_a_demo_gets_a_name_of_its_own_and_a_retry_resumes_it():
    lines = [
        submit().training("demo", ["trainer.steps=3"], again=again, stamp="20260101-000000")
        for again in (False, True)
    ]
    assert lines[0][:6] == [
        "python",
        "-m",
        "trainer",
        "train",
        "--config",
        str(ROOT / "deploy/ray/demo.yaml"),
    ]
    assert lines[0][6:] == ["run.name=demo-20260101-000000", "trainer.steps=3"]
    assert lines[1] == [*lines[0], "--resume", "latest"]
    own = submit().training("train", ["--config", "c.yaml", "--resume", "latest"], again=True, stamp="x")
    assert own == ["python", "-m", "trainer", "train", "--config", "c.yaml", "--resume", "latest"]
    named = submit().training("demo", ["run.name=mine"], again=False, stamp="x")
    assert [w for w in named if w.startswith("run.name=")] == ["run.name=mine"]


def test_no_cluster_is_one_line_and_exit_status_3(capsys):
    code = submit().main(["--address", "http://127.0.0.1:9", "--wait-seconds", "0.1", "demo"])
    assert code == 3
    lines = capsys.readouterr().err.splitlines()
    assert "no Ray at http://127.0.0.1:9" in lines[-1] and "waited 0.1 s" in lines[-1]


@pytest.mark.parametrize("final", [0, 2, 4, 130, 143])
def test_outcomes_that_a_retry_cannot_change_end_the_client(final):
    assert final in submit().FINAL and 1 not in submit().FINAL and 3 not in submit().FINAL


def test_a_signal_while_it_waits_for_the_cluster_ends_the_client_with_its_number():
    client = subprocess.Popen(
        [sys.executable, "deploy/ray/submit.py", "--address", "http://127.0.0.1:9", "demo"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in client.stderr:
            if "waiting" in line:
                break
        client.send_signal(signal.SIGTERM)
        assert client.wait(timeout=60) == 143
    finally:
        client.kill()
        client.stderr.close()


@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_a_client_in_another_mode_than_the_heads_is_told_so_in_one_line(mode, tmp_path):
    """The head asks for a token; the client is told of none."""

    class Head(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b"Unauthorized: Missing authentication token")

        def log_message(self, *_):
            pass

    head = ThreadingHTTPServer(("127.0.0.1", 0), Head)
    thread = threading.Thread(target=head.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH_")}
    address = f"http://127.0.0.1:{head.server_port}"
    try:
        done = subprocess.run(
            [sys.executable, "deploy/ray/submit.py", "--address", address, "demo"],
            cwd=ROOT,
            env=environment | {"RAY_AUTH_MODE": mode, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=90,
        )
    finally:
        head.shutdown()
        thread.join()
        head.server_close()
    said = f"submit: {address} refuses this client: set RAY_AUTH_MODE and RAY_AUTH_TOKEN as on the head\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, "", said)


@pytest.fixture
def cluster(tmp_path_factory):
    """Address of the dashboard of a head of its own, which takes jobs from holders of its token alone."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # paths of Ray's sockets must be short
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # a job's `python` is the head's
    env = os.environ | {
        "PATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "t" * 32,
        "PYTHONPATH": str(ROOT),
    }
    command = [
        "start",
        "--head",
        "--block",
        "--port=0",
        f"--dashboard-port={port}",
        "--num-cpus=1",
        f"--temp-dir={folder}",
        "--dashboard-agent-listen-port=0",
    ]
    head = subprocess.Popen(
        [
            Path(sys.executable).parent / "ray",
            *command,
            "--node-ip-address=127.0.0.1",
            "--disable-usage-stats",
        ],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}", env
    finally:
        head.terminate()
        head.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
def test_a_jobs_log_and_exit_status_reach_the_client_and_strangers_are_refused(cluster):
    address, env = cluster
    command = [
        sys.executable,
        "deploy/ray/submit.py",
        "--address",
        address,
        "--wait-for",
        "CPU=1",
        "train",
        "--config",
        "none.yaml",
    ]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "none.yaml: cannot be read" in done.stdout, "the training's own line"
    assert "retry" not in done.stderr, "a mistake is not tried again"
    stranger = subprocess.run(
        command, cwd=ROOT, env=env | {"RAY_AUTH_TOKEN": "x" * 32}, capture_output=True, text=True, timeout=60
    )
    assert stranger.returncode == 3
    assert "set RAY_AUTH_MODE and RAY_AUTH_TOKEN as on the head" in stranger.stderr
