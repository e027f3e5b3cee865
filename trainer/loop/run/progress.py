"""A run's lines on the terminal: a live table where there is one, one plain line per step elsewhere
(`ray job submit`, files)."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from rich.live import Live
from rich.table import Table

from services.common.counting import counted
from services.common.printing.commands import typed
from services.common.printing.console import Console
from services.contracts import Trajectory
from services.likelihood.monitor.alarms import Alarm, worst
from trainer.loop.run import performance

COLUMNS = (
    ("step", "step", "{:d}"),
    ("reward", "reward/mean", "{:.3f}"),
    ("logp right", "logp/right", "{:+.3f}"),
    ("logp wrong", "logp/wrong", "{:+.3f}"),
    ("displacement", "displacement/mean", "{:+.4f}"),
    ("lag probe", "probe/lag", "{:+.3f}"),
    ("LLDS tokens", "llds/active_tokens", "{:.0f}"),
    ("tok/s", "rollout/tokens_per_s", "{:.0f}"),
    ("s/step", "time/step", "{:.1f}"),
    ("phase", "phase", "{}"),
)
LINE = (
    ("step", "step", "{:d}", 4),
    ("reward", "reward/mean", "{:.3f}", 6),
    ("right", "logp/right", "{:+.3f}", 6),
    ("wrong", "logp/wrong", "{:+.3f}", 6),
    ("displ.", "displacement/mean", "{:+.4f}", 7),
    ("lag", "probe/lag", "{:+.3f}", 6),
    ("LLDS", "llds/active_tokens", "{:.0f}", 5),
    ("tok/s", "rollout/tokens_per_s", "{:.0f}", 5),
    ("s/step", "time/step", "{:.1f}", 6),
)
"""The same for files and pipes: short names and a width each, so that lines fit into 80 columns and line
up."""
LEGEND = (
    "right, wrong: mean log-prob per token of right and wrong answers; displ.: what",
    "the update did to it; lag: its change in older right answers; LLDS: tokens held",
)
"""Said once above the lines; docs/metrics.md has the rest."""
RULE = 78
"""Length of the lines around a warning."""
LEFT_WIDTH = 6
ABSENT = {
    "reward/mean": "no trajectory had a reward",
    "logp/right": "no group held a right answer beside others",
    "logp/wrong": "no group held a wrong answer beside others",
    "displacement/mean": "the weights did not move, or were not asked (probe.every)",
    "probe/lag": "there is no right answer of probe.lag_steps steps ago to score again",
    "llds/active_tokens": "no optimiser step was due",
}
"""Why a metric may be missing at a step."""
SHOWN_STEPS = 12
PHASE_STYLE = {
    "unknown": "dim",
    "healthy": "green",
    "recovering": "cyan",
    "stagnation": "yellow",
    "decay": "yellow",
    "acceleration": "red",
    "collapsed": "bold red",
}


def cell(metrics: dict[str, Any], key: str, form: str) -> str:
    value = metrics.get(key)
    return "-" if value is None else form.format(value)


def line(cells: list[str], left: str, phase: str) -> str:
    """One line of the table for files and pipes; the phase stands last, since its length differs."""
    padded = [text.rjust(width) for text, (_, _, _, width) in zip(cells, LINE, strict=True)]
    return f"{' '.join(padded)} {left.rjust(LEFT_WIDTH)} {phase}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


class Progress:
    """Shows steps as they come, what is being done now, and the time left."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self.total = total_steps
        self.console = console or Console()
        self._rows: deque[dict[str, Any]] = deque(maxlen=SHOWN_STEPS)
        self._seconds: deque[float] = deque(maxlen=20)
        self._stage = ""
        self._done = 0
        self._recorded = time.monotonic()
        self._live = (
            Live(console=self.console, refresh_per_second=4, get_renderable=self._render)
            if self.console.is_terminal
            else None
        )
        self._header_shown = False
        self._absent: Counter[str] = Counter()

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it is."""
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line, as it is (paths and errors may hold brackets), but for the commands that it names."""
        self.console.print(
            typed(text),
            style="dim" if self._live else None,
            markup=False,
            highlight=False,
            soft_wrap=not self._live,
        )

    def warn(self, lines: Sequence[str]) -> None:
        """Lines between rules, for what a reader of a long log must not miss."""
        rule = "=" * RULE
        for text in (rule, *map(typed, lines), rule):
            self.console.print(text, style="bold yellow", markup=False, highlight=False, soft_wrap=True)

    def stage(self, name: str, step: int) -> None:
        self._stage = f"step {step}: {name}" if step else f"before the first step: {name}"
        self._done = 0

    @property
    def doing(self) -> str:
        """What is being done now."""
        return self._stage

    def trajectory(self, _: Trajectory) -> None:
        self._done += 1

    def step(self, metrics: dict[str, Any], alarms: list[Alarm], standing: Sequence[Alarm] = ()) -> None:
        """alarms: those raised at this step; standing: all that have not ended."""
        self._rows.append(metrics)
        self._seconds.append(metrics["time/step"])
        self._recorded = time.monotonic()
        if not self._live:
            if not self._header_shown:
                for text in LEGEND:
                    self.say(text)
                self.say(line([name for name, _, _, _ in LINE], "left", "phase"))
                self._header_shown = True
            cells = [cell(metrics, key, form) for _, key, form, _ in LINE]
            self.say(line(cells, self._left(metrics["step"]), cell(metrics, "phase", "{}")))
        self._explain(metrics)
        for alarm in alarms:
            self.say(f"alarm at step {metrics['step']}, {alarm.rule}: {alarm.seen}. {alarm.advice}")
        if alarms and len(standing) > 1 and (first := worst(standing)) is not None:
            self.say(f"{len(standing)} alarms stand; the worst: {first.rule}, since step {first.step}")

    def _explain(self, metrics: dict[str, Any]) -> None:
        """A line about the columns that show `-` for the second time, or in the last row for the first."""
        shown = {key: name for name, key, *_ in (COLUMNS if self._live else LINE)}
        absent = {key: name for key, name in shown.items() if key in ABSENT and metrics.get(key) is None}
        self._absent.update(absent.keys())
        due = (1, 2) if metrics["step"] == self.total else (2,)
        if new := [key for key in absent if self._absent[key] in due]:
            self.say("- is not measured: " + "; ".join(f"{absent[key]}: {ABSENT[key]}" for key in new))

    def evaluation(self, tag: str, mode: str, scores: dict[str, Any]) -> None:
        overall = scores["overall"]
        self.say(
            f"evaluation {tag}, {mode}: EM {overall['em']:.3f}  F1 {overall['f1']:.3f}  "
            f"({counted(overall['n'], 'question')})"
        )

    def performance(self, summary: dict[str, Any]) -> None:
        """The table of where the time went, if the run took a step."""
        if numbers := summary.get("performance"):
            self.console.print(performance.rendered(numbers), highlight=False)

    def _left(self, step: int) -> str:
        """Time for the steps that are left, by what one typically takes: a step that waited for a worker or a
        service does not count for all.

        It runs down while the next step is made."""
        typical = statistics.median_low(self._seconds)
        begun = min(time.monotonic() - self._recorded, typical)
        return duration(max(0.0, typical * (self.total - step) - begun))

    def _render(self) -> Table:
        done = self._rows[-1]["step"] if self._rows else 0
        left = f", {self._left(done)} left" if self._rows else ""
        caption = f"{self._stage}" + (
            f", {counted(self._done, 'trajectory', 'trajectories')}" if self._done else ""
        )
        table = Table(
            title=f"{done} of {self.total} steps done{left}",
            caption=caption,
            title_justify="left",
            caption_justify="left",
            box=None,
        )
        for name, _, _ in COLUMNS:
            table.add_column(name, justify="right")
        for metrics in self._rows:
            cells = [cell(metrics, key, form) for _, key, form in COLUMNS]
            style = PHASE_STYLE.get(str(metrics.get("phase")), "")
            table.add_row(*cells[:-1], f"[{style}]{cells[-1]}[/{style}]" if style else cells[-1])
        return table
