"""Reading a run's folder: metrics.jsonl, events.jsonl, config.yaml, summary.json."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from services.common.errors import UserError
from services.common.runs.paths import (
    CONFIG,
    EVENTS,
    METRICS,
    STORE,
    SUMMARY,
    TRAJECTORIES,
    is_run,
    no_run_in,
    run_folder,
)
from services.common.users_files import given_as, load_json, load_object, load_yaml, reading
from services.common.validation import fitting, number_of
from services.likelihood.exports.merging import by_step
from services.likelihood.exports.no_numbers import NoNumbers, judgeable, no_numbers, number_or_text
from services.likelihood.exports.tables import event_files, plain_columns, rows_of_events
from services.likelihood.monitor.alarms import PHASES
from services.likelihood.monitor.detectors.table import READS
from services.likelihood.monitor.phases import PhaseMonitor
from services.likelihood.monitor.watch import number as finite
from services.likelihood.records import one_line
from services.settings import MonitorRules

NOT_CURVES = ("step", "attempt", "policy_version")
STEPS = (
    "_step",
    "Step",
    "global_step",
    "training/global_step",
    "trainer/global_step",
    "train/step",
    "rollout/step",
)
"""What other trainers and trackers call the step."""


OTHERS = (CONFIG, EVENTS, SUMMARY, STORE)
"""Files of a run's folder that are taken for its metrics by mistake."""
NEVER_METRICS = (".yaml", ".yml", ".db", ".html", ".npz", ".safetensors", ".parquet")


@dataclass
class RunFiles:
    """One recorded run. `metrics` has one entry per step, in order. Of a step written twice (by a resumed
    run) the later one counts; the rows of another trainer's step are one."""

    name: str
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    no_numbers: dict[str, NoNumbers] = field(default_factory=dict)
    """By the name in the file: values by which nothing is judged."""

    def columns(self) -> tuple[dict[str, np.ndarray], int]:
        """(float64 [last - first + 1] by metric name, first step), NaN where a step has no value."""
        steps = [m["step"] for m in self.metrics]
        first = steps[0] if steps else 0
        size = steps[-1] - steps[0] + 1 if steps else 0
        out: dict[str, np.ndarray] = {}
        for step, metrics in zip(steps, self.metrics, strict=True):
            for name, value in metrics.items():
                if name not in NOT_CURVES and (number := number_of(value)) is not None:
                    out.setdefault(name, np.full(size, np.nan))[step - first] = number
        return out, first

    def add_evaluations(self) -> None:
        """Held-out scores are events; they become the metrics `eval/em_greedy` and `eval/em_sampled`, and
        those of each source, of their steps. The line of the step after an evaluation repeats its scores, and
        they count once."""
        by_step = {m["step"]: m for m in self.metrics}
        evaluations = _evaluations(self.events)
        for step, event in evaluations:
            if m := by_step.get(step + 1):
                for name in held_out(event):
                    m.pop(name, None)
        for step, event in evaluations if self.metrics else ():
            metrics = by_step.get(max(step, self.metrics[0]["step"]))
            if metrics is not None:
                metrics |= {name: score for name, score in held_out(event).items() if score is not None}

    def known(self) -> tuple[list[str], list[str]]:
        """Metrics that the monitor reads: those that the run has a value of, and those that it lacks."""
        reads = list(dict.fromkeys(name for names in READS.values() for name in names))
        seen = {name for m in self.metrics for name in reads if finite(m.get(name)) is not None}
        return [n for n in reads if n in seen], [n for n in reads if n not in seen]

    def texts(self) -> set[str]:
        """Metrics, by the names that the rules read, with a value that is no number."""
        return {name for m in self.metrics for name in m.keys() - judgeable(m).keys()}

    def rules(self) -> MonitorRules:
        """The thresholds that the run itself used, by its configuration. Raises UserError naming the
        key."""
        section = self.config.get("monitor")
        rules = section.get("rules") if isinstance(section, dict) else None
        return _rules(rules or {}, f"{self.name}/config.yaml: monitor.rules")

    def monitor(self, rules: MonitorRules | None = None) -> PhaseMonitor:
        """A monitor that has seen nothing, by the run's own rules if no others are given."""
        return PhaseMonitor(rules or self.rules())

    def replay(self, monitor: PhaseMonitor | None = None) -> tuple[np.ndarray, list[dict]]:
        """The monitor over the recorded metrics: phase codes [last - first + 1] (NaN where no step is), and
        the alarms."""
        monitor = monitor or self.monitor()
        steps = [m["step"] for m in self.metrics]
        codes = np.full(steps[-1] - steps[0] + 1 if steps else 0, np.nan)
        alarms = []
        for metrics in self.metrics:
            state = monitor.update(judgeable(metrics))
            codes[state.step - steps[0]] = PHASES.index(state.phase)
            alarms += state.alarms
        return codes, [a.as_dict() for a in alarms]


def read_run(path: Path) -> RunFiles:
    """A run by its folder, its metrics.jsonl, a checkpoint or `latest`, or another file of metrics alone.

    Raises UserError with the file (and line) and what was expected."""
    try:
        path = run_folder(path)
    except FileNotFoundError as e:
        raise UserError(f"{path}: {e.strerror}") from e
    _refuse_no_metrics(path)
    folder = path if path.is_dir() else path.parent
    metrics = path / METRICS if path.is_dir() else path
    begun = metrics.exists() or not is_run(folder)  # a run that ended before its first step has no such file
    events = [] if is_run(folder) and path.is_dir() else event_files(path)
    if path.is_dir() and not events and not metrics.exists() and not is_run(path):
        raise UserError(f"{path}: {no_run_in(path)}")
    rows = rows_of_events(events) if events else read_rows(metrics) if begun else []
    # A run of ours that was resumed writes whole steps again; other trainers write a step in parts.
    ours = metrics.name == METRICS or any("attempt" in row for _, row in rows)
    steps = by_step(path if events else metrics, rows, ours=ours and not events)
    run = RunFiles(path.resolve().name if path.is_dir() else path.stem, list(steps.values()))
    run.no_numbers = no_numbers(rows)
    if events:
        return run
    if not path.is_dir():
        if not run.metrics:
            raise UserError(f"{path}: no steps in it; expected a run's folder or its metrics.jsonl")
        return run
    if (folder / EVENTS).exists():
        run.events = [row for _, row in read_jsonl(folder / EVENTS)]
    if (folder / SUMMARY).exists():
        run.summary = load_object(folder / SUMMARY)
    if (folder / CONFIG).exists():
        run.config = _plain(read_mapping(folder / CONFIG))
    return run


def _refuse_no_metrics(path: Path) -> None:
    """Raises UserError for a file of a run that is not its metrics, and for one of a kind that never is."""
    run = next((folder for folder in path.parents[:2] if (folder / METRICS).is_file()), None)
    of_run = run is not None and (path.name in OTHERS or path.parent.name == TRAJECTORIES)
    if path.is_file() and (of_run or path.suffix in NEVER_METRICS):
        such = f": {run}, or {run / METRICS}" if run else ""
        raise UserError(f"{path}: holds no metrics; expected a run's folder or its {METRICS}{such}")


def read_rules(path: Path | None) -> MonitorRules:
    """Thresholds of the monitor from a YAML file; the defaults without one. Raises UserError naming the
    key. Of a whole configuration its monitor.rules are taken."""
    if path is None:
        return MonitorRules()
    with given_as("--rules", path):
        given = read_mapping(path)
        if isinstance(section := given.get("monitor"), dict):
            given = section.get("rules") or {}
        return _rules(given, str(path))


def _rules(given: dict[str, Any], where: str) -> MonitorRules:
    with fitting(lambda error: UserError(f"{where}: {one_line(error, MonitorRules.model_fields)}")):
        return MonitorRules.model_validate(given)


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML mapping. Raises UserError."""
    loaded = load_yaml(path)
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: expected keys with values")
    return loaded


def read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line or row number, metrics) of each step in a file: JSONL; CSV with a head; or JSON, a list of
    objects or Hugging Face's `trainer_state.json`. JSONL may be called `.json`.

    A step may go by another name (STEPS), and the metrics may lie below `data`, as verl's file logger writes
    them. Raises UserError."""
    if path.suffix == ".csv":
        rows = _csv_rows(path)
    elif path.suffix == ".json":
        rows = _json_rows(path)
    else:
        rows = read_jsonl(path)
    return [(number, _with_step(row)) for number, row in rows]


def _csv_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    with reading(path, "CSV"), path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = plain_columns(path, list(rows[0])) if rows else {}
    # An empty cell was not measured; a null would say that it was, and had no value.
    return [
        (n, {name: _of_text(row[k]) for k, name in names.items() if row.get(k)})
        for n, row in enumerate(rows, 2)
    ]


def _of_text(text: Any) -> Any:
    """A cell: a number where it is one."""
    value = number_or_text(text) if isinstance(text, str) else text
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _json_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    if _is_json_lines(path):
        return read_jsonl(path)
    loaded = load_json(path)
    rows = loaded.get("log_history") if isinstance(loaded, dict) else loaded
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: expected a list of objects, or an object with `log_history`")
    return list(enumerate(rows, 1))


def _is_json_lines(path: Path) -> bool:
    """Whether the first line is a step by itself: some trainers call their JSON Lines `.json`."""
    with reading(path, "JSON"), path.open("rb") as file:
        first = _lenient(next((line for line in file if line.strip()), b""))
    if not isinstance(first, dict) or "log_history" in first:
        return False
    return _with_step(first).get("step") is not None


def _with_step(row: dict[str, Any]) -> dict[str, Any]:
    if isinstance(row.get("data"), dict):
        row = {**row["data"], "step": row.get("step")}
    if row.get("step") is not None:
        return row
    name = next((name for name in STEPS if row.get(name) is not None), None)
    if name is None:
        return row
    step = row[name]
    return row | {"step": int(step) if isinstance(step, float) and step.is_integer() else step}


def read_jsonl(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line. A torn last line (a run that was killed, or still writes) is left
    out."""
    with reading(path, "metrics of a run"):
        lines = path.read_bytes().split(b"\n")
    out = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as e:
            row = _lenient(line)
            if row is None:
                if number == len(lines):
                    break
                raise UserError(f"{path}, line {number}: not JSON ({e}); expected one object a line") from e
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: expected one JSON object a line")
        out.append((number, row))
    return out


def _lenient(line: bytes) -> Any:
    """Python writes NaN, Infinity and integers of any length, which JSON readers elsewhere do not take."""
    try:
        row = json.loads(line, parse_int=_whole, parse_float=number_or_text)
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    return row


def _whole(digits: str) -> int | float | str:
    return int(digits) if len(digits) < 19 else number_or_text(digits)


def _plain(value: Any, depth: int = 0) -> Any:
    """YAML has more than JSON (dates, sets, keys that are lists, an anchor within itself): such values as
    text."""
    if isinstance(value, dict) and depth < 20:
        return {str(k): _plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list) and depth < 20:
        return [_plain(v, depth + 1) for v in value]
    if isinstance(value, str | float | None) or (isinstance(value, int) and abs(value) < 2**53):
        return value
    return str(value)


def flat(config: dict[str, Any], prefix: str = "", *, keep_empty: bool = False) -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`. keep_empty: a section without keys stays, as `{}`."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and (value or not keep_empty):
            out.update(flat(value, f"{prefix}{key}.", keep_empty=keep_empty))
        else:
            out[f"{prefix}{key}"] = value
    return out


def differences(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keys on which the configurations differ: `{"key", "values"}`, the run's own name and folder left
    out."""
    flats = [flat(c) for c in configs]
    keys = sorted({k for f in flats for k in f} - {"run.name", "run.dir"})
    rows = [{"key": k, "values": [f.get(k) for f in flats]} for k in keys]
    return [r for r in rows if any(v != r["values"][0] for v in r["values"])]


def _evaluations(events: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """The evaluations, each with its step, without those of steps that a resumed run made again."""
    found: list[tuple[int, dict[str, Any]]] = []
    for event in events:
        step = event.get("step") or 0
        if not isinstance(step, int):
            continue
        if event.get("event") == "resume":
            found = [(at, earlier) for at, earlier in found if at <= step]
        elif event.get("event") == "evaluation":
            found.append((step, event))
    return found


def held_out(event: dict[str, Any]) -> dict[str, Any]:
    """The metrics of an evaluation, by the names that the driver gives them; null without a score."""
    mode = event.get("mode", "greedy")
    overall = event.get("overall")
    found = {f"eval/em_{mode}": event.get("em", overall.get("em") if isinstance(overall, dict) else None)}
    by_source = event.get("em_by_source")
    if isinstance(by_source, dict):
        found |= {f"eval/{name}/em_{mode}": em for name, em in by_source.items()}
    return found
