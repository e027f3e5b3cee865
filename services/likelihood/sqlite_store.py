"""The embedded likelihood store: one SQLite file in WAL mode.

Tables: `step` holds what was posted, `trajectory` one row a trajectory with its actions packed, `chunk` the metric curves
(services.likelihood.series), `tokens` the npz bodies of the newest steps. Writers take the lock of the file (BEGIN IMMEDIATE),
readers never wait for them.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from services.likelihood import series
from services.likelihood.records import (
    ActionRecord,
    EventRecord,
    LikelihoodError,
    RunInfo,
    StepReceipt,
    StepRecord,
    StoredStep,
    TrajectoryRecord,
    check_run_name,
)
from services.likelihood.step_metrics import record_metrics
from services.likelihood.store import StoreError, Superseded, UnknownRun

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE run (id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, created REAL NOT NULL, updated REAL NOT NULL);
CREATE TABLE attempt (run INTEGER, attempt INTEGER, first_step INTEGER, PRIMARY KEY (run, attempt)) WITHOUT ROWID;
CREATE TABLE step (run INTEGER, step INTEGER, attempt INTEGER, policy_version INTEGER, time REAL, posted BLOB, derived BLOB,
                   trajectories INTEGER, PRIMARY KEY (run, step)) WITHOUT ROWID;
CREATE TABLE trajectory (run INTEGER, step INTEGER, uid TEXT, grp TEXT, reward REAL, advantage REAL, tool_rounds INTEGER,
                         actions BLOB, PRIMARY KEY (run, step, uid)) WITHOUT ROWID;
CREATE TABLE chunk (run INTEGER, name TEXT, chunk INTEGER, data BLOB, PRIMARY KEY (run, name, chunk)) WITHOUT ROWID;
CREATE TABLE tokens (run INTEGER, step INTEGER, attempt INTEGER, body BLOB, PRIMARY KEY (run, step));
CREATE TABLE monitor (run INTEGER, step INTEGER, state BLOB, PRIMARY KEY (run, step)) WITHOUT ROWID;
CREATE TABLE alarms (run INTEGER PRIMARY KEY, body BLOB);
CREATE TABLE event (id INTEGER PRIMARY KEY, run INTEGER, step INTEGER, kind TEXT, text TEXT, data BLOB, time REAL);
CREATE INDEX event_run ON event (run, id);
"""
MONITOR_SPACING = 500
"""Steps between monitor states that are kept for good (the newest is kept besides): a superseded step replays at most so many."""


class SQLiteStore:
    """See LikelihoodStore. `path` is made, with its folder, if it is not there."""

    def __init__(self, path: str | Path, token_steps: int = 8):
        self.path, self.token_steps = Path(path), token_steps
        self._local, self._all, self._guard = threading.local(), [], threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._writing() as db:
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version == 0:
                    for statement in filter(str.strip, SCHEMA.split(";")):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        except (OSError, StoreError, sqlite3.Error) as e:
            self.close()
            raise StoreError(f"likelihood store {self.path}: cannot be opened ({getattr(e, 'strerror', None) or e})") from e
        if version not in (0, SCHEMA_VERSION):
            self.close()
            raise LikelihoodError(
                f"likelihood store {self.path}: made by another version (schema {version}, this one reads {SCHEMA_VERSION})"
            )

    # ---- writing

    def put_step(self, run: str, record: StepRecord) -> StepReceipt:
        packed = [
            (t.uid, t.group, t.reward, t.advantage, t.tool_rounds, _pack_actions(t.actions)) for t in record.trajectories
        ]  # before the lock is taken
        with self._writing() as db:
            run_id, superseded = self._enter(db, run, record.step, record.attempt)
            key = (run_id, record.step)
            old = db.execute("SELECT posted, derived, policy_version FROM step WHERE run=? AND step=?", key).fetchone()
            before = db.total_changes
            db.executemany(
                "INSERT OR IGNORE INTO trajectory (run, step, uid, grp, reward, advantage, tool_rounds, actions) VALUES (?,?,?,?,?,?,?,?)",
                [(*key, *row) for row in packed],
            )
            stored = db.total_changes - before
            posted = {**(orjson.loads(old[0]) if old else {}), **record.metrics}
            if stored:
                everything = record.trajectories if stored == len(packed) and not old else self._trajectories(db, *key)
                derived, count = record_metrics(everything), len(everything)
            else:
                derived = orjson.loads(old[1]) if old else {}
                count = db.execute("SELECT count(*) FROM trajectory WHERE run=? AND step=?", key).fetchone()[0]
            version = record.policy_version if record.policy_version is not None else (old[2] if old else None)
            db.execute(
                "INSERT OR REPLACE INTO step (run, step, attempt, policy_version, time, posted, derived, trajectories) VALUES (?,?,?,?,?,?,?,?)",
                (*key, record.attempt, version, time.time(), orjson.dumps(posted), orjson.dumps(derived), count),
            )
            self._set_values(db, run_id, record.step, {**derived, **posted})
        return StepReceipt(run=run, step=record.step, attempt=record.attempt, stored=stored, superseded=superseded)

    def put_tokens(self, run: str, step: int, attempt: int, body: bytes) -> None:
        with self._writing() as db:
            run_id, _ = self._enter(db, run, step, attempt)
            db.execute(
                "INSERT OR REPLACE INTO tokens (run, step, attempt, body) VALUES (?,?,?,?)", (run_id, step, attempt, body)
            )
            db.execute(
                "DELETE FROM tokens WHERE run=? AND step NOT IN (SELECT step FROM tokens WHERE run=? ORDER BY step DESC LIMIT ?)",
                (run_id, run_id, self.token_steps),
            )

    def save_monitor(self, run: str, step: int, state: dict[str, Any], alarms: list[dict], phases: Mapping[int, int]) -> None:
        with self._writing() as db:
            run_id = self._id(db, run)
            db.execute("DELETE FROM monitor WHERE run=? AND (step % ? != 0 OR step > ?)", (run_id, MONITOR_SPACING, step))
            db.execute("INSERT OR REPLACE INTO monitor (run, step, state) VALUES (?,?,?)", (run_id, step, orjson.dumps(state)))
            db.execute("INSERT OR REPLACE INTO alarms (run, body) VALUES (?,?)", (run_id, orjson.dumps(alarms)))
            for at, code in phases.items():
                self._set_values(db, run_id, at, {"phase": float(code)})

    def put_event(self, run: str, event: EventRecord) -> None:
        with self._writing() as db:
            db.execute(
                "INSERT INTO event (run, step, kind, text, data, time) VALUES (?,?,?,?,?,?)",
                (self._id(db, run), event.step, event.kind, event.text, orjson.dumps(event.data), time.time()),
            )

    def _enter(self, db: sqlite3.Connection, run: str, step: int, attempt: int) -> tuple[int, int]:
        """The run's id (made if new) and how many steps of lower attempts went. Raises Superseded."""
        check_run_name(run)
        now = time.time()
        db.execute(
            "INSERT INTO run (name, created, updated) VALUES (?,?,?) ON CONFLICT (name) DO UPDATE SET updated=excluded.updated",
            (run, now, now),
        )
        run_id = db.execute("SELECT id FROM run WHERE name=?", (run,)).fetchone()[0]
        later = db.execute(
            "SELECT attempt, first_step FROM attempt WHERE run=? AND attempt>? AND first_step<=? ORDER BY attempt DESC",
            (run_id, attempt, step),
        ).fetchone()
        if later:
            raise Superseded(
                f"run {run}: step {step} of attempt {attempt} is superseded by attempt {later[0]}, which began at step {later[1]}; nothing stored"
            )
        db.execute(
            "INSERT INTO attempt (run, attempt, first_step) VALUES (?,?,?) ON CONFLICT (run, attempt) DO UPDATE SET "
            "first_step=min(first_step, excluded.first_step)",
            (run_id, attempt, step),
        )
        gone = [
            row[0] for row in db.execute("SELECT step FROM step WHERE run=? AND step>=? AND attempt<?", (run_id, step, attempt))
        ]
        if gone:
            db.execute("DELETE FROM step WHERE run=? AND step>=? AND attempt<?", (run_id, step, attempt))
            db.executemany("DELETE FROM trajectory WHERE run=? AND step=?", [(run_id, s) for s in gone])
            self._clear_values(db, run_id, gone)
            db.execute("DELETE FROM monitor WHERE run=? AND step>=?", (run_id, step))
        db.execute("DELETE FROM tokens WHERE run=? AND step>=? AND attempt<?", (run_id, step, attempt))
        return run_id, len(gone)

    def _set_values(self, db: sqlite3.Connection, run_id: int, step: int, values: dict[str, float | None]) -> None:
        chunk, position = series.place(step)
        held = dict(db.execute("SELECT name, data FROM chunk WHERE run=? AND chunk=? AND name IN (SELECT value FROM json_each(?))",
                               (run_id, chunk, orjson.dumps(list(values)).decode())))  # fmt: skip
        db.executemany(
            "INSERT OR REPLACE INTO chunk (run, name, chunk, data) VALUES (?,?,?,?)",
            [(run_id, name, chunk, series.patched(held.get(name), position, value)) for name, value in values.items()],
        )

    def _clear_values(self, db: sqlite3.Connection, run_id: int, steps: list[int]) -> None:
        at: dict[int, list[int]] = {}
        for step in steps:
            chunk, position = series.place(step)
            at.setdefault(chunk, []).append(position)
        for chunk, positions in at.items():
            for name, data in db.execute("SELECT name, data FROM chunk WHERE run=? AND chunk=?", (run_id, chunk)).fetchall():
                db.execute(
                    "UPDATE chunk SET data=? WHERE run=? AND name=? AND chunk=?",
                    (series.cleared(data, positions), run_id, name, chunk),
                )

    # ---- reading

    def get_tokens(self, run: str, step: int) -> bytes | None:
        db = self._db()
        row = db.execute("SELECT body FROM tokens WHERE run=? AND step=?", (self._id(db, run), step)).fetchone()
        return row[0] if row else None

    def runs(self) -> list[RunInfo]:
        db = self._db()
        names = [row[0] for row in db.execute("SELECT name FROM run ORDER BY updated DESC")]
        return [self.info(name) for name in names]

    def info(self, run: str) -> RunInfo:
        db = self._db()
        run_id = self._id(db, run)
        created, updated = db.execute("SELECT created, updated FROM run WHERE id=?", (run_id,)).fetchone()
        attempt = db.execute("SELECT max(attempt) FROM attempt WHERE run=?", (run_id,)).fetchone()[0]
        first, last, count, trajectories = db.execute(
            "SELECT min(step), max(step), count(*), coalesce(sum(trajectories), 0) FROM step WHERE run=?", (run_id,)
        ).fetchone()
        return RunInfo(
            run=run, created=created, updated=updated, attempt=attempt or 0,
            first_step=first, last_step=last, steps=count, trajectories=trajectories,
        )  # fmt: skip

    def metric_names(self, run: str) -> list[str]:
        db = self._db()
        return [row[0] for row in db.execute("SELECT DISTINCT name FROM chunk WHERE run=? ORDER BY name", (self._id(db, run),))]

    def columns(self, run: str, names: Iterable[str], first: int, last: int) -> dict[str, np.ndarray]:
        db = self._db()
        run_id, (low, _), (high, _) = self._id(db, run), series.place(first), series.place(max(first, last))
        out = {}
        for name in names:
            chunks = db.execute(
                "SELECT chunk, data FROM chunk WHERE run=? AND name=? AND chunk BETWEEN ? AND ?", (run_id, name, low, high)
            )
            column = series.dense(chunks, first, last)
            if not np.isnan(column).all():
                out[name] = column
        return out

    def steps(self, run: str, first: int, last: int, limit: int = 1000) -> list[StoredStep]:
        db = self._db()
        rows = db.execute(
            "SELECT step, attempt, policy_version, time, posted, derived, trajectories FROM step WHERE run=? AND step BETWEEN ? AND ? "
            "ORDER BY step LIMIT ?",
            (self._id(db, run), first, last, limit),
        )
        return [
            StoredStep(
                step=s, attempt=a, policy_version=v, time=t, metrics={**orjson.loads(d), **orjson.loads(p)}, trajectories=n
            )
            for s, a, v, t, p, d, n in rows
        ]

    def trajectories(self, run: str, step: int) -> list[TrajectoryRecord]:
        db = self._db()
        return self._trajectories(db, self._id(db, run), step)

    def load_monitor(self, run: str, before: int) -> tuple[int, dict[str, Any]] | None:
        db = self._db()
        row = db.execute(
            "SELECT step, state FROM monitor WHERE run=? AND step<? ORDER BY step DESC LIMIT 1", (self._id(db, run), before)
        ).fetchone()
        return (row[0], orjson.loads(row[1])) if row else None

    def alarms(self, run: str) -> list[dict]:
        db = self._db()
        row = db.execute("SELECT body FROM alarms WHERE run=?", (self._id(db, run),)).fetchone()
        return orjson.loads(row[0]) if row else []

    def events(self, run: str, limit: int = 1000) -> list[dict]:
        db = self._db()
        rows = db.execute(
            "SELECT step, kind, text, data, time FROM event WHERE run=? ORDER BY id DESC LIMIT ?", (self._id(db, run), limit)
        ).fetchall()
        return [{"step": s, "kind": k, "text": t, "data": orjson.loads(d), "time": at} for s, k, t, d, at in reversed(rows)]

    def ping(self) -> None:
        try:
            self._db().execute("SELECT 1 FROM run LIMIT 1").fetchone()
        except sqlite3.Error as e:
            raise StoreError(f"likelihood store {self.path}: {e}") from e

    def close(self) -> None:
        with self._guard:
            while self._all:
                self._all.pop().close()
        self._local = threading.local()

    def _trajectories(self, db: sqlite3.Connection, run_id: int, step: int) -> list[TrajectoryRecord]:
        rows = db.execute(
            "SELECT uid, grp, reward, advantage, tool_rounds, actions FROM trajectory WHERE run=? AND step=? ORDER BY uid",
            (run_id, step),
        )
        return [
            TrajectoryRecord.model_construct(uid=u, group=g, reward=r, advantage=a, tool_rounds=n, actions=_unpack_actions(b))
            for u, g, r, a, n, b in rows
        ]

    def _id(self, db: sqlite3.Connection, run: str) -> int:
        row = db.execute("SELECT id FROM run WHERE name=?", (run,)).fetchone()
        if row is None:
            raise UnknownRun(f"run {run[:140]!r}: not in this store")
        return row[0]

    # ---- connections: one a thread

    def _db(self) -> sqlite3.Connection:
        db = getattr(self._local, "db", None)
        if db is None:
            db = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
            with self._guard:
                self._all.append(db)
            for pragma in (
                "journal_mode=WAL",
                "synchronous=FULL",
                "cache_size=-65536",
                "temp_store=MEMORY",
                "mmap_size=1073741824",
            ):
                db.execute(f"PRAGMA {pragma}")
            self._local.db = db
        return db

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            db = self._db()
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as e:
            raise StoreError(f"likelihood store {self.path}: {e}") from e
        try:
            yield db
            db.execute("COMMIT")
        except sqlite3.Error as e:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise StoreError(f"likelihood store {self.path}: {e}; nothing stored") from e
        except BaseException:
            db.execute("ROLLBACK")
            raise


def _pack_actions(actions: list[ActionRecord]) -> bytes:
    return orjson.dumps([(a.tokens, a.logp_before, a.logp_after, a.documents) for a in actions])


def _unpack_actions(body: bytes) -> list[ActionRecord]:
    return [
        ActionRecord.model_construct(tokens=n, logp_before=before, logp_after=after, documents=documents)
        for n, before, after, documents in orjson.loads(body)
    ]
