"""The control plane's part of the command line: what a run is doing, and having it do something else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import quote

import typer

from services.common.counting import counted
from services.common.errors import EnvironmentLacks, UserError
from services.common.http.auth import TOKEN_VARIABLE, token_of
from services.common.loading.lazy import LazyModule
from services.common.printing.completed import one_of
from services.common.printing.console import Console
from services.common.printing.help_pages import RUN
from services.common.printing.messages import said_by
from services.control import places
from services.control.ended import recorded
from services.control.places import Place
from services.control.records import MAX_WORKERS, PAUSE_INSTEAD, Answer, Done, RunStatus

if TYPE_CHECKING:
    import httpx

    from services.control import gateway, launch
else:  # httpx and FastAPI take time, which `unspiral --help` need not wait for
    httpx = LazyModule("httpx")
    gateway = LazyModule("services.control.gateway")
    launch = LazyModule("services.control.launch")

A = TypeVar("A", bound=Answer)

workers_app = typer.Typer(no_args_is_help=True, help="The rollout workers of a running system.")
TIMEOUT_SECONDS = 30.0
STATUS = "/v1/status"

Url = Annotated[
    str | None,
    typer.Option(
        envvar="UNSPIRAL_CONTROL_URL",
        help="Where no RUN is given: the address of a control plane, such as that of a cluster's gateway.",
    ),
]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help=f"{RUN}; or an address. Default: the newest run in runs/ that is running.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


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


def status(run: Run = None, url: Url = None, as_json: AsJson = False) -> None:
    """Show what the running system is doing; of a run that has ended, how."""
    place = places.place_of(run or url)
    answer = recorded(place.run) if place.run and not place.answers else ask(RunStatus, "GET", place, STATUS)
    if place.run and not places.is_of(place.run, answer):
        answer = recorded(place.run)
    typer.echo(answer.model_dump_json(indent=1)) if as_json else show(answer)


@workers_app.command("list")
def list_workers(run: Run = None, url: Url = None, as_json: AsJson = False) -> None:
    """List the rollout workers."""
    place = places.place_of(run or url)
    answer = ask(RunStatus, "GET", place, STATUS)
    _check_run(place, answer)
    if as_json:
        typer.echo(json.dumps([w.model_dump() for w in answer.workers], indent=1))
    else:
        show_workers(answer)


@workers_app.command("scale")
def scale(
    n: Annotated[
        str,
        typer.Argument(
            metavar="N", autocompletion=one_of(["all"]), help=f"Workers wanted: 1 to {MAX_WORKERS}, or all."
        ),
    ],
    run: Run = None,
    ahead: Annotated[
        bool, typer.Option("--ahead", help="Also where there is no room for them yet: nodes will be added.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Ask for another number of rollout workers, or `all`: as many as the cluster has room for. For no work
    at all, use `unspiral pause`."""
    if n.isascii() and n.isdigit() and int(n) == 0:
        raise UserError(f"workers scale {n}: {PAUSE_INSTEAD}")
    if n != "all" and not (n.isascii() and n.isdigit() and int(n) <= MAX_WORKERS):
        raise UserError(f"workers scale {n}: expected a whole number from 1 to {MAX_WORKERS}, or all")
    act(run or url, "/v1/workers/scale", {"n": n if n == "all" else int(n), "ahead": ahead}, as_json=as_json)


@workers_app.command("drain")
def drain(
    id: Annotated[str, typer.Argument(metavar="ID", help="The worker's id, as `workers list` shows it.")],
    run: Run = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Let one worker finish what it runs, then end it; one fewer is wanted from now on. The last one stays:
    see `unspiral pause`."""
    act(run or url, f"/v1/workers/{quote(id, safe='')}/drain", as_json=as_json)


def pause(run: Run = None, url: Url = None, as_json: AsJson = False) -> None:
    """Begin no further step; the step in hand ends."""
    act(run or url, "/v1/pause", as_json=as_json)


def resume(run: Run = None, url: Url = None, as_json: AsJson = False) -> None:
    """Go on after a pause."""
    act(run or url, "/v1/resume", as_json=as_json)


def act(given: str | None, path: str, body: Any = None, *, as_json: bool) -> None:
    """Have a run do something, and print what it does. Which run it is, is said where none was named."""
    place = places.place_of(given)
    if place.chosen:
        typer.echo(f"run: {place.chosen}", err=True)
    if place.run and place.url:
        _check_run(place, ask(RunStatus, "GET", place, STATUS))
    done = ask(Done, "POST", place, path, body)
    typer.echo(done.model_dump_json(indent=1) if as_json else done.text)


def _check_run(place: Place, status: RunStatus) -> None:
    """Raises UserError where the answer is another run's than the one that was named."""
    if place.run and not places.is_of(place.run, status):
        raise UserError(
            f"{place.run}: {place.url}, which its control.json names, is that of run {status.run} in "
            f"{status.folder} by now; of this one no end was recorded"
        )


def ask(kind: type[A], method: str, place: Place, path: str, body: Any = None) -> A:
    """One request to the control plane, with the token of UNSPIRAL_API_TOKEN. Raises its refusal, UserError
    for a run that has ended, and EnvironmentLacks where no control plane answers."""
    url = place.address()
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
        raise UserError(f"{url}: no address; {places.ACCEPTED}") from e
    except httpx.HTTPError as e:
        of = f", which {place.run / 'control.json'} names" if place.run else ""
        raise EnvironmentLacks(
            f"{url}{of}: no control plane answers there ({said_by(e)}). Is a run going on? `unspiral "
            f"runs` lists those in runs/; {places.ACCEPTED}"
        ) from e
    return gateway.read_answer(answer, kind, url)


def show(status: RunStatus) -> None:
    """A status for people."""
    console = Console(highlight=False)
    if status.state == "no run":
        console.print("no run")
        return
    if status.state == "ended":
        when = places.when_ended(status.step)
        text = f"run {status.run}: {status.stage}, {when}; its folder: {status.folder}"
        console.print(text, markup=False, soft_wrap=True)
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
        "steps done": (f"{status.step} of {status.steps}" if status.step else f"none of {status.steps} yet")
        + (f" ({status.stage})" if status.stage else ""),
        "phase": status.phase if status.step else "unknown: no step has ended yet",
        "policy version": str(status.version),
        "reward": rewards,
        "tokens/s": "" if status.tokens_per_s is None else f"{status.tokens_per_s:.0f}",
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
    console = Console(highlight=False)
    console.print(table)
    if status.problem:
        console.print(status.problem, markup=False, soft_wrap=True)
