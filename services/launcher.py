"""Starts a service as a named Ray actor, for a run that was not given the address of a running one.

The actor runs the same server as `unspiral serve retriever|likelihood`; only the process around it differs.
Where that dies, Ray starts it again, on the same port.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from retriever_service.errors import IndexInvalid
from retriever_service.index_folder.corpus import Skipped
from retriever_service.index_folder.keys import NO_KEYS, CorpusKeys
from retriever_service.settings import ServerSettings
from services.common.errors import EnvironmentLacks
from services.common.loading.lazy import LazyModule
from services.common.processes.patience import Patience
from services.settings import MonitorRules

if TYPE_CHECKING:
    from retriever_service.http import launch as retriever
    from retriever_service.indexing import build
    from retriever_service.search import backends
    from services.likelihood.rest import launch as likelihood
else:
    # numba and FastAPI take a second and 130 MB, which every actor that imports this module would pay too.
    build = LazyModule("retriever_service.indexing.build")
    backends = LazyModule("retriever_service.search.backends")
    likelihood = LazyModule("services.likelihood.rest.launch")
    retriever = LazyModule("retriever_service.http.launch")

RESTARTS = 10
"""Times that a service that died is started again."""
COMPILED_BYTES = 64 * 2**20
"""Size of a corpus up to which its index is opened once where it was made."""
PORTS = 3
"""Ports that are tried: another process may take a free one before the service does."""

_KIND = re.compile(r"^(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*: ")
"""Ray's name of an error, before what it says."""


class _RetrieverActor:
    def __init__(
        self, host: str, port: int, index: str, topk: int, start_seconds: float, concurrency: int
    ) -> None:
        # On a cluster its workers ask from other nodes, and as Search-R1's clients do they send no token.
        settings = ServerSettings(
            index=index, host=host, port=port, topk=topk, insecure=True, concurrency=concurrency
        )
        self._server = retriever.serve_in_thread(settings, start_timeout_seconds=start_seconds)

    def url(self) -> str:
        return self._server.url

    def stop(self) -> None:
        self._server.stop()


class _LikelihoodActor:
    def __init__(self, host: str, port: int, fields: dict[str, Any]) -> None:
        self._server = likelihood.serve_in_thread(likelihood.ServeSettings(host=host, port=port, **fields))

    def url(self) -> str:
        return self._server.url

    def stop(self) -> None:
        self._server.stop()


@dataclass
class Service:
    """A service that was started here."""

    url: str
    actor: Any

    def stop(self, timeout_seconds: float = 15.0) -> None:
        """Stop serving, then end the actor's process."""
        with contextlib.suppress(ray.exceptions.RayError):  # dead or hanging, it is ended below
            ray.get(self.actor.stop.remote(), timeout=timeout_seconds)
        ray.kill(self.actor)


def _host() -> str:
    """Loopback for a local Ray of our own; on a cluster, where nodes may join later, the address by which
    they reach this one."""
    nodes = [n for n in ray.nodes() if n["Alive"]]
    return ray.util.get_node_ip_address() if os.environ.get("RAY_ADDRESS") or len(nodes) > 1 else "127.0.0.1"


def _here() -> Any:
    """The driver's own node: the run's folder lies on its disk."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.bind((host, 0))
        return s.getsockname()[1]


def _processor_seconds(cls: type) -> float:
    """What actors of a class on this machine have used, and workers of Ray that are about to become one."""
    names = (f"ray::{cls.__name__}", "ray::IDLE")
    used = 0.0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            command = process.cmdline()
            if command and (command[0].startswith(names) or any("default_worker.py" in c for c in command)):
                used += sum(process.cpu_times()[:2])
    return used


def _start(cls: type, name: str, timeout_seconds: float, host: str, *args: Any, key: str = "") -> Service:
    """key: the setting that `timeout_seconds` is from, for the error of a service that takes longer."""
    tries = 0
    while True:
        tries += 1
        # Ray may hold the first one's name for a moment longer.
        called = name if tries == 1 else f"{name}-{tries}"
        create = ray.remote(cls).options(
            name=called, num_cpus=0, scheduling_strategy=_here(), max_restarts=RESTARTS
        )
        actor = create.remote(host, _free_port(host), *args)
        try:
            return Service(_url_of(actor, cls, name, timeout_seconds, key), actor)
        except ray.exceptions.RayActorError as e:
            reason = _KIND.sub("", str(e).strip().splitlines()[-1]) if str(e).strip() else "its actor died"
            # The port was free when it was chosen, and another process was quicker.
            if tries == PORTS or "in use" not in reason:
                raise EnvironmentLacks(f"{name}: did not start: {reason}") from e


def _url_of(actor: Any, cls: type, name: str, timeout_seconds: float, key: str) -> str:
    """The address, once the actor serves. Raises EnvironmentLacks past the limit, with the actor killed."""
    patience = Patience(timeout_seconds, lambda: _processor_seconds(cls))
    called = actor.url.remote()
    while True:
        try:
            url: str = ray.get(called, timeout=patience.look_seconds)
        except ray.exceptions.GetTimeoutError as e:
            if not patience.over():
                continue
            ray.kill(actor)
            limit = f"{key}={timeout_seconds:g}" if key else f"{timeout_seconds:g} s"
            longer = f"; a large index or a busy machine needs more: set {key}" if key else ""
            raise EnvironmentLacks(f"{name}: did not start within {limit}{patience}{longer}") from e
        return url


def index_corpus(
    corpus: str | Path, out: str | Path, *, skip_bad: bool, keys: CorpusKeys = NO_KEYS
) -> Skipped:
    """Index a corpus by BM25 into the folder `out`; an index of the same corpus that is there already is
    kept. Returns the lines that were left out."""
    try:
        info = build.build_index(corpus, out, skip_bad=skip_bad, keys=keys)
    except IndexInvalid:  # of another corpus, or torn
        info = build.build_index(corpus, out, skip_bad=skip_bad, keys=keys, overwrite=True)
    if info.corpus_bytes <= COMPILED_BYTES:
        # On a new installation the search is compiled now, once, and not by each service within its limit.
        backends.open_index(ServerSettings(index=str(out)))
    return Skipped(info.skipped, info.skipped_reasons)


def start_retriever(
    index: str | Path, *, topk: int, name: str, timeout_seconds: float, key: str = "", concurrency: int = 1
) -> Service:
    """Serve an index folder, or a function, on a free port of the driver's node. key: the setting of
    `timeout_seconds`; concurrency: calls of the function at a time."""
    # The server's own limit is no shorter, so that the one that was set is the one that is told.
    given = (_host(), str(index), topk, timeout_seconds + 1, concurrency)
    return _start(_RetrieverActor, name, timeout_seconds, *given, key=key)


def start_likelihood(
    store: str,
    *,
    token_steps: int,
    name: str,
    trajectory_steps: int = 1000,
    rules: MonitorRules | None = None,
    timeout_seconds: float = 60.0,
) -> Service:
    """Serve a likelihood store (`sqlite:PATH` or a redis address) on a free port of the driver's node.

    On loopback always: the driver alone talks to it, and beyond the machine the service would demand a token.
    """
    fields = {
        "store": store,
        "token_steps": token_steps,
        "trajectory_steps": trajectory_steps,
        "rules": rules or MonitorRules(),
    }
    return _start(_LikelihoodActor, name, timeout_seconds, "127.0.0.1", fields)
