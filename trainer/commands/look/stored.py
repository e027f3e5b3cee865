"""The trajectories that a run has left: in words in `trajectories/*.jsonl`, all of them, and token by token
in its likelihood store, a sample of each step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.errors import UserError
from services.common.http.addresses import is_http
from services.common.names import nearest
from services.common.runs.paths import CONFIG, STORE, TRAJECTORIES, is_run, no_run_in, run_folder
from services.common.users_files import load_yaml
from services.likelihood.microscope.record import SampledTrajectory, Written
from services.likelihood.store.base import NotStored
from services.likelihood.store.opening import open_store
from services.rollout.worker.tags import last_answer

STEP = "step_"
RIGHT_AT = 1.0


@dataclass(frozen=True)
class Segment:
    """Text that the model or the environment wrote."""

    by: str
    text: str
    kind: str = ""
    """Of an action: search, answer or invalid."""
    documents: list[str] = field(default_factory=list)
    """Ids of the documents that its search returned."""


@dataclass(frozen=True)
class StoredTrajectory:
    """One line of `trajectories/*.jsonl`."""

    source: str
    """The file's name without its ending: `step_000012`, or that of an evaluation."""
    uid: str
    group: str
    question: str
    golden_answers: list[str]
    data_source: str
    reward: float | None
    finish: str
    worker: str
    segments: list[Segment]
    line: str
    """The line itself."""
    read: str | None = None
    """The answer that the reward read; None where there was none, and in files of earlier versions."""

    @property
    def model_text(self) -> str:
        return "".join(s.text for s in self.segments if s.by == "model")

    @property
    def searches(self) -> int:
        return sum(s.kind == "search" for s in self.segments)

    @property
    def invalid(self) -> bool:
        """Whether an action neither searched nor answered."""
        return any(s.kind == "invalid" for s in self.segments)

    @property
    def truncated(self) -> bool:
        return self.finish == "length"

    @property
    def answer(self) -> str:
        """The answer's text; empty without one."""
        if self.read is not None:
            return self.read
        last = self.segments[-1] if self.segments else None
        if last is None or last.kind != "answer":
            return ""
        pair = last_answer(last.text) or last_answer(last.text, "search_r1")
        return pair.content.strip() if pair else last.text.strip()


class Run:
    """The trajectories of a run. `given`: as `run_folder` takes it."""

    def __init__(self, given: str) -> None:
        self.folder = run_folder(given)
        if not (self.folder / TRAJECTORIES).is_dir():
            if not is_run(self.folder):
                raise UserError(f"{given}: {no_run_in(self.folder)}")
            raise UserError(
                f"{given}: no trajectories in {self.folder}; a run writes them with its first step"
            )
        self._config = _yaml(self.folder / CONFIG)

    @property
    def right_at(self) -> float:
        """The least reward of a right answer."""
        given = (self._config.get("reward") or {}).get("right_at")
        return RIGHT_AT if given is None else float(given)

    @staticmethod
    def judge(source: str) -> str:
        """Who says which answers of a file are right. A held-out one's reward is its exact match."""
        return "by the reward" if is_step(source) else "by exact match"

    def is_right(self, t: StoredTrajectory) -> bool:
        at = self.right_at if is_step(t.source) else RIGHT_AT
        return t.reward is not None and t.reward >= at

    def sources(self) -> list[str]:
        """Names of the files, the steps in order and then the evaluations."""
        names = [f.stem for f in (self.folder / TRAJECTORIES).glob("*.jsonl") if f.is_file()]
        return sorted(names, key=lambda name: (not is_step(name), name))

    def source(self, given: str | None) -> str:
        """The file that `given` names: a step's number, or a name; None is the newest step. Raises
        UserError."""
        there = self.sources()
        steps = [name for name in there if is_step(name)]
        if given is None:
            if not there:
                raise UserError(f"{self.folder}: no trajectories are there yet")
            return (steps or there)[-1]
        name = f"{STEP}{int(given):06d}" if given.isdecimal() else given
        if name in there:
            return name
        near = nearest(name, there)
        raise UserError(
            f"{given}: no such trajectories in {self.folder}; {_there(there)}"
            + (f"; did you mean {near}?" if near and not given.isdecimal() else "")
        )

    def read(self, source: str) -> Iterator[StoredTrajectory]:
        """The trajectories of a file, in its order. A line that was cut off by a kill is left out."""
        with open(self.folder / TRAJECTORIES / f"{source}.jsonl", encoding="utf-8", errors="replace") as file:
            for line in file:
                if (t := _read(source, line.rstrip("\n"))) is not None:
                    yield t

    def tokens(self, source: str, group: str | None = None) -> dict[str, SampledTrajectory]:
        """Token by token those of a step that the run's store holds, by uid; none where it is an http
        service, or keeps none."""
        url = (self._config.get("store") or {}).get("url") or f"sqlite:{self.folder / STORE}"
        if not is_step(source) or is_http(url):
            return {}
        path = Path(url.removeprefix("sqlite:"))
        if "://" not in url and not path.is_file():  # opening it would make one
            return {}
        name = (self._config.get("run") or {}).get("name") or self.folder.name
        with closing(open_store(url)) as store:
            try:
                return {t.uid: t for t in store.samples(name, _number(source), group)}
            except NotStored:
                return {}


def change_of(t: SampledTrajectory) -> float | None:
    """Mean change of the log-prob per token by the update, in nats; None where it was not scored again."""
    changes = [c for s in t.segments if isinstance(s, Written) for c in changes_of(s)]
    return sum(changes) / len(changes) if changes else None


def changes_of(written: Written) -> list[float]:
    """Change of each token's log-prob by the update, in nats; none where it was not scored again."""
    if written.logp_after is None:
        return []
    return [after - before for before, after in zip(written.logp_before, written.logp_after, strict=True)]


def is_step(source: str) -> bool:
    """Whether a file is a step's; any other is an evaluation's, or somebody else's."""
    number = source.removeprefix(STEP)
    return source.startswith(STEP) and number.isascii() and number.isdecimal()


def _there(sources: list[str]) -> str:
    """What a run has, the steps as a range."""
    steps = [_number(name) for name in sources if is_step(name)]
    named = [name for name in sources if not is_step(name)]
    if len(steps) > 1:
        named.insert(0, f"steps {steps[0]} to {steps[-1]}")
    elif steps:
        named.insert(0, f"step {steps[0]}")
    verb = "are" if len(named) > 1 or len(steps) > 1 else "is"
    none_of_steps = "" if steps else "; those of a step are written when it ends"
    return f"there {verb} {', '.join(named) or 'none'}{none_of_steps}"


def _number(source: str) -> int:
    return int(source.removeprefix(STEP))


def _read(source: str, line: str) -> StoredTrajectory | None:
    """The trajectory of a line; None for one that was cut off, or that no run has written."""
    try:
        record: dict[str, Any] = json.loads(line)
        segments = [
            Segment(s["by"], s["text"], s.get("kind") or "", s.get("documents") or [])
            for s in record["segments"]
        ]
        texts = [record[key] for key in ("uid", "group", "question", "data_source", "finish", "worker")]
        texts += [*record["golden_answers"], *(text for s in segments for text in (s.by, s.text, s.kind))]
        reward = record["reward"]
        if not all(isinstance(text, str) for text in texts) or not isinstance(reward, float | int | None):
            return None
        return StoredTrajectory(
            source,
            record["uid"],
            record["group"],
            record["question"],
            list(record["golden_answers"]),
            record["data_source"],
            reward,
            record["finish"],
            record["worker"],
            segments,
            line,
            read if isinstance(read := record.get("answer"), str) else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _yaml(file: Path) -> dict[str, Any]:
    """The run's configuration as it stands there; empty where it cannot be read."""
    try:
        raw = load_yaml(file)
    except UserError:
        return {}
    return raw if isinstance(raw, dict) else {}
