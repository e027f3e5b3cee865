"""One SQLite file shared by threads and processes: a connection per thread, write locks, one-line
errors."""

from __future__ import annotations

import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from services.common.errors import EnvironmentLacks, UserError

READING_PRAGMAS = ("cache_size=-16384", "temp_store=MEMORY", "mmap_size=1073741824")
PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", *READING_PRAGMAS)
BUSY_SECONDS = 30.0


class SQLiteFile:
    """`path` is made, with its folder and schema, if it is not there. One that may not be written, as that of
    another user's run, can be read all the same. Raises EnvironmentLacks, or UserError for what is no
    store, or one of another schema version."""

    def __init__(self, path: Path, schema: str, version: int):
        self.path = path
        self._local = threading.local()
        self._all: list[sqlite3.Connection] = []
        self._guard = threading.Lock()
        self.may_write = not path.is_file() or (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))
        with ExitStack() as undo:
            undo.callback(self.close)
            try:
                if self.may_write:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    found = self._prepared(schema, version)
                else:
                    found = self._found_there()
            except (OSError, EnvironmentLacks) as e:
                if path.is_dir() or getattr(e.__cause__, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
                    what = "a folder" if path.is_dir() else "a file, and no SQLite database"
                    raise UserError(f"likelihood store {path}: {what}; give another file") from e
                why = e.strerror if isinstance(e, OSError) else e.__cause__
                raise EnvironmentLacks(f"likelihood store {path}: cannot be opened ({why})") from e
            if found not in (0, version):
                raise UserError(
                    f"likelihood store {path}: made by another version (schema {found}; this one reads "
                    f"{version})"
                )
            undo.pop_all()

    def _prepared(self, schema: str, version: int) -> int:
        """The schema version that the file had: 0 for a new one, which is given the schema."""
        with self.writing() as db:
            if found := self._schema_of(db):
                return found
            for statement in filter(str.strip, schema.split(";")):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {version}")
        return 0

    def _found_there(self) -> int:
        """The schema version of a file that is only read."""
        with self.reading() as db:
            if found := self._schema_of(db):
                return found
        raise UserError(f"likelihood store {self.path}: is empty, and may not be written")

    def _schema_of(self, db: sqlite3.Connection) -> int:
        found: int = db.execute("PRAGMA user_version").fetchone()[0]
        if not found and db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            raise UserError(
                f"likelihood store {self.path}: a SQLite database of something else; give another file"
            )
        return found

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._told():
            yield self._connection()

    @contextmanager
    def _told(self, more: str = "") -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as e:
            raise EnvironmentLacks(f"likelihood store {self.path}: {e}{more}") from e
        except (ValueError, zlib.error) as e:  # of a record that is no JSON, or no packed JSON, any more
            raise EnvironmentLacks(
                f"likelihood store {self.path}: is damaged, a record in it cannot be read{more}"
            ) from e

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that holds the file's write lock from the start; undone on any error."""
        if not self.may_write:
            raise EnvironmentLacks(f"likelihood store {self.path}: may not be written by this user")
        with self.reading() as db:
            # SQLite refuses, without waiting, a transaction that has read and wants to write after another
            # one wrote.
            db.execute("BEGIN IMMEDIATE")
        try:
            with self._told("; nothing stored"):
                yield db
                db.execute("COMMIT")
        finally:
            if db.in_transaction:  # nothing was committed; a full disk has rolled back by itself
                db.execute("ROLLBACK")

    def close(self) -> None:
        """Close the connections of all threads."""
        with self._guard:
            while self._all:
                self._all.pop().close()
            self._local = threading.local()

    def _connection(self) -> sqlite3.Connection:
        db = getattr(self._local, "db", None)
        if db is None:
            place = str(self.path) if self.may_write else self._to_read()
            db = sqlite3.connect(
                place,
                timeout=BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
                uri=not self.may_write,
            )
            with self._guard:
                self._all.append(db)
            for pragma in PRAGMAS if self.may_write else READING_PRAGMAS:
                db.execute(f"PRAGMA {pragma}")
            self._local.db = db
        return db

    def _to_read(self) -> str:
        """The file's address for reading alone. Without a log of writes nobody is writing, and SQLite need
        not make the files beside it that it shares with writers."""
        log = self.path.with_name(f"{self.path.name}-wal")
        alone = not log.is_file() or not log.stat().st_size
        return f"{self.path.absolute().as_uri()}?mode=ro{'&immutable=1' if alone else ''}"
