"""Sampled trajectories in the SQLite store: one row per trajectory, its head before its body, so that a list
of heads reads the first page of each row alone."""

from __future__ import annotations

import sqlite3

from services.likelihood.microscope.packing import PackedSample, refuse_overfull
from services.likelihood.store.sqlite import prompts as sqlite_prompts

SCHEMA = """
CREATE TABLE IF NOT EXISTS sample_step (
    run INTEGER, step INTEGER, attempt INTEGER, trajectories INTEGER, bytes INTEGER,
    PRIMARY KEY (run, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sample (
    id INTEGER PRIMARY KEY, run INTEGER, step INTEGER, uid TEXT, grp TEXT, head BLOB, body BLOB);
CREATE UNIQUE INDEX IF NOT EXISTS sample_uid ON sample (run, step, uid);
"""
TABLES = ("sample_step", "sample", sqlite_prompts.TABLE)


def add_tables(db: sqlite3.Connection) -> None:
    """Make the tables in a file that has none."""
    for statement in filter(str.strip, SCHEMA.split(";")):
        db.execute(statement)
    sqlite_prompts.add_table(db)


def insert(
    db: sqlite3.Connection, run: str, run_id: int, step: int, attempt: int, rows: list[PackedSample]
) -> int:
    """Add trajectories to a step; those that it holds stay as they are. How many were new. Raises UserError
    for a step that would hold too much."""
    key = (run_id, step)
    place = "run=? AND step=?"
    found = db.execute(f"SELECT trajectories, bytes FROM sample_step WHERE {place}", key).fetchone()
    count, size = found or (0, 0)
    refuse_overfull(run, step, count + len(rows), size + sum(row.size for row in rows))
    new = 0
    for row in rows:
        new += db.execute(
            "INSERT OR IGNORE INTO sample (run, step, uid, grp, head, body) VALUES (?,?,?,?,?,?)",
            (*key, row.uid, row.group, row.head, row.body),
        ).rowcount
    sqlite_prompts.insert(db, run_id, step, rows)
    count, size = db.execute(
        f"SELECT count(*), coalesce(sum(length(head) + length(body)), 0) FROM sample WHERE {place}", key
    ).fetchone()
    db.execute("INSERT OR REPLACE INTO sample_step VALUES (?,?,?,?,?)", (*key, attempt, count, size))
    return new


def steps(db: sqlite3.Connection, run_id: int) -> dict[int, int]:
    """Number of trajectories by step, in order."""
    rows = db.execute("SELECT step, trajectories FROM sample_step WHERE run=? ORDER BY step", (run_id,))
    return dict(rows.fetchall())


def heads(db: sqlite3.Connection, run_id: int, step: int) -> list[bytes]:
    """Heads of a step's trajectories, by uid."""
    rows = db.execute("SELECT head FROM sample WHERE run=? AND step=? ORDER BY uid", (run_id, step))
    return [row[0] for row in rows]


def bodies(db: sqlite3.Connection, run_id: int, step: int, group: str | None) -> list[bytes]:
    """Bodies of a step's trajectories, or of one group's, by uid."""
    only = "" if group is None else "AND grp=?"
    values = (run_id, step) if group is None else (run_id, step, group)
    rows = db.execute(f"SELECT body FROM sample WHERE run=? AND step=? {only} ORDER BY uid", values)
    return [row[0] for row in rows]


def drop(db: sqlite3.Connection, run_id: int, gone: list[int]) -> None:
    """Forget the trajectories of some steps."""
    for table in TABLES:
        db.executemany(f"DELETE FROM {table} WHERE run=? AND step=?", [(run_id, step) for step in gone])


def drop_superseded(db: sqlite3.Connection, run_id: int, step: int, attempt: int) -> None:
    """Forget those of lower attempts, from a step on."""
    found = db.execute(
        "SELECT step FROM sample_step WHERE run=? AND step>=? AND attempt<?", (run_id, step, attempt)
    )
    drop(db, run_id, [row[0] for row in found.fetchall()])
