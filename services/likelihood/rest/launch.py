"""Starting the likelihood service: in this process's thread (a Ray actor, a test), or alone until a signal
ends it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from fastapi import FastAPI
from pydantic import Field

from services.common.counting import counted
from services.common.http.auth import required_token
from services.common.http.serving import (
    Manner,
    RunningServer,
    bind,
    run_in_thread,
    run_until_signal,
    url_of,
)
from services.common.redaction import address_without_secrets
from services.common.runs.paths import near_run
from services.likelihood.exports.mirrors import (
    Mirror,
    Mirroring,
    MlflowMirror,
    TensorBoardMirror,
    WandbMirror,
)
from services.likelihood.rest.evaluated.routes import add_evaluation_routes
from services.likelihood.rest.folder_watch import watched
from services.likelihood.rest.server import create_app
from services.likelihood.store.base import SAMPLE_STEPS
from services.likelihood.store.of_folder import FolderStore, stores_in
from services.likelihood.store.opening import open_store
from services.settings import MonitorRules, Settings

WHAT = "likelihood service"
MANNER = Manner(lifespan="on")


class ServeSettings(Settings):
    """Where the likelihood service listens and what it keeps."""

    store: str
    """`PATH`, `sqlite:PATH` or `redis://HOST:PORT/DB`; or a folder of runs with their stores."""
    host: str = "127.0.0.1"
    """Address to bind; beyond this machine UNSPIRAL_API_TOKEN must be set."""
    port: int = Field(8100, ge=0, le=65535)
    """0 takes any free port."""
    token_steps: int = Field(8, ge=1)
    """Steps whose token arrays are kept."""
    trajectory_steps: int = Field(SAMPLE_STEPS, ge=1)
    """Steps whose trajectories are kept token by token."""
    memory_mib: int = Field(1024, ge=64)
    """Memory that requests in flight may hold together; past it they wait for 10 s, then get a 503."""
    token: str | None = Field(None, repr=False)
    """Bearer token to ask for; UNSPIRAL_API_TOKEN if left out."""
    tensorboard: str | None = None
    """Folder to which every step is mirrored as TensorBoard event files."""
    wandb: str | None = None
    """Weights & Biases project to which every step is mirrored."""
    mlflow: str | None = None
    """MLflow experiment to which every step is mirrored."""
    rules: MonitorRules = MonitorRules()
    """Thresholds of the service's phase monitor; a driver that starts the service passes its own."""
    start_timeout_seconds: float = Field(30.0, gt=0)
    """Longest wait for the server to answer."""


def serve_in_thread(settings: ServeSettings) -> RunningServer:
    """Start the service and return once it answers. Raises UserError where a token is missing,
    EnvironmentLacks for an address, a store or a tracker that cannot be used."""
    return run_in_thread(
        lambda parts: _assembled(settings, parts), settings.host, WHAT, settings.start_timeout_seconds, MANNER
    )


def serve_forever(settings: ServeSettings, announce: Callable[[str], None] = print) -> int:
    """Run the service in the foreground until SIGINT or SIGTERM, and return the exit status (130, 143)."""
    file = Path(settings.store.removeprefix("sqlite:"))
    is_new = "://" not in settings.store and not file.exists()
    runs = len(stores_in(Path(settings.store)))
    of_runs = f", a folder of {counted(runs, 'run')}" if runs else ""
    about = f"store {without_password(settings.store)}{of_runs}; page at /, API at /docs"

    def say_where(sock: socket.socket) -> None:
        announce(f"{WHAT}: {url_of(settings.host, sock)} ({about})")
        if is_new:  # what was meant may have been a run
            announce(f"{WHAT}: {without_password(settings.store)} is new and empty{near_run(file)}")

    return run_until_signal(
        lambda parts: _assembled(settings, parts),
        say_where,
        MANNER,
        say=lambda line: announce(f"{WHAT}: {line}"),
    )


def _assembled(settings: ServeSettings, parts: ExitStack) -> tuple[FastAPI, socket.socket]:
    """The application and its bound socket; what must be closed goes onto `parts`."""
    token = required_token(settings.host, settings.token)
    sock = parts.enter_context(closing(bind(settings.host, settings.port, WHAT)))
    store = open_store(settings.store, settings.token_steps, settings.trajectory_steps)
    parts.callback(store.close)
    mirrors: list[Mirror] = []
    if settings.tensorboard:
        mirrors.append(TensorBoardMirror(settings.tensorboard))
    if settings.wandb:
        mirrors.append(WandbMirror(settings.wandb))
    if settings.mlflow:
        mirrors.append(MlflowMirror(settings.mlflow))
    mirroring = Mirroring(mirrors) if mirrors else None
    if mirroring:
        parts.callback(mirroring.close)
    app = create_app(store, token, settings.rules, mirroring, settings.memory_mib << 20)
    add_evaluation_routes(app, store)
    if isinstance(store, FolderStore):
        parts.enter_context(watched(store, app.state.service))
    return app, sock


def without_password(store: str) -> str:
    """The store's address as it may be shown."""
    return address_without_secrets(store, user="")
