"""The stack of docker-compose.yml as its check handles it: Compose commands, containers, published ports, and
a job in the background."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from watching import records, say, until

ROOT = Path(__file__).resolve().parents[2]
PORTS = ("RETRIEVER_PORT", "LIKELIHOOD_PORT", "CONTROL_PORT", "DASHBOARD_PORT")


def docker(*words: str, check: bool = True, limit: float = 120) -> str:
    done = subprocess.run(["docker", *words], cwd=ROOT, capture_output=True, text=True, timeout=limit)
    if check and done.returncode:
        raise SystemExit(f"docker {' '.join(words)}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def compose(*words: str, check: bool = True, limit: float = 300) -> str:
    return docker("compose", *words, check=check, limit=limit)


def show_stack() -> None:
    print(compose("ps", "-a", check=False), compose("logs", "--tail", "15", check=False), sep="\n")


def seen(what: str, look: Callable[[], Any], limit: float) -> Any:
    return until(what, look, limit, otherwise=show_stack)


def settings(work: Path) -> dict[str, str]:
    """A .env of the check's own, with free ports."""
    file = work / "stack.env"
    if not file.exists():
        lines = []
        for line in (ROOT / ".env.example").read_text().splitlines():
            if line.endswith(("PASSWORD=", "TOKEN=")):
                line += os.urandom(24).hex()
            lines.append(line)
        file.write_text("\n".join(lines) + "\n")
        file.chmod(0o600)
    ports = {}
    for name in PORTS:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            ports[name] = str(s.getsockname()[1])
    os.environ |= {"COMPOSE_ENV_FILES": str(file), "UNSPIRAL_DATA": str(work / "data")} | ports
    (work / "data").mkdir(exist_ok=True)
    return (
        dict(line.split("=", 1) for line in file.read_text().splitlines() if "=" in line and line[0] != "#")
        | ports
    )


def present() -> set[str]:
    return set(compose("ps", "-a", "--services").split())


def containers(service: str) -> list[dict[str, Any]]:
    ids = compose("ps", "-aq", service).split()
    return json.loads(docker("inspect", *ids)) if ids else []


def state(service: str) -> tuple[str, str, str, int]:
    """Id, start time, health and process id of a service's first container."""
    first = containers(service)[0]
    return (
        first["Id"],
        first["State"]["StartedAt"],
        first["State"].get("Health", {}).get("Status", "none"),
        first["State"]["Pid"],
    )


def ask(port: str, path: str, token: str | None = None, body: Any = None) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def status_of(port: str, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as e:
        return e.code


def up(*services: str, limit: int = 180) -> float:
    started = time.monotonic()
    compose("up", "-d", "--wait", "--wait-timeout", str(limit), *services, limit=limit + 60)
    return time.monotonic() - started


class Run:
    """A job in the background, and its folder as the head sees it."""

    def __init__(self, name: str, *overrides: str):
        self.name, self.log = name, open(Path(os.environ["STACK_WORK"]) / f"{name}.log", "w+")  # noqa: SIM115
        command = ["docker", "compose", "run", "--rm", "-T", "job", "demo", f"run.name={name}", *overrides]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self.log, stderr=subprocess.STDOUT)

    def file(self, name: str) -> str:
        return compose("exec", "-T", "ray-head", "cat", f"/runs/{self.name}/{name}", check=False)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return records(self.file(name))

    def step(self) -> int:
        return max((m["step"] for m in self.lines("metrics.jsonl")), default=0)

    def attempt(self) -> int:
        return max((e["attempt"] for e in self.lines("events.jsonl") if e["event"] == "resume"), default=0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.lines("events.jsonl") if e["event"] == kind]

    def writers(self) -> set[str]:
        """Slots of the workers that wrote the last whole step's trajectories."""
        last = self.lines(f"trajectories/step_{self.step() - 1:06d}.jsonl")
        return {t["worker"].split(".")[0] for t in last}

    def goes_on(self, beyond: int, limit: float = 180) -> None:
        """Two more steps than `beyond`, or than what a resumed attempt began with."""
        since = time.monotonic()

        def look() -> bool:
            if self.process.poll() is not None:
                raise SystemExit(f"the job ended with {self.process.returncode}:\n{self.tail(25)}")
            return self.step() >= beyond + 2

        seen(f"step {beyond + 2} of {self.name}", look, limit)
        say(
            f"  the run goes on: step {self.step()}, attempt {self.attempt()}, "
            f"{time.monotonic() - since:.0f} s later"
        )

    def tail(self, n: int) -> str:
        self.log.flush()
        return "\n".join(Path(self.log.name).read_text().splitlines()[-n:])


def control(*words: str, code: int = 0) -> str:
    """`unspiral ...` in the control service's container; its output."""
    done = subprocess.run(
        ["docker", "compose", "exec", "-T", "control", "unspiral", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, f"{words} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return (done.stdout + done.stderr).strip()


def unspiral(*words: str, url: str, token: str) -> str:
    """The same command on this machine, against an address."""
    environment = os.environ | {"UNSPIRAL_CONTROL_URL": url, "UNSPIRAL_API_TOKEN": token}
    command = [sys.executable, "-m", "trainer", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()
