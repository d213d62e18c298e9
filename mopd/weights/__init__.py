"""Tensors from one process to many over a process group of their own, in buckets."""
