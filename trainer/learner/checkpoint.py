"""Checkpoints on disk: written aside, checksummed, then renamed, so that what has the right name
is whole.

    checkpoints/step_000010/
        manifest.json    size and SHA-256 of each file below
        state.json       the driver's own state
        learner.json     the learner's counters
        model/           configuration and tokenizer of the policy
        weights/         master weights        (safetensors, in shards; with LoRA the adapters alone)
        optimizer/       Adam's moments, NAME.exp_avg and NAME.exp_avg_sq
        snapshot/        weights of a forward pass that LLDS compares with (anchor `snapshot` only)
        rng/             state of the learner's random numbers

Weights and moments are whole tensors under their Hugging Face names: a run can be resumed with other ranks or
another ZeRO stage. Their type is float32 (float64 with `learner.dtype: float64`), also where the forward pass
is in bfloat16.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from services.common.errors import EnvironmentLacks, UserError
from services.common.files import move, put_folder, readable_as_usual, sync, write_json
from services.common.names import near_path
from services.common.runs.paths import (
    BEST,
    CHECKPOINTS,
    LATEST,
    METRICS,
    in_runs,
    is_run,
    near_run,
    newest_run,
    run_folder,
    why_no_best,
)
from services.common.scratch import held, remove_abandoned
from trainer.learner.tensor_files import INDEX

MANIFEST = "manifest.json"
ASIDE = ".tmp-"
"""What the names of folders that are being written begin with."""
STATE = "state.json"
NEEDED = (STATE, "learner.json", "model/config.json", "weights/", "rng/")
"""Files of every checkpoint, and folders that hold at least one."""
ACCEPTED = "RUN, RUN/checkpoints/step_000010 or latest"
_NO_SUCH_JSON = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a JSON file of a known form raises where it has another, or none."""
_NAME = re.compile(r"^step_(\d+)(\.old)?$")


def step_folder(run_dir: str | Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step."""
    return Path(run_dir) / CHECKPOINTS / f"step_{step:06d}"


class CheckpointNotWritten(EnvironmentLacks):
    """The disk does not take it, mostly because it is full. What was there before is as it was."""


@contextlib.contextmanager
def written_aside(path: Path, known: Mapping[str, dict[str, Any]] | None = None) -> Iterator[Path]:
    """A folder to fill; on leaving without an error it gets its manifest, goes to disk, and becomes `path`,
    replacing what was there; of a link the link alone, since where it leads may be somebody's archive. known:
    manifest entries of files whose checksums need not be computed.

    At each moment `path` or `path.old` is a whole checkpoint, if one was there before. Raises
    CheckpointNotWritten."""
    aside = path.parent / f"{ASIDE}{path.name}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path.parent, f"{ASIDE}{path.name}-")
        aside.mkdir()
        with held(aside):
            yield aside
            files = sorted(f for f in aside.rglob("*") if f.is_file())
            manifest = dict(known or {})
            for f in files:
                if (name := str(f.relative_to(aside))) not in manifest:
                    manifest[name] = {"bytes": f.stat().st_size, "sha256": _sha256(f)}
            write_json(aside / MANIFEST, {"files": manifest}, indent=1, sort_keys=True)
            readable_as_usual(aside)
            # All of it, before the rename: after a power cut a name may be there without what it names.
            for f in [*files, aside / MANIFEST, *(d for d in aside.rglob("*") if d.is_dir()), aside]:
                sync(f)
            old = _earlier(path) if _NAME.match(path.name) else aside.with_name(aside.name + "-old")
            if os.path.lexists(path):
                _remove(old)
            put_folder(aside, path, earlier=old)
        sync(path.parent)
        _remove(old)
        # Of a process that was killed before it had removed its own.
        remove_abandoned(path.parent, f"{ASIDE}{path.name}-", "-old")
    except OSError as e:
        raise CheckpointNotWritten(f"{path} cannot be written: {e}") from e
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def fault(path: Path, *, checksums: bool = True) -> str | None:
    """What is wrong with a checkpoint, or None. checksums=False compares sizes alone."""
    try:
        if not (path / MANIFEST).is_file():
            return f"no {MANIFEST}"
        files = json.loads((path / MANIFEST).read_text())["files"]
        expectations = [(name, entry["bytes"], entry["sha256"]) for name, entry in files.items()]
    except _NO_SUCH_JSON as e:
        return f"{MANIFEST} can't be read ({e})"
    # A manifest that lists too little fits what is there, and describes no checkpoint.
    if missing := _missing(NEEDED, files):
        return f"{MANIFEST} lists no {missing}"
    for name, size, sha256 in expectations:
        f = path / name
        if not f.is_file():
            return f"{name} is missing"
        if f.stat().st_size != size:
            return f"{name} has {f.stat().st_size} bytes, expected {size}"
        if checksums and _sha256(f) != sha256:
            return f"{name} does not match its checksum"
    try:  # sizes alone do not show what a power cut has filled with zeros
        promised = list(_promised(path))
    except _NO_SUCH_JSON as e:
        return f"learner.json or an index of shards can't be read ({e})"
    missing = _missing(promised, files)
    return f"{MANIFEST} lists no {missing}" if missing else None


def _missing(needed: Iterable[str], names: Iterable[str]) -> str | None:
    """The first file, or folder (NAME/) with a file in it, that is not among the names."""
    return next(
        (n for n in needed if not any(f == n or (n[-1] == "/" and f.startswith(n)) for f in names)), None
    )


def _promised(path: Path) -> Iterator[str]:
    """What the files of a checkpoint say is there: the optimiser's and the snapshot's folders, and the shards
    of each index."""
    about = json.loads((path / "learner.json").read_text())
    if about.get("adam_steps"):
        yield "optimizer/"
    if about.get("snapshot"):
        yield "snapshot/"
    for index in path.glob(f"*/{INDEX}"):
        weight_map = json.loads(index.read_text())["weight_map"]
        yield from (f"{index.parent.name}/{shard}" for shard in sorted(set(weight_map.values())))


def require_whole(path: Path) -> None:
    """Raise UserError unless the checkpoint is there and whole."""
    if not path.is_dir():
        raise UserError(f"checkpoint {path}: no such folder{near_path(path, Path.is_dir)}")
    if problem := fault(path):
        raise UserError(f"checkpoint {path} is torn or changed: {problem}")


def find(given: str | Path, run: Path | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """The checkpoint that a user names: its folder, a run's (the newest whole one of it) as `in_runs` finds
    both, or `latest` or `best`, which is that of `run`, or, with none given, of the run in `runs/` that was
    written to last. It may be torn where its own folder is named; say: is told of a newer one that is passed
    over because it is. Raises UserError."""
    checkpoint, run = named(given, run)
    if checkpoint is not None:
        return checkpoint
    torn: dict[Path, str] = {}
    found = latest(run, on_fault=torn.setdefault)
    if found is None:
        raise UserError(f"checkpoint {given}: {run} has no whole checkpoint (see trainer.checkpoint_every)")
    newest, problem = next(iter(torn.items()), (found, ""))
    if step_of(newest) > step_of(found):
        say(f"{newest} is torn or changed ({problem}): {found.name} is taken, an earlier one")
    return found


def named(given: str | Path, run: Path | None = None) -> tuple[Path | None, Path]:
    """The checkpoint that a user names, if it is one alone, and otherwise the run whose newest whole one is
    meant, as `find` has it. Opens nothing large. Raises UserError."""
    path = in_runs(given)
    if str(given) in (LATEST, BEST) and not path.exists():
        run = run or newest_run()
        if str(given) == BEST and (best := best_of(run)) is None:
            raise UserError(f"checkpoint best: {run} keeps none: {why_no_best(run)}")
        return (best if str(given) == BEST else None), run
    if not path.exists():
        hint = near_path(path, Path.is_dir) or near_run(path, words=(LATEST, BEST))
        raise UserError(f"checkpoint {given}: no such folder{hint}")
    if (path / MANIFEST).exists() or _NAME.match(path.name):
        mine = path.parent / path.readlink() if path.name == BEST and path.is_symlink() else path
        return mine, path.parent
    run = run_folder(path)
    if not is_run(run) and not (run / CHECKPOINTS).is_dir():
        raise UserError(f"checkpoint {given}: neither a checkpoint nor a run's folder; expected {ACCEPTED}")
    return None, run


def latest(
    run_dir: str | Path,
    *,
    before: int | None = None,
    checksums: bool = True,
    on_fault: Callable[[Path, str], object] = lambda path, problem: None,
) -> Path | None:
    """The newest whole checkpoint of a run (its `checkpoints` folder) of a step below `before`, or None.
    checksums: as of `fault`. on_fault: told of each newer one that is not whole, the newest first."""
    for path in _newest_first(Path(run_dir)):
        if before is not None and step_of(path) >= before:
            continue
        problem = fault(path, checksums=checksums)
        if problem is None:
            return path
        on_fault(path, problem)
    return None


def refuse_used(run: Path) -> None:
    """Raises UserError where a folder for a new run holds steps of one."""
    metrics = run / METRICS
    if metrics.exists() and metrics.stat().st_size:
        way = (
            "go on with it by" if latest(run, checksums=False) else "begin it anew (it has no checkpoint) by"
        )
        raise UserError(
            f"run.name: {run} holds a run already; choose another run.name, or {way} --resume latest"
        )


def mark_best(run_dir: str | Path, checkpoint: Path | None) -> None:
    """Let the link `checkpoints/best` lead to a checkpoint of the run, or remove it."""
    link = Path(run_dir) / CHECKPOINTS / BEST
    if checkpoint is None:
        link.unlink(missing_ok=True)
        return
    aside = link.with_name(f"{ASIDE}{BEST}")
    aside.unlink(missing_ok=True)
    # Made aside and renamed: the link leads somewhere at each moment. Relative, so that a run's folder can be
    # moved.
    aside.symlink_to(checkpoint.name)
    move(aside, link)


def best_of(run_dir: str | Path) -> Path | None:
    """The checkpoint of the best held-out score that a run keeps, or None."""
    link = Path(run_dir) / CHECKPOINTS / BEST
    if not link.is_symlink():
        return None
    best = link.parent / link.readlink()
    return next((p for p in (best, _earlier(best)) if p.is_dir()), None)


def put_back(run_dir: str | Path) -> None:
    """Give checkpoints their names again that a kill left between the two renames of `written_aside`."""
    for path in _newest_first(Path(run_dir)):
        named = step_folder(run_dir, step_of(path))
        if path == _earlier(named) and not named.exists():
            move(path, named)


def _earlier(path: Path) -> Path:
    """The place of a checkpoint while another one takes its name."""
    return path.with_name(path.name + ".old")


def drop_after(run_dir: str | Path, step: int) -> None:
    """Remove the checkpoints of later steps: a run that was rolled back writes them anew."""
    for path in _newest_first(Path(run_dir)):
        if step_of(path) > step:
            _remove(path)


def prune(run_dir: str | Path, keep: int, besides: Path | None = None) -> list[Path]:
    """Remove all but the newest `keep` whole checkpoints (and `besides`), torn ones and leftovers of
    interrupted writes. Returns what was removed.

    A torn checkpoint never counts as one of those kept. Must not run beside a write in the same run."""
    kept = [p for p in _newest_first(Path(run_dir)) if fault(p, checksums=False) is None][:keep]
    folder = Path(run_dir) / CHECKPOINTS
    entries = list(folder.iterdir()) if folder.is_dir() else []
    gone = [
        p
        for p in entries
        if p.is_dir()
        and p not in kept
        and p != besides
        and (_NAME.match(p.name) or p.name.startswith(f"{ASIDE}step_"))
    ]
    for p in gone:
        _remove(p)
    return gone


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removeprefix("step_").removesuffix(".old"))


def _newest_first(run_dir: Path) -> list[Path]:
    folder = run_dir / CHECKPOINTS
    found = [(m, p) for p in (folder.iterdir() if folder.is_dir() else ()) if (m := _NAME.match(p.name))]
    # Of two folders of a step the one with the plain name is the newer.
    return [p for m, p in sorted(found, key=lambda x: (-int(x[0][1]), bool(x[0][2])))]


def _remove(path: Path) -> None:
    """Manifest first: a folder that was only half removed is then torn, never taken for whole.

    Of a link, what it leads to stays."""
    if path.is_symlink() or path.is_file():
        path.unlink()
        return
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def require_same_adapters(path: Path, before: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    """Raise UserError unless a learner whose adapters are described by `now` (None: it has none) may
    take those of `before`."""
    if (before is None) != (now is None):
        kinds = ["all weights" if lora is None else "LoRA adapters" for lora in (before, now)]
        raise UserError(f"checkpoint {path} holds {kinds[0]}; this learner trains {kinds[1]} (learner.lora)")
    if before and now and before["scale"] != now["scale"]:
        raise UserError(
            f"learner.lora.alpha: checkpoint {path} holds adapters for alpha / rank = {before['scale']:g}; "
            f"here it is {now['scale']:g}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
