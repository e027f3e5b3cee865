"""What a run says of itself and what people call it, in the SQLite store: one JSON object of each kind."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from typing import Any, Literal

import orjson

from services.likelihood.store.sqlite.file import SQLiteFile

TABLE = "run_facts"
Kind = Literal["about", "labels"]


def add_table(db: sqlite3.Connection) -> None:
    """Make the table in a file that has none."""
    db.execute(
        f"CREATE TABLE IF NOT EXISTS {TABLE} (run INTEGER, kind TEXT, body BLOB, PRIMARY KEY (run, kind)) "
        "WITHOUT ROWID"
    )


def held(db: sqlite3.Connection, run_id: int, kind: Kind) -> dict[str, Any]:
    """What is stored of a kind; empty where nothing is."""
    row = db.execute(f"SELECT body FROM {TABLE} WHERE run=? AND kind=?", (run_id, kind)).fetchone()
    return orjson.loads(row[0]) if row else {}


def set_keys(db: sqlite3.Connection, run_id: int, kind: Kind, changes: dict[str, Any]) -> None:
    """Set some keys; the others stay as they are."""
    body = orjson.dumps(held(db, run_id, kind) | changes)
    db.execute(f"INSERT OR REPLACE INTO {TABLE} (run, kind, body) VALUES (?,?,?)", (run_id, kind, body))


class SQLiteFacts(ABC):
    """That part of the store (see LikelihoodStore)."""

    _file: SQLiteFile

    def put_about(self, run: str, changes: dict[str, Any]) -> None:
        with self._file.writing() as db:
            set_keys(db, self._touch(db, run), "about", changes)

    def about(self, run: str) -> dict[str, Any]:
        with self._file.reading() as db:
            return held(db, self._id(db, run), "about")

    def put_labels(self, run: str, changes: dict[str, Any]) -> None:
        with self._file.writing() as db:
            set_keys(db, self._id(db, run), "labels", changes)

    @abstractmethod
    def _touch(self, db: sqlite3.Connection, run: str) -> int: ...

    @staticmethod
    @abstractmethod
    def _id(db: sqlite3.Connection, run: str) -> int: ...
