"""A control plane that stands by itself, for containers: it finds the run of a Ray cluster and passes requests on to it.

    unspiral status ──> gateway :8200 ──> the run's own control plane, whose address lies in Ray's key-value store

A run puts its address there when it starts, and takes it away when it ends; an address that no longer answers is passed over.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from services.control.records import CannotReach, ControlError, Done, DriverSilent, NoRun, RunStatus

M = TypeVar("M", bound=BaseModel)
NAMESPACE = b"unspiral"
PREFIX = b"control/"
LOOK_SECONDS = 3.0
"""Longest wait for Ray, and for an answer of a run that may be dead."""
ANSWER_SECONDS = 20.0


def announce_run(run: str, url: str, folder: str, identity: str) -> None:
    """Put the address of this process's run into the key-value store of the Ray that it has joined. identity: what its /healthz tells."""
    from ray.experimental.internal_kv import _internal_kv_put

    value = {"run": run, "url": url, "folder": folder, "id": identity, "started": time.time()}
    _internal_kv_put(_key(run, identity), json.dumps(value).encode(), overwrite=True, namespace=NAMESPACE)


def withdraw_run(run: str, identity: str) -> None:
    """Take the address away again."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(_key(run, identity), namespace=NAMESPACE)


def _key(run: str, identity: str) -> bytes:
    """Runs of one name may lie in different folders."""
    return PREFIX + f"{run}/{identity}".encode()


class Gateway:
    """`Control` of the newest run on a cluster. ray_address: HOST:PORT of the cluster's head (6379 by default)."""

    def __init__(self, ray_address: str, token: str | None):
        host, _, port = ray_address.rpartition(":")
        if not host or not port.isdigit() or "/" in host:
            raise ControlError(f"--ray-address {ray_address}: expected HOST:PORT of the cluster's head, such as ray-head:6379")
        self.ray_address, self._place = ray_address, (host.strip("[]"), int(port))
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._gcs: Any = None
        self._others: list[str] = []

    async def ready(self) -> None:
        await asyncio.to_thread(self._registered)

    async def status(self) -> RunStatus:
        try:
            answer = await self._ask("GET", "/v1/status")
        except NoRun:
            return RunStatus(state="no run")
        return read_answer(RunStatus, answer, self.ray_address).model_copy(update={"others": self._others})

    async def scale(self, n: int | Literal["all"], ahead: bool) -> Done:
        return read_answer(Done, await self._ask("POST", "/v1/workers/scale", {"n": n, "ahead": ahead}), self.ray_address)

    async def drain(self, worker: str) -> Done:
        return read_answer(Done, await self._ask("POST", f"/v1/workers/{quote(worker, safe='')}/drain"), self.ray_address)

    async def pause(self) -> Done:
        return read_answer(Done, await self._ask("POST", "/v1/pause"), self.ray_address)

    async def resume(self) -> Done:
        return read_answer(Done, await self._ask("POST", "/v1/resume"), self.ray_address)

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        async with httpx.AsyncClient(headers=self._headers, timeout=ANSWER_SECONDS, trust_env=False) as http:
            url = await self._find()
            try:
                answer = await http.request(method, url + path, json=body)
            except httpx.HTTPError as e:
                raise DriverSilent(f"the run at {url} does not answer: {type(e).__name__}") from e
        if answer.is_success:
            return answer.json()
        raise as_error(answer)

    async def _find(self) -> str:
        """The newest run that answers. Raises NoRun, CannotReach."""
        runs = await asyncio.to_thread(self._registered)
        answers = await asyncio.gather(*(self._alive(r) for r in runs))
        alive = [r for r, answered in zip(runs, answers, strict=True) if answered]
        if not alive:
            raise NoRun(f"no run on the cluster at {self.ray_address}")
        newest = max(alive, key=lambda r: r["started"])
        self._others = sorted(r["run"] for r in alive if r is not newest)
        return newest["url"]

    async def _alive(self, announced: dict[str, Any]) -> bool:
        """Whether this very run answers. What took a dead run's address (this gateway perhaps) gets neither token nor requests."""
        try:
            async with httpx.AsyncClient(timeout=LOOK_SECONDS, trust_env=False) as http:
                return (await http.get(announced["url"] + "/healthz")).json()["id"] == announced["id"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False

    def _registered(self) -> list[dict[str, Any]]:
        """What runs have announced. Raises CannotReach."""
        from ray._raylet import GcsClient
        from ray.exceptions import RayError

        try:  # Ray's own client waits for 40 s
            socket.create_connection(self._place, LOOK_SECONDS).close()
        except OSError as e:
            self._gcs = None
            raise CannotReach(f"--ray-address {self.ray_address}: no Ray answers there ({e.strerror or e})") from e
        try:
            self._gcs = self._gcs or GcsClient(address=self.ray_address)
            keys = self._gcs.internal_kv_keys(PREFIX, NAMESPACE, timeout=LOOK_SECONDS)
            values = [self._gcs.internal_kv_get(key, NAMESPACE, timeout=LOOK_SECONDS) for key in keys]
        except RayError as e:
            self._gcs = None
            raise CannotReach(f"--ray-address {self.ray_address}: {' '.join(str(e).split())[:200]}") from e
        return [json.loads(v) for v in values if v]


def read_answer(kind: type[M], answer: Any, address: str) -> M:
    """An answer of a control plane; fields that a newer one has more are left out. Raises CannotReach for anything else."""
    try:
        return kind.model_validate(answer, extra="ignore")
    except ValidationError:
        raise CannotReach(f"{address}: what answers there is no control plane of a run") from None


def as_error(answer: httpx.Response) -> ControlError:
    """A refusal of the control plane, as the exception it was there."""
    try:
        detail = str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        detail = f"{answer.request.url}: HTTP {answer.status_code}"
    error = ControlError(detail)
    error.status = answer.status_code
    error.exit_code = 3 if answer.status_code in (401, 403, 409, 500, 502, 503, 504) else 2
    return error
