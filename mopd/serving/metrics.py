"""What ``/metrics`` shows, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mopd.serving.admission import Admission
from mopd.serving.updates import WeightUpdates

LATENCY_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """One registry per server: several can live in one process."""

    def __init__(self, admission: Admission, updates: WeightUpdates) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "mopd_requests", "Requests by path and HTTP status.", ("path", "status"), registry=self._registry
        )
        self.latency_s = Histogram(
            "mopd_request_seconds",
            "From a request's head to its answer's, by path.",
            ("path",),
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self.scored_tokens = Counter("mopd_scored_tokens", "Response tokens scored.", registry=self._registry)
        self.generated_tokens = Counter("mopd_generated_tokens", "Response tokens drawn.", registry=self._registry)
        self.received_bytes = Counter("mopd_received_bytes", "Bytes of request bodies.", registry=self._registry)
        self.sent_bytes = Counter("mopd_sent_bytes", "Bytes of msgpack answers.", registry=self._registry)
        queued = Gauge("mopd_queued_tokens", "Tokens admitted and not answered.", registry=self._registry)
        queued.set_function(lambda: admission.queued_tokens)
        running = Gauge("mopd_running_requests", "Requests at the engine or waiting for it.", registry=self._registry)
        running.set_function(lambda: admission.num_running)
        version = Gauge("mopd_weight_version", "Version of the weights that answer.", registry=self._registry)
        version.set_function(lambda: updates.weight_version)

    def render(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)
