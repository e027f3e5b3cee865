"""Which prompts the sampled trajectories of a step answer, in the SQLite store: one row per group."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod

from services.likelihood.microscope.packing import PackedSample, prompt_groups, prompt_groups_of
from services.likelihood.microscope.prompts import MOST_PROMPTS, KeptPrompt, PromptGroup
from services.likelihood.store.sqlite.file import SQLiteFile

TABLE = "sample_prompt"
SCHEMA = f"""
CREATE TABLE {TABLE} (run INTEGER, step INTEGER, prompt TEXT, grp TEXT, probe INTEGER,
    PRIMARY KEY (run, step, prompt, grp, probe)) WITHOUT ROWID
"""
KEPT = "step IN (SELECT step FROM sample_step WHERE run=?)"
"""An earlier version may drop a step's trajectories and leave its prompts."""
# Kept by a version that noted no prompts.
UNNOTED = f"""
SELECT run, step FROM sample_step
WHERE NOT EXISTS (SELECT 1 FROM {TABLE} AS t WHERE t.run=sample_step.run AND t.step=sample_step.step)
"""


def add_table(db: sqlite3.Connection) -> None:
    """Make the table in a file that has none, and note the prompts of steps that were kept without."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name=?", (TABLE,)).fetchone():
        db.execute(SCHEMA)
    for run_id, step in db.execute(UNNOTED).fetchall():
        heads = db.execute("SELECT head FROM sample WHERE run=? AND step=?", (run_id, step))
        _insert(db, run_id, step, prompt_groups_of(head for (head,) in heads))


def insert(db: sqlite3.Connection, run_id: int, step: int, rows: list[PackedSample]) -> None:
    """Note the prompts of a step's trajectories."""
    _insert(db, run_id, step, prompt_groups(rows))


def _insert(db: sqlite3.Connection, run_id: int, step: int, found: list[PromptGroup]) -> None:
    db.executemany(
        f"INSERT OR IGNORE INTO {TABLE} VALUES (?,?,?,?,?)", [(run_id, step, *one) for one in found]
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
            f"FROM {TABLE} WHERE run=? AND {KEPT} GROUP BY prompt "
            "ORDER BY probe DESC, steps DESC, last DESC, prompt LIMIT ?"
        )
        with self._file.reading() as db:
            run_id = self._id(db, run)
            rows = db.execute(query, (run_id, run_id, limit)).fetchall()
        return [
            KeptPrompt(prompt=prompt, steps=steps, first=first, last=last, probe=bool(probe))
            for prompt, steps, first, last, probe in rows
        ]

    def prompt_groups(self, run: str, prompt: str) -> dict[int, list[str]]:
        """See LikelihoodStore."""
        query = f"SELECT step, grp FROM {TABLE} WHERE run=? AND prompt=? AND {KEPT} ORDER BY step, grp"
        found: dict[int, list[str]] = {}
        with self._file.reading() as db:
            run_id = self._id(db, run)
            for step, group in db.execute(query, (run_id, prompt, run_id)):
                found.setdefault(step, []).append(group)
        return found
