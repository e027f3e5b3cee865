"""The group of processes that one epoch of weight sync is made of.

    full weights, learner to all workers        an engine's own parameters, worker to worker,
    (tensor parallel 2)                         one group per part

        learner rank 0   ──> rank 0             lender part 0 ──> rank 0 | part 1 ──> rank 0
        w0.1 part 0, 1   ──> rank 1, 2          joiner part 0 ──> rank 1 | part 1 ──> rank 1
        w1.1 part 0, 1   ──> rank 3, 4

The ranks meet at a store that rank 0's process holds. Each describes itself there; all compare all
descriptions, and come to the same conclusion, before the first collective operation. A rank that gives up
says so in the store, and the others need not wait for their timeout.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from services.contracts import WeightsReceiver, WeightUpdate
from services.weight_sync import nccl
from services.weight_sync.base import (
    ENVIRONMENT_PREFIXES,
    GroupBrokenError,
    GroupMismatchError,
    WeightSyncError,
)
from services.weight_sync.gloo import GlooCommunicator
from services.weight_sync.layout import Layout, Weight
from services.weight_sync.meeting_place import listening_store

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from services.settings import WeightSyncSettings

POLL_SECONDS = 0.1
"""Time between two looks at whether another rank has given up."""
CONNECT_SECONDS = 15.0
_KEPT_PLACES = 8
_MAY_DIFFER = {
    # What is logged, names of a host's own network devices, and what vLLM sets for its own collectives.
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_HOSTID",
    "NCCL_GRAPH_REGISTER",
    "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_NO_CACHE",
}


@dataclass(frozen=True)
class Ticket:
    """A rank's instructions for one sync. Small; travels inside a WeightUpdate."""

    epoch: str
    version: int
    backend: str
    host: str
    port: int
    sender: str
    ranks: dict[str, int]
    """First rank of each receiver; empty: nobody receives."""
    parts: int
    """Ranks of each receiver."""
    timeout_seconds: float
    bucket_bytes: int
    raw: bool
    """The engine's own parameters from another engine, each part in a group of two; else whole weights by
    their Hugging Face names."""
    weights: list[Weight] | None
    """The weights that will come; None: the same as in the last sync of this epoch (raw: the receiver's own
    parameters)."""

    @property
    def names(self) -> list[str]:
        """Name of each rank in messages."""
        parts = 1 if self.raw else self.parts
        called = [self.sender]
        for worker in sorted(self.ranks, key=lambda worker: self.ranks[worker]):
            called += [f"worker {worker}" + (f" part {part}" if parts > 1 else "") for part in range(parts)]
        return called

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Ticket:
        raw = json.loads(text)
        weights = raw.pop("weights")
        return cls(**raw, weights=weights and [(n, d, tuple(s)) for n, d, s in weights])


class Communicator(Protocol):
    """Moves packed buckets from rank 0 to all others. No call waits for other ranks, so whoever waits can
    give up."""

    def broadcast(self, buffer: Tensor) -> Callable[[], bool]:
        """Begin to send (rank 0) or to fill (others) a uint8 buffer. The result says whether that is done; it
        raises RuntimeError."""
        ...

    def fence(self) -> None:
        """Wait until this process's own work on the buffers is done."""
        ...

    def abort(self) -> None:
        """Give up what is under way, and leave. May be called again."""
        ...


def facts_of(
    backend: str, rank: int, device: torch.device, digest: str, problem: str | None
) -> dict[str, Any]:
    """A rank's description of itself, compared by all before the first collective operation."""
    environment = {
        k: v for k, v in os.environ.items() if k.startswith(ENVIRONMENT_PREFIXES) and k not in _MAY_DIFFER
    }
    facts: dict[str, Any] = {"environment": environment, "weights": digest, "problem": problem}
    if backend == "nccl":
        facts |= nccl.facts(rank, device)
    return facts


def check_facts(names: Sequence[str], facts: Sequence[dict[str, Any]]) -> None:
    """Raises WeightSyncError, GroupMismatchError with the first difference between ranks; the same error
    on all ranks."""
    for name, its in zip(names, facts, strict=True):
        if its["problem"]:
            raise WeightSyncError(f"{name}: {its['problem']}")
    first = facts[0]
    for name, its in zip(names[1:], facts[1:], strict=True):
        for variable in sorted(first["environment"].keys() | its["environment"].keys()):
            here = first["environment"].get(variable)
            there = its["environment"].get(variable)
            if here != there:
                raise GroupMismatchError(
                    f"{variable} is {_value(there)} on {name} and {_value(here)} on {names[0]}: "
                    "set it to the same value for both"
                )
        if first.get("nccl") != its.get("nccl"):
            raise GroupMismatchError(
                f"NCCL is {its.get('nccl')} on {name} and {first.get('nccl')} on {names[0]}"
            )
        if first["weights"] != its["weights"]:
            raise WeightSyncError(f"the weights of {name} are not laid out as those of {names[0]}")
    devices: dict[str, str] = {}
    for name, its in zip(names, facts, strict=True):
        if (device := its.get("device")) and (other := devices.setdefault(device, name)) != name:
            raise GroupMismatchError(
                f"{other} and {name} are on the same GPU ({device}): "
                "NCCL needs one for each; use weight_sync.backend=shared_memory"
            )


def _value(value: str | None) -> str:
    return "not set" if value is None else repr(value)


class Group:
    """This process's place in the group of an epoch."""

    def __init__(self, ticket: Ticket, rank: int, device: torch.device, layout: Layout, *, part: int = 0):
        """Go to the meeting place. Raises GroupBrokenError where nobody is there."""
        self.epoch = ticket.epoch
        self.rank = rank
        self.device = device
        self.layout = layout
        self.names = ticket.names
        self._ticket = ticket
        self.communicator: Communicator | None = None
        self._broken: str | None = None
        self._buffers: list[Tensor] = []
        self.begin(ticket)
        # Two connections: a call that waits holds its connection.
        self._connections = [connect(ticket), connect(ticket)]
        self._store, self._poll_store = (_prefixed(c, ticket, part) for c in self._connections)

    def begin(self, ticket: Ticket) -> None:
        """A sync's time begins now."""
        self._limit = ticket.timeout_seconds
        self._deadline = time.monotonic() + self._limit

    def join(self, problem: str | None = None) -> None:
        """Meet the others, compare, connect. problem: why this rank can't take part. Raises GroupBrokenError,
        GroupMismatchError, WeightSyncError."""
        from torch.distributed import PrefixStore

        backend = self._ticket.backend
        store = self._store
        with self.watched():
            # A collective of ranks that differ hangs or fills the model with noise, and says nothing of why.
            said = facts_of(backend, self.rank, self.device, self.layout.digest, problem)
            store.set(f"facts/{self.rank}", json.dumps(said))
            keys = [f"facts/{r}" for r in range(len(self.names))]
            self.wait(lambda: store.check(keys), lambda: f"{', '.join(self._absent(keys))} did not come")
            facts = [json.loads(store.get(key)) for key in keys]
            check_facts(self.names, facts)
            # After the facts, which name the reason on all ranks alike.
            if store.check(["broken"]):  # by one that came, said what it is, and left
                raise GroupBrokenError(store.get("broken").decode())
            with _broken_by(f"{self.names[self.rank]} could not connect to the group"):
                self.communicator = self._connect(PrefixStore("communicator", store), facts)

    def _connect(self, store: Any, facts: Sequence[dict[str, Any]]) -> Communicator:
        if self._ticket.backend == "nccl":
            return nccl.NcclCommunicator(self.rank, len(facts), facts[0]["unique_id"], self.device, self.wait)
        return GlooCommunicator(store, self.rank, len(facts), self._deadline - time.monotonic(), self.wait)

    def _absent(self, keys: list[str]) -> list[str]:
        return [name for key, name in zip(keys, self.names, strict=True) if not self._store.check([key])]

    def wait(
        self,
        done: Callable[[], bool],
        late: Callable[[], str] = lambda: "a rank of the group hangs or is gone",
    ) -> None:
        """Until `done()`. Raises GroupBrokenError where another rank gave up, or the deadline has passed."""
        began = time.monotonic()
        pause = 2e-5
        while not self._is(done):
            if self._broken is not None:
                raise GroupBrokenError(self._broken)
            if time.monotonic() > self._deadline:
                raise GroupBrokenError(
                    f"not finished within weight_sync.timeout_seconds={self._limit:g}: {late()}"
                )
            time.sleep(pause)
            # A bucket takes milliseconds: do not sleep past its end. Who waits longer waits for another rank.
            pause = min(1.5 * pause, 2e-4 if time.monotonic() - began < 0.5 else 5e-3)

    def _is(self, done: Callable[[], bool]) -> bool:
        try:
            return done()
        except RuntimeError as e:
            # A connection was lost. Whose it was is known to whoever ended it, and may be in the store a
            # moment later.
            time.sleep(2 * POLL_SECONDS)
            raise GroupBrokenError(self._broken or f"{self.names[self.rank]} lost its connection: {e}") from e

    def broadcast(self, buffer: Tensor) -> Callable[[], bool]:
        """Begin to move a bucket; see Communicator. Raises GroupBrokenError."""
        with _broken_by(self.names[self.rank]):
            return self._joined().broadcast(buffer)

    def fence(self) -> None:
        """Wait until this process's own work on the buffers is done."""
        self._joined().fence()

    def _joined(self) -> Communicator:
        if self.communicator is None:
            raise GroupBrokenError(self._broken or f"{self.names[self.rank]} has left the group")
        return self.communicator

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, waits end when another rank gives up. An error within is told to the other ranks, and ends
        the group."""
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over,), name="weight-sync-watch", daemon=True).start()
        try:
            yield
        except BaseException as e:
            # Errors of the sync say whose they are.
            of_all = isinstance(e, WeightSyncError)
            self.leave(str(e) if of_all else f"{self.names[self.rank]}: {type(e).__name__}: {e}")
            raise
        finally:
            over.set()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(POLL_SECONDS):
            try:
                if self._poll_store.check(["broken"]):
                    self._broken = self._poll_store.get("broken").decode()
                    return
            except RuntimeError:
                self._broken = f"{self.names[0]} is gone"
                # Not kept for the next group: there is nobody at the other end.
                self._connections = []
                return

    @property
    def usable(self) -> bool:
        """False after any rank has given up."""
        return self.communicator is not None and self._broken is None and not self._store.check(["broken"])

    def buffers(self) -> list[Tensor]:
        """Two uint8 buffers for the layout's buckets."""
        import torch

        if not self._buffers or len(self._buffers[0]) != self.layout.largest:
            self._buffers = [
                torch.empty(self.layout.largest, dtype=torch.uint8, device=self.device) for _ in range(2)
            ]
        return self._buffers

    def give_up(self, reason: str) -> None:
        """End what waits here and at the other ranks. From any thread."""
        if self._broken is None:
            self._broken = reason
            # In a thread: where the store's process hangs, this does too.
            threading.Thread(target=_mark_broken, args=(self._store, reason), daemon=True).start()

    def leave(self, reason: str = "") -> None:
        """End this process's part; with a reason, tell the others not to wait."""
        if reason:
            self.give_up(reason)
        communicator, self.communicator = self.communicator, None
        connections, self._connections = self._connections, []
        self._buffers = []
        keep_connections(self._ticket, connections)
        if communicator is not None:
            communicator.abort()


def host_store(timeout_seconds: float) -> Any:
    """A meeting place on a free port of this process's host."""
    return listening_store(own_address(), timeout_seconds)


def offer_loan(
    settings: WeightSyncSettings,
    store: Any,
    backend: str,
    sender: str,
    receiver: WeightsReceiver,
    version: int,
) -> WeightUpdate:
    """A worker's offer of its engine's own parameters to one other worker. store: the worker's meeting
    place."""
    ticket = Ticket(
        epoch=uuid.uuid4().hex[:12],
        version=version,
        backend=backend,
        host=store.host,
        port=store.port,
        sender=sender,
        ranks={receiver.id: 1},
        parts=receiver.ranks,
        timeout_seconds=settings.timeout_seconds,
        bucket_bytes=settings.bucket_mib * 2**20,
        raw=True,
        weights=None,
    )
    return WeightUpdate(version, backend, ticket, 0)


def own_address() -> str:
    """This host's address in the cluster."""
    import ray

    return ray.util.get_node_ip_address()


_idle: dict[tuple[str, int], list[Any]] = {}
"""Connections that are used again: PyTorch looks up a name for each new one, which takes seconds where a name
server is slow."""


@contextmanager
def _broken_by(what: str) -> Iterator[None]:
    """Around calls of PyTorch's transport, whose errors are all RuntimeErrors."""
    try:
        yield
    except RuntimeError as e:
        raise GroupBrokenError(f"{what}: {e}") from e


def connect(ticket: Ticket) -> Any:
    """Connect to a ticket's meeting place. Raises GroupBrokenError."""
    from torch.distributed import TCPStore

    here = _idle.get((ticket.host, ticket.port), [])
    if here:
        return here.pop()
    limit = min(CONNECT_SECONDS, ticket.timeout_seconds)
    try:
        return TCPStore(
            ticket.host,
            ticket.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit),
        )
    except RuntimeError as e:
        raise GroupBrokenError(
            f"{ticket.sender} does not answer at {ticket.host}:{ticket.port} within {limit:g} s"
        ) from e


def keep_connections(ticket: Ticket, connections: Sequence[Any]) -> None:
    """Keep connections for the next group that meets at the same place."""
    _idle.setdefault((ticket.host, ticket.port), []).extend(connections)
    while len(_idle) > _KEPT_PLACES:
        del _idle[next(iter(_idle))]


def break_group(ticket: Ticket, reason: str) -> None:
    """Tell all ranks of a group that one of them is gone. Does nothing where nobody is left to be told."""
    with suppress(GroupBrokenError):
        store = connect(ticket)
        for part in range(ticket.parts if ticket.raw else 1):
            _mark_broken(_prefixed(store, ticket, part), reason)
        keep_connections(ticket, [store])


def _mark_broken(store: Any, reason: str) -> None:
    with suppress(RuntimeError):  # the store's process is gone, which tells the others as well
        # The first reason stays: those that follow are its consequences.
        store.compare_set("broken", "", reason)


def _prefixed(store: Any, ticket: Ticket, part: int) -> Any:
    from torch.distributed import PrefixStore

    return PrefixStore(f"{ticket.epoch}/{part if ticket.raw else 'all'}", store)
