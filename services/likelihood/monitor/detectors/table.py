"""The one table of detectors. Those of the fall (`likelihood`, `acceleration`) share the monitor's signs, and
come after the phase; all others are independent of one another."""

from __future__ import annotations

from services.likelihood.monitor.alarms import Rule
from services.likelihood.monitor.detectors.base import Rising
from services.likelihood.monitor.detectors.learning.acceleration import Acceleration
from services.likelihood.monitor.detectors.learning.collapse import Collapse
from services.likelihood.monitor.detectors.learning.entropy_high import EntropyHigh
from services.likelihood.monitor.detectors.learning.entropy_low import EntropyLow
from services.likelihood.monitor.detectors.learning.gradient import Gradient
from services.likelihood.monitor.detectors.learning.leak import Leak
from services.likelihood.monitor.detectors.learning.likelihood import Likelihood
from services.likelihood.monitor.detectors.learning.mismatch import Mismatch
from services.likelihood.monitor.detectors.learning.nonfinite import Nonfinite
from services.likelihood.monitor.detectors.learning.silent_llds import SilentLLDS
from services.likelihood.monitor.detectors.rollouts.control_tokens import ControlTokens
from services.likelihood.monitor.detectors.rollouts.dead_batch import DeadBatch
from services.likelihood.monitor.detectors.rollouts.degenerate_groups import DegenerateGroups
from services.likelihood.monitor.detectors.rollouts.garbage import Garbage
from services.likelihood.monitor.detectors.rollouts.interaction import Interaction
from services.likelihood.monitor.detectors.rollouts.length import Length
from services.likelihood.monitor.detectors.rollouts.no_reward import NoReward
from services.likelihood.monitor.detectors.rollouts.retrieval import Retrieval
from services.likelihood.monitor.detectors.rollouts.reward_gap import RewardGap
from services.likelihood.monitor.detectors.rollouts.truncation import Truncation
from services.likelihood.monitor.detectors.rollouts.validity import Validity

INDEPENDENT: dict[Rule, type[Rising]] = {
    "collapse": Collapse,
    "leak": Leak,
    "nonfinite": Nonfinite,
    "dead_batch": DeadBatch,
    "no_reward": NoReward,
    "gradient": Gradient,
    "entropy_low": EntropyLow,
    "entropy_high": EntropyHigh,
    "interaction": Interaction,
    "validity": Validity,
    "mismatch": Mismatch,
    "degenerate_groups": DegenerateGroups,
    "truncation": Truncation,
    "length": Length,
    "retrieval": Retrieval,
    "garbage": Garbage,
    "control_tokens": ControlTokens,
    "reward_gap": RewardGap,
    "silent_llds": SilentLLDS,
}
DETECTORS: dict[Rule, type[Rising]] = {
    "likelihood": Likelihood,
    "acceleration": Acceleration,
    **INDEPENDENT,
}
READS: dict[Rule, tuple[str, ...]] = {rule: detector.reads for rule, detector in DETECTORS.items()}
"""Metrics that each rule judges by."""
