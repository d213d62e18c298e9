"""Benchmarks beside plain PyTorch, published styles, released packages and bare engines. Entry: ``mopd bench``."""
