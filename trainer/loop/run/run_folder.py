"""A run's folder: `config.yaml metrics.jsonl events.jsonl trajectories/ spans/ checkpoints/ summary.json`.

Lines are appended whole and flushed; after a kill the file may end in a torn line, which a resumed run cuts
off.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from services.common.errors import UserError
from services.common.files import (
    append_json,
    hints,
    json_lines,
    keep_json_lines,
    lock,
    write_atomically,
    write_json,
    written_aside,
)
from services.common.runs.paths import CONFIG, EVENTS, LOCK, METRICS, SUMMARY, TRAJECTORIES, last_step
from services.common.users_files import make_folder
from services.contracts import Action, Trajectory
from trainer.config.schema import Config, dump_config
from trainer.learner.checkpoint import refuse_used
from trainer.loop.run.held_folder import HeldFolder
from trainer.loop.run.spans import spans_file, steps_with_spans
from trainer.rewards.answers import final_answer


def finite_or_none(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class RunFolder:
    """Owner of one run's files. Only one process may hold a folder at a time."""

    def __init__(self, config: Config) -> None:
        self.path = config.run_dir
        self.config = config
        self.earlier_seconds = 0.0
        """What the run took before this process, in all its parts."""
        self.lost = ""
        """Why the run cannot stay in its folder, and how to go on; empty while all is well."""
        self._lock: TextIO | None = None
        self._held: HeldFolder | None = None
        self._holding = threading.Lock()
        self._made = False

    def open(self, *, resume: bool) -> None:
        """Take the folder. Raises UserError where another run holds it, or where it is used and `resume` is
        not asked for."""
        self._made = not self.path.exists()
        make_folder(self.path, f"run.dir: {self.path}")
        self._take()
        if not resume:
            refuse_used(self.path)
        keep_json_lines(self.path / EVENTS, lambda event: True)
        self.earlier_seconds = self._seconds_so_far()
        write_atomically(self.path / CONFIG, dump_config(self.config, secrets=False))
        (self.path / SUMMARY).unlink(missing_ok=True)  # the end of an earlier attempt

    def _take(self) -> None:
        """Lock the folder. Raises UserError where another process holds it."""
        taken = f"run.name: {self.path} is in use by another running process"
        way = "; choose another run.name"
        self._lock = lock(self.path / LOCK, lambda holder: UserError(taken + holder + way))
        self._held = HeldFolder(self.path)

    def hold(self) -> str:
        """Look after the folder before something is written: follow one that was moved, and make one anew
        that was removed, so that what the run has in hand is not lost. Returns `lost`; the run is to end
        soon then.

        Raises EnvironmentLacks where another folder has its name, which may be another run's."""
        with self._holding:  # a step is written from threads
            return self._hold()

    def _hold(self) -> str:
        place = self._held.moved_to() if self._held else None
        if place is None:
            if self._held and self._lock and not (self.path / LOCK).exists():  # somebody tidied up
                self.close()
                self._take()
            return self.lost
        before = self.path
        self.close()
        if place == before:
            make_folder(before, f"run.dir: {before}")
            self.lost = (
                f"{before}: removed while the run went on; made anew with what it had in hand: "
                "go on with --resume latest"
            )
        else:
            self.path = place
            self.lost = (
                f"{before}: moved to {place} while the run went on; "
                "move it back, and go on with --resume latest"
            )
        self._take()
        write_atomically(self.path / CONFIG, dump_config(self.config, secrets=False))
        return self.lost

    def withdraw(self) -> bool:
        """Remove the folder, still locked, where this process made it and nothing but a run's beginning is in
        it. Returns whether it was removed."""
        begun = {LOCK, CONFIG}
        if not self._made or not self._lock or {file.name for file in self.path.iterdir()} - begun:
            return False
        shutil.rmtree(self.path, ignore_errors=True)
        return not self.path.exists()

    def close(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None
        if self._held:
            self._held.close()
            self._held = None

    @property
    def metrics_path(self) -> Path:
        return self.path / METRICS

    def metrics(self, metrics: dict[str, Any]) -> None:
        """Append one step."""
        self.hold()
        append_json(self.metrics_path, {k: finite_or_none(v) for k, v in metrics.items()})

    def event(self, event: str, **fields: Any) -> None:
        """Append to events.jsonl: alarms, worker joins and losses, retries, checkpoints."""
        self.hold()
        append_json(
            self.path / EVENTS,
            {"time": round(time.time(), 3), "event": event}
            | {k: finite_or_none(v) for k, v in fields.items()},
        )

    def summary(self, summary: dict[str, Any]) -> None:
        self.hold()
        write_json(self.path / SUMMARY, {k: finite_or_none(v) for k, v in summary.items()}, indent=1)

    def trajectories(
        self, step: int | str, trajectories: Sequence[Trajectory], rewards: Sequence[float | None]
    ) -> None:
        """One JSON object per trajectory, in words, for people to read: `step_000001.jsonl`, or `NAME.jsonl`
        of an evaluation. The answer is the one that rewards read."""
        self.hold()
        folder = self.path / TRAJECTORIES
        folder.mkdir(exist_ok=True)
        name = step if isinstance(step, str) else f"step_{step:06d}"
        with written_aside(folder / f"{name}.jsonl") as aside, open(aside, "w", encoding="utf-8") as f:
            for t, reward in zip(trajectories, rewards, strict=True):
                segments = [
                    {
                        "by": "model",
                        "kind": s.kind,
                        "text": s.text,
                        "policy_version": s.policy_version,
                        "documents": s.document_ids,
                    }
                    | ({"tool": s.tool} if s.tool else {})
                    if isinstance(s, Action)
                    else {"by": "environment", "text": s.text}
                    for s in t.segments
                ]
                record = {
                    "uid": t.uid,
                    "group": t.group,
                    "question": t.question.text,
                    "golden_answers": list(t.question.golden_answers),
                    "data_source": t.question.data_source,
                    "reward": finite_or_none(reward),
                    "finish": t.finish,
                    "answer": final_answer(t),
                    "worker": t.worker,
                    "segments": segments,
                }
                f.write(json.dumps(record, ensure_ascii=False) + "\n")

    def begun(self) -> bool:
        """Whether a run was here before."""
        return any((self.path / name).exists() for name in (METRICS, EVENTS))

    def last_step(self) -> int:
        """The last step that was recorded whole, 0 without any."""
        return last_step(self.path)

    def last_attempt(self) -> int:
        """The highest attempt that was begun in this folder: one that was killed before its first checkpoint
        counts too."""
        events = json_lines(self.path / EVENTS)
        return max((event["attempt"] for event in events if event.get("event") == "resume"), default=0)

    def _seconds_so_far(self) -> float:
        """Seconds of all parts so far, by the summary of the last one. One that was killed wrote none: what
        its own steps took then stands for it."""
        told = hints(self.path / SUMMARY).get("seconds")
        if isinstance(told, int | float):
            return float(told)
        begun = [e for e in json_lines(self.path / EVENTS) if e.get("event") == "resume"]
        earlier = begun[-1].get("earlier_seconds", 0.0) if begun else 0.0
        # A part that has lost its learner, or was rolled back, is told once more each time.
        first = min((e["step"] for e in begun if e.get("earlier_seconds", 0.0) == earlier), default=0)
        steps = [m for m in json_lines(self.metrics_path) if m.get("step", 0) > (first if earlier else 0)]
        return float(earlier + sum(m.get("time/step") or 0.0 for m in steps))

    def cut_after(self, step: int) -> None:
        """Forget the metrics and trajectories of later steps, and torn lines: a resumed run writes them
        anew."""
        keep_json_lines(self.metrics_path, lambda metrics: metrics["step"] <= step)
        for file in self.path.glob("trajectories/step_*.jsonl"):
            number = file.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:  # a copy that somebody made is his
                file.unlink()
        for later in steps_with_spans(self.path):
            if later > step:
                spans_file(self.path, later).unlink()
