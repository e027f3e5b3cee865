"""Prometheus metrics of one server. Each application has its own registry, so that several can live in one
process.

With several workers the environment variable PROMETHEUS_MULTIPROC_DIR names a folder through which their
numbers are added up.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Names start with `retriever_`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "retriever_requests",
            "Requests answered, by route and HTTP status.",
            ["route", "status"],
            registry=registry,
        )
        self.latency = Histogram(
            "retriever_request_seconds",
            "Time to answer a /retrieve request.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.queries = Counter("retriever_queries", "Queries answered.", registry=registry)
        self.cached = Counter(
            "retriever_cached_queries", "Queries answered from the result cache, or blank.", registry=registry
        )
        self.empty = Counter("retriever_empty_results", "Queries that no passage matched.", registry=registry)
        self.partial = Counter(
            "retriever_partial_results", "Queries answered without all shards.", registry=registry
        )
        self.reloads = Counter(
            "retriever_reloads",
            "Times the index was opened anew: done or failed.",
            ["result"],
            registry=registry,
        )
        self.reload_failing = Gauge(
            "retriever_reload_failing",
            "1 while the last try to open the index anew has failed, and the one before is searched.",
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.queued = Gauge(
            "retriever_queued_queries",
            "Queries waiting or being searched.",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self.refused = Counter(
            "retriever_refused_requests", "Requests refused because the queue was full.", registry=registry
        )
        self.batch_size = Histogram(
            "retriever_batch_queries",
            "Queries searched together.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
            registry=registry,
        )
        self.search = Histogram(
            "retriever_search_seconds",
            "Time of the index for one batch.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.passages = Gauge(
            "retriever_passages",
            "Passages of the index; 0 until it is loaded.",
            multiprocess_mode="livemax",
            registry=registry,
        )

    def page(self) -> bytes:
        """The text that a scrape gets."""
        if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            return generate_latest(self.registry)
        together = CollectorRegistry()
        multiprocess.MultiProcessCollector(together)
        return generate_latest(together)
