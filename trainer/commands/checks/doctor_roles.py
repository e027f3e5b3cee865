"""Checks of `unspiral doctor` inside a container: only what its role needs (UNSPIRAL_ROLE, set by the
images)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from services.common.counting import counted
from services.common.errors import UnspiralError
from services.common.http.auth import TOKEN_VARIABLE, token_of
from services.common.loading.extras import EXTRAS, how_to_install
from services.common.printing.messages import said_by
from services.control.records import RunStatus
from services.likelihood.rest.launch import without_password
from services.likelihood.store.opening import open_store
from trainer.commands.checks.findings import GIB, Finding, judged, status_of
from trainer.commands.version import version

READY = {
    "retriever": "http://127.0.0.1:8000/readyz",
    "likelihood": "http://127.0.0.1:8100/readyz",
    "control": "http://127.0.0.1:8200/readyz",
    "node": "http://127.0.0.1:52365/api/local_raylet_healthz",
}
"""Address that answers, by role, once the container serves."""
MEMORY_GIB = {"retriever": 0.5, "likelihood": 0.25, "control": 0.25, "node": 3.0}
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_serving(role: str) -> Iterator[Finding]:
    """Whether the role's own server, or the node's raylet, answers."""
    url = READY[role]
    status, reason = status_of(url)
    if status is None:
        yield Finding("serving", "note", f"{url}: {reason}", "nothing runs here now; its log says why")
    elif status < 400:
        yield Finding("serving", "good", f"{url}: {status}")
    else:
        yield Finding(
            "serving", "bad", f"{url}: {status}", "it is up but not ready yet; its log says what it waits for"
        )


def check_container(role: str) -> Iterator[Finding]:
    """Memory limit, user, and folders that must be writable."""
    limit = memory_limit()
    if limit is not None:
        advice = f"a {role} container needs {MEMORY_GIB[role]:g} GiB (deploy.resources.limits.memory)"
        yield judged("memory limit", limit >= MEMORY_GIB[role] * GIB, f"{limit / GIB:.1f} GiB", advice)
    user = os.getuid()
    yield judged("user", user != 0, f"uid {user}", "runs as root; the images use 10001", "note")
    folders = [tempfile.gettempdir()]
    if role == "node":
        folders += [os.environ.get("UNSPIRAL_CACHE", "/cache"), "/runs"]
    for folder in folders:
        writable = os.access(folder, os.W_OK)
        seen = "writable" if writable else "not writable" if os.path.isdir(folder) else "no such folder"
        advice = "mount a volume there that belongs to uid 10001; all nodes share /runs and the cache"
        yield judged(folder, writable, seen, advice)


def memory_limit(files: tuple[Path, ...] = CGROUP_LIMITS) -> int | None:
    """Bytes that this container may use; None without a limit."""
    for file in files:
        if file.is_file():
            text = file.read_text().strip()
            if text.isdecimal() and int(text) < 1 << 60:
                return int(text)
    return None


def _token() -> tuple[str, str]:
    """The token, empty where none is set; and what is wrong with it."""
    try:
        return token_of(TOKEN_VARIABLE) or "", ""
    except UnspiralError as e:
        return "", str(e)


def check_token() -> Iterator[Finding]:
    """The token that keeps strangers out."""
    token, problem = _token()
    if problem:
        yield Finding(TOKEN_VARIABLE, "bad", problem, "deploy/new_env.sh writes one into .env")
        return
    advice = "set it (deploy/new_env.sh writes one into .env): the service refuses to be reachable without"
    seen = f"set, {len(token)} characters" if token else "not set"
    yield judged(TOKEN_VARIABLE, bool(token), seen, advice)


def check_store() -> Iterator[Finding]:
    """Whether the likelihood service's store answers."""
    url = os.environ.get("UNSPIRAL_STORE")
    if not url:
        yield Finding(
            "store",
            "note",
            "UNSPIRAL_STORE is not set",
            "the service then keeps a file, likelihood.db, in its own folder",
        )
        return
    shown = without_password(url)
    try:
        store = open_store(url)
        runs = len(store.runs())
        store.close()
    except (UnspiralError, OSError) as e:
        reason = " ".join(str(e).split())[:200]
        advice = f"{reason} (is redis up, and REDIS_PASSWORD the same on both sides?)"
        yield Finding("store", "bad", shown, advice)
    except ModuleNotFoundError as e:
        advice = f"{e.name} is not installed: build the image with EXTRAS={EXTRAS['redis']}"
        yield Finding("store", "bad", shown, advice)
    else:
        yield Finding("store", "good", f"{shown}: {counted(runs, 'run')}")


def check_ray_package() -> Iterator[Finding]:
    """Whether Ray is installed."""
    ray = version("ray")
    yield judged("Ray", ray is not None, ray or "none", how_to_install("cpu"))


def check_run() -> Iterator[Finding]:
    """The answer of the control plane here about the run that it found."""
    token, problem = _token()
    if problem:  # `check_token` says it
        return
    url = READY["control"].replace("/readyz", "/v1/status")
    try:
        answer = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=25, trust_env=False)
    except httpx.HTTPError as e:
        yield Finding("run", "note", f"{url}: {said_by(e)}", "nothing runs here now; its log says why")
        return
    if not answer.is_success:
        yield Finding("run", "bad", f"{url}: HTTP {answer.status_code}", " ".join(answer.text.split())[:300])
        return
    try:
        status = RunStatus.model_validate(answer.json())
    except ValueError:
        yield Finding("run", "bad", url, "what answers there is no control plane")
        return
    yield Finding(
        "run", "good", f"{status.run}: {status.state}, step {status.step}" if status.run else status.state
    )
