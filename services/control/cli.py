"""The control plane's part of the command line: what a run is doing, and having it do something else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import quote

import typer

from services.common.counting import counted
from services.common.errors import EnvironmentLacks, UserError
from services.common.files import hints, holder_of
from services.common.http.auth import TOKEN_VARIABLE, token_of
from services.common.loading.lazy import LazyModule
from services.common.runs.paths import LATEST, run_folder
from services.control.records import MAX_WORKERS, PAUSE_INSTEAD, Answer, Done, RunStatus

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

    from services.control import gateway, launch
else:  # httpx and FastAPI take time, which `unspiral --help` need not wait for
    httpx = LazyModule("httpx")
    gateway = LazyModule("services.control.gateway")
    launch = LazyModule("services.control.launch")

A = TypeVar("A", bound=Answer)

workers_app = typer.Typer(no_args_is_help=True, help="The rollout workers of a running system.")
TIMEOUT_SECONDS = 30.0

Url = Annotated[
    str,
    typer.Option(
        envvar="UNSPIRAL_CONTROL_URL",
        help="Address of the control plane, or the folder of the run that serves it (latest: the newest in "
        "runs/).",
    ),
]
Run = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="What --url takes: a run's folder, latest, or an address."),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
URL = "http://127.0.0.1:8200"


def serve_control(
    ray_address: Annotated[
        str, typer.Option(envvar="RAY_ADDRESS", help="HOST:PORT of the Ray cluster's head.")
    ] = "127.0.0.1:6379",
    host: Annotated[
        str,
        typer.Option(
            envvar="UNSPIRAL_CONTROL_HOST",
            help="Address to bind; beyond this machine UNSPIRAL_API_TOKEN must be set.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(envvar="UNSPIRAL_CONTROL_PORT", min=0, max=65535, help="0 takes any free port."),
    ] = 8200,
) -> None:
    """Run a gateway: it finds the run of a Ray cluster and passes requests on to it. A run serves its own
    control plane without this."""
    import ray  # noqa: F401  (says at once which extra is missing)

    found = gateway.Gateway(ray_address, token_of(TOKEN_VARIABLE))
    raise typer.Exit(
        launch.serve_forever(found, host, port, announce=lambda line: typer.echo(line, err=True))
    )


def status(run: Run = None, url: Url = URL, as_json: AsJson = False) -> None:
    """Show what the running system is doing."""
    answer = ask(RunStatus, "GET", run or url, "/v1/status")
    typer.echo(answer.model_dump_json(indent=1)) if as_json else show(answer)


@workers_app.command("list")
def list_workers(run: Run = None, url: Url = URL, as_json: AsJson = False) -> None:
    """List the rollout workers."""
    answer = ask(RunStatus, "GET", run or url, "/v1/status")
    if as_json:
        typer.echo(json.dumps([w.model_dump() for w in answer.workers], indent=1))
    else:
        show_workers(answer)


@workers_app.command("scale")
def scale(
    n: Annotated[str, typer.Argument(help=f"Workers wanted: 1 to {MAX_WORKERS}, or all.")],
    ahead: Annotated[
        bool, typer.Option("--ahead", help="Also where there is no room for them yet: nodes will be added.")
    ] = False,
    url: Url = URL,
) -> None:
    """Ask for another number of rollout workers, or `all`: as many as the cluster has room for. For no work
    at all, use `unspiral pause`."""
    if n.isascii() and n.isdigit() and int(n) == 0:
        raise UserError(f"workers scale {n}: {PAUSE_INSTEAD}")
    if n != "all" and not (n.isascii() and n.isdigit() and int(n) <= MAX_WORKERS):
        raise UserError(f"workers scale {n}: expected a whole number from 1 to {MAX_WORKERS}, or all")
    typer.echo(
        ask(Done, "POST", url, "/v1/workers/scale", {"n": n if n == "all" else int(n), "ahead": ahead}).text
    )


@workers_app.command("drain")
def drain(
    id: Annotated[str, typer.Argument(help="The worker's id, as `workers list` shows it.")], url: Url = URL
) -> None:
    """Let one worker finish what it runs, then end it; one fewer is wanted from now on. The last one stays:
    see `unspiral pause`."""
    typer.echo(ask(Done, "POST", url, f"/v1/workers/{quote(id, safe='')}/drain").text)


def pause(run: Run = None, url: Url = URL) -> None:
    """Begin no further step; the step in hand ends."""
    typer.echo(ask(Done, "POST", run or url, "/v1/pause").text)


def resume(run: Run = None, url: Url = URL) -> None:
    """Go on after a pause."""
    typer.echo(ask(Done, "POST", run or url, "/v1/resume").text)


def ask(kind: type[A], method: str, url: str, path: str, body: Any = None) -> A:
    """One request to the control plane, with the token of UNSPIRAL_API_TOKEN. Raises its refusal, and
    EnvironmentLacks where no control plane answers."""
    url = address_of(url)
    token = token_of(TOKEN_VARIABLE)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.request(
            method,
            url.rstrip("/") + path,
            json=body,
            headers=headers,
            timeout=TIMEOUT_SECONDS,
            trust_env=False,
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as e:
        raise UserError(f"--url {url}: expected an address such as {URL}") from e
    except httpx.HTTPError as e:
        raise EnvironmentLacks(
            f"{url}: no control plane answers there ({type(e).__name__}). Is a run going on? Its address is "
            "in runs/NAME/control.json; give it by --url or UNSPIRAL_CONTROL_URL"
        ) from e
    return gateway.read_answer(answer, kind, url)


def address_of(url: str) -> str:
    """The address, where it may have been given as a run's folder or `latest`. Raises UserError for a run
    that serves none now."""
    if url != LATEST and not Path(url).is_dir():
        return url
    run = run_folder(url)
    found = hints(run / "control.json").get("url")
    if isinstance(found, str):
        return found
    if holder := holder_of(run / ".lock"):
        raise EnvironmentLacks(f"--url {url}: {run} is starting{holder}; ask again in some seconds")
    raise UserError(f"--url {url}: no control plane is named in {run / 'control.json'}; does the run go on?")


def show(status: RunStatus) -> None:
    """A status for people."""
    from rich.console import Console

    console = Console(highlight=False)
    if status.state == "no run":
        console.print("no run")
        return
    if status.state == "starting" and not status.workers:
        console.print(
            f"run {status.run} is starting, for {status.seconds:.0f} s now; its own output says what it "
            "waits for",
            markup=False,
            soft_wrap=True,
        )
        return
    rewards = " ".join("-" if r is None else f"{r:.3f}" for r in status.rewards)
    lines = {
        "run": f"{status.run}, attempt {status.attempt}: {status.state}",
        "steps done": f"{status.step} of {status.steps}" + (f" ({status.stage})" if status.stage else ""),
        "phase": status.phase,
        "policy version": str(status.version),
        "reward": rewards,
        "tokens/s": f"{status.tokens_per_s:.0f}",
        "last sync": "" if status.last_sync_seconds is None else f"{status.last_sync_seconds:.2f} s",
        "learner restored": counted(status.restores, "time") if status.restores else "",
        "folder": status.folder or "",
        "other runs": ", ".join(status.others),
    }
    for name, reach in (("retriever", status.retriever), ("store", status.store)):
        if reach:
            lines[name] = reach.url + ("" if reach.reachable else f": does not answer ({reach.problem})")
    for name, text in lines.items():
        if text:
            console.print(f"{name + ':':<18}{text}", markup=False, soft_wrap=True)
    show_workers(status)


def console_for_tables() -> Console:
    """A console of the terminal's width; in a pipe wide enough for one line per row."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def show_workers(status: RunStatus) -> None:
    from rich.table import Table

    wanted = (
        f"{status.target} (all that the cluster has room for)"
        if status.follows_cluster
        else str(status.target)
    )
    table = Table(title=f"workers, {wanted} wanted", title_justify="left", box=None)
    for name in ("worker", "state", "version", "outstanding tokens", "trajectories", "node", "pid"):
        table.add_column(name, justify="left" if name in ("worker", "state", "node") else "right")
    for w in status.workers:
        table.add_row(
            w.id,
            w.state,
            str(w.version),
            str(w.outstanding_tokens),
            str(w.trajectories),
            w.node,
            str(w.pid or "-"),
        )
    console = console_for_tables()
    console.print(table)
    if status.problem:
        console.print(status.problem, markup=False, soft_wrap=True)
