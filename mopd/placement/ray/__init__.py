"""Servers and samples on a Ray cluster; one connection of this process serves both."""

from mopd.placement.ray.cluster import RayCluster

__all__ = ["RayCluster"]
