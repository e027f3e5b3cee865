"""Broadcast over TCP with gloo, on CPUs: the twin of nccl.py. The process's default group, which DeepSpeed or
vLLM owns, is not touched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_left: list[tuple[Any, list[Any]]] = []
"""Groups that were given up with operations under way. Destroying one would wait for those; so it is kept
until they have timed out."""


class GlooCommunicator:
    """See services.weight_sync.group.Communicator. `wait(done)` is the group's: it raises when waiting is
    over."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        wait: Callable[[Callable[[], bool]], None],
    ):
        from torch.distributed import ProcessGroupGloo

        _left[:] = [(group, works) for group, works in _left if not all(w.is_completed() for w in works)]
        self._works: list[Any] = []
        made: list[Any] = []

        def connect() -> None:
            try:
                made.append(
                    ProcessGroupGloo(store, rank, world_size, timedelta(seconds=max(1.0, timeout_seconds)))
                )
            except RuntimeError as e:
                made.append(e)

        # It waits for all ranks to connect, and can't be told to stop: so in a thread, which may be left to
        # its timeout.
        threading.Thread(target=connect, name="gloo-connect", daemon=True).start()
        wait(lambda: bool(made))
        if isinstance(made[0], RuntimeError):
            raise made[0]
        self._group = made[0]

    def broadcast(self, buffer: Tensor) -> Callable[[], bool]:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        work = self._group.broadcast([buffer], options)
        self._works = [w for w in self._works if not w.is_completed()] + [work]

        def done() -> bool:
            if not work.is_completed():
                return False
            work.wait()  # raises what went wrong
            return True

        return done

    def fence(self) -> None:
        """Copies on the CPU are done when they return."""

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None and not all(w.is_completed() for w in self._works):
            _left.append((group, self._works))
