"""Runs by what people type: a run's folder, its metrics.jsonl, one of its checkpoints, or `latest`."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from services.common.files import hints, json_lines
from services.common.names import NEAR, nearest
from services.common.users_files import refuse_to_lose

LATEST = "latest"
RUNS = Path("runs")
"""Where `latest` looks for runs: the default of `run.dir`."""
CHECKPOINTS = "checkpoints"
BEST = "best"
"""Name of the link to the checkpoint of the best held-out score, also on the command line."""
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
CONFIG = "config.yaml"
SUMMARY = "summary.json"
STORE = "likelihood.db"
TRAJECTORIES = "trajectories"
LOCK = ".lock"
"""Held by the process that writes to a run's folder."""
CONTROL = "control.json"
"""Where the control plane of a running run answers."""
FILES = (METRICS, EVENTS, CONFIG)
"""Files of which a run's folder has at least one."""


def refuse_to_lose_records(option: str, out: Path, runs: Iterable[Path]) -> None:
    """Raises UserError where a command would write over what a run has recorded. runs: folders, or files of
    metrics."""
    for run in runs:
        for file in (run, *(run / name for name in (*FILES, SUMMARY, STORE))):
            refuse_to_lose(option, out, {"the command": file})


def last_step(run: Path) -> int:
    """The last step that was recorded whole, 0 without any."""
    return max((row["step"] for row in json_lines(run / METRICS) if "step" in row), default=0)


def is_run(folder: Path) -> bool:
    """Whether a run was written there."""
    return any((folder / name).is_file() for name in FILES)


def runs_below(folder: Path) -> list[Path]:
    """The runs of a folder, by name. What others keep to themselves is none of ours."""
    found = []
    for below in sorted(folder.iterdir()) if folder.is_dir() else []:
        with contextlib.suppress(PermissionError):
            if is_run(below):
                found.append(below)
    return found


def newest_run(runs: Path = RUNS) -> Path:
    """The run that was written to last. Raises FileNotFoundError."""
    found = runs_below(runs)
    if not found:
        raise FileNotFoundError(
            errno.ENOENT, f"there is no run in {runs.absolute()}; give a run's folder", LATEST
        )
    return max(found, key=written_at)


def written_at(run: Path) -> float:
    """When a run was written to last, in seconds since 1970."""
    return max((run / name).stat().st_mtime for name in FILES if (run / name).is_file())


def in_runs(given: str | Path, runs: Path = RUNS) -> Path:
    """The path; below `runs` where it begins with the name of a run there, and there is no such path, or a
    folder without a run: `demo-0` is `runs/demo-0`, and `demo-0/checkpoints/best` a checkpoint of it, and
    `./demo-0` is itself. `demo-0/..` is the folder above the run."""
    path = without_ways_up(Path(given))
    if str(given).startswith("./"):
        return path
    first = path.parts[0] if path.parts and not path.is_absolute() else ".."
    if first == ".." or not is_run(runs / first) or not (runs / path).exists():
        return path
    mine = path.exists() and (path.is_file() or len(path.parts) > 1 or _of_run(path) is not None)
    return path if mine else without_ways_up(runs / path)


def without_ways_up(path: Path) -> Path:
    """A path that is there without the `NAME/..` in it; as it is where NAME is a link to somewhere else."""
    if ".." not in path.parts or not path.exists():
        return path
    short = Path(os.path.normpath(path))
    return short if short.exists() and short.samefile(path) else path


def run_folder(given: str | Path, runs: Path = RUNS) -> Path:
    """Folder of the run that `given` names: `latest`, or a path as `in_runs` finds it. `given` itself where
    it is a file, or a folder that lies in no run.

    Raises FileNotFoundError, whose `strerror` names the nearest run, where there is nothing of that name.
    """
    path = in_runs(given, runs)
    if str(given) == LATEST and not path.exists():
        return newest_run(runs)
    if not path.exists():
        raise FileNotFoundError(
            errno.ENOENT, f"no such run, folder or file{near_run(path, runs)}", str(given)
        )
    if path.is_file():
        return path.parent if path.name == METRICS and is_run(path.parent) else path
    return _of_run(path) or path


def _of_run(path: Path) -> Path | None:
    """The run that a folder is, or lies in: RUN, RUN/checkpoints or RUN/checkpoints/step_000010."""
    return next((folder for folder in (path, *path.absolute().parents[:2]) if is_run(folder)), None)


def no_run_in(folder: Path) -> str:
    """The end of a line about a folder, or a file, that was given as a run and is none."""
    if folder.is_file():
        return f"a file, and no run's folder; `unspiral runs` lists those in {RUNS}/"
    return (
        f"no run's folder: {folder.absolute()} has none of {', '.join(FILES)}; `unspiral runs` lists those "
        f"in {RUNS}/"
    )


def runs_like(path: Path) -> list[Path]:
    """Runs beside the path with a name like its own, the nearest first; three at most."""
    beside = [f for f in runs_below(path.parent) if f != path]
    names = difflib.get_close_matches(path.name, [f.name for f in beside], n=3, cutoff=NEAR)
    return [path.parent / name for name in names]


def near_run(path: Path, runs: Path = RUNS, words: Collection[str] = (LATEST,)) -> str:
    """`; did you mean runs/demo-0?` where a run beside the path, or in `runs`, has a name like it, or one of
    the words that stand for a run, and what makes `RUN/checkpoints/best`; otherwise nothing."""
    if path.name == BEST and path.parent.name == CHECKPOINTS and path.parent.is_dir():
        return f"; the run kept none: {why_no_best(path.parent.parent)}"
    folders = {str(f) for place in {path.parent, runs} for f in runs_below(place)}
    near = nearest(path.name, {*(Path(f).name for f in folders), *(words if len(path.parts) == 1 else ())})
    if near in words:
        return f"; did you mean {near}?"
    if near is None and folders:
        return "; `unspiral runs` lists those that are there"
    return next((f"; did you mean {f}?" for f in sorted(folders) if Path(f).name == near), "")


def why_no_best(run: Path) -> str:
    """Why a run keeps no checkpoint of its best held-out score, as far as its summary tells."""
    best = hints(run / SUMMARY).get("best")
    if isinstance(best, dict) and best.get("step") == 0 and isinstance(best.get("score"), float):
        return (
            f"its best held-out score, {best['score']:.3f}, is that before training, of which there is no "
            f"checkpoint; `{LATEST}` is the newest one"
        )
    return "trainer.keep_best=true makes it, by held-out scores during the run"
