"""Which prompts the sampled trajectories of a step answer, in the SQLite store: one row per group."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod

from services.likelihood.microscope.packing import PackedSample, prompt_groups
from services.likelihood.microscope.prompts import MAX_PROMPT, MOST_PROMPTS, KeptPrompt
from services.likelihood.store.sqlite_file import SQLiteFile

TABLE = "sample_prompt"
SCHEMA = f"""
CREATE TABLE {TABLE} (run INTEGER, step INTEGER, prompt TEXT, grp TEXT, probe INTEGER,
    PRIMARY KEY (run, step, prompt, grp, probe)) WITHOUT ROWID
"""
# As prompt_of names them, from the heads.
EARLIER = f"""
INSERT OR IGNORE INTO {TABLE}
SELECT run, step, substr(coalesce(nullif(json_extract(CAST(head AS TEXT), '$.question'), ''), grp),
    1, {MAX_PROMPT}), grp, 0 FROM sample
"""


def add_table(db: sqlite3.Connection) -> None:
    """Make the table in a file that has none, and fill it from the trajectories that the file holds."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name=?", (TABLE,)).fetchone():
        db.execute(SCHEMA)
        db.execute(EARLIER)


def insert(db: sqlite3.Connection, run_id: int, step: int, rows: list[PackedSample]) -> None:
    """Note the prompts of a step's trajectories."""
    db.executemany(
        f"INSERT OR IGNORE INTO {TABLE} VALUES (?,?,?,?,?)",
        [(run_id, step, *found) for found in prompt_groups(rows)],
    )


class SQLitePrompts(ABC):
    """The part of the SQLite store that finds the prompts of sampled trajectories."""

    _file: SQLiteFile

    @abstractmethod
    def _id(self, db: sqlite3.Connection, run: str) -> int: ...

    def prompts(self, run: str, limit: int = MOST_PROMPTS) -> list[KeptPrompt]:
        """See LikelihoodStore."""
        query = (
            "SELECT prompt, count(DISTINCT step) AS steps, min(step), max(step) AS last, max(probe) AS probe "
            f"FROM {TABLE} WHERE run=? GROUP BY prompt "
            "ORDER BY probe DESC, steps DESC, last DESC, prompt LIMIT ?"
        )
        with self._file.reading() as db:
            rows = db.execute(query, (self._id(db, run), limit)).fetchall()
        return [
            KeptPrompt(prompt=prompt, steps=steps, first=first, last=last, probe=bool(probe))
            for prompt, steps, first, last, probe in rows
        ]

    def prompt_groups(self, run: str, prompt: str) -> dict[int, list[str]]:
        """See LikelihoodStore."""
        query = (
            f"SELECT step, grp FROM {TABLE} WHERE run=? AND prompt=? "
            "AND step IN (SELECT step FROM sample_step WHERE run=?) ORDER BY step, grp"
        )
        found: dict[int, list[str]] = {}
        with self._file.reading() as db:
            run_id = self._id(db, run)
            for step, group in db.execute(query, (run_id, prompt, run_id)):
                found.setdefault(step, []).append(group)
        return found
