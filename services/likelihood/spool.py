"""A queue of outgoing messages: memory first, then disk, always in order; what is on disk outlives the
process."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import orjson

from services.common.errors import EnvironmentLacks
from services.common.files import lock, move, write_atomically
from services.common.users_files import writing

log = logging.getLogger("unspiral.likelihood")


@dataclass
class Message:
    """One request to the service."""

    kind: str
    """`step`, `tokens` or `event`."""
    run: str
    step: int
    method: str
    path: str
    make: Callable[[], bytes]
    """Makes the body; called once, by whoever first needs the bytes, so that the learner does not wait for
    it."""
    size: int
    """About how many bytes it holds on to."""
    seq: int = -1

    @cached_property
    def body(self) -> bytes:
        return self.make()

    def written(self) -> bytes | None:
        """The body; None, and a line in the log, where it cannot be made: it could not the next time either,
        so the record is lost, and those behind it are not."""
        try:
            return self.body
        except Exception as e:
            what = f"{self.kind} of run {self.run}, step {self.step}"
            log.error("%s cannot be written out: %s: %s", what, type(e).__name__, e)
            return None


class Spool:
    """Not thread-safe: the client holds a lock around it.

    Up to about `memory_bytes` wait in memory; from then on messages go to files in `folder`, named by their
    number, until the files are gone again. So memory always holds the older ones, and numbers give the order
    over restarts.
    """

    def __init__(self, folder: str | Path, memory_bytes: int, token_steps: int):
        self.folder = Path(folder)
        self.memory_bytes = memory_bytes
        self.token_steps = token_steps
        taken = f"spool folder {self.folder}: in use by another process"
        with writing(f"spool folder {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.folder / "lock", lambda holder: EnvironmentLacks(taken + holder))
        # A kill in mid-write left these: nobody was told yet that they are on disk.
        for torn in self.folder.glob("*.tmp"):
            torn.unlink()
        # Numbers have leading zeros (`_path`), so that names sort as messages came.
        self.files = deque(sorted(self.folder.glob("*.msg")))
        self.memory: deque[Message] = deque()
        self.held = 0
        self.next_seq = _number(self.files[-1]) + 1 if self.files else 0

    def __len__(self) -> int:
        return len(self.memory) + len(self.files)

    def add(self, message: Message) -> None:
        """Number the message and put it at the end."""
        message.seq = self.next_seq
        if self.files or self.held + message.size > self.memory_bytes:
            self._write(message)
        else:
            self.memory.append(message)
            self.held += message.size
        # Last: where a full disk has refused the message, its number is still free.
        self.next_seq += 1

    def first(self) -> Message | None:
        """The oldest message; it stays until `done`. A file that cannot be read is put aside as `.bad`."""
        if self.memory:
            return self.memory[0]
        while self.files:
            try:
                return self._read(self.files[0])
            except (OSError, ValueError, TypeError) as e:
                path = self.files.popleft()
                log.error("spooled record %s cannot be read (%s); put aside as %s.bad", path, e, path.name)
                # One that stays where it is, on a disk that takes no change, is met by the next client again.
                with contextlib.suppress(OSError):
                    move(path, path.with_name(path.name + ".bad"))
        return None

    def find(self, kind: str, run: str, step: int) -> Message | None:
        """The newest waiting message of a kind and step."""
        for message in reversed(self.memory):
            if (message.kind, message.run, message.step) == (kind, run, step):
                return message
        for path in reversed(self.files):
            if path.stem.endswith(f"-{kind}"):
                message = self._read(path)
                if (message.run, message.step) == (run, step):
                    return message
        return None

    def done(self, message: Message) -> None:
        """Forget the oldest message."""
        # The sender holds no lock while it sends: meanwhile `to_disk` may have made a file of the message.
        if self.memory and self.memory[0] is message:
            self.memory.popleft()
            self.held -= message.size
        elif self.files and _number(self.files[0]) == message.seq:
            self.files.popleft().unlink(missing_ok=True)

    def put_aside(self, message: Message) -> Path:
        """Take the oldest message out of the queue and keep it on disk as `.bad`.

        Raises EnvironmentLacks where the disk is full."""
        path = self._path(message)
        # One that still waits in memory is not on disk yet.
        if not path.exists():
            self._save(message, path)
        bad = path.with_name(path.name + ".bad")
        move(path, bad)
        if self.memory and self.memory[0] is message:
            self.memory.popleft()
            self.held -= message.size
        elif self.files and self.files[0] == path:
            self.files.popleft()
        return bad

    def oldest(self) -> int | None:
        """Number of the oldest message that waits."""
        if self.memory:
            return self.memory[0].seq
        return _number(self.files[0]) if self.files else None

    def close(self) -> None:
        """Leave everything on disk, for the next process."""
        self.to_disk()
        self._lock.close()

    def to_disk(self) -> None:
        """Write what is in memory to disk, before what is there already."""
        # Files are newer than what memory holds. The list is put together again even where a full disk stops
        # this halfway; the rest then stays in memory.
        newer = self.files
        self.files = deque()
        try:
            while self.memory:
                self._write(self.memory[0])
                self.held -= self.memory.popleft().size
        finally:
            self.files.extend(newer)

    def _write(self, message: Message) -> None:
        if message.written() is None:
            return
        path = self._path(message)
        self._save(message, path)
        self.files.append(path)
        if message.kind == "tokens":  # the service keeps those of the newest steps only
            waiting = [
                f for f in list(self.files)[1:] if f.stem.endswith("tokens")
            ]  # the first may be on its way
            for old in waiting[: -self.token_steps]:
                self.files.remove(old)
                old.unlink()

    def _path(self, message: Message) -> Path:
        return self.folder / f"{message.seq:016d}-{message.kind}.msg"

    def _save(self, message: Message, path: Path) -> None:
        head = orjson.dumps([message.kind, message.run, message.step, message.method, message.path])
        with writing(f"the service is away, and the spool folder {self.folder}"):
            write_atomically(path, len(head).to_bytes(4, "big") + head + message.body, durable=True)

    def _read(self, path: Path) -> Message:
        raw = path.read_bytes()
        size = int.from_bytes(raw[:4], "big")
        body = raw[4 + size :]
        kind, run, step, method, target = orjson.loads(raw[4 : 4 + size])
        return Message(kind, run, step, method, target, lambda: body, len(body), _number(path))


def _number(path: Path) -> int:
    return int(path.stem.split("-")[0])
