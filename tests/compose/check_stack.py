"""Bring the compose stack up, use it, break it, and check that it recovers.

It runs beside an engine: tests/compose/engine.sh WORK tests/compose/check_stack.py WORK PART

    check_stack.py WORK small     retriever, Redis and likelihood service alone: no torch
    check_stack.py WORK demo      all of it: build, a demo job to its end, sizes and times
    check_stack.py WORK scale     during a run: rollout nodes and workers up and down; then the stack down
                                  and up, and the run goes on
    check_stack.py WORK chaos     during a run: each container killed in turn, by the kernel and by
                                  `docker kill`; Redis cut off from the network for 30 s
    check_stack.py WORK replicas  two retrievers behind one name: a new index, and each replaced in turn
                                  under load, without a failed request

It prints every step with its findings; the first failure ends it with status 1. WORK/evidence.json keeps
the numbers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from replicas import replicas
from stack import (
    ROOT,
    Run,
    ask,
    compose,
    containers,
    control,
    docker,
    present,
    seen,
    settings,
    state,
    status_of,
    unspiral,
    up,
)
from watching import began, say

NETWORK = os.environ.get("COMPOSE_PROJECT_NAME", "unspiral") + "_internal"
LIGHT = ("retriever", "redis", "likelihood")
SERVICES = ("retriever", "likelihood", "redis", "control", "rollout", "learner", "ray-head")
SMALL_RUN = (
    "rollout.prompts_per_step=4",
    "learner.epochs=1",
    "learner.minibatches_per_batch=2",
    "evaluation.limit=10",
    "evaluation.sampled=false",
    "trainer.eval_at_ends=false",
    "trainer.checkpoint_every=1",
    "probe.displacement_size=16",
)
evidence: dict[str, Any] = {}


def build(*services: str) -> None:
    started = time.monotonic()
    compose("build", *services, limit=590)
    evidence["build_seconds"] = round(time.monotonic() - started, 1)
    images = {}
    for line in docker("images", "--format", "{{.Repository}}:{{.Tag}} {{.Size}}").splitlines():
        name, size = line.split()
        if name.startswith("unspiral-"):
            images[name] = size
            history = docker("history", "--no-trunc", name)
            leaked = [v for v in ("PIP_FIND_LINKS", "127.0.0.1:18929") if v in history]
            if leaked:
                raise SystemExit(f"{name} keeps index settings: {leaked}")
    evidence["images"] = images
    say(f"built in {evidence['build_seconds']} s: {images}")


def crash(service: str) -> None:
    """Kill a container's main process as the kernel would; wait until it is back and healthy."""
    id, before, _, pid = state(service)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()

    def back() -> bool:
        now = state(service)
        return now[0] == id and now[1] != before and now[2] == "healthy"

    seen(f"{service} healthy again", back, 120)
    _, after, _, _ = state(service)
    seconds = round(time.monotonic() - killed, 1)
    say(
        f"kill -9 {pid}, {service} {id[:12]}: StartedAt {before[11:19]} -> {after[11:19]}, "
        f"healthy after {seconds} s"
    )
    evidence.setdefault("crashes", []).append(
        {"service": service, "container": id[:12], "pid": pid, "seconds": seconds}
    )


def operators_kill(service: str) -> None:
    """`docker kill` is an operator's stop: the engine leaves it at that, and `docker compose up -d` brings
    the container back."""
    id, before, _, _ = state(service)
    docker("kill", id)
    seen(f"{service} ended", lambda: not containers(service)[0]["State"]["Running"], 20)
    time.sleep(2)
    stayed = not containers(service)[0]["State"]["Running"]
    began_again = time.monotonic()
    compose("up", "-d", "--no-recreate", service)
    seen(f"{service} healthy again", lambda: state(service)[2] == "healthy", 150)
    seconds = round(time.monotonic() - began_again, 1)
    same, after, _, _ = state(service)
    assert same == id, "the same container"
    say(
        f"docker kill {service} ({id[:12]}): "
        f"{'stays down as Docker means it' if stayed else 'was restarted by the engine'}; "
        f"compose up -d brings it back, healthy in {seconds} s, StartedAt {before[11:19]} -> {after[11:19]}"
    )
    evidence.setdefault("docker_kill", []).append(
        {"service": service, "container": id[:12], "stayed_down": stayed, "seconds": seconds}
    )


def small(env: dict[str, str]) -> None:
    compose("--profile", "*", "down", "--volumes", "--timeout", "2")
    build("retriever", "likelihood")
    seconds = up(*LIGHT)
    say(f"up and healthy in {seconds:.1f} s")
    token, retriever, likelihood = env["UNSPIRAL_API_TOKEN"], env["RETRIEVER_PORT"], env["LIKELIHOOD_PORT"]
    hit = ask(retriever, "/retrieve", body={"queries": ["guild"], "topk": 1, "return_scores": True})[
        "result"
    ][0][0]
    say(
        f"retriever answers over the published port: document {hit['document']['id']}, "
        f"score {hit['score']:.3f}"
    )
    assert status_of(likelihood, "/v1/runs") == 401 and status_of(likelihood, "/healthz") == 200
    for step in range(1, 6):
        ask(
            likelihood,
            "/v1/runs/posted/steps",
            token,
            {"step": step, "metrics": {"reward/mean": step / 10}, "trajectories": []},
        )
    for service in ("retriever", "likelihood"):
        table = compose("exec", "-T", service, "unspiral", "doctor")
        assert "BAD" not in table, table
    say(
        "likelihood service refuses strangers (401) and takes five steps with the token; "
        "the doctor is content in both containers"
    )
    for service in LIGHT:
        crash(service)
    ask(retriever, "/retrieve", body={"queries": ["guild"], "topk": 1})
    assert ask(likelihood, "/v1/runs/posted/summary", token)["last_step"] == 5
    operators_kill("retriever")
    secret = env["REDIS_PASSWORD"]
    for service in ("redis", "likelihood"):
        id = state(service)[0]
        shown = docker("top", id, "-eo", "pid,args") + docker("logs", id)
        assert secret not in shown, f"the password shows in the processes or the log of {service}"
    compose("down", "--timeout", "5")
    seconds = up(*LIGHT)
    kept = ask(likelihood, "/v1/runs/posted/summary", token)
    assert kept["last_step"] == 5
    say(
        f"down and up in {seconds:.1f} s: the run's five steps are still there; "
        "no password in any process list or log"
    )


def demo(env: dict[str, str]) -> None:
    build()
    seconds = up()
    evidence["up_seconds"] = round(seconds, 1)
    say(f"up and healthy in {seconds:.1f} s")
    for service in (s for s in SERVICES if s in present() and s != "redis"):
        table = compose("exec", "-T", service, "unspiral", "doctor")
        assert "BAD" not in table, f"{service}\n{table}"
    say("the doctor is content in every container")
    started = time.monotonic()
    run = Run(f"demo-{int(time.time())}")
    code = run.process.wait(timeout=500)
    evidence["demo_seconds"] = round(time.monotonic() - started, 1)
    print(run.tail(30))
    assert code == 0, f"the demo job ended with {code}"
    summary = json.loads(run.file("summary.json"))
    evidence["demo"] = summary
    say(f"docker compose run --rm job demo: exit 0 in {evidence['demo_seconds']} s, {summary}")
    stored = ask(env["LIKELIHOOD_PORT"], f"/v1/runs/{run.name}/summary", env["UNSPIRAL_API_TOKEN"])
    assert stored["last_step"] == summary["steps"], stored
    say(f"the likelihood service holds its {stored['last_step']} steps, phase {stored['phase']}")
    bad = subprocess.run(
        ["docker", "compose", "run", "--rm", "-T", "job", "demo", "learner.lrr=1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert bad.returncode == 2 and "did you mean learner.lr" in bad.stdout, (
        bad.returncode,
        bad.stdout[-500:],
    )
    say("a mistake in the job's arguments: exit 2, and its one line reaches the terminal")
    for line in docker("stats", "--no-stream", "--format", "{{.Name}} {{.MemUsage}}").splitlines():
        say(f"  {line}")


def background_run(env: dict[str, str], what: str) -> Run:
    """The stack, and a run of many small steps on it."""
    say(f"up and healthy in {up():.1f} s")
    run = Run(f"{what}-{int(time.time())}", "trainer.steps=10000", *SMALL_RUN)
    run.goes_on(0, limit=300)
    return run


def stopped(env: dict[str, str], run: Run) -> list[int]:
    """Stop the job's container; the steps of the run, each of which must be in its folder and in the
    likelihood store once."""
    job = docker(
        "ps",
        "-q",
        "--filter",
        "label=com.docker.compose.oneoff=True",
        "--filter",
        "label=com.docker.compose.service=job",
    )
    docker("stop", "--time", "120", job.strip(), limit=150)
    code = run.process.wait(timeout=150)
    print(run.tail(4))
    assert code == 143, f"a stopped job ended with {code}"
    steps = [m["step"] for m in run.lines("metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)), "each step once, in order"
    assert json.loads(run.file("summary.json"))["exit"] == 143, (
        "the training ended by itself, with a checkpoint"
    )
    say(
        f"docker stop of the job: exit {code}; metrics hold steps 1 to {len(steps)}, each once; "
        f"{run.attempt()} resumed attempts"
    )
    seen("all steps in the likelihood store", lambda: stored_steps(env, run) == steps, 60)
    info = ask(env["LIKELIHOOD_PORT"], f"/v1/runs/{run.name}/summary", env["UNSPIRAL_API_TOKEN"])
    assert info["trajectories"] == 20 * len(steps), info["trajectories"]
    say(
        f"the likelihood store holds the same steps, with {info['trajectories']} trajectories: none lost, "
        "none doubled"
    )
    return steps


def stored_steps(env: dict[str, str], run: Run) -> list[int]:
    stored = ask(env["LIKELIHOOD_PORT"], f"/v1/runs/{run.name}/steps?limit=1000", env["UNSPIRAL_API_TOKEN"])
    return [s["step"] for s in stored]


def scale(env: dict[str, str]) -> None:
    run = background_run(env, "scale")
    status = lambda: ask(env["CONTROL_PORT"], "/v1/status", env["UNSPIRAL_API_TOKEN"])  # noqa: E731
    ready = lambda n: sum(w["state"] == "ready" for w in status()["workers"]) == n == len(status()["workers"])  # noqa: E731
    assert status_of(env["CONTROL_PORT"], "/v1/status") == 401
    assert (status()["run"], status()["target"], status()["follows_cluster"]) == (run.name, 1, True)
    print(control("status"))
    refused = control("workers", "scale", "2", code=3)
    say(f"one rollout node: `unspiral workers scale 2` is refused with 3: {refused}")
    say(f"`unspiral workers scale 2 --ahead`: {control('workers', 'scale', '2', '--ahead')}")
    say("docker compose up -d --scale rollout=2")
    compose("up", "-d", "--scale", "rollout=2", "--no-recreate")
    seen(
        "a worker on the second node",
        lambda: any(e["worker"].startswith("w1.") for e in run.events("worker_join")),
        150,
    )
    join = [e for e in run.events("worker_join") if e["worker"].startswith("w1.")][-1]
    say(f"  {join['worker']} joined on {join['node']} with version {join['version']}")
    run.goes_on(run.step())
    assert run.writers() == {"w0", "w1"}, run.writers()
    say("  trajectories come from both nodes")
    for n in (1, 2, 1):
        asked = time.monotonic()
        say(
            f"both nodes stay, `unspiral workers scale {n}` in the control container: "
            f"{control('workers', 'scale', str(n))}"
        )
        seen(f"{n} workers ready", lambda n=n: ready(n), 150)
        say(f"  {n} ready after {time.monotonic() - asked:.1f} s")
        before = run.step()
        run.goes_on(before)
        seen(f"a step with trajectories of {n}", lambda n=n: len(run.writers()) == n, 60)
    assert len([c for c in containers("rollout") if c["State"]["Running"]]) == 2
    on_host = unspiral(
        "workers",
        "scale",
        "all",
        url=f"http://127.0.0.1:{env['CONTROL_PORT']}",
        token=env["UNSPIRAL_API_TOKEN"],
    )
    say(f"`unspiral workers scale all` on the host, by the published port: {on_host}")
    seen("two workers ready", lambda: ready(2), 150)
    say("docker compose up -d --scale rollout=1")
    compose("up", "-d", "--scale", "rollout=1", "--no-recreate")
    seen("one worker is wanted and ready", lambda: status()["target"] == 1 and ready(1), 90)
    run.goes_on(run.step())
    assert len(run.writers()) == 1
    print(control("workers", "list"))
    steps = stopped(env, run)
    compose("down", "--timeout", "5")
    say(f"down, and up again in {up():.1f} s")
    assert stored_steps(env, run) == steps
    again = Run(run.name, f"trainer.steps={len(steps) + 2}", *SMALL_RUN, "--resume", "latest")
    code = again.process.wait(timeout=240)
    print(again.tail(4))
    assert code == 0, f"the resumed job ended with {code}"
    assert [m["step"] for m in again.lines("metrics.jsonl")] == list(range(1, len(steps) + 3))
    say(f"nothing lost: the run went on from step {len(steps)} to {len(steps) + 2} and ended with exit 0")


def chaos(env: dict[str, str]) -> None:
    run = background_run(env, "chaos")
    for service in SERVICES:
        before = run.step()
        crash(service)
        run.goes_on(before, limit=240)
    for service in SERVICES:
        before = run.step()
        operators_kill(service)
        run.goes_on(before, limit=240)
    id, before = state("redis")[0], run.step()
    say(f"redis ({id[:12]}) cut off from the network for 30 s")
    docker("network", "disconnect", NETWORK, id)
    time.sleep(30)
    docker("network", "connect", "--alias", "redis", NETWORK, id)
    say(f"  connected again; the run went from step {before} to {run.step()} meanwhile")
    run.goes_on(run.step())
    stopped(env, run)


def pair(env: dict[str, str]) -> None:
    build("retriever")
    replicas(evidence)


def main() -> None:
    work, part = Path(sys.argv[1]).resolve(), sys.argv[2]
    os.environ["STACK_WORK"] = str(work)
    env = settings(work)
    try:
        {"small": small, "demo": demo, "scale": scale, "chaos": chaos, "replicas": pair}[part](env)
    finally:
        evidence["seconds"] = round(time.monotonic() - began, 1)
        (work / f"evidence-{part}.json").write_text(json.dumps(evidence, indent=1) + "\n")
    say(f"{part}: all of it stands")


if __name__ == "__main__":
    main()
