"""What happened in a run, in the SQLite store: one row per event."""

from __future__ import annotations

import sqlite3
import time
from abc import ABC, abstractmethod

import orjson

from services.likelihood.records import EventRecord
from services.likelihood.store.sqlite.file import SQLiteFile


def add_index(db: sqlite3.Connection) -> None:
    """Make the index by kind in a file that has none."""
    db.execute("CREATE INDEX IF NOT EXISTS event_kind ON event (run, kind, id)")


class SQLiteEvents(ABC):
    """That part of the store (see LikelihoodStore)."""

    _file: SQLiteFile

    def put_event(self, run: str, event: EventRecord) -> None:
        with self._file.writing() as db:
            run_id = self._touch(db, run)
            values = (run_id, event.step, event.kind, event.text, orjson.dumps(event.data), time.time())
            db.execute("INSERT INTO event (run, step, kind, text, data, time) VALUES (?,?,?,?,?,?)", values)

    def events(self, run: str, limit: int = 1000, kind: str | None = None) -> list[dict]:
        of_kind = "" if kind is None else "AND kind=?"
        with self._file.reading() as db:
            chosen = (self._id(db, run), *(() if kind is None else (kind,)), limit)
            rows = db.execute(
                f"SELECT step, kind, text, data, time FROM event WHERE run=? {of_kind} "
                "ORDER BY id DESC LIMIT ?",
                chosen,
            ).fetchall()
        return [
            {"step": s, "kind": k, "text": t, "data": orjson.loads(d), "time": at}
            for s, k, t, d, at in reversed(rows)
        ]

    @abstractmethod
    def _touch(self, db: sqlite3.Connection, run: str) -> int: ...

    @staticmethod
    @abstractmethod
    def _id(db: sqlite3.Connection, run: str) -> int: ...
