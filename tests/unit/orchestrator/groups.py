"""Groups of engines without servers, and samples' metas, for tests of the workers."""

from __future__ import annotations

from typing import Any

from mopd.base.types import SampleMeta
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


def meta_of(
    sample_id: int, domain: str, weight_version: int = 0, *, prompt: int = 1, response: int = 2, **more: Any
) -> SampleMeta:
    return SampleMeta(
        sample_id=sample_id,
        domain=domain,
        weight_version=weight_version,
        prompt_length=prompt,
        response_length=response,
        num_loss_tokens=response,
        **more,
    )
