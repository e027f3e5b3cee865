"""`unspiral demo` and `unspiral demo --collapse`: runs of the real system, and the tables about them."""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from services.common.counting import counted
from services.common.errors import UnspiralError, UserError
from services.common.files import json_lines, lock, move, write_atomically, write_json
from services.common.loading.own_packages import refuse_others_here
from services.common.printing.commands import typed
from services.common.printing.console import Console
from services.common.processes import signals
from services.common.progress import progress_on
from services.common.runs.paths import EVENTS, LOCK, METRICS
from services.likelihood.exports.report import write_report
from trainer.config.schema import Config, dump_config, parse_config
from trainer.lab.before_after import before_after, next_commands
from trainer.lab.demo import LabFiles, collapse_config, demo_config, prepare
from trainer.learner.checkpoint import latest, step_of
from trainer.session.run import train

ARMS = {"grpo": 0.0, "llds": 0.5}
"""The two arms of the collapse study: they differ in algorithm.llds.lambda alone."""
ARM_START_SECONDS, ARM_STEP_SECONDS = 600.0, 40.0
"""Longest time that the arms may take: to start, and per step."""
ARM_END_SECONDS = 60.0
"""Longest time that an arm may take to end; then it is killed."""


def prepared(console: Console, folder: Path, seed: int, fresh: bool) -> LabFiles:
    """World, questions and warm-started model, with a progress bar for the warm start; in a log with a line
    from time to time."""
    if not console.is_terminal:
        console.print("warm start: teaching the tag format, a minute on two free cores; kept for later demos")
        with progress_on(console) as tell:
            return prepare(
                folder,
                seed,
                fresh=fresh,
                progress=lambda done, total, loss: tell(
                    "warm start", done / total, f"step {done} of {total}"
                ),
            )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("warm start: teaching the tag format", total=None)
        return prepare(
            folder,
            seed,
            fresh=fresh,
            progress=lambda done, total, loss: bars.update(task, completed=done, total=total),
        )


def fresh_config(raw: dict[str, Any]) -> Config:
    """The configuration, with an earlier demo of the same name moved aside to NAME.before: a demo is made to
    be run again.

    Raises UserError where that demo is still running.
    """
    config = parse_config(raw)
    if config.run_dir.is_dir():
        taken = f"{config.run_dir} is in use by another running process"
        way = "; choose another --dir or --seed"
        with lock(config.run_dir / LOCK, lambda holder: UserError(taken + holder + way)):
            before = config.run_dir.with_name(config.run_dir.name + ".before")
            shutil.rmtree(before, ignore_errors=True)
            move(config.run_dir, before)
    return config


def resume_command(
    folder: Path, seed: int, steps: int | None, *, collapse: bool = False, seeds: int = 1
) -> str:
    """What goes on with a demo that was stopped, with the options that it was given."""
    words = ["unspiral demo", *(["--collapse"] if collapse else []), "--resume latest"]
    if folder != Path("runs"):
        words += ["--dir", shlex.quote(str(folder))]
    given = {"--seed": seed or None, "--seeds": seeds if seeds > 1 else None, "--steps": steps}
    return " ".join([*words, *(f"{option} {value}" for option, value in given.items() if value is not None)])


def run_demo(
    folder: Path,
    seed: int,
    *,
    steps: int | None = None,
    fresh: bool = False,
    resume: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Warm start, then the whole system for a few steps; prints scores before and after, the phase, and where
    the report lies. resume: go on with the demo that is there, if there is one."""
    console = console or Console()
    began = time.monotonic()
    console.print(
        "A made-up encyclopaedia, a tiny language model that has seen the search tags, and the real system "
        "around it."
    )
    files = prepared(console, folder / "lab", seed, fresh)
    console.print(
        f"warm start done after {time.monotonic() - began:.0f} s; model in {files.model}", markup=False
    )
    raw = demo_config(files, folder=folder, name=f"demo-{seed}", seed=seed, steps=steps)
    config = parse_config(raw) if resume else fresh_config(raw)
    try:
        summary = train(config, resume="latest" if resume else None, console=console)
    except signals.Stopped as e:
        report = config.run_dir / "report.html"
        kept = f"; what it did so far is in {report}" if report.exists() else ""
        saved = latest(config.run_dir, checksums=False)
        way = "no checkpoint was written, so that a demo begins anew: unspiral demo"
        if saved is not None:
            command = resume_command(folder, seed, steps)
            way = f"go on after step {step_of(saved)}: {command}"
        raise signals.Stopped(e.number, f"{way}{kept}") from None
    console.print("exact match on held-out questions (another world: nothing can be known without searching)")
    table = Table(box=None)
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="right")
    for label, suffix in (("sampled, T = 1", "_sampled"), ("greedy", "")):
        before, after = summary[f"em_before{suffix}"], summary[f"em_after{suffix}"]
        table.add_row(label, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    console.print(table)
    for text in before_after(config.run_dir):
        console.print(text, soft_wrap=True, markup=False, highlight=False)
    console.print(
        f"phase {summary['phase']}, {counted(summary['steps'], 'step')}, "
        f"{time.monotonic() - began:.0f} s in all"
    )
    console.print("next:")
    for text in next_commands(config.run_dir, config.run_dir / "eval_retriever_index"):
        console.print(f"  {typed(text)}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"report: {(config.run_dir / 'report.html').resolve()}", soft_wrap=True, markup=False)
    return summary


def run_collapse(
    folder: Path,
    seeds: list[int],
    *,
    steps: int | None = None,
    fresh: bool = False,
    resume: bool = False,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """GRPO without and with LLDS under settings in which plain GRPO falls; both arms run at the same time, a
    core each. resume: arms that are there go on, or are done."""
    console = console or Console()
    console.print(
        "Two arms for each seed, equal but for algorithm.llds.lambda (0 and 0.5). What to expect: with LLDS "
        "the likelihood of right answers falls less; the reward may fall all the same."
    )
    rows = []
    folders = []
    for seed in seeds:
        files = prepared(console, folder / "lab", seed, fresh)
        configs = {
            arm: (parse_config if resume else fresh_config)(
                collapse_config(
                    files,
                    folder=folder,
                    name=f"collapse-{seed}-{arm}",
                    seed=seed,
                    steps=steps,
                    llds_lambda=value,
                )
            )
            for arm, value in ARMS.items()
        }
        try:
            run_arms(console, folder, configs, resume=resume)
        except signals.Stopped as e:
            command = resume_command(folder, seeds[0], steps, collapse=True, seeds=len(seeds))
            raise signals.Stopped(e.number, f"go on with {command}") from None
        folders += [c.run_dir for c in configs.values()]
        rows += [arm_result(c.run_dir, arm, seed) for arm, c in configs.items()]
        write_report(folders, folder / "collapse.html")
    print_study(console, rows)
    console.print(f"report: {(folder / 'collapse.html').resolve()}", soft_wrap=True, markup=False)
    write_json(folder / "collapse.json", rows, indent=1)
    return rows


def run_arms(console: Console, folder: Path, configs: dict[str, Config], *, resume: bool = False) -> None:
    """Run the arms as processes of their own, and show their steps and rewards while they run.

    Raises UnspiralError as soon as one ends badly, Stopped after SIGINT or SIGTERM; the others are ended
    first.
    """
    refuse_others_here()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    columns = (
        TextColumn("{task.description:>5}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[seen]}"),
        TimeRemainingColumn(),
    )
    with signals.raised(), ended(processes):
        for arm, config in configs.items():
            file = folder / f"{config.run.name}.yaml"
            write_atomically(file, dump_config(config))
            with open(folder / f"{config.run.name}.log", "wb") as log:
                command = [sys.executable, "-m", "trainer", "train", "--config", str(file)]
                command += ["--resume", "latest"] if resume else []
                processes[arm] = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"RAY_ADDRESS": ""}
                )
        limit = ARM_START_SECONDS + ARM_STEP_SECONDS * max(c.trainer.steps for c in configs.values())
        deadline = time.monotonic() + limit
        with Bars(*columns, console=console) as bars:
            tasks = {
                arm: bars.add_task(arm, total=c.trainer.steps, seen="starting") for arm, c in configs.items()
            }
            while running(processes, folder, configs):
                if time.monotonic() > deadline:
                    raise UnspiralError(
                        f"the arms did not end within {limit:.0f} s; logs in {folder}", explained=True
                    )
                for arm, config in configs.items():
                    if steps := json_lines(config.run_dir / METRICS):
                        last = steps[-1]
                        bars.update(
                            tasks[arm],
                            completed=last["step"],
                            seen=f"reward {last['reward/mean']:.2f}  {last['phase']}",
                        )
                time.sleep(1.0)
            for arm, config in configs.items():
                bars.update(tasks[arm], completed=len(json_lines(config.run_dir / METRICS)))


def running(processes: dict[str, subprocess.Popen[bytes]], folder: Path, configs: dict[str, Config]) -> bool:
    """Whether an arm still runs. Raises UnspiralError for one that ended badly."""
    codes = {arm: process.poll() for arm, process in processes.items()}
    for arm, code in codes.items():
        if code:
            log = folder / f"{configs[arm].run.name}.log"
            raise UnspiralError(f"{arm}: exit status {code}; see {log}", explained=True)
    return None in codes.values()


@contextmanager
def ended(processes: dict[str, subprocess.Popen[bytes]]) -> Iterator[None]:
    """On leaving, no process is left: those that still run are told to end, and killed where they don't in
    time."""
    try:
        yield
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + ARM_END_SECONDS
        try:
            with suppress(subprocess.TimeoutExpired):
                for process in processes.values():
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()


def arm_result(run: Path, arm: str, seed: int) -> dict[str, Any]:
    """The row of one arm in the study's table. The last columns are means of the last 15 steps."""
    steps = json_lines(run / METRICS)
    events = json_lines(run / EVENTS)
    scores: dict[str, list[float]] = {"greedy": [], "sampled": []}
    for e in events:
        if e["event"] == "evaluation":
            scores[e["mode"]].append(e["overall"]["em"])

    def tail(key: str) -> float | None:
        values = [s[key] for s in steps[-15:] if s.get(key) is not None]
        return statistics.fmean(values) if values else None

    probes = [s["probe/fixed"] for s in steps if s.get("probe/fixed") is not None]
    return {
        "seed": seed,
        "arm": arm,
        "steps": len(steps),
        "reward_peak": max(moving_mean([s["reward/mean"] for s in steps], 8), default=None),
        "reward_end": tail("reward/mean"),
        "collapse_step": collapse_step([s["reward/mean"] for s in steps]),
        "first_alarm": next((e["at_step"] for e in events if e["event"] == "alarm"), None),
        "probe_change": probes[-1] - max(probes) if probes else None,
        "logp_right": tail("logp/right"),
        "share_falling": tail("displacement/share_negative"),
        "entropy": tail("entropy"),
    } | {
        f"em_{mode}_{when}": value
        for mode, v in scores.items()
        if v
        for when, value in (("start", v[0]), ("best", max(v)), ("end", v[-1]))
    }


def moving_mean(values: list[float], width: int) -> list[float]:
    return [statistics.fmean(values[i - width : i]) for i in range(width, len(values) + 1)]


def collapse_step(rewards: list[float], width: int = 8) -> int | None:
    """First step at which the mean of 8 rewards is under half of its running maximum, for 8 steps."""
    best = 0.0
    low = 0
    for i, value in enumerate(moving_mean(rewards, width)):
        best = max(best, value)
        low = low + 1 if value < best / 2 else 0
        if low == width:
            # The low means began `width` - 1 means earlier, and the mean at index j ends at step j + width.
            return i + 1
    return None


STUDY_COLUMNS = (
    ("reward, peak", "reward_peak", "{:.2f}"),
    ("end", "reward_end", "{:.2f}"),
    ("collapse at step", "collapse_step", "{:d}"),
    ("first alarm", "first_alarm", "{:d}"),
    ("EM sampled start", "em_sampled_start", "{:.2f}"),
    ("best", "em_sampled_best", "{:.2f}"),
    ("end", "em_sampled_end", "{:.2f}"),
    ("EM greedy end", "em_greedy_end", "{:.2f}"),
    ("fixed probe, fall", "probe_change", "{:+.2f}"),
    ("share falling", "share_falling", "{:.2f}"),
)


def print_study(console: Console, rows: list[dict[str, Any]]) -> None:
    """Both arms of each seed, and their medians."""
    table = Table(
        title="GRPO without and with LLDS, all else equal (ends: mean of the last 15 steps)",
        title_justify="left",
        box=None,
    )
    table.add_column("seed", justify="right")
    table.add_column("arm")
    for name, _, _ in STUDY_COLUMNS:
        table.add_column(name, justify="right")

    def cells(row: dict[str, Any]) -> list[str]:
        return ["-" if row.get(key) is None else form.format(row[key]) for _, key, form in STUDY_COLUMNS]

    for row in rows:
        table.add_row(str(row["seed"]), row["arm"], *cells(row))
    if len(rows) > 2:
        for arm in ARMS:
            mine = [r for r in rows if r["arm"] == arm]
            median = {}
            for _, key, form in STUDY_COLUMNS:
                values = [r[key] for r in mine if r.get(key) is not None]
                whole = len(values) == len(mine)  # a median over those that collapsed alone would mislead
                median[key] = (
                    (round if form == "{:d}" else float)(statistics.median(values)) if whole else None
                )
            table.add_row("median", arm, *cells(median))
    console.print(
        table, width=max(console.width, 130), crop=False, soft_wrap=False
    )  # a file or a pipe is given 80 columns
    console.print(
        "collapse: the mean of 8 rewards stays under half of its maximum for 8 steps; '-' = not within the "
        "run."
    )
