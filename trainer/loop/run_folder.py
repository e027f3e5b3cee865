"""A run's folder: `config.yaml metrics.jsonl events.jsonl trajectories/ checkpoints/ summary.json`.

Lines are appended whole and flushed; after a kill the file may end in a torn line, which a resumed run cuts off.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from services.contracts import Action, Trajectory
from trainer.config.schema import Config, ConfigError, dump_config


def finite_or_none(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Within, an error says which file could not be written: Python's own says so where a file is opened, not where the disk is full."""
    try:
        yield path
    except OSError as e:
        e.filename = e.filename or str(path)
        raise


class RunFolder:
    """Owner of one run's files. Only one process may hold a folder at a time."""

    def __init__(self, config: Config) -> None:
        self.path = config.run_dir
        self.config = config
        self._lock: TextIO | None = None

    def open(self, *, resume: bool) -> None:
        """Take the folder. Raises ConfigError where another run holds it, or where it is used and `resume` is not asked for."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"run.dir: cannot make {self.path}: {e.strerror}") from e
        self._lock = open(self.path / ".lock", "a")  # noqa: SIM115  (held until close)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ConfigError(
                f"run.name: {self.path} is in use by another running process; choose another run.name"
            ) from e
        if not resume and self.metrics_path.exists() and self.metrics_path.stat().st_size:
            raise ConfigError(
                f"run.name: {self.path} holds a run already; choose another run.name, or go on with it by --resume latest"
            )
        self._keep_lines(self.path / "events.jsonl", lambda event: True)
        with written(self.path / "config.yaml") as file:
            file.write_text(dump_config(self.config, secrets=False), encoding="utf-8")

    def close(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def metrics(self, metrics: dict[str, Any]) -> None:
        """Append one step."""
        self._append("metrics.jsonl", {k: finite_or_none(v) for k, v in metrics.items()})

    def event(self, event: str, **fields: Any) -> None:
        """Append to events.jsonl: alarms, worker joins and losses, retries, checkpoints."""
        self._append(
            "events.jsonl",
            {"time": round(time.time(), 3), "event": event}
            | {k: finite_or_none(v) for k, v in fields.items()},
        )

    def summary(self, summary: dict[str, Any]) -> None:
        target = self.path / "summary.json"
        with written(target.with_suffix(".tmp")) as aside:
            aside.write_text(
                json.dumps({k: finite_or_none(v) for k, v in summary.items()}, indent=1) + "\n",
                encoding="utf-8",
            )
        os.replace(aside, target)

    def trajectories(self, step: int | str, trajectories: list[Trajectory], rewards: list[float]) -> None:
        """One JSON object a trajectory, in words, for people to read: `step_000001.jsonl`, or `NAME.jsonl` of an evaluation."""
        folder = self.path / "trajectories"
        folder.mkdir(exist_ok=True)
        name = step if isinstance(step, str) else f"step_{step:06d}"
        aside = folder / f".{name}.tmp"
        with written(aside), open(aside, "w", encoding="utf-8") as f:
            for t, reward in zip(trajectories, rewards, strict=True):
                segments = [
                    {
                        "by": "model",
                        "kind": s.kind,
                        "text": s.text,
                        "policy_version": s.policy_version,
                        "documents": s.document_ids,
                    }
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
                    "reward": finite_or_none(float(reward)),
                    "finish": t.finish,
                    "worker": t.worker,
                    "segments": segments,
                }
                f.write(json.dumps(record, ensure_ascii=False) + "\n")
        os.replace(aside, folder / f"{name}.jsonl")

    def begun(self) -> bool:
        """Whether a run was here before."""
        return any((self.path / name).exists() for name in ("metrics.jsonl", "events.jsonl"))

    def last_step(self) -> int:
        """The last step that was recorded whole, 0 without any."""
        lines = (
            self.metrics_path.read_text(encoding="utf-8", errors="replace")
            if self.metrics_path.exists()
            else ""
        )
        return max((int(n) for n in re.findall(r'^\{"step": (\d+)\b.*\}$', lines, re.MULTILINE)), default=0)

    def last_attempt(self) -> int:
        """The highest attempt that was begun in this folder: one that was killed before its first checkpoint counts too."""
        attempts = [0]
        if (self.path / "events.jsonl").exists():
            for line in (
                (self.path / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
            ):
                if '"event": "resume"' in line and (found := re.search(r'"attempt": (\d+)', line)):
                    attempts.append(int(found[1]))
        return max(attempts)

    def cut_after(self, step: int) -> None:
        """Forget the metrics and trajectories of later steps, and torn lines: a resumed run writes them anew."""
        self._keep_lines(self.metrics_path, lambda metrics: metrics["step"] <= step)
        for file in self.path.glob("trajectories/step_*.jsonl"):
            if int(file.stem.removeprefix("step_")) > step:
                file.unlink()

    @staticmethod
    def _keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Write the file anew with the wanted lines alone; those torn by a kill go too."""
        if not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                if wanted(json.loads(line)):
                    kept.append(line)
            except (json.JSONDecodeError, KeyError):
                continue
        with written(path.with_suffix(".tmp")) as aside:
            aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(aside, path)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False) + "\n"
        with written(self.path / name) as path, open(path, "ab") as f:
            if f.tell() and not self._ends_in_newline(name):
                line = "\n" + line  # an earlier writer was killed inside its line
            f.write(line.encode())

    def _ends_in_newline(self, name: str) -> bool:
        with open(self.path / name, "rb") as f:
            f.seek(-1, os.SEEK_END)
            return f.read(1) == b"\n"
