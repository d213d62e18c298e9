"""Groups' numbers under their names in ``metrics.jsonl`` (``docs/metrics.md``): ``teachers/latency_p95_s/math``.

A group of several replicas also has the main numbers of each, by its name: ``teachers/latency_p95_s/math.1``.
"""

from __future__ import annotations

from collections.abc import Sequence

from mopd.replicas.router import Router
from mopd.replicas.statistics import GroupNumbers, ReplicaNumbers, percentile

STATES = {"closed": 0.0, "half_open": 1.0, "open": 2.0, "stale": 3.0, "restarting": 4.0, "gone": 5.0}
"""Value of ``breaker/REPLICA``: 0 works, all others do not."""
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class GroupWatch:
    """Reads the routers of a run once per step."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = list(routers)

    def flush(self) -> dict[str, float]:
        """Metric values since the last ``flush``, by their final names."""
        values: dict[str, float] = {}
        for router in self._routers:
            values |= group_values(f"{router.kind}s", router.take_numbers())
        return values


def group_values(room: str, numbers: GroupNumbers) -> dict[str, float]:
    """One group's metrics. ``room`` is ``teachers`` or ``rollouts``."""
    replicas = numbers.replicas
    tokens = sum(replica.num_tokens for replica in replicas)
    values = {
        "samples": float(sum(replica.num_samples for replica in replicas)),
        "tokens": float(tokens),
        "busy_s": numbers.busy_s,
        "queue_depth": float(numbers.queue_depth),
        "queued_tokens": float(numbers.queued_tokens),
        "in_flight_tokens": float(max((replica.in_flight_tokens for replica in replicas), default=0)),
        "retries": float(numbers.retries),
        "hedges": float(numbers.hedges),
        "replicas_up": float(sum(replica.state == "closed" for replica in replicas)),
        "replicas": float(len(replicas)),
        **_latencies(numbers.latencies_s),
    }
    if numbers.busy_s > 0:
        values["tokens_per_s"] = tokens / numbers.busy_s
    if numbers.payload_bytes is not None:
        values["payload_bytes"] = float(numbers.payload_bytes)
    flat = {f"{room}/{metric}/{numbers.name}": value for metric, value in values.items()}
    if len(replicas) > 1:
        for replica in replicas:
            flat |= {f"{room}/{metric}/{replica.name}": value for metric, value in _replica_values(replica).items()}
    return flat


def _replica_values(replica: ReplicaNumbers) -> dict[str, float]:
    values = {
        "samples": float(replica.num_samples),
        "tokens": float(replica.num_tokens),
        "busy_s": replica.busy_s,
        "in_flight_tokens": float(replica.in_flight_tokens),
        "failures": float(replica.failures),
        "busy_answers": float(replica.busy_answers),
        "stale_answers": float(replica.stale_answers),
        "breaker": STATES[replica.state],
        **_latencies(replica.latencies_s),
    }
    if replica.tokens_per_s is not None:
        values["tokens_per_s"] = replica.tokens_per_s
    if replica.payload_bytes is not None:
        values["payload_bytes"] = float(replica.payload_bytes)
    return values


def _latencies(ascending_s: Sequence[float]) -> dict[str, float]:
    if not ascending_s:
        return {}
    return {f"latency_{name}_s": percentile(ascending_s, share) for name, share in PERCENTILES.items()}
