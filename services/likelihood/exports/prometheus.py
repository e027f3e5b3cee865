"""Metrics for others: Prometheus text of the running service."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from services.likelihood.monitor.alarms import PHASES
from services.likelihood.monitor.detectors.table import READS
from services.likelihood.service import LikelihoodService

ALIVE_SECONDS = 3600
MOST_RUNS = 20


class ServiceMetrics:
    """The service's counters, and gauges of the runs that were posted to within the last hour (20 at most, to
    bound the labels)."""

    def __init__(self, service: LikelihoodService):
        self.service = service
        self.registry = CollectorRegistry()
        self._steps = Counter("unspiral_likelihood_steps", "Steps stored", registry=self.registry)
        self._trajectories = Counter(
            "unspiral_likelihood_trajectories", "Trajectories stored", registry=self.registry
        )
        self._refused = Counter(
            "unspiral_likelihood_refused", "Requests refused", ["status"], registry=self.registry
        )
        self._seconds = Histogram(
            "unspiral_likelihood_post_seconds",
            "Seconds from a step's post to its answer",
            registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10),
        )
        self.registry.register(self)

    def stored(self, trajectories: int, seconds: float) -> None:
        self._steps.inc()
        self._trajectories.inc(trajectories)
        self._seconds.observe(seconds)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> list:
        return []  # the store is not read at registration

    def collect(self) -> Iterator[GaugeMetricFamily]:
        metric = GaugeMetricFamily(
            "unspiral_run_metric", "Latest value of a metric of a run", labels=["run", "name"]
        )
        step = GaugeMetricFamily("unspiral_run_step", "Latest step of a run", labels=["run"])
        phase = GaugeMetricFamily(
            "unspiral_run_phase", "1 for the phase that a run is in", labels=["run", "phase"]
        )
        alarms = GaugeMetricFamily("unspiral_run_alarms", "Alarms of a run that stand", labels=["run"])
        rules = GaugeMetricFamily(
            "unspiral_run_alarm", "1 where the alarm of a rule stands", labels=["run", "rule"]
        )
        for run in self.service.store.runs(MOST_RUNS):
            if run.updated <= time.time() - ALIVE_SECONDS or run.last_step is None:
                continue
            summary = self.service.latest(run.run)
            step.add_metric([run.run], run.last_step)
            alarms.add_metric([run.run], len(summary["alarms"]))
            standing = {alarm["rule"] for alarm in summary["alarms"]}
            for rule in READS:
                rules.add_metric([run.run, rule], float(rule in standing))
            for name in PHASES:
                phase.add_metric([run.run, name], float(name == summary["phase"]))
            for name, value in summary["metrics"].items():
                metric.add_metric([run.run, name], math.nan if value is None else value)
        yield from (metric, step, phase, alarms, rules)
