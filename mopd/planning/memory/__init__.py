"""Bytes of trainer ranks, replicas and hosts."""
