"""Groups of engines without servers, for tests of the workers."""

from __future__ import annotations

from typing import Any

from mopd.config.groups import RoutingConfig
from mopd.engines.replicas.interface import LIMITS, Replica, RouterLimits
from mopd.engines.replicas.router import Router
from mopd.orchestrator.teachers import TeacherGroup
from tests.fixtures.tiny_models import VOCAB_SIZE


def router_of(name: str, *engines: Any, kind: Any = "teacher", **options: Any) -> Router:
    """Return a router whose replicas are called NAME.0, NAME.1, …"""
    replicas = [Replica(name=f"{name}.{i}", engine=engine) for i, engine in enumerate(engines)]
    return Router(name, replicas, RoutingConfig(), kind=kind, **options)


def teacher_of(
    name: str, *engines: Any, limits: RouterLimits = LIMITS, vocab_size: int = VOCAB_SIZE, **options: Any
) -> TeacherGroup:
    return TeacherGroup(name, router_of(name, *engines, limits=limits), vocab_size=vocab_size, **options)
