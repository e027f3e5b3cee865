"""Several "hosts" on one machine, without containers. Needs root.

    namespaces.py WORK

Each host is a network namespace with its own address and its own /tmp: 10.77.0.1 head, 10.77.0.2 learner,
10.77.0.3 rollout, 10.77.0.4 retriever, Redis, likelihood and control. A job like the demo's runs across
them. In the middle of it the services' host is cut off for 30 s, then the rollout host, and both come back.
Never run it beside a Docker engine: both change the machine's bridges.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from watching import records, say, until

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
BRIDGE = "unspiral0"
HOSTS = {"head": "10.77.0.1", "learner": "10.77.0.2", "rollout": "10.77.0.3", "services": "10.77.0.4"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def firewall(what: str) -> None:
    """Let the bridge's own traffic pass where a firewall sees it and drops by default."""
    if shutil.which("iptables"):
        rule = ["FORWARD", "-i", BRIDGE, "-o", BRIDGE, "-j", "ACCEPT"]
        subprocess.run(["iptables", what, *rule], check=False, capture_output=True, timeout=20)


def make_hosts() -> None:
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("addr", "add", "10.77.0.254/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    firewall("-I")
    for n, (host, address) in enumerate(HOSTS.items()):
        ip("netns", "add", f"u-{host}")
        ip("link", "add", f"uh{n}", "type", "veth", "peer", "name", "eth0", "netns", f"u-{host}")
        ip("link", "set", f"uh{n}", "master", BRIDGE, "up")
        for command in (
            ["addr", "add", f"{address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
        ):
            ip("-n", f"u-{host}", *command)


def remove_hosts() -> None:
    """Of this check, or of an earlier one that was killed. What cannot be removed is said."""
    for kind, name in (*(("netns", f"u-{host}") for host in HOSTS), ("link", BRIDGE)):
        place = Path("/run/netns" if kind == "netns" else "/sys/class/net") / name
        if place.exists():
            done = subprocess.run(["ip", kind, "del", name], capture_output=True, text=True, timeout=20)
            if done.returncode:
                say(f"LEFT BEHIND: {kind} {name}: {done.stderr.strip()}")
    firewall("-D")


def cable(host: str, state: str) -> None:
    """Pull a host's cable (`down`), or put it back (`up`)."""
    ip("link", "set", f"uh{list(HOSTS).index(host)}", state)


class Processes:
    """What runs on the hosts; ended by their own ids."""

    def __init__(self, work: Path, environment: dict[str, str]):
        self.work, self.environment, self.all = work, environment, []

    def start(self, host: str, name: str, command: str) -> subprocess.Popen[bytes]:
        """A shell line on a host, with a /tmp of its own; its log is WORK/NAME.log."""
        line = f"mount -t tmpfs tmpfs /tmp && {command}"
        log = open(self.work / f"{name}.log", "wb")  # noqa: SIM115
        process = subprocess.Popen(
            ["ip", "netns", "exec", f"u-{host}", "sh", "-c", line],
            cwd=ROOT, env=self.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.all.append(process)
        return process

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.all:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
            time.sleep(4)
        for host in HOSTS:  # Ray's children have sessions of their own
            found = subprocess.run(
                ["ip", "netns", "pids", f"u-{host}"], capture_output=True, text=True, timeout=20
            ).stdout.split()
            for pid in found:
                os.kill(int(pid), signal.SIGKILL)


def lines(file: Path) -> list[dict[str, Any]]:
    return records(file.read_text()) if file.exists() else []


def main() -> None:
    work = Path(sys.argv[1]).resolve()
    if work.is_relative_to("/tmp"):
        raise SystemExit(
            f"{work}: each host has a /tmp of its own; give a folder elsewhere, which all of them see"
        )
    (work / "runs").mkdir(parents=True, exist_ok=True)
    name, password, token = f"hosts-{int(time.time())}", secrets.token_hex(16), secrets.token_hex(24)
    run = work / "runs" / name
    environment = {k: v for k, v in os.environ.items() if k in ("HOME", "PATH", "LANG")} | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(24),
        "UNSPIRAL_CACHE": str(work / "cache"),
        "UNSPIRAL_API_TOKEN": token,
        "UNSPIRAL_CONTROL_HOST": "0.0.0.0",
        "UNSPIRAL_STORE": f"redis://:{password}@127.0.0.1:6379/0",
    }
    if work.stat().st_uid != os.getuid():
        raise SystemExit(f"{work}: belongs to another user, and what lies there is run")
    processes = Processes(work, environment)
    remove_hosts()
    make_hosts()
    try:
        processes.start(
            "services",
            "redis",
            f"exec redis-server --port 6379 --requirepass {password} --dir /tmp --appendonly yes",
        )
        index = f"python deploy/docker/build_index.py lab:train_corpus:0 {work}/index"
        processes.start(
            "services",
            "retriever",
            f"{index} && exec python -m trainer serve retriever --index {work}/index --host 0.0.0.0 "
            "--insecure",
        )
        processes.start(
            "services", "likelihood", "sleep 2; exec python -m trainer serve likelihood --host 0.0.0.0"
        )
        common = "--block --disable-usage-stats --object-store-memory=134217728"
        processes.start(
            "head",
            "head",
            f"exec ray start --head --node-ip-address={HOSTS['head']} --dashboard-host=0.0.0.0 --num-cpus=0 "
            f"--num-gpus=0 {common}",
        )
        gateway = f"serve control --ray-address {HOSTS['head']}:6379 --host 0.0.0.0"
        processes.start("services", "control", f"exec python -m trainer {gateway}")
        for host, cpus in (
            ("learner", 1),
            ("rollout", 0),
        ):  # the loop is what a container's restart policy does
            join = (
                f"ray start --address={HOSTS['head']}:6379 --node-ip-address={HOSTS[host]} --num-cpus={cpus} "
                "--num-gpus=0"
            )
            processes.start(
                host, host, f"""while true; do {join} --resources='{{"{host}": 1}}' {common}; sleep 2; done"""
            )
        job = processes.start(
            "head", "job",
            f"exec python deploy/ray/submit.py --address http://{HOSTS['head']}:8265 --wait-for learner=1 "
            "--wait-for rollout=1 demo "
            f"run.name={name} run.dir={work}/runs retriever.url=http://{HOSTS['services']}:8000 "
            f"store.url=http://{HOSTS['services']}:8100 "
            "trainer.steps=14 rollout.prompts_per_step=8 evaluation.limit=40 evaluation.sampled=false",
        )  # fmt: skip

        def step() -> int:
            if job.poll() is not None:
                raise SystemExit(
                    f"the job ended with {job.returncode}:\n{(work / 'job.log').read_text()[-3000:]}"
                )
            return max((m["step"] for m in lines(run / "metrics.jsonl")), default=0)

        until("the second step", lambda: step() >= 2, 240)
        where = [e for e in lines(run / "events.jsonl") if e["event"] == "worker_join"]
        say(f"{name} is at step {step()}; its worker: {where}")
        asked = subprocess.run(
            ["ip", "netns", "exec", "u-rollout", BIN / "python", "-m", "trainer", "status"],
            cwd=ROOT,
            env=environment | {"UNSPIRAL_CONTROL_URL": f"http://{HOSTS['services']}:8200"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert asked.returncode == 0 and f"{name}, attempt 0: running" in asked.stdout, (
            asked.stdout + asked.stderr
        )
        say(f"the rollout host asks the control plane on the services' host:\n{asked.stdout}")
        for host in ("services", "rollout"):
            before = step()
            cable(host, "down")
            say(f"{host} ({HOSTS[host]}) cut off at step {before}")
            time.sleep(30)
            at = step()
            cable(host, "up")
            say(f"{host} connected again; the run is at step {at}")
            until(f"a step after {host} came back", lambda at=at: step() >= at + 2, 150)
            say(f"the run goes on: step {step()}")
        code = job.wait(timeout=200)
        print((work / "job.log").read_text()[-1500:])
        steps = [m["step"] for m in lines(run / "metrics.jsonl")]
        retries = [
            e
            for e in lines(run / "events.jsonl")
            if e["event"] in ("trajectory_retry", "worker_join", "worker_lost", "resume")
        ]
        say(f"exit {code}; steps {steps}; {len(retries)} joins, losses and retries")
        assert code == 0 and steps == list(range(1, 15))
    finally:
        processes.end()
        remove_hosts()
    say("hosts: all of it stands")


if __name__ == "__main__":
    main()
