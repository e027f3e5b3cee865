"""Train as a Ray job: submit it, show its log, and resume it when the job, the learner or the head is lost.

    python deploy/ray/submit.py [options] demo [a.b=c ...]
    python deploy/ray/submit.py [options] train --config FILE [a.b=c ...] [--resume latest]

FILE lies on the head, or in --working-dir, which is then uploaded. The exit status is the training's own,
or 3 if the cluster does not answer or lacks nodes. Ctrl-C and SIGTERM stop the job cleanly (it writes a
checkpoint); the exit status is then 130 or 143.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_nodes

HERE = Path(__file__).resolve().parent
FINAL = {0, 2, 4, 130, 143}
"""Exit statuses after which trying again would change nothing."""
POLL_SECONDS = 1.0


class Unavailable(Exception):
    """The cluster does not answer, or lacks nodes."""


class Signals:
    """Remembers SIGINT or SIGTERM; `pause` ends early on one."""

    def __init__(self) -> None:
        self.number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.number = number

    def pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.number is None and time.monotonic() < deadline:
            time.sleep(0.2)


def say(text: str) -> None:
    print(f"submit: {text}", file=sys.stderr, flush=True)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="submit.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--address", default=os.environ.get("RAY_ADDRESS", "http://127.0.0.1:8265"), help="of Ray's dashboard"
    )
    parser.add_argument("--retries", type=int, default=5, help="times that a lost run is gone on with")
    parser.add_argument(
        "--wait-for",
        action="append",
        default=[],
        metavar="RESOURCE=N",
        help="wait until the cluster has this much",
    )
    parser.add_argument(
        "--wait-seconds", type=float, default=300.0, help="longest wait for the cluster and its nodes"
    )
    parser.add_argument(
        "--working-dir", type=Path, help="folder to upload, less the excludes of runtime_env.yaml"
    )
    parser.add_argument("command", choices=("demo", "train"))
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="as for `unspiral train`")
    return parser.parse_args(argv)


def training(command: str, rest: list[str], *, again: bool, stamp: str) -> list[str]:
    """The command line of an attempt. Each demo gets its own run name, so that it can start repeatedly."""
    if command == "demo":
        named = [] if any(r.startswith("run.name=") for r in rest) else [f"run.name=demo-{stamp}"]
        rest = ["--config", str(HERE / "demo.yaml"), *named, *rest]
    resume = ["--resume", "latest"] if again and not any(r.split("=")[0] == "--resume" for r in rest) else []
    return ["python", "-m", "trainer", "train", *rest, *resume]


def runtime_env(working_dir: Path | None) -> dict[str, Any]:
    """The excludes and allowed variables of runtime_env.yaml.

    An allowed variable that is set in this process takes this process's value.
    """
    env: dict[str, Any] = yaml.safe_load((HERE / "runtime_env.yaml").read_text(encoding="utf-8"))
    env["env_vars"] = {name: os.environ.get(name, value) for name, value in env["env_vars"].items()}
    if working_dir:
        return env | {"working_dir": str(working_dir)}
    env.pop("excludes")
    return env


def submit(
    address: str, wanted: dict[str, float], limit: float, signals: Signals, job: dict[str, Any]
) -> JobSubmissionClient:
    """Submit once the cluster answers and has the wanted resources.

    Raises Unavailable with the missing resources after `limit` seconds.
    """
    deadline, told, missing = time.monotonic() + limit, "", "stopped before the job was submitted"
    while not signals.number:
        try:
            client = JobSubmissionClient(address)
            nodes = list_nodes(address=address, timeout=20, raise_on_missing_output=False)
            have: dict[str, float] = {}
            for node in nodes:
                for name, n in (node.resources_total or {}).items() if node.state == "ALIVE" else ():
                    have[name] = have.get(name, 0.0) + n
            lacking = [
                f"{name} {have.get(name, 0.0):g} of {n:g}"
                for name, n in wanted.items()
                if have.get(name, 0.0) < n
            ]
            if not lacking:
                client.submit_job(**job)
                return client
            missing = f"the cluster at {address} lacks nodes: {', '.join(lacking)}"
        except Exception as e:  # requests', aiohttp's and Ray's own errors, while a head starts
            if "already" in str(e) and job["submission_id"] in str(
                e
            ):  # the answer to an earlier try was lost
                return client
            if "status code 4" in str(e) and "401" not in str(e):
                raise Unavailable(f"{address} refuses the job: {' '.join(str(e).split())[:400]}") from e
            if "401" in str(e) or "authentication" in str(e).lower():
                raise Unavailable(
                    f"{address} refuses this client: set RAY_AUTH_MODE and RAY_AUTH_TOKEN as on the head"
                ) from e
            missing = f"no Ray at {address}: {' '.join(str(e).split())[:200]}"
        if time.monotonic() > deadline:
            raise Unavailable(f"{missing} (waited {limit:g} s)")
        if missing != told:
            say(f"waiting: {missing}")
            told = missing
        signals.pause(POLL_SECONDS)
    raise Unavailable(missing)


class Job:
    """One submitted job and how much of its log was shown."""

    def __init__(self, client: JobSubmissionClient, id: str, patience: float, signals: Signals):
        self.client, self.id, self.patience, self.signals, self.shown = client, id, patience, signals, 0

    def follow(self) -> int | None:
        """Show the log until the job has ended; its exit status, None where it was lost."""
        silent_since: float | None = None
        asked = False
        while True:
            try:
                if self.signals.number and not asked:
                    say("stopping the job")
                    self.client.stop_job(self.id)
                    asked = True
                info = self.client.get_job_info(self.id)
                self.show()
            except Exception as e:  # the head restarts, or forgot the job
                if re.search(r"404|does not exist|No job", str(e)):
                    say(f"the cluster no longer knows job {self.id}")
                    return None
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > self.patience or self.signals.number:
                    say(f"no answer from the cluster: {' '.join(str(e).split())[:200]}")
                    return None
            else:
                silent_since = None
                if info.status.is_terminal():
                    self.show()
                    if info.status == JobStatus.SUCCEEDED:
                        return 0
                    if self.signals.number:
                        return 128 + self.signals.number
                    if info.driver_exit_code is None:
                        say(
                            f"job {self.id} {info.status.lower()}: "
                            f"{' '.join((info.message or '').split())[:300]}"
                        )
                        return 130 if info.status == JobStatus.STOPPED else None
                    return info.driver_exit_code
            time.sleep(POLL_SECONDS)  # a stopped job is followed to its end

    def show(self) -> None:
        text = self.client.get_job_logs(self.id)
        sys.stdout.write(text[self.shown :])
        sys.stdout.flush()
        self.shown = len(text)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    wanted = {name: float(n) for name, _, n in (item.partition("=") for item in args.wait_for)}
    stamp = time.strftime("%Y%m%d-%H%M%S")
    signals, code = Signals(), None
    for attempt in range(args.retries + 1):
        if attempt:
            pause = min(30, 2**attempt)
            say(f"going on with the run in {pause} s, retry {attempt} of {args.retries}")
            signals.pause(pause)
        line = training(args.command, args.rest, again=attempt > 0, stamp=stamp)
        id = f"unspiral-{stamp}-{os.getpid()}-{attempt}"
        job = {
            "entrypoint": shlex.join(line),
            "submission_id": id,
            "runtime_env": runtime_env(args.working_dir),
        }
        try:
            client = submit(args.address, wanted, args.wait_seconds, signals, job)
        except Unavailable as e:
            say(str(e))
            return 128 + signals.number if signals.number else 3
        say(f"job {id}: {shlex.join(line)}")
        code = Job(client, id, args.wait_seconds, signals).follow()
        if code in FINAL or signals.number:
            break
        say(
            f"the job was lost (exit status {code})"
            if code is None
            else f"the training ended with exit status {code}"
        )
    return 1 if code is None else code


if __name__ == "__main__":
    sys.exit(main())
