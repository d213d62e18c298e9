"""Metrics of a server, as ``/metrics`` shows them in Prometheus' text format."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from fastapi import Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mopd.serving.admission import Admission
from mopd.serving.errors import Refusal
from mopd.serving.updates import WeightUpdates

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]

LATENCY_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """Counters and gauges of one server, in a registry of their own: several servers can live in one process."""

    def __init__(self, admission: Admission, updates: WeightUpdates) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "mopd_requests", "Requests by path and HTTP status.", ("path", "status"), registry=self._registry
        )
        self._latency_s = Histogram(
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
        for name, text, value in (
            ("mopd_queued_tokens", "Tokens admitted and not answered.", lambda: admission.queued_tokens),
            ("mopd_running_requests", "Requests at the engine or waiting for it.", lambda: admission.num_running),
            ("mopd_weight_version", "Version of the weights that answer.", lambda: updates.weight_version),
        ):
            Gauge(name, text, registry=self._registry).set_function(value)

    def counted(self, path: str, handler: Handler) -> Handler:
        """Wrap ``handler``: count its requests, log its faults and answer them with 500. An exception that reaches
        uvicorn would also close the connection, under the next request."""

        async def count(request: Request) -> Response:
            start = time.monotonic()
            status = 500
            try:
                response = await handler(request)
                status = response.status_code
                return response
            except Refusal as refusal:
                status = refusal.status
                raise
            except Exception:
                logger.exception("%s failed", path)
                return Refusal(500, "internal_error", "a fault of the server: its log has the traceback").response()
            finally:
                self._requests.labels(path, str(status)).inc()
                self._latency_s.labels(path).observe(time.monotonic() - start)

        return count

    def render(self) -> bytes:
        """Return the metrics as text."""
        return generate_latest(self._registry)
