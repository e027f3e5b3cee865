"""Weights by group broadcast: the sender, the receiver, and a worker that lends its own. NCCL and gloo alike.

sender      pack bucket 0 | pack 1 | pack 2 |
wire                      | send 0 | send 1 | send 2
receivers                          | load 0 | load 1 | load 2

Two buffers on each side let packing (with ZeRO-3's gathering), sending and loading overlap.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from services.contracts import WeightsReceiver, WeightUpdate
from services.weight_sync.base import (
    GroupBrokenError,
    GroupMismatchError,
    HalfWrittenError,
    WeightSyncError,
)
from services.weight_sync.group import Group, Ticket, host_store
from services.weight_sync.layout import Layout, Weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from services.settings import WeightSyncSettings

Load = Callable[[list[tuple[str, "Tensor"]]], None]
"""Writes some weights into a model. The tensors are views that hold until it returns."""


def send(group: Group, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Rank 0: all weights of the group's layout, in order. Raises GroupBrokenError."""
    with group.watched():
        under_way: deque[Callable[[], bool]] = deque()
        for bucket in group.layout.filled(tensors, group.buffers()):
            under_way.append(group.broadcast(bucket))
            # Two buffers: the next bucket but one is packed into the one that this bucket lies in.
            if len(under_way) == 2:
                group.wait(under_way.popleft())
        while under_way:
            group.wait(under_way.popleft())


def receive(group: Group, load: Load) -> None:
    """Other ranks: hand each bucket's weights to `load` as they come. Raises GroupBrokenError,
    HalfWrittenError, and what `load` raises."""
    layout = group.layout
    written = False
    with group.watched():
        buffers = group.buffers()

        def begin(number: int) -> Callable[[], bool]:
            return group.broadcast(buffers[number % 2][: layout.sizes[number]])

        try:
            coming = begin(0)
            for number, pieces in enumerate(layout.buckets):
                arrived = coming
                if number + 1 < len(layout.buckets):
                    # It travels while this one is written into the model.
                    coming = begin(number + 1)
                group.wait(arrived)
                # Before `load`: one that fails halfway has touched the model as well.
                written = True
                load([(piece.name, piece.view(buffers[number % 2])) for piece in pieces])
                # The sender's next bucket but one goes into this buffer: copies out of it must be done.
                group.fence()
        except GroupBrokenError as e:
            if written:
                raise HalfWrittenError(str(e)) from e
            raise


class BroadcastSource:
    """Learner rank 0's side; see services.weight_sync.base.Source. `dtype` is the engines' data type, such as
    `bfloat16`."""

    def __init__(
        self,
        settings: WeightSyncSettings,
        backend: str,
        device: torch.device,
        dtype: str,
        sender: str = "learner rank 0",
    ):
        self._settings = settings
        self._backend = backend
        self._device = device
        self._dtype = dtype
        self._sender = sender
        self._store: Any = None
        self._group: Group | None = None
        self._ticket: Ticket | None = None
        self._layout = Layout([], 0)
        """Of the last offer."""

    def offer(
        self,
        weights: Sequence[tuple[str, tuple[int, ...]]],
        version: int,
        receivers: Sequence[WeightsReceiver],
    ) -> WeightUpdate:
        listed = [(name, self._dtype, tuple(shape)) for name, shape in weights]
        ranks: dict[str, int] = {}
        free = 1
        for receiver in receivers:
            ranks[receiver.id] = free
            free += receiver.ranks
        group = self._group
        last = self._ticket
        same = last is not None and last.ranks == ranks and self._layout.weights == listed
        if group is not None and last is not None and same and group.usable:
            # The same members as last time: the group is used again, and they know what comes.
            # Without the list: thousands of names and shapes need not travel again at every sync.
            ticket = replace(last, version=version, weights=None)
        else:
            if group is not None:
                group.leave("the members have changed")
            self._group = None
            if self._store is None:
                self._store = host_store(self._settings.timeout_seconds)
            ticket = Ticket(
                epoch=uuid.uuid4().hex[:12],
                version=version,
                backend=self._backend,
                host=self._store.host,
                port=self._store.port,
                sender=self._sender,
                ranks=ranks,
                parts=receivers[0].ranks if receivers else 1,
                timeout_seconds=self._settings.timeout_seconds,
                bucket_bytes=self._settings.bucket_mib * 2**20,
                raw=False,
                weights=listed,
            )
            self._layout = Layout(listed, ticket.bucket_bytes)
        self._ticket = ticket
        return WeightUpdate(version, self._backend, ticket, self._layout.nbytes)

    def send(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        ticket = self._ticket
        if ticket is None:
            raise WeightSyncError("there is nothing to send: offer comes first")
        if not ticket.ranks:
            return
        if self._group is None:
            self._group = Group(ticket, 0, self._device, self._layout)
            self._group.join()
        else:
            self._group.begin(ticket)
        send(self._group, tensors)


class WeightReceiver:
    """This process's place in the group of the day, between syncs. Lives where the model lives."""

    def __init__(self) -> None:
        self._group: Group | None = None

    def receive(
        self,
        ticket: Ticket,
        worker: str,
        part: int,
        *,
        device: torch.device,
        load: Load,
        load_raw: Load,
        own: Sequence[Weight],
        problem: str | None,
    ) -> None:
        """Take a version. load: whole weights by their Hugging Face names; load_raw: the engine's own
        parameters, which are `own`.

        Raises WeightSyncError, GroupMismatchError, GroupBrokenError (the model was not touched),
        HalfWrittenError, what `load` raises.
        """
        group = self._group
        if group is not None and group.epoch == ticket.epoch:
            group.begin(ticket)
        else:
            self._leave()
            if ticket.raw:
                group = Group(ticket, 1, device, Layout(own, ticket.bucket_bytes), part=part)
            elif ticket.weights is None:
                raise GroupBrokenError(f"worker {worker} is not in group {ticket.epoch}")
            else:
                # Joined all the same: the others learn what is wrong from this rank's facts, and not by a
                # timeout.
                problem = problem or _other_type(ticket.weights, own)
                layout = Layout(ticket.weights, ticket.bucket_bytes)
                group = Group(ticket, ticket.ranks[worker] + part, device, layout, part=part)
            self._group = group
            group.join(problem)
        try:
            receive(group, load_raw if ticket.raw else load)
        finally:
            if ticket.raw:
                self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()


def _other_type(sent: Sequence[Weight], own: Sequence[Weight]) -> str | None:
    types = {dtype for _, dtype, _ in sent}
    engines = {dtype for _, dtype, _ in own}
    if types & engines:
        return None
    return f"weights come as {', '.join(types)}, the engine holds {', '.join(engines)}: set rollout.dtype"


_TAKES_NEW = "the lender takes new weights itself"


class WeightLender:
    """Gives a joining worker the parameters of this process's model, in a thread, while the model goes on
    serving."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._group: Group | None = None
        self._outcome: Outcome | None = None

    def start(
        self,
        ticket: Ticket,
        part: int,
        *,
        device: torch.device,
        parameters: Callable[[], list[tuple[str, Tensor]]],
    ) -> None:
        """Begin. One loan at a time: an earlier one is given up."""
        self.stop()
        self._stopped = False
        self._outcome = None
        self._thread = threading.Thread(
            target=self._run, args=(ticket, part, device, parameters), name="weight-lender", daemon=True
        )
        self._thread.start()

    def outcome(self) -> Outcome | None:
        """None while it runs; then as `outcome_of` gives it."""
        return self._outcome

    def stop(self) -> None:
        """End a loan before the model's weights change."""
        thread = self._thread
        if thread is None:
            return
        self._stopped = True
        if (group := self._group) is not None:
            group.give_up(_TAKES_NEW)
        # The thread reads the parameters that are about to be written: it must have let go of them.
        thread.join(30)
        self._thread = None
        if thread.is_alive():
            raise RuntimeError("a loan of weights did not end within 30 s")

    def _run(
        self,
        ticket: Ticket,
        part: int,
        device: torch.device,
        parameters: Callable[[], list[tuple[str, Tensor]]],
    ) -> None:
        self._outcome = outcome_of(lambda: self._lend(ticket, part, device, parameters))

    def _lend(
        self,
        ticket: Ticket,
        part: int,
        device: torch.device,
        parameters: Callable[[], list[tuple[str, Tensor]]],
    ) -> None:
        import torch

        mine = parameters()
        layout = Layout(listed(mine), ticket.bucket_bytes)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        stream = (
            torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else torch.inference_mode()
        )
        with torch.inference_mode(), stream:
            group = self._group = Group(ticket, 0, device, layout, part=part)
            try:
                if self._stopped:
                    group.give_up(_TAKES_NEW)
                group.join()
                send(group, iter(mine))
            finally:
                self._group = None
                group.leave()


def listed(tensors: Iterable[tuple[str, Tensor]]) -> list[Weight]:
    """Name, data type and shape of each."""
    return [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors]


LEND_POLL_SECONDS = 0.05
"""Time between two looks at whether a loan of weights is over."""
_ERRORS = {e.__name__: e for e in (WeightSyncError, GroupMismatchError, GroupBrokenError, HalfWrittenError)}


class Outcome(TypedDict, total=False):
    """Result of a part of a sync, for vLLM's processes, between which exceptions lose their type. Empty after
    success."""

    error: str
    """Name of the exception's class."""
    message: str


def outcome_of(call: Callable[[], None]) -> Outcome:
    """Run a part of a sync."""
    try:
        call()
    except Exception as e:
        return {"error": type(e).__name__, "message": str(e)}
    return {}


def raise_failed(outcomes: Sequence[Outcome]) -> None:
    """Raise what a part of the engine ran into: its own failure first, then what left a part half written.
    Other errors as RuntimeError."""
    failed = [o for o in outcomes if o]
    if not failed:
        return
    # Parts of one model: if one took the version and another did not, the engine is half of both.
    unlike = len(failed) < len(outcomes) or len({o["error"] for o in failed}) > 1
    for outcome in failed:
        if outcome["error"] not in _ERRORS:
            raise RuntimeError(f"{outcome['error']}: {outcome['message']}")
    kind = _ERRORS[failed[0]["error"]]
    # Some parts hold the new version, or a part of it.
    raise (HalfWrittenError if unlike else kind)(failed[0]["message"])


async def loan_ended(outcomes: Callable[[], Awaitable[Sequence[Outcome | None]]]) -> None:
    """Until no part of the lending engine has None for its outcome; then as `raise_failed`."""
    while True:
        parts = await outcomes()
        ended = [outcome for outcome in parts if outcome is not None]
        if len(ended) == len(parts):
            return raise_failed(ended)
        await asyncio.sleep(LEND_POLL_SECONDS)
