"""The monitor without a service: `PhaseMonitor().update({"step": 3, "probe/lag": -0.1, ...})` says the phase
and the alarms.

DETECTORS: each rule's class; READS: the metrics that each rule judges by (docs/monitor.md says what they
are). MAPS: the names that verl, TRL, OpenRLHF, SkyRL and slime give to these metrics.
"""

from __future__ import annotations

from services.likelihood.exports.trainers import MAPS, NameMap
from services.likelihood.monitor.alarms import Alarm
from services.likelihood.monitor.detectors.table import DETECTORS, READS
from services.likelihood.monitor.phases import PhaseMonitor, PhaseState
from services.settings import MonitorRules

__all__ = ["DETECTORS", "MAPS", "READS", "Alarm", "MonitorRules", "NameMap", "PhaseMonitor", "PhaseState"]
