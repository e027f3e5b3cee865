"""The phase monitor: names the phase that a run is in and raises alarms, from likelihood before reward.

A pure state machine over the metrics of each step: no clock, no I/O, so that it replays over any recorded
run. It stands on detectors (`detectors/table.py`), one for each rule. The order of phases is that of arXiv
2512.04220 (I stagnation, II decay, III acceleration, collapse); the paper gives no numeric rule, so the rules
are ours. Reward decides over `collapsed` alone, and over the name `stagnation`, which raises no alarm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import UserError
from services.likelihood.monitor.alarms import TROUBLE, Alarm, Phase, Rule
from services.likelihood.monitor.detectors.base import Rising
from services.likelihood.monitor.detectors.learning.acceleration import Acceleration
from services.likelihood.monitor.detectors.learning.collapse import Collapse
from services.likelihood.monitor.detectors.learning.likelihood import Likelihood
from services.likelihood.monitor.detectors.learning.nonfinite import Nonfinite
from services.likelihood.monitor.detectors.table import INDEPENDENT, READS
from services.likelihood.monitor.earlier_state import upgraded
from services.likelihood.monitor.readings import Readings
from services.likelihood.monitor.signs import Signs
from services.likelihood.monitor.watch import number
from services.settings import MonitorRules

READ = {name for names in READS.values() for name in names}


@dataclass
class PhaseState:
    """What the monitor says after a step."""

    step: int
    phase: Phase
    since: int
    """Step at which the phase began."""
    alarms: list[Alarm] = field(default_factory=list)
    """Raised at this step."""
    cleared: list[Alarm] = field(default_factory=list)
    """Ended at this step."""
    active: list[Alarm] = field(default_factory=list)
    """All that stand, those of this step included."""


class PhaseMonitor:
    """Feed it the metrics of every step, in order: `update(metrics)`. Metrics that are missing or None are
    tolerated."""

    SCALARS = ("step", "phase", "since", "flat", "calm", "fast")

    def __init__(self, rules: MonitorRules | None = None):
        self.rules = rules or MonitorRules()
        self.readings = Readings(self.rules.silence_steps)
        self.signs = Signs(self.rules)
        self.likelihood = Likelihood(self.rules, self.signs)
        self.acceleration = Acceleration(self.rules, self.signs, self.likelihood)
        self.collapse = Collapse(self.rules)
        self.nonfinite = Nonfinite(self.rules)
        self.independent: dict[Rule, Rising] = {rule: made(self.rules) for rule, made in INDEPENDENT.items()}
        self.independent["collapse"] = self.collapse
        self.independent["nonfinite"] = self.nonfinite
        self.detectors: dict[Rule, Rising] = {
            "likelihood": self.likelihood,
            "acceleration": self.acceleration,
            **self.independent,
        }
        self.step = -1
        self.phase: Phase = "unknown"
        self.since = 0
        self.flat = 0
        """Steps of slow slip while reward holds, at most `patience`."""
        self.calm = 0
        """Steps running without a sign, after trouble."""
        self.fast = 0
        """Steps for which a fall still counts as fast."""
        self.open: dict[Rule, Alarm] = {}
        self.counts: dict[str, int] = {}
        """Values so far of each metric that a rule reads."""

    def update(self, metrics: Mapping[str, Any]) -> PhaseState:
        """metrics: the step's, by the names of docs/monitor.md, with `step`; without it steps are counted.
        After a step that is not above the one before (a resumed run, or two runs in one), `healthy` is earned
        anew. Raises UserError for a step that is no whole number."""
        step = self._step_of(metrics)
        if step <= self.step:
            self.signs.again()
        self.step = step
        metrics = self.readings.possible(metrics)
        for name in READ & metrics.keys():
            self.counts[name] = self.counts.get(name, 0) + (number(metrics[name]) is not None)
        self.signs.update(step, metrics, in_trouble=self.phase in TROUBLE)
        standing = {rule: d.update(step, metrics) for rule, d in self.independent.items()}
        phase = self._next_phase()
        if phase != self.phase:
            self.phase = phase
            self.since = step
        # After the phase is known: both are rules about the phase.
        for detector in (self.likelihood, self.acceleration):  # their alarms stand through a collapse
            detector.phase = phase
            standing[detector.rule] = detector.update(step, metrics)
        raised, cleared = self._changes(step, standing)
        # What the frozen answers have lost stays lost, and must not raise the same alarm again.
        if any(alarm.rule == "likelihood" for alarm in cleared):
            self.signs.settle(step)
        return PhaseState(step, self.phase, self.since, raised, cleared, list(self.open.values()))

    def undecided(self, later: Collection[str] = ()) -> dict[Rule, str]:
        """The rules that cannot judge the run yet, each with the reason: they have seen no sign, and could
        not have seen one. later: metrics of which one more value is known, that came after the last step: it
        is counted, and where it is the one that lacked, that is said."""
        if self.step >= 0 and not self.counts:  # the state of an earlier version, which did not count
            return {}
        found = {rule: detector.undecided(self.counts) for rule, detector in self.detectors.items()}
        undecided = {rule: why for rule, why in found.items() if why}
        if later and undecided:
            known = {**self.counts, **{name: self.counts.get(name, 0) + 1 for name in later}}
            for rule, why in undecided.items():
                with_it = self.detectors[rule].undecided(known)
                undecided[rule] = with_it or f"{why}; one more came after the last step"
        return undecided

    def _step_of(self, metrics: Mapping[str, Any]) -> int:
        step = metrics.get("step")
        if step is None:
            return self.step + 1
        found = number(step)
        if found is None or not found.is_integer():
            raise UserError(f"step: {step!r}; expected a whole number")
        return int(found)

    def _next_phase(self) -> Phase:
        r = self.rules
        slow = self.signs.watches["slow"]
        # From the worst down: the first that holds names the phase.
        if self.collapse.stands() or self.nonfinite.stands():
            self.calm = 0
            return "collapsed"
        if self.signs.falling:
            self.calm = 0
            # A fall stays fast for some steps after its last fast one, or the phase would flicker.
            self.fast = r.clear_patience if self.signs.fast else max(0, self.fast - 1)
            return "acceleration" if self.fast else "decay"
        self.fast = 0
        if self.phase in TROUBLE or self.phase == "recovering":
            self.calm += 1
            # Trouble is never left straight for `healthy`: a slow slip that goes on is no recovery.
            if self.calm <= r.recover_steps or slow.active:
                return "recovering"
        slips = slow.active and self.collapse.reward_holds
        # Counted down, not set to 0: one step without a slip may be noise.
        self.flat = min(self.flat + 1, r.patience) if slips else max(self.flat - 1, 0)
        if self.flat >= r.patience or (self.phase == "stagnation" and self.flat > 0):
            return "stagnation"
        return "healthy" if self.signs.judged else "unknown"

    def _changes(self, step: int, standing: Mapping[Rule, Alarm | None]) -> tuple[list[Alarm], list[Alarm]]:
        """Alarms that were raised and that ended at this step, in the order of the table."""
        raised = []
        cleared = []
        for rule in self.detectors:
            alarm = standing[rule]
            if alarm is not None and rule not in self.open:
                alarm.phase = self.phase
                self.open[rule] = alarm
                raised.append(alarm)
            elif alarm is None and rule in self.open:
                ended = self.open.pop(rule)
                ended.cleared = step
                cleared.append(ended)
        return raised, cleared

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            **{k: getattr(self, k) for k in self.SCALARS},
            "doubted": self.readings.state_dict(),
            "signs": self.signs.state_dict(),
            "detectors": {rule: d.state_dict() for rule, d in self.detectors.items()},
            "open": list(self.open),
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, of this version or an earlier one. A detector that the state does
        not know begins anew."""
        state = upgraded(state)
        for key in self.SCALARS:
            setattr(self, key, state[key])
        self.readings.doubted = dict(state.get("doubted", {}))  # earlier versions doubted nothing
        self.signs.load_state_dict(state["signs"])
        for rule, detector in self.detectors.items():
            if rule in state["detectors"]:
                detector.load_state_dict(state["detectors"][rule])
        if "seen" not in state["signs"]:  # earlier versions
            self.signs.take_up(self.step, self.collapse.window.values)
        standing = {rule: self.detectors[rule].alarm for rule in state["open"]}
        self.counts = dict(state.get("counts", {}))  # earlier versions did not count
        self.open = {rule: alarm for rule, alarm in standing.items() if alarm is not None}
