"""A control plane that stands by itself, for containers: it finds the run of a Ray cluster and passes
requests on to it.

unspiral status ──> gateway :8200 ──> the run's own control plane, whose address lies in Ray's key-value store

A run puts its address and a random id there when it starts, and takes them away when it ends. Only an address
whose health check answers with that id is the run's: any other is passed over. (A killed run's port may be
somebody else's by now, even this gateway's.) A gateway with a token asks for a proof that the run holds it
too (services.common.peers): an address without one is never sent the token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from typing import Any, Literal, TypedDict, TypeVar, cast
from urllib.parse import quote

import httpx

from services.common.answers import object_of
from services.common.errors import EnvironmentLacks, UserError
from services.common.peers import asking
from services.common.peers.asking import LOOK_SECONDS
from services.common.validation import fitting
from services.control.records import Answer, Done, RunStatus, no_run

A = TypeVar("A", bound=Answer)
log = logging.getLogger("unspiral.control")

NAMESPACE = b"unspiral"
PREFIX = b"control/"


class Announcement(TypedDict):
    """A run in Ray's key-value store. Folder and host are what a later attempt knows its predecessor by."""

    run: str
    id: str
    url: str
    folder: str
    host: str
    started: float
    """Seconds since the epoch."""


def announce_run(run: str, id: str, url: str, folder: str) -> None:
    """Put the address of this process's run into the key-value store of the Ray that it has joined.

    id: what the run's own health check answers with. What an earlier attempt in the same folder left behind
    is taken away.
    """
    from ray.experimental.internal_kv import (
        _internal_kv_del,
        _internal_kv_get,
        _internal_kv_list,
        _internal_kv_put,
    )

    value: Announcement = {
        "run": run,
        "id": id,
        "url": url,
        "folder": folder,
        "host": socket.gethostname(),
        "started": time.time(),
    }
    for key in _internal_kv_list(PREFIX, namespace=NAMESPACE):
        earlier = announcement(_internal_kv_get(key, namespace=NAMESPACE))
        if earlier is None:
            continue
        if (earlier.get("folder"), earlier.get("host")) == (folder, value["host"]):
            _internal_kv_del(key, namespace=NAMESPACE)
    _internal_kv_put(_key(run, id), json.dumps(value).encode(), overwrite=True, namespace=NAMESPACE)


def withdraw_run(run: str, id: str) -> None:
    """Take the address away again. Where the cluster is gone it went with it: that is logged, and no error of
    the run."""
    from ray.experimental.internal_kv import internal_kv_get_gcs_client

    try:
        internal_kv_get_gcs_client().internal_kv_del(_key(run, id), False, NAMESPACE, timeout=LOOK_SECONDS)
    except Exception as e:  # whatever Ray says here must not hide how the run itself ended
        log.warning(
            "run %s could not be taken off its cluster's list: %s: %s",
            run,
            type(e).__name__,
            " ".join(str(e).split())[:200],
        )


def _key(run: str, id: str) -> bytes:
    return PREFIX + f"{run}/{id}".encode()


def announcement(value: bytes | None) -> Announcement | None:
    """What a run announced, or None where it is no announcement that can be checked."""
    about = object_of(value or b"")
    kinds = {"run": str, "id": str, "url": str, "started": float}
    if all(isinstance(about.get(k), t) for k, t in kinds.items()):
        return cast(Announcement, about)
    return None


class Gateway:
    """`Control` of the newest run on a cluster. ray_address: HOST:PORT of the cluster's head (6379 by
    default)."""

    def __init__(self, ray_address: str, token: str | None):
        host, _, port = ray_address.rpartition(":")
        if not host or not port.isdigit() or "/" in host:
            raise UserError(
                f"--ray-address {ray_address}: expected HOST:PORT of the cluster's head, such as "
                "ray-head:6379"
            )
        self.ray_address = ray_address
        self._place = (host.strip("[]"), int(port))
        self._token = token
        self._gcs: Any = None

    async def ready(self) -> None:
        await asyncio.to_thread(self._registered)

    async def status(self) -> RunStatus:
        found = await self._find()
        if found is None:
            return RunStatus(state="no run")
        url, others = found
        status = await self._ask(RunStatus, "GET", "/v1/status", url=url)
        return status.model_copy(update={"others": others})

    async def scale(self, n: int | Literal["all"], ahead: bool) -> Done:
        return await self._ask(Done, "POST", "/v1/workers/scale", {"n": n, "ahead": ahead})

    async def drain(self, worker: str) -> Done:
        return await self._ask(Done, "POST", f"/v1/workers/{quote(worker, safe='')}/drain")

    async def pause(self) -> Done:
        return await self._ask(Done, "POST", "/v1/pause")

    async def resume(self) -> Done:
        return await self._ask(Done, "POST", "/v1/resume")

    async def _ask(
        self, kind: type[A], method: str, path: str, body: Any = None, url: str | None = None
    ) -> A:
        if url is None:
            found = await self._find()
            if found is None:
                raise no_run(f"no run on the cluster at {self.ray_address}")
            url = found[0]
        return read_answer(await asking.ask(url, self._token, method, path, body), kind, url)

    async def _find(self) -> tuple[str, list[str]] | None:
        """The address of the newest run that answers, looked up at each request, and the names of the others;
        None where none answers. Raises EnvironmentLacks."""
        runs = await asyncio.to_thread(self._registered)
        # Without the token: who answers is not known yet.
        async with httpx.AsyncClient(timeout=LOOK_SECONDS, trust_env=False) as http:
            peers = [asking.Peer(r["run"], r["id"], r["url"]) for r in runs]
            answers = await asyncio.gather(*(asking.is_there(http, p, self._token) for p in peers))
        alive = sorted(
            (r for r, is_it in zip(runs, answers, strict=True) if is_it), key=lambda r: r["started"]
        )
        if not alive:
            return None
        return alive[-1]["url"], sorted(r["run"] for r in alive[:-1])

    def _registered(self) -> list[Announcement]:
        """What runs have announced. Raises EnvironmentLacks."""
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # Cython, without stubs
        from ray.exceptions import AuthenticationError, RayError

        try:  # Ray's own client waits for 40 s
            socket.create_connection(self._place, LOOK_SECONDS).close()
        except OSError as e:
            self._gcs = None
            raise EnvironmentLacks(
                f"--ray-address {self.ray_address}: no Ray answers there ({e.strerror or e})"
            ) from e
        try:
            # Kept in a variable too: a fault in the thread of another request may unset the attribute.
            gcs = self._gcs = self._gcs or GcsClient(address=self.ray_address)
            keys = gcs.internal_kv_keys(PREFIX, NAMESPACE, timeout=LOOK_SECONDS)
            values = [gcs.internal_kv_get(key, NAMESPACE, timeout=LOOK_SECONDS) for key in keys]
        except RayError as e:
            self._gcs = None
            why = " ".join(str(e).split())[:200]
            if isinstance(e, AuthenticationError):
                why = "Ray refuses the token; RAY_AUTH_MODE and RAY_AUTH_TOKEN must be the cluster's"
            raise EnvironmentLacks(f"--ray-address {self.ray_address}: {why}") from e
        return [about for value in values if (about := announcement(value))]


def read_answer(answer: httpx.Response, kind: type[A], url: str) -> A:
    """What a control plane answered. Raises its refusal with the HTTP status that it had, and
    EnvironmentLacks for what no control plane would answer."""
    if not answer.is_success:
        raise asking.refusal(answer)
    strange = f"{url}: what answers there is no control plane of a run, or one of a version too far from this"
    with fitting(lambda mistakes: EnvironmentLacks(strange)):
        return kind.model_validate_json(answer.content)
