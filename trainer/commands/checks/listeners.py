"""Listeners of Unspiral and Ray on this machine, their reach, and whether they ask for a token."""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil

from services.common.errors import EnvironmentLacks
from services.common.loading.own_packages import refuse_others_here
from trainer.commands.checks.findings import Finding, Level, judged, status_of

ASK_SECONDS = 3.0
WIDE = {"0.0.0.0", "::"}
RAY_SERVERS = (
    "gcs_server",
    "raylet",
    "dashboard.py",
    "monitor.py",
    "log_monitor.py",
    "runtime_env/agent/main.py",
)
MOST_SHOWN = 6
"""Ports of a kind that are all named: those of one Ray. Machines that many share have dozens."""
KEYS = "/ray.rpc.InternalKVGcsService/InternalKVKeys"
"""A call that reads; an empty request asks for all keys."""


@dataclass(frozen=True)
class Listener:
    """A TCP port that is open on this machine."""

    pid: int
    what: str
    """Such as `Ray: raylet` or `unspiral serve likelihood`."""
    host: str
    port: int

    @property
    def reach(self) -> str:
        if is_loopback(self.host):
            return "this machine"
        return "every network" if self.host in WIDE else f"the network of {self.host}"

    @property
    def here(self) -> str:
        """Its address on this machine, as HOST:PORT."""
        host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def listeners(processes: Iterable[psutil.Process] | None = None) -> list[Listener]:
    """Listeners of Unspiral's and Ray's processes, or of the processes given. Those of other users may be
    hidden."""
    found = []
    for process in processes or psutil.process_iter():
        with suppress(psutil.Error):
            what = kind_of(process.cmdline(), process.name()) or (processes and process.name())
            if not what:
                continue
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    host, port = connection.laddr[:2]
                    found.append(Listener(process.pid, what, host.removeprefix("::ffff:"), port))
    return found


def kind_of(command: list[str], name: str) -> str | None:
    """Kind of a process, from its command line; None for one that is neither Unspiral's nor Ray's."""
    words = " ".join(command).split()
    if not words:
        return None
    if words[0].startswith("ray::"):
        return f"Ray: {words[0].removeprefix('ray::')}"
    for server in RAY_SERVERS:
        if any(word.endswith(f"/{server}") for word in words[:4]):
            return f"Ray: {server.removesuffix('.py')}"
    if words[0].startswith("VLLM::") or name.startswith("VLLM::"):
        return "vLLM"
    for n, word in enumerate(words[:4]):
        module = words[n + 1] if word == "-m" and len(words) > n + 1 else ""
        if module in ("trainer", "retriever_service"):
            program = "unspiral" if module == "trainer" else module
            return " ".join([program, *_command(words[n + 2 : n + 4])])
        if word.rpartition("/")[2] == "unspiral":
            return " ".join(["unspiral", *_command(words[n + 1 : n + 3])])
    return None


def _command(words: list[str]) -> list[str]:
    """The words before the first option."""
    return list(itertools.takewhile(lambda word: not word.startswith("-"), words))


def gcs_refuses(address: str, token: str | None = None) -> bool | None:
    """Whether a GCS turns a stranger away (or the holder of `token`). None where nothing that speaks its
    language answers."""
    try:
        import grpc
    except ImportError:  # an install without Ray, beside somebody else's
        return None
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(KEYS)(b"", timeout=ASK_SECONDS, metadata=metadata)
        except grpc.RpcError as e:
            return True if e.code() == grpc.StatusCode.UNAUTHENTICATED else None
    return False


def http_refuses(address: str, path: str = "/metrics") -> bool | None:
    """Whether an HTTP service turns a stranger away. None where none answers."""
    status, _ = status_of(f"http://{address}{path}", ASK_SECONDS)
    return None if status is None else status in (401, 403)


def summary(found: list[Listener]) -> Iterator[Finding]:
    """A finding on each service, and one on all of Ray's listeners together."""
    ray = [listener for listener in found if listener.what.startswith("Ray: ")]
    if ray:
        yield from _ray_rows(ray)
    for listener in (each for each in found if each.what.startswith(("unspiral", "retriever_service"))):
        yield _service_row(listener)


def _ray_rows(ray: list[Listener]) -> Iterator[Finding]:
    for server in (listener for listener in ray if listener.what == "Ray: gcs_server"):
        refuses = gcs_refuses(server.here)
        answer = {True: "asks for a token", False: "answers everyone", None: "does not answer"}[refuses]
        level: Level = "good" if refuses else "note" if refuses is None else "bad"
        advice = {
            True: "",
            False: "whoever reaches it runs code as its user: "
            "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN on head, nodes and clients",
            None: "nothing where it is another user's, or of a run that goes on; "
            f"a rest of a run of yours ends by: kill {server.pid}",
        }[refuses]
        seen = f"process {server.pid}, reached from {server.reach}; {answer}"
        yield Finding(f"Ray at port {server.port}", level, seen, advice)
    wide = sorted({(each.what, each.port) for each in ray if each.reach != "this machine"})
    seen = f"{len(ray)} ports, {len(wide)} of them beyond this machine"
    ports = "; ".join(_some_ports(what.removeprefix("Ray: "), wide, what) for what in dict(wide))
    yield judged(
        "Ray's listeners", not wide, seen, f"keep the network out (docs/security.md): {ports}", "note"
    )


def _some_ports(name: str, wide: list[tuple[str, int]], what: str) -> str:
    """The ports of a kind; where it has more than one Ray has, the first and how many more."""
    ports = [port for kind, port in wide if kind == what]
    shown = ports if len(ports) <= MOST_SHOWN else ports[:1]
    more = f" and {len(ports) - len(shown)} more" if shown != ports else ""
    return f"{name} {', '.join(map(str, shown))}{more}"


def _service_row(listener: Listener) -> Finding:
    what = f"{listener.what}, port {listener.port}"
    if listener.reach == "this machine":
        return Finding(what, "good", "reached from this machine")
    refuses = http_refuses(listener.here)
    if refuses:
        return Finding(what, "good", f"reached from {listener.reach}; asks for a token")
    if refuses is None:
        advice = (
            "no HTTP: of a process group, which asks for no token; keep the network out (docs/security.md)"
        )
        return Finding(what, "note", f"reached from {listener.reach}", advice)
    advice = "set a token, bind to 127.0.0.1, or keep the network out (docs/security.md)"
    return Finding(what, "bad", f"reached from {listener.reach}; answers everyone", advice)


def would_open(control_host: str) -> Finding:
    """The listeners that a run opens when it is started here, or why it is not."""
    try:
        refuse_others_here()
    except EnvironmentLacks as error:
        return Finding("a run here", "bad", "does not start", str(error))
    joined = os.environ.get("RAY_ADDRESS")
    wide = control_host not in ("127.0.0.1", "::1", "localhost")
    if wide and not os.environ.get("UNSPIRAL_API_TOKEN"):
        advice = "set UNSPIRAL_API_TOKEN, or the run does not start"
        return Finding("a run here", "bad", f"control plane on {control_host} without a token", advice)
    parts = [f"joins Ray at {joined}" if joined else "its own Ray on 127.0.0.1 with a token of its own"]
    host = socket.gethostname() if joined else "127.0.0.1"
    parts.append(f"services on {host}")
    parts.append(f"control plane on {control_host}" + (", with UNSPIRAL_API_TOKEN" if wide else ""))
    return Finding("a run here", "good", ", ".join(parts))
