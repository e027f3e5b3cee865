"""Prometheus text of a served agent."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from services.agent.places import Places
from services.contracts import Trajectory

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
"""Bounds of the histogram of answers."""


class AgentMetrics:
    """Counters of what was answered, and gauges of what is in work."""

    def __init__(self, places: Places) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"unspiral_agent_{name}", text, labels, registry=self._registry)

        self.refused = counter("refused", "Requests refused", "status")
        self._questions = counter("questions", "Questions answered, by how they ended", "finish")
        self._tokens = counter("tokens", "Tokens that the model wrote")
        self._searches = counter("searches", "Searches that were carried out")
        self._seconds = Histogram(
            "unspiral_agent_seconds", "Seconds of an answer", buckets=SECONDS, registry=self._registry
        )
        running = Gauge("unspiral_agent_running", "Questions in work", registry=self._registry)
        running.set_function(lambda: places.running)
        waiting = Gauge("unspiral_agent_waiting", "Questions that wait", registry=self._registry)
        waiting.set_function(lambda: places.waiting)

    def answered(self, trajectory: Trajectory, seconds: float) -> None:
        self._questions.labels(trajectory.finish).inc()
        self._tokens.inc(sum(len(a.token_ids) for a in trajectory.actions))
        self._searches.inc(trajectory.searches)
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
