"""Upkeep of a store: forgetting old trajectories and runs, and writing a run out as Parquet."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from services.common.errors import UserError
from services.common.users_files import writing
from services.likelihood.evaluations import scored_steps
from services.likelihood.exports.mirrors import Mirror
from services.likelihood.microscope.record import Observed, Written
from services.likelihood.monitor.alarms import PHASES
from services.likelihood.store.base import LikelihoodStore

if TYPE_CHECKING:
    import pyarrow as pa

DAY = 86_400


def actions_schema() -> pa.Schema:
    """Columns of `RUN-actions.parquet`."""
    import pyarrow as pa

    return pa.schema(
        [
            ("step", pa.int64()),
            ("uid", pa.string()),
            ("group", pa.string()),
            ("reward", pa.float64()),
            ("advantage", pa.float64()),
            ("tool_rounds", pa.int32()),
            ("action", pa.int32()),
            ("tokens", pa.int32()),
            ("logp_before", pa.float64()),
            ("logp_after", pa.float64()),
            ("documents", pa.list_(pa.string())),
        ]
    )


def samples_schema() -> pa.Schema:
    """Columns of `RUN-samples.parquet`: one row per segment of a trajectory that is kept token by token."""
    import pyarrow as pa

    words = pa.list_(pa.string())
    nats = pa.list_(pa.float32())
    return pa.schema(
        [
            ("step", pa.int64()),
            ("uid", pa.string()),
            ("group", pa.string()),
            ("reward", pa.float64()),
            ("advantage", pa.float64()),
            ("right", pa.bool_()),
            ("segment", pa.int32()),
            ("by", pa.string()),
            ("kind", pa.string()),
            ("text", pa.string()),
            ("tokens", words),
            ("logp_before", nats),
            ("logp_after", nats),
            ("held", pa.list_(pa.int32())),
            ("documents", words),
        ]
    )


def prune(
    store: LikelihoodStore,
    runs: list[str],
    *,
    keep_steps: int | None = None,
    older_than_days: float | None = None,
) -> dict[str, int]:
    """Forget trajectories of all but the last `keep_steps` steps of each run, and whole runs that were last
    posted to `older_than_days` ago. Curves and metrics of the runs that stay are kept for ever. Returns
    `{"runs", "trajectories"}` that went."""
    gone = {"runs": 0, "trajectories": 0}
    for run in runs:
        info = store.info(run)
        if older_than_days is not None and info.updated < time.time() - older_than_days * DAY:
            store.delete_run(run)
            gone["runs"] += 1
        elif keep_steps is not None and info.last_step is not None:
            gone["trajectories"] += store.delete_trajectories(run, max(0, info.last_step - keep_steps + 1))
    if any(gone.values()):
        store.compact()
    return gone


def export_parquet(store: LikelihoodStore, run: str, folder: Path) -> list[Path]:
    """Write `RUN-steps.parquet` (one row per step, one column per metric), `RUN-actions.parquet` (one row per
    action), `RUN-samples.parquet` where trajectories are kept token by token, and `RUN-about.json`: what the
    run says of itself, its title, its tags and whether it is hidden. Raises EnvironmentLacks
    where the folder cannot be written."""
    import pyarrow.parquet as pq  # a quarter of a second that no other command needs

    info = store.info(run)
    if info.last_step is None:
        raise UserError(f"run {run}: no steps in the store")
    steps = folder / f"{run}-steps.parquet"
    actions = folder / f"{run}-actions.parquet"
    samples = folder / f"{run}-samples.parquet"
    about = folder / f"{run}-about.json"
    said = store.about(run) | info.model_dump(include={"run", "title", "tags", "hidden"})
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(_steps_table(store, run), steps)
        with pq.ParquetWriter(actions, actions_schema()) as out:
            for stored in scored_steps(store, run):
                if stored.trajectories:
                    out.write_table(_actions_table(store, run, stored.step))
        if sampled := store.sampled_steps(run):
            with pq.ParquetWriter(samples, samples_schema()) as out:
                for step in sampled:
                    out.write_table(_samples_table(store, run, step))
        about.write_bytes(orjson.dumps(said, option=orjson.OPT_INDENT_2))
    return [steps, actions, *([samples] if sampled else []), about]


def export_to(store: LikelihoodStore, run: str, mirror: Mirror) -> int:
    """Give every stored step to a tracker, with the held-out scores that are shown at it. How many."""
    count = 0
    phases = _phases(store, run)
    for stored in scored_steps(store, run):
        mirror.step(run, stored.step, stored.time, stored.metrics, phases.get(stored.step))
        count += 1
    mirror.close()
    return count


def _phases(store: LikelihoodStore, run: str) -> dict[int, str]:
    info = store.info(run)
    if info.first_step is None or info.last_step is None:
        return {}
    codes = store.columns(run, ["phase"], info.first_step, info.last_step).get("phase", np.zeros(0))
    return {info.first_step + i: PHASES[int(c)] for i, c in enumerate(codes) if not np.isnan(c)}


def _steps_table(store: LikelihoodStore, run: str) -> pa.Table:
    import pyarrow as pa

    stored = list(scored_steps(store, run))
    phases = _phases(store, run)
    names = sorted({name for s in stored for name in s.metrics})
    columns = {
        "step": pa.array([s.step for s in stored], pa.int64()),
        "attempt": pa.array([s.attempt for s in stored], pa.int64()),
        "policy_version": pa.array([s.policy_version for s in stored], pa.int64()),
        "time": pa.array([s.time for s in stored], pa.float64()),
        "trajectories": pa.array([s.trajectories for s in stored], pa.int64()),
        "phase": pa.array([phases.get(s.step) for s in stored], pa.string()),
    }
    taken = set(columns)
    for name in names:
        columns[name if name not in taken else f"metric/{name}"] = pa.array(
            [s.metrics.get(name) for s in stored], pa.float64()
        )
    return pa.table(columns)


def _actions_table(store: LikelihoodStore, run: str, step: int) -> pa.Table:
    import pyarrow as pa

    rows = [
        {
            "step": step,
            "uid": t.uid,
            "group": t.group,
            "reward": t.reward,
            "advantage": t.advantage,
            "tool_rounds": t.tool_rounds,
            "action": k,
            "tokens": a.tokens,
            "logp_before": a.logp_before,
            "logp_after": a.logp_after,
            "documents": a.documents,
        }
        for t in store.trajectories(run, step)
        for k, a in enumerate(t.actions)
    ]
    return pa.Table.from_pylist(rows, schema=actions_schema())


def _samples_table(store: LikelihoodStore, run: str, step: int) -> pa.Table:
    import pyarrow as pa

    rows = [
        {
            "step": step,
            "uid": t.uid,
            "group": t.group,
            "reward": t.reward,
            "advantage": t.advantage,
            "right": t.right,
            "segment": place,
            **_segment(segment),
        }
        for t in store.samples(run, step)
        for place, segment in enumerate(t.segments)
    ]
    return pa.Table.from_pylist(rows, schema=samples_schema())


def _segment(segment: Written | Observed) -> dict[str, Any]:
    if isinstance(segment, Observed):
        return {"by": segment.by, "text": segment.text}
    documents = segment.documents
    return {
        "by": segment.by,
        "kind": segment.kind,
        "text": "".join(segment.tokens),
        "tokens": segment.tokens,
        "logp_before": segment.logp_before,
        "logp_after": segment.logp_after,
        "held": segment.held,
        "documents": None if documents is None else [d.id for d in documents],
    }
