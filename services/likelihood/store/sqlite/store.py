"""The embedded likelihood store: one SQLite file in WAL mode.

Tables: `step` holds what was posted and what was worked out of it, `trajectory` one row per trajectory with
its actions packed, `chunk` the metric curves (services.likelihood.store.series), `tokens` the npz bodies of
the newest steps, `sample` the trajectories that are kept token by token (samples.py),
`run_facts` what a run says of itself and what people call it (facts.py), `event` what happened (events.py).
Readers never wait for writers.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from services.likelihood.metrics.step_metrics import record_metrics
from services.likelihood.microscope.heads import SampleHead
from services.likelihood.microscope.packing import packed, unpacked, unpacked_head
from services.likelihood.microscope.record import SampledTrajectory
from services.likelihood.monitor.alarms import renamed
from services.likelihood.records import (
    RunInfo,
    StepReceipt,
    StepRecord,
    StoredStep,
    TrajectoryRecord,
    check_run_name,
)
from services.likelihood.store import series
from services.likelihood.store.action_arrays import pack_actions, unpack_trajectory
from services.likelihood.store.base import (
    MAX_RUNS,
    MONITOR_SPACING,
    SAMPLE_STEPS,
    NotStored,
    refuse_overfull,
    superseded_error,
)
from services.likelihood.store.kept_samples import steps_to_drop
from services.likelihood.store.sqlite import facts, samples
from services.likelihood.store.sqlite.events import SQLiteEvents, add_index
from services.likelihood.store.sqlite.file import SQLiteFile
from services.likelihood.store.sqlite.prompts import SQLitePrompts

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE run (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, created REAL NOT NULL, updated REAL NOT NULL);
CREATE TABLE attempt (
    run INTEGER, attempt INTEGER, first_step INTEGER, PRIMARY KEY (run, attempt)) WITHOUT ROWID;
CREATE TABLE step (
    run INTEGER, step INTEGER, attempt INTEGER, policy_version INTEGER, time REAL, posted BLOB, derived BLOB,
    trajectories INTEGER, PRIMARY KEY (run, step)) WITHOUT ROWID;
CREATE TABLE trajectory (
    run INTEGER, step INTEGER, uid TEXT, grp TEXT, reward REAL, advantage REAL, tool_rounds INTEGER,
    actions BLOB, is_right INTEGER, PRIMARY KEY (run, step, uid)) WITHOUT ROWID;
CREATE TABLE chunk (run INTEGER, name TEXT, chunk INTEGER, data BLOB, PRIMARY KEY (run, name, chunk));
CREATE TABLE tokens (run INTEGER, step INTEGER, attempt INTEGER, body BLOB, PRIMARY KEY (run, step));
CREATE TABLE monitor (run INTEGER, step INTEGER, state BLOB, PRIMARY KEY (run, step)) WITHOUT ROWID;
CREATE TABLE alarms (run INTEGER PRIMARY KEY, body BLOB);
CREATE TABLE event (
    id INTEGER PRIMARY KEY, run INTEGER, step INTEGER, kind TEXT, text TEXT, data BLOB, time REAL);
CREATE INDEX event_run ON event (run, id);
"""
TABLES_OF_A_RUN = (
    *("attempt", "step", "trajectory", "chunk", "tokens", "monitor", "alarms", "event"),
    *samples.TABLES,
    facts.TABLE,
)


class SQLiteStore(facts.SQLiteFacts, SQLiteEvents, SQLitePrompts):
    """See LikelihoodStore. `path` is made, with its folder, if it is not there."""

    def __init__(self, path: str | Path, token_steps: int = 8, sample_steps: int = SAMPLE_STEPS):
        self.path = Path(path)
        self.token_steps = token_steps
        self.sample_steps = sample_steps
        self._file = SQLiteFile(self.path, SCHEMA, SCHEMA_VERSION)
        if self._file.may_write:
            self._add_later_columns()

    def _add_later_columns(self) -> None:
        """A file of an earlier day lacks columns that the same schema version has gained since."""
        with self._file.writing() as db:
            columns = {row[1] for row in db.execute("PRAGMA table_info(trajectory)")}
            if "is_right" not in columns:
                db.execute("ALTER TABLE trajectory ADD COLUMN is_right INTEGER")
            samples.add_tables(db)
            facts.add_table(db)
            add_index(db)

    # ---- writing

    def put_step(self, run: str, record: StepRecord) -> StepReceipt:
        packed = [
            (t.uid, t.group, t.reward, t.advantage, t.tool_rounds, pack_actions(t.actions), t.right)
            for t in record.trajectories
        ]
        derived = record_metrics(record.trajectories)  # both before the lock is taken
        with self._file.writing() as db:
            run_id, superseded = self._enter(db, run, record.step, record.attempt)
            key = (run_id, record.step)
            old = db.execute("SELECT posted, policy_version FROM step WHERE run=? AND step=?", key).fetchone()
            if old:
                self._refuse_overfull(db, run, key, packed)
            before = db.total_changes
            db.executemany(
                # IGNORE: a client that got no answer posts the same once more.
                "INSERT OR IGNORE INTO trajectory "
                "(run, step, uid, grp, reward, advantage, tool_rounds, actions, is_right) "
                "VALUES (?,?,?,?,?,?,?,?,?)",
                [(*key, *row) for row in packed],
            )
            stored = db.total_changes - before
            count = len(packed)
            # Posted before, in part or as a whole: the metrics are those of all its trajectories.
            if old or stored < len(packed):
                everything = self._trajectories(db, *key)
                derived = record_metrics(everything)
                count = len(everything)
            posted = {**(orjson.loads(old[0]) if old else {}), **record.metrics}
            version = (
                record.policy_version if record.policy_version is not None else (old[1] if old else None)
            )
            db.execute(
                "INSERT OR REPLACE INTO step "
                "(run, step, attempt, policy_version, time, posted, derived, trajectories) "
                "VALUES (?,?,?,?,?,?,?,?)",
                (
                    *key,
                    record.attempt,
                    version,
                    time.time(),
                    orjson.dumps(posted),
                    orjson.dumps(derived),
                    count,
                ),
            )
            self._set_values(db, run_id, record.step, {**derived, **posted})
        return StepReceipt(
            run=run, step=record.step, attempt=record.attempt, stored=stored, superseded=superseded
        )

    def put_tokens(self, run: str, step: int, attempt: int, body: bytes) -> None:
        with self._file.writing() as db:
            run_id, _ = self._enter(db, run, step, attempt)
            db.execute(
                "INSERT OR REPLACE INTO tokens (run, step, attempt, body) VALUES (?,?,?,?)",
                (run_id, step, attempt, body),
            )
            db.execute(
                "DELETE FROM tokens WHERE run=? AND step NOT IN "
                "(SELECT step FROM tokens WHERE run=? ORDER BY step DESC LIMIT ?)",
                (run_id, run_id, self.token_steps),
            )

    def put_samples(self, run: str, step: int, attempt: int, trajectories: list[SampledTrajectory]) -> int:
        rows = [packed(trajectory) for trajectory in trajectories]  # before the lock is taken
        with self._file.writing() as db:
            run_id, _ = self._enter(db, run, step, attempt)
            new = samples.insert(db, run, run_id, step, attempt, rows)
            gone = steps_to_drop(samples.steps(db, run_id), self.sample_steps, self._alarms(db, run_id))
            samples.drop(db, run_id, gone)
        return new

    def save_monitor(
        self, run: str, step: int, state: dict[str, Any], alarms: list[dict], phases: Mapping[int, int]
    ) -> None:
        with self._file.writing() as db:
            run_id = self._id(db, run)
            db.execute(
                # Spaced states stay, for an attempt that goes back.
                "DELETE FROM monitor WHERE run=? AND (step % ? != 0 OR step > ?)",
                (run_id, MONITOR_SPACING, step),
            )
            db.execute(
                "INSERT OR REPLACE INTO monitor (run, step, state) VALUES (?,?,?)",
                (run_id, step, orjson.dumps(state)),
            )
            db.execute(
                "INSERT OR REPLACE INTO alarms (run, body) VALUES (?,?)", (run_id, orjson.dumps(alarms))
            )
            for at, code in phases.items():
                self._set_values(db, run_id, at, {"phase": float(code)})

    def delete_trajectories(self, run: str, below: int) -> int:
        with self._file.writing() as db:
            run_id = self._id(db, run)
            samples.drop(db, run_id, [s for s in samples.steps(db, run_id) if s < below])
            return db.execute("DELETE FROM trajectory WHERE run=? AND step<?", (run_id, below)).rowcount

    def delete_run(self, run: str) -> None:
        with self._file.writing() as db:
            run_id = self._id(db, run)
            for table in TABLES_OF_A_RUN:
                db.execute(f"DELETE FROM {table} WHERE run=?", (run_id,))
            db.execute("DELETE FROM run WHERE id=?", (run_id,))

    def compact(self) -> None:
        with self._file.reading() as db:
            # Through `reading`: SQLite refuses it inside a transaction.
            db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _touch(self, db: sqlite3.Connection, run: str) -> int:
        """The run's id; made if new."""
        check_run_name(run)
        now = time.time()
        db.execute(
            "INSERT INTO run (name, created, updated) VALUES (?,?,?) "
            "ON CONFLICT (name) DO UPDATE SET updated=excluded.updated",
            (run, now, now),
        )
        return self._id(db, run)

    def _enter(self, db: sqlite3.Connection, run: str, step: int, attempt: int) -> tuple[int, int]:
        """The run's id (made if new) and how many steps of lower attempts went. Raises `superseded_error`."""
        run_id = self._touch(db, run)
        later = db.execute(
            "SELECT attempt, first_step FROM attempt WHERE run=? AND attempt>? AND first_step<=? "
            "ORDER BY attempt DESC",
            (run_id, attempt, step),
        ).fetchone()
        if later:
            raise superseded_error(run, step, attempt, *later)
        db.execute(
            "INSERT INTO attempt (run, attempt, first_step) VALUES (?,?,?) "
            # Steps may come in any order: an attempt reaches back to its lowest.
            "ON CONFLICT (run, attempt) DO UPDATE SET first_step=min(first_step, excluded.first_step)",
            (run_id, attempt, step),
        )
        # Steps of earlier attempts from here on are of a course that the run has left.
        lower = "run=? AND step>=? AND attempt<?", (run_id, step, attempt)
        gone = [row[0] for row in db.execute(f"SELECT step FROM step WHERE {lower[0]}", lower[1])]
        if gone:
            db.execute(f"DELETE FROM step WHERE {lower[0]}", lower[1])
            db.executemany("DELETE FROM trajectory WHERE run=? AND step=?", [(run_id, s) for s in gone])
            self._clear_values(db, run_id, gone)
            db.execute("DELETE FROM monitor WHERE run=? AND step>=?", (run_id, step))
        db.execute(f"DELETE FROM tokens WHERE {lower[0]}", lower[1])
        samples.drop_superseded(db, *lower[1])
        return run_id, len(gone)

    def _set_values(
        self, db: sqlite3.Connection, run_id: int, step: int, values: Mapping[str, float | None]
    ) -> None:
        chunk, position = series.place(step)
        held = db.execute(
            "SELECT name, data FROM chunk WHERE run=? AND chunk=? "
            "AND name IN (SELECT value FROM json_each(?))",
            (run_id, chunk, orjson.dumps(list(values)).decode()),
        )
        known = dict(held.fetchall())
        db.executemany(
            "INSERT INTO chunk (run, name, chunk, data) VALUES (?,?,?,?) "
            "ON CONFLICT (run, name, chunk) DO UPDATE SET data=excluded.data",
            [
                (run_id, name, chunk, series.patched(known.get(name), position, value))
                for name, value in values.items()
            ],
        )

    def _clear_values(self, db: sqlite3.Connection, run_id: int, steps: list[int]) -> None:
        at: dict[int, list[int]] = {}
        for step in steps:
            chunk, position = series.place(step)
            at.setdefault(chunk, []).append(position)
        for chunk, positions in at.items():
            held = db.execute(
                "SELECT name, data FROM chunk WHERE run=? AND chunk=?", (run_id, chunk)
            ).fetchall()
            db.executemany(
                "UPDATE chunk SET data=? WHERE run=? AND name=? AND chunk=?",
                [(series.cleared(data, positions), run_id, name, chunk) for name, data in held],
            )

    @staticmethod
    def _refuse_overfull(db: sqlite3.Connection, run: str, key: tuple[int, int], packed: list[tuple]) -> None:
        held, size = db.execute(
            "SELECT count(*), coalesce(sum(length(actions)), 0) FROM trajectory WHERE run=? AND step=?", key
        ).fetchone()
        given = sum(len(actions) for *_, actions, _right in packed)
        refuse_overfull(run, key[1], held + len(packed), size + given)

    # ---- reading

    def get_tokens(self, run: str, step: int) -> bytes | None:
        with self._file.reading() as db:
            row = db.execute(
                "SELECT body FROM tokens WHERE run=? AND step=?", (self._id(db, run), step)
            ).fetchone()
        return row[0] if row else None

    def runs(self, limit: int = MAX_RUNS) -> list[RunInfo]:
        with self._file.reading() as db:
            names = [
                row[0] for row in db.execute("SELECT name FROM run ORDER BY updated DESC LIMIT ?", (limit,))
            ]
        return [self.info(name) for name in names]

    def info(self, run: str) -> RunInfo:
        with self._file.reading() as db:
            run_id = self._id(db, run)
            created, updated = db.execute("SELECT created, updated FROM run WHERE id=?", (run_id,)).fetchone()
            attempt = db.execute("SELECT max(attempt) FROM attempt WHERE run=?", (run_id,)).fetchone()[0]
            first, last, count, trajectories = db.execute(
                "SELECT min(step), max(step), count(*), coalesce(sum(trajectories), 0) FROM step WHERE run=?",
                (run_id,),
            ).fetchone()
            labels = facts.held(db, run_id, "labels")
        return RunInfo(
            run=run, created=created, updated=updated, attempt=attempt or 0,
            first_step=first, last_step=last, steps=count, trajectories=trajectories, **labels,
        )  # fmt: skip

    def metric_names(self, run: str) -> list[str]:
        with self._file.reading() as db:
            # one step along the index for each name, not one for each chunk
            rows = db.execute(
                "WITH RECURSIVE n(name) AS (SELECT min(name) FROM chunk WHERE run=:run UNION ALL "
                "SELECT (SELECT min(name) FROM chunk WHERE run=:run AND name>n.name) "
                "FROM n WHERE n.name IS NOT NULL) "
                "SELECT name FROM n WHERE name IS NOT NULL",
                {"run": self._id(db, run)},
            ).fetchall()
        return [row[0] for row in rows]

    def columns(self, run: str, names: Iterable[str], first: int, last: int) -> dict[str, np.ndarray]:
        (low, _), (high, _), out = series.place(first), series.place(max(first, last)), {}
        with self._file.reading() as db:
            run_id = self._id(db, run)
            for name in names:
                chunks = db.execute(
                    "SELECT chunk, data FROM chunk WHERE run=? AND name=? AND chunk BETWEEN ? AND ?",
                    (run_id, name, low, high),
                )
                column = series.dense(chunks, first, last)
                if not np.isnan(column).all():
                    out[name] = column
        return out

    def curve(self, run: str, name: str, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        with self._file.reading() as db:
            chunks = db.execute(
                "SELECT chunk, data FROM chunk WHERE run=? AND name=? AND chunk BETWEEN ? AND ? "
                "ORDER BY chunk",
                (self._id(db, run), name, series.place(first)[0], series.place(max(first, last))[0]),
            ).fetchall()
        return series.stored(chunks, first, last)

    def steps(self, run: str, first: int, last: int, limit: int = 1000) -> list[StoredStep]:
        with self._file.reading() as db:
            rows = db.execute(
                "SELECT step, attempt, policy_version, time, posted, derived, trajectories FROM step "
                "WHERE run=? AND step BETWEEN ? AND ? ORDER BY step LIMIT ?",
                (self._id(db, run), first, last, limit),
            ).fetchall()
        return [
            StoredStep(
                step=s,
                attempt=a,
                policy_version=v,
                time=t,
                metrics={**orjson.loads(d), **orjson.loads(p)},
                trajectories=n,
            )
            for s, a, v, t, p, d, n in rows
        ]

    def trajectories(self, run: str, step: int) -> list[TrajectoryRecord]:
        with self._file.reading() as db:
            return self._trajectories(db, self._id(db, run), step)

    def trajectory_counts(self, run: str, step: int) -> tuple[int, int]:
        with self._file.reading() as db:
            count, groups = db.execute(
                "SELECT count(*), count(DISTINCT grp) FROM trajectory WHERE run=? AND step=?",
                (self._id(db, run), step),
            ).fetchone()
        return count, groups

    def sample_heads(self, run: str, step: int) -> list[SampleHead]:
        with self._file.reading() as db:
            return [unpacked_head(head) for head in samples.heads(db, self._id(db, run), step)]

    def samples(self, run: str, step: int, group: str | None = None) -> list[SampledTrajectory]:
        with self._file.reading() as db:
            return [unpacked(body) for body in samples.bodies(db, self._id(db, run), step, group)]

    def sampled_steps(self, run: str) -> dict[int, int]:
        with self._file.reading() as db:
            return samples.steps(db, self._id(db, run))

    def load_monitor(self, run: str, before: int) -> tuple[int, dict[str, Any]] | None:
        with self._file.reading() as db:
            row = db.execute(
                "SELECT step, state FROM monitor WHERE run=? AND step<? ORDER BY step DESC LIMIT 1",
                (self._id(db, run), before),
            ).fetchone()
            return (row[0], orjson.loads(row[1])) if row else None

    def alarms(self, run: str) -> list[dict]:
        with self._file.reading() as db:
            return self._alarms(db, self._id(db, run))

    def ping(self) -> None:
        with self._file.reading() as db:
            db.execute("SELECT 1 FROM run LIMIT 1").fetchone()

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def _alarms(db: sqlite3.Connection, run_id: int) -> list[dict]:
        row = db.execute("SELECT body FROM alarms WHERE run=?", (run_id,)).fetchone()
        return [renamed(alarm) for alarm in orjson.loads(row[0])] if row else []

    @staticmethod
    def _trajectories(db: sqlite3.Connection, run_id: int, step: int) -> list[TrajectoryRecord]:
        rows = db.execute(
            "SELECT uid, grp, reward, advantage, tool_rounds, actions, is_right FROM trajectory "
            "WHERE run=? AND step=? ORDER BY uid",
            (run_id, step),
        )
        return [unpack_trajectory(*row) for row in rows]

    @staticmethod
    def _id(db: sqlite3.Connection, run: str) -> int:
        row = db.execute("SELECT id FROM run WHERE name=?", (run,)).fetchone()
        if row is None:
            raise NotStored(f"run {run[:140]!r}: not in this store")
        return row[0]
